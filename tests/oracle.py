"""References for results: the fp32 product, and the error of the unfused product in the same dtype.

Everything here runs on the devices, inside `shard_map`. So it works with one process for all GPUs and with one process
per GPU.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import overlap
from overlap.kernels.target import current_target

X, W, Y = P("x", None), P(None, "x"), P(None, "x")
ALLOWED = 2.0  # The fused product's error may be at most this many times the unfused product's error.
# The host draws operands with at most this many elements together. Compiling a program that draws them on the devices
# takes longer than most tests.
_MOST_OF_THE_HOST = 1 << 22
# On a GPU, the search for XLA's fastest products would take longer than everything else.
NO_SEARCH = {"xla_gpu_autotune_level": 0}


def make_mesh(**axes: int) -> Mesh:
    """Returns a mesh over the first devices, in jax's order."""
    count = int(np.prod(list(axes.values())))
    devices = np.array(jax.devices()[:count]).reshape(tuple(axes.values()))
    return Mesh(devices, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def operands(mesh: Mesh, shape: tuple[int, int, int], dtype: Any, seed: int) -> tuple[jax.Array, jax.Array]:
    """Draws normally distributed operands for per-shard sizes (m_shard, n_shard, k), sharded over axis "x"."""
    (m_shard, n_shard, k), size = shape, mesh.shape["x"]
    shardings = NamedSharding(mesh, X), NamedSharding(mesh, W)
    return draw(((size * m_shard, k), (k, size * n_shard)), dtype, shardings, seed)


def draw(
    shapes: tuple[tuple[int, ...], ...], dtype: Any, shardings: tuple[NamedSharding, ...], seed: int
) -> tuple[jax.Array, ...]:
    """Draws normally distributed arrays, with the same values in all processes."""
    if sum(map(math.prod, shapes)) > _MOST_OF_THE_HOST:
        return _drawing(shapes, jnp.dtype(dtype), shardings)(np.uint32(seed))
    chance = np.random.default_rng(seed)
    arrays = [chance.standard_normal(shape, np.float32).astype(dtype) for shape in shapes]
    return tuple(
        jax.make_array_from_callback(array.shape, sharding, lambda index, array=array: array[index])
        for array, sharding in zip(arrays, shardings, strict=True)
    )


@functools.cache
def _drawing(shapes: tuple[tuple[int, ...], ...], dtype: Any, shardings: tuple[NamedSharding, ...]) -> Any:
    """Returns a program that draws the arrays from the seed on the devices. Large arrays take too long on the host."""

    def make(seed: jax.Array) -> tuple[jax.Array, ...]:
        keys = jax.random.split(jax.random.key(seed), len(shapes))
        return tuple(jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True))

    return jax.jit(make, out_shardings=shardings)


def on_mesh(mesh: Mesh, f: Any, in_specs: Any = (X, W), out_specs: Any = Y, **options: Any) -> Any:
    """Returns `f` under jit and `shard_map`."""
    mapped = jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return jax.jit(mapped, **options)


def exact(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """Computes the product in fp32 from per-shard operands, inside `shard_map`: the oracle for all other products."""
    gathered = lax.all_gather(lhs, "x", axis=0, tiled=True).astype(jnp.float32)
    return lax.dot(gathered, rhs.astype(jnp.float32), precision=lax.Precision.HIGHEST)


def unfused(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """Computes the product as a user would without this library. `rounded` keeps XLA from using excess precision."""
    return rounded(lax.all_gather(lhs, "x", axis=0, tiled=True) @ rhs)


def rounded(values: jax.Array) -> jax.Array:
    """Returns the same values, and forces XLA to round them. XLA may keep 16-bit results unrounded for use in f32."""
    info = jnp.finfo(values.dtype)
    return lax.reduce_precision(values, info.nexp, info.nmant)


def fitting(config: Any) -> Any:
    """Adapts a configuration for Hopper to this device's mainloop."""
    if config is None or not current_target().is_blackwell:
        return config
    # On Blackwell an accumulator has 128 rows. The two CTAs of a pair have tiles one below the other, and each CTA
    # holds whole boxes of columns.
    tile_n = max(128, config.tile_n // 128 * 128) if config.cluster > 1 else config.tile_n
    return config.replace(tile_m=128, tile_n=tile_n, cluster_along="m", schedule="cooperative", swap_operands=False)


def fused(lhs: jax.Array, rhs: jax.Array, config: Any = None, **kwargs: Any) -> jax.Array:
    return overlap.all_gather_lhs_matmul(lhs, rhs, "x", implementation="fused", config=fitting(config), **kwargs)


def distance(actual: jax.Array, expected: jax.Array) -> jax.Array:
    """Returns the relative distance in the Frobenius norm. A distance of NaN is returned as infinity."""
    difference = jnp.linalg.norm(actual.astype(jnp.float32) - expected) / jnp.linalg.norm(expected)
    return jnp.where(jnp.isnan(difference), jnp.inf, difference)


def worst(value: jax.Array, mesh: Mesh) -> jax.Array:
    """Returns the largest value over all devices of the mesh."""
    return functools.reduce(lambda v, axis: lax.pmax(v, axis), mesh.axis_names, value)


def errors(mesh: Mesh, op: Any = fused) -> Any:
    """Returns a jitted function from operands to (error of `op`, error of the unfused product).

    Both errors are relative to `exact`, and each is the largest over the devices.
    """

    def measure(lhs: jax.Array, rhs: jax.Array) -> tuple[jax.Array, jax.Array]:
        expected = exact(lhs, rhs)
        return worst(distance(op(lhs, rhs), expected), mesh), worst(distance(unfused(lhs, rhs), expected), mesh)

    return on_mesh(mesh, measure, out_specs=(P(), P()), compiler_options=NO_SEARCH)


def assert_close(pair: tuple[jax.Array, jax.Array]) -> None:
    ours, theirs = map(float, pair)
    assert ours <= ALLOWED * theirs, f"error {ours:.2e} against {theirs:.2e} of the unfused product"
