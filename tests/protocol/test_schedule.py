"""Tests the schedules by walking them exhaustively: pure integers, no kernel."""

import collections
import itertools

import jax.numpy as jnp
import pytest

from overlap.collectives.gather.lhs_schedule import AllGatherSchedule
from overlap.kernels.tile_order import TileOrder
from overlap.primitives import Chunking
from overlap.primitives.integers import ceil_div, largest_divisor

BLOCK_ROWS = 128
SHAPES = [  # m_shard, k, itemsize, chunk_bytes: rows per chunk > 1, = 1, and parts of rows
    (128, 64, 2, 8192),
    (384, 128, 2, 8192),
    (256, 4096, 2, 8192),
    (256, 3584, 2, 4096),
    (128, 12288, 2, 8192),
    (200, 4096, 2, 8192),  # The last row block is shorter,
    (131, 64, 2, 8192),  # and by an odd number of rows.
    (1, 72, 2, 8192),
    (131, 512, 2, 8192),  # The last of the chunks of eight rows has three.
    (40, 8 * 1009, 2, 8192),  # A row of a prime number of 16-byte units: in two unequal parts.
]


def size_of(plan: Chunking, row: int, column: int) -> tuple[int, int]:
    """Returns the rows and columns of the chunk that begins at (row, column). The last chunk may be short."""
    if plan.short is None or plan.lacks(row, column) <= 0:
        assert row + plan.rows <= plan.shard_rows and column + plan.cols <= plan.shard_cols
        return plan.rows, plan.cols
    assert plan.short == (min(plan.rows, plan.shard_rows - row), min(plan.cols, plan.shard_cols - column))
    return plan.short


def schedules(devices: int, cluster: int = 1):
    for m_shard, k, itemsize, chunk_bytes in SHAPES:
        for minor, width, n_tiles in (("m", 2, 3), ("n", 2, 3), ("m", 8, 1)):
            order = TileOrder(ceil_div(m_shard, cluster * BLOCK_ROWS), n_tiles, minor, width)
            yield AllGatherSchedule(
                devices, order, BLOCK_ROWS, Chunking.cut(m_shard, k, itemsize, BLOCK_ROWS, chunk_bytes)
            )


def tiles_of(schedule: AllGatherSchedule, cluster: int):
    """Yields (step, row block, tile column) of each CTA's tiles. A cluster's last tile may lie below the last row."""
    for index in range(schedule.tiles):
        step, m, n = schedule.tile(index)
        for rank in range(cluster):
            yield step, m * cluster + rank, n


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("devices", range(1, 17))
def test_every_output_tile_once(devices, cluster):
    for schedule in schedules(devices, cluster):
        blocks, n_tiles = schedule.row_blocks, schedule.order.n_tiles
        tiles = list(tiles_of(schedule, cluster))
        # At most one tile without rows at the bottom of each column.
        assert all(m < blocks + cluster - 1 for _, m, _ in tiles)
        real = [tile for tile in tiles if tile[1] < blocks]
        for me in range(devices):
            places = {(schedule.shard(me, step), m, n) for step, m, n in real}
            expected = {(s, m, n) for s in range(devices) for m in range(blocks) for n in range(n_tiles)}
            assert places == expected
            assert len(real) == len(expected)


@pytest.mark.parametrize("devices", range(1, 17))
def test_own_shard_first_and_no_peer_read_by_two_at_the_same_step(devices):
    for schedule in schedules(devices):
        assert [schedule.shard(me, 0) for me in range(devices)] == list(range(devices))
        for step in range(devices):
            assert sorted(schedule.shard(me, step) for me in range(devices)) == list(range(devices))


@pytest.mark.parametrize("devices", range(1, 17))
@pytest.mark.parametrize(("num_ctas", "cluster"), [(1, 1), (3, 1), (132, 1), (132, 2)])
def test_chunks_fill_the_scratch_exactly_once_and_satisfy_every_wait(devices, num_ctas, cluster):
    for schedule in schedules(devices, cluster):
        plan = schedule.chunking
        written, raised, elements = collections.Counter(), collections.Counter(), 0
        for cta in range(num_ctas):
            for index in range(cta, schedule.pulled_chunks, num_ctas):
                step, row, column = schedule.chunk(index)
                assert 1 <= step < devices
                assert row % plan.rows == 0 and column % plan.cols == 0
                written[step, row, column] += 1
                raised[schedule.flag(step, row)] += 1
                # A chunk belongs to one flag: its first and last row share the block.
                rows, columns = size_of(plan, row, column)
                assert schedule.flag(step, row) == schedule.flag(step, row + rows - 1)
                elements += rows * columns
        # Each chunk is written exactly once, so no chunk overwrites another. Together they cover all pulled elements.
        assert set(written.values()) <= {1}
        assert elements == (devices - 1) * plan.shard_rows * plan.shard_cols
        # Every flag that a tile waits for exists, and is raised exactly as often as the tile expects.
        rows, columns = schedule.flags_shape
        for step, m, _ in tiles_of(schedule, cluster):
            if step > 0 and m < schedule.row_blocks:
                flag = schedule.flag(step, m * schedule.block_rows)
                assert 0 <= flag[0] < rows and 0 <= flag[1] < columns
                assert raised[flag] == schedule.flag_target(m)
        assert len(raised) == (devices - 1) * columns


def test_chunks_arrive_in_the_order_in_which_shards_are_used():
    for schedule in schedules(5):
        steps = [schedule.chunk(i)[0] for i in range(schedule.pulled_chunks)]
        assert steps == sorted(steps)


@pytest.mark.parametrize("minor", ["m", "n"])
@pytest.mark.parametrize("m_tiles", [1, 2, 5, 8])
@pytest.mark.parametrize("n_tiles", [1, 3, 4, 16])
@pytest.mark.parametrize("width", [1, 2, 3, 8])
def test_tile_order_is_a_walk_over_the_grid(minor, m_tiles, n_tiles, width):
    order = TileOrder(m_tiles, n_tiles, minor, width)
    walk = [order(i) for i in range(order.tiles)]
    assert sorted(walk) == [(m, n) for m in range(m_tiles) for n in range(n_tiles)]
    # Inside a band the walk moves by one tile along the major dimension: the snake never jumps back.
    majors = [(n if minor == "m" else m) for m, n in walk]
    assert all(abs(a - b) <= 1 for a, b in itertools.pairwise(majors))


def test_traced_indices_agree_with_python_ones():
    for schedule in schedules(3):
        for index in range(0, schedule.tiles, 5):
            assert tuple(map(int, schedule.tile(jnp.int32(index)))) == schedule.tile(index)
        for index in range(0, schedule.pulled_chunks, 97):
            assert tuple(map(int, schedule.chunk(jnp.int32(index)))) == schedule.chunk(index)


def test_chunks_respect_their_limit_and_the_copy_engine():
    for m_shard, k, itemsize, chunk_bytes in SHAPES:
        plan = Chunking.cut(m_shard, k, itemsize, BLOCK_ROWS, chunk_bytes)
        assert plan.rows * plan.cols * itemsize <= chunk_bytes
        assert plan.cols * itemsize % 16 == 0
        assert plan.cols == k or plan.rows == 1
        # Chunks are large for all sizes: at least a third of the allowed bytes, if there are that many.
        assert plan.rows * plan.cols * itemsize >= min(chunk_bytes // 3, m_shard * k * itemsize)
    with pytest.raises(ValueError, match="multiple of 16 bytes"):
        Chunking.cut(128, 65, 2, 128, 8192)
    with pytest.raises(ValueError, match="multiple of 16 bytes"):
        Chunking.cut(128, 8191, 2, 128, 8192)


def test_largest_divisor():
    assert [largest_divisor(12, limit) for limit in (1, 2, 3, 4, 5, 6, 100)] == [1, 2, 3, 4, 4, 6, 12]
