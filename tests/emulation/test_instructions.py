"""Tests what Pallas offers inside a kernel, one feature at a time: emulated results are compared with NumPy."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from overlap.emulation import emulate
from overlap.emulation.foundations import arithmetic
from tests.emulation.cases import TILED, normal
from tests.emulation.cases import out_type as out
from tests.emulation.cases import run_kernel as run


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
            (
                a,
                b,
                c,
                d,
                e,
                ys[2],
                lax.div(jnp.int32(-7), a + 1),
                jnp.minimum(a, b) // 2,
                a % -3,
                lax.shift_right_arithmetic(a - 9, 1),
                lax.shift_right_logical(a - 9, 1),
            )
        ):
            o[i] = value

    def reference():
        a, b = 1, 2
        for i in range(5):
            a, b = (b, a + i) if i % 2 == 0 else (a, b * 2 % 7)
        c = a + 2
        while c < 100:
            c = c * 3 - 1
        return [
            a,
            b,
            c,
            [10, 20, 30][min(max(b, 0), 2)],
            6,
            1,
            int(-7 / (a + 1)),
            min(a, b) // 2,
            a % -3,
            (a - 9) >> 1,
            ((a - 9) % 2**32) >> 1,
        ]

    assert run(body, out_type=out((11,), jnp.int32)).tolist() == reference()


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
                o[3, i] = 2

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


def test_delay_scopes_and_parallel_signals():
    def body(o):
        flags = pl.get_global(plgpu.SemaphoreType.REGULAR((2,)))
        with jax.named_scope("outer"), jax.named_scope("inner"):
            pl.delay(1000)
            plgpu.semaphore_signal_parallel(
                plgpu.SemaphoreSignal(flags.at[0], device_id=None),
                plgpu.SemaphoreSignal(flags.at[1], device_id=None, inc=2),
            )
        pl.semaphore_wait(flags.at[0])
        pl.semaphore_wait(flags.at[1], 2)
        o[0] = 1

    with emulate(record=True) as report:
        assert np.asarray(jax.jit(plgpu.kernel(body, out_type=out((1,), jnp.int32)))()).tolist() == [1]
    assert [(e.kind, e.source, e.scope) for e in report.events] == [
        ("signal", "semaphore[0]", "outer/inner"),
        ("signal", "semaphore[1]", "outer/inner"),
        ("wait", "semaphore[0]", ""),
        ("wait", "semaphore[1]", ""),
    ]


def test_a_product_does_not_depend_on_where_a_row_stands():
    """With some CPUs' BLAS, the last bits of a row of an f32 product depend on the row's index. They must not here."""
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((64, 48), (48, 72)))
    whole = arithmetic.matmul(a, b)
    assert whole.dtype == np.float32
    for first in range(1, 64, 5):
        np.testing.assert_array_equal(arithmetic.matmul(a[first:], b), whole[first:])
    integers = np.full((2, 4), 2**14, np.int32)
    assert arithmetic.matmul(integers, integers.T)[0, 0] == 2**30
