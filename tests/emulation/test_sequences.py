"""Launches of several kernels on shared memory: which faults a sequence must report, and when it must not."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from overlap.emulation import DeadlockError, EmulationError, ProtocolError, emulate, run_sequence

SHAPE = (8, 16)
ROWS = P(("x", "y"))
OF_X, OF_Y = 7, 9  # The keys (of ready flags) for the two axes.


def inline(text, ref):
    def run(ctx, ref):
        del ctx
        mgpu_utils.inline_ptx(text, mgpu_utils.memref_ptr(ref), has_side_effects=True)

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))(run)(ref)


def await_key(key):
    return f"""{{
        .reg .pred up;
        .reg .b32 word;
    LOOK:
        ld.relaxed.sys.global.b32 word, [$0];
        setp.eq.u32 up, word, {key};
        @!up bra LOOK;
        fence.acquire.sys;
        fence.proxy.async.global;
    }}"""


@functools.cache
def exchange(axis, key=None, order=(0, 1, 2, 3), *, pushes=False, says_done=True, awaits_done=True, counts=0):
    """Returns a launch in which each device of a 2×2 mesh gets the input of its peer along `axis`: [8, 16] -> [8, 16].

    `key`: the ready flag's key. None: Pallas's barrier instead of a ready flag; 0: neither. `pushes`: whether a device
    stores its input at the peer, instead of copying the peer's. `counts`: how often the device then increments the word
    that was its ready flag.
    """

    def body(x_gmem, out_gmem, smem, loaded):
        flags = pl.get_global(plgpu.SemaphoreType.REGULAR((3,)))  # The three flags: ready flag, seen, done.
        peer = {axis: 1 - lax.axis_index(axis)}
        if key:
            inline(f"fence.acq_rel.sys; st.relaxed.sys.global.b32 [$0], {key};", flags.at[0])
            inline(await_key(key), plgpu.remote_ref(flags.at[0], peer))
            plgpu.semaphore_signal(flags.at[1], device_id=peer)
        plgpu.copy_gmem_to_smem(x_gmem if pushes else plgpu.remote_ref(x_gmem, peer), smem, loaded)
        plgpu.barrier_wait(loaded)
        plgpu.copy_smem_to_gmem(smem, plgpu.remote_ref(out_gmem, peer) if pushes else out_gmem)
        plgpu.wait_smem_to_gmem(0)
        if key:
            plgpu.semaphore_wait(flags.at[1], 1, decrement=False)
            inline("st.relaxed.sys.global.b32 [$0], 0;", flags.at[0])
        if says_done:
            plgpu.semaphore_signal(flags.at[2], device_id=peer)
        if awaits_done:
            plgpu.semaphore_wait(flags.at[2], 1, decrement=False)
        for _ in range(counts):
            plgpu.semaphore_signal(flags.at[0], memory_scope="gpu")

    body.__name__ = f"exchange_{axis}"
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(SHAPE, jnp.float32),
        scratch_types=[plgpu.SMEM(SHAPE, jnp.float32), plgpu.Barrier()],
        compiler_params=plgpu.CompilerParams(skip_device_barrier=key is not None),
    )
    devices = np.array([jax.devices()[number] for number in order]).reshape(2, 2)
    mesh = Mesh(devices, ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    operand = 1000 * (axis == "y") + np.arange(4 * 8 * 16, dtype=np.float32).reshape(32, 16)
    with emulate(keep=True, detect_races=False) as run:
        run_alone = jax.jit(jax.shard_map(kernel, mesh=mesh, in_specs=ROWS, out_specs=ROWS, check_vma=False))
        jax.block_until_ready(run_alone(operand))
    return run.launches[0]


def shards_of_peers(launch):
    """Returns the expected result at each position: its peer's input."""
    axis = 0 if launch.name.endswith("x") else 1
    return np.flip(np.array(launch.inputs).reshape(2, 2, *SHAPE), axis).reshape(4, *SHAPE)


def outcome(launches, seed, *, detect):
    """Runs the launches. Returns "right" or "wrong" for their results, or the fault that was raised."""
    completion, scheduler = ("late", "random", "eager")[seed % 3], ("pct", "random")[seed % 2]
    try:
        results = run_sequence(launches, completion, scheduler, seed, detect_races=detect)
    except EmulationError as error:
        return error
    wanted = [shards_of_peers(launch) for launch in launches]
    return "right" if np.array_equal(np.array(results)[:, :, 0], np.array(wanted)) else "wrong"


def kinds(launches, *, detect, seeds=40):
    """Runs the launches with `seeds` seeds, and counts each outcome."""
    outcomes = [outcome(launches, seed, detect=detect) for seed in range(seeds)]
    return collections.Counter(each if isinstance(each, str) else type(each).__name__ for each in outcomes)


BOTH = pytest.mark.parametrize("detect", [False, True])


@BOTH
@pytest.mark.parametrize("keys", [(OF_X, OF_Y), (None, OF_Y), (None, None)], ids=["keys", "one barrier", "barriers"])
def test_clean(keys, detect):
    x, y = exchange("x", keys[0]), exchange("y", keys[1])
    for launches in ([y, y, x, x], [x, y, x, y]):
        assert kinds(launches, detect=detect, seeds=20) == {"right": 20}


@BOTH
def test_pushes_are_clean(detect):
    x, y = exchange("x", OF_X, pushes=True), exchange("y", OF_Y)
    assert kinds([y, y, x, x, y], detect=detect, seeds=20) == {"right": 20}


@BOTH
def test_a_look_may_meet_whatever_another_launch_has_left(detect):
    x, y = exchange("x", OF_X), exchange("y", OF_Y, counts=4)
    assert kinds([y, x, y, x], detect=detect, seeds=20) == {"right": 20}


def test_a_launch_along_another_axis_is_taken_for_this_one():
    x, y = exchange("x", OF_X), exchange("y", OF_X)
    found = kinds([y, y, x, x], detect=False)
    assert found["DeadlockError"] and found["right"]
    # The launches of one kernel are not confused with each other.
    assert kinds([x, x, x, x], detect=False) == {"right": 40}
    reports = [outcome([y, y, x, x], seed, detect=True) for seed in range(40)]
    assert any("may not have begun this launch" in str(report) for report in reports)


def test_a_deadlock_names_the_launches():
    x, y = exchange("x", OF_X), exchange("y", OF_X)
    outcomes = [outcome([y, y, x, x], seed, detect=False) for seed in range(40)]
    report = str(next(each for each in outcomes if isinstance(each, DeadlockError)))
    assert "of 4 (exchange_" in report
    threads = [line for line in report.splitlines() if "waits for" in line or "polls" in line]
    assert threads and all("in launch " in line for line in threads)
    assert "repeat with run_sequence(launches, '" in report


def test_a_barrier_that_not_all_reach_is_named():
    x, y, barrier = exchange("x", OF_X), exchange("y", OF_X), exchange("x")
    reports = [str(outcome([y, y, x, x, barrier], seed, detect=False)) for seed in range(40)]
    assert any("wait at the framework's barrier before launch 5 (exchange_x) for devices [" in each for each in reports)


def test_operands_read_before_the_peer_has_begun():
    y, hasty = exchange("y", OF_Y), exchange("x", 0, says_done=False, awaits_done=False)
    assert "may not have begun this launch" in str(outcome([y, hasty], 0, detect=True))
    of_before, wrong = set(np.ravel(y.inputs)), []
    for seed in range(40):
        _, results = run_sequence([y, hasty], "eager", seed=seed, detect_races=False)
        wrong += [out for (out,), right in zip(results, shards_of_peers(hasty)) if not np.array_equal(out, right)]
    # The peer may still be in its previous launch, so that its memory holds the operands of that launch. Or the peer is
    # in no launch, and its memory holds nothing useful.
    assert any(set(np.ravel(out)) <= of_before for out in wrong)
    assert any(np.isnan(out).any() for out in wrong)


def test_a_signal_that_comes_after_its_owner_has_left():
    careless, y = exchange("x", OF_X, awaits_done=False), exchange("y", OF_Y)
    faults = [outcome([careless, y, careless, y], seed, detect=True) for seed in range(5)]
    assert all(isinstance(fault, ProtocolError) for fault in faults)
    assert any("signals semaphore[2]" in str(fault) and "which has left the kernel" in str(fault) for fault in faults)
    # The next launch then takes the late signal for its own. So a device leaves while its peer still reads its memory.
    assert set(kinds([careless, exchange("x", OF_X)] * 2, detect=False)) > {"right"}


def test_a_write_into_memory_that_its_owner_has_given_to_the_next_launch():
    pushes = exchange("x", OF_X, pushes=True, says_done=False, awaits_done=False)
    y = exchange("y", OF_Y)
    faults = [outcome([pushes, y, y], seed, detect=True) for seed in range(10)]
    assert all(isinstance(fault, EmulationError) for fault in faults)
    assert any("may leave the kernel before" in str(fault) or "has left the kernel" in str(fault) for fault in faults)
    assert kinds([pushes, y, y], detect=False)["wrong"]


ORDERS = [(0, 1, 2, 3), (0, 2, 1, 3), (3, 1, 0, 2), (5, 3, 2, 6)]


@BOTH
def test_meshes_of_other_orders_and_of_a_part_of_the_devices(detect):
    launches = [exchange("xy"[n % 2], key, order) for n, (key, order) in enumerate(zip((11, 13, 15, 17), ORDERS))]
    assert [launch.devices for launch in launches] == ORDERS
    for launch in launches:
        np.testing.assert_array_equal(np.array(launch.outputs)[:, 0], shards_of_peers(launch))
    assert kinds([*launches, *launches[::-1]], detect=detect, seeds=15) == {"right": 15}


@pytest.mark.parametrize("order", ORDERS[1:3])
def test_the_same_axis_of_another_order_of_the_devices_is_another_one(order):
    here, there = exchange("x", OF_X), exchange("x", OF_X, order)
    assert set(kinds([here, here, there, there], detect=False)) > {"right"}


def test_a_seed_repeats_what_happened():
    x, y = exchange("x", OF_X), exchange("y", OF_X)
    outcomes = [[str(outcome([y, y, x, x], seed, detect=seed % 4 == 0)) for seed in range(12)] for _ in range(2)]
    assert outcomes[0] == outcomes[1]
    assert len(set(outcomes[0])) > 3


def test_a_kernel_without_a_mesh():
    def double(x_gmem, out_gmem, smem, loaded):
        plgpu.copy_gmem_to_smem(x_gmem, smem, loaded)
        plgpu.barrier_wait(loaded)
        smem[...] = smem[...] * 2
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem, out_gmem)
        plgpu.wait_smem_to_gmem(0)

    x = np.ones(SHAPE, np.float32)
    kernel = plgpu.kernel(
        double,
        out_type=jax.ShapeDtypeStruct(SHAPE, jnp.float32),
        scratch_types=[plgpu.SMEM(SHAPE, jnp.float32), plgpu.Barrier()],
    )
    with emulate(keep=True) as run:
        jax.block_until_ready(jax.jit(kernel)(x))
    (launch,) = run.launches
    (_, ((out,), *_)) = run_sequence([exchange("x", OF_X), launch])
    np.testing.assert_array_equal(out, 2 * x)
