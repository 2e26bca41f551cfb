"""Tests programs that are compiled ahead of time, loaded from jax's persistent cache, or exported."""

import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import overlap
from tests.oracle import make_mesh

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
SHAPE = (128, 256, 256)


def layer(mesh):
    call = lambda x, w: overlap.all_gather_lhs_matmul(x, w, "x", implementation="fused")  # noqa: E731
    return jax.jit(jax.shard_map(call, mesh=mesh, in_specs=(P("x"), P(None, "x")), out_specs=P(None, "x")))


def integers(mesh):
    """Draws operands whose product is exact. Returns the operands and the product."""
    (m, n, k), size, chance = SHAPE, mesh.size, np.random.default_rng(0)
    values = chance.integers(-1, 2, (size * m, k)), chance.integers(-1, 2, (k, size * n))
    specs = P("x"), P(None, "x")
    put = [
        jax.make_array_from_callback(v.shape, jax.NamedSharding(mesh, spec), lambda i, v=v: v[i].astype(jnp.bfloat16))
        for v, spec in zip(values, specs)
    ]
    return put, values[0] @ values[1]


def assert_exact(out, expected):
    for shard in out.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data, np.float32), expected[shard.index])


def test_ahead_of_time(devices):
    mesh = make_mesh(x=devices)
    arrays, expected = integers(mesh)
    compiled = layer(mesh).lower(*arrays).compile()
    for _ in range(3):
        assert_exact(compiled(*arrays), expected)


def test_exported(devices):
    """The exported program does not know its devices. So, in one process, XLA's barrier runs before the kernel."""
    mesh = make_mesh(x=devices)
    arrays, expected = integers(mesh)
    checks = [jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")]
    export = jax.export.export(layer(mesh), disabled_checks=checks)
    if jax.process_count() > 1:
        with pytest.raises(NotImplementedError, match="abstract or to be exported"):
            export(*arrays)
        return
    loaded = jax.export.deserialize(export(*arrays).serialize())
    for _ in range(3):
        assert_exact(jax.jit(loaded.call)(*arrays), expected)


@pytest.mark.one_process
def test_persistent_cache(tmp_path):
    """A second start takes its kernels from the cache and computes the same result."""
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.05",
    }  # fmt: skip
    hits = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-m", "tests.multi_gpu.test_compiled"], env=environment, cwd=ROOT,
                              capture_output=True, text=True, timeout=120, check=False)  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        hits.append(int(re.search(r"(\d+) cache hits", done.stdout)[1]))
    assert hits[0] == 0 < hits[1]


if __name__ == "__main__":
    # The program of `test_persistent_cache`.
    _events = []
    jax.monitoring.register_event_listener(lambda event, **_: _events.append(event))
    _mesh = make_mesh(x=jax.device_count())
    _arrays, _expected = integers(_mesh)
    assert_exact(layer(_mesh)(*_arrays), _expected)
    print(f"{_events.count('/jax/compilation_cache/cache_hits')} cache hits")
