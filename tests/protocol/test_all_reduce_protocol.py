"""The protocol of `matmul_all_reduce`, both forms: clean under many schedules; each injected defect is reported."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import PartitionSpec as P

import overlap
from overlap.collectives.communicator import Communicator
from overlap.collectives.reduce import blocks_kernel, one_shot_kernel
from overlap.emulation import emulate
from overlap.primitives import handshake, semaphore_wait
from overlap.primitives.handshake import Handshake
from tests.ops import scatter_cases
from tests.ops.scatter_cases import EVERYWHERE, Layer
from tests.oracle import make_mesh, on_mesh
from tests.protocol import handshake_cases, one_shot_defects, scatter_defects
from tests.protocol import spread_defects as spread
from tests.protocol.protocol_cases import ONE_SHOT, SPREAD, SUMS, of_sums
from tests.protocol.test_scatter_protocol import STEPS, TALL, run_some

# --- Clean ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kernel", "devices"), [(SPREAD, 3), ("spread m", 2), *((ONE_SHOT, d) for d in (2, 3, 4))])
def test_clean(kernel, devices):
    run_some(of_sums(kernel, devices=devices), seeds=3)


CASES = {
    "whole strips": lambda: of_sums("spread m", TALL, 2, block=(136, 136), k=72),
    "a row": lambda: of_sums("spread m", devices=2, block=(1, 136)),
    "strips of one row": lambda: of_sums(SPREAD, SUMS.replace(chunk_bytes=64), 2, block=(8, 72)),
    "batch, n, f32": lambda: of_sums(SPREAD, devices=2, batch=2, block=(24, 72), dtype=jnp.float32),
    "one shot, whole boxes": lambda: of_sums(ONE_SHOT, TALL, 2, block=(136, 136), k=72),
    "one shot, a row": lambda: of_sums(ONE_SHOT, devices=2, block=(1, 136)),
    "one shot, batch, f32": lambda: of_sums(ONE_SHOT, devices=2, batch=2, dtype=jnp.float32),
    "one shot, six devices": lambda: of_sums(ONE_SHOT, devices=6, block=(16, 72)),  # The terms are added in a loop.
}

# `make test` skips these kernels.
MORE = ("strips of one row", "one shot, whole boxes", "one shot, six devices")


@pytest.mark.parametrize("case", [pytest.param(case, marks=pytest.mark.slow if case in MORE else []) for case in CASES])
def test_other_sizes_are_clean(case):
    run_some(CASES[case](), seeds=2)


def stall_until_all_others_are_done(victim, devices):
    def stall(self):
        others = (1 << devices) - 1 - (1 << victim)
        # `done` has a bit for each peer and none for this device, so the word equals `others` when all bits are set.
        done = self.flags.at[handshake._DONE]
        pl.when(lax.axis_index("x") == victim)(lambda: plgpu.semaphore_wait(done, others, decrement=False))

    return stall


def send_parts_last(patch, victim):
    """In the one-shot kernel, makes device `victim` send only after all peers have sent everything and signalled."""
    await_peers, stall = Handshake.await_peers_by_warpgroup, stall_until_all_others_are_done(victim, 3)
    patch.setattr(Handshake, "await_peers_by_warpgroup", lambda self: (await_peers(self), stall(self))[0])


def send_strips_last(patch, victim):
    """In the kernel by blocks, makes `victim` send its strips after its peers have finished, and its parts earlier."""
    copy, begin, begun = Communicator._copy, Handshake.begin, []

    def copy_late(self, *args):
        if len(args) > 4:
            stall_until_all_others_are_done(victim, 3)(begun[-1])
        return copy(self, *args)

    patch.setattr(Handshake, "begin", lambda self: (begun.append(self), begin(self))[1])
    patch.setattr(Communicator, "_copy", copy_late)


@pytest.mark.parametrize(("kernel", "late"), [(SPREAD, send_strips_last), (ONE_SHOT, send_parts_last)])
@pytest.mark.parametrize("victim", [0, 2])
def test_clean_if_a_device_is_late(victim, kernel, late, monkeypatch):
    late(monkeypatch, victim)
    run_some(of_sums(kernel), seeds=2)


# --- Defects ----------------------------------------------------------------------------------------------------------

OF_STRIPS = [
    spread.never_announce_own_tiles,
    spread.announce_another_own_tile,
    spread.send_strips_without_waiting_for_the_tile,
    spread.wait_for_the_first_own_tile_only,
    spread.wait_for_a_peers_tile,
    spread.wait_for_own_tiles_without_a_proxy_fence,
    spread.send_strips_before_parts,
    spread.load_strips_while_parts_are_being_sent,
    spread.load_strips_into_slots_in_use,
    spread.promise_that_strips_are_whole,
    spread.leave_before_results_have_landed,
    spread.leave_when_results_are_only_read,
    spread.strips_are_no_transfers,
    spread.send_all_strips_to_one_peer,
    spread.send_strips_to_the_receivers_block,
    spread.send_rows_of_whole_tiles,
]
OF_ONE_SHOT = [
    one_shot_defects.send_before_peers_have_begun,
    one_shot_defects.send_when_all_but_one_have_begun,
    one_shot_defects.send_to_all_but_one,
    one_shot_defects.send_all_to_one_peer,
    one_shot_defects.send_to_the_place_of_the_receiver,
    one_shot_defects.send_to_another_tiles_place,
    one_shot_defects.send_both_halves_to_one_place,
    one_shot_defects.overwrite_what_is_being_sent,
    one_shot_defects.send_what_is_not_committed,
    one_shot_defects.raise_flags_of_all_but_one,
    one_shot_defects.raise_the_flag_of_another_tile,
    one_shot_defects.raise_the_flag_of_the_receiver,
    one_shot_defects.signal_peers_at_the_scope_of_one_gpu,
    one_shot_defects.never_raise_the_own_flag,
    one_shot_defects.do_not_wait_for_terms,
    one_shot_defects.do_not_wait_for_the_own_part,
    one_shot_defects.wait_for_all_terms_but_one,
    one_shot_defects.wait_for_another_tiles_terms,
    one_shot_defects.take_the_own_part_from_where_peers_send,
    one_shot_defects.leave_with_every_tile,
    scatter_defects.tell_stored_at_once,
    scatter_defects.tell_stored_when_only_read,
    scatter_defects.acquire_terms_at_the_scope_of_one_gpu,
    scatter_defects.read_terms_without_waiting,
    handshake_cases.count_a_transfer_too_many,
]


@pytest.mark.parametrize(
    ("kernel", "defect"),
    [*((SPREAD, defect) for defect in OF_STRIPS), *((ONE_SHOT, defect) for defect in OF_ONE_SHOT)],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
def test_each_defect_is_reported(kernel, defect, monkeypatch):
    defect(monkeypatch)
    # Use three stages: with two, swapped k steps would have the same sum.
    spoiled, settings = of_sums(kernel, SUMS.replace(stages=3)), {"cores": 2, "scheduler": "pct", "step_limit": STEPS}
    # Also run one CTA at a time; each CTA then carries several own tiles.
    report = spoiled.report(seeds=6, **settings) or spoiled.report(seeds=6, resident=1, **settings)
    assert report, f"{defect.__name__} was not reported in 12 runs"
    assert "device" in str(report) and "CTA" in str(report) and ".py:" in str(report)


# --- Defects without a race show in the numbers -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "defect"),
    [
        (SPREAD, spread.send_no_strips_to_the_last_peer),
        (SPREAD, spread.leave_the_last_strip),
        (SPREAD, spread.send_a_row_too_few),
        (SPREAD, spread.begin_strips_a_row_too_late),
        (ONE_SHOT, one_shot_defects.add_the_first_term_for_all),
        (ONE_SHOT, one_shot_defects.leave_the_last_tile),
    ],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
def test_a_wrong_sum_shows(kernel, defect, monkeypatch):
    defect(monkeypatch)
    with pytest.raises(AssertionError, match="Arrays are not equal"):
        of_sums(kernel, devices=2).run(cores=2)


@pytest.mark.parametrize(
    ("config", "extra", "defect"),
    [
        (scatter_cases.SMALL, "bias", spread.add_the_bias_of_the_first_block),
        (scatter_cases.SMALL.replace(one_shot=True), "lhs_scale", one_shot_defects.scale_the_sum_instead_of_parts),
    ],
)
def test_a_wrong_epilogue_shows(config, extra, defect, monkeypatch):
    defect(monkeypatch)
    layer = Layer(EVERYWHERE)
    with pytest.raises(AssertionError, match="Arrays are not equal"):
        scatter_cases.check(layer, make_mesh(x=2), layer.integers(2, 15, 48, 24, extras=(extra,)), config=config)


def sums_of(kernel, parts, dtype):
    """Sums one number (given as two factors) of each of four devices. Returns each device's sums, one per block."""
    lhs, rhs = np.zeros((4 * 8, 4 * 64)), np.zeros((4 * 64, 72))
    for device, factors in enumerate(parts):
        for k, (left, right) in enumerate(factors):
            lhs[:, 64 * device + k], rhs[64 * device + k] = left, right
    config = SUMS.replace(one_shot=kernel == ONE_SHOT)

    def summed(a, b):
        return overlap.matmul_all_reduce(
            a, b, "x", config=config, preferred_element_type=dtype, implementation="fused"
        )[None]

    function = on_mesh(make_mesh(x=4), summed, (P(None, "x"), P("x", None)), P("x"))
    with emulate(cores=2):
        result = np.asarray(function(lhs.astype(jnp.bfloat16), rhs.astype(jnp.bfloat16)), np.float32)
    # On a device, all values of a block are equal.
    np.testing.assert_array_equal(result, np.repeat(result[:, ::8, :1], 8, 1) * np.ones(72))
    return result[:, ::8, 0]


LARGE, SMALL = [(4096, 4096)], [(1, 1)]
ORDER = [LARGE, SMALL, [(-4096, 4096)], SMALL]  # The products are 2²⁴, 1, −2²⁴, 1.
ROUNDING = [[(256, 1), (1, 1)], [(-256, 1)], [(0, 0)], [(0, 0)]]  # The products are 257, which bfloat16 rounds to 256.
# For each block, add the parts of the devices before its owner, nearest first; then add this sum to the own part.
NUMBERS = np.array([2.0**24, 1, -(2.0**24), 1], np.float32)
IN_BLOCKS = [functools.reduce(np.add, [NUMBERS[(me - d) % 4] for d in (1, 2, 3)]) + NUMBERS[me] for me in range(4)]
EXPECTED = {
    ("spread m", "order"): IN_BLOCKS,
    (ONE_SHOT, "order"): [functools.reduce(np.add, NUMBERS)] * 4,
    # The own part is not rounded, only the result is. In one shot the own part is rounded too.
    ("spread m", "rounding"): [1, 0, 0, 0],
    (ONE_SHOT, "rounding"): [0, 0, 0, 0],
}
PARTS = {"order": (ORDER, jnp.float32), "rounding": (ROUNDING, jnp.bfloat16)}


@pytest.mark.parametrize(("kernel", "what"), EXPECTED)
def test_all_devices_have_the_bits_of_one_order_and_one_rounding(kernel, what):
    np.testing.assert_array_equal(sums_of(kernel, *PARTS[what]), [EXPECTED[kernel, what]] * 4)


@pytest.mark.parametrize(
    ("what", "defect"),
    [("order", one_shot_defects.add_the_own_part_first), ("rounding", one_shot_defects.add_the_own_part_unrounded)],
)
def test_bits_that_differ_from_device_to_device_show(what, defect, monkeypatch):
    defect(monkeypatch)
    result = sums_of(ONE_SHOT, *PARTS[what])
    assert len({row.tobytes() for row in result}) > 1


def test_another_order_in_blocks_shows(monkeypatch):
    boxes = blocks_kernel._Body._boxes

    def backwards(self, ref, step, tile):
        return boxes(self, ref, 2 - step if ref is self._landing[0] else step, tile)

    monkeypatch.setattr(blocks_kernel._Body, "_boxes", backwards)
    assert np.any(sums_of("spread m", *PARTS["order"]) != EXPECTED["spread m", "order"])


# --- Changes that are harmless here, but not elsewhere ----------------------------------------------------------------

HARMLESS = [
    # In one shot, own tiles wait for everything that peers write to this device. So the final handshake is not needed.
    handshake_cases.count_a_transfer_too_few,
    # The wait for the own part has a proxy fence as well.
    scatter_defects.drop_the_producers_proxy_fence,
]


@pytest.mark.parametrize("change", HARMLESS, ids=lambda f: f.__name__)
def test_what_does_no_harm(change, monkeypatch):
    """Runs the kernel with the change: the emulator must report nothing. If it ever does, the change is a defect."""
    change(monkeypatch)
    run_some(of_sums(ONE_SHOT), seeds=2, laps=2)


def test_without_any_proxy_fence_terms_are_reported(monkeypatch):
    scatter_defects.drop_the_producers_proxy_fence(monkeypatch)
    monkeypatch.setattr(one_shot_kernel, "wait_for_block", semaphore_wait)
    assert "proxy fence" in str(of_sums(ONE_SHOT).report(seeds=3, cores=2))
