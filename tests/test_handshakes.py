"""Tests consecutive launches without a barrier between them. Each injected defect of the handshakes is reported."""

import types

import jax
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl

from overlap.primitives import handshake, semaphore_wait, stalls
from overlap.primitives.handshake import Handshake
from overlap.primitives.waits import wait_for_word
from tests import handshake_cases as defects
from tests.protocol_cases import KERNELS, ONE_SHOT, SPREAD, clean, of_sums

ALL = pytest.mark.parametrize("kernel", KERNELS)
# A hang is detected after this number of steps; a correct kernel takes less than a fifth.
STEPS = 35_000
PULLS = ["pull", "joined", "rhs n", "rhs k"]


@ALL
@pytest.mark.parametrize("devices", [2, 4])
def test_clean(kernel, devices):
    for seed, completion in enumerate(("late", "eager", "random")):
        clean(kernel, devices).run(cores=2, completion=completion, seed=seed, laps=3)


@pytest.mark.parametrize("seeds", [range(8), pytest.param(range(8, 15), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("scheduler", ["pct", "random"])
@pytest.mark.parametrize("kernel", ["pull", "ring"])
def test_clean_under_many_schedules(kernel, scheduler, seeds):
    for seed in seeds:
        clean(kernel).run(cores=1 + seed % 3, completion="random", scheduler=scheduler, seed=seed, laps=4)


# `test_residency.py` tests the other kernels.
@pytest.mark.parametrize("kernel", [kernel for kernel in KERNELS if kernel not in ("ring", SPREAD, ONE_SHOT)])
def test_clean_if_one_cta_runs_at_a_time(kernel):
    for seed, completion in enumerate(("late", "eager", "random")):
        clean(kernel).run(cores=2, resident=1, completion=completion, seed=seed, laps=3)


def raise_late(patch, victim):
    """A device raises its ready flag only after its own CTAs have seen all peers' ready flags."""
    raise_ready_flag = Handshake._raise

    def stall_and_raise(self):
        late = lax.axis_index("x") == victim

        @pl.when(late & (self.cta == 0))  # Any other CTA that is asked to raise it still has to look for peers.
        def _stall():
            semaphore_wait(self.flags.at[handshake._BEGUN], self.looks)
            raise_ready_flag(self)

        pl.when(lax.axis_index("x") != victim)(lambda: raise_ready_flag(self))

    patch.setattr(Handshake, "_raise", stall_and_raise)


def begin_late(patch):
    """On each device, CTA 0's communicator begins after the other CTAs have lowered the ready flag."""
    begin = Handshake._begin

    def stall_and_begin(self, look):
        @pl.when(self.cta == 0)
        def _stall():
            me = self.group.me()
            wait_for_word(
                self.flags.at[0], handshake._LOWERED, self.group, me, operation=0, role=handshake.stalls.BEGUN
            )

        return begin(self, look)

    patch.setattr(Handshake, "_begin", stall_and_begin)


@pytest.mark.parametrize("victim", [0, 2])
@ALL
def test_clean_if_a_device_begins_late(kernel, victim, monkeypatch):
    raise_late(monkeypatch, victim)
    KERNELS[kernel](3).run(cores=2, laps=2)


@ALL
def test_clean_if_a_cta_begins_when_all_is_over(kernel, monkeypatch):
    begin_late(monkeypatch)
    late = KERNELS[kernel](3)
    for seed in range(2):
        late.run(cores=2, laps=3, seed=seed)


def test_more_peers_than_ctas():
    clean("pull", 8).run(cores=2, laps=2)


EVERYWHERE = [
    defects.never_raise_the_ready_flag,
    defects.do_not_look,
    defects.look_for_nobody,
    defects.look_at_the_own_ready_flag,
    defects.tell_before_looking,
    defects.begin_at_once,
    defects.begin_when_all_but_one_have,
    defects.begin_without_a_proxy_fence,
    defects.say_seen_to_nobody,
    defects.say_seen_to_the_wrong_peer,
    defects.say_seen_by_the_wrong_bit,
    defects.draw_each_number_twice,
    defects.draw_one_number_again_and_again,
    defects.without_waiting_for("seen"),
    defects.without_waiting_for("done"),
    defects.wait_for_all_but_one_to_be_done,
    defects.never_lower_the_ready_flag,
    defects.lower_the_ready_flag_after_telling,
    defects.say_done_to_nobody,
    defects.say_done_to_the_wrong_peer,
    defects.say_done_by_the_wrong_bit,
    defects.leave_without_a_word,
]
# Defects of kernels that look for several peers and count transfers.
OF_TRANSFERS = [
    defects.look_for_the_same_peer,
    defects.stop_drawing_too_early,
    defects.speak_whoever_has_completed_something,
    defects.count_a_transfer_too_few,
    defects.count_a_transfer_too_many,
    defects.count_without_acquiring_what_others_did,
    defects.leave_the_last_number,
    defects.take_a_number_too_many,
]
# For kernels whose peers read this device's memory, which this device cannot observe. A device waits itself, in its own
# tiles, for what its peers write.
OF_PULLS = [
    *OF_TRANSFERS,
    defects.speak_when_the_first_has_completed_something,
    defects.speak_before_the_transfers,
    defects.count_transfers_when_they_begin,
]
OF_THE_RING = [
    defects.look_at_the_other_neighbour,
    defects.wait_for_the_other_neighbour,
]


@pytest.mark.parametrize("kernel", PULLS)
@pytest.mark.parametrize("defect", EVERYWHERE + OF_PULLS, ids=lambda f: f.__name__)
def test_each_defect_is_reported(defect, kernel, monkeypatch):
    defect(monkeypatch)
    assert KERNELS[kernel](3).report(cores=2, laps=3, step_limit=STEPS)


# Sending waits for a tile with a proxy fence of its own. "scatter n" has the same handshakes.
OF_SUMS = [defect for defect in EVERYWHERE + OF_TRANSFERS if defect is not defects.begin_without_a_proxy_fence]


@pytest.mark.parametrize("defect", OF_SUMS, ids=lambda f: f.__name__)
def test_each_defect_of_scattered_sums_is_reported(defect, monkeypatch):
    defect(monkeypatch)
    assert KERNELS["scatter m"](3).report(cores=2, laps=3, step_limit=STEPS)


# The final handshake guards results that peers write. In one shot, own tiles wait for everything that peers write, and
# another warp tells peers that the device is done. "scatter m" tests the handshakes that these kernels share with it.
OF_ALL = [
    (SPREAD, defects.wait_for_all_but_one_to_be_done),
    (SPREAD, defects.speak_when_the_first_has_completed_something),
    (SPREAD, defects.speak_before_the_transfers),
    (SPREAD, defects.count_a_transfer_too_few),
    (ONE_SHOT, defects.without_waiting_for("seen")),
    (ONE_SHOT, defects.never_lower_the_ready_flag),
    (ONE_SHOT, defects.leave_without_a_word),
    (ONE_SHOT, defects.speak_before_the_transfers),
]


@pytest.mark.parametrize(("kernel", "defect"), OF_ALL, ids=lambda x: getattr(x, "__name__", x))
def test_each_defect_of_sums_for_all_is_reported(kernel, defect, monkeypatch):
    defect(monkeypatch)
    assert of_sums(kernel).report(cores=2, laps=3, step_limit=STEPS)


@pytest.mark.parametrize("defect", EVERYWHERE + OF_THE_RING, ids=lambda f: f.__name__)
def test_each_defect_of_the_ring_is_reported(defect, monkeypatch):
    defect(monkeypatch)
    assert KERNELS["ring"](3).report(cores=2, laps=3, step_limit=STEPS)


@ALL
def test_a_ready_flag_that_is_raised_again_is_reported(kernel, monkeypatch):
    begin_late(monkeypatch)
    defects.raise_the_ready_flag_again_when_late(monkeypatch)
    assert KERNELS[kernel](3).report(cores=2, laps=3, step_limit=STEPS)


@pytest.mark.parametrize(
    ("got", "seen"), [(0, "nothing"), (1, "that of an operation which has ended"), (77, "other contents")]
)
def test_the_report_of_a_wait_shows_that_orders_differ(got, seen, monkeypatch):
    """Two processes of a job, each with a device that waits for the other one to begin, in different operations."""
    group = types.SimpleNamespace(places=("x",), axis_name="x", size=2)
    store = types.SimpleNamespace(texts={})
    store.key_value_set = lambda key, text, allow_overwrite: store.texts.update({key: text})
    store.key_value_dir_get = lambda folder: store.texts.items()
    monkeypatch.setattr(stalls._compat, "job_store", lambda: store)
    waits, records = [], []
    for process, operation in enumerate(("gather 8x8x8", "scatter 8x8x8")):
        record = np.zeros(stalls.RECORD_BYTES // 4, np.uint32)
        record[[stalls.OPERATION, stalls.POSITION, stalls.PEER]] = (
            stalls.describe(operation, group),
            process,
            1 - process,
        )
        record[[stalls.STATE, stalls.ROLE, stalls.EXPECTED, stalls.GOT]] = (
            stalls.STILL_WAITING,
            stalls.BEGUN,
            0xABCDEF01,
            got,
        )
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        waits = stalls._exchanged([f"{stalls._who(record)} waits for {stalls._for_whom(record)}"])
        records.append(record)
    assert len(waits) == 2
    assert f"shows {got:#x} ({seen})" in stalls.line(records[1]) and "0xabcdef01" in stalls.line(records[1])
    elsewhere = stalls._elsewhere(waits[1], waits)
    assert "gather 8x8x8 along 'x' of 2 devices: position 0 (GPU ?, process 0) waits for position 1" in elsewhere
    assert "scatter" not in elsewhere and elsewhere.endswith("the same operations in the same order")
    # A device that waits in the same operation is no sign of different orders.
    assert "order" not in stalls._elsewhere(waits[1], [waits[1], waits[1].replace("position 1 (", "position 5 (")])
