"""The kernel for few rows is clean under many schedules; each injected defect in its protocol is reported."""

import dataclasses
import functools
import types

import jax.numpy as jnp
import numpy as np
import pytest

import overlap
from overlap import primitives
from overlap.collectives import communicator
from overlap.collectives.gather import joined_kernel
from overlap.collectives.gather.joined_schedule import JoinedSchedule
from overlap.emulation import emulate
from overlap.kernels.tma import produce
from overlap.primitives.integers import remainder
from tests.ops import several_sides_cases
from tests.ops.product_cases import integers
from tests.ops.several_sides_cases import Form
from tests.oracle import make_mesh
from tests.protocol.handshake_cases import change_own_chunks
from tests.protocol.protocol_cases import of_rows
from tests.protocol.test_protocol import (
    do_not_add_scales_to_the_transfers,
    signal_when_only_read,
    signal_without_waiting,
    take_scales_for_no_transfers,
)

WHOLE = overlap.Config(tile_m=64, tile_n=128, stages=2, joined=True, chunk_bytes=256)
CUT = overlap.Config(tile_m=64, tile_n=128, stages=3, stream_k=3, joined=True, chunk_bytes=1024)
# Two rows of tiles, the second with rows of two shards; more tiles than CTAs.
FORM = Form(24, (136, 128), 200, gathered=True, container=list)
NOTHING = lambda *_, **__: None  # noqa: E731


@functools.cache
def clean(form, config, devices):
    """Returns a kernel that is traced once and shared by all tests that patch nothing."""
    return of_rows(form, config, devices)


@pytest.mark.parametrize("scheduler", ["pct", "random"])
@pytest.mark.parametrize("completion", ["late", "eager", "random"])
@pytest.mark.parametrize("seed", range(6))
def test_clean(completion, seed, scheduler):
    config, cores = [(WHOLE, 3), (CUT, 7)][seed % 2]
    clean(FORM, config, 2 + seed % 2).run(cores=cores, completion=completion, scheduler=scheduler, seed=seed)


def drop_wait_for_rows(patch):
    patch.setattr(communicator, "semaphore_wait", NOTHING)


def drop_proxy_fence(patch):
    patch.setattr(communicator, "fence_async_proxy", NOTHING)


def fence_before_the_wait(patch):
    wait, fence = communicator.semaphore_wait, communicator.fence_async_proxy
    patch.setattr(communicator, "semaphore_wait", lambda *args: (fence(), wait(*args)))
    patch.setattr(communicator, "fence_async_proxy", NOTHING)


def count_too_few(patch):
    target = JoinedSchedule.flag_target
    patch.setattr(JoinedSchedule, "flag_target", lambda self, flag: target(self, flag) - 1)


def count_too_many(patch):
    target = JoinedSchedule.flag_target
    patch.setattr(JoinedSchedule, "flag_target", lambda self, flag: target(self, flag) + 1)


def wait_for_one_shard_only(patch):
    """Waits as if each shard had a tile of its own."""
    patch.setattr(JoinedSchedule, "flag_target", lambda self, flag: self.chunking.chunks)


def wait_for_the_first_rows_only(patch):
    patch.setattr(communicator, "semaphore_wait", lambda flag, value: primitives.semaphore_wait(flag, 1))


def raise_flags_twice(patch):
    patch.setattr(joined_kernel, "semaphore_signal", lambda flag: primitives.semaphore_signal(flag, 2))


def raise_the_flag_of_the_row_within_the_shard(patch):
    flag = JoinedSchedule.flag
    patch.setattr(JoinedSchedule, "flag", lambda self, row: flag(self, remainder(row, self.chunking.shard_rows)))


def copy_a_chunk_twice(patch):
    chunk = JoinedSchedule.chunk
    patch.setattr(JoinedSchedule, "chunk", lambda self, index: chunk(self, index - remainder(index, 2)))


def leave_the_last_chunk(patch):
    chunks = vars(JoinedSchedule)["chunks"].fget
    patch.setattr(JoinedSchedule, "chunks", property(lambda self: chunks(self) - 1))


def leave_the_own_shard(patch):
    patch.setattr(JoinedSchedule, "chunks", JoinedSchedule.pulled_chunks)


def raise_no_flags_for_the_own_rows(patch):
    change_own_chunks(patch, lambda copy_chunks, *args, **kwargs: copy_chunks(*args, **kwargs | {"landed": NOTHING}))


def leave_the_last_own_chunk(patch):
    change_own_chunks(
        patch,
        lambda copy_chunks, number, numbers, *args, **kwargs: copy_chunks(number, (0, numbers[1] - 1), *args, **kwargs),
    )


def draw_own_chunks_from_the_peers_counter(patch):
    """Draws own chunks from the peers' counter. Their numbers are then missing from the transfers."""
    drawn_from = []

    def keep(copy_chunks, number, numbers, counter, *args, **kwargs):
        return copy_chunks(number, numbers, drawn_from[0], *args, **kwargs)

    begin = communicator.Handshake.begin

    def begin_here(self):
        drawn_from[:] = [self.counter]
        return begin(self)

    patch.setattr(communicator.Handshake, "begin", begin_here)
    change_own_chunks(patch, keep)


def lay_the_shards_in_the_order_of_steps(patch):
    """This is no race: the rows are right but in the wrong place, so the result must show the defect."""
    patch.setattr(JoinedSchedule, "row", lambda self, me, step, row: step * self.chunking.shard_rows + row)


def _in_the_mainloop(patch, name, function):
    """Replaces a function of `jax.numpy` in the producer only."""
    patch.setattr(produce, "jnp", types.SimpleNamespace(**{**vars(jnp), name: function}))


def fill_a_slot_too_many(patch):
    """Loads one right-operand tile more than there are stages; it overwrites the first one."""
    _in_the_mainloop(patch, "minimum", lambda steps, stages: jnp.minimum(steps, stages + 1))


def fill_the_slots_for_every_tile(patch):
    """Prefetches for every tile, not only for the first tile, when all stages are free."""
    _in_the_mainloop(patch, "where", lambda is_first, steps, none: steps)


DEFECTS = [
    drop_wait_for_rows,
    drop_proxy_fence,
    fence_before_the_wait,
    signal_when_only_read,
    signal_without_waiting,
    count_too_few,
    count_too_many,
    wait_for_one_shard_only,
    wait_for_the_first_rows_only,
    raise_flags_twice,
    raise_the_flag_of_the_row_within_the_shard,
    copy_a_chunk_twice,
    leave_the_last_chunk,
    leave_the_own_shard,
    raise_no_flags_for_the_own_rows,
    leave_the_last_own_chunk,
    draw_own_chunks_from_the_peers_counter,
    fill_a_slot_too_many,
    fill_the_slots_for_every_tile,
]


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda f: f.__name__)
def test_each_defect_is_reported(defect, monkeypatch):
    defect(monkeypatch)
    report = of_rows(FORM, WHOLE).report(seeds=10, cores=3, completion="late", scheduler="pct")
    assert report, f"{defect.__name__} was not reported in 10 runs"
    # The report says where: device, CTA and the line of the kernel.
    assert "device" in str(report) and "CTA" in str(report) and ".py:" in str(report)


SCALED = Form(24, (136, 128), 200, scales=("rows", "columns"))


@pytest.mark.parametrize("m_shard", [24, 3])
@pytest.mark.parametrize("completion", ["late", "eager", "random"])
def test_scales_of_rows_are_clean(completion, m_shard):
    kernel = clean(dataclasses.replace(SCALED, m=m_shard), WHOLE, 3)
    for seed in range(3):
        kernel.run(cores=[2, 9, 20][seed], completion=completion, scheduler="pct", seed=seed)


def do_not_count_scales(patch):
    target = JoinedSchedule.flag_target
    without = lambda self, flag: target(dataclasses.replace(self, scale_rows=0), flag)  # noqa: E731
    patch.setattr(JoinedSchedule, "flag_target", without)


def leave_the_last_scales(patch):
    pieces = vars(JoinedSchedule)["scale_transfers"].fget
    patch.setattr(JoinedSchedule, "scale_transfers", property(lambda self: pieces(self) - 1))


def lay_all_scales_where_the_own_ones_belong(patch):
    row_of, copy_scales = JoinedSchedule.row, joined_kernel._pull_scales

    def copy(*args):
        patch.setattr(JoinedSchedule, "row", lambda self, me, step, row: row_of(self, me, 0 * step, row))
        copy_scales(*args)
        patch.setattr(JoinedSchedule, "row", row_of)

    patch.setattr(joined_kernel, "_pull_scales", copy)


OF_SCALES = [
    do_not_count_scales,
    leave_the_last_scales,
    lay_all_scales_where_the_own_ones_belong,
    do_not_add_scales_to_the_transfers,
]


@pytest.mark.parametrize("defect", OF_SCALES, ids=lambda f: f.__name__)
def test_each_defect_of_scales_is_reported(defect, monkeypatch):
    defect(monkeypatch)
    assert of_rows(SCALED, WHOLE).report(seeds=10, cores=9, completion="late", scheduler="pct")


def test_scales_count_as_transfers(monkeypatch):
    take_scales_for_no_transfers(monkeypatch)
    # There are fewer chunks than CTAs, so some CTAs carry none. If each CTA carried one, adding it to the count
    # would cover the CTA's scales too, and hide the defect.
    report = of_rows(SCALED, WHOLE.replace(chunk_bytes=65536)).report(cores=6)
    assert "may leave the kernel before" in str(report)


def test_the_own_rows_are_copied_while_peers_begin(monkeypatch):
    order, copy, awaits = [], communicator.Communicator._copy, communicator.Handshake.await_peers
    names = {True: "own", False: "peers"}
    copies = lambda self, chunks, *args: order.append(names[chunks is self.own]) or copy(self, chunks, *args)  # noqa: E731
    monkeypatch.setattr(communicator.Communicator, "_copy", copies)
    monkeypatch.setattr(communicator.Handshake, "await_peers", lambda self: order.append("wait") or awaits(self))
    of_rows(FORM, WHOLE).run(cores=3)
    assert order[:3] == ["own", "wait", "peers"]


def test_a_wrong_order_of_the_shards_shows_in_the_numbers(monkeypatch):
    lay_the_shards_in_the_order_of_steps(monkeypatch)
    with pytest.raises(AssertionError):
        of_rows(FORM, WHOLE).run(cores=3)


@pytest.mark.parametrize("config", [WHOLE, CUT], ids=["whole", "cut"])
def test_many_launches_in_a_row_with_operands_that_change(config):
    """Each launch overwrites what the previous one has read and written."""
    mesh = make_mesh(x=4)
    form = Form(16, (128,), 200, container=None)
    fused = several_sides_cases.on_mesh(
        form, mesh, several_sides_cases.call(form, implementation="fused", config=config)
    )
    launches = []
    with emulate(cores=5, completion="random", scheduler="pct", seed=3) as run:
        for seed in range(5):
            arrays = several_sides_cases.operands(form, 4, seed)
            launches.append((arrays, fused(*several_sides_cases.put(form, mesh, arrays))))
        run.check()
    for arrays, results in launches:
        several_sides_cases.assert_exact(form, arrays, results)


def test_integers_differ_between_launches():
    """The test above relies on launches with different integers."""
    assert not np.array_equal(integers(0, 64), integers(1, 64))
