"""Helpers of the emulator's tests: operands, runs of one kernel, a gather by ring, and tables of small kernels."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import PartitionSpec as P

from mosaic_emulator import EmulationError, emulate
from tests.meshes import make_mesh, on_mesh

COMPLETIONS = ("late", "random", "eager")
TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
WARPGROUP = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup)
NO_DEFECTS = frozenset()


def normal(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


X, HALF = normal(64, 64), normal(64, 64, dtype=np.float16)


def wide(x):
    return np.asarray(x).astype(np.float32)


def out_type(shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def put(ref, value):
    ref[...] = value


def _types(out):
    if isinstance(out, list):
        return [_types(each) for each in out]
    return out_type(out) if isinstance(out, tuple) else out


def run_kernel(body, *args, out=(), settings=None, axes=None, **kwargs):
    """Runs a kernel on one device, or on a mesh with these axes, of which "x" divides operands and results.

    `out` is the type of the result, its shape if it is f32, or a list of these.
    """
    call = lambda *xs: plgpu.kernel(body, out_type=_types(out), **kwargs)(*xs)  # noqa: E731
    function = on_mesh(make_mesh(**axes), call, P("x"), P("x")) if axes else jax.jit(call)
    with emulate(**(settings or {})):
        return jax.tree.map(np.asarray, function(*args))


def finish(axes="x", count=1, enough=4):
    """Tells all four devices of a mesh, and waits until `enough` have told."""
    done = pl.get_global(plgpu.SemaphoreType.REGULAR)
    plgpu.semaphore_signal_multicast(done, count, collective_axes=axes)
    pl.semaphore_wait(done, enough * count)


# ---- a kernel of several devices, with switches for defects ----------------------------------------------------------

RING, ROWS, COLUMNS = 4, 4, 64
SHARDS = np.arange(RING * ROWS * COLUMNS, dtype=np.float32).reshape(RING * ROWS, COLUMNS)


def fence_proxy_async():
    """Has the effect of `fence.proxy.async`, for which jax has no public function."""
    fence = lambda _: mgpu_utils.inline_ptx("fence.proxy.async.global;", has_side_effects=True)  # noqa: E731
    plgpu.inline_mgpu()(fence)()


def ring_push(x, defects=NO_DEFECTS):
    """Gathers shards along the mesh's axis "x", [ROWS, COLUMNS] -> [RING * ROWS, COLUMNS], by pushing to the right."""

    def body(x_gmem, out_gmem, smem, barrier):
        arrived = pl.get_global(plgpu.SemaphoreType.REGULAR((RING,)))
        me = lax.axis_index("x")
        right = {"x": lax.rem(me + (2 if "wrong peer" in defects else 1), RING)}

        for step in range(RING):
            rows = (pl.ds(lax.rem(me - step + RING, RING) * ROWS, ROWS), slice(None))
            if step > 0 and "dropped wait" not in defects:
                plgpu.semaphore_wait(arrived.at[step], decrement=False)
            if step > 0 and "missing fence" not in defects:
                fence_proxy_async()
            plgpu.copy_gmem_to_smem(x_gmem if step == 0 else out_gmem.at[rows], smem, barrier)
            plgpu.barrier_wait(barrier)
            if step == 0:
                plgpu.copy_smem_to_gmem(smem, out_gmem.at[rows])
            if step < RING - 1:
                plgpu.copy_smem_to_gmem(smem, plgpu.remote_ref(out_gmem, right).at[rows])
                if "early signal" not in defects:
                    plgpu.wait_smem_to_gmem(0, wait_read_only="read-only wait" in defects)
                plgpu.semaphore_signal(arrived.at[step + 1], device_id=right)
            plgpu.wait_smem_to_gmem(0)

    scratch = [plgpu.SMEM((ROWS, COLUMNS), x.dtype), plgpu.Barrier()]
    return plgpu.kernel(body, out_type=out_type((RING * ROWS, COLUMNS), x.dtype), scratch_types=scratch)(x)


def ring(defects=NO_DEFECTS):
    """Returns a function that runs the ring and compares."""
    kernel = on_mesh(make_mesh(x=RING), lambda x: ring_push(x, defects), P("x"), P("x"))
    return lambda: np.testing.assert_array_equal(kernel(SHARDS), np.tile(SHARDS, (RING, 1)))


# ---- tables of kernels -----------------------------------------------------------------------------------------------


class Table:
    """Decorators for small kernels, each with what it must give or report; and the cases that they have collected."""

    def __init__(self):
        self.cases = []

    def gives(self, expected, *args, out, **kwargs):
        """States the results of a kernel: arrays, or a function of the kernel's results that checks them."""

        def check(body):
            results = run_kernel(body, *args, out=out, **kwargs)
            if callable(expected):
                return expected(results)
            for got, wanted in zip(*map(jax.tree.leaves, (results, expected)), strict=True):
                np.testing.assert_allclose(wide(got), wide(wanted), rtol=1e-5, atol=1e-5)

        return self._add(check)

    def reports(self, error, *words, x=X, out=X.shape, located=True, **kwargs):
        """States the error of a kernel with a mistake, and words of its report: where, what, and the way out."""

        def check(body):
            with pytest.raises(error) as caught:
                run_kernel(body, x, out=out, **kwargs)
            message = str(caught.value)
            assert [word for word in words if word not in message] == [], message
            assert type(caught.value) is error or error is NotImplementedError
            assert not re.search(r"object at 0x|Effect|Var\(|Slot|Traceback", message)
            if issubclass(error, EmulationError):
                assert f"[kernel {body.__name__!r}; repeat with emulate(" in message
                assert not located or re.search(r"device \d(.|\n)*(test_\w+|cases)\.py:\d+", message), message

        return self._add(check, words[0])

    def _add(self, check, label=""):
        def add(body):
            name = label if body.__name__ in ("<lambda>", "body") else body.__name__
            self.cases.append(pytest.param(lambda: check(body), id=name))
            return body

        return add
