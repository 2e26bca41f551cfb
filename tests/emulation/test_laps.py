"""Consecutive launches of one kernel that use the same memory, with and without Pallas's barrier between them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import PartitionSpec as P

from overlap.emulation import EmulationError, ProtocolError, emulate
from tests.emulation.cases import make_mesh, place, sharded

SHAPE = (8, 64)


def inline(text, ref):
    def run(ctx, ref):
        del ctx
        mgpu_utils.inline_ptx(text, mgpu_utils.memref_ptr(ref), has_side_effects=True)

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))(run)(ref)


RAISE = "fence.acq_rel.sys; st.relaxed.sys.global.b32 [$0], 7;"
LOWER = "st.relaxed.sys.global.b32 [$0], 0;"
AWAIT = """{
    .reg .pred up;
    .reg .b32 word;
LOOK:
    ld.relaxed.sys.global.b32 word, [$0];
    setp.eq.u32 up, word, 7;
    @!up bra LOOK;
    fence.acquire.sys;
    fence.proxy.async.global;
}"""


def exchange(*, skips_barrier, looks=True, lowers=True, told=False):
    """Returns a kernel in which each of two devices copies the other's input: [8, 64] -> [8, 64]."""

    def body(x_gmem, out_gmem, smem, loaded):
        flags = pl.get_global(plgpu.SemaphoreType.REGULAR((3,)))  # The three flags: ready flag, seen, done.
        other = {"x": 1 - lax.axis_index("x")}
        if skips_barrier and looks:
            inline(RAISE, flags.at[0])
            is_told = jnp.logical_and(told, lax.axis_index("x") == 1)  # Device 0 has looked, and tells device 1.
            pl.when(is_told)(lambda: plgpu.semaphore_wait(flags.at[1], 1, decrement=False))

            @pl.when(jnp.logical_not(is_told))
            def _look():
                inline(AWAIT, plgpu.remote_ref(flags.at[0], other))

            plgpu.semaphore_signal(flags.at[1], device_id=other)
        plgpu.copy_gmem_to_smem(plgpu.remote_ref(x_gmem, other), smem, loaded)
        plgpu.barrier_wait(loaded)
        plgpu.copy_smem_to_gmem(smem, out_gmem)
        plgpu.wait_smem_to_gmem(0)
        if skips_barrier and looks:
            plgpu.semaphore_wait(flags.at[1], 1, decrement=False)
            if lowers:
                inline(LOWER, flags.at[0])
        plgpu.semaphore_signal(flags.at[2], device_id=other)
        plgpu.semaphore_wait(flags.at[2], 1, decrement=False)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(SHAPE, jnp.float32),
        scratch_types=[plgpu.SMEM(SHAPE, jnp.float32), plgpu.Barrier()],
        compiler_params=plgpu.CompilerParams(skip_device_barrier=skips_barrier),
    )
    mesh = make_mesh(x=2)
    x = np.arange(16 * 64, dtype=np.float32).reshape(16, 64)
    run = sharded(kernel, mesh, P("x"), P("x"))
    return lambda: np.testing.assert_array_equal(run(place(x, mesh, P("x"))), np.roll(x, 8, axis=0))


@pytest.mark.parametrize("skips_barrier", [False, True])
@pytest.mark.parametrize("completion", ["late", "eager", "random"])
def test_clean(skips_barrier, completion):
    run = exchange(skips_barrier=skips_barrier)
    for seed in range(10):
        with emulate(completion=completion, seed=seed, laps=4) as report:
            run()
        assert report.counts["copies"] == 4 * 2 * 2


def test_without_the_barrier_a_peer_may_not_have_begun():
    with pytest.raises(ProtocolError, match=r"too early: device \d, CTA 0 .*may not have begun this launch"), emulate():
        exchange(skips_barrier=True, looks=False)()


def test_the_copy_engine_needs_a_fence_behind_the_wait():
    with (
        pytest.raises(ProtocolError, match=r"missing proxy fence\): device 1, CTA 0 uses input 0.* of device 0"),
        emulate(),
    ):
        exchange(skips_barrier=True, told=True)()


def test_a_ready_flag_left_raised_stands_for_the_launch_before():
    run, reports = exchange(skips_barrier=True, lowers=False), []
    for seed in range(40):
        try:
            with emulate(completion="eager", seed=seed, laps=3):
                run()
        except EmulationError as report:
            reports.append(str(report))
    assert any("may not have begun this launch" in report for report in reports)


def test_laps_is_checked():
    with pytest.raises(ValueError, match="`laps` must be an integer of at least 1, got 0"), emulate(laps=0):
        pass
