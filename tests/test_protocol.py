"""The library's kernels are clean under many schedules, and each seeded defect in their protocol is reported."""

import dataclasses

import jax.numpy as jnp
import pytest

import overlap
from overlap import primitives
from overlap.collectives import pull
from overlap.collectives.schedule import AllGatherSchedule
from overlap.emulation import EmulationError, emulate
from overlap.kernels import hopper, staging
from overlap.primitives import Ring, copies, handshake
from overlap.primitives.integers import remainder
from tests import oracle, several_sides_cases
from tests.oracle import make_mesh, on_mesh, operands

CONFIG = overlap.Config(tile_n=64, stages=2)
SHAPE = (128, 128, 192)
NOTHING = lambda *_, **__: None  # noqa: E731


def launch(*, devices=2, cores=2, shape=SHAPE, config=CONFIG, **settings):
    mesh = make_mesh(x=devices)
    # Traced anew each time: what a test has replaced must be in the kernel.
    with emulate(cores=cores, **settings):
        on_mesh(mesh, lambda a, b: oracle.fused(a, b, config=config))(*operands(mesh, shape, jnp.bfloat16, seed=1))


@pytest.mark.parametrize("completion", ["late", "eager", "random"])
@pytest.mark.parametrize("seed", range(20))
def test_clean(completion, seed):
    launch(devices=2 + seed % 2, completion=completion, scheduler="pct", seed=seed)


def drop_wait_for_flags(patch):
    patch.setattr(pull, "wait_at_least", NOTHING)


def drop_proxy_fence(patch):
    patch.setattr(pull, "fence_async_proxy", NOTHING)


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


def drop_handshake(patch):
    patch.setattr(pull, "exit_handshake", NOTHING)


def release_slots_at_once(patch):
    patch.setattr(hopper.plgpu, "wgmma_wait", NOTHING)


def drop_epilogue_wait(patch):
    patch.setattr(hopper, "wait_stores_read", NOTHING)


def drop_epilogue_commit(patch):
    patch.setattr(hopper.plgpu, "commit_smem", NOTHING)


def raise_flags_twice(patch):
    patch.setattr(pull, "signal", lambda flag: primitives.signal(flag, 2))


def wait_for_one_chunk_only(patch):
    patch.setattr(pull, "wait_at_least", lambda flag, value: primitives.wait_at_least(flag, 1))


def pull_a_chunk_twice(patch):
    chunk = AllGatherSchedule.chunk
    patch.setattr(AllGatherSchedule, "chunk", lambda self, index: chunk(self, index - remainder(index, 2)))


def leave_the_last_chunk(patch):
    pulls = vars(AllGatherSchedule)["pulls"].fget
    patch.setattr(AllGatherSchedule, "pulls", property(lambda self: pulls(self) - 1))


def leave_without_the_own_ctas(patch):
    wait = handshake.wait_at_least
    waits_for_peers = lambda *a, from_peer=False: wait(*a, from_peer=True) if from_peer else None  # noqa: E731
    patch.setattr(handshake, "wait_at_least", waits_for_peers)


def leave_when_one_peer_has_not_finished(patch):
    wait = handshake.wait_at_least
    patch.setattr(
        handshake, "wait_at_least", lambda flag, n, from_peer=False: wait(flag, n - from_peer, from_peer=from_peer)
    )


def tell_the_wrong_peer(patch):
    tell = handshake.signal_peer
    patch.setattr(handshake, "signal_peer", lambda flag, ring, position: tell(flag, ring, ring.me()))


def count_a_box_too_few(patch):
    copies_per_step = staging.copies_per_step
    patch.setattr(staging, "copies_per_step", lambda *a: copies_per_step(*a) - 1)


def count_a_box_too_many(patch):
    copies_per_step = staging.copies_per_step
    patch.setattr(staging, "copies_per_step", lambda *a: copies_per_step(*a) + 1)


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
    drop_handshake,
    release_slots_at_once,
    drop_epilogue_wait,
    drop_epilogue_commit,
    raise_flags_twice,
    wait_for_one_chunk_only,
    pull_a_chunk_twice,
    leave_the_last_chunk,
    leave_without_the_own_ctas,
    leave_when_one_peer_has_not_finished,
    tell_the_wrong_peer,
    count_a_box_too_few,
    count_a_box_too_many,
    never_release_a_slot,
]


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda f: f.__name__)
def test_each_defect_is_reported(defect, monkeypatch):
    defect(monkeypatch)
    reports = []
    for seed in range(10):
        try:
            launch(devices=3, shape=(256, 128, 192), completion="late", scheduler="pct", seed=seed)
        except EmulationError as report:
            reports.append(report)
            break
    assert reports, f"{defect.__name__} was not reported in 10 runs"
    # The report says where: device, CTA and the line of the kernel.
    assert "device" in str(reports[0]) and "CTA" in str(reports[0]) and ".py:" in str(reports[0])


UNEVEN = {
    "rows": ((133, 64, 64), overlap.Config(tile_n=64, stages=2, chunk_bytes=2048)),
    "columns": ((70, 64, 8 * 37), overlap.Config(tile_n=64, stages=2, chunk_bytes=256)),
}


def take_all_chunks_for_whole_ones(patch):
    patch.setattr(copies.PullPlan, "lacks", lambda self, row, column: 0 * row)


def leave_the_short_ones(patch):
    plan = vars(copies.PullPlan)
    for name, size in (("row_groups", lambda p: p.shard_rows // p.rows),
                       ("chunks_per_row_group", lambda p: p.shard_cols // p.cols)):  # fmt: skip
        assert name in plan
        patch.setattr(copies.PullPlan, name, property(size))


@pytest.mark.parametrize(("shape", "config"), UNEVEN.values(), ids=UNEVEN)
def test_uneven_chunks_are_clean(shape, config):
    for seed, completion in enumerate(("late", "eager", "random")):
        launch(shape=shape, config=config, cores=3, completion=completion, scheduler="pct", seed=seed)


@pytest.mark.parametrize("defect", [take_all_chunks_for_whole_ones, leave_the_short_ones], ids=lambda f: f.__name__)
@pytest.mark.parametrize(("shape", "config"), UNEVEN.values(), ids=UNEVEN)
def test_each_defect_of_uneven_chunks_is_reported(shape, config, defect, monkeypatch):
    defect(monkeypatch)
    with pytest.raises(EmulationError):
        launch(shape=shape, config=config, cores=3, completion="late")


SCALED = [
    several_sides_cases.Form(200, (64,), 72, (2,), scales=("rows",)),
    several_sides_cases.Form(128, (64, 64), 192, scales=("rows",)),
]


def launch_scaled(form, *, devices=3, **settings):
    mesh, config = make_mesh(x=devices), overlap.Config(tile_n=64, stages=2)
    body = several_sides_cases.call(form, implementation="fused", config=config)
    with emulate(cores=3, **settings):
        arrays = several_sides_cases.operands(form, devices)
        results = several_sides_cases.on_mesh(form, mesh, body)(*several_sides_cases.put(form, mesh, arrays))
    several_sides_cases.assert_exact(form, arrays, results)


@pytest.mark.parametrize("form", SCALED, ids=str)
def test_scales_that_travel_are_clean(form):
    for seed, completion in enumerate(("late", "eager", "random")):
        launch_scaled(form, completion=completion, scheduler="pct", seed=seed)


def signal_scales_without_waiting(patch):
    patch.setattr(pull, "wait_stores_landed", NOTHING)


def do_not_count_scales(patch):
    scaled = AllGatherSchedule.flag_target
    without = lambda self, block: scaled(dataclasses.replace(self, scaled=False), block)  # noqa: E731
    patch.setattr(AllGatherSchedule, "flag_target", without)


def leave_the_last_scales(patch):
    pulls = vars(AllGatherSchedule)["scale_pieces"].fget
    patch.setattr(AllGatherSchedule, "scale_pieces", property(lambda self: pulls(self) - 1))


@pytest.mark.parametrize(
    "defect", [signal_scales_without_waiting, do_not_count_scales, leave_the_last_scales], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("form", SCALED, ids=str)
def test_each_defect_of_scales_that_travel_is_reported(form, defect, monkeypatch):
    defect(monkeypatch)
    with pytest.raises(EmulationError):
        for seed in range(10):
            launch_scaled(form, completion="late", scheduler="pct", seed=seed)


def test_a_wrong_peer_shows_in_the_numbers(monkeypatch):
    """Reading another peer's shard is no race, so it is the oracle that has to catch it."""
    peer = Ring.peer
    monkeypatch.setattr(Ring, "peer", lambda self, distance: peer(self, distance % 2 + 1))
    mesh = make_mesh(x=3)
    with emulate(cores=2):
        measure = oracle.errors(mesh, lambda a, b: oracle.fused(a, b, config=CONFIG))
        ours, theirs = measure(*operands(mesh, SHAPE, jnp.bfloat16, seed=1))
    assert float(ours) > 10 * float(theirs)
