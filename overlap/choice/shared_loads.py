"""Counts the operand tiles that the SMs of a GPC load, each tile once however many of these SMs load it.

SMs of one GPC share loads of the same lines from the L2 (`kernels/placement.py`). So the path from the L2 to a GPC
carries fewer bytes than its SMs receive, and how many fewer depends on which tiles run there at the same time.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from overlap.kernels.placement import gpcs
from overlap.kernels.stream_k import StreamK
from overlap.kernels.tile_order import TileOrder
from overlap.primitives.integers import quotient, remainder


class OperandTiles(NamedTuple):
    """What the GPCs load, in tiles; the CTAs of a cluster compute one tile.

    Attributes:
      rows: how many tile rows of the left operand a GPC loads for each tile that it computes. At most 1.
      columns: how many tile columns of the right operand. At most 1.
      at_work: the part of the clusters that compute a tile, in the GPCs that compute any.
    """

    rows: float
    columns: float
    at_work: float


@functools.lru_cache(maxsize=1 << 15)
def operand_tiles(order: TileOrder, work: StreamK, cluster: int) -> OperandTiles:
    """Returns averages over the GPCs and over the first, the middle and the last wave of tiles.

    Args:
      order: the order of the tiles of one product.
      work: which tiles each cluster computes. The tiles of several products follow each other.
      cluster: how many CTAs a cluster has.
    """
    waves = work.full_waves + (work.left > 0)
    sampled = sorted({0, waves // 2, waves - 1})
    index: Any = np.tile(np.arange(work.num_ctas), len(sampled))
    ordinal: Any = np.repeat(sampled, work.num_ctas)
    at_work = work.pieces(index) > ordinal
    index, ordinal = index[at_work], ordinal[at_work]
    piece = work.piece(index, ordinal)
    product = quotient(piece.tile, order.tiles)
    row, column = order(remainder(piece.tile, order.tiles))
    gpc = gpcs(cluster, work.num_ctas)
    place = ordinal * work.num_ctas + gpc[index]
    clusters = np.bincount(gpc)[np.unique(place) % work.num_ctas].sum()
    # Loads are shared only by tiles of one product, and of one piece of the k steps.
    together = (place * work.tiles + product) * work.max_pieces + piece.index_in_tile
    rows = _different(together * order.m_tiles + row)
    columns = _different(together * order.n_tiles + column)
    return OperandTiles(rows / index.size, columns / index.size, index.size / int(clusters))


def _different(numbers: np.ndarray) -> int:
    """Returns how many different numbers there are."""
    return 1 + int(np.count_nonzero(np.diff(np.sort(numbers))))
