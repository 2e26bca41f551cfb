"""The counts of operand tiles that the cores of a GPC load."""

import pytest

from overlap.choice.shared_loads import operand_tiles
from overlap.kernels.placement import gpcs
from overlap.kernels.stream_k import StreamK
from overlap.kernels.tile_order import TileOrder

GRIDS = [
    (TileOrder(7, 5), StreamK(35, 12, 132), 1),
    (TileOrder(7, 5, "n", 3), StreamK(35, 12, 132, 4), 1),
    (TileOrder(30, 23, "m", 8), StreamK(690, 9, 132, 3), 1),
    (TileOrder(30, 23, "n", 4), StreamK(2 * 690, 9, 66, 2), 2),
    (TileOrder(3, 9), StreamK(27, 40, 66, 1, 2), 2),
    (TileOrder(3, 4), StreamK(2 * 12, 40, 30, 1, 4), 4),
    (TileOrder(1, 1), StreamK(1, 40, 30, 1, 4), 4),
    (TileOrder(5, 4), StreamK(20, 12, 132, may_spread=True), 1),
    (TileOrder(30, 23, "n", 4), StreamK(690, 9, 132, may_spread=True), 1),
]


@pytest.mark.parametrize(("order", "work", "cluster"), GRIDS)
def test_counts_are_those_of_sets(order: TileOrder, work: StreamK, cluster: int) -> None:
    waves = work.full_waves + (work.left > 0)
    rows, columns, computed, could_compute = set(), set(), 0, 0
    of_clusters = list(gpcs(cluster, work.num_ctas))
    for wave in {0, waves // 2, waves - 1}:
        at_work = {gpc for index, gpc in enumerate(of_clusters) if work.pieces(index) > wave}
        could_compute += sum(gpc in at_work for gpc in of_clusters)
        for index, gpc in enumerate(of_clusters):
            if work.pieces(index) <= wave:
                continue
            piece = work.piece(index, wave)
            product, tile = divmod(piece.tile, order.tiles)
            row, column = order(tile)
            rows.add((wave, gpc, product, piece.index_in_tile, row))
            columns.add((wave, gpc, product, piece.index_in_tile, column))
            computed += 1
    assert operand_tiles(order, work, cluster) == (
        len(rows) / computed,
        len(columns) / computed,
        computed / could_compute,
    )


def test_what_is_shared() -> None:
    """One GPC that computes 4 × 4 tiles loads 4 rows and 4 columns; pieces of k share nothing."""
    square = TileOrder(4, 4, "m", 4)
    assert operand_tiles(square, StreamK(16, 8, 132), 1)[:2] == (4 / 16, 4 / 16)
    assert operand_tiles(TileOrder(1, 1), StreamK(1, 8, 132, 4), 1)[:2] == (1.0, 1.0)
    # Two products of one tile each share nothing either.
    assert operand_tiles(TileOrder(1, 1), StreamK(2, 8, 132), 1)[:2] == (1.0, 1.0)
    # Clusters are dealt to the GPCs in turn, so 8 clusters with a tile each share nothing.
    assert operand_tiles(TileOrder(1, 8), StreamK(8, 8, 74), 2)[:2] == (1.0, 1.0)


def test_how_many_cores_of_a_gpc_are_at_work() -> None:
    """Of 132 CTAs, 16 fill one GPC, or are two of each GPC if they are spread."""
    row = TileOrder(1, 16)
    # GPCs 0 and 7 have 18 cores each.
    assert operand_tiles(row, StreamK(16, 8, 132), 1).at_work == 16 / 18
    assert operand_tiles(row, StreamK(16, 8, 132, may_spread=True), 1).at_work == 16 / 132
    assert operand_tiles(TileOrder(1, 132), StreamK(132, 8, 132), 1).at_work == 1.0
