"""The library's kernels are clean under many schedules; each injected defect in their protocol is reported."""

import dataclasses
import functools

import pytest

import overlap
from overlap import primitives
from overlap.collectives import communicator
from overlap.collectives.gather import pull
from overlap.collectives.gather.lhs_schedule import AllGatherSchedule
from overlap.kernels.hopper import mainloop as hopper
from overlap.kernels.tma import staging, store
from overlap.primitives import PeerGroup, copies
from overlap.primitives.handshake import Handshake
from overlap.primitives.integers import remainder
from tests.ops.several_sides_cases import Form
from tests.protocol.protocol_cases import of_rows

CONFIG = overlap.Config(tile_n=64, stages=2)
NOTHING = lambda *_, **__: None  # noqa: E731


@functools.cache
def clean(form, config, devices):
    """Returns a kernel that is traced once and shared by all tests that patch nothing."""
    return of_rows(form, config, devices)


@pytest.mark.parametrize("completion", ["late", "eager", "random"])
@pytest.mark.parametrize("devices", [2, 3])
def test_clean(completion, devices):
    kernel = clean(Form(128, (128,), 192, container=None), CONFIG, devices)
    for seed in range(10):
        kernel.run(cores=2, completion=completion, scheduler="pct", seed=seed)


def drop_wait_for_flags(patch):
    patch.setattr(communicator, "semaphore_wait", NOTHING)


def drop_proxy_fence(patch):
    patch.setattr(communicator, "fence_async_proxy", NOTHING)


def signal_when_only_read(patch):
    patch.setattr(copies, "wait_stores_landed", copies.wait_stores_read)


def signal_without_waiting(patch):
    patch.setattr(copies, "wait_stores_landed", NOTHING)


def one_counter_for_all_rounds(patch):
    flag = AllGatherSchedule.flag
    patch.setattr(AllGatherSchedule, "flag", lambda self, step, row: flag(self, 1, 0 * row))


def count_too_few(patch):
    target = AllGatherSchedule.flag_target
    patch.setattr(AllGatherSchedule, "flag_target", lambda self, block: target(self, block) - 1)


def count_too_many(patch):
    target = AllGatherSchedule.flag_target
    patch.setattr(AllGatherSchedule, "flag_target", lambda self, block: target(self, block) + 1)


def release_slots_at_once(patch):
    patch.setattr(hopper.plgpu, "wgmma_wait", NOTHING)


def drop_epilogue_wait(patch):
    patch.setattr(store, "wait_stores_read", NOTHING)


def drop_epilogue_commit(patch):
    patch.setattr(hopper.plgpu, "commit_smem", NOTHING)


def raise_flags_twice(patch):
    patch.setattr(pull, "semaphore_signal", lambda flag: primitives.semaphore_signal(flag, 2))


def wait_for_one_chunk_only(patch):
    patch.setattr(communicator, "semaphore_wait", lambda flag, value: primitives.semaphore_wait(flag, 1))


def pull_a_chunk_twice(patch):
    chunk = AllGatherSchedule.chunk
    patch.setattr(AllGatherSchedule, "chunk", lambda self, index: chunk(self, index - remainder(index, 2)))


def leave_the_last_chunk(patch):
    pulls = vars(AllGatherSchedule)["pulled_chunks"].fget
    patch.setattr(AllGatherSchedule, "pulled_chunks", property(lambda self: pulls(self) - 1))


def count_a_box_too_few(patch):
    copies_per_k_step = staging.copies_per_k_step
    patch.setattr(staging, "copies_per_k_step", lambda *a: copies_per_k_step(*a) - 1)


def count_a_box_too_many(patch):
    copies_per_k_step = staging.copies_per_k_step
    patch.setattr(staging, "copies_per_k_step", lambda *a: copies_per_k_step(*a) + 1)


def never_release_a_slot(patch):
    patch.setattr(hopper.plgpu, "barrier_arrive", NOTHING)


DEFECTS = [
    drop_wait_for_flags,
    drop_proxy_fence,
    signal_when_only_read,
    signal_without_waiting,
    one_counter_for_all_rounds,
    count_too_few,
    count_too_many,
    release_slots_at_once,
    drop_epilogue_wait,
    drop_epilogue_commit,
    raise_flags_twice,
    wait_for_one_chunk_only,
    pull_a_chunk_twice,
    leave_the_last_chunk,
    count_a_box_too_few,
    count_a_box_too_many,
    never_release_a_slot,
]


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda f: f.__name__)
def test_each_defect_is_reported(defect, monkeypatch):
    defect(monkeypatch)
    kernel = of_rows(Form(256, (128,), 192, container=None), CONFIG)
    report = kernel.report(seeds=10, cores=2, completion="late", scheduler="pct")
    assert report, f"{defect.__name__} was not reported in 10 runs"
    # The report says where: device, CTA and the line of the kernel.
    assert "device" in str(report) and "CTA" in str(report) and ".py:" in str(report)


UNEVEN = {
    "rows": (Form(133, (64,), 64, container=None), overlap.Config(tile_n=64, stages=2, chunk_bytes=2048)),
    "columns": (Form(70, (64,), 8 * 37, container=None), overlap.Config(tile_n=64, stages=2, chunk_bytes=256)),
}


def take_all_chunks_for_whole_ones(patch):
    patch.setattr(copies.Chunking, "lacks", lambda self, row, column: 0 * row)


def leave_the_short_ones(patch):
    plan = vars(copies.Chunking)
    for name, size in (("row_groups", lambda p: p.shard_rows // p.rows),
                       ("chunks_per_row_group", lambda p: p.shard_cols // p.cols)):  # fmt: skip
        assert name in plan
        patch.setattr(copies.Chunking, name, property(size))


@pytest.mark.parametrize(("form", "config"), UNEVEN.values(), ids=UNEVEN)
def test_uneven_chunks_are_clean(form, config):
    for seed, completion in enumerate(("late", "eager", "random")):
        clean(form, config, 2).run(cores=3, completion=completion, scheduler="pct", seed=seed)


@pytest.mark.parametrize("defect", [take_all_chunks_for_whole_ones, leave_the_short_ones], ids=lambda f: f.__name__)
@pytest.mark.parametrize(("form", "config"), UNEVEN.values(), ids=UNEVEN)
def test_each_defect_of_uneven_chunks_is_reported(form, config, defect, monkeypatch):
    defect(monkeypatch)
    assert of_rows(form, config, 2).report(seeds=1, cores=3, completion="late")


SCALED = [
    Form(200, (64,), 72, (2,), scales=("rows",)),
    Form(128, (64, 64), 192, scales=("rows",)),
]


@pytest.mark.parametrize("form", SCALED, ids=str)
def test_scales_that_travel_are_clean(form):
    for seed, completion in enumerate(("late", "eager", "random")):
        clean(form, CONFIG, 3).run(cores=3, completion=completion, scheduler="pct", seed=seed)


def signal_scales_without_waiting(patch):
    patch.setattr(pull, "wait_stores_landed", NOTHING)


def do_not_count_scales(patch):
    scaled = AllGatherSchedule.flag_target
    without = lambda self, block: scaled(dataclasses.replace(self, scaled=False), block)  # noqa: E731
    patch.setattr(AllGatherSchedule, "flag_target", without)


def leave_the_last_scales(patch):
    pulls = vars(AllGatherSchedule)["scale_transfers"].fget
    patch.setattr(AllGatherSchedule, "scale_transfers", property(lambda self: pulls(self) - 1))


def do_not_add_scales_to_the_transfers(patch):
    """With this defect, no CTA counts as the one that completes the last transfer."""
    draw_each = communicator.each_drawn
    patch.setattr(communicator, "each_drawn", lambda *args: (draw_each(*args)[0], 0))


def take_scales_for_no_transfers(patch):
    """The CTA that completes the last chunk speaks for the device, while scales may still be on their way."""
    do_not_add_scales_to_the_transfers(patch)
    leave, carry = Handshake.leave, communicator.copy_chunks
    chunks = []

    def pull_counted(number, numbers, *args, **kwargs):
        chunks.append(numbers[1] - numbers[0])
        return carry(number, numbers, *args, **kwargs)

    patch.setattr(communicator, "copy_chunks", pull_counted)
    of_chunks = lambda self, completed: leave(dataclasses.replace(self, transfers=chunks[-1]), completed)  # noqa: E731
    patch.setattr(Handshake, "leave", of_chunks)


@pytest.mark.parametrize(
    "defect",
    [
        signal_scales_without_waiting,
        do_not_count_scales,
        leave_the_last_scales,
        do_not_add_scales_to_the_transfers,
    ],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("form", SCALED, ids=str)
def test_each_defect_of_scales_that_travel_is_reported(form, defect, monkeypatch):
    defect(monkeypatch)
    assert of_rows(form, CONFIG).report(seeds=10, cores=3, completion="late", scheduler="pct")


@pytest.mark.parametrize("form", SCALED, ids=str)
def test_scales_count_as_transfers(form, monkeypatch):
    take_scales_for_no_transfers(monkeypatch)
    # There are fewer chunks than CTAs, so some CTAs carry none. If each CTA carried one, adding it to the count
    # would cover the CTA's scales too, and hide the defect.
    config = CONFIG.replace(chunk_bytes=65536)
    assert "may leave the kernel before" in str(of_rows(form, config).report(cores=6))


def test_a_wrong_peer_shows_in_the_numbers(monkeypatch):
    """Reading another peer's shard is not a race, so the comparison with the oracle must detect it."""
    peer = PeerGroup.peer
    monkeypatch.setattr(PeerGroup, "peer", lambda self, distance: peer(self, distance % 2 + 1))
    with pytest.raises(AssertionError):
        of_rows(Form(128, (128,), 192, container=None), CONFIG).run(cores=2)
