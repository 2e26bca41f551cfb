"""Helpers of the tests of inline code in the emulator: they make and run kernels that contain a few lines of PTX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.sharding import PartitionSpec as P

from overlap.emulation import emulate
from tests.emulation.cases import make_mesh, place, sharded

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


def computed(text, **settings):
    """Runs PTX that has no operands, and returns the value that the PTX leaves in `$0`."""

    def act(words, out):
        out[0] = inline(text, dtype=jnp.int32)

    return on_words(act, **settings)[0]


# With these instructions, a device tells its peer that it has written a row into the peer's memory. The peer's copy
# engine then reads the row.
SEND = "fence.acq_rel.sys; st.relaxed.sys.global.b32 [$0], 3;"
WAIT = """{
    .reg .pred enough;
    .reg .b32 number;
LOOK:
    ld.relaxed.sys.global.b32 number, [$0];
    setp.ge.u32 enough, number, 3;
    @!enough bra LOOK;
    fence.acquire.sys;
    fence.proxy.async.global;
}"""


def message(send=SEND, wait=WAIT):
    """Runs two devices. Each writes a row into its peer's memory; the peer then stores the row by its copy engine."""

    def body(x, out, landed, smem, loaded):
        flags = pl.get_global(plgpu.SemaphoreType.REGULAR((2,)))
        other = {"x": 1 - lax.axis_index("x")}
        remote = plgpu.remote_ref(landed, other)
        remote[...] = x[...]
        inline(send, plgpu.remote_ref(flags.at[0], other))
        inline(wait, flags.at[0])
        plgpu.copy_gmem_to_smem(landed, smem, loaded)
        plgpu.barrier_wait(loaded)
        plgpu.copy_smem_to_gmem(smem, out)
        plgpu.wait_smem_to_gmem(0)

    shape = jax.ShapeDtypeStruct((1, 64), jnp.float32)
    kernel = plgpu.kernel(
        body, out_type=(shape, shape), scratch_types=[plgpu.SMEM((1, 64), jnp.float32), plgpu.Barrier()]
    )  # fmt: skip
    mesh = make_mesh(x=2)
    x = np.arange(128, dtype=np.float32).reshape(2, 64)
    run = sharded(kernel, mesh, P("x"), P("x"))
    return lambda: np.testing.assert_array_equal(run(place(x, mesh, P("x")))[0], x[::-1])
