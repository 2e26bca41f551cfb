"""Helpers of the emulator's tests: meshes, inputs, and the kernels with switches for defects, each with its result."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from overlap.emulation import emulate
from tests.emulation import cluster_kernels, kernels, tensor_kernels

DEVICES, RING, ROWS, COLUMNS, CORES = 3, 4, 4, 64, 2
COMPLETIONS = ("late", "random", "eager")
TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


def make_mesh(**axes):
    count = int(np.prod(list(axes.values())))
    return jax.make_mesh(tuple(axes.values()), tuple(axes), devices=jax.devices()[:count])


def sharded(function, mesh, in_specs, out_specs):
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False))


def place(array, mesh, spec):
    return jax.device_put(array, NamedSharding(mesh, spec))


def shards(devices=DEVICES):
    return np.arange(devices * ROWS * COLUMNS, dtype=np.float32).reshape(devices * ROWS, COLUMNS)


def out_type(shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def run_kernel(body, *args, settings=None, **kwargs):
    """Runs a kernel on one device."""
    with emulate(**(settings or {})):
        return jax.tree.map(np.asarray, jax.jit(lambda *xs: plgpu.kernel(body, **kwargs)(*xs))(*args))


def normal(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


# ---- kernels with switches for defects -------------------------------------------------------------------------------


def _gathered(make, defects, devices=DEVICES):
    mesh, x = make_mesh(x=devices), shards(devices)
    kernel, whole = sharded(make(defects=defects), mesh, P("x"), P("x")), np.tile(x, (devices, 1))

    def run():
        for factor, out in enumerate(jax.tree.leaves(kernel(place(x, mesh, P("x")))), 1):
            np.testing.assert_array_equal(np.asarray(out), factor * whole)

    return run


def _on_one_device(make, operands, expected, tolerance):
    kernel = jax.jit(make)

    def run():
        out = np.asarray(kernel(*operands)).astype(np.float32)
        np.testing.assert_allclose(out, expected, rtol=tolerance, atol=tolerance)

    return run


def _product(m, n, k, make, tolerance, dtype=np.float16):
    lhs, rhs = normal(m, k, dtype=dtype), normal(k, n, dtype=dtype, seed=1)
    return _on_one_device(make, (lhs, rhs), lhs.astype(np.float32) @ rhs.astype(np.float32), tolerance)


def _of_steps(make, expected):
    x = normal(5 * 8, 64)
    return _on_one_device(make, (x,), expected(x, x.reshape(5, 8, 64).sum(0)), 1e-5)


def _sums(size, rounds, defects):
    x = np.random.default_rng(0).integers(-9, 9, (rounds, size, size, *cluster_kernels.TILE)).astype(np.float32)
    return _on_one_device(cluster_kernels.sums(size, rounds, defects), (x,), x.sum(axis=1), 0)


def ring(defects=kernels.NO_DEFECTS, devices=RING):
    make = functools.partial(kernels.ring_push, devices, ROWS, COLUMNS)
    return _gathered(make, defects, devices)


def pull(defects=kernels.NO_DEFECTS, cores=CORES):
    return _gathered(functools.partial(kernels.pull_exchange, DEVICES, ROWS, COLUMNS, cores), defects)


def matmul(defects=kernels.NO_DEFECTS, dtype=np.float16):
    return _product(256, 256, 128, kernels.pipelined_matmul(256, 256, 128, CORES, defects), 6e-2, dtype)


def tensor(pair, defects):
    return _product(256, 128, 128, tensor_kernels.matmul(256, 128, 128, pair=pair, defects=defects), 1e-4)


def tensor_operand(defects, by_copy=False, dtype=np.float16):
    make = tensor_kernels.operand_in_tensor_memory(128, 64, 64, dtype, by_copy=by_copy, defects=defects)
    return _product(128, 64, 64, make, 1e-4, dtype)


KERNELS = {
    "ring": ring,
    "pull": pull,
    "matmul": matmul,
    "shared tiles": lambda defects: _of_steps(
        cluster_kernels.shared_tiles(5, 8, 64, defects=defects), lambda x, total: [[total, 2 * total]] * 2
    ),
    "swap": lambda defects: _of_steps(
        cluster_kernels.swap_halves(20, 64, defects=defects), lambda x, total: np.roll(x, 20, axis=0)
    ),
    "scopes": lambda defects: _of_steps(
        cluster_kernels.scope_in_a_loop(5, 8, 64, defects=defects), lambda x, total: [total, total]
    ),
    "sums of 2": functools.partial(_sums, 2, 2),
    "sums of 4": functools.partial(_sums, 4, 2),
    "one CTA": functools.partial(tensor, False),
    "pair": functools.partial(tensor, True),
    "operand in tmem": tensor_operand,
    "operand copied to tmem": functools.partial(tensor_operand, by_copy=True),
    "pair, operand in tmem": lambda defects: _product(
        256, 128, 64, functools.partial(tensor_kernels.pair_with_operand_in_tensor_memory, defects=defects), 1e-4
    ),
}


@functools.cache
def kernel_of(name, *defects):
    """Returns a function that runs a kernel with these defects and compares its result with NumPy's."""
    return KERNELS[name](frozenset(defects))
