"""What Pallas offers inside a kernel and the library's kernels do not use: results are compared with NumPy's.

Each function with the decorator `gives` is a kernel. What the library's kernels use is tested with these (tests/ops).
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mosaic_emulator import ProtocolError, RaceError, emulate
from mosaic_emulator.foundations import arithmetic
from tests.emulation.cases import TILED, Table, X, normal, out_type, run_kernel, wide

table = Table()
gives = table.gives


# ---- control flow, arithmetic ----------------------------------------------------------------------------------------


def of_loops():
    a, b = 1, 2
    for i in range(5):
        a, b = (b, a + i) if i % 2 == 0 else (a, b * 2 % 7)
    c = a + 2
    while c < 100:
        c = c * 3 - 1
    shifted = (a - 9) >> 1, ((a - 9) % 2**32) >> 1
    return np.array([a, b, c, [10, 20, 30][min(b, 2)], 6, 3, int(-7 / (a + 1)), min(a, b) // 2, a % -3, *shifted])


@gives(of_loops(), out=out_type((11,), jnp.int32))
def loops_and_branches(o):
    def step(i, carry):
        a, b = carry
        return lax.cond(lax.rem(i, 2) == 0, lambda: (b, a + i), lambda: (a, b * 2 % 7))

    a, b = lax.fori_loop(0, 5, step, (1, 2))
    c = lax.while_loop(lambda c: c < 100, lambda c: c * 3 - 1, a + 2)
    d = lax.switch(lax.clamp(0, b, 2), [lambda: 10, lambda: 20, lambda: 30])
    e, ys = lax.scan(lambda s, x: (s + x, s), jnp.int32(0), jnp.arange(4, dtype=jnp.int32), reverse=True)
    shifted = lax.shift_right_arithmetic(a - 9, 1), lax.shift_right_logical(a - 9, 1)
    values = a, b, c, d, e, ys[2], lax.div(jnp.int32(-7), a + 1), jnp.minimum(a, b) // 2, a % -3, *shifted
    for i, value in enumerate(values):
        o[i] = value


def every_index_once(result):
    assert sorted(x % 100 for x in result[:3].ravel().tolist()) == [i * 10 + j for i in range(3) for j in range(4)]
    assert result[3].tolist() == [2, 2, *[np.iinfo(np.int32).min] * 2]  # Nobody has written the last two.


@gives(every_index_once, out=out_type((4, 4), jnp.int32), grid=(2,), grid_names=("core",))
def loop_helpers(o):
    @plgpu.nd_loop((3, 4), collective_axes="core")
    def _(info):
        i, j = info.index
        o[i, j] = lax.axis_index("core") * 100 + i * 10 + j

    @pl.loop(0, 2)
    def _(i):
        pl.when(pl.program_id(0) == 1)(lambda: o.__setitem__((3, i), 2))


def of_arrays(v):
    v = np.exp(-v) / (1 + np.tanh(v) ** 2) + np.where(v > 0, v, 1 / np.sqrt(v * v + 1))
    return (v + v.sum(1)[:, None] * 0.5 + v.max() + np.arange(64)[:, None]).T


@gives(of_arrays(X), X, out=X.shape, scratch_types=[plgpu.SMEM(X.shape, jnp.float32)])
def array_arithmetic(x, o, smem):
    v = plgpu.layout_cast(plgpu.load(x, layout=plgpu.Layout.WG_STRIDED((64, 64), 2)), plgpu.Layout.WGMMA)
    v = jnp.exp(-v) / (1 + jnp.tanh(v) ** 2) + jnp.where(v > 0, v, lax.rsqrt(v * v + 1))
    smem[...] = v + jnp.sum(v, axis=1)[:, None] * 0.5 + jnp.max(v) + lax.broadcasted_iota(jnp.float32, (64, 64), 0)
    o[...] = smem[...].T


ATOMICS = {"add": 11, "and": 0b0100, "or": 0b0111, "xor": 0b0011, "min": 5, "max": 6}


@gives(np.repeat([[*ATOMICS.values(), 5, 15]], 128, axis=0).T, np.full(128, 0b0101, np.int32),
       out=out_type((8, 128), jnp.int32), scratch_types=[plgpu.SMEM((128,), jnp.int32)])  # fmt: skip
def swap_and_atomic_operations(x, o, smem):
    for i, name in enumerate(ATOMICS):
        o[i] = jnp.full((128,), 0b0110, jnp.int32)
        getattr(plgpu, f"atomic_{name}")(o.at[i], x[...])
    smem[...] = x[...]
    o[6] = jax.ref.swap(smem, (), x[...] * 3)
    o[7] = smem[...]


def test_a_product_does_not_depend_on_where_a_row_stands():
    """With some CPUs' BLAS, the last bits of a row of an f32 product depend on the row's index. They must not here."""
    a, b = normal(64, 48), normal(48, 72)
    whole = arithmetic.matmul(a, b)
    assert whole.dtype == np.float32
    for first in range(1, 64, 5):
        np.testing.assert_array_equal(arithmetic.matmul(a[first:], b), whole[first:])
    integers = np.full((2, 4), 2**14, np.int32)
    assert arithmetic.matmul(integers, integers.T)[0, 0] == 2**30


# ---- copies, scopes, threads -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_reductions_into_global_memory_need_no_order_between_them(dtype):
    def body(x, total, smem):
        smem[...] = x[...] * (1 + lax.axis_index("core")).astype(dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem, total.at[pl.ds(lax.axis_index("core") * 0 + 4, 8)], reduction_op="add")
        plgpu.wait_smem_to_gmem(0)

    def call(x, start):
        total = jax.new_ref(start)
        plgpu.kernel(
            body, out_type=(), grid=(3,), grid_names=("core",), scratch_types=[plgpu.SMEM(x.shape, dtype)]
        )(x, total)  # fmt: skip
        return total[...]

    with emulate(completion="random"):
        y = wide(jax.jit(call)(np.ones((8, 64), dtype), np.ones((10, 64), dtype)))
    # The last two rows of the box lie outside.
    np.testing.assert_array_equal(y, np.repeat([1.0, 7.0], [4, 6])[:, None] * np.ones(64))


@gives(X[:3], X[:3], out=(3, 64), scratch_types=[plgpu.SMEM((3, 64), jnp.float32)])
def commit_groups_and_partial_waits(x, o, smem):
    for i in range(3):
        smem[i] = x[i]
    plgpu.commit_smem()
    for i in range(2):
        plgpu.copy_smem_to_gmem(smem.at[i], o.at[i], commit_group=False)
    plgpu.copy_smem_to_gmem(smem.at[2], o.at[0], predicate=jnp.bool_(False))  # Copies nothing, but ends the group.
    plgpu.copy_smem_to_gmem(smem.at[2], o.at[2])
    plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # Waits for the older group, which has the first two stores.
    smem[0] = smem[0] * 0
    smem[1] = smem[1] * 0
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    smem[2] = smem[2] * 0


@gives(np.outer([1, 2], X[:3].sum(1)), X[:3], out=(2, 3), num_threads=2, thread_name="wg")
def collective_scopes_in_a_loop(x, o):
    wg = lax.axis_index("wg")

    @pl.loop(0, 3)
    def _(i):
        def scope(smem, barrier):
            pl.when(wg == 0)(lambda: plgpu.copy_gmem_to_smem(x.at[i], smem, barrier))
            plgpu.barrier_wait(barrier)
            o[wg, i] = smem[...].sum() * (1 + wg)

        pl.run_scoped(scope, plgpu.SMEM((64,), jnp.float32), plgpu.Barrier(), collective_axes="wg")


@gives(2 * X[:3], X[:3], out=(3, 64), scratch_types=[plgpu.SMEM((64,), jnp.float32), plgpu.Barrier()])
def warps_keep_their_phases_between_maps(x, o, smem, full):
    @pl.loop(0, 3)
    def _(i):
        @plgpu.warp_map
        def _(warp):
            @pl.when(warp == 1)
            def _():
                plgpu.copy_gmem_to_smem(x.at[i], smem, full)
                plgpu.barrier_wait(full)

        o[i] = smem[...] * 2


def test_delays_scopes_and_parallel_signals():
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
        assert np.asarray(jax.jit(plgpu.kernel(body, out_type=out_type((1,), jnp.int32)))()).tolist() == [1]
    found = [(e.kind, e.source, e.scope) for e in report.events]
    assert found == [(kind, f"semaphore[{i}]", scope) for kind, scope in (("signal", "outer/inner"), ("wait", ""))
                     for i in range(2)]  # fmt: skip


# ---- boxes over the edge, and memory that nobody has written ---------------------------------------------------------

MODES = plgpu.OOBFillMode


def dynamic(value):
    """Returns an index that is known only when the kernel runs. Tracing would refuse a static index out of bounds."""
    return lax.axis_index("core") + jnp.int32(value)


def load(x, start, *, box=(16, 64), mode=None, slices=None, transforms=()):
    """Loads a box of x at `start` with TMA and returns its contents. `slices` selects a part of the box to load."""

    def body(x_gmem, o, smem, barrier):
        source = x_gmem.at[tuple(pl.ds(dynamic(first), size) for first, size in zip(start, box))]
        source = source if slices is None else source.at[slices]
        plgpu.copy_gmem_to_smem(source, smem, barrier, oob_mode=mode)
        plgpu.barrier_wait(barrier)
        o[...] = smem[...]

    shape = box if slices is None else tuple(s.size for s in slices)
    scratch = [plgpu.SMEM(shape, x.dtype, transforms=transforms), plgpu.Barrier()]
    return run_kernel(body, x, out=out_type(shape, x.dtype), grid=(1,), grid_names=("core",), scratch_types=scratch)


@pytest.mark.parametrize(
    ("shape", "start", "options"),
    [
        ((40, 64), (32, 0), {"mode": MODES.ZEROS}),  # The box begins inside, but is larger than the rest.
        ((5, 24), (0, 0), {}),  # The box is larger than both dimensions.
        ((5, 24), (-3, -8), {}),  # on all sides
        ((40, 64), (48, 0), {}),  # nothing at all
        ((100, 200), (64, 128), {"box": (64, 128), "transforms": TILED}),
    ],
    ids=str,
)
def test_a_load_fills_zeros_outside(shape, start, options):
    x, box = normal(*shape, dtype=np.float16), options.get("box", (16, 64))
    window = tuple(slice(64 + first, 64 + first + size) for first, size in zip(start, box))
    np.testing.assert_array_equal(load(x, start, **options), np.pad(x, [(64, 256)] * 2)[window])


def test_other_loads_over_the_edge():
    x = normal(40, 64)
    # A slice of a box, half of it outside.
    y = load(x, (32, 0), slices=(pl.ds(4, 8), pl.ds(32, 32)))
    np.testing.assert_array_equal(y, np.pad(x[36:, 32:], [(0, 4), (0, 0)]))
    y = load(x, (32, 0), mode=MODES.UNDEFINED)
    np.testing.assert_array_equal(y[:8], x[32:])
    assert np.isnan(y[8:]).all()
    for start in ((32, 0), (-4, 0)):
        with pytest.raises(ProtocolError, match="out of bounds for a dimension of size"):
            load(x, start, mode=MODES.PROMISE_IN_BOUNDS)
    np.testing.assert_array_equal(load(x, (24, 0), mode=MODES.PROMISE_IN_BOUNDS), x[24:])


def test_only_what_is_inside_can_race():
    def store(rows, starts):
        def body(x, o, smem):
            smem[...] = x[...]
            plgpu.commit_smem()
            for core, row in enumerate(starts):
                box = o.at[pl.ds(dynamic(row - core), 16)]
                pl.when(lax.axis_index("core") == core)(lambda box=box: plgpu.copy_smem_to_gmem(smem, box))
            plgpu.wait_smem_to_gmem(0)

        scratch = [plgpu.SMEM((16, 64), X.dtype)]
        return run_kernel(
            body, X[:16], out=(rows, 64), grid=(len(starts),), grid_names=("core",), scratch_types=scratch
        )

    # One box begins at row 8. The other begins 8 rows before the array and ends at row 8.
    np.testing.assert_array_equal(store(24, (8, -8)), np.concatenate([X[8:16], X[:16]]))
    with pytest.raises(RaceError, match=r"output 0\[7:23"):
        store(24, (7, -8))
    store(8, (0, 8, 10))  # Boxes may overlap beyond the edge, since nothing is written there.


@pytest.mark.all_cases
@pytest.mark.parametrize("case", table.cases)
def test_a_kernel_gives_what_it_must(case):
    case()
