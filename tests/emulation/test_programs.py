"""Kernels inside whole programs: jit, loops, meshes, aliases; the context `emulate`; devices that never come."""

import concurrent.futures
import gc
import logging
import os
import re
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import PartitionSpec as P

import mosaic_emulator as emulation
from mosaic_emulator import RaceError, emulate
from mosaic_emulator.entry import lowering
from mosaic_emulator.state import runs
from tests.emulation.cases import COLUMNS, RING, SHARDS, X, out_type, ring_push
from tests.meshes import make_mesh, on_mesh

INT = out_type((2,), jnp.int32)


def test_scan_and_psum_around_the_kernel():
    def step(x):
        def iterate(carry, _):
            whole = ring_push(carry)
            return carry + lax.psum(whole.sum(), "x") * 1e-5, whole[:1]

        return lax.scan(iterate, x, None, length=3)

    x = SHARDS / 1e3
    with emulate() as run:
        carry, firsts = map(np.asarray, on_mesh(make_mesh(x=RING), step, P("x"), (P("x"), P(None, "x")))(x))
    assert run.counts["launches"] == 3
    rows = []
    for _ in range(3):
        rows.append(np.broadcast_to(x[:1], (RING, COLUMNS)))
        x = x + np.float32(RING * x.sum() * 1e-5)
    np.testing.assert_allclose(carry, x, rtol=1e-4)
    np.testing.assert_allclose(firsts, rows, rtol=1e-4)


def test_aliased_and_donated_input_and_vmap():
    def body(ref):
        ref[...] = ref[...] + 1

    def call(x):
        ref = jax.new_ref(x)
        plgpu.kernel(body, out_type=())(ref)
        plgpu.kernel(body, out_type=())(ref)
        return ref[...]

    def doubled(x, o):
        o[...] = 2 * x[...]

    x = jnp.arange(64, dtype=jnp.float32)
    with emulate() as run:
        y = np.asarray(jax.jit(call)(x))
        z = np.asarray(jax.jit(call, donate_argnums=0)(jnp.asarray(y)))
        assert run.counts["launches"] == 4
        np.testing.assert_array_equal(jax.vmap(plgpu.kernel(doubled, out_type=out_type((64,))))(X), 2 * X)
    assert run.counts["launches"] == 5
    for values, added in ((x, 0), (y, 2), (z, 4)):
        np.testing.assert_array_equal(values, np.arange(64) + added)


def test_a_mesh_in_the_context_and_results_that_nobody_keeps():
    group = jax.shard_map(ring_push, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    with jax.set_mesh(make_mesh(x=RING)):
        kernel = jax.jit(group)
        with emulate() as run:
            for _ in range(5):
                kernel(SHARDS)
    assert run.counts["launches"] == 5


def test_launches_do_not_see_each_other():
    # Semaphores start at zero and outputs as NaN, in every launch.
    def body(out):
        flag = pl.get_global(plgpu.SemaphoreType.REGULAR)
        plgpu.semaphore_signal(flag)
        plgpu.semaphore_wait(flag, 1, decrement=False)
        out[0] = pl.semaphore_read(flag)

    kernel = jax.jit(plgpu.kernel(body, out_type=INT))
    with emulate():
        assert [np.asarray(kernel()).tolist() for _ in range(3)] == [[1, np.iinfo(np.int32).min]] * 3


def test_cores_take_part_in_tracing_and_seeds_do_not():
    traces, device = [], jax.devices()[0]

    @jax.jit
    def call():
        traces.append(emulation.core_count())

        def body(out):
            out[lax.axis_index("core")] = jnp.int32(1)

        return plgpu.kernel(body, out_type=out_type((8,), jnp.int32), grid=(traces[-1],), grid_names=("core",))()

    for seed in range(2):
        for cores in (2, 3):
            with emulate(cores=cores, seed=seed):
                assert (np.asarray(call()) == 1).sum() == cores
    assert traces == [2, 3] and emulation.core_count() == 4
    # The devices tell it too, while something emulates.
    assert not hasattr(device, "core_count")
    with emulate(cores=3):
        with emulate(cores=5), emulation.core_count_of_devices():
            assert device.core_count == 5
        assert device.core_count == 3
    with emulation.core_count_of_devices():
        assert device.core_count == emulation.core_count() == 4
    assert not hasattr(device, "core_count")


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_check_raises_inside_the_context():
    with pytest.raises(RaceError) as caught, emulate() as run:
        kernel = on_mesh(make_mesh(x=RING), lambda x: ring_push(x, {"dropped wait"}), P("x"), P("x"))
        kernel(SHARDS)
        run.check()
        pytest.fail("unreachable")
    assert caught.value is run.errors[0]


def test_an_error_of_the_caller_passes_through_and_a_counter_that_nobody_awaits_is_a_warning():
    def body(x, out):
        plgpu.semaphore_signal(pl.get_global(plgpu.SemaphoreType.REGULAR))
        out[0] = x[0]

    kernel = jax.jit(plgpu.kernel(body, out_type=out_type((1,))))
    with pytest.raises(KeyError, match="mine"), emulate() as run:
        kernel(np.ones(1, np.float32)).block_until_ready()
        raise KeyError("mine")
    assert any("never waited for" in warning for warning in run.warnings)


OUTSIDE = """
from tests.emulation import cases
emulation.enable()
mesh = cases.make_mesh(x=4)
rings = [lambda x, d=defects: cases.ring_push(x, d) for defects in ((), ("missing fence",))]
good, bad = (cases.on_mesh(mesh, ring, P("x"), P("x")) for ring in rings)
expected = np.tile(cases.SHARDS, (4, 1))
np.testing.assert_array_equal(np.asarray(good(cases.SHARDS)), expected)
try:
    bad(cases.SHARDS).block_until_ready()
except jax.errors.JaxRuntimeError as error:
    assert "missing proxy fence" in str(error), error
else:
    raise AssertionError("no error")
for _ in range(3):
    with emulation.emulate() as run:
        y = good(cases.SHARDS)
    assert run.counts["launches"] == 1
    np.testing.assert_array_equal(np.asarray(y), expected)
"""


def test_the_examples_of_the_documentation_and_faults_outside_a_context(repository):
    """Outside a context, faults surface where the result is used. On jax 0.11 such a fault spoils the process."""
    text = (repository / "docs" / "EMULATION.md").read_text()
    code, late, sequences = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    code += late + sequences
    code += "print(len(results))\nfor launch, result in zip((second, second, first, first), results):\n"
    code += "    np.testing.assert_array_equal(result, launch.outputs)\n"
    code += OUTSIDE
    on_cpus = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=repository, env=on_cpus, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first, second, *rest, last = done.stdout.splitlines()
    late = [line for line in rest if line.endswith("begins its copy last")]
    assert late == [f"device {victim} begins its copy last" for victim in range(4)]
    assert first == "8 copies, 4 signals" and last == "4"
    assert second.startswith("exit device 0 may leave the kernel before"), done.stdout


# ---- devices that are late -------------------------------------------------------------------------------------------


def test_a_device_that_does_not_come_to_a_launch_is_named(monkeypatch, caplog):
    monkeypatch.setattr(lowering, "_REPORT_AFTER_S", 0.1)
    monkeypatch.setattr(runs, "_WATCH_EVERY_S", 0.1)

    def when_reported(x):
        end = time.monotonic() + 20
        while not caplog.text and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(0.3)  # It is said once.
        return x

    def late(x):
        return io_callback(when_reported, x, x)

    def body(x, out):
        out[...] = x[...] + 7

    def program(x):
        kernel = plgpu.kernel(body, out_type=out_type((128,)), kernel_name="seven")
        return kernel(lax.cond(lax.axis_index("x") == 1, late, lambda x: x, x))

    with caplog.at_level(logging.WARNING, "mosaic_emulator"), emulate():
        out = on_mesh(make_mesh(x=2), program, P(), P("x"))(jnp.zeros(128))
        np.testing.assert_array_equal(np.asarray(out), 7)
    assert "'seven': after 0.1 s devices [1] of 2 have not reached it" in caplog.text
    assert len(caplog.records) == 1
    # Nothing is kept of a launch.
    assert not lowering._arrivals and not any(isinstance(x, lowering._Meeting) for x in gc.get_objects())


def test_launches_of_different_devices_run_one_after_the_other(monkeypatch):
    def body(out):
        out[...] = jnp.full((128,), 7, jnp.float32)

    execute, running, most = lowering.World.execute, [], []

    def slow(*args):
        running.append(1)
        time.sleep(0.2)
        most.append(len(running))
        running.pop()
        return execute(*args)

    monkeypatch.setattr(lowering.World, "execute", slow)
    with emulate(), concurrent.futures.ThreadPoolExecutor() as threads:
        kernel = jax.jit(lambda x: plgpu.kernel(body, out_type=out_type((128,)))() + x)
        zeros = [jax.device_put(np.zeros(128, np.float32), device) for device in jax.devices()[:2]]
        assert all((out == 7).all() for out in threads.map(lambda x: np.asarray(kernel(x)), zeros))
    assert most == [1, 1]
