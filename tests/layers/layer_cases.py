"""A model of all layers of the library, and the same model of flax's own layers; meshes, operands, comparison."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from overlap import layers

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
# The mesh for tests whose result hardly depends on the kind of mesh.
EXPLICIT_FIRST = pytest.mark.parametrize(
    "kind", [pytest.param(EXPLICIT, id="explicit"), pytest.param(AUTO, id="auto", marks=pytest.mark.slow)]
)
HEADS, KV_HEADS, HEAD_DIM = 8, 4, 8
# The axes for FSDP × tensor parallelism, with the batch along the FSDP axis, as in most models.
AXES: dict[str, Any] = {"axis": "tensor", "fsdp_axis": "data", "batch_axis": "data"}
BETWEEN, WHOLE, INSIDE = P("data", "tensor", None), P("data", None, None), P("data", None, "tensor")


def make_mesh(data: int = 2, tensor: int = 4, kind: AxisType = AUTO) -> Mesh:
    devices = np.array(jax.devices()[: data * tensor]).reshape(data, tensor)
    return Mesh(devices, ("data", "tensor"), axis_types=(kind,) * 2)


def draw(seed: int, shape: tuple[int, ...] = (4, 16, 32), dtype: Any = jnp.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(dtype)


def same(x: jax.Array, spec: P) -> bool:
    return x.sharding.is_equivalent_to(jax.NamedSharding(x.sharding.mesh, spec), x.ndim)  # pyright: ignore


def put(x: Any, mesh: Mesh, spec: P) -> jax.Array:
    return jax.device_put(x, NamedSharding(mesh, spec))


class PlainQKV(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, **keywords: Any):
        self.query = nnx.Linear(32, HEADS * HEAD_DIM, rngs=rngs, **keywords)
        self.key = nnx.Linear(32, KV_HEADS * HEAD_DIM, rngs=rngs, **keywords)
        self.value = nnx.Linear(32, KV_HEADS * HEAD_DIM, rngs=rngs, **keywords)


class PlainMLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, **keywords: Any):
        self.gate = nnx.Linear(32, 64, rngs=rngs, **keywords)
        self.up = nnx.Linear(32, 64, rngs=rngs, **keywords)
        self.down = nnx.Linear(64, 32, rngs=rngs, **keywords)


class Every(nnx.Module):
    """One of each layer, by the names of flax's own layers that `Plain` has."""

    def __init__(self, rngs: nnx.Rngs, **options: Any):
        norms = {name: x for name, x in options.items() if name != "dtype"}
        self.column = layers.ColumnParallelLinear(32, 64, rngs=rngs, **options)
        self.row = layers.RowParallelLinear(64, 32, rngs=rngs, **options)
        self.qkv = layers.QKVProjection(32, HEADS, KV_HEADS, HEAD_DIM, rngs=rngs, **options)
        self.out = layers.OutputProjection(HEADS, HEAD_DIM, 32, rngs=rngs, **options)
        self.mlp = layers.GatedMLP(32, 64, rngs=rngs, use_bias=True, **options)
        self.rms = layers.RMSNorm(32, rngs=rngs, **norms)
        self.mean = layers.LayerNorm(32, rngs=rngs, **norms)

    def __call__(self, x: jax.Array, h: jax.Array) -> dict[str, jax.Array]:
        query, key, value = self.qkv(x)
        return {
            "column": self.column(x), "row": self.row(h, x), "query": query, "key": key, "value": value,
            "out": self.out(query), "mlp": self.mlp(x, x), "rms": self.rms(x), "mean": self.mean(x),
        }  # fmt: skip


class Plain(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.column, self.row = nnx.Linear(32, 64, rngs=rngs), nnx.Linear(64, 32, rngs=rngs)
        self.qkv, self.out = PlainQKV(rngs, use_bias=False), nnx.Linear(64, 32, rngs=rngs, use_bias=False)
        self.mlp, self.rms, self.mean = PlainMLP(rngs), nnx.RMSNorm(32, rngs=rngs), nnx.LayerNorm(32, rngs=rngs)

    def __call__(self, x: jax.Array, h: jax.Array) -> dict[str, jax.Array]:
        flat = self.qkv.query(x), self.qkv.key(x), self.qkv.value(x)
        query, key, value = (part.reshape(*part.shape[:-1], -1, HEAD_DIM) for part in flat)
        hidden = jax.nn.silu(self.mlp.gate(x)) * self.mlp.up(x)
        return {
            "column": self.column(x), "row": self.row(h) + x, "query": query, "key": key, "value": value,
            "out": self.out(flat[0]), "mlp": self.mlp.down(hidden) + x, "rms": self.rms(x), "mean": self.mean(x),
        }  # fmt: skip


def assert_near(found: Any, expected: Any, within: float) -> None:
    """Compares trees of arrays, each by the norm of its distance."""
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert a.shape == b.shape and np.linalg.norm(a - b) <= within * np.linalg.norm(b), (path, a, b)


def numbers(module: nnx.Module) -> dict[str, Any]:
    """Returns the parameters as numpy arrays in nested dictionaries."""
    return jax.tree.map(whole, nnx.to_pure_dict(nnx.state(module, nnx.Param)))


def whole(x: jax.Array) -> np.ndarray:
    """Returns all elements of an array, of all processes."""
    return np.asarray(x if x.is_fully_addressable else multihost_utils.process_allgather(x, tiled=True))


def spread(module: nnx.Module, seed: int = 5) -> None:
    """Gives all scales and biases random values. With ones and zeros, a misplaced parameter would not show."""
    chance = np.random.default_rng(seed)

    def new(path: Any, x: jax.Array) -> jax.Array:
        if x.ndim > 1:
            return x
        return jax.device_put((1 + chance.standard_normal(x.shape, np.float32) / 4).astype(x.dtype), x.sharding)

    nnx.update(module, nnx.map(lambda path, x: x.replace(new(path, x[...])), nnx.state(module, nnx.Param)))
