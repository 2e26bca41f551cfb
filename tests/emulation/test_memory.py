"""Tests copies, shared memory, and which thread may use shared memory when, one feature at a time."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from overlap.emulation import ProtocolError, RaceError, emulate
from tests.emulation.cases import TILED, normal
from tests.emulation.cases import out_type as out
from tests.emulation.cases import run_kernel as run


def test_slices_of_tiled_memory():
    def body(x, o, smem, barrier):
        for i in range(2):
            plgpu.copy_gmem_to_smem(
                x.at[pl.ds(i * 32, 32), pl.ds(64, 64)], smem.at[1, pl.ds(i * 32, 32), pl.ds(64, 64)], barrier
            )
        plgpu.barrier_wait(barrier)
        half = smem.at[1, :, pl.ds(64, 64)]
        half[...] = half[...] + 1
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(half.at[pl.ds(8, 16)], o.at[pl.ds(8, 16)])
        plgpu.wait_smem_to_gmem(0)

    x = normal(64, 128, dtype=np.float16)
    scratch = [plgpu.SMEM((2, 64, 128), jnp.float16, transforms=TILED), plgpu.Barrier(num_arrivals=2)]
    y = run(body, x, out_type=out((64, 64), jnp.float16), scratch_types=scratch)
    np.testing.assert_array_equal(y[8:24], (x[:, 64:] + np.float16(1))[8:24])
    assert np.isnan(y[:8]).all()
    assert np.isnan(y[24:]).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_reduction_into_global_memory(dtype):
    # The CTAs add without any order between them. A reduction allows this.
    def body(x, total, smem):
        smem[...] = x[...] * (1 + lax.axis_index("core")).astype(dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem, total, reduction_op="add")
        plgpu.wait_smem_to_gmem(0)

    def call(x, start):
        total = jax.new_ref(start)
        plgpu.kernel(
            body, out_type=(), grid=(3,), grid_names=("core",), scratch_types=[plgpu.SMEM(x.shape, dtype)]
        )(x, total)  # fmt: skip
        return total[...]

    x = np.ones((8, 64), dtype)
    with emulate(completion="random"):
        y = np.asarray(jax.jit(call)(x, x))
    np.testing.assert_array_equal(y.astype(np.float32), 7.0)


def test_commit_group_and_partial_waits():
    def body(x, o, smem):
        for i in range(3):
            smem[i] = x[i]
        plgpu.commit_smem()
        for i in range(3):
            plgpu.copy_smem_to_gmem(smem.at[i], o.at[i], commit_group=i > 0)
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # Waits for the older group, which has the first two stores.
        smem[0] = smem[0] * 0
        smem[1] = smem[1] * 0
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        smem[2] = smem[2] * 0

    x = normal(3, 128)
    y = run(body, x, out_type=out(x.shape), scratch_types=[plgpu.SMEM(x.shape, jnp.float32)])
    np.testing.assert_array_equal(y, x)


@pytest.mark.parametrize("ordered", [True, False])
def test_ref_union_shares_memory(ordered):
    def body(x, o, union, barrier):
        first, second = union
        wg = lax.axis_index("wg")

        @pl.when(wg == 0)
        def _():
            first[...] = x[...]
            o[0] = first[...].sum()
            if ordered:
                plgpu.barrier_arrive(barrier)

        @pl.when(wg == 1)
        def _():
            if ordered:
                plgpu.barrier_wait(barrier)
            second[...] = jnp.full((256,), 2, jnp.float16)
            o[1] = second[...].astype(jnp.float32).sum()

    call = functools.partial(
        run, body, np.ones((4, 64), np.float32), out_type=out((2,)), num_threads=2, thread_name="wg",
        scratch_types=[
            plgpu.RefUnion(plgpu.SMEM((4, 64), jnp.float32), plgpu.SMEM((256,), jnp.float16)), plgpu.Barrier()
        ],
    )  # fmt: skip
    if ordered:
        assert call().tolist() == [256, 512]
    else:
        with pytest.raises(RaceError, match="union group"):
            call()


def test_collective_scopes_in_a_loop():
    def body(x, o):
        wg = lax.axis_index("wg")

        @pl.loop(0, 3)
        def _(i):
            def scope(smem, barrier):
                @pl.when(wg == 0)
                def _():
                    plgpu.copy_gmem_to_smem(x.at[i], smem, barrier)

                plgpu.barrier_wait(barrier)
                o[wg, i] = smem[...].sum() * (1 + wg)

            pl.run_scoped(scope, plgpu.SMEM((64,), jnp.float32), plgpu.Barrier(), collective_axes="wg")

    x = normal(3, 64)
    y = run(body, x, out_type=out((2, 3)), num_threads=2, thread_name="wg")
    np.testing.assert_allclose(y, np.stack([x.sum(1), 2 * x.sum(1)]), rtol=1e-5)


@pytest.mark.parametrize("committed", [True, False])
def test_a_fence_carries_over_a_barrier(committed):
    # One warpgroup writes and commits; a warp of the other issues the store.
    def body(x, o, smem, full):
        wg = lax.axis_index("wg")

        @pl.when(wg == 0)
        def _():
            smem[...] = x[...]
            if committed:
                plgpu.commit_smem()
            plgpu.barrier_arrive(full)

        @pl.when(wg == 1)
        def _():
            @plgpu.warp_map
            def _(warp):
                @pl.when(warp == 3)
                def _():
                    plgpu.barrier_wait(full)
                    plgpu.copy_smem_to_gmem(smem, o)
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    x = normal(64)
    call = functools.partial(run, body, x, out_type=out(x.shape), num_threads=2, thread_name="wg",
                             scratch_types=[plgpu.SMEM(x.shape, jnp.float32), plgpu.Barrier()])  # fmt: skip
    if committed:
        np.testing.assert_array_equal(call(), x)
    else:
        with pytest.raises(RaceError, match=r"(?s)missing proxy fence.*warp 3") as caught:
            call()
        assert caught.value.kind == "proxy"


def test_warps_keep_their_phases_between_maps():
    def body(x, o, smem, full, rejoin):
        wg = lax.axis_index("wg")

        @pl.when(wg == 0)
        def _():
            @pl.loop(0, 3)
            def _(i):
                @plgpu.warp_map
                def _(warp):
                    @pl.when(warp == 1)
                    def _():
                        plgpu.copy_gmem_to_smem(x.at[i], smem, full)
                        plgpu.barrier_wait(full)

                o[i] = smem[...] * 2

        if rejoin is not None:

            @pl.when(wg == 0)
            def _():
                plgpu.barrier_wait(full)

    x = normal(3, 64)
    for rejoin in (None, True):
        call = functools.partial(run, lambda *refs, rejoin=rejoin: body(*refs, rejoin), x, out_type=out(x.shape),
                                 num_threads=1, thread_name="wg",
                                 scratch_types=[plgpu.SMEM((64,), jnp.float32), plgpu.Barrier()])  # fmt: skip
        if rejoin is None:
            np.testing.assert_array_equal(call(), x * 2)
        else:
            with pytest.raises(ProtocolError, match="waited for it differently often"):
                call()


def test_swap_and_atomic_operations():
    names = {"add": 11, "and": 0b0100, "or": 0b0111, "xor": 0b0011, "min": 5, "max": 6}

    def body(x, o, smem):
        for i, name in enumerate(names):
            o[i] = jnp.full((128,), 0b0110, jnp.int32)
            getattr(plgpu, f"atomic_{name}")(o.at[i], x[...])
        smem[...] = x[...]
        o[6] = jax.ref.swap(smem, (), x[...] * 3)
        o[7] = smem[...]

    y = run(body, np.full(128, 0b0101, np.int32), out_type=out((8, 128), jnp.int32),
            scratch_types=[plgpu.SMEM((128,), jnp.int32)])  # fmt: skip
    np.testing.assert_array_equal(y, np.repeat([[*names.values(), 5, 15]], 128, axis=0).T)
