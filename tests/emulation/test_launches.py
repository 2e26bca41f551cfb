"""Launches that follow each other on the same memory: of one kernel (laps), and of several kernels (sequences).

The kernel exchanges shards between peers by a ready flag. Each switch of `exchange` breaks one rule. The tests demand
that broken rules are reported, or that the numbers are wrong or threads wait for ever where detection is off.
"""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from overlap.emulation import EmulationError, ProtocolError, emulate, run_sequence
from tests.emulation.cases import COMPLETIONS
from tests.emulation.inline_cases import WAIT, inline

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
                look = WAIT.replace("setp.ge", "setp.eq").replace(", 3;", f", {key};")
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
        body, out_type=jax.ShapeDtypeStruct(SHAPE, jnp.float32), scratch_types=SCRATCH,
        compiler_params=plgpu.CompilerParams(skip_device_barrier=key is not None),
    )  # fmt: skip
    devices = np.array([jax.devices()[number] for number in order]).reshape(2, 2)
    mesh = Mesh(devices, ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    operand = 1000 * (axis == "y") + np.arange(4 * 8 * 16, dtype=np.float32).reshape(32, 16)
    call = jax.jit(jax.shard_map(kernel, mesh=mesh, in_specs=ROWS, out_specs=ROWS, check_vma=False))

    def run():
        out = np.asarray(call(operand)).reshape(4, *SHAPE)
        np.testing.assert_array_equal(out, shards_of_peers(operand, axis))

    return run


# ---- laps of one kernel ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [None, OF_X])
def test_laps_are_clean(key):
    for seed, completion in enumerate(COMPLETIONS * 2):
        with emulate(completion=completion, seed=seed, laps=3) as report:
            alone("x", key)()
        assert report.counts["copies"] == 3 * 4 * 2


def test_broken_laps():
    with pytest.raises(ProtocolError, match=r"too early: device \d, CTA 0 .*may not have begun this launch"), emulate():
        alone("x", OF_X, looks=False)()
    words = r"missing proxy fence\): device \d, CTA 0 uses input 0.* of device \d"
    with pytest.raises(ProtocolError, match=words), emulate():
        alone("x", OF_X, told=True)()
    reports = []
    for seed in range(12):  # A ready flag that is left raised stands for the launch before.
        try:
            with emulate(completion="eager", seed=seed, laps=3):
                alone("x", OF_X, lowers=False)()
        except EmulationError as report:
            reports.append(str(report))
    assert any("may not have begun this launch" in report for report in reports)


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


def kinds(launches, *, detect, seeds=15):
    """Runs the launches with `seeds` seeds, and counts each outcome."""
    outcomes = [outcome(launches, seed, detect=detect) for seed in range(seeds)]
    return collections.Counter(each if isinstance(each, str) else type(each).__name__ for each in outcomes)


X, Y = functools.partial(exchange, "x", OF_X), functools.partial(exchange, "y", OF_Y)
Y_AS_X = functools.partial(exchange, "y", OF_X)
ORDERS = [(0, 1, 2, 3), (0, 2, 1, 3), (3, 1, 0, 2), (5, 3, 2, 6)]


def of_other_devices():
    """Returns launches on meshes of other orders and of a part of the devices."""
    launches = [exchange("xy"[n % 2], key, order) for n, (key, order) in enumerate(zip((11, 13, 15, 17), ORDERS))]
    assert [launch.devices for launch in launches] == ORDERS
    return [*launches, *launches[::-1]]


CLEAN = {
    "keys": lambda: [Y(), X(), Y(), X(), X()],
    "one barrier": lambda: [Y(), exchange("x"), Y(), exchange("x")],
    "barriers": lambda: [exchange("y"), exchange("x"), exchange("x"), exchange("y")],
    "pushes": lambda: [Y(), X(pushes=True), X(pushes=True), Y()],
    "a look meets what another launch has left": lambda: [Y(counts=4), X(), Y(counts=4), X()],
    "the launches of one kernel": lambda: [X()] * 4,
    "other devices": of_other_devices,
}


@pytest.mark.parametrize("detect", [False, True])
@pytest.mark.parametrize("name", CLEAN)
def test_sequences_are_clean(name, detect):
    assert kinds(CLEAN[name](), detect=detect, seeds=6) == {"right": 6}


# Launches; the outcomes of which one must be seen without detection; the words of which one must be reported with it.
HASTY, CARELESS = dict(says_done=False, awaits_done=False), dict(awaits_done=False)
BROKEN = {
    "another axis with the same key": (lambda: [Y_AS_X(), Y_AS_X(), X(), X()], "DeadlockError", "may not have begun"),
    "another order with the same key": (lambda: [X(), X(), *[exchange("x", OF_X, ORDERS[1])] * 2], "DeadlockError", ""),
    "read before the peer has begun": (lambda: [Y(), exchange("x", 0, **HASTY)], "wrong", "may not have begun"),
    "a signal after its owner has left": (lambda: [X(**CARELESS), X()] * 2, "wrong", "has left the kernel"),
    "a write after its owner has left": (lambda: [X(pushes=True, **HASTY), Y(), Y()], "wrong", "leave|left the kernel"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_sequences(name):
    launches, seen, words = BROKEN[name]
    assert set(kinds(launches(), detect=False, seeds=30)) & {seen, "wrong", "ProtocolError"}
    if words:
        faults = [str(outcome(launches(), seed, detect=True)) for seed in range(10)]
        assert any(each in fault for fault in faults for each in words.split("|")), faults


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
    assert outcomes[:6] == [str(outcome(launches, seed, detect=False)) for seed in range(6)]
    assert len(set(outcomes)) > 3
    report = next(each for each in outcomes if "waits for" in each and "of 5 (exchange_" in each)
    threads = [line for line in report.splitlines() if "waits for" in line or "polls" in line]
    assert threads and all("in launch " in line for line in threads)
    assert "repeat with run_sequence(launches, '" in report
    waits = "wait at the framework's barrier before launch 5 (exchange_x) for devices ["
    assert any(waits in each for each in outcomes)


def test_a_kernel_without_a_mesh():
    def double(x_gmem, out_gmem, smem, loaded):
        plgpu.copy_gmem_to_smem(x_gmem, smem, loaded)
        plgpu.barrier_wait(loaded)
        smem[...] = smem[...] * 2
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem, out_gmem)
        plgpu.wait_smem_to_gmem(0)

    x = np.ones(SHAPE, np.float32)
    kernel = plgpu.kernel(double, out_type=jax.ShapeDtypeStruct(SHAPE, jnp.float32), scratch_types=SCRATCH)
    with emulate(keep=True) as run:
        jax.block_until_ready(jax.jit(kernel)(x))
    (_, ((out,), *_)) = run_sequence([X(), run.launches[0]])
    np.testing.assert_array_equal(out, 2 * x)
