"""Rung 6: grid tiling. The same kernel visits the output tiles in bands, so that it finds operands in L2.

At any moment the GPU computes one *wave*: as many output tiles as there are SMs, here 66 pairs of them. Row by row,
with n = 8192, a wave is two rows of pairs, each 32 tiles wide: it reads 2 blocks of 256 rows of the left operand and
all 32 blocks of 256 columns of the right one. In bands of `width` = 8 rows of pairs it is 8 pairs high and 8 tiles
wide, and reads 8 + 8 blocks for the same number of products. Every second band is walked backwards (a snake), so that
it begins with operand tiles that the band before it has just used.

Gains: less traffic to memory for problems that do not fit into L2; nothing in the kernel changes but the function from
an index to a tile. Measured at 4096 × 8192 × 4096, whose operands nearly fit: none (0.99 → 0.99 of cuBLAS).
Source: `overlap/kernels/tile_order.py`; the planar snake of the Blackwell matmul guide in the JAX documentation.
"""

from __future__ import annotations

from typing import Literal

import jax

from lessons.hopper.cluster_multicast import CLUSTER, clustered
from lessons.hopper.tiling import Tiling
from overlap.kernels.tile_order import TileOrder


def matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    tile_n: int = 256,
    stages: int = 4,
    minor: Literal["m", "n"] = "m",
    width: int = 8,
) -> jax.Array:
    """lhs[m, k] @ rhs[k, n], float16 or bfloat16; sizes are multiples of the tiles, m of twice its tile.

    `minor` is the dimension that runs fastest. `width` is how many tiles (along m: pairs of tiles) a band is wide along
    that dimension.
    """
    t = Tiling.of(lhs, rhs, tile_n=tile_n)
    order = TileOrder(t.m_tiles // CLUSTER, t.n_tiles, minor, width)
    return clustered(t, stages=stages, name="ladder_grid_tiling", tile_at=order)(lhs, rhs)
