"""A transformer block made of the library's layers, and the same block made of flax's own layers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from overlap import layers

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
# The mesh for tests whose result hardly depends on the kind of mesh.
EXPLICIT_FIRST = pytest.mark.parametrize(
    "kind", [pytest.param(EXPLICIT, id="explicit"), pytest.param(AUTO, id="auto", marks=pytest.mark.slow)]
)
FEATURES, HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 32, 8, 4, 8, 64
BATCH, ROWS = 4, 16
# The axes for FSDP × tensor parallelism, with the batch along the FSDP axis, as in most models.
AXES: dict[str, Any] = {"axis": "tensor", "fsdp_axis": "data", "batch_axis": "data"}
BETWEEN, WHOLE, INSIDE = P("data", "tensor", None), P("data", None, None), P("data", None, "tensor")


def make_mesh(data: int = 2, tensor: int = 4, kind: AxisType = AUTO) -> Mesh:
    devices = np.array(jax.devices()[: data * tensor]).reshape(data, tensor)
    return Mesh(devices, ("data", "tensor"), axis_types=(kind,) * 2)


def draw(seed: int, shape: tuple[int, ...] = (BATCH, ROWS, FEATURES), dtype: Any = jnp.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(dtype)


def same(x: jax.Array, spec: P) -> bool:
    return x.sharding.is_equivalent_to(jax.NamedSharding(x.sharding.mesh, spec), x.ndim)  # pyright: ignore


def put(x: Any, mesh: Mesh, spec: P) -> jax.Array:
    return jax.device_put(x, NamedSharding(mesh, spec))


def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(query, key, value, is_causal=True)


class Block(nnx.Module):
    """norm → QKV → attention → output projection → norm → gated MLP, from the library's layers."""

    def __init__(self, rngs: nnx.Rngs, use_bias: bool = False, **options: Any):
        options = AXES | options
        norms = {key: x for key, x in options.items() if key != "use_bias"}
        self.norm1 = layers.RMSNorm(FEATURES, rngs=rngs, **norms)
        self.qkv = layers.QKVProjection(FEATURES, HEADS, KV_HEADS, HEAD_DIM, rngs=rngs, use_bias=use_bias, **options)
        self.out = layers.OutputProjection(HEADS, HEAD_DIM, FEATURES, rngs=rngs, use_bias=use_bias, **options)
        self.norm2 = layers.LayerNorm(FEATURES, rngs=rngs, **norms)
        self.mlp = layers.GatedMLP(FEATURES, HIDDEN, rngs=rngs, use_bias=use_bias, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.out(attend(*self.qkv(self.norm1(x))), x)
        return x + self.mlp(self.norm2(x))


class PlainQKV(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, **keywords: Any):
        self.query = nnx.Linear(FEATURES, HEADS * HEAD_DIM, rngs=rngs, **keywords)
        self.key = nnx.Linear(FEATURES, KV_HEADS * HEAD_DIM, rngs=rngs, **keywords)
        self.value = nnx.Linear(FEATURES, KV_HEADS * HEAD_DIM, rngs=rngs, **keywords)


class PlainMLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, **keywords: Any):
        self.gate = nnx.Linear(FEATURES, HIDDEN, rngs=rngs, **keywords)
        self.up = nnx.Linear(FEATURES, HIDDEN, rngs=rngs, **keywords)
        self.down = nnx.Linear(HIDDEN, FEATURES, rngs=rngs, **keywords)


class PlainBlock(nnx.Module):
    """The block `Block` made of flax's own layers, for one device."""

    def __init__(self, rngs: nnx.Rngs, use_bias: bool = False, dtype: Any = None):
        self.norm1 = nnx.RMSNorm(FEATURES, rngs=rngs, dtype=dtype)
        self.qkv = PlainQKV(rngs, use_bias=use_bias, dtype=dtype)
        self.out = nnx.Linear(HEADS * HEAD_DIM, FEATURES, rngs=rngs, use_bias=use_bias, dtype=dtype)
        self.norm2 = nnx.LayerNorm(FEATURES, rngs=rngs, dtype=dtype)
        self.mlp = PlainMLP(rngs, use_bias=use_bias, dtype=dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        normed = self.norm1(x)
        parts = (self.qkv.query(normed), self.qkv.key(normed), self.qkv.value(normed))
        query, key, value = (part.reshape(*part.shape[:-1], -1, HEAD_DIM) for part in parts)
        attended = attend(query, key, value)
        x = x + self.out(attended.reshape(*attended.shape[:-2], -1))
        normed = self.norm2(x)
        return x + self.mlp.down(jax.nn.silu(self.mlp.gate(normed)) * self.mlp.up(normed))


def assert_near(found: Any, expected: Any, within: float) -> None:
    """Compares trees of arrays, each by the norm of its distance."""
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert a.shape == b.shape and np.linalg.norm(a - b) <= within * np.linalg.norm(b), (path, a, b)


def loss(block: Any, x: jax.Array, target: jax.Array) -> jax.Array:
    return jnp.mean((block(x).astype(jnp.float32) - target) ** 2)


def numbers(module: nnx.Module) -> dict[str, Any]:
    """Returns the parameters as numpy arrays in nested dictionaries."""
    return jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(module, nnx.Param)))


def spread(module: nnx.Module, seed: int = 5) -> None:
    """Gives all scales and biases random values. With ones and zeros, a misplaced parameter would not show."""
    chance = np.random.default_rng(seed)

    def new(path: Any, x: jax.Array) -> jax.Array:
        if x.ndim > 1:
            return x
        return jax.device_put((1 + chance.standard_normal(x.shape, np.float32) / 4).astype(x.dtype), x.sharding)

    nnx.update(module, nnx.map(lambda path, x: x.replace(new(path, x[...])), nnx.state(module, nnx.Param)))
