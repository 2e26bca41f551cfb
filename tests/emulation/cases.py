"""Helpers of the emulator's tests: they make meshes and inputs, run kernels, and compare the results with NumPy."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from overlap.emulation import emulate
from tests.emulation import kernels

DEVICES, ROWS, COLUMNS, CORES = 4, 8, 64, 2


def make_mesh(**axes):
    count = int(np.prod(list(axes.values())))
    return jax.make_mesh(tuple(axes.values()), tuple(axes), devices=jax.devices()[:count])


def sharded(function, mesh, in_specs, out_specs):
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False))


def place(array, mesh, spec):
    return jax.device_put(array, NamedSharding(mesh, spec))


def shards():
    return np.arange(DEVICES * ROWS * COLUMNS, dtype=np.float32).reshape(DEVICES * ROWS, COLUMNS)


@functools.cache
def group(defects=kernels.NO_DEFECTS, devices=DEVICES):
    mesh = make_mesh(x=devices)
    kernel = sharded(kernels.ring_push(devices, ROWS, COLUMNS, defects), mesh, P("x"), P("x"))
    x = shards()[: devices * ROWS]

    def run():
        out = np.asarray(kernel(place(x, mesh, P("x"))))
        np.testing.assert_array_equal(out.reshape(devices, *x.shape), np.broadcast_to(x, (devices, *x.shape)))

    return run


@functools.cache
def pull(defects=kernels.NO_DEFECTS, cores=CORES):
    mesh = make_mesh(x=DEVICES)
    kernel = sharded(kernels.pull_exchange(DEVICES, ROWS, COLUMNS, cores, defects), mesh, P("x"), P("x"))
    x = shards()

    def run():
        gathered, doubled = map(np.asarray, kernel(place(x, mesh, P("x"))))
        whole = np.broadcast_to(x, (DEVICES, *x.shape))
        np.testing.assert_array_equal(gathered.reshape(whole.shape), whole)
        np.testing.assert_array_equal(doubled.reshape(whole.shape), 2 * whole)

    return run


@functools.cache
def matmul(defects=kernels.NO_DEFECTS, dtype=np.float16):
    m = n = k = 256
    kernel = jax.jit(kernels.pipelined_matmul(m, n, k, CORES, defects))
    rng = np.random.default_rng(0)
    lhs, rhs = (rng.standard_normal(shape).astype(dtype) for shape in ((m, k), (k, n)))
    expected = lhs.astype(np.float32) @ rhs.astype(np.float32)

    def run():
        out = np.asarray(kernel(lhs, rhs)).astype(np.float32)
        np.testing.assert_allclose(out, expected, rtol=2e-2, atol=6e-2)

    return run


# ---- one device, one kernel -----------------------------------------------------------------------------------------

TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


def out_type(shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def run_kernel(body, *args, settings=None, **kwargs):
    with emulate(**(settings or {})):
        return jax.tree.map(np.asarray, jax.jit(lambda *xs: plgpu.kernel(body, **kwargs)(*xs))(*args))


def normal(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


KERNELS = {"ring": group, "pull": pull, "matmul": matmul}
