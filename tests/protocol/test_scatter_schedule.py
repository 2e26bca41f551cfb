"""Tests the schedules of products summed over devices by walking them exhaustively: pure integers, no kernel."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import overlap
from overlap.collectives.reduce.blocks_schedule import ReduceScatterSchedule
from tests.protocol.test_schedule import size_of

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
        itemsize = 128 // boxes[2]
        yield ReduceScatterSchedule.of(devices, along, block, boxes, itemsize, config), block, config


@pytest.mark.parametrize("devices", range(1, 17))
def test_each_tile_once_and_the_own_ones_last(devices):
    for schedule, (batch, rows, columns), config in schedules(devices):
        m_tiles, n_tiles = -(-rows // config.tile_m), -(-columns // config.tile_n)
        tiles = [schedule.tile(index) for index in range(schedule.tiles)]
        assert len(tiles) == devices * batch * m_tiles * n_tiles
        assert set(tiles) == {
            (step, element, m, n)
            for step in range(devices)
            for element in range(batch)
            for m in range(m_tiles)
            for n in range(n_tiles)
        }
        # A tile of the own block comes after the same tile of all peers' blocks, and after all of these blocks.
        assert [step for step, *_ in tiles] == sorted(step for step, *_ in tiles)
        assert schedule.last_step == devices - 1
        # The same on all devices.
        per_block = len(tiles) // devices
        for step in range(devices):
            of_step = tiles[step * per_block : (step + 1) * per_block]
            assert [tile[1:] for tile in of_step] == [tile[1:] for tile in tiles[:per_block]]
        places = [schedule.index_in_block(*tile[1:]) for tile in tiles[:per_block]]
        assert sorted(places) == list(range(per_block)) == list(range(schedule.order.tiles))
        # Flags and memory have room for everything in a peer's block.
        steps, of_block = schedule.flags_shape
        assert schedule.sent_shape == (steps, per_block * schedule.boxes[0], *schedule.boxes[1:])
        assert steps == max(devices - 1, 1) and of_block == per_block


@pytest.mark.parametrize("devices", range(1, 17))
def test_devices_send_to_different_ones_and_terms_find_their_source(devices):
    for schedule, _, _ in schedules(devices):
        for step in range(devices):
            assert sorted(schedule.block(me, step) for me in range(devices)) == list(range(devices))
        for me in range(devices):
            assert schedule.block(me, schedule.last_step) == me
            sources = [schedule.sender(me, term) for term in range(schedule.last_step)]
            assert sorted([*sources, me]) == list(range(devices))
            for term, source in enumerate(sources):
                # In step `term` that device computes its part of this device's block, and in no other step.
                assert [step for step in range(devices) if schedule.block(source, step) == me] == [term]
            for step in range(schedule.last_step):
                assert schedule.sender(schedule.block(me, step), step) == me


@pytest.mark.parametrize("devices", range(1, 17))
def test_by_ring_a_sum_goes_from_device_to_device_until_it_is_home(devices):
    for schedule, _, _ in schedules(devices):
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
                device = there
                met.append(device)
            assert device == owner and sorted(met) == list(range(devices))
        assert not schedule.has_terms(0)
        assert schedule.adds_before_sending == (devices > 2)


@pytest.mark.parametrize("devices", range(1, 17))
def test_by_push_each_part_goes_to_its_owner(devices):
    for schedule, _, _ in schedules(devices):
        last = schedule.last_step
        assert [schedule.has_terms(step) for step in range(devices)] == [False] * last + [True]
        assert [schedule.step_of_term(last, term) for term in range(schedule.terms)] == list(range(last))
        for me in range(devices):
            for step in range(last):
                there = schedule.receiver(me, step)
                assert there == schedule.block(me, step) and schedule.sender(there, step) == me
        assert not schedule.adds_before_sending


@pytest.mark.parametrize("devices", range(1, 17))
def test_chunks_cover_all_boxes_of_all_peers_tiles_once_in_the_order_of_the_tiles(devices):
    for schedule, _, _ in schedules(devices):
        plan, (count, box_rows, box_columns) = schedule.chunking, schedule.boxes
        tiles = [schedule.tile(index) for index in range(schedule.last_step * schedule.order.tiles)]
        expected = [
            (step, schedule.index_in_block(*where)) for step, *where in tiles for _ in range(schedule.tile_chunks)
        ]
        covered, order = set(), []
        for index in range(schedule.sent_chunks):
            step, row, column = schedule.chunk(index)
            rows, columns = size_of(plan, row, column)
            assert 0 <= step < schedule.last_step and 0 <= column <= box_columns - columns
            # A chunk is a piece of one box, and that box belongs to the tile whose flag the chunk waits for.
            box, first = schedule.box_of_row(row)
            assert 0 <= box < schedule.sent_shape[1] and first <= box_rows - rows and row == box * box_rows + first
            place = schedule.tile_of_row(row)
            assert 0 <= place < schedule.flags_shape[1] and place == box // count
            order.append((step, place))
            assert (step, row, column) not in covered
            covered.add((step, row, column))
        assert order == expected
        # Each element once: chunks begin at multiples of their sizes.
        assert plan.shard_rows % plan.rows == 0 and box_rows % plan.rows == 0
        assert all(row % plan.rows == 0 and column % plan.cols == 0 for _, row, column in covered)
        assert schedule.tile_chunks * schedule.order.tiles == plan.chunks
        assert len(covered) == schedule.sent_chunks == schedule.last_step * plan.chunks


@pytest.mark.parametrize("devices", range(1, 17))
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
                (batch_element, place), row, column = strips.strip(index)
                # A strip is a piece of the tile whose flag it waits for.
                assert batch_element == element and place == schedule.index_in_block(element, m, n)
                assert column == n * config.tile_n and row // config.tile_m == m
                assert (row + strips.rows - 1) // config.tile_m == m
                count = strips.rows_at(row)
                is_last = column + strips.cols > columns
                width = strips.last_cols if is_last else strips.cols
                assert count == max(min(strips.rows, rows - row), 0) and column + width <= columns
                times[element, row : row + count, column : column + width] += 1
            assert (times == 1).all()


def test_strips_have_as_many_rows_as_divide_a_tile():
    """Otherwise a tile's last strip would have rows of the next tile, which may not have been computed yet."""
    for tile_n in (64, 128, 192, 256):
        for chunk_bytes in (64, 1024, 4096, 8192, 65536):
            for tile_m, itemsize in ((64, 2), (128, 4), (256, 2)):
                config = overlap.Config(tile_m=tile_m, tile_n=tile_n, chunk_bytes=chunk_bytes)
                rows = config.strip_rows(itemsize)
                assert tile_m % rows == 0 and (rows == 1 or rows * tile_n * itemsize <= chunk_bytes)


def test_traced_indices_agree_with_python_ones():
    def traced(function, *indices):
        values = function(*map(jnp.int32, indices))
        return tuple(map(int, values)) if isinstance(values, tuple) else int(values)

    schedules_of_3 = list(schedules(3))
    for schedule, _, _ in (schedules_of_3[0], schedules_of_3[3]):
        for index in range(0, schedule.tiles, 5):
            assert traced(schedule.tile, index) == schedule.tile(index)
        for index in range(0, schedule.sent_chunks, 1 + schedule.sent_chunks // 4):
            step, row, _ = chunk = schedule.chunk(index)
            assert traced(schedule.chunk, index) == chunk
            assert traced(schedule.box_of_row, row) == schedule.box_of_row(row)
            assert traced(schedule.tile_of_row, row) == schedule.tile_of_row(row)
            assert traced(schedule.block, 2, step) == schedule.block(2, step)
            for each in (schedule, dataclasses.replace(schedule, uses_ring=True)):
                assert traced(each.sender, 0, step) == each.sender(0, step)
                assert traced(each.receiver, 0, step) == each.receiver(0, step)
                assert traced(each.step_of_term, step, 0) == each.step_of_term(step, 0)
    for schedule, block, config in (schedules_of_3[0], schedules_of_3[2]):
        strips = schedule.strips(block, 16, config)
        for index in range(0, strips.count, 1 + strips.count // 4):
            (element, place), row, column = strips.strip(index)
            of, *where = strips.strip(jnp.int32(index))
            assert (*map(int, of), *map(int, where)) == (element, place, row, column)
            assert traced(strips.rows_at, row) == strips.rows_at(row)
