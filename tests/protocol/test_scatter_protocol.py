"""The protocol of `matmul_reduce_scatter`: clean under many schedules; each injected defect is reported."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import overlap
from overlap.collectives.reduce import blocks_kernel
from overlap.collectives.reduce.blocks_schedule import ReduceScatterSchedule
from overlap.emulation import DeadlockError, emulate
from overlap.kernels.grid import GRID_AXIS
from overlap.kernels.tma import drawn, exchange
from tests.oracle import make_mesh, on_mesh
from tests.protocol import handshake_cases
from tests.protocol import scatter_defects as defects
from tests.protocol.protocol_cases import SUMS, clean, of_sums
from tests.protocol.test_protocol import signal_when_only_read, signal_without_waiting
from tests.protocol.test_rhs_protocol import pull_last

STEPS = 200_000
COMPLETIONS = ("late", "eager", "random")
# Each warpgroup has two boxes. With 136 rows, the last tile has rows of one warpgroup only.
TALL = overlap.Config(tile_n=128, stages=3, chunk_bytes=4096)


def run_some(kernel, *, seeds=3, cores=2, **settings):
    for seed in range(seeds):
        completion = COMPLETIONS[seed % 3]
        scheduler = ("pct", "random")[seed % 2]
        kernel.run(cores=cores, completion=completion, scheduler=scheduler, seed=seed, **settings)


@pytest.mark.parametrize("devices", [2, 3, 4])
@pytest.mark.parametrize("along", ["m", "n"])
def test_clean(along, devices):
    run_some(clean(f"scatter {along}", devices), seeds=4)


CASES = {
    "whole boxes": lambda: of_sums("m", TALL, 2, block=(136, 136), k=72),
    "many k steps": lambda: of_sums("m", devices=2, block=(16, 264), k=640, dtype=jnp.float32),
    "batch": lambda: of_sums("m", devices=2, batch=2),
    "batch, n": lambda: of_sums("n", devices=2, batch=2, block=(72, 72)),
    "parts of rows": lambda: of_sums("m", SUMS.replace(chunk_bytes=64), 2, block=(8, 72)),
    "six devices": lambda: of_sums("n", devices=6, block=(16, 72)),  # The terms are added in a loop.
}


@pytest.mark.parametrize("case", CASES)
def test_other_sizes_are_clean(case):
    run_some(CASES[case]())


@pytest.mark.parametrize("axis", ["x", "y"])
def test_one_axis_of_two_is_clean(axis):
    run_some(of_sums("m", devices=2, mesh=make_mesh(x=2, y=2), axis=axis))


@pytest.mark.parametrize("victim", [0, 2])
def test_clean_if_a_device_is_late(victim, monkeypatch):
    """Makes the device's communicators begin after all its peers have sent everything."""
    pull_last(monkeypatch, victim, devices=3)
    run_some(of_sums("m"), seeds=2)


DEFECTS = [
    defects.tell_stored_at_once,
    defects.tell_stored_when_only_read,
    defects.never_tell_stored,
    defects.announce_without_waiting,
    defects.announce_another_tile,
    defects.store_both_halves_in_one_place,
    defects.drop_the_communicators_proxy_fence,
    defects.send_without_waiting_for_the_tile,
    defects.wait_for_the_first_tile_only,
    defects.wait_for_the_first_step_only,
    signal_when_only_read,
    signal_without_waiting,
    defects.raise_the_peers_flag_at_the_first_chunk,
    defects.raise_the_peers_flag_a_chunk_too_early,
    defects.raise_the_peers_flag_a_chunk_too_late,
    defects.raise_the_peers_flag_by_every_chunk,
    defects.count_chunks_without_acquiring,
    defects.signal_peers_at_the_scope_of_one_gpu,
    defects.signal_another_peer,
    defects.signal_nobody,
    defects.send_to_another_peer,
    defects.send_to_another_slot,
    defects.send_the_part_of_another_step,
    defects.send_a_chunk_twice,
    defects.leave_the_last_chunk,
    defects.send_before_peers_have_begun,
    defects.do_not_wait_for_terms,
    defects.wait_for_the_first_term_only,
    defects.wait_for_another_tiles_terms,
    defects.wait_for_terms_as_for_this_device,
    defects.drop_the_producers_proxy_fence,
    defects.acquire_terms_at_the_scope_of_one_gpu,
    defects.do_not_acquire_terms,
    defects.load_terms_into_slots_in_use,
    defects.count_an_arrival_too_few,
    defects.count_an_arrival_too_many,
    defects.read_terms_without_waiting,
    defects.give_slots_of_terms_back_twice,
    defects.never_give_slots_of_terms_back,
    defects.count_a_step_of_terms_too_few_in_the_producer,
    defects.load_terms_of_another_tile,
    defects.draw_a_tile_twice,
    defects.draw_each_tile_twice,
    defects.leave_the_first_tile,
    defects.compute_own_tiles_first,
    defects.read_mail_without_waiting,
    defects.overwrite_mail,
    defects.post_mail_without_a_word,
    defects.never_give_mail_back,
    defects.give_mail_back_before_the_tile_is_announced,
]


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda f: f.__name__)
def test_each_defect_is_reported(defect, monkeypatch):
    defect(monkeypatch)
    # Use three stages: with two, swapped k steps would have the same sum.
    kernel, settings = of_sums("m", SUMS.replace(stages=3)), {"cores": 2, "scheduler": "pct", "step_limit": STEPS}
    # Also run one CTA at a time; each CTA then carries several own tiles.
    report = kernel.report(seeds=6, **settings) or kernel.report(seeds=6, resident=1, **settings)
    assert report, f"{defect.__name__} was not reported in 12 runs"
    assert "device" in str(report) and "CTA" in str(report) and ".py:" in str(report)


@pytest.mark.parametrize("stages_of_terms", ["of no tile", "of every tile"])
def test_stages_of_terms_that_are_miscounted_are_reported(stages_of_terms, monkeypatch):
    """All roles count alike. There are more stages than k steps in a tile: some have not been used, others have."""
    of_a_tile = lambda loop, buffers, tile: exchange.box_count(buffers) * loop.hooks.exchange.terms  # noqa: E731
    monkeypatch.setattr(
        exchange, "term_stages", lambda *args: 0 if stages_of_terms == "of no tile" else of_a_tile(*args)
    )
    assert of_sums("m", SUMS.replace(stages=8), 2).report(seeds=3, cores=1, scheduler="pct", step_limit=STEPS)


def test_one_place_for_all_batch_elements_is_reported(monkeypatch):
    place = ReduceScatterSchedule.index_in_block
    monkeypatch.setattr(ReduceScatterSchedule, "index_in_block", lambda self, element, m, n: place(self, 0, m, n))
    assert of_sums("m", devices=2, batch=2).report(seeds=6, cores=2, scheduler="pct", step_limit=STEPS)


def test_tiles_that_are_dealt_beforehand_are_reported(monkeypatch):
    """Assigns tiles to all CTAs of the grid in advance, whether they run or not, instead of by a counter."""

    def deal(counter, end, previous=None):
        del counter
        return lax.axis_index(GRID_AXIS) if previous is None else jnp.minimum(previous + 2, end)

    monkeypatch.setattr(drawn, "draw", deal)
    dealt = of_sums("m")
    dealt.run(cores=2)
    assert isinstance(dealt.report(seeds=1, cores=2, resident=1), DeadlockError)


# --- Defects without a race show in the numbers -----------------------------------------------------------------------


def send_to_the_peer_on_the_other_side(patch):
    """Sends both parts and flags to the wrong peer, so that only the sums are wrong."""
    communicate, block = blocks_kernel._Body._communicate, ReduceScatterSchedule.block

    def communicate_there(self):
        with pytest.MonkeyPatch.context() as inside:
            inside.setattr(
                ReduceScatterSchedule, "block", lambda self, me, step: block(self, me, self.last_step - 1 - step)
            )
            communicate(self)

    patch.setattr(blocks_kernel._Body, "_communicate", communicate_there)


def add_the_first_term_for_all(patch):
    boxes = blocks_kernel._Body._boxes

    def of_the_first(self, ref, step, tile):
        return boxes(self, ref, 0 * step if ref is self._landing[0] else step, tile)

    patch.setattr(blocks_kernel._Body, "_boxes", of_the_first)


def multiply_the_own_block_for_all(patch):
    patch.setattr(
        blocks_kernel._Body, "_block", lambda self, tile, along: self.me if self.schedule.along == along else 0
    )


def leave_the_last_tile(patch):
    tiles = vars(ReduceScatterSchedule)["tiles"].fget
    patch.setattr(ReduceScatterSchedule, "tiles", property(lambda self: tiles(self) - 1))


OF_NUMBERS = [
    send_to_the_peer_on_the_other_side,
    add_the_first_term_for_all,
    multiply_the_own_block_for_all,
    leave_the_last_tile,
]


@pytest.mark.parametrize("defect", OF_NUMBERS, ids=lambda f: f.__name__)
def test_a_wrong_sum_shows(defect, monkeypatch):
    defect(monkeypatch)
    with pytest.raises(AssertionError, match="Arrays are not equal"):
        of_sums("m").run(cores=2)


def sums_in_f32():
    """Sums 2²⁴, 1, −2²⁴ and 1 of four devices, where the order matters: each device's actual and expected sum."""
    factors = np.array([4096, 1, -4096, 1])
    parts = (factors * abs(factors)).astype(np.float32)
    lhs, rhs = np.zeros((4 * 8, 4 * 64)), np.zeros((4 * 64, 64))
    lhs[:, ::64], rhs[::64] = factors, abs(factors)[:, None]

    def summed(a, b):
        return overlap.matmul_reduce_scatter(
            a, b, "x", config=SUMS, preferred_element_type=jnp.float32, implementation="fused"
        )

    function = on_mesh(make_mesh(x=4), summed, (P(None, "x"), P("x", None)), P("x", None))
    with emulate(cores=2):
        result = np.asarray(function(lhs.astype(jnp.bfloat16), rhs.astype(jnp.bfloat16)))
    # The parts of the devices before this one, nearest first; then their sum is added to the own part.
    terms = [functools.reduce(np.add, [parts[(me - distance) % 4] for distance in (1, 2, 3)]) for me in range(4)]
    return result, np.repeat(np.array(terms) + parts, 8)[:, None] * np.ones(64)


def test_parts_are_added_in_one_order():
    np.testing.assert_array_equal(*sums_in_f32())


def test_another_order_shows(monkeypatch):
    boxes = blocks_kernel._Body._boxes

    def backwards(self, ref, step, tile):
        return boxes(self, ref, 2 - step if ref is self._landing[0] else step, tile)

    monkeypatch.setattr(blocks_kernel._Body, "_boxes", backwards)
    with pytest.raises(AssertionError, match="Arrays are not equal"):
        np.testing.assert_array_equal(*sums_in_f32())


# --- Changes that are harmless here, but not elsewhere ----------------------------------------------------------------

HARMLESS = [
    # The device later waits for the tile of the part, and that wait has a proxy fence too.
    handshake_cases.begin_without_a_proxy_fence,
    # A device's own tiles wait for everything that peers write to the device. So the final handshake is not needed.
    handshake_cases.speak_when_the_first_has_completed_something,
    handshake_cases.speak_before_the_transfers,
    handshake_cases.count_transfers_when_they_begin,
    # Until the warp that announces tiles continues, no other role can be two tiles ahead.
    defects.give_mail_back_before_the_tile_is_computed,
]


@pytest.mark.parametrize("change", HARMLESS, ids=lambda f: f.__name__)
def test_what_does_no_harm(change, monkeypatch):
    """Runs the kernel with the change: the emulator must report nothing. If it ever does, the change is a defect."""
    change(monkeypatch)
    run_some(of_sums("m"))
