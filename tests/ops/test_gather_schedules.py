"""The schedules of gathers, walked as integers: every tile and every row once, every flag raised as announced."""

import dataclasses
import itertools

import numpy as np
import pytest

from overlap import Config
from overlap.collectives.gather.joined_schedule import JoinedSchedule
from overlap.collectives.gather.lhs_schedule import AllGatherSchedule
from overlap.primitives.integers import ceil_div

pytestmark = pytest.mark.one_jax
ROWS = [(1, 8, 8192), (3, 1032, 1024), (16, 512, 8192), (40, 64, 512), (131, 64, 4096), (6, 1016, 1024)]


def size_of(plan, row, column):
    """The rows and columns of the chunk that begins at (row, column). The last chunk may be short."""
    if plan.short is None or plan.lacks(row, column) <= 0:
        assert row + plan.rows <= plan.shard_rows and column + plan.cols <= plan.shard_cols
        return plan.rows, plan.cols
    assert plan.short == (min(plan.rows, plan.shard_rows - row), min(plan.cols, plan.shard_cols - column))
    return plan.short


@pytest.mark.parametrize(("devices", "shape"), [*itertools.product((2, 3, 8), ROWS)])
def test_joined_rows(devices, shape):
    m_shard, k, chunk_bytes = shape
    for tile_m, scaled in itertools.product((64, 128), (False, True)):
        config = Config(tile_m=tile_m, chunk_bytes=chunk_bytes)
        schedule = JoinedSchedule.of(devices, (m_shard, k), (256,), 2, config, scaled=scaled)
        for me in range(devices):
            copied, raised = np.zeros((devices * m_shard, k), int), np.zeros(schedule.flags_shape, int)
            scales = np.zeros(devices * m_shard, int)
            for index in range(schedule.chunks):
                step, row, column = schedule.chunk(index)
                # The peers' chunks come first, since their transfer takes longest.
                assert (step > 0) == (index < schedule.pulled_chunks)
                rows, columns = size_of(schedule.chunking, row, column)
                assert rows > 0 and columns > 0
                first = schedule.row(me, step, row)
                assert first == (me + step) % devices * m_shard + row
                copied[first : first + rows, column : column + columns] += 1
                assert schedule.flag(first) == schedule.flag(first + rows - 1) == first // tile_m
                raised[schedule.flag(first)] += 1
            for index in range(schedule.scale_transfers):
                step, row = schedule.scale_transfer(index)
                assert step < devices and row + schedule.scale_rows <= m_shard
                first = schedule.row(me, step, row)
                scales[first : first + schedule.scale_rows] += 1
                assert schedule.flag(first) == schedule.flag(first + schedule.scale_rows - 1)
                raised[schedule.flag(first)] += 1
            assert (copied == 1).all() and (scales == scaled).all()
            assert [schedule.flag_target(flag) for flag in range(len(raised))] == list(raised)
        assert schedule.product.tiles == ceil_div(devices * m_shard, tile_m)


@pytest.mark.parametrize(
    ("devices", "batch", "cluster", "widths"), [*itertools.product((1, 3), (1, 3), (1, 2), ((200, 8), (264, 136, 72)))]
)
def test_every_tile_of_every_side_and_batch_element(devices, batch, cluster, widths):
    for m_shard, order in itertools.product((200, 1, 256), "mn"):
        config = Config(tile_n=64, cluster=cluster, order_minor=order, order_width=2)
        schedule = dataclasses.replace(
            AllGatherSchedule.of(devices, (batch, m_shard, 64), widths, 2, config), keeps_own=True
        )
        rows, columns = config.cluster_tile_m, config.tile_n
        found, raised = [], {}
        for index in range(schedule.pulled_chunks):
            step, row, _ = schedule.chunk(index)
            flag = schedule.flag(step, row)
            assert all(0 <= i < size for i, size in zip(flag, schedule.flags_shape, strict=True))
            raised[flag] = raised.get(flag, 0) + 1
        for index in range(schedule.tiles):
            step, row, column = schedule.tile(index)
            (element, m), (side, n) = schedule.batch_of(row), schedule.side_of(column)
            assert schedule.first_column(side) + n == column
            found.append((step, element, m, side, n))
            for block in range(m * rows // 128, min((m + 1) * rows // 128, schedule.row_blocks)):
                flag = schedule.flag(step, element * m_shard + block * 128) if step else None
                assert not step or raised[flag] == schedule.flag_target(block)
        grid = [(side, n) for side, width in enumerate(widths) for n in range(ceil_div(width, columns))]
        places = itertools.product(range(devices), range(batch), range(ceil_div(m_shard, rows)), grid)
        assert sorted(found) == [(step, element, m, *place) for step, element, m, place in places]
        # All chunks of a shard, also of the own shard, cover each of its elements once.
        origins = [schedule.origin(chunk) for chunk in range(schedule.chunks)]
        assert len(set(origins)) == len(origins)
        sizes = [size_of(schedule.chunking, row % m_shard, column) for row, column in origins]
        assert sum(rows * columns for rows, columns in sizes) == batch * m_shard * 64
        for me in range(devices):
            assert sorted(schedule.scratch_index(me, step) for step in range(devices)) == list(range(devices))


def test_right_sides_are_as_local_and_as_balanced_as_one_of_their_total_width():
    several = AllGatherSchedule.of(4, (1024, 64), (4096, 1024, 1024), 2, Config())
    one = AllGatherSchedule.of(4, (1024, 64), (6144,), 2, Config())
    assert [several.tile(i) for i in range(several.tiles)] == [one.tile(i) for i in range(one.tiles)]
