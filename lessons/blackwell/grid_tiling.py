"""Lesson 6: grid tiling. The same kernel visits the output tiles in bands, so that it finds operands in L2.

At any moment the GPU computes one *wave*: on a B200, 74 tiles of 256 × 256. Row by row, with n = 8192, a wave is a bit
more than two rows of 32 tiles: it reads 3 blocks of 256 rows of the left operand and all 32 blocks of 256 columns of
the right one. In bands of `width` = 8 tile rows it is 8 tiles high and about 9 wide, and reads 8 + 10 blocks for the
same number of products. Every second band is walked backwards (a planar snake), so that it begins with operand tiles
that the band before it has just used.

Gains: less traffic to memory for problems that do not fit into L2; nothing in the kernel changes but the function from
an index to a tile. Source: `overlap/kernels/tile_order.py`; the planar snake of "Writing high-performance matrix
multiplication kernels for Blackwell" in the JAX documentation.
"""

from __future__ import annotations

from typing import Literal

import jax

from lessons.blackwell.collective_mma import CLUSTER
from lessons.blackwell.dedicated_epilogue import double_buffered
from lessons.blackwell.tiling import tiling
from overlap.kernels.tile_order import TileOrder


def matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    tile_n: int = 256,
    stages: int = 6,
    minor: Literal["m", "n"] = "m",
    width: int = 8,
) -> jax.Array:
    """lhs[m, k] @ rhs[k, n], float16 or bfloat16; sizes are multiples of the tiles of a cluster.

    `minor` is the dimension that runs fastest. `width` is how many tiles a band is wide along that dimension.
    """
    t = tiling(lhs, rhs, tile_n=tile_n, tile_k=64, stages=stages, ctas=CLUSTER)
    order = TileOrder(t.m_tiles, t.n_tiles, minor, width)
    kernel = double_buffered(t, stages=stages, epilogue_tile_n=64, name="blackwell_ladder_grid_tiling", tile_at=order)
    return kernel(lhs, rhs)
