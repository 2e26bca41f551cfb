"""Launches that follow each other on the same memory: of one kernel (laps), and of several kernels (sequences).

The kernel exchanges shards between peers by a ready flag. Each switch of `exchange` breaks one rule. The tests demand
that broken rules are reported, or that the numbers are wrong or threads wait for ever where detection is off.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from mosaic_emulator import EmulationError, emulate, run_sequence
from tests.emulation.cases import COMPLETIONS, normal, out_type
from tests.emulation.inline_cases import WAIT, inline
from tests.meshes import on_mesh

SHAPE = (8, 16)
ROWS = P(("x", "y"))
OF_X, OF_Y = 7, 9  # The keys (of ready flags) for the two axes.
SCRATCH = [plgpu.SMEM(SHAPE, jnp.float32), plgpu.Barrier()]


def shards_of_peers(inputs, axis):
    """Returns the expected result at each position: its peer's input."""
    return np.flip(np.array(inputs).reshape(2, 2, *SHAPE), "xy".index(axis)).reshape(4, *SHAPE)


@functools.cache
def alone(axis, key=None, order=(0, 1, 2, 3), *, pushes=False, says_done=True, awaits_done=True, counts=0, looks=True,
          lowers=True, told=False):  # fmt: skip
    """Returns a function that launches the exchange along `axis` of a 2×2 mesh: each device gets its peer's input.

    `key`: the ready flag's key. None: Pallas's barrier instead of a ready flag; 0: neither. `pushes`: whether a device
    stores its input at the peer, instead of copying the peer's. `counts`: how often the device then increments the word
    that was its ready flag. `told`: the second device does not look at the flag, but is told by the first.
    """

    def body(x_gmem, out_gmem, smem, loaded):
        flags = pl.get_global(plgpu.SemaphoreType.REGULAR((3,)))  # The three flags: ready flag, seen, done.
        me = lax.axis_index(axis)
        peer = {axis: 1 - me}
        if key and looks:
            inline(f"fence.acq_rel.sys; st.relaxed.sys.global.b32 [$0], {key};", flags.at[0])
            is_told = jnp.logical_and(told, me == 1)
            pl.when(is_told)(lambda: plgpu.semaphore_wait(flags.at[1], 1, decrement=False))

            @pl.when(jnp.logical_not(is_told))
            def _look():
                look = WAIT.replace(".gpu", ".sys").replace("setp.ge", "setp.eq").replace(", 3;", f", {key};")
                inline(look, plgpu.remote_ref(flags.at[0], peer))

            plgpu.semaphore_signal(flags.at[1], device_id=peer)
        plgpu.copy_gmem_to_smem(x_gmem if pushes else plgpu.remote_ref(x_gmem, peer), smem, loaded)
        plgpu.barrier_wait(loaded)
        plgpu.copy_smem_to_gmem(smem, plgpu.remote_ref(out_gmem, peer) if pushes else out_gmem)
        plgpu.wait_smem_to_gmem(0)
        if key and looks:
            plgpu.semaphore_wait(flags.at[1], 1, decrement=False)
            if lowers:
                inline("st.relaxed.sys.global.b32 [$0], 0;", flags.at[0])
        if says_done:
            plgpu.semaphore_signal(flags.at[2], device_id=peer)
        if awaits_done:
            plgpu.semaphore_wait(flags.at[2], 1, decrement=False)
        for _ in range(counts):
            plgpu.semaphore_signal(flags.at[0], memory_scope="gpu")

    body.__name__ = f"exchange_{axis}"
    kernel = plgpu.kernel(
        body, out_type=out_type(SHAPE), scratch_types=SCRATCH,
        compiler_params=plgpu.CompilerParams(skip_device_barrier=key is not None),
    )  # fmt: skip
    mesh = Mesh(np.array([jax.devices()[n] for n in order]).reshape(2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    operand = 1000 * (axis == "y") + np.arange(4 * 8 * 16, dtype=np.float32).reshape(32, 16)
    call = on_mesh(mesh, kernel, ROWS, ROWS)

    def run():
        out = np.asarray(call(operand)).reshape(4, *SHAPE)
        np.testing.assert_array_equal(out, shards_of_peers(operand, axis))

    return run


# ---- laps of one kernel ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [None, OF_X])
def test_laps_are_clean(key):
    for completion in COMPLETIONS:
        with emulate(completion=completion, laps=3) as report:
            alone("x", key)()
        assert report.counts["copies"] == 3 * 4 * 2


BROKEN_LAPS = {  # A ready flag that is left raised stands for the launch before.
    "nobody looks": (dict(looks=False), 1, r"too early: device \d, CTA 0 .*may not have begun this launch"),
    "told by the first": (dict(told=True), 1, r"missing proxy fence\): device \d, CTA 0 uses input 0.* of device \d"),
    "left raised": (dict(lowers=False), 12, "may not have begun this launch"),
}


@pytest.mark.parametrize("name", BROKEN_LAPS)
def test_broken_laps(name):
    switches, seeds, words = BROKEN_LAPS[name]
    reports = []
    for seed in range(seeds):
        try:
            with emulate(completion="eager" if seeds > 1 else "late", seed=seed, laps=3):
                alone("x", OF_X, **switches)()
        except EmulationError as report:
            reports.append(str(report))
    assert any(re.search(words, report) for report in reports), reports


# ---- sequences of several kernels ------------------------------------------------------------------------------------


@functools.cache
def exchange(*args, **switches):
    """Returns a launch of `alone` for sequences."""
    run_alone = alone(*args, **switches)
    with emulate(keep=True, detect_races=False) as run:
        try:
            run_alone()
        except AssertionError:
            assert switches  # A broken kernel may give wrong numbers.
    return run.launches[0]


def outcome(launches, seed, *, detect):
    """Runs the launches. Returns "right" or "wrong" for their results, or the fault that was raised."""
    try:
        results = run_sequence(launches, COMPLETIONS[seed % 3], ("pct", "random")[seed % 2], seed, detect_races=detect)
    except EmulationError as error:
        return error
    wanted = [shards_of_peers(launch.inputs, launch.name[-1]) for launch in launches]
    return "right" if np.array_equal(np.array(results)[:, :, 0], np.array(wanted)) else "wrong"


X, Y = functools.partial(exchange, "x", OF_X), functools.partial(exchange, "y", OF_Y)
Y_AS_X, OTHER_ORDER = functools.partial(exchange, "y", OF_X), functools.partial(exchange, "x", OF_X, (0, 2, 1, 3))
# More sequences, of the library's kernels: tests/protocol/test_sequences.py.
CLEAN = {
    "keys and the framework's barrier": lambda: [Y(), exchange("x"), X(), exchange("y"), X(), exchange("x")],
    "pushes": lambda: [Y(), X(pushes=True), X(pushes=True), Y()],
    "a look meets what another launch has left": lambda: [Y(counts=4), X(), Y(counts=4), X()],
    "other devices": lambda: [X(), exchange("y", 11, (5, 3, 2, 6)), exchange("x", 13, (3, 1, 0, 2)), Y()],
}


@pytest.mark.parametrize("name", CLEAN)
def test_sequences_are_clean(name):
    assert [outcome(CLEAN[name](), seed, detect=seed % 2 == 0) for seed in range(8)] == ["right"] * 8


# Launches; the outcomes of which one must be seen without detection; the words of which one must be reported with it.
HASTY, CARELESS = dict(says_done=False, awaits_done=False), dict(awaits_done=False)
BROKEN = {
    "another axis with the same key": (lambda: [Y_AS_X(), Y_AS_X(), X(), X()], "DeadlockError", "may not have begun"),
    "another order with the same key": (lambda: [X(), X(), OTHER_ORDER(), OTHER_ORDER()], "DeadlockError", ""),
    "read before the peer has begun": (lambda: [Y(), exchange("x", 0, **HASTY)], "wrong", "may not have begun"),
    "a signal after its owner has left": (lambda: [X(**CARELESS), X()] * 2, "wrong", "has left the kernel"),
    "a write after its owner has left": (lambda: [X(pushes=True, **HASTY), Y(), Y()], "wrong", "leave|left the kernel"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_sequences(name):
    launches, seen, words = BROKEN[name]
    outcomes = (outcome(launches(), seed, detect=False) for seed in range(30))
    kinds = (each if isinstance(each, str) else type(each).__name__ for each in outcomes)
    assert any(kind in (seen, "wrong", "ProtocolError") for kind in kinds)
    if words:
        faults = (str(outcome(launches(), seed, detect=True)) for seed in range(10))
        assert any(each in fault for fault in faults for each in words.split("|"))


def test_memory_that_the_peer_has_not_prepared_holds_the_launch_before_or_nothing():
    hasty, wrong = exchange("x", 0, **HASTY), []
    for seed in range(30):
        _, results = run_sequence([Y(), hasty], "eager", seed=seed, detect_races=False)
        wanted = shards_of_peers(hasty.inputs, "x")
        wrong += [out for (out,), right in zip(results, wanted) if not np.array_equal(out, right)]
    assert any(set(np.ravel(out)) <= set(np.ravel(Y().inputs)) for out in wrong)
    assert any(np.isnan(out).any() for out in wrong)


def test_a_deadlock_names_the_launches_and_a_seed_repeats_it():
    launches = [Y_AS_X(), Y_AS_X(), X(), X(), exchange("x")]
    outcomes = [str(outcome(launches, seed, detect=False)) for seed in range(40)]
    assert outcomes[:3] == [str(outcome(launches, seed, detect=False)) for seed in range(3)]
    assert len(set(outcomes)) > 3
    report = next(each for each in outcomes if "waits for" in each and "of 5 (exchange_" in each)
    threads = [line for line in report.splitlines() if "waits for" in line or "polls" in line]
    assert threads and all("in launch " in line for line in threads)
    assert "repeat with run_sequence(launches, '" in report
    waits = "wait at the framework's barrier before launch 5 (exchange_x) for devices ["
    assert any(waits in each for each in outcomes)


def test_a_kernel_without_a_mesh():
    def double(x, o):
        o[...] = 2 * x[...]

    x = normal(*SHAPE)
    with emulate(keep=True) as run:
        jax.block_until_ready(jax.jit(plgpu.kernel(double, out_type=out_type(SHAPE)))(x))
    (_, ((out,), *_)) = run_sequence([X(), run.launches[0]])
    np.testing.assert_array_equal(out, 2 * x)
