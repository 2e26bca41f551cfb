"""Environment variables: their meaning, and which values are refused."""

from __future__ import annotations

import subprocess

import jax
import pytest

import overlap
from overlap import _settings, primitives
from tests.ops.explained import answer


@pytest.fixture
def fresh():
    settings = _settings.wait_timeout_s, _settings.emulated_gpu, _settings.unchecked_jax
    for setting in settings:
        setting.cache_clear()
    yield
    for setting in settings:
        setting.cache_clear()


def test_the_time_a_wait_may_take_is_read_once(fresh, monkeypatch):
    for text, seconds in ((None, 600.0), ("", 600.0), ("0", 0.0), ("45", 45.0), (" 2.5 ", 2.5), ("1e3", 1000.0)):
        monkeypatch.delenv(_settings.WAIT_TIMEOUT_VARIABLE, raising=False)
        if text is not None:
            monkeypatch.setenv(_settings.WAIT_TIMEOUT_VARIABLE, text)
        _settings.wait_timeout_s.cache_clear()
        assert _settings.wait_timeout_s() == seconds
    monkeypatch.setenv(_settings.WAIT_TIMEOUT_VARIABLE, "8")
    assert _settings.wait_timeout_s() == 1000.0
    for text in ("-1", "nan", "inf", "never", "10s", "1,5"):
        monkeypatch.setenv(_settings.WAIT_TIMEOUT_VARIABLE, text)
        _settings.wait_timeout_s.cache_clear()
        with pytest.raises(RuntimeError, match=rf"`OVERLAP_WAIT_TIMEOUT_S` must be .* got '{text}'.* unset it"):
            _settings.wait_timeout_s()


NAMES = [_settings.WAIT_TIMEOUT_VARIABLE, _settings.EMULATED_GPU_VARIABLE, _settings.UNCHECKED_JAX_VARIABLE]


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_value_is_said_before_anything_is_traced(fresh, monkeypatch, name, repository):
    """In every call, also where the variable changes nothing: a product waits for nobody, and this jax is checked."""
    monkeypatch.setenv(name, "soon")
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    x = jax.ShapeDtypeStruct((128, 128), "bfloat16")
    said = rf"`{name}` must be .*, got 'soon': correct the variable, or unset it"
    for implementation in (None, "fused", "xla"):
        for op, axis in ((overlap.matmul, ()), (overlap.all_gather_lhs_matmul, ("x",))):
            with pytest.raises(RuntimeError, match=said):
                answer(op, x, x, *axis, mesh=mesh, implementation=implementation)
    with pytest.raises(RuntimeError, match=said):
        primitives.prepare()
    monkeypatch.setenv("OVERLAP_CPU_ONLY", "yes")  # Chooses packages.
    script = subprocess.run([repository / "setup" / "venv.sh", "none", "none"], capture_output=True, text=True)
    assert script.returncode == 1 and "`OVERLAP_CPU_ONLY` must be 1 or 0, got 'yes'" in script.stderr
