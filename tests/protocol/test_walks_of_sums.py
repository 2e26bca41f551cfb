"""Walks the schedules of products summed over devices exhaustively: each tile, part and strip once, in one order."""

from __future__ import annotations

import dataclasses
import itertools
import types

import numpy as np
import pytest

import overlap
from overlap.collectives.reduce import blocks_kernel
from overlap.collectives.reduce.blocks_schedule import ReduceScatterSchedule
from overlap.kernels.hooks import Tile
from tests.protocol.walks import DEVICES, chunks_of

pytestmark = pytest.mark.one_jax
WALKS = [  # along, (batch, rows, columns) of a block, (count, rows, columns) of a tile's boxes, config
    ("m", (1, 256, 256), (4, 64, 64), {"tile_n": 128}),
    ("n", (1, 300, 200), (4, 64, 64), {"tile_n": 128, "order_minor": "n", "order_width": 1}),
    ("m", (2, 200, 264), (4, 64, 64), {"tile_n": 128, "order_width": 2}),  # The last tiles are ragged.
    ("m", (3, 16, 136), (2, 16, 64), {"tile_m": 64, "tile_n": 128, "chunk_bytes": 1024}),  # Boxes of fewer rows.
    ("n", (1, 24, 600), (2, 24, 64), {"tile_m": 64, "tile_n": 128, "chunk_bytes": 640}),
    ("m", (1, 520, 512), (16, 64, 32), {"order_minor": "n", "order_width": 2}),  # A tile of float32.
    ("m", (2, 8, 64), (2, 8, 64), {"tile_m": 64, "tile_n": 128, "chunk_bytes": 64}),  # Parts of a row of a box.
]


def schedules(devices):
    for along, block, boxes, fields in WALKS:
        config = overlap.Config(**fields)
        schedule = ReduceScatterSchedule.of(devices, along, block, boxes, 128 // boxes[2], config)
        yield schedule, block, config


@pytest.mark.parametrize("devices", DEVICES)
def test_tiles_and_chunks(devices):
    for schedule, (batch, rows, columns), config in schedules(devices):
        m_tiles, n_tiles = -(-rows // config.tile_m), -(-columns // config.tile_n)
        tiles = [schedule.tile(index) for index in range(schedule.tiles)]
        assert sorted(tiles) == list(itertools.product(range(devices), range(batch), range(m_tiles), range(n_tiles)))
        # All peers' blocks come before the own one, each in the same order; and so on all devices.
        per_block = len(tiles) // devices
        assert tiles == [(step, *tile[1:]) for step in range(devices) for tile in tiles[:per_block]]
        assert schedule.last_step == devices - 1
        places = [schedule.index_in_block(*tile[1:]) for tile in tiles[:per_block]]
        assert sorted(places) == list(range(per_block)) == list(range(schedule.order.tiles))
        # Flags and memory have room for everything in a peer's block.
        (steps, of_block), (count, box_rows, _) = schedule.flags_shape, schedule.boxes
        assert schedule.sent_shape == (steps, per_block * count, *schedule.boxes[1:])
        assert (steps, of_block) == (max(devices - 1, 1), per_block)

        def flag(step, row, _):
            # A chunk is a piece of one box, and that box belongs to the tile whose flag the chunk waits for.
            box, first = schedule.box_of_row(row)  # noqa: B023
            assert row == box * box_rows + first and schedule.tile_of_row(row) == box // count  # noqa: B023
            return step, box

        chunks, _ = chunks_of(schedule.chunking, schedule.sent_chunks, schedule.chunk, flag, devices - 1)
        of_tiles = [(step, place) for step in range(devices - 1) for place in places]
        assert [(step, schedule.tile_of_row(row)) for step, row, _ in chunks] == [
            tile for tile in of_tiles for _ in range(schedule.tile_chunks)
        ]


@pytest.mark.parametrize("devices", DEVICES)
def test_by_push_each_part_goes_to_its_owner(devices):
    for schedule, *_ in schedules(devices):
        last = schedule.last_step
        assert [schedule.has_terms(step) for step in range(devices)] == [False] * last + [True]
        assert [schedule.step_of_term(last, term) for term in range(schedule.terms)] == list(range(last))
        assert not schedule.adds_before_sending
        for step in range(devices):
            assert sorted(schedule.block(me, step) for me in range(devices)) == list(range(devices))
        for me in range(devices):
            assert schedule.block(me, last) == me
            sources = [schedule.sender(me, term) for term in range(last)]
            assert sorted([*sources, me]) == list(range(devices))
            for step, source in enumerate(sources):
                # In step `step` that device computes its part of this device's block, and in no other step.
                assert [s for s in range(devices) if schedule.block(source, s) == me] == [step]
                there = schedule.receiver(me, step)
                assert there == schedule.block(me, step) and schedule.sender(there, step) == me


@pytest.mark.parametrize("devices", DEVICES)
def test_by_ring_a_sum_goes_from_device_to_device_until_it_is_home(devices):
    for schedule, *_ in schedules(devices):
        schedule = dataclasses.replace(schedule, uses_ring=True)
        for owner in range(devices):
            # The device that computes a block's first part passes it on, and so do all others.
            device = next(device for device in range(devices) if schedule.block(device, 0) == owner)
            met = [device]
            for step in range(schedule.last_step):
                there = schedule.receiver(device, step)
                assert (device - there) % devices == 1 and schedule.sender(there, step) == device
                assert schedule.block(there, step + 1) == owner
                # What a device adds in the next step is exactly what was sent in this step.
                assert schedule.has_terms(step + 1) and schedule.terms == 1
                assert schedule.step_of_term(step + 1, 0) == step
                met.append(device := there)
            assert device == owner and sorted(met) == list(range(devices))
        assert not schedule.has_terms(0) and schedule.adds_before_sending == (devices > 2)


@pytest.mark.parametrize("devices", DEVICES)
def test_strips_cover_the_own_block_once_in_the_order_of_the_tiles(devices):
    for schedule, (batch, rows, columns), config in schedules(devices):
        # All row counts that are possible: one row, divisors of a tile's rows, more rows than there are.
        for most in (1, config.strip_rows(2), config.tile_m):
            strips = schedule.strips((batch, rows, columns), most, config)
            assert strips.rows <= most and strips.cols == config.tile_n
            own = [schedule.tile(index)[1:] for index in range(schedule.tiles - schedule.order.tiles, schedule.tiles)]
            expected = [tile for tile in own for _ in range(strips.per_tile)]
            assert strips.count == len(expected)
            times = np.zeros((batch, rows, columns), int)
            for index, (element, m, n) in enumerate(expected):
                of, row, column = strips.strip(index)
                # A strip is a piece of the tile whose flag it waits for.
                assert of == (element, schedule.index_in_block(element, m, n)) and column == n * config.tile_n
                assert row // config.tile_m == (row + strips.rows - 1) // config.tile_m == m
                count = strips.rows_at(row)
                width = strips.last_cols if column + strips.cols > columns else strips.cols
                assert count == max(min(strips.rows, rows - row), 0) and column + width <= columns
                times[element, row : row + count, column : column + width] += 1
            assert (times == 1).all()


def test_strips_have_as_many_rows_as_divide_a_tile():
    """Otherwise a tile's last strip would have rows of the next tile, which may not have been computed yet."""
    for tile_n, chunk_bytes, (tile_m, itemsize) in itertools.product((64, 192), (64, 1024, 65536), ((64, 2), (256, 4))):
        rows = overlap.Config(tile_m=tile_m, tile_n=tile_n, chunk_bytes=chunk_bytes).strip_rows(itemsize)
        assert tile_m % rows == 0 and (rows == 1 or rows * tile_n * itemsize <= chunk_bytes)


@pytest.mark.parametrize("by_ring", [False, True])
def test_who_waits_for_a_term_names_its_sender(by_ring, monkeypatch):
    devices, config = 4, overlap.Config(tile_m=64, tile_n=128)
    schedule = ReduceScatterSchedule.of(devices, "m", (1, 64, 128), (2, 64, 64), 2, config)
    schedule = dataclasses.replace(schedule, uses_ring=by_ring)
    loop = lambda first, end: lambda act: [act(index) for index in range(first, end)]  # noqa: E731
    monkeypatch.setattr(blocks_kernel, "pl", types.SimpleNamespace(loop=loop))
    for me, step in itertools.product(range(devices), filter(schedule.has_terms, range(devices))):
        waits = []
        handshake = types.SimpleNamespace(wait_for=lambda role, flag, times, sender: waits.append((flag, sender)))  # noqa: B023
        body = types.SimpleNamespace(
            schedule=schedule, me=me, _handshake=handshake, _flag=lambda which, step, tile: step
        )
        blocks_kernel._Body._await_terms(body, Tile(step, 0, 0))
        # The flag's step tells which device computed each term and sent it here.
        assert all(schedule.receiver(sender, step) == me for step, sender in waits)
        assert len(waits) == schedule.terms
