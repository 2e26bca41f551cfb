"""A whole block and its gradients against the float32 oracle: at most twice the error of flax's own layers."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh
from oracle import ALLOWED

from tests.layers.layer_cases import BETWEEN, EXPLICIT_FIRST, Block, PlainBlock, draw, make_mesh, put, spread

DATA = draw(1, dtype=jnp.bfloat16), draw(2)  # The input and the target.


@nnx.jit
def all_of(block: Any, x: jax.Array, target: jax.Array) -> Any:
    def with_output(block: Any, x: jax.Array) -> Any:
        out = block(x)
        return jnp.mean((out.astype(jnp.float32) - target) ** 2), out

    (value, out), grads = nnx.value_and_grad(with_output, argnums=(0, 1), has_aux=True)(block, x)
    return {"out": out, "loss": value, "dx": grads[1], "parameters": nnx.to_pure_dict(grads[0])}


def run(block: Any, x: Any, target: Any) -> Any:
    """Returns the output, the loss, and its gradients by parameters and input, as nested dictionaries of arrays."""
    return jax.device_get(all_of(block, x, target))


@functools.cache
def references() -> tuple[Any, Any]:
    """Returns the results of flax's own layers on one device, in float32 and in bf16."""

    def plain(dtype: Any) -> Any:
        block = PlainBlock(nnx.Rngs(0), use_bias=True, dtype=dtype)  # Both models draw the same parameters.
        spread(block)
        return run(block, *map(jnp.asarray, DATA))

    with jax.default_matmul_precision("highest"):
        return plain(jnp.float32), plain(jnp.bfloat16)


def distances(found: Any, exact: Any) -> dict[str, float]:
    def distance(a: Any, b: Any) -> float:
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert a.shape == b.shape and np.isfinite(a).all()
        return float(np.linalg.norm(a - b) / np.linalg.norm(b))

    paths = jax.tree_util.tree_flatten_with_path(jax.tree.map(distance, found, exact))[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/"): value for path, value in paths}


def assert_no_worse(found: Any, unfused: Any, exact: Any) -> None:
    ours, theirs = distances(found, exact), distances(unfused, exact)
    assert len(ours) == 20  # The output, the loss, the input's gradient, and the gradients of 17 parameters.
    # Softmax cancels a bias that all keys share: its gradient is zero except for rounding.
    assert theirs.pop("parameters/qkv/key/bias") > 100
    # The loss may be right by chance: assume at least bf16's error.
    theirs["loss"] = max(theirs["loss"], float(jnp.finfo(jnp.bfloat16).eps))
    worse = {name: (ours[name], error) for name, error in theirs.items() if ours[name] > ALLOWED * error}
    assert not worse, ", ".join(f"{name}: {pair}" for name, pair in worse.items())


def block_on(mesh: Mesh, **options: Any) -> Block:
    """Runs the block in bf16, with f32 parameters."""
    with jax.set_mesh(mesh):
        block = Block(nnx.Rngs(0), use_bias=True, dtype=jnp.bfloat16, **options)
        spread(block)
    return block


def run_on(mesh: Mesh, block: Block) -> Any:
    with jax.set_mesh(mesh):
        return run(block, *(put(x, mesh, BETWEEN) for x in DATA))


@EXPLICIT_FIRST
def test_a_block(kind: Any) -> None:
    mesh, (exact, unfused) = make_mesh(kind=kind), references()
    block = block_on(mesh)
    assert_no_worse(run_on(mesh, block), unfused, exact)
    # Negative control: gate and up are exchanged.
    gate, up = block.mlp.gate.kernel.get_value(), block.mlp.up.kernel.get_value()
    block.mlp.gate.kernel.set_value(up)
    block.mlp.up.kernel.set_value(gate)
    with pytest.raises(AssertionError, match="parameters/mlp/gate/kernel"):
        assert_no_worse(run_on(mesh, block), unfused, exact)


@pytest.mark.one_jax
def test_a_fused_block() -> None:
    """All products run in the library's emulated kernels: FSDP × tensor parallelism, forward and backward."""
    mesh, (exact, unfused) = make_mesh(2, 2), references()
    assert_no_worse(run_on(mesh, block_on(mesh, implementation="fused")), unfused, exact)
