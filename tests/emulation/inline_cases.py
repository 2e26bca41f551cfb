"""Helpers of the tests of inline code in the emulator: they make and run kernels that contain a few lines of PTX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir

from mosaic_emulator import emulate

SPLAT = plgpu.Layout.WG_SPLAT


def inline(text, *refs, elect=False, dtype=None):
    """Runs PTX inside a kernel. `refs` are the operands `$0` and so on; with a `dtype`, `$0` is the returned result."""

    def run(_, *refs):
        operands = [mgpu_utils.memref_ptr(ref) for ref in refs]
        if elect:  # The predicate is `$n`, the operand after the references.
            operands.append(mgpu_utils.single_thread_predicate(mgpu_utils.ThreadSubset.WARPGROUP))
        kind = None if dtype is None else ir.IntegerType.get_signless(8 * jnp.dtype(dtype).itemsize)
        result = mgpu_utils.inline_ptx(text, *operands, result_types=kind, has_side_effects=True)
        return None if dtype is None else mgpu.FragmentedArray.splat(result, (), is_signed=True)

    returns = None if dtype is None else plgpu.ShapeDtypeStruct((), dtype, layout=SPLAT)
    return plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs), return_type=returns)(run)(*refs)


def on_words(act, count=4, *, ctas=1, results: int | tuple[int, ...] = 1, **settings):
    """Runs `act(words, out)` in a kernel on one device. All CTAs share `words`. Returns `out`: int32 results.

    `results` is their number, or their shape.
    """

    def body(out):
        act(pl.get_global(plgpu.SemaphoreType.REGULAR((count,))), out)

    kernel = plgpu.kernel(
        body, out_type=jax.ShapeDtypeStruct(np.zeros(results).shape, jnp.int32), grid=(ctas,), grid_names=("cta",)
    )  # fmt: skip
    with emulate(**settings):
        return np.asarray(jax.jit(kernel)()).tolist()


# Waits until the word `$0` is at least 3.
WAIT = """{
    .reg .pred enough;
    .reg .b32 number;
LOOK:
    ld.relaxed.gpu.global.b32 number, [$0];
    setp.ge.u32 enough, number, 3;
    @!enough bra LOOK;
    fence.acquire.gpu;
    fence.proxy.async.global;
}"""
