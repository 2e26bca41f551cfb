"""The emulator and JAX's own GPU interpreter agree on kernels of one device: same results, same races.

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

from mosaic_emulator import RaceError, emulate
from tests.emulation import tensor_kernels
from tests.emulation.cases import HALF, TILED, X, normal, out_type

pytestmark = pytest.mark.all_cases
BUFFERS = [plgpu.SMEM(X.shape, jnp.float32), plgpu.Barrier()]


def run(body, *args, out=X.shape, **kwargs):
    # Trace anew each time, because the interpreter is chosen while a function is traced.
    return np.asarray(jax.jit(lambda *xs: plgpu.kernel(body, out_type=out_type(out), **kwargs)(*xs))(*args))


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


def loads_by_multicast(x, o, smem, loaded):
    plgpu.copy_gmem_to_smem(x, smem, loaded, collective_axes="rank")
    plgpu.barrier_wait(loaded)
    o[lax.axis_index("rank")] = jnp.exp(smem[...])


def pipelined(waits=True):
    """x @ x, [64, 256] @ [256, 64], by jax's pipeline."""

    def body(x, o):
        block = lambda index_map: plgpu.BlockSpec((64, 64), index_map, transforms=TILED, delay_release=1)  # noqa: E731

        def step(accumulator, a, b):
            plgpu.wgmma(accumulator, a, b)
            if waits:
                plgpu.wgmma_wait(1)

        def tile(accumulator):
            plgpu.emit_pipeline(
                lambda _, a, b: step(accumulator, a, b), grid=(4,), max_concurrent_steps=2,
                in_specs=[block(lambda k: (0, k)), block(lambda k: (0, k))],
            )(x, x)  # fmt: skip
            return accumulator[...]

        o[...] = pl.run_scoped(tile, plgpu.ACC((64, 64), jnp.float32))

    return run(body, normal(64, 256, dtype=np.float16))


def product(left):
    x, y = normal(128, 64, dtype=np.float16, seed=1), HALF
    return np.asarray(jax.jit(lambda x, y: tensor_kernels.single_product(x, y, left=left))(x, y))


KERNELS = {
    "multicast": lambda: run(loads_by_multicast, X, out=(2, *X.shape), cluster=(2,), cluster_names=("rank",),
                             scratch_types=BUFFERS),
    "pipeline": pipelined,
    "tcgen05, left in tmem": lambda: product("tmem"),
    "tcgen05, copied": lambda: product("copied"),
}  # fmt: skip


@pytest.mark.parametrize("name", KERNELS)
def test_equal_numbers(name):
    with emulate(completion="random"):
        emulated = KERNELS[name]()
    with emulate() as not_used:  # A kernel that asks for the interpreter gets it inside a context too.
        interpreted, _ = interpret(KERNELS[name])
    assert not not_used.counts["launches"] and np.isfinite(emulated).all()
    # The tolerance is for sums: the two may add f32 terms in different orders.
    np.testing.assert_allclose(emulated, interpreted, rtol=1e-5, atol=1e-5)


def reads_before_the_copy_has_landed(x, o, smem, loaded):
    plgpu.copy_gmem_to_smem(x, smem, loaded)
    o[...] = smem[...]
    plgpu.barrier_wait(loaded)


def stores_without_commit_smem(x, o, smem, loaded):
    smem[...] = 2 * x[...]
    plgpu.copy_smem_to_gmem(smem, o)
    plgpu.wait_smem_to_gmem(0)


def two_ctas_write_the_same(x, o, smem, loaded):
    o[...] = x[...] * lax.axis_index("cta").astype(jnp.float32)


RACES = {
    "landing": (reads_before_the_copy_has_landed, {}, "race on smem:\n  load of smem"),
    "proxy": (stores_without_commit_smem, {}, r"race \(missing proxy fence\) on smem:\n  TMA store, read"),
    "ctas": (two_ctas_write_the_same, dict(grid=(2,), grid_names=("cta",)), "race on output 0:\n  store of output 0"),
}


@pytest.mark.parametrize("name", RACES)
def test_races_that_both_find(name):
    body, kwargs, words = RACES[name]
    kernel = lambda: run(body, X, scratch_types=BUFFERS, **kwargs)  # noqa: E731
    with pytest.raises(RaceError, match=words), emulate():
        kernel()
    assert interpret(kernel, detect_races=True)[1]


def test_a_race_that_only_the_emulator_finds():
    # The kernel refills the stage of the previous k step while the product of that step may still read the stage.
    with pytest.raises(RaceError, match="is not ordered with the earlier read\n  wgmma"), emulate():
        pipelined(waits=False)
    assert not interpret(lambda: pipelined(waits=False), detect_races=True)[1]
