"""NVLink multicast (one store, load or signal for all devices of a mesh), and the core count of CPU devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import PartitionSpec as P

from overlap import emulation
from overlap.emulation import emulate
from tests.emulation.cases import make_mesh, normal, out_type, place, sharded

DEVICES = 4
X = normal(DEVICES * 8, 64)


def run(body, *, shape=(DEVICES * 8, 64), axes=None, dtype=jnp.float32, x=X, scratch=(), **settings):
    mesh = make_mesh(**(axes or {"x": DEVICES}))
    spec = P(tuple(mesh.axis_names))
    kernel = plgpu.kernel(body, out_type=out_type(shape, dtype), scratch_types=list(scratch))
    with emulate(**settings) as report:
        out = np.asarray(sharded(kernel, mesh, spec, spec)(place(x, mesh, spec)))
    return out.reshape(DEVICES, *shape), report


def finish(done, count=DEVICES):
    plgpu.semaphore_signal_multicast(done, collective_axes="x")
    pl.semaphore_wait(done, count)


def own_rows(o):
    return o.at[pl.ds(lax.axis_index("x") * 8, 8)]


@pytest.mark.parametrize("completion", ["late", "random", "eager"])
def test_stores_to_all_devices(completion):
    def by_threads(x, o):
        plgpu.multimem_store(x[...], own_rows(o), "x")
        finish(pl.get_global(plgpu.SemaphoreType.REGULAR))

    def by_tma(x, o, smem):
        smem[...] = x[...]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem, plgpu.multicast_ref(own_rows(o), "x"))
        plgpu.wait_smem_to_gmem(0)
        finish(pl.get_global(plgpu.SemaphoreType.REGULAR))

    for body, scratch in ((by_threads, []), (by_tma, [plgpu.SMEM((8, 64), jnp.float32)])):
        out, report = run(body, scratch=scratch, completion=completion)
        np.testing.assert_array_equal(out, np.broadcast_to(X, out.shape))
        assert report.counts["signals"] == DEVICES * DEVICES


@pytest.mark.parametrize(
    ("reduction", "dtype"), [("add", np.float32), ("add", jnp.bfloat16), ("min", np.float16), ("xor", np.int32)]
)
def test_loads_from_all_devices(reduction, dtype):
    def body(x, o):
        o[...] = plgpu.multimem_load_reduce(x, collective_axes="x", reduction_op=reduction)
        finish(pl.get_global(plgpu.SemaphoreType.REGULAR))

    x = (10 * X).astype(dtype)
    out, _ = run(body, shape=(8, 64), dtype=dtype, x=x)
    parts = x.reshape(DEVICES, 8, 64)
    wide = parts if dtype is np.int32 else parts.astype(np.float32)
    function = {"add": np.add, "min": np.minimum, "xor": np.bitwise_xor}[reduction]
    expected = function.reduce(wide, axis=0).astype(dtype)
    np.testing.assert_array_equal(out, np.broadcast_to(expected, out.shape))


def test_a_mesh_of_two_axes():
    def body(x, o):
        o[0] = plgpu.multimem_load_reduce(x, collective_axes=("x", "y"), reduction_op="add")[0]
        done = pl.get_global(plgpu.SemaphoreType.REGULAR)
        plgpu.semaphore_signal_multicast(done, 3, collective_axes=("x", "y"))
        pl.semaphore_wait(done, 3 * DEVICES)

    out, _ = run(body, shape=(1, 64), axes={"x": 2, "y": 2})
    np.testing.assert_allclose(out[:, 0], np.broadcast_to(X[::8].sum(axis=0), (DEVICES, 64)), rtol=1e-6)


def test_core_count_of_devices():
    device = jax.devices()[0]
    assert not hasattr(device, "core_count")
    with emulate(cores=3):
        assert device.core_count == 3
        with emulate(cores=5), emulation.core_count_of_devices():
            assert device.core_count == 5
        assert device.core_count == 3
    assert not hasattr(device, "core_count")
    with emulation.core_count_of_devices():
        assert device.core_count == emulation.core_count() == 4
    assert not hasattr(device, "core_count")
