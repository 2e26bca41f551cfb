"""Packs block scales (OCP microscaling: one power of two for each 32 elements along k) for the tensor cores.

The tensor cores read block scales as *scale tiles* of 512 bytes: the scales of 128 rows and 4 blocks. A scale tile
consists of 32 groups of 16 bytes. Group i holds the 4 scales of row i, then the 4 scales each of rows i + 32, i + 64
and i + 96. `packed` brings scales into this order before the kernel runs, so that one copy loads a scale tile.

Source: the PTX ISA on tcgen05, scale factors in the layout "1X".
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from overlap.kernels.operations import OperandLayouts
from overlap.primitives.integers import ceil_div

# How many elements along k share a scale.
BLOCK = 32
SCALE_DTYPE = jnp.dtype(jnp.float8_e8m0fnu)
# A scale tile: its rows, its blocks in each row, and its size in words of four scales and in bytes.
SCALE_TILE_ROWS = 128
SCALE_TILE_BLOCKS = 4
SCALE_TILE_WORDS = SCALE_TILE_ROWS
SCALE_TILE_BYTES = SCALE_TILE_ROWS * SCALE_TILE_BLOCKS
_GROUPS = 32


def of_tiles(
    lhs_scale: jax.Array, rhs_scales: Sequence[jax.Array], layouts: OperandLayouts, tile: tuple[int, int]
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Returns the block scales of both operands, packed.

    Args:
      lhs_scale: [(batch,) m, k blocks], or with the last two dimensions exchanged if `lhs` is transposed.
      rhs_scales: for each right operand [(batch,) k blocks, n], or [(batch,) n, k blocks] if it is transposed.
      layouts: how the operands lie in memory.
      tile: rows and columns of an output tile.
    """
    left = lhs_scale.swapaxes(-1, -2) if layouts.transpose_lhs else lhs_scale
    right = [scale if layouts.transpose_rhs else scale.swapaxes(-1, -2) for scale in rhs_scales]
    return packed(left, tile[0]), tuple(packed(scale, tile[1]) for scale in right)


def packed(scales: jax.Array, tile: int) -> jax.Array:
    """Returns scales in the order in which the tensor cores read them: int32 [(batch,) tiles, k steps, words].

    Args:
      scales: [(batch,) rows, blocks].
      tile: rows of a tile, at most 128. Each tile has its own scale tile for each k step. Entries of a
        scale tile beyond the end of the operand are zero, and no product uses them.
    """
    *batch, rows, blocks = scales.shape
    tiles = ceil_div(rows, tile)
    k_steps = ceil_div(blocks, SCALE_TILE_BLOCKS)
    whole = [(0, 0)] * len(batch)
    bits = lax.bitcast_convert_type(scales, jnp.uint8)
    bits = jnp.pad(bits, [*whole, (0, tiles * tile - rows), (0, k_steps * SCALE_TILE_BLOCKS - blocks)])
    words = lax.bitcast_convert_type(bits.reshape(*batch, tiles, tile, k_steps, SCALE_TILE_BLOCKS), jnp.int32)
    words = jnp.pad(words, [*whole, (0, 0), (0, SCALE_TILE_ROWS - tile), (0, 0)])
    words = words.reshape(*batch, tiles, SCALE_TILE_ROWS // _GROUPS, _GROUPS, k_steps)
    # [.., tiles, row // 32, row % 32, steps] -> [.., tiles, steps, row % 32, row // 32]
    return jnp.moveaxis(words, -3, -1).swapaxes(-3, -2).reshape(*batch, tiles, k_steps, SCALE_TILE_WORDS)


def ones_for(operand: jax.Array, k_axis: int) -> jax.Array:
    """Returns block scales of 1 for an operand; `k_axis` is the index of the operand's dimension of size k."""
    shape = list(operand.shape)
    shape[k_axis] //= BLOCK
    return jnp.ones(shape, SCALE_DTYPE)
