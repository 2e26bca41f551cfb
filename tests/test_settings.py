"""Environment variables: their meaning, and which values are refused."""

from __future__ import annotations

import jax
import pytest

import overlap
from overlap import _settings


@pytest.fixture
def fresh():
    _settings.wait_timeout_s.cache_clear()
    yield
    _settings.wait_timeout_s.cache_clear()


@pytest.mark.parametrize(
    ("text", "seconds"), [(None, 600.0), ("", 600.0), ("0", 0.0), ("45", 45.0), (" 2.5 ", 2.5), ("1e3", 1000.0)]
)
def test_the_time_a_wait_may_take(fresh, monkeypatch, text, seconds):
    monkeypatch.delenv(_settings.WAIT_TIMEOUT_VARIABLE, raising=False)
    if text is not None:
        monkeypatch.setenv(_settings.WAIT_TIMEOUT_VARIABLE, text)
    assert _settings.wait_timeout_s() == seconds


@pytest.mark.parametrize("text", ["-1", "nan", "inf", "never", "10s", "1,5"])
def test_no_time_to_wait(fresh, monkeypatch, text):
    monkeypatch.setenv(_settings.WAIT_TIMEOUT_VARIABLE, text)
    with pytest.raises(RuntimeError, match=rf"`OVERLAP_WAIT_TIMEOUT_S` must be .* got '{text}'.* unset it"):
        _settings.wait_timeout_s()


def test_a_process_reads_it_once(fresh, monkeypatch):
    monkeypatch.setenv(_settings.WAIT_TIMEOUT_VARIABLE, "7")
    assert _settings.wait_timeout_s() == 7
    monkeypatch.setenv(_settings.WAIT_TIMEOUT_VARIABLE, "8")
    assert _settings.wait_timeout_s() == 7


def test_a_wrong_limit_is_said_before_anything_is_traced(fresh, monkeypatch):
    monkeypatch.setenv(_settings.WAIT_TIMEOUT_VARIABLE, "soon")
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    x = jax.ShapeDtypeStruct((128, 128), "bfloat16")
    with pytest.raises(RuntimeError, match=r"`OVERLAP_WAIT_TIMEOUT_S` must be a number of seconds.*got 'soon'"):
        overlap.explain(overlap.all_gather_lhs_matmul, x, x, "x", mesh=mesh, implementation="fused")
