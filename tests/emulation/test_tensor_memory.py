"""Tensor memory, the types and scales of products on Blackwell, and clusters: when they start, and who takes over."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mosaic_emulator import DeadlockError, EmulationError, ProtocolError, RaceError, emulate
from tests.emulation import tensor_kernels
from tests.emulation.cases import COMPLETIONS, X, normal, out_type, run_kernel, wide

E4M3, E5M2, E2M1, E8M0 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float4_e2m1fn, jnp.float8_e8m0fnu


@pytest.mark.parametrize(
    ("rows", "left", "right", "accumulator", "transposed"),
    [
        (64, jnp.bfloat16, jnp.bfloat16, jnp.float32, False),
        (128, jnp.float16, jnp.float16, jnp.float16, True),
        (128, E4M3, E5M2, jnp.float32, True),
        (128, jnp.int8, jnp.int8, jnp.int32, False),
    ],
)
def test_types(rows, left, right, accumulator, transposed):
    x, y = (3 * normal(rows, 128)).astype(left), (3 * normal(128, 128, seed=1)).astype(right)
    make = functools.partial(tensor_kernels.single_product, accumulator=accumulator, transposed=transposed)
    with emulate():
        out = jax.jit(make)(x, y.T if transposed else y)
    expected = (x.astype(np.float64) @ y.astype(np.float64)).astype(accumulator)
    np.testing.assert_allclose(wide(out), wide(expected), rtol=2e-3, atol=1e-2)


@pytest.mark.parametrize(
    ("pair", "m", "n", "dtype", "scale", "block"),
    [
        (False, 128, 128, E4M3, E8M0, 32),
        (False, 128, 128, E2M1, E4M3, 16),
        (True, 128, 128, E5M2, E8M0, 32),
        (True, 128, 256, E2M1, E8M0, 16),
        pytest.param(True, 256, 256, E2M1, E8M0, 32, marks=pytest.mark.slow),
    ],
)
def test_scales(dtype, scale, block, pair, m, n):
    k = 256
    x, y = normal(m, k).astype(dtype), normal(n, k, seed=1).astype(dtype)
    sizes = np.random.default_rng(2).integers(-3, 4, (m + n, k // block))
    scales = (2.0**sizes).astype(scale)
    left, right = scales[:m], scales[m:]
    with emulate():
        out = jax.jit(functools.partial(tensor_kernels.scaled_product, pair=pair))(x, y, left, right)
    expected = (wide(x) * wide(left).repeat(block, 1)) @ (wide(y) * wide(right).repeat(block, 1)).T
    np.testing.assert_allclose(wide(out), expected, rtol=1e-4, atol=1e-3)


# ---- tensor memory ---------------------------------------------------------------------------------------------------


def test_columns_are_given_back_at_the_end_of_a_scope():
    def body(o):
        for value in (1.0, 2.0):

            def scope(tmem, value=value):
                plgpu.async_store_tmem(tmem, jnp.full((128, 512), value, jnp.float32))
                plgpu.commit_tmem()
                o[...] = plgpu.async_load_tmem(tmem)
                plgpu.wait_load_tmem()

            pl.run_scoped(scope, plgpu.TMEM((128, 512), jnp.float32))

    assert (run_kernel(body, out=(128, 512)) == 2).all()


@pytest.mark.parametrize("waits", [True, False])
def test_unions_leading_dimensions_and_reductions(waits):
    """A kernel uses two references to the same columns, one after the other, and a third to other columns."""
    x, y = normal(2, 128, 64), normal(128, 64, dtype=np.float16, seed=1)

    def body(x_gmem, y_gmem, x_out, y_out, most, union):
        (first, second), third = union
        for i in range(2):
            plgpu.async_store_tmem(first.at[i], x_gmem[i])
        plgpu.async_store_tmem(second, 2 * x_gmem[0])
        plgpu.commit_tmem()
        for i in range(2):
            x_out[i], most[i] = plgpu.async_load_tmem(first.at[i], reduce="absmax")
        if waits:
            plgpu.wait_load_tmem()
        plgpu.async_store_tmem(third, y_gmem[...])  # The columns are those of `first`.
        plgpu.commit_tmem()
        x_out[2], y_out[...] = plgpu.async_load_tmem(second), plgpu.async_load_tmem(third)

    def run():
        first, second = plgpu.TMEM((2, 128, 64), jnp.float32), plgpu.TMEM((128, 64), jnp.float32)
        return run_kernel(
            body, x, y, out=[(3, 128, 64), out_type(y.shape, np.float16), (2, 128)],
            scratch_types=[plgpu.RefUnion([first, second], plgpu.TMEM((128, 64), jnp.float16, packed=True))],
        )  # fmt: skip

    if waits:
        for got, expected in zip(run(), ([*x, 2 * x[0]], y, np.abs(x).max(-1))):
            np.testing.assert_array_equal(got, expected)
    else:
        with pytest.raises(RaceError, match="Expected: wait_load_tmem"):
            run()


def test_a_copy_on_a_barrier_that_orders_the_tensor_core():
    def body(x_gmem, o, smem, loaded):
        plgpu.copy_gmem_to_smem(x_gmem, smem, loaded)
        plgpu.barrier_wait(loaded)
        o[...] = smem[...]

    scratch = [plgpu.SMEM(X.shape, jnp.float32), plgpu.Barrier(orders_tensor_core=True)]
    if jax.__version_info__ >= (0, 12):
        np.testing.assert_array_equal(run_kernel(body, X, out=X.shape, scratch_types=scratch), X)
    else:  # A fault of the compiler.
        with pytest.raises(ProtocolError, match="arrives 128 times"):
            run_kernel(body, X, out=X.shape, scratch_types=scratch)


# ---- when clusters start, what their barriers expect, dynamic scheduling ---------------------------------------------


def test_a_cluster_is_launched_as_a_whole():
    def body(o):
        met = pl.get_global(plgpu.SemaphoreType.REGULAR)
        plgpu.semaphore_signal(met)
        plgpu.semaphore_wait(met, 4, decrement=False)
        o[lax.axis_index("cluster"), lax.axis_index("rank")] = jnp.float32(1)

    kwargs = dict(out=(2, 2), grid=(2,), grid_names=("cluster",), cluster=(2,), cluster_names=("rank",))
    assert run_kernel(body, settings={"resident": 4}, **kwargs).tolist() == [[1, 1], [1, 1]]
    with pytest.raises(DeadlockError, match="2 CTAs were never launched"):
        run_kernel(body, settings={"resident": 3}, **kwargs)
    with pytest.raises(ProtocolError, match="a cluster of 2 CTAs cannot be launched where 1 fit"):
        run_kernel(body, settings={"resident": 1}, **kwargs)


@pytest.mark.parametrize(("axes", "arrivals"), [(("r",), 2), (("c",), 3), (("r", "c"), 4), ((("r", "c"),), 6)], ids=str)
def test_a_cluster_barrier_takes_arrivals_along_its_axes(axes, arrivals):
    def body(o, barrier, *, first_arrives):
        r, c = lax.axis_index("r"), lax.axis_index("c")
        pl.when((r + c > 0) | jnp.bool_(first_arrives))(lambda: plgpu.barrier_arrive(barrier))
        plgpu.barrier_wait(barrier)
        o[r, c] = (r * 3 + c).astype(jnp.float32)

    kwargs = dict(out=(2, 3), cluster=(2, 3), cluster_names=("r", "c"))
    kwargs |= dict(scratch_types=[plgpu.ClusterBarrier(collective_axes=axes)])
    out = run_kernel(functools.partial(body, first_arrives=True), **kwargs)
    np.testing.assert_array_equal(out, np.arange(6).reshape(2, 3))
    with pytest.raises(DeadlockError, match=f"got {arrivals - 1} of {arrivals} arrivals"):
        run_kernel(functools.partial(body, first_arrives=False), **kwargs)


@pytest.mark.parametrize(("ctas", "completion"), [(1, "late"), *((2, completion) for completion in COMPLETIONS)])
def test_waiting_clusters_are_taken_over(ctas, completion):
    work = 11

    def body(o, taken, *, passes=True):
        axes = {"cluster_axes": ("rank",)} if ctas > 1 and passes else {}
        first, rank = lax.axis_index("work"), lax.axis_index("rank")

        @plgpu.dynamic_scheduling_loop(grid_names=("work",), thread_axis="wg", **axes)
        def _item(info):
            (item,) = info.index

            @pl.when(lax.axis_index("wg") == 0)
            def _write():
                o[item, rank] = 10 * item + rank
                taken[item, rank] = first

    kwargs = dict(out=[out_type((work, ctas), jnp.int32)] * 2, grid=(work,), grid_names=("work",))
    kwargs |= dict(cluster=(ctas,), cluster_names=("rank",), num_threads=2, thread_name="wg")
    for settings, fit in (({"cores": 4}, 4), ({"resident": 2}, 2), ({"resident": 100}, 100)):
        settings = {**settings, "completion": completion}
        out, taken = run_kernel(body, settings=settings, **kwargs)
        np.testing.assert_array_equal(out, 10 * np.arange(work)[:, None] + np.arange(ctas))
        assert (taken == taken[:, :1]).all()  # Both CTAs of a cluster take the same tile.
        started = min(fit // ctas, work)
        assert len(np.unique(taken)) >= started
        assert started == work or len(np.unique(taken)) < work
    if ctas > 1:  # With two CTAs, both ask, and each gets two answers.
        with pytest.raises(EmulationError):
            run_kernel(lambda *refs: body(*refs, passes=False), settings={"completion": completion}, **kwargs)
