"""Tests the schedule of `all_gather_rhs_matmul` by walking it exhaustively: pure integers, no kernel."""

import collections

import jax.numpy as jnp
import pytest

import overlap
from overlap.collectives.gather.rhs_schedule import GatherRhsSchedule
from tests.ops.rhs_cases import ALONG
from tests.protocol.test_schedule import size_of

WALKS = [  # m, shard of the weights along n, config: chunks of many rows, one row, parts of a row; ragged
    (256, (1024, 128), {"tile_n": 128}),
    (200, (1096, 264), {"tile_n": 128, "order_minor": "n", "order_width": 1}),
    (128, (72, 4096), {}),
    (384, (520, 392), {"chunk_bytes": 256, "tile_n": 192}),  # Tiles straddle column blocks.
    (300, (584, 320), {"cluster": 2, "tile_n": 64, "chunk_bytes": 128}),
    (128, (520, 64), {"tile_n": 64, "chunk_bytes": 2048}),  # The last chunk has fewer rows,
    (128, (520, 8 * 37), {"tile_n": 64, "chunk_bytes": 256}),  # the last part of each row fewer columns.
]


def schedules(devices, along):
    for m, shard, fields in WALKS:
        config = overlap.Config(**fields)
        yield GatherRhsSchedule.of(devices, along, m, shard, 2, config), config


def tiles_of(schedule, config):
    """Yields (step, m, n) of each CTA's tiles, including tiles outside the result."""
    for index in range(schedule.tiles):
        step, m, n = schedule.tile(index)
        for rank in range(config.cluster):
            yield step, m * config.cluster + rank, n


@pytest.mark.parametrize("along", ALONG)
@pytest.mark.parametrize("devices", range(1, 9))
def test_each_tile_once_and_over_all_of_k(devices, along):
    for (m_rows, shard, _), (schedule, config) in zip(WALKS, schedules(devices, along), strict=True):
        shards = 1 if along == "k" else devices
        m_tiles, n_tiles = -(-m_rows // config.tile_m), -(-shard[1] // config.tile_n)
        expected = {(step, m, n) for step in range(shards) for m in range(m_tiles) for n in range(n_tiles)}
        real = [(s, m, n) for s, m, n in tiles_of(schedule, config) if m < m_tiles and n < n_tiles]
        assert len(real) == len(expected) and set(real) == expected
        # The own columns come first, or the own part of each sum. At no step do two devices read from the same peer.
        assert real[0][0] == 0
        for step in range(devices):
            assert sorted(schedule.shard(me, step) for me in range(devices)) == list(range(devices))
        rows = [schedule.rows_of_k_step(0, k) for k in range(schedule.k_steps)]
        assert rows == [
            (step, row)
            for step in range(devices if along == "k" else 1)
            for row in range(0, shard[0], 64)
        ]  # fmt: skip


@pytest.mark.parametrize("along", ALONG)
@pytest.mark.parametrize("num_ctas", [3, 132])
@pytest.mark.parametrize("devices", range(1, 9))
def test_chunks_fill_the_scratch_once_and_every_wait_is_for_what_it_needs(devices, num_ctas, along):
    for schedule, config in schedules(devices, along):
        plan, raised, lies_in, elements = schedule.chunking, collections.Counter(), {}, 0
        for cta in range(num_ctas):
            for index in range(cta, schedule.pulled_chunks, num_ctas):
                step, row, column = schedule.chunk(index)
                assert 1 <= step < devices
                rows, columns = size_of(plan, row, column)
                assert 0 <= row <= plan.shard_rows - rows and 0 <= column <= plan.shard_cols - columns
                assert (step, row, column) not in lies_in
                flag = schedule.flag(step, row, column)
                assert flag == schedule.flag(step, row + rows - 1, column + columns - 1)
                elements += rows * columns
                assert all(0 <= i < size for i, size in zip(flag, schedule.flags_shape, strict=True))
                lies_in[step, row, column] = flag
                raised[flag] += 1
        # Each element once: chunks begin at multiples of their sizes.
        assert all(row % plan.rows == 0 and column % plan.cols == 0 for _, row, column in lies_in)
        assert len(lies_in) == schedule.pulled_chunks == schedule.pulled_shards * plan.chunks
        assert elements == schedule.pulled_shards * plan.shard_rows * plan.shard_cols
        waits = set()
        for step, _, n in set(tiles_of(schedule, config)):
            first, last = schedule.columns_of(n)
            if first >= plan.shard_cols:
                continue
            # A tile waits for exactly the blocks that its columns intersect.
            awaited = {schedule.flag(0, 0, c)[2] for c in ((first, last) if schedule.straddles else (first,))}
            assert awaited == {schedule.flag(0, 0, c)[2] for c in range(first, last + 1)}
            waited_for = None
            for k in range(schedule.k_steps):
                source, row = schedule.rows_of_k_step(step, k)
                if schedule.begins_block(k):
                    waited_for = source, row // schedule.block_rows
                # Each row loaded in a step lies in the block that was last waited for.
                last_row = min(row + 64, plan.shard_rows) - 1
                assert waited_for == (source, row // schedule.block_rows) == (source, last_row // schedule.block_rows)
                if source >= 1:
                    waits |= {(source, row, c) for c in (first, last)}
        for source, row, column in waits:
            assert raised[schedule.flag(source, row, column)] == schedule.flag_target(row, column)
        assert {schedule.flag(*wait) for wait in waits} == set(raised)


@pytest.mark.parametrize("along", ALONG)
def test_chunks_come_in_the_order_in_which_tiles_need_them(along):
    for schedule, _ in schedules(5, along):
        chunks = [schedule.chunk(i) for i in range(schedule.pulled_chunks)]
        blocks = [(step, *schedule.flag(step, row, column)[1:]) for step, row, column in chunks]
        keys = [(step, c, r) if along == "n" else (c, step, r) for step, r, c in blocks]
        assert keys == sorted(keys)


def test_traced_indices_agree_with_python_ones():
    for along in ALONG:
        for schedule, _ in schedules(3, along):
            for index in range(0, schedule.tiles, 3):
                assert tuple(map(int, schedule.tile(jnp.int32(index)))) == schedule.tile(index)
            for index in range(0, schedule.pulled_chunks, 1 + schedule.pulled_chunks // 7):
                chunk = schedule.chunk(index)
                assert tuple(map(int, schedule.chunk(jnp.int32(index)))) == chunk
                _, row, column = map(jnp.int32, chunk)
                assert int(schedule.flag_target(row, column)) == schedule.flag_target(*chunk[1:])
