"""The counts of operand tiles that the cores of a GPC load."""

import pytest

from overlap.choice.shared_loads import operand_tiles
from overlap.kernels.placement import gpcs
from overlap.kernels.stream_k import StreamK
from overlap.kernels.tile_order import TileOrder

GRIDS = [
    (TileOrder(7, 5, "n", 3), StreamK(35, 12, 132, 4), 1),
    (TileOrder(30, 23, "m", 8), StreamK(690, 9, 132, 3), 1),
    (TileOrder(30, 23, "n", 4), StreamK(2 * 690, 9, 66, 2), 2),
    (TileOrder(3, 4), StreamK(2 * 12, 40, 30, 1, 4), 4),
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
