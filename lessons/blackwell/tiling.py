"""Shared by the lessons for Blackwell: a problem cut into tiles that the tensor cores (tcgen05) can take."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from lessons.hopper.tiling import SWIZZLE_BYTES, Tiling
from overlap.primitives.types import ScratchType

CTA_TILE_M = 128  # Tensor memory has 128 lanes, and a row of the accumulator lies in a lane.
MAX_TILE_N = 256  # Columns of one MMA's accumulator.


def tiling(lhs: jax.Array, rhs: jax.Array, *, tile_n: int, tile_k: int, stages: int, ctas: int = 1) -> Tiling:
    """The tiling of two operands, checked.

    Args:
      lhs: [m, k].
      rhs: [k, n].
      tile_n: columns of an output tile; each CTA loads its part of them.
      tile_k: columns of `lhs` and rows of `rhs` in one stage.
      stages: how many such stages shared memory holds; checked only.
      ctas: how many CTAs work on an output tile together: 1, or 2 from lesson 3 on.

    Raises:
      ValueError: a wrong type or shape, a tile that the tensor cores cannot take, or fewer than two stages.
    """
    if min(tile_n, tile_k) < 1:
        raise ValueError(f"tiles must be positive, got tile_n={tile_n} and tile_k={tile_k}")
    t = Tiling.of(lhs, rhs, tile_m=ctas * CTA_TILE_M, tile_n=tile_n, tile_k=tile_k)
    swizzle = SWIZZLE_BYTES // t.dtype.itemsize
    if tile_n % (ctas * swizzle) or tile_n > MAX_TILE_N:
        raise ValueError(f"`tile_n` must be a multiple of {ctas * swizzle}, at most {MAX_TILE_N}, got {tile_n}")
    if tile_k % swizzle:
        raise ValueError(f"`tile_k` must be a multiple of {swizzle}, got {tile_k}")
    if stages < 2:
        raise ValueError(f"`stages` must be at least 2, one to load and one to multiply, got {stages}")
    return t


def accumulator_type(t: Tiling, *, ctas: int = 1, halves: int = 1) -> ScratchType:
    """Scratch type of a CTA's accumulator in tensor memory: 128 rows, and `tile_n` columns for each of the `halves`."""
    return plgpu.TMEM((t.tile_m // ctas, halves * t.tile_n), jnp.float32, collective=ctas > 1)
