"""What the framework offers inside a kernel, one feature at a time, against NumPy."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from overlap.emulation import EmulationError, ProtocolError, RaceError, emulate

TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


def out(shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def run(body, *args, settings=None, **kwargs):
    with emulate(**(settings or {})):
        return jax.tree.map(np.asarray, jax.jit(lambda *xs: plgpu.kernel(body, **kwargs)(*xs))(*args))


def normal(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def test_loops_and_branches():
    def body(o):
        def step(i, carry):
            a, b = carry
            return lax.cond(lax.rem(i, 2) == 0, lambda: (b, a + i), lambda: (a, b * 2 % 7))

        a, b = lax.fori_loop(0, 5, step, (1, 2))
        c = lax.while_loop(lambda c: c < 100, lambda c: c * 3 - 1, a + 2)
        d = lax.switch(lax.clamp(0, b, 2), [lambda: 10, lambda: 20, lambda: 30])
        e, ys = lax.scan(lambda s, x: (s + x, s), jnp.int32(0), jnp.arange(4, dtype=jnp.int32))
        for i, value in enumerate(
            (a, b, c, d, e, ys[2], lax.div(jnp.int32(-7), a + 1), jnp.minimum(a, b) // 2, a % -3)
        ):
            o[i] = value

    def reference():
        a, b = 1, 2
        for i in range(5):
            a, b = (b, a + i) if i % 2 == 0 else (a, b * 2 % 7)
        c = a + 2
        while c < 100:
            c = c * 3 - 1
        return [a, b, c, [10, 20, 30][min(max(b, 0), 2)], 6, 1, int(-7 / (a + 1)), min(a, b) // 2, a % -3]

    assert run(body, out_type=out((9,), jnp.int32)).tolist() == reference()


def test_loop_helpers_visit_every_index_once():
    def body(o):
        core = lax.axis_index("core")

        @plgpu.nd_loop((3, 4), collective_axes="core")
        def _(info):
            i, j = info.index
            o[i, j] = core * 100 + i * 10 + j

        @pl.loop(0, 2)
        def _(i):
            @pl.when(pl.program_id(0) == 1)
            def _():
                o[3, i] = pl.num_programs(0)

    result = run(body, out_type=out((4, 4), jnp.int32), grid=(2,), grid_names=("core",))
    assert sorted(x % 100 for x in result[:3].ravel().tolist()) == [i * 10 + j for i in range(3) for j in range(4)]
    assert result[3, :2].tolist() == [2, 2]
    assert result[3, 2] == np.iinfo(np.int32).min  # nobody wrote it


@pytest.mark.parametrize(
    "dtype", [jnp.float32, jnp.bfloat16, jnp.float16, jnp.int32, jnp.float8_e4m3fn, jnp.float8_e5m2]
)
def test_dtypes_round_trip(dtype):
    def body(x, o, smem, barrier):
        plgpu.copy_gmem_to_smem(x, smem, barrier)
        plgpu.barrier_wait(barrier)
        plgpu.copy_smem_to_gmem(smem, o)
        plgpu.wait_smem_to_gmem(0)

    x = (normal(8, 128) * 3).astype(dtype)
    y = run(body, x, out_type=out(x.shape, dtype), scratch_types=[plgpu.SMEM(x.shape, dtype), plgpu.Barrier()])
    np.testing.assert_array_equal(x.view(np.uint8), y.view(np.uint8))


def test_array_arithmetic():
    def body(x, o, smem):
        v = plgpu.layout_cast(plgpu.load(x, layout=plgpu.Layout.WG_STRIDED((64, 64), 2)), plgpu.Layout.WGMMA)
        v = jnp.exp(-v) / (1 + jnp.tanh(v) ** 2) + jnp.where(v > 0, v, lax.rsqrt(v * v + 1))
        v = v + jnp.sum(v, axis=1)[:, None] * 0.5 + jnp.max(v) + lax.broadcasted_iota(jnp.float32, (64, 64), 0)
        smem[...] = v.astype(smem.dtype)
        o[...] = smem[...].T.astype(o.dtype)

    x = normal(64, 64)
    y = run(body, x, out_type=out((64, 64)), scratch_types=[plgpu.SMEM((64, 64), jnp.float32)])
    v = np.exp(-x) / (1 + np.tanh(x) ** 2) + np.where(x > 0, x, 1 / np.sqrt(x * x + 1))
    v = v + v.sum(1)[:, None] * 0.5 + v.max() + np.arange(64)[:, None]
    np.testing.assert_allclose(y, v.T, rtol=1e-5)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("case", ["plain", "transposed rhs", "transposed lhs", "lhs in registers", "initial value"])
def test_wgmma(case, dtype):
    m, n, k = 64, 128, 64
    lhs, rhs = normal(m, k, dtype=dtype), normal(k, n, dtype=dtype, seed=1)
    a = lhs.T.copy() if case == "transposed lhs" else lhs
    b = rhs.T.copy() if case == "transposed rhs" else rhs

    def body(a_gmem, b_gmem, o, a_smem, b_smem, barrier):
        plgpu.copy_gmem_to_smem(a_gmem, a_smem, barrier)
        plgpu.copy_gmem_to_smem(b_gmem, b_smem, barrier)
        plgpu.barrier_wait(barrier)
        left = a_smem.T if case == "transposed lhs" else a_smem
        right = b_smem.T if case == "transposed rhs" else b_smem

        def compute(acc):
            plgpu.wgmma(acc, left[...] if case == "lhs in registers" else left, right)
            if not isinstance(acc, tuple):
                plgpu.wgmma_wait(0)

        if case == "initial value":
            o[...] = pl.run_state(compute)(plgpu.ACC.init(jnp.full((m, n), 2.0, jnp.float32)))
        else:

            def scope(acc):
                compute(acc)
                return acc[...]

            o[...] = pl.run_scoped(scope, plgpu.ACC((m, n), jnp.float32))

    y = run(
        body, a, b, out_type=out((m, n)),
        scratch_types=[plgpu.SMEM(a.shape, dtype, transforms=TILED), plgpu.SMEM(b.shape, dtype, transforms=TILED),
                       plgpu.Barrier(num_arrivals=2)],
    )  # fmt: skip
    expected = lhs.astype(np.float32) @ rhs.astype(np.float32) + 2 * (case == "initial value")
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)


def test_accumulator_read_too_early():
    def body(a, o, smem, barrier):
        plgpu.copy_gmem_to_smem(a, smem, barrier)
        plgpu.barrier_wait(barrier)

        def scope(acc):
            plgpu.wgmma(acc, smem, smem)
            return plgpu.wgmma_accumulator_load(acc, wait_n=1)

        o[...] = pl.run_scoped(scope, plgpu.ACC((64, 64), jnp.float32))

    with pytest.raises(ProtocolError, match="is read while 1 wgmma"):
        run(body, normal(64, 64, dtype=np.float16), out_type=out((64, 64)),
            scratch_types=[plgpu.SMEM((64, 64), jnp.float16, transforms=TILED), plgpu.Barrier()])  # fmt: skip


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


def test_copies_out_of_bounds_read_zeros_and_are_clipped():
    def body(x, o, smem, barrier):
        start = pl.multiple_of(lax.axis_index("core") + 24, 8)
        plgpu.copy_gmem_to_smem(x.at[pl.ds(start, 16)], smem, barrier)
        plgpu.barrier_wait(barrier)
        plgpu.copy_smem_to_gmem(smem, o.at[pl.ds(start, 16)])
        plgpu.copy_smem_to_gmem(smem, o.at[pl.ds(start + 16, 16)])
        plgpu.wait_smem_to_gmem(0)

    x = normal(32, 64)
    y = run(body, x, out_type=out((44, 64)), grid=(1,), grid_names=("core",),
            scratch_types=[plgpu.SMEM((16, 64), jnp.float32), plgpu.Barrier()])  # fmt: skip
    np.testing.assert_array_equal(y[24:32], x[24:])
    assert (y[32:40] == 0).all()
    np.testing.assert_array_equal(y[40:], x[24:28])


def test_promise_in_bounds_is_checked():
    def body(x, o, smem, barrier):
        start = lax.axis_index("core") + 20
        plgpu.copy_gmem_to_smem(x.at[pl.ds(start, 16)], smem, barrier, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)
        plgpu.barrier_wait(barrier)

    with pytest.raises(ProtocolError, match=r"20:36.*out of bounds for a dimension of size 32"):
        run(body, normal(32, 64), out_type=out((1,)), grid=(1,), grid_names=("core",),
            scratch_types=[plgpu.SMEM((16, 64), jnp.float32), plgpu.Barrier()])  # fmt: skip


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_reduction_into_global_memory(dtype):
    # The CTAs add without any order between them, which is what a reduction is for.
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
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the first two form the older group
        smem[0] = smem[0] * 0
        smem[1] = smem[1] * 0
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        smem[2] = smem[2] * 0

    x = normal(3, 128)
    y = run(body, x, out_type=out(x.shape), scratch_types=[plgpu.SMEM(x.shape, jnp.float32)])
    np.testing.assert_array_equal(y, x)


def test_too_weak_a_partial_wait():
    def body(x, o, smem):
        smem[...] = x[...]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem, o)
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        smem[...] = x[...]
        plgpu.wait_smem_to_gmem(0)

    with pytest.raises(RaceError, match="race on smem"):
        run(body, normal(3, 128), out_type=out((3, 128)), scratch_types=[plgpu.SMEM((3, 128), jnp.float32)])


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


def test_warps_have_loops_and_barriers_of_their_own():
    def body(x, o, smem, full, done):
        wg = lax.axis_index("wg")

        @pl.when(wg == 1)
        def _():
            @plgpu.warp_map
            def _(warp):
                @pl.when(warp < 2)
                def _():
                    @pl.loop(0, 4)
                    def _(i):
                        @pl.when(i > 0)
                        def _():
                            plgpu.barrier_wait(done.at[warp])

                        plgpu.copy_gmem_to_smem(x.at[warp, i], smem.at[warp], full.at[warp])

        @pl.when(wg == 0)
        def _():
            @pl.loop(0, 4)
            def _(i):
                for warp in range(2):
                    plgpu.barrier_wait(full.at[warp])
                    o[warp, i] = smem[warp]
                    plgpu.barrier_arrive(done.at[warp])

    x = normal(2, 4, 64)
    scratch = [plgpu.SMEM((2, 64), jnp.float32), plgpu.Barrier(num_barriers=2), plgpu.Barrier(num_barriers=2)]
    y = run(body, x, out_type=out(x.shape), num_threads=2, thread_name="wg", scratch_types=scratch)
    np.testing.assert_array_equal(y, x)


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


def test_swap_and_addupdate():
    def body(x, o, smem):
        smem[...] = x[...]
        o[0] = ref_swap(smem, (), x[...] * 3)
        ref_addupdate(smem, (), x[...])
        o[1] = smem[...]

    ref_swap, ref_addupdate = jax.ref.swap, jax.ref.addupdate
    x = normal(64)
    y = run(body, x, out_type=out((2, 64)), scratch_types=[plgpu.SMEM((64,), jnp.float32)])
    np.testing.assert_allclose(y, [x, x * 4], rtol=1e-6)


def test_pallas_semaphores_and_signal_with_count():
    def body(x, o):
        ready = pl.get_global(plgpu.SemaphoreType.REGULAR)
        core = lax.axis_index("core")

        @pl.when(core == 0)
        def _():
            o[0] = x[0] * 2
            pl.semaphore_signal(ready, 3)

        @pl.when(core == 1)
        def _():
            pl.semaphore_wait(ready, 2)
            o[1] = o[0] + 1
            pl.semaphore_wait(ready, 1)

    y = run(body, np.float32([5]), out_type=out((2,)), grid=(2,), grid_names=("core",))
    assert y.tolist() == [10, 11]


def test_inline_code_needs_a_declaration():
    def add_one(ctx, x):
        del ctx, x

    add_one.emulated_as = lambda x: x + 1
    layout = plgpu.Layout.WG_SPLAT

    def body(o):
        returns = plgpu.ShapeDtypeStruct((), jnp.int32, layout=layout)
        o[0] = plgpu.inline_mgpu(arg_types=(layout,), return_type=returns)(add_one)(jnp.int32(4))

    assert run(body, out_type=out((1,), jnp.int32)).tolist() == [5]
    del add_one.emulated_as
    with pytest.raises(NotImplementedError, match=r"add_one.*emulated_as"):
        run(body, out_type=out((1,), jnp.int32))


@pytest.mark.parametrize("warp_specialized", [False, True])
def test_emit_pipeline(warp_specialized):
    rows, columns, block = 128, 256, 64
    spec = plgpu.BlockSpec((block, block), lambda i, j: (i, j), delay_release=0)

    def step(_, x_smem, y_smem):
        y_smem[...] = x_smem[...] * 2 + 1

    def body(x, y):
        grid = (rows // block, columns // block)
        if warp_specialized:
            plgpu.emit_pipeline_warp_specialized(
                step, grid=grid, in_specs=[spec], out_specs=[spec], max_concurrent_steps=2, num_compute_wgs=1,
                wg_axis="wg", memory_registers=40,
            )(x, y)  # fmt: skip
        else:
            plgpu.emit_pipeline(step, grid=grid, in_specs=[spec], out_specs=[spec], max_concurrent_steps=2)(x, y)

    x = normal(rows, columns)
    threads = {"num_threads": 2, "thread_name": "wg"} if warp_specialized else {}
    for seed in range(3):
        y = run(body, x, out_type=out(x.shape), settings={"seed": seed, "completion": "random"}, **threads)
        np.testing.assert_array_equal(y, x * 2 + 1)


def test_pl_delay_and_named_scopes():
    def body(o):
        with jax.named_scope("phase"):
            pl.delay(1000)
            o[0] = 1

    assert run(body, out_type=out((1,), jnp.int32)).tolist() == [1]


def test_writing_an_input():
    def body(x, o):
        x[0] = 1.0
        o[0] = 1.0

    with pytest.raises(ProtocolError, match=r"input 0.*must not be written"):
        run(body, np.ones(2, np.float32), out_type=out((1,)))


def test_what_is_not_emulated_says_so():
    def body(o):
        del o

    with pytest.raises(NotImplementedError, match="cluster"):
        run(body, out_type=out((1,)), cluster=(2,), cluster_names=("c",))
    with pytest.raises((NotImplementedError, EmulationError), match="tensor memory"):
        run(lambda o, t: None, out_type=out((1,)), scratch_types=[plgpu.TMEM((128, 128), jnp.float32)])
