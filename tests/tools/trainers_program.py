"""`python tests/tools/trainers_program.py FOLDER`: trains by MaxText, alone and with this library.

test_trainers.py calls it, in an environment of its own (setup/trainers.sh), on 4 CPU devices. It writes found.json:
the losses of each run, what ran its products, what was refused, and how far levanter's experts are from the adapter's.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pathlib
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

os.environ |= {"DECOUPLE_GCLOUD": "TRUE", "HF_HUB_OFFLINE": "1"}

import jax
import maxtext
import numpy as np
from jax.sharding import PartitionSpec as P
from levanter.grug import grug_moe
from maxtext.common.metric_logger import MetricLogger
from maxtext.trainers.pre_train import train

from overlap.frame.explain import recorded
from overlap.trainers import levanter
from overlap.trainers import maxtext as ours

FOLDER = pathlib.Path(sys.argv[1])
BASE = str(pathlib.Path(next(iter(maxtext.__path__))) / "configs" / "base.yml")
COMMON = f"""
    run_name=test base_output_directory={FOLDER} hardware=cpu skip_jax_distributed_system=true dataset_type=synthetic
    enable_checkpointing=false enable_goodput_recording=false enable_tensorboard=false attention=dot_product
    base_emb_dim=128 base_num_query_heads=4 base_num_kv_heads=4 base_mlp_dim=128 base_num_decoder_layers=2 head_dim=16
    vocab_size=256 max_target_length=32 per_device_batch_size=2
""".split()
MIXTRAL = ["decoder_block=mixtral", "num_experts=4", "num_experts_per_tok=2", "base_moe_mlp_dim=128", "megablox=false"]
_EXPERTS = MIXTRAL[1:]
MODELS = {
    "llama": [],
    "fused weights": ["fused_mlp=true", "fused_qkv=true"],
    "mixtral": MIXTRAL,
    "balance loss": [*MIXTRAL, "load_balance_loss_weight=0.1"],
    "qwen3_moe": ["decoder_block=qwen3_moe", *_EXPERTS, "norm_topk_prob=true", "use_qk_norm=true"],
    "gpt_oss": [
        *("decoder_block=gpt_oss", *_EXPERTS, "mlp_bias=true", "routed_bias=true", "mlp_activations_limit=7.0"),
        *("inhomogeneous_layer_cycle_interval=2", "attention_sink=true", "sliding_window_size=16"),
    ],
    "deepseek": [
        *("decoder_block=deepseek", *_EXPERTS, "first_num_dense_layers=1", "shared_experts=1", "attention_type=mla"),
        *("q_lora_rank=32", "kv_lora_rank=32", "qk_nope_head_dim=16", "qk_rope_head_dim=16", "v_head_dim=16"),
    ],
}
# Each is refused by the field that it names.
REFUSED = {
    "quantization": ["quantization=int8"],
    "weight_dtype": ["weight_dtype=float8_e4m3fn"],
    "matmul_precision": ["matmul_precision=highest"],
    "shard_mode": ["shard_mode=explicit"],
    "custom_mesh_and_rule": ["custom_mesh_and_rule=ep-as-cp"],
    "dcn_pipeline_parallelism": ["ici_pipeline_parallelism=2"],
    "dcn_context_parallelism": ["ici_context_parallelism=2"],
    "dcn_fsdp_transpose_parallelism": ["ici_fsdp_transpose_parallelism=2"],
    "sparse_matmul": [*MIXTRAL, "sparse_matmul=false"],
    "use_2d_fsdp_sharding": [*MIXTRAL, "use_2d_fsdp_sharding=true"],
    "num_experts": [*MIXTRAL, "num_experts=6", "ici_tensor_parallelism=4"],
    "logical_axis_rules": ["logical_axis_rules=[]"],
}
losses: list[float] = []
_write = MetricLogger.write_metrics


def _noting(self: Any, metrics: Any, *args: Any, **keywords: Any) -> Any:
    losses.append(float(metrics["scalar"]["learning/loss"]))
    return _write(self, metrics, *args, **keywords)


def trained(steps: int, dtype: str, model: str, *argv: str, by: str | None = "ours") -> dict[str, Any]:
    """Trains, and returns the losses and how often each operation was traced forward, by what ran it.

    `by`: "alone" is MaxText by itself; else the implementation, where "ours" is the default.
    """
    losses.clear()
    start = time.perf_counter()
    given = [BASE, *COMMON, f"steps={steps}", f"dtype={dtype}", *MODELS[model], *argv]
    if by == "alone":
        with recorded() as found:
            train.main(["train", *given])
    else:
        found = ours.run(given, None if by == "ours" else by)
    forward = [choice for choice in found if "backward" not in choice.plan + choice.reason]
    counts = Counter(f"{choice.op} {choice.implementation}" for choice in forward)
    print(model, argv, by, losses, f"{time.perf_counter() - start:.0f} s", flush=True)
    return {"losses": list(losses), "counts": counts, "fused": [c.implementation == "fused" for c in found]}


def refused(argv: Sequence[str]) -> str:
    """The message with which the command ends."""
    try:
        ours.main([BASE, *COMMON, "steps=1", *argv])
    except SystemExit as end:
        return str(end.code)
    return ""


def experts_of_levanter() -> list[float]:
    """The largest differences between levanter's own function and the adapter: the result, then each gradient."""
    rng = np.random.default_rng(0)
    tokens, hidden, features, experts, k = 32, 128, 64, 4, 2
    along = P(("data", "expert"))
    at = P("expert", "data")
    chosen = np.argsort(rng.random((tokens, experts)), -1)[:, :k].astype(np.int32)
    operands = {
        "x": (rng.standard_normal((tokens, hidden)), along),
        "combine_weights": (rng.random((tokens, k)), along),
        "w_up_gate": (rng.standard_normal((experts, hidden, 2 * features)) / hidden**0.5, at),
        "w_down": (rng.standard_normal((experts, features, hidden)) / features**0.5, at),
    }
    with jax.set_mesh(jax.make_mesh((2, 2), ("data", "expert"))):
        placed = {name: jax.device_put(value.astype(np.float32), spec) for name, (value, spec) in operands.items()}
        ids = jax.device_put(chosen, along)

        def both(moe_mlp: Any, **keywords: Any) -> Any:
            def total(operands: Any) -> Any:
                out = moe_mlp(selected_experts=ids, **operands, **keywords)
                return (out**2).sum(), out

            (_, out), grads = jax.jit(jax.value_and_grad(total, has_aux=True))(placed)
            return {"out": out, **grads}

        # A factor of the number of devices: nothing is dropped.
        theirs = both(grug_moe.moe_mlp, implementation="ring_gather_combine", capacity_factor=4.0)
        found = both(levanter.moe_mlp)
    assert all(np.abs(np.asarray(x)).max() > 0.1 for x in theirs.values())
    return [float(np.abs(np.asarray(found[name]) - np.asarray(theirs[name])).max()) for name in found]


def main() -> None:
    """Runs everything."""
    MetricLogger.write_metrics = _noting
    found: dict[str, Any] = {"levanter": experts_of_levanter()}
    found["refused"] = {name: refused(argv) for name, argv in REFUSED.items()}
    two, four = "ici_tensor_sequence_parallelism=2", "ici_tensor_parallelism=2"
    for model, axes in (("llama", [four]), ("mixtral", [four, "ici_expert_parallelism=2"])):
        found[model] = {
            "alone": trained(20, "float32", model, by="alone"),
            "tensor_sequence": trained(20, "float32", model, two),
            "tensor": trained(20, "float32", model, *axes),
            "bfloat16, alone": trained(2, "bfloat16", model, by="alone"),
            "bfloat16, fused": trained(2, "bfloat16", model, two, by="fused"),
        }
    for model in ("balance loss", "qwen3_moe", "gpt_oss", "deepseek"):
        # With tensor=4 each device has all tokens, so MaxText alone takes the balance loss of all.
        whole = ["ici_tensor_parallelism=4"] if model == "balance loss" else []
        found[model] = {
            "alone": trained(3, "float32", model, *whole, by="alone"),
            "tensor_sequence": trained(3, "float32", model, two),
        }
    # With fused_qkv MaxText's losses depend on the mesh, so both have the same.
    found["fused weights"] = {
        "alone": trained(3, "float32", "fused weights", two, by="alone"),
        "tensor": trained(3, "float32", "fused weights", four),
    }
    found["experts on every device"] = {
        "alone": found["mixtral"]["alone"], "fsdp": trained(20, "float32", "mixtral")
    }  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
        ours.main([BASE, *COMMON, "steps=1", two, "overlap_implementation=xla", "overlap_explain=true"])
    found["printed"] = printed.getvalue()
    (FOLDER / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
