"""Tests that the emulator reports and gives up a launch that some devices never reach, instead of waiting silently."""

from __future__ import annotations

import logging
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from overlap.emulation import EmulationError, emulate
from overlap.emulation.entry import lowering


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowering, "_REPORT_AFTER_S", 0.2)
    monkeypatch.setattr(lowering, "_MEETING_TIMEOUT_S", 0.4)


def program(branch):
    """Runs a kernel on two devices, each of which takes the branch for its number."""

    def body(out):
        out[...] = jnp.full((128,), 7, jnp.float32)

    kernel = plgpu.kernel(body, out_type=jax.ShapeDtypeStruct((128,), jnp.float32), kernel_name="seven")
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))
    own = lambda: branch(kernel, lax.axis_index("x"))  # noqa: E731
    return jax.jit(jax.shard_map(own, mesh=mesh, in_specs=(), out_specs=jax.P("x"), check_vma=False))


def test_a_device_that_never_enters_is_named_with_the_way_out(caplog: pytest.LogCaptureFixture) -> None:
    f = program(lambda kernel, i: lax.cond(i == 0, kernel, lambda: jnp.zeros(128)))
    with (
        caplog.at_level(logging.WARNING, "overlap"),
        pytest.raises(EmulationError, match=r"'seven': after 0\.4 s devices \[1\] of 2 .* Given up"),
        emulate(),
    ):
        f()
    assert "'seven': after 0.2 s devices [1] of 2 have not reached it" in caplog.text
    assert f"it has {lowering._threads_of_xla(8)} threads for 8 devices" in caplog.text
    assert "NPROC=64 in the environment before Python starts, or fewer devices" in caplog.text


def test_a_long_launch_is_not_given_up_once_all_devices_have_come(monkeypatch: pytest.MonkeyPatch) -> None:
    execute = lowering.World.execute
    monkeypatch.setattr(lowering.World, "execute", lambda *args: time.sleep(1.0) or execute(*args))
    with emulate():
        np.testing.assert_array_equal(program(lambda kernel, i: kernel())(), 7)


@pytest.mark.skipif(not pathlib.Path("/proc/self/task").exists(), reason="the names of threads are read from /proc")
def test_threads_are_counted_as_xla_has_them() -> None:
    devices = jax.local_device_count("cpu")
    names = [path.read_text().strip() for path in pathlib.Path("/proc/self/task").glob("*/comm")]
    assert lowering._threads_of_xla(devices) == names.count("tf_XLAEigen")
