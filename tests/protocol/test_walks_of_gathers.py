"""Walks the schedules of gathers exhaustively: each tile, chunk and row once, and every flag as often as is awaited."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math

import numpy as np
import pytest

import overlap
from overlap.collectives.gather.joined_schedule import JoinedSchedule
from overlap.collectives.gather.lhs_schedule import AllGatherSchedule
from overlap.collectives.gather.rhs_schedule import GatherRhsSchedule
from overlap.kernels.stream_k import StreamK
from overlap.kernels.tile_order import TileOrder
from overlap.primitives import Chunking
from overlap.primitives.integers import ceil_div, largest_divisor
from tests.protocol.test_walks_of_sums import schedules as of_sums
from tests.protocol.walks import DEVICES, check_traced, chunks_of, pieces_of

pytestmark = pytest.mark.one_jax


def check_shards(schedule, devices):
    """The own shard comes first. At no step do two devices read from the same peer."""
    assert [schedule.shard(me, 0) for me in range(devices)] == list(range(devices))
    for step in range(devices):
        assert sorted(schedule.shard(me, step) for me in range(devices)) == list(range(devices))


# --- Rows by pull -----------------------------------------------------------------------------------------------------

BLOCK_ROWS = 128
SHAPES = [  # m_shard, k, itemsize, chunk_bytes: rows per chunk > 1, = 1, and parts of rows
    (384, 128, 2, 8192),
    (256, 3584, 2, 4096),
    (128, 12288, 2, 8192),
    (200, 4096, 2, 8192),  # The last row block is shorter,
    (131, 64, 2, 8192),  # and by an odd number of rows.
    (1, 72, 2, 8192),
    (131, 512, 2, 8192),  # The last of the chunks of eight rows has three.
    (40, 8 * 1009, 2, 8192),  # A row of a prime number of 16-byte units: in two unequal parts.
]


def of_rows(devices, cluster=1):
    for m_shard, k, itemsize, chunk_bytes in SHAPES:
        chunking = Chunking.cut(m_shard, k, itemsize, BLOCK_ROWS, chunk_bytes)
        for minor, width, n_tiles in (("m", 2, 3), ("n", 2, 3), ("m", 8, 1)):
            order = TileOrder(ceil_div(m_shard, cluster * BLOCK_ROWS), n_tiles, minor, width)
            yield AllGatherSchedule(devices, order, BLOCK_ROWS, chunking)


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("devices", DEVICES)
def test_rows_by_pull(devices, cluster):
    for schedule in of_rows(devices, cluster):
        check_shards(schedule, devices)
        blocks, n_tiles = schedule.row_blocks, schedule.order.n_tiles
        tiles = [schedule.tile(index) for index in range(schedule.tiles)]
        # Tiles come in the order of the steps, those of the own shard first.
        assert [step for step, *_ in tiles] == sorted(step for step, *_ in tiles)
        tiles = [(step, m * cluster + rank, n) for step, m, n in tiles for rank in range(cluster)]
        # A cluster's last tile may lie below the last row.
        assert all(m < blocks + cluster - 1 for _, m, _ in tiles)
        real = [tile for tile in tiles if tile[1] < blocks]
        assert sorted(real) == list(itertools.product(range(devices), range(blocks), range(n_tiles)))
        flag = lambda step, row, _: schedule.flag(step, row)  # noqa: B023, E731
        chunks, raised = chunks_of(schedule.chunking, schedule.pulled_chunks, schedule.chunk, flag, devices - 1)
        # Chunks come in the order in which shards are used.
        assert [step for step, *_ in chunks] == sorted(step for step, *_ in chunks)
        awaited = {(schedule.flag(step, m * BLOCK_ROWS), schedule.flag_target(m)) for step, m, _ in real if step > 0}
        assert awaited == set(raised.items()) and all(
            0 <= i < size for f in raised for i, size in zip(f, schedule.flags_shape, strict=True)
        )


@pytest.mark.parametrize("minor", ["m", "n"])
def test_the_order_of_tiles_is_a_walk_over_the_grid(minor):
    for m_tiles, n_tiles, width in itertools.product((1, 2, 5, 8), (1, 3, 4, 16), (1, 2, 3, 8)):
        order = TileOrder(m_tiles, n_tiles, minor, width)
        walk = [order(i) for i in range(order.tiles)]
        assert sorted(walk) == [(m, n) for m in range(m_tiles) for n in range(n_tiles)]
        # Inside a band the walk moves by one tile along the major dimension: the snake never jumps back.
        majors = [(n if minor == "m" else m) for m, n in walk]
        assert all(abs(a - b) <= 1 for a, b in itertools.pairwise(majors))


def test_chunks_respect_their_limit_and_the_copy_engine():
    for m_shard, k, itemsize, chunk_bytes in SHAPES:
        plan = Chunking.cut(m_shard, k, itemsize, BLOCK_ROWS, chunk_bytes)
        chunk = plan.rows * plan.cols * itemsize
        assert chunk <= chunk_bytes and plan.cols * itemsize % 16 == 0 and (plan.cols == k or plan.rows == 1)
        # Chunks are large for all sizes: at least a third of the allowed bytes, if there are that many.
        assert chunk >= min(chunk_bytes // 3, m_shard * k * itemsize)
    for k in (65, 8191):
        with pytest.raises(ValueError, match="multiple of 16 bytes"):
            Chunking.cut(128, k, 2, 128, 8192)
    assert [largest_divisor(12, limit) for limit in (1, 2, 3, 4, 5, 6, 100)] == [1, 2, 3, 4, 4, 6, 12]


# --- Rows by ring -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [2, 3, pytest.param(6, marks=pytest.mark.slow)])
@pytest.mark.parametrize("stream_k", [1, 3])
def test_rows_by_ring(devices, stream_k):
    """For every step and row block, each k step exactly once; the flag's final count equals what producers wait for."""
    forms = [(1, (264,)), (2, (136, 8)), (3, (64,))]
    for (batch, widths), m_shard, order, ctas in itertools.product(forms, (1, 200, 384), "mn", (2, 13)):
        config = overlap.Config(tile_n=64, order_minor=order, stream_k=stream_k)
        schedule = AllGatherSchedule.of(devices, (batch, m_shard, 200), widths, 2, config)
        work = StreamK(schedule.tiles, math.ceil(200 / 64), ctas, config.stream_k)
        passed, raised = collections.Counter(), collections.Counter()
        for group in range(ctas):
            steps = []
            for piece in pieces_of(work, group):
                step, row, column = schedule.tile(piece.tile)
                steps.append(step)
                (element, m), (side, n) = schedule.batch_of(row), schedule.side_of(column)
                if schedule.passes_on(step, m, side, n):
                    flag = schedule.flag(step + 1, element * m_shard + m * config.tile_m)
                    raised[flag] += work.pieces_per_tile if piece.pieces_per_tile == 1 else 1
                    passed.update((step, element, m, k) for k in range(piece.k_first, piece.k_first + piece.k_steps))
            # A tile waits for tiles of the previous step, on another device. So the waits cannot form a cycle.
            assert steps == sorted(steps)
        every = itertools.product(range(devices - 1), range(batch), range(schedule.row_blocks), range(work.k_steps))
        assert passed == dict.fromkeys(every, 1)
        assert raised == dict.fromkeys(itertools.product(*map(range, schedule.flags_shape)), work.pieces_per_tile)


@pytest.mark.parametrize("devices", [2, 3, 6])
@pytest.mark.parametrize("keeps_own", [False, True])
def test_what_a_device_passes_on_is_what_the_one_before_it_needs_next(devices, keeps_own):
    schedule = AllGatherSchedule.of(devices, (200, 64), (64,), 2, overlap.Config())
    schedule = dataclasses.replace(schedule, keeps_own=keeps_own)
    for me in range(devices):
        previous = (me + devices - 1) % devices
        places = [schedule.scratch_index(previous, step + 1) for step in range(devices - 1)]
        for step in range(devices - 1):
            assert schedule.shard(me, step) == schedule.shard(previous, step + 1)
        kept = [schedule.scratch_index(previous, 0)] if keeps_own else []
        assert sorted(places + kept) == list(range(schedule.scratch_shards))


# --- Few rows, joined -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [2, 3, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(
    ("m_shard", "k", "chunk_bytes"),
    [(1, 8, 8192), (3, 1032, 1024), (16, 512, 8192), (40, 64, 512), (96, 64, 8192), (131, 64, 4096), (6, 1016, 1024)],
)
def test_joined_rows(devices, m_shard, k, chunk_bytes, scaled):
    for tile_m, me in itertools.product((64, 128), range(devices)):
        config = overlap.Config(tile_m=tile_m, chunk_bytes=chunk_bytes)
        schedule = JoinedSchedule.of(devices, (m_shard, k), (256,), 2, config, scaled=scaled)
        row_of = lambda step, row: schedule.row(me, step, row)  # noqa: B023, E731
        flag = lambda step, row, _: schedule.flag(row_of(step, row))  # noqa: B023, E731
        chunks, raised = chunks_of(schedule.chunking, schedule.chunks, schedule.chunk, flag, devices)
        # The peers' chunks come first, since their transfer takes longest.
        assert [step > 0 for step, *_ in chunks] == [n < schedule.pulled_chunks for n in range(len(chunks))]
        for step, row, _ in chunks:
            assert row_of(step, row) == (me + step) % devices * m_shard + row
            assert schedule.flag(row_of(step, row)) == row_of(step, row) // tile_m
        scales = np.zeros(devices * m_shard, int)
        for index in range(schedule.scale_transfers):
            step, row = schedule.scale_transfer(index)
            assert step < devices and row + schedule.scale_rows <= m_shard
            first, last = row_of(step, row), row_of(step, row) + schedule.scale_rows - 1
            scales[first : last + 1] += 1
            assert schedule.flag(first) == schedule.flag(last)
            raised[schedule.flag(first)] += 1
        assert (scales == scaled).all()
        assert raised == {n: schedule.flag_target(n) for n in range(schedule.flags_shape[0])}
        assert schedule.product.tiles == -(-devices * m_shard // tile_m)


# --- Weights ----------------------------------------------------------------------------------------------------------

WALKS = [  # m, shard of the weights along n, config: chunks of many rows, one row, parts of a row; ragged
    (256, (1024, 128), {"tile_n": 128}),
    (200, (1096, 264), {"tile_n": 128, "order_minor": "n", "order_width": 1}),
    (128, (72, 4096), {}),
    (384, (520, 392), {"chunk_bytes": 256, "tile_n": 192}),  # Tiles straddle column blocks.
    (128, (8, 2752), {"chunk_bytes": 688}),
    (300, (584, 320), {"cluster": 2, "tile_n": 64, "chunk_bytes": 128}),
    (128, (520, 64), {"tile_n": 64, "chunk_bytes": 2048}),  # The last chunk has fewer rows,
    (128, (520, 8 * 37), {"tile_n": 64, "chunk_bytes": 256}),  # the last part of each row fewer columns.
    (128, (72, 640), {"chunk_bytes": 256}),  # The last column block is narrower than a tile.
]


def of_weights(devices, along):
    for m, shard, fields in WALKS:
        config = overlap.Config(**fields)
        yield GatherRhsSchedule.of(devices, along, m, shard, 2, config), config, m, shard


@pytest.mark.parametrize("along", ["n", "k"])
@pytest.mark.parametrize("devices", DEVICES[:8])
def test_weights(devices, along):
    for schedule, config, m_rows, shard in of_weights(devices, along):
        check_shards(schedule, devices)
        plan, shards = schedule.chunking, 1 if along == "k" else devices
        m_tiles, n_tiles = -(-m_rows // config.tile_m), -(-shard[1] // config.tile_n)
        tiles = [
            (step, m * config.cluster + rank, n)
            for step, m, n in map(schedule.tile, range(schedule.tiles))
            for rank in range(config.cluster)
        ]
        real = [(s, m, n) for s, m, n in tiles if m < m_tiles and n < n_tiles]
        assert sorted(real) == list(itertools.product(range(shards), range(m_tiles), range(n_tiles)))
        # The own columns come first, then those of each step in turn.
        assert [step for step, *_ in tiles] == sorted(step for step, *_ in tiles)
        steps = range(devices if along == "k" else 1)
        of_k = [schedule.rows_of_k_step(0, k) for k in range(schedule.k_steps)]
        assert of_k == [(step, row) for step in steps for row in range(0, shard[0], 64)]
        chunks, raised = chunks_of(plan, schedule.pulled_chunks, schedule.chunk, schedule.flag, devices - 1)
        # Chunks come in the order in which tiles need them.
        blocks = [(step, *schedule.flag(step, row, column)[1:]) for step, row, column in chunks]
        keys = [(step, c, r) if along == "n" else (c, step, r) for step, r, c in blocks]
        assert keys == sorted(keys)
        assert raised.keys() <= set(itertools.product(*map(range, schedule.flags_shape)))
        waits = set()
        for step, _, n in set(tiles):
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
                waits |= {(source, row, c) for c in (first, last)} if source >= 1 else set()
        # As pairs: no wait for a flag may have another target than the last one.
        assert {(schedule.flag(*wait), schedule.flag_target(*wait[1:])) for wait in waits} == set(raised.items())


def test_traced_indices_agree_with_python_ones():
    sums = [each for each, *_ in of_sums(3)][:3]
    weights = [each for each, *_ in of_weights(3, "k")]
    for schedule in [*list(of_rows(3))[::8], *weights, *sums]:
        check_traced(schedule.tile, 0, schedule.tiles // 2, schedule.tiles - 1)
    for schedule in (next(of_rows(3)), weights[0], next(of_weights(3, "n"))[0]):
        check_traced(schedule.chunk, schedule.pulled_chunks // 2, schedule.pulled_chunks - 1)
    for schedule in sums:
        step, row, _ = schedule.chunk(schedule.sent_chunks - 1)
        check_traced(schedule.chunk, schedule.sent_chunks - 1)
        check_traced(schedule.box_of_row, row)
        check_traced(schedule.tile_of_row, row)
        for each in (schedule, dataclasses.replace(schedule, uses_ring=True)):
            check_traced(each.sender, (0, step))
            check_traced(each.receiver, (0, step))
