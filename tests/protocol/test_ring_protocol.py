"""The transport "ring" is clean under many schedules; each injected defect in its protocol is reported."""

import dataclasses
import functools

import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

import overlap
from overlap import primitives
from overlap.collectives.gather import ring
from overlap.collectives.gather.lhs_schedule import AllGatherSchedule
from overlap.collectives.gather.transport import Shards
from overlap.emulation import DeadlockError, EmulationError, ProtocolError, RaceError, emulate
from overlap.kernels.mainloop import OperandTypes
from overlap.kernels.stream_k import StreamK
from overlap.primitives import PeerGroup, waits
from overlap.primitives.handshake import Handshake
from overlap.primitives.integers import remainder
from tests import oracle
from tests.ops import several_sides_cases
from tests.ops.several_sides_cases import Form

NOTHING = lambda *_, **__: None  # noqa: E731
PLAIN = overlap.Config(tile_n=64, stages=2)
CUT = dataclasses.replace(PLAIN, stream_k=3)
CASES = {  # devices, cores, form, config
    "plain": (3, 3, Form(200, (136,), 136, container=None), PLAIN),
    "two devices": (2, 3, Form(136, (72,), 136, container=None), PLAIN),
    "cut": (2, 13, Form(136, (64,), 200, container=None), CUT),  # Tiles are cut in all steps: there is no full wave.
    "cut after a wave": (3, 7, Form(200, (72, 136), 200), CUT),
    "gathered": (3, 3, Form(136, (72, 64), 136, gathered=True), PLAIN),
    "batch": (3, 5, Form(72, (72,), 136, (2,), gathered=True), CUT),
}


def kernel_of(name):
    """Returns the number of cores, a call of the kernel (traced at its first run), and a check of its results."""
    devices, cores, form, config = CASES[name]
    schedule = AllGatherSchedule.of(devices, (*form.batch, form.m, form.k), form.widths, 2, config)
    work = StreamK(schedule.tiles, -(-form.k // 64), cores // config.cluster, config.stream_k)
    assert work.cuts == (config.stream_k > 1)
    mesh, arrays = oracle.make_mesh(x=devices), several_sides_cases.operands(form, devices)
    given = several_sides_cases.put(form, mesh, arrays)
    body = several_sides_cases.call(form, implementation="fused", config=config, transport="ring")
    function = several_sides_cases.on_mesh(form, mesh, body)
    return cores, lambda: function(*given), lambda results: several_sides_cases.assert_exact(form, arrays, results)


# Each completion with each scheduler; `make test-all` runs all combinations with other seeds too.
@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 6), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_clean(name, seeds):
    cores, run_kernel, check = kernel_of(name)
    for seed in seeds:
        completion = ("late", "eager", "random")[seed % 3]
        for scheduler in ("pct", "random"):
            with emulate(cores=cores, completion=completion, scheduler=scheduler, seed=seed) as run:
                results = run_kernel()
                run.check()
            check(results)


def test_no_signal_but_the_flags_and_no_more_of_them_than_pieces_need():
    cores, run_kernel, _ = kernel_of("plain")
    with emulate(cores=cores, record=True) as run:
        run_kernel()
        run.check()
    # Three devices: two row blocks in two steps, and one neighbour that has begun.
    assert run.counts["signals"] == (2 * 2 + 1) * 3


def test_who_waits_too_long_names_the_device_whose_rows_are_missing(monkeypatch):
    peer, asked, waited = PeerGroup.peer, [], []
    monkeypatch.setattr(PeerGroup, "peer", lambda self, distance: asked.append(distance) or peer(self, distance))
    monkeypatch.setattr(Handshake, "wait_for", lambda *_: waited.append(asked[-1]))
    cores, run_kernel, _ = kernel_of("plain")
    with pytest.raises(EmulationError), emulate(cores=cores):
        run_kernel()
    assert waited and set(waited) == {1}


# --- Injected defects -------------------------------------------------------------------------------------------------


def signal_when_only_read(patch):
    patch.setattr(ring, "wait_stores_landed", NOTHING)


def give_the_slot_back_before_it_is_read(patch):
    patch.setattr(ring, "wait_stores_read", NOTHING)


def keep_one_store_unread(patch):
    patch.setattr(ring, "wait_stores_read", lambda: primitives.wait_stores_read(1))


def do_not_wait_for_the_rows(patch):
    patch.setattr(Handshake, "wait_for", NOTHING)


def wait_for_other_parts(patch, by):
    wait = Handshake.wait_for
    changed = lambda self, role, word, parts, position: wait(self, role, word, parts + by, position)  # noqa: E731
    patch.setattr(Handshake, "wait_for", changed)


def wait_for_a_part_too_few(patch):
    wait_for_other_parts(patch, -1)


def wait_for_a_part_too_many(patch):
    wait_for_other_parts(patch, 1)


def wait_as_if_for_this_device(patch):
    patch.setattr(Handshake, "wait_for", lambda self, role, word, parts, _: primitives.semaphore_wait(word, parts))


def drop_the_proxy_fence(patch):
    patch.setattr(waits, "look_until", functools.partial(waits.look_until, fences=("fence.acquire.sys;",)))


def count_a_whole_tile_as_one_part(patch):
    patch.setattr(
        ring,
        "semaphore_signal_peer",
        lambda flag, group, position, n: primitives.semaphore_signal_peer(flag, group, position),
    )


def count_a_part_as_a_whole_tile(patch):
    announce = ring._announce
    patch.setattr(ring, "_announce", lambda shards, tile, _, flags: announce(shards, tile, 1, flags))


def signal_once_more(patch):
    def signal(*args):
        primitives.semaphore_signal_peer(*args)
        primitives.semaphore_signal_peer(*args)

    patch.setattr(ring, "semaphore_signal_peer", signal)


def signal_the_device_after(patch):
    patch.setattr(
        ring,
        "semaphore_signal_peer",
        lambda flag, group, _, n: primitives.semaphore_signal_peer(flag, group, group.peer(1), n),
    )


def signal_before_the_first_k_step(patch):
    pass_on = ring._pass_on
    announced = []

    def early(shards, tile, k, lhs_smem):
        pl.when(k == 0)(lambda: announced[0](shards, tile))
        pass_on(shards, tile, k, lhs_smem)

    announce, hook_in = ring._announce, ring.RingTransport.hook_in

    def hooked(self, hooks, shards, flags, smem):
        announced[:] = [lambda shards, tile: announce(shards, tile, 1, flags[0])]
        return hook_in(self, hooks, shards, flags, smem)

    patch.setattr(ring, "_pass_on", early)
    patch.setattr(ring, "_announce", NOTHING)
    patch.setattr(ring.RingTransport, "hook_in", hooked)


def raise_the_flag_of_another_step(patch):
    flag = Shards.flag

    def other(self, step, tile):
        # The producer requests the tile's own step, the forwarder another one.
        return flag(self, step if step is tile.step else remainder(step, self.group.size - 1) + 1, tile)

    patch.setattr(Shards, "flag", other)


def one_flag_for_all_steps(patch):
    flag = Shards.flag
    patch.setattr(Shards, "flag", lambda self, step, tile: flag(self, 1, tile))


def one_flag_for_all_row_blocks(patch):
    flag = Shards.flag
    patch.setattr(Shards, "flag", lambda self, step, tile: (flag(self, step, tile)[0], 0))


def change_who_passes_on(patch, change):
    passes_on = AllGatherSchedule.passes_on
    patch.setattr(AllGatherSchedule, "passes_on", lambda self, *tile: change(self, passes_on, *tile))


def forget_a_row_block(patch):
    change_who_passes_on(patch, lambda self, right, step, m, side, n: right(self, step, m, side, n) & (m != 1))


def forget_the_first_step(patch):
    change_who_passes_on(patch, lambda self, right, step, m, side, n: right(self, step, m, side, n) & (step > 0))


def pass_on_the_last_step_too(patch):
    change_who_passes_on(patch, lambda self, right, step, m, side, n: right(self, step * 0, m, side, n))


def pass_on_from_every_column(patch):
    change_who_passes_on(patch, lambda self, right, step, m, side, n: right(self, step, m, side, n * 0))


def pass_on_from_every_side(patch):
    change_who_passes_on(patch, lambda self, right, step, m, side, n: right(self, step, m, side * 0, n))


def change_what_is_passed_on(patch, change):
    pass_on = ring._pass_on
    patch.setattr(ring, "_pass_on", lambda shards, tile, k, smem: pass_on(shards, *change(tile, k), smem))


def count_the_k_steps_of_a_part_from_zero(patch):
    change_what_is_passed_on(patch, lambda tile, k: (tile, remainder(k, 2)))


def lay_all_batch_elements_into_one(patch):
    change_what_is_passed_on(patch, lambda tile, k: (dataclasses.replace(tile, batch=tile.batch * 0), k))


def lay_the_shard_into_the_place_of_this_step(patch):
    change_what_is_passed_on(patch, lambda tile, k: (dataclasses.replace(tile, step=jnp.maximum(tile.step, 1) - 1), k))


def forget_the_arrival_of_the_forwarder(patch):
    patch.setattr(OperandTypes, "forwards", False)


SCRATCH = "output 1"
DEFECTS = [  # defect, case, error, words of some message
    (signal_when_only_read, "plain", RaceError, SCRATCH),
    (signal_when_only_read, "cut", RaceError, SCRATCH),
    (give_the_slot_back_before_it_is_read, "plain", RaceError, "TMA load, write"),
    (keep_one_store_unread, "two devices", RaceError, "TMA load, write"),
    (do_not_wait_for_the_rows, "plain", RaceError, SCRATCH),
    (wait_for_a_part_too_few, "cut", RaceError, SCRATCH),
    (wait_for_a_part_too_many, "plain", DeadlockError, "got 1 (setp.ge"),
    (wait_as_if_for_this_device, "plain", ProtocolError, "scope"),
    (drop_the_proxy_fence, "plain", RaceError, "fence"),
    (count_a_whole_tile_as_one_part, "cut after a wave", DeadlockError, "got 1 (setp.ge"),
    (count_a_part_as_a_whole_tile, "cut", RaceError, SCRATCH),
    (signal_once_more, "two devices", ProtocolError, "left"),
    (signal_the_device_after, "plain", RaceError, SCRATCH),
    (signal_before_the_first_k_step, "plain", RaceError, SCRATCH),
    (raise_the_flag_of_another_step, "plain", DeadlockError, "got 0 (setp.ge"),
    (one_flag_for_all_steps, "plain", RaceError, SCRATCH),
    (one_flag_for_all_row_blocks, "plain", RaceError, SCRATCH),
    (forget_a_row_block, "plain", DeadlockError, "got 0"),
    (forget_the_first_step, "plain", DeadlockError, "got 0"),
    (pass_on_the_last_step_too, "plain", ProtocolError, "out of bounds"),
    (pass_on_from_every_column, "plain", RaceError, "TMA store, write"),
    (pass_on_from_every_side, "gathered", RaceError, "TMA store, write"),
    (count_the_k_steps_of_a_part_from_zero, "cut", RaceError, "TMA store, write"),
    (lay_all_batch_elements_into_one, "batch", RaceError, "TMA store, write"),
    (lay_the_shard_into_the_place_of_this_step, "plain", RaceError, SCRATCH),
    (forget_the_arrival_of_the_forwarder, "plain", EmulationError, "buffers."),
]


@pytest.mark.parametrize(
    ("defect", "name", "error", "words"), DEFECTS, ids=lambda x: getattr(x, "__name__", None) or str(x)
)
def test_each_defect_is_reported(defect, name, error, words, monkeypatch):
    defect(monkeypatch)
    cores, run_kernel, _ = kernel_of(name)
    for seed, completion in enumerate(("late", "random", "eager")):
        with pytest.raises(EmulationError), emulate(cores=cores, completion=completion, seed=seed) as run:
            run_kernel()
        found = [report for report in run.errors if isinstance(report, error) and words in str(report)]
        assert found, [str(report) for report in run.errors]
        assert "device" in str(found[0]) and "CTA" in str(found[0]) and ".py:" in str(found[0])


def send_to_the_device_after(patch):
    peer = PeerGroup.peer
    patch.setattr(PeerGroup, "peer", lambda self, distance: peer(self, self.size - distance))


def test_rows_of_another_peer_show_in_the_numbers(monkeypatch):
    """All devices send and wait in order, but with the wrong neighbour: no race, so the numbers must show it."""
    send_to_the_device_after(monkeypatch)
    cores, run_kernel, check = kernel_of("plain")
    with emulate(cores=cores) as run:
        results = run_kernel()
        run.check()
    with pytest.raises(AssertionError):
        check(results)
