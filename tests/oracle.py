"""Meshes, programs on them (tests/meshes.py), and the comparison of results on the devices, inside `shard_map`.

So it works with one process for all GPUs and with one process per GPU.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from overlap.kernels.target import current_target
from tests.meshes import make_mesh as make_mesh
from tests.meshes import on_mesh as on_mesh

ALLOWED = 2.0  # The fused product's error may be at most this many times the unfused product's error.
# On a GPU, the search for XLA's fastest products would take longer than everything else.
NO_SEARCH = {"xla_gpu_autotune_level": 0}


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


def distance(actual: jax.Array, expected: jax.Array) -> jax.Array:
    """Returns the relative distance in the Frobenius norm. A distance of NaN is returned as infinity."""
    difference = jnp.linalg.norm(actual.astype(jnp.float32) - expected) / jnp.linalg.norm(expected)
    return jnp.where(jnp.isnan(difference), jnp.inf, difference)


def worst(value: jax.Array, mesh: Mesh) -> jax.Array:
    """Returns the largest value over all devices of the mesh."""
    return functools.reduce(lambda v, axis: lax.pmax(v, axis), mesh.axis_names, value)


def assert_close(pair: tuple[jax.Array, jax.Array]) -> None:
    ours, theirs = map(float, pair)
    assert ours <= ALLOWED * theirs, f"error {ours:.2e} against {theirs:.2e} of the unfused product"
