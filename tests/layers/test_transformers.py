"""Weights of real checkpoints: tiny models of transformers, which compute with torch on the CPU, against our layers."""

from __future__ import annotations

import pathlib
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from overlap import layers
from tests.layers.router_cases import gpt_oss_activation
from tests.meshes import make_mesh

pytestmark = [pytest.mark.slow, pytest.mark.one_jax, pytest.mark.timeout(1800)]
ROOT = pathlib.Path(__file__).resolve().parents[2]
ENVIRONMENT = ROOT / "build" / "transformers-env"
PACKAGES = "torch==2.13.0", "transformers==5.23.0", "safetensors==0.8.0"
EXPERTS = {"mixtral": "block_sparse_moe", "qwen3_moe": "mlp", "gpt_oss": "mlp"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with what `transformers_program.py` writes. The first time 3 GB of packages are installed."""
    python = ENVIRONMENT / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", ENVIRONMENT], check=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
    folder = tmp_path_factory.mktemp("models")
    subprocess.run([python, ROOT / "tests" / "layers" / "transformers_program.py", folder], check=True)
    return folder


def near(out: Any, right: np.ndarray) -> bool:
    return bool(np.linalg.norm(np.asarray(out, np.float64) - right) < 1e-5 * np.linalg.norm(right))


def run(layer: nnx.Module, x: np.ndarray) -> Any:
    placed = jax.device_put(x, jax.NamedSharding(jax.sharding.get_mesh(), jax.P(None, "x")))
    return nnx.jit(lambda layer, x: layer(x))(layer, placed)


@pytest.mark.parametrize("name", EXPERTS)
def test_experts(name: Any, models: pathlib.Path) -> None:
    """From the file, and from the tensors that the model holds in memory."""
    of = np.load(models / f"{name}.npz")
    experts, *sizes = of["memory:experts.down_proj"].shape
    inner = sizes[0] if name == "gpt_oss" else sizes[1]
    more: dict[str, Any] = {}
    if name == "gpt_oss":
        more = {"use_bias": True, "router_bias": True, "activation": gpt_oss_activation, "router": layers.TopKSoftmax()}
    with jax.set_mesh(make_mesh(x=2)):
        made = lambda: layers.ExpertMLP(32, inner, experts, 2, axis="x", rngs=nnx.Rngs(0), **more)  # noqa: E731
        layer, of_memory = made(), made()
        assert not near(run(layer, of["x"])[0], of["out"])
        with layers.open_checkpoint(models / name) as tensors:
            layers.load_weights({f"model.layers.0.{EXPERTS[name]}": layer}, tensors, experts=name)
        assert near(run(layer, of["x"])[0], of["out"])
        held = {key.replace("memory:", "h."): of[key] for key in of.files if key.startswith("memory:")}
        layers.load_weights({"h": of_memory}, held, experts="gpt_oss" if name == "gpt_oss" else "fused")
        assert near(run(of_memory, of["x"])[0], of["out"])
    saved = dict(layers.saved_weights({"h": layer}, experts="gpt_oss" if name == "gpt_oss" else "fused"))
    assert saved.keys() == held.keys() and all((saved[key] == held[key]).all() for key in held)


def test_dense(models: pathlib.Path) -> None:
    """An MLP of Llama, and all other layers of its one block by their names and shapes."""
    of = np.load(models / "llama.npz")
    with jax.set_mesh(make_mesh(x=2)):
        options: dict[str, Any] = {"axis": "x", "rngs": nnx.Rngs(0)}
        block = {
            "model.embed_tokens": nnx.Embed(64, 32, rngs=nnx.Rngs(0)),
            "model.layers.0.input_layernorm": layers.RMSNorm(32, **options),
            "model.layers.0.self_attn": layers.QKVProjection(32, 4, 2, head_dim=8, **options),
            "model.layers.0.self_attn.o_proj": layers.OutputProjection(4, 8, 32, **options),
            "model.layers.0.post_attention_layernorm": layers.RMSNorm(32, **options),
            "model.layers.0.mlp": layers.GatedMLP(32, 48, **options),
            "model.norm": layers.RMSNorm(32, **options),
            "lm_head": nnx.Linear(32, 64, use_bias=False, rngs=nnx.Rngs(0)),
        }
        with layers.open_checkpoint(models / "llama") as tensors:
            layers.load_weights(block, tensors)
            assert {name for name, _ in layers.saved_weights(block)} == set(tensors)
        assert near(run(block["model.layers.0.mlp"], of["x"]), of["out"])
