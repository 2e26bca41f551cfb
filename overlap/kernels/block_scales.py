"""Scales of blocks (OCP microscaling): one power of two for each 32 elements of an operand along k.

The tensor cores read the scales of 128 rows and 4 blocks as one piece of 512 bytes: 32 groups of 16 bytes; group i has
the 4 scales of row i, then those of rows i + 32, i + 64 and i + 96. `packed` brings scales into that order before the
kernel, so that one copy loads a piece. Source: the PTX ISA on tcgen05, scale factors in the layout "1X".
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from overlap.kernels.layouts import OperandLayouts
from overlap.primitives.integers import ceil_div

# Elements along k that share a scale.
BLOCK = 32
SCALE_DTYPE = jnp.dtype(jnp.float8_e8m0fnu)
# A piece: rows, blocks of each, and its size in words of four scales.
SCALE_TILE_ROWS, SCALE_TILE_BLOCKS = 128, 4
SCALE_TILE_WORDS = SCALE_TILE_ROWS
SCALE_TILE_BYTES = SCALE_TILE_ROWS * SCALE_TILE_BLOCKS
_GROUPS = 32


def of_tiles(
    lhs_scale: jax.Array, rhs_scales: Sequence[jax.Array], layouts: OperandLayouts, tile: tuple[int, int]
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """The scales of operands in these layouts, packed for tiles of so many rows and columns."""
    left = lhs_scale.swapaxes(-1, -2) if layouts.transpose_lhs else lhs_scale
    right = [scale if layouts.transpose_rhs else scale.swapaxes(-1, -2) for scale in rhs_scales]
    return packed(left, tile[0]), tuple(packed(scale, tile[1]) for scale in right)


def packed(scales: jax.Array, tile: int) -> jax.Array:
    """Scales in the order in which the tensor cores read them, as int32: [(batch,) tiles, k steps, words].

    Args:
      scales: [(batch,) rows, blocks].
      tile: rows of a tile, at most 128. Each tile has a piece of its own for each k step. What is missing in a piece
        scales nothing.
    """
    *batch, rows, blocks = scales.shape
    tiles, k_steps = ceil_div(rows, tile), ceil_div(blocks, SCALE_TILE_BLOCKS)
    whole = [(0, 0)] * len(batch)
    bits = lax.bitcast_convert_type(scales, jnp.uint8)
    bits = jnp.pad(bits, [*whole, (0, tiles * tile - rows), (0, k_steps * SCALE_TILE_BLOCKS - blocks)])
    words = lax.bitcast_convert_type(bits.reshape(*batch, tiles, tile, k_steps, SCALE_TILE_BLOCKS), jnp.int32)
    words = jnp.pad(words, [*whole, (0, 0), (0, SCALE_TILE_ROWS - tile), (0, 0)])
    words = words.reshape(*batch, tiles, SCALE_TILE_ROWS // _GROUPS, _GROUPS, k_steps)
    # [.., tiles, row // 32, row % 32, steps] -> [.., tiles, steps, row % 32, row // 32]
    return jnp.moveaxis(words, -3, -1).swapaxes(-3, -2).reshape(*batch, tiles, k_steps, SCALE_TILE_WORDS)


def ones_for(operand: jax.Array, k_axis: int) -> jax.Array:
    """Scales of the blocks of an operand that change nothing; `k_axis`: its dimension of size k, from the last one."""
    shape = list(operand.shape)
    shape[k_axis] //= BLOCK
    return jnp.ones(shape, SCALE_DTYPE)
