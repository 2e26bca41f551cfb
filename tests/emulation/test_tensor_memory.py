"""Tensor memory, the types and scales of products on Blackwell, and clusters that take over the work of others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from overlap.emulation import EmulationError, ProtocolError, RaceError, emulate
from tests.emulation import tensor_kernels
from tests.emulation.cases import COMPLETIONS, normal, out_type, run_kernel


def wide(x):
    return np.asarray(x).astype(np.float32)


# ---- products --------------------------------------------------------------------------------------------------------

E4M3, E5M2, E2M1, E8M0 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float4_e2m1fn, jnp.float8_e8m0fnu


@pytest.mark.parametrize(
    ("left", "right", "accumulator"),
    [
        (jnp.bfloat16, jnp.bfloat16, jnp.float32),
        (jnp.float16, jnp.float16, jnp.float16),
        (E4M3, E4M3, jnp.float32),
        (E4M3, E5M2, jnp.float32),
        (jnp.int8, jnp.int8, jnp.int32),
    ],
)
def test_types(left, right, accumulator):
    x, y = (3 * normal(128, 128)).astype(left), (3 * normal(128, 128, seed=1)).astype(right)
    for transposed in (False, True):
        with emulate():
            out = jax.jit(
                lambda x, y, t=transposed: tensor_kernels.single_product(x, y, accumulator=accumulator, transposed=t)
            )(x, y.T if transposed else y)
        expected = (x.astype(np.float64) @ y.astype(np.float64)).astype(accumulator)
        np.testing.assert_allclose(wide(out), wide(expected), rtol=2e-3, atol=1e-2)


def test_64_rows():
    x, y = normal(64, 64, dtype=np.float16), normal(64, 128, dtype=np.float16, seed=1)
    with emulate():
        out = jax.jit(tensor_kernels.single_product)(x, y)
    np.testing.assert_allclose(wide(out), wide(x) @ wide(y), rtol=1e-4, atol=1e-4)


KINDS = [(E4M3, E8M0, 32), (E2M1, E4M3, 16), (E5M2, E8M0, 32), (E2M1, E8M0, 32), (E2M1, E8M0, 16)]
FORMS = [(False, 128, 128), (True, 256, 256), (True, 128, 128), (True, 128, 256)]


@pytest.mark.parametrize(
    ("pair", "m", "n", "dtype", "scale", "block"),
    [
        pytest.param(*form, *kind, marks=[] if (i, j) in ((0, 0), (0, 1), (2, 0), (3, 0)) else [pytest.mark.slow])
        for i, form in enumerate(FORMS)
        for j, kind in enumerate(KINDS)
    ],
)
def test_scales(dtype, scale, block, pair, m, n):
    k = 256
    x, y = normal(m, k).astype(dtype), normal(n, k, seed=1).astype(dtype)
    sizes = np.random.default_rng(2).integers(-3, 4, (m + n, k // block))
    scales = (2.0**sizes).astype(scale)
    left, right = scales[:m], scales[m:]
    with emulate():
        out = jax.jit(lambda *args: tensor_kernels.scaled_product(*args, pair=pair))(x, y, left, right)
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

    assert (run_kernel(body, out_type=out_type((128, 512))) == 2).all()


def test_reductions_and_leading_dimensions():
    x = normal(2, 128, 64)

    def body(x_gmem, o, most, tmem):
        for i in range(2):
            plgpu.async_store_tmem(tmem.at[i], x_gmem[i])
        plgpu.commit_tmem()
        for i in range(2):
            value, largest = plgpu.async_load_tmem(tmem.at[i], reduce="absmax")
            o[i], most[i] = value, largest

    values, largest = run_kernel(
        body, x, out_type=[out_type((2, 128, 64)), out_type((2, 128))],
        scratch_types=[plgpu.TMEM((2, 128, 64), jnp.float32)],
    )  # fmt: skip
    np.testing.assert_array_equal(values, x)
    np.testing.assert_array_equal(largest, np.abs(x).max(-1))


@pytest.mark.parametrize("waits", [True, False])
def test_unions(waits):
    """A kernel uses two references to the same columns, one after the other, and a third to other columns."""
    x, y = normal(128, 64), normal(128, 64, dtype=np.float16, seed=1)

    def body(x_gmem, y_gmem, x_out, y_out, first_out, union):
        (first, second), third = union
        plgpu.async_store_tmem(first, x_gmem[...])
        plgpu.async_store_tmem(second, 2 * x_gmem[...])
        plgpu.commit_tmem()
        first_out[...] = plgpu.async_load_tmem(first)
        if waits:
            plgpu.wait_load_tmem()
        plgpu.async_store_tmem(third, y_gmem[...])  # The columns are those of `first`.
        plgpu.commit_tmem()
        x_out[...], y_out[...] = plgpu.async_load_tmem(second), plgpu.async_load_tmem(third)

    def run():
        return run_kernel(
            body, x, y, out_type=[out_type(x.shape), out_type(y.shape, np.float16), out_type(x.shape)],
            scratch_types=[plgpu.RefUnion(
                [plgpu.TMEM((128, 64), jnp.float32), plgpu.TMEM((128, 64), jnp.float32)],
                plgpu.TMEM((128, 64), jnp.float16, packed=True),
            )],
        )  # fmt: skip

    if waits:
        for got, expected in zip(run(), (2 * x, y, x)):
            np.testing.assert_array_equal(got, expected)
    else:
        with pytest.raises(RaceError, match="Expected: wait_load_tmem"):
            run()


def test_a_replicated_copy_is_counted_by_the_leader():
    x = normal(16, 64)

    def body(x_gmem, o, smem, loaded, met):
        rank = lax.axis_index("pair")
        plgpu.copy_gmem_to_smem(
            x_gmem, smem, loaded, collective_axes="pair", leader_tracked=plgpu.CopyPartition.REPLICATED
        )

        @pl.when(rank == 0)
        def _wait():
            plgpu.barrier_wait(loaded)

        plgpu.barrier_arrive(met)
        plgpu.barrier_wait(met)
        o[rank] = smem[...]

    scratch = [plgpu.SMEM((16, 64), jnp.float32), plgpu.Barrier(), plgpu.ClusterBarrier(collective_axes=("pair",))]
    for completion in COMPLETIONS:
        out = run_kernel(
            body, x, settings={"completion": completion}, out_type=out_type((2, 16, 64)), cluster=(2,),
            cluster_names=("pair",), scratch_types=scratch,
        )  # fmt: skip
        np.testing.assert_array_equal(out, [x, x])


def test_a_copy_on_a_barrier_that_orders_the_tensor_core():
    x = normal(8, 64)

    def body(x_gmem, o, smem, loaded):
        plgpu.copy_gmem_to_smem(x_gmem, smem, loaded)
        plgpu.barrier_wait(loaded)
        o[...] = smem[...]

    scratch = [plgpu.SMEM(x.shape, jnp.float32), plgpu.Barrier(orders_tensor_core=True)]
    if jax.__version_info__ >= (0, 12):
        np.testing.assert_array_equal(run_kernel(body, x, out_type=out_type(x.shape), scratch_types=scratch), x)
    else:  # A fault of the compiler.
        with pytest.raises(ProtocolError, match="arrives 128 times"):
            run_kernel(body, x, out_type=out_type(x.shape), scratch_types=scratch)


# ---- dynamic scheduling ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ctas", [1, 2])
@pytest.mark.parametrize("completion", COMPLETIONS)
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

    kwargs = dict(out_type=[out_type((work, ctas), jnp.int32)] * 2, grid=(work,), grid_names=("work",))
    kwargs |= dict(cluster=(ctas,), cluster_names=("rank",), num_threads=2, thread_name="wg")
    for settings in ({"cores": 4}, {"resident": 2}, {"resident": 100}):
        settings = {**settings, "completion": completion}
        out, taken = run_kernel(body, settings=settings, **kwargs)
        np.testing.assert_array_equal(out, 10 * np.arange(work)[:, None] + np.arange(ctas))
        assert (taken == taken[:, :1]).all()  # Both CTAs of a cluster take the same tile.
        started = min(settings.get("resident", 4) // ctas, work)
        assert len(np.unique(taken)) >= started
        if started < work:
            assert len(np.unique(taken)) < work
    if ctas > 1:  # With two CTAs, both ask, and each gets two answers.
        with pytest.raises(EmulationError):
            run_kernel(lambda *refs: body(*refs, passes=False), settings={"completion": completion}, **kwargs)
