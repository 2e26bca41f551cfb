"""MaxText's training with the products of this library: `python -m overlap.trainers.maxtext CONFIG key=value …`.

The arguments are those of `python -m maxtext.trainers.pre_train.train`; `overlap_implementation=fused` or `=xla` forces
one, and `overlap_explain=true` prints in the end what ran each product. While MaxText trains, names in it are replaced:

    DenseGeneral.quant_dot_general   a kernel that tensor-parallel mesh axes cut, by the logical axes of its dimensions,
                                     is multiplied by `overlap.sharded_matmul`: rows are gathered if the last dimensions
                                     of the kernel are cut, and sums are scattered if its first ones are
    RoutedMoE.sparse_matmul          the experts, after MaxText's own router
    train.initialize                 checks the configuration once it is complete
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import math
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import overlap
from overlap.frame import mesh_axes
from overlap.frame.explain import Explanations, recorded
from overlap.layers import ShardedDotGeneral
from overlap.sharded import partitions
from overlap.sharded.experts import routed_mlp

VERSION = "0.2.5"
TENSOR = ("tensor", "tensor_sequence")
EXPERTS = ("expert", *TENSOR)
_SERVED = ("data", "fsdp", *EXPERTS)
_BETWEEN = ("activation_batch", "activation_norm_length", None)
# Instead of MaxText's rules: "tensor" cuts rows between layers, as "tensor_sequence" does, and both share the experts.
_ROWS = [*TENSOR, "context"]
RULES = {
    "activation_norm_length": _ROWS, "activation_norm_length_moe": _ROWS, "activation_input_length_attn": _ROWS,
    "activation_embed": [], "activation_embed_attn": [], "activation_embed_moe": [], "norm": [],
    "exp": [*EXPERTS], "mlp_moe": [],
}  # fmt: skip
# What fields of the configuration must be.
_FIELDS = {
    "quantization": "", "matmul_precision": "default", "shard_mode": "auto", "custom_mesh_and_rule": "",
    "te_comm_gemm_overlap": "disabled",
}  # fmt: skip
_FIELDS_OF_EXPERTS = {
    "sparse_matmul": True, "te_moe_block": False, "use_random_routing": False, "ragged_buffer_factor": -1,
    "routed_bias_update_rate": 0, "moe_use_megatron_seq_aux_loss": False, "shard_exp_on_fsdp": False,
    "use_2d_fsdp_sharding": False, "use_batch_split_schedule": False,
}  # fmt: skip
# Models whose experts are no gated sums of what the router chooses.
_OTHER_EXPERTS = ("llama4", "gemma4", "gemma4_small", "deepseek4")


class NotServed(ValueError):
    """Something that this command does not serve; the message names it."""

    def __init__(self, what: str, must: str, found: object, way_out: str = "leave it out, or train by MaxText alone"):
        super().__init__(f"overlap.trainers.maxtext: {what} must be {must}, got {found!r}: {way_out}")


def run(argv: Sequence[str], implementation: str | None = None) -> Explanations:
    """Trains as MaxText's command does with the arguments `argv`.

    Returns:
      What runs each product, as `overlap.explain` says it. A product counts as often as MaxText traces it.

    Raises:
      NotServed: MaxText is missing or has another version, or the configuration has what is not served.

    Examples:
      >>> print(run(["base.yml", "run_name=a", "ici_tensor_parallelism=4", "ici_fsdp_parallelism=1", "steps=3"]))
    """
    try:
        version = importlib.metadata.version("maxtext")
    except importlib.metadata.PackageNotFoundError:
        version = None
    if version != VERSION:
        raise NotServed("the installed MaxText", VERSION, version, f"pip install maxtext=={VERSION}")
    if implementation not in ("fused", "xla", None):
        raise NotServed("overlap_implementation", "fused or xla", implementation, "leave it out")
    for word in argv:
        if word.split("=")[0] in ("logical_axis_rules", "override_logical_axis_rules"):
            raise NotServed(word.split("=")[0], "left to this command", word)
    train, linears, moe = (
        importlib.import_module(f"maxtext.{name}")
        for name in ("trainers.pre_train.train", "layers.linears", "layers.moe")
    )
    initialize = train.initialize

    def checked(argv: Sequence[str]) -> Any:
        config, recorder = initialize(argv)
        check(config)
        return config, recorder

    def dot_general(self: Any) -> Any:
        kernel, between = _specs(self.kernel_axes, _BETWEEN)
        found = shardings_of(kernel, len(self.axis), between)
        return None if found is None else functools.partial(_product, found, implementation)

    rules = ",".join(f"[{name},[{','.join(axes)}]]" for name, axes in RULES.items())
    with contextlib.ExitStack() as restored, recorded() as found:
        for owner, name, value in (
            (train, "initialize", checked),
            (linears.DenseGeneral, "quant_dot_general", property(dot_general)),
            (moe.RoutedMoE, "sparse_matmul", functools.partialmethod(_sparse_matmul, implementation)),
        ):
            restored.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        train.main(["train", *argv, f"logical_axis_rules=[{rules}]"])
    return Explanations(found)


def check(config: Any) -> None:
    """Raises `NotServed` if a configuration, an object with MaxText's fields, has what is not served."""
    has_experts = config.num_experts > 1
    for name, must in (_FIELDS | (_FIELDS_OF_EXPERTS if has_experts else {})).items():
        found = getattr(config, name)
        found = getattr(found, "value", found)  # Of an enumeration.
        if (found or type(must)()) != must:
            raise NotServed(name, repr(must), found)
    if "float8" in str(config.weight_dtype):
        raise NotServed("weight_dtype", "float32 or bfloat16, since quantised products are not served",
                        str(config.weight_dtype))  # fmt: skip
    block = getattr(config.decoder_block, "value", config.decoder_block)
    if has_experts and block in _OTHER_EXPERTS:
        raise NotServed("decoder_block", f"none of {', '.join(_OTHER_EXPERTS)}", block, "train it by MaxText alone")
    sizes = [*zip(config.mesh_axes, config.ici_parallelism, config.dcn_parallelism, strict=True)]
    devices = math.prod(ici * dcn for axis, ici, dcn in sizes if axis in EXPERTS)
    if has_experts and config.num_experts % devices:
        raise NotServed("num_experts", f"a multiple of the {devices} devices along {', '.join(EXPERTS)}",
                        config.num_experts, "share devices along fsdp instead")  # fmt: skip
    for axis, ici, dcn in sizes:
        if axis not in _SERVED and (ici, dcn) != (1, 1):
            field = "pipeline" if axis == "stage" else axis
            raise NotServed(f"ici_ and dcn_{field}_parallelism", "1", (ici, dcn), f"share devices along {_SERVED}")


def _specs(*logical: Sequence[str | None]) -> list[P]:
    """The partition of arrays whose dimensions have these logical axes, by MaxText's rules in use."""
    translate = importlib.import_module("maxtext.utils.sharding").logical_to_mesh_axes
    found = [translate(tuple(names), jax.sharding.get_abstract_mesh()) for names in logical]
    return [P(*spec, *[None] * (len(names) - len(spec))) for spec, names in zip(found, logical, strict=True)]


def shardings_of(kernel: P, contracted: int, between: P) -> tuple[P, P, P] | None:
    """The partitions of input, kernel and result of a product; None if no tensor-parallel axis cuts the kernel.

    Args:
      kernel: the partition of the kernel, with an entry for each dimension.
      contracted: how many dimensions are contracted: the first ones of the kernel, the last ones of the input.
      between: P(batch, rows, None), the partition of activations between layers.
    """
    cut = [tuple(axis for axis in part if axis in TENSOR) for part in mesh_axes.axes_of_spec(kernel)]
    if not any(cut):
        return None
    inwards, outwards = mesh_axes.spec(cut[:contracted]), mesh_axes.spec(cut[contracted:])
    batch, rows, _ = between
    if any(cut[contracted:]):
        return P(batch, rows, *[None] * contracted), kernel, P(batch, None, *outwards)
    return P(batch, None, *inwards), kernel, P(batch, rows, *[None] * len(outwards))


def _product(shardings: tuple[P, P, P], implementation: Any, x: jax.Array, kernel: jax.Array,
             dimension_numbers: Any, **_: Any) -> jax.Array:  # fmt: skip
    """The product of x [batch, rows, *k] and kernel [*k, *n]: [batch, rows, *n]."""
    of_x, of_kernel, of_out = shardings
    if x.ndim != len(of_x):
        return lax.dot_general(x, kernel, dimension_numbers)
    if len(of_out) == 4 and of_out[1] is of_out[2] is None and of_out[3] is not None:
        # fused_mlp: gate and up are one kernel [k, 2, n], cut along n. Two right operands share one gather.
        several = overlap.sharded_matmul(
            x, [kernel[:, i] for i in range(kernel.shape[1])], lhs_sharding=of_x, rhs_sharding=P(*of_kernel[::2]),
            out_sharding=P(of_out[0], None, of_out[3]), implementation=implementation,
        )  # fmt: skip
        return jnp.stack(several, axis=2)
    return ShardedDotGeneral(*shardings, implementation=implementation)(x, kernel, dimension_numbers)


def _sparse_matmul(
    self: Any, implementation: Any, inputs: jax.Array, gate_logits: jax.Array,
    pre_bias_logits: jax.Array | None, *weights: jax.Array | None, input_ids: jax.Array | None = None,
    forced_routed_experts: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None, None]:  # fmt: skip
    """`RoutedMoE.sparse_matmul` of inputs [batch, rows, H] and the router's logits [batch, rows, E].

    Returns the experts' sums; the balance loss of all tokens, where MaxText alone takes those of one device; and None.
    """
    if forced_routed_experts is not None:
        raise NotServed("forced_routed_experts", "None", "an array")
    mesh = jax.sharding.get_abstract_mesh()
    axis = tuple(axis for axis in EXPERTS if mesh.shape[axis] > 1)
    tokens, wi, wo = _specs(_BETWEEN, self.wi_kernel_axes, self.wo_kernel_axes)
    names = ("gate", "up", "down", "gate.bias", "up.bias", "down.bias")
    given = {name: w.astype(inputs.dtype) for name, w in zip(names, weights, strict=True) if w is not None}
    specs = {name: P(axis or None, None) for name in names} | {"x": tokens}
    specs |= {name: P(axis or None, *of[1:]) for name, of in (("gate", wi), ("up", wi), ("down", wo))}
    logits = {"gate": gate_logits} | ({} if pre_bias_logits is None else {"before": pre_bias_logits})
    # Each device chooses for its own tokens: XLA's partitioner would gather the logits of all for `lax.top_k`.
    choose = partitions.on_parts(
        lambda parts: self.get_topk(parts["gate"], parts.get("before")), mesh, dict.fromkeys(logits, tokens), tokens
    )
    gates, chosen = choose(logits)
    loss = None
    if self.config.load_balance_loss_weight > 0:
        probabilities = jax.nn.softmax([*logits.values()][-1].astype(jnp.float32))
        loss = self.load_balance_loss(chosen, probabilities.astype(self.dtype))
    given |= {"x": inputs, "chosen": chosen, "gates": gates}
    how = {"activation": self.apply_ffn_activation, "implementation": implementation}
    return routed_mlp(given, specs, axis, mesh, **how)[0], loss, None


def main(argv: Sequence[str]) -> None:
    """Runs the command."""
    own = dict(word.split("=", 1) for word in argv if word.startswith("overlap_"))
    if unknown := own.keys() - {"overlap_implementation", "overlap_explain"}:
        sys.exit(f"overlap.trainers.maxtext: there are overlap_implementation= and overlap_explain=, and no {unknown}")
    if (explains := own.get("overlap_explain", "false").lower()) not in ("true", "false"):
        sys.exit(f"overlap.trainers.maxtext: overlap_explain must be true or false, got {explains!r}: leave it out")
    words = [word for word in argv if not word.startswith("overlap_")]

    def command(_: Sequence[str]) -> None:
        try:
            found = run(words, own.get("overlap_implementation"))
        except NotServed as reason:
            sys.exit(str(reason))
        if explains == "true":
            print(found)

    if importlib.util.find_spec("absl") is None:  # There is no MaxText either, as `run` says.
        command(())
    else:  # As MaxText's own command does, so that its log is seen.
        importlib.import_module("absl.app").run(command, argv=["overlap.trainers.maxtext"])


if __name__ == "__main__":
    main(sys.argv[1:])
