"""Tests that the emulator and JAX's own GPU interpreter agree on kernels of one device: same results, same races.

docs/EMULATION.md ("How it differs from JAX's interpreter") says what only one of the two can run or find.
"""

import contextlib
import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from overlap.emulation import RaceError, emulate
from tests.emulation import tensor_kernels
from tests.emulation.cases import TILED, normal, out_type

pytestmark = pytest.mark.all_cases
X = normal(64, 64)
SMEM = plgpu.SMEM(X.shape, jnp.float32)


def run(body, *args, **kwargs):
    # Trace anew each time, because the interpreter is chosen while a function is traced.
    return np.asarray(jax.jit(lambda *xs: plgpu.kernel(body, **kwargs)(*xs))(*args))


def interpret(function, *, detect_races=False):
    """Runs a function in JAX's interpreter. Returns (its result, whether the interpreter found a race)."""
    printed, result, failure = io.StringIO(), None, ""
    parameters = plgpu.InterpretGPUParams(detect_races=detect_races)
    with contextlib.redirect_stdout(printed), plgpu.force_gpu_interpret_mode(parameters):
        try:
            result = function()
        except jax.errors.JaxRuntimeError as error:  # jax 0.12 raises at a race, jax 0.11 prints it and goes on.
            failure = str(error)
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                jax.effects_barrier()
    race = "RACE DETECTED" in printed.getvalue() + failure
    assert race or not failure, failure
    return result, race


# ---- numbers ---------------------------------------------------------------------------------------------------------


def between_warpgroups(waits_before=True):
    def body(x, o, smem, ready):
        @pl.when(lax.axis_index("wg") == 0)
        def _write():
            smem[...] = 2 * x[...]
            plgpu.barrier_arrive(ready)

        @pl.when(lax.axis_index("wg") == 1)
        def _read():
            if waits_before:
                plgpu.barrier_wait(ready)
            o[...] = smem[...]
            if not waits_before:
                plgpu.barrier_wait(ready)

    scratch = [SMEM, plgpu.Barrier()]
    return run(body, X, out_type=out_type(X.shape), scratch_types=scratch, num_threads=2, thread_name="wg")


def warps_of_a_warpgroup():
    def body(x, o, smem, loaded):
        @plgpu.warp_map
        def _load(warp):
            @pl.when(warp == 0)
            def _one():
                plgpu.copy_gmem_to_smem(x, smem, loaded)

        plgpu.barrier_wait(loaded)
        o[...] = jnp.exp(smem[...])

    return run(body, X, out_type=out_type(X.shape), scratch_types=[SMEM, plgpu.Barrier()])


def multicast_in_a_cluster():
    def body(x, o, smem, loaded):
        plgpu.copy_gmem_to_smem(x, smem, loaded, collective_axes="rank")
        plgpu.barrier_wait(loaded)
        o[lax.axis_index("rank")] = smem[...]

    kwargs = {"cluster": (2,), "cluster_names": ("rank",), "scratch_types": [SMEM, plgpu.Barrier()]}
    return run(body, X, out_type=out_type((2, *X.shape)), **kwargs)


def operands():
    return normal(128, 256, dtype=np.float16), normal(256, 128, dtype=np.float16, seed=1)


def block(index_map, delay_release=1):
    return plgpu.BlockSpec((64, 64), index_map, transforms=TILED, delay_release=delay_release)


def store_tile(o, o_smem, value):
    o_smem[...] = value.astype(o_smem.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(o_smem, o)
    plgpu.wait_smem_to_gmem(0)


def pipelined_matmul(waits=True):
    def body(lhs, rhs, o, o_smem):
        m, n = lax.axis_index("m"), lax.axis_index("n")

        def step(accumulator, a, b):
            plgpu.wgmma(accumulator, a, b)
            if waits:
                plgpu.wgmma_wait(1)

        def tile(accumulator):
            plgpu.emit_pipeline(
                lambda _, a, b: step(accumulator, a, b),
                grid=(4,),
                in_specs=[block(lambda k: (m, k)), block(lambda k: (k, n))],
                max_concurrent_steps=2,
            )(lhs, rhs)
            return accumulator[...]

        value = pl.run_scoped(tile, plgpu.ACC((64, 64), jnp.float32))
        store_tile(o.at[pl.ds(m * 64, 64), pl.ds(n * 64, 64)], o_smem, value)

    return run(
        body, *operands(), out_type=out_type((128, 128), jnp.float16), grid=(2, 2), grid_names=("m", "n"),
        scratch_types=[plgpu.SMEM((64, 64), jnp.float16, transforms=TILED)],
    )  # fmt: skip


def warp_specialized_matmul():
    def body(lhs, rhs, o, o_smem):
        m = lax.axis_index("m")

        def tile(accumulator, pipeline):
            pipeline(accumulator)
            store_tile(o.at[pl.ds(m * 64, 64), :64], o_smem, accumulator[...])

        def step(_, a, b, accumulator):
            plgpu.wgmma(accumulator, a, b)
            plgpu.wgmma_wait(1)
            return accumulator

        plgpu.emit_pipeline_warp_specialized(
            step,
            grid=(4,),
            memory_registers=40,
            in_specs=[block(lambda k: (m, k)), block(lambda k: (k, 0))],
            wg_axis="wg",
            num_compute_wgs=1,
            max_concurrent_steps=2,
            compute_context=lambda pipeline: pl.run_scoped(
                lambda accumulator: tile(accumulator, pipeline), plgpu.ACC((64, 64), jnp.float32)
            ),
        )(lhs, rhs)

    return run(
        body, *operands(), out_type=out_type((128, 64), jnp.float16), grid=(2,), grid_names=("m",), num_threads=2,
        thread_name="wg", scratch_types=[plgpu.SMEM((64, 64), jnp.float16, transforms=TILED)],
    )  # fmt: skip


def tcgen05_matmul(kernel):
    x, y = normal(128, 64, dtype=np.float16), normal(64, 64, dtype=np.float16, seed=1)
    return lambda: np.asarray(jax.jit(lambda x, y: kernel(x, y))(x, y))


KERNELS = {
    "warpgroups": between_warpgroups,
    "warps": warps_of_a_warpgroup,
    "multicast": multicast_in_a_cluster,
    "pipeline": pipelined_matmul,
    "warp specialized": warp_specialized_matmul,
    "tcgen05": tcgen05_matmul(tensor_kernels.single_product),
    "tcgen05, left in tmem": tcgen05_matmul(tensor_kernels.operand_in_tensor_memory(128, 64, 64, np.float16)),
    "tcgen05, copied": tcgen05_matmul(
        tensor_kernels.operand_in_tensor_memory(128, 64, 64, np.float16, by_copy=True)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KERNELS)
def test_equal_numbers(name):
    with emulate(completion="random"):
        emulated = KERNELS[name]()
    with emulate() as not_used:  # A kernel that asks for the interpreter gets it inside a context too.
        interpreted, _ = interpret(KERNELS[name])
    assert not not_used.counts["launches"]
    assert emulated.dtype == interpreted.dtype and np.isfinite(emulated.astype(np.float32)).all()
    # The tolerance is for sums: the two may add f32 terms in different orders.
    tolerance = {"rtol": 1e-3, "atol": 1e-3} if emulated.dtype == np.float16 else {"rtol": 1e-5, "atol": 1e-5}
    np.testing.assert_allclose(emulated, interpreted, **tolerance)


# ---- races -----------------------------------------------------------------------------------------------------------


def read_before_the_copy_has_landed():
    def body(x, o, smem, loaded):
        plgpu.copy_gmem_to_smem(x, smem, loaded)
        o[...] = smem[...]
        plgpu.barrier_wait(loaded)

    return run(body, X, out_type=out_type(X.shape), scratch_types=[SMEM, plgpu.Barrier()])


def store_without_commit_smem():
    def body(x, o, smem):
        smem[...] = 2 * x[...]
        plgpu.copy_smem_to_gmem(smem, o)
        plgpu.wait_smem_to_gmem(0)

    return run(body, X, out_type=out_type(X.shape), scratch_types=[SMEM])


def two_ctas_write_the_same():
    def body(o):
        o[...] = jnp.full((64,), lax.axis_index("cta"), jnp.int32)

    return run(body, out_type=out_type((64,), jnp.int32), grid=(2,), grid_names=("cta",))


RACES = {
    "landing": (read_before_the_copy_has_landed, "race on smem:\n  load of smem"),
    "proxy": (store_without_commit_smem, r"race \(missing proxy fence\) on smem:\n  TMA store, read"),
    "warpgroups": (lambda: between_warpgroups(waits_before=False), "race on smem:"),
    "ctas": (two_ctas_write_the_same, "race on output 0:\n  store of output 0"),
}


@pytest.mark.parametrize("name", RACES)
def test_races_that_both_find(name):
    kernel, words = RACES[name]
    with pytest.raises(RaceError, match=words), emulate():
        kernel()
    assert interpret(kernel, detect_races=True)[1]


def test_a_race_that_only_the_emulator_finds():
    def kernel():
        return pipelined_matmul(waits=False)

    # The kernel refills the stage of the previous k step while the product of that step may still read the stage.
    with pytest.raises(RaceError, match="is not ordered with the earlier read\n  wgmma"), emulate():
        kernel()
    assert not interpret(kernel, detect_races=True)[1]
