"""Compares the shadow memory with a brute-force model that has one cell per byte, and clocks with their definition."""

import itertools
import types

import numpy as np
import pytest

from mosaic_emulator import ProtocolError
from mosaic_emulator.execution.tensor_queue import TensorQueue
from mosaic_emulator.foundations.clocks import EMPTY, ComponentPool, Components, Knowledge, covers, join, with_time
from mosaic_emulator.foundations.shadow import region_of
from mosaic_emulator.state.memory import Buffer, View
from mosaic_emulator.state.orders import Orders
from mosaic_emulator.state.races import Access, RaceDetector
from mosaic_emulator.state.sync import Release, Semaphore, Write

pytestmark = pytest.mark.one_jax
INSTRUCTION = types.SimpleNamespace(index=0, source="test")


def random_view(rng, array):
    """Returns a random slice, transposition or split of `array`."""
    key = []
    for size in array.shape:
        if rng.random() < 0.2:
            key.append(int(rng.integers(size)))
        else:
            start = int(rng.integers(size))
            key.append(slice(start, int(rng.integers(start, size)) + 1, int(rng.choice([1, 1, 2]))))
    view = array[(*key, ...)]
    return view.T if rng.random() < 0.3 else view


def test_region_covers_exactly_the_bytes_of_the_view():
    rng = np.random.default_rng(0)
    base = np.zeros((6, 10, 4), np.int16)
    for _ in range(300):
        view = random_view(rng, base)
        view[...] = 1
        offset, dims, run = region_of(view, base)
        touched = np.zeros(base.nbytes, bool)
        for index in np.ndindex(*(count for count, _ in dims)):
            start = offset + sum(i * stride for i, (_, stride) in zip(index, dims))
            assert not touched[start : start + run].any()
            touched[start : start + run] = True
        np.testing.assert_array_equal(touched, base.view(np.uint8).reshape(-1, 2).any(1).repeat(2))
        base[...] = 0


@pytest.mark.parametrize("seed", range(8))
def test_races_are_those_of_a_brute_force_detector(seed):
    rng = np.random.default_rng(seed)
    reported = []
    detector = RaceDetector(lambda kind, old, new: reported.append((old.component, old.time)))
    buffer = Buffer("b", "gmem", np.zeros((8, 6), np.int32), 0)
    threads = 4
    known = [with_time(EMPTY, i, 1) for i in range(threads)]
    times = [1] * threads
    history: dict[tuple, list] = {cell: [] for cell in np.ndindex(8, 6)}
    index_of = np.arange(48).reshape(8, 6)
    for _ in range(120):
        me = int(rng.integers(threads))
        if rng.random() < 0.3:  # Learn another thread's clock, as a thread does that receives a signal.
            other = int(rng.integers(threads))
            known[me] = join(known[me], known[other])
            times[other] += 1
            known[other] = with_time(known[other], other, times[other])
            continue
        state = rng.bit_generator.state
        view = random_view(rng, buffer.data)
        rng.bit_generator.state = state
        cells = [tuple(map(int, np.unravel_index(i, (8, 6)))) for i in random_view(rng, index_of).ravel()]
        write = bool(rng.random() < 0.4)
        expected = set()
        for cell in cells:
            for component, time, was_write in history[cell]:
                if (write or was_write) and not covers(known[me], component, time):
                    expected.add((component, time))
        reported.clear()
        access = Access(None, View(buffer, view, (1,) * view.ndim, ""), "x", INSTRUCTION, me, times[me], write=write)
        detector.access(access, Knowledge(known[me]))
        # The shadow memory may forget an access that a later access covers. It must never invent an access, and never
        # miss that there is a race.
        assert set(reported) <= expected
        assert bool(reported) == bool(expected)
        for cell in cells:
            history[cell].append((me, times[me], write))
            if write:  # A race that has been reported at a cell need not be reported again.
                history[cell] = history[cell][-1:]


def test_atomics_do_not_race_with_each_other_but_with_all_else():
    kinds = []
    detector = RaceDetector(lambda kind, old, new: kinds.append((old.component, new.component)))
    buffer = Buffer("b", "gmem", np.zeros(8, np.float32), 0)
    view = View(buffer, buffer.data[2:6], (1,), "")

    def access(component, *, seen=(), **how):
        known = with_time(EMPTY, component, 1)
        for other in seen:
            known = join(known, with_time(EMPTY, other, 1))
        detector.access(Access(None, view, "x", INSTRUCTION, component, 1, **how), Knowledge(known))
        return kinds[-1:] and kinds.pop(0)

    assert not access(0, write=False)
    assert not access(1, seen=[0], write=True, atomic=True)
    assert access(2, write=True, atomic=True) == (0, 2)  # Races not with access 1, but with the read before access 1.
    assert not access(3, seen=[0, 1, 2], write=False)
    assert access(4, seen=[0, 1, 3], write=False) == (2, 4)
    assert access(5, seen=[0, 1, 2, 3], write=True) == (4, 5)


def test_clock_operations():
    a, b = with_time(EMPTY, 3, 5), with_time(with_time(EMPTY, 40, 2), 3, 1)
    both = join(a, b)
    assert covers(both, 3, 5)
    assert covers(both, 40, 2)
    assert not covers(both, 40, 3)
    assert not covers(a, 40, 1)
    assert not covers(a, 1000, 1)
    assert join(a, EMPTY) is a
    assert not covers(a, 40, 1), "joining changed an operand"


def test_components_are_reused_only_when_ordered():
    pool = ComponentPool(Components())
    first = pool.take(EMPTY)
    second = pool.take(EMPTY)
    assert first[0] != second[0]
    third = pool.take(with_time(EMPTY, *first))
    assert third == (first[0], first[1] + 1)
    fourth = pool.take(with_time(EMPTY, *first))  # This clock knows the first use, but not the reuse.
    assert fourth[0] not in (first[0], second[0])


def test_a_wait_learns_only_what_the_value_that_ends_it_carries():
    word, known = Semaphore("flag", 0), Knowledge()
    for time in (1, 2):
        word.signal(1, with_time(EMPTY, 0, time), 0)
    assert word.acquire(1, known, decrement=False, scope="sys") is word.log[1]
    assert covers(known.seen, 0, 1) and not covers(known.seen, 0, 2)


def test_fences_order_what_their_scope_covers():
    early, late = with_time(EMPTY, 0, 1), with_time(EMPTY, 0, 2)
    for scope, learns in (("cta", []), ("gpu", [0]), ("sys", [0, 1])):
        orders, known = Orders(), Knowledge()
        orders.gather(Write(1, 1, with_time(EMPTY, 1, 1), {0: with_time(EMPTY, 0, 1)}, None), 0, "sys")
        orders.acquire(known, scope)
        assert [component for component in (0, 1) if covers(known.seen, component, 1)] == learns
    # A relaxed store carries what the last release fence covers.
    orders = Orders()
    orders.release(Knowledge(early), "sys")
    for scope, (clock, releases) in itertools.product(("gpu", "sys"), ((early, False), (late, True))):
        carried = orders.released(Knowledge(late), scope, releases=releases)
        assert carried.local is clock and (carried.system is clock) == (scope == "sys")
    # A release within a CTA tells other threads nothing.
    orders = Orders()
    orders.release(Knowledge(early), "gpu")
    orders.release(Knowledge(late), "cta")
    assert orders.released(Knowledge(late), "sys", releases=False)[:2] == (EMPTY, early)
    assert orders.released(Knowledge(late), "cta", releases=True)[:2] == (EMPTY, EMPTY)
    known = Knowledge()
    orders.gather(Write(1, 1, late, {0: early}, None), 0, "cta")
    orders.acquire(known, "sys")
    assert not covers(known.seen, 0, 1)


def test_a_wait_that_decrements_takes_what_earlier_ones_have_left():
    word, first, second = Semaphore("flag", 0), Knowledge(), Knowledge()
    for time in (1, 2):
        word.signal(1, with_time(EMPTY, 0, time), 0)
    for known, time in ((first, 1), (second, 2)):
        assert word.acquire(1, known, decrement=True, scope="sys") is not None
        assert covers(known.seen, 0, time) and not covers(known.seen, 0, time + 1)
    assert word.acquire(1, Knowledge(), decrement=True, scope="sys") is None and word.value == 0


def test_a_value_that_has_been_lowered_ends_no_wait_and_who_knows_of_a_read_reads_nothing_older():
    word = Semaphore("flag", 0)
    for _ in range(3):
        word.signal(2, EMPTY, 0)
    word.write(1, 0, Release(EMPTY, EMPTY, "sys"), by=(5, 1), continues=True)
    word.note_read(word.log[-1], 2, 1, 0)
    assert word.oldest(with_time(EMPTY, 2, 1)) is word.log[-1] is not word.oldest(EMPTY)
    word.signal(4, EMPTY, 0)
    assert word.acquire(3, Knowledge(), decrement=False, scope="sys") is word.log[-1]


def test_a_commit_completes_the_operations_before_it_and_no_others():
    thread, done = types.SimpleNamespace(knowledge=Knowledge(), instruction=INSTRUCTION), []
    queue = TensorQueue(Components())
    for number in range(3):
        queue.issue(thread, "mma", collective=False)
        queue.append(lambda number=number: done.append(number), at_once=False)
    queue.run_until(2)
    assert done == [0, 1]
    with pytest.raises(ProtocolError, match="mma with collective_axis, after operations without it"):
        queue.issue(thread, "mma", collective=True)
