"""`python -m overlap doctor`: the checks of allocators, time limits, versions and flags."""

from __future__ import annotations

import inspect
import re

import pytest

from overlap import _settings
from overlap.cli import allocators, checks, gpu_checks
from overlap.cli.facts import NOTE, OK, PROBLEM, Fact
from overlap.cli.machine import Jax
from tests.test_doctor import _h200s, _machine

# --- The other checks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("allocator", "preallocate", "status", "said"),
    [
        (None, None, "OK", "default, memory taken at the start (nothing is set); fused kernels: one process: runs"),
        ("CUDA_ASYNC", None, "note", "cuda_async, memory taken at the start (XLA_PYTHON_CLIENT_ALLOCATOR=CUDA_ASYNC)"),
        (None, "false", "note", "default, memory taken as needed (XLA_PYTHON_CLIENT_PREALLOCATE=false); fused kernels"),
        ("platform", "true", "note", "platform, memory taken as needed"),
        ("arena", None, "PROBLEM", "arena, "),
    ],
)
def test_doctor_knows_the_allocator(monkeypatch, allocator, preallocate, status, said):
    for variable, value in (("XLA_PYTHON_CLIENT_ALLOCATOR", allocator), ("XLA_PYTHON_CLIENT_PREALLOCATE", preallocate)):
        monkeypatch.delenv(variable, raising=False)
        if value is not None:
            monkeypatch.setenv(variable, value)
    # An unmeasured allocator gets a note, whatever a measurement would find. Here only the default one is measured.
    verdicts = {key: allocators.Verdict("not measured", "not measured") for key in allocators.VERDICTS}
    monkeypatch.setattr(allocators, "VERDICTS", verdicts | {("default", True): allocators.Verdict("runs", "runs")})
    fact = gpu_checks.allocator([], _machine())
    assert (fact.status, fact.found.startswith(said)) == (status, True), fact
    assert ("jax takes address, bfc" in fact.advice) == (status == "PROBLEM")


def test_doctor_refuses_an_allocator_that_fails(monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")
    verdict = allocators.Verdict("runs", "fails")
    monkeypatch.setattr(allocators, "VERDICTS", {**allocators.VERDICTS, ("platform", False): verdict})
    fact = gpu_checks.allocator([], _machine(driver=_h200s(2)))
    assert fact.status == "PROBLEM"
    assert "a process per GPU: fails" in fact.found
    assert "unset XLA_PYTHON_CLIENT_ALLOCATOR" in fact.advice


def test_doctor_knows_the_allocators_that_jax_takes():
    xla_client = pytest.importorskip("jaxlib.xla_client")
    source = inspect.getsource(xla_client.generate_pjrt_gpu_plugin_options)
    listed = re.search(r"allowed_allocators = \(([^)]*)\)", source)
    assert listed is not None
    assert {name for name, _ in allocators.VERDICTS} == set(re.findall(r"'(\w+)'", listed[1]))


@pytest.mark.parametrize(
    ("text", "status", "said"),
    [
        ("5", "OK", "5 s for another device, set by OVERLAP_WAIT_TIMEOUT_S"),
        ("0", "OK", "none for another device, set by OVERLAP_WAIT_TIMEOUT_S"),
        ("", "OK", f"{_settings.WAIT_TIMEOUT_DEFAULT_S:g} s for another device, the default of OVERLAP_WAIT"),
        ("x", "PROBLEM", "`OVERLAP_WAIT_TIMEOUT_S` must be"),
    ],
)
def test_doctor_knows_how_long_a_wait_may_take(monkeypatch, text, status, said):
    monkeypatch.setenv(_settings.WAIT_TIMEOUT_VARIABLE, text)
    _settings.wait_timeout_s.cache_clear()
    try:
        fact = checks.wait_limit([], _machine())
    finally:
        _settings.wait_timeout_s.cache_clear()
    assert fact.status == status
    assert fact.found.startswith(said)


@pytest.mark.parametrize(
    ("version", "status", "said"),
    [
        ("0.10.2", PROBLEM, "jax 0.10.2 is too old: overlap needs >= 0.11.2 and < 0.13"),
        ("0.11.1", PROBLEM, "is too old"),
        ("0.11.2", OK, ""),
        ("0.12.0.1", OK, ""),
        ("0.12.1", NOTE, "not a tested version"),
        ("0.13.0", PROBLEM, "is too new"),
    ],
)
def test_doctor_judges_the_version_of_jax(monkeypatch, version, status, said):
    monkeypatch.setattr(checks, "version_of", lambda package: version if package in ("jax", "jaxlib") else None)
    fact = checks.jax([], _machine(jax=Jax(version=version, numpy="2.1")))
    assert (fact.status, said in fact.advice) == (status, True), fact


def test_doctor_sees_versions_that_differ(monkeypatch):
    versions = {"jax": "0.11.2", "jaxlib": "0.11.2", "jax-cuda13-plugin": "0.12.0"}
    monkeypatch.setattr(checks, "version_of", versions.get)
    fact = checks.jax([], _machine())
    assert fact.status == PROBLEM
    assert "the versions differ" in fact.advice
    # The imported version counts, not the installed one.
    fact = checks.jax([], _machine(jax=Jax(version="0.10.2", path="/elsewhere/jax")))
    assert fact.status == PROBLEM
    assert "`import jax` gives jax 0.10.2 from /elsewhere/jax" in fact.found and "PYTHONPATH" in fact.advice


@pytest.mark.parametrize(
    ("installed", "error", "advice"),
    [
        ({}, "ModuleNotFoundError: No module named 'jax'", "pip install 'overlap[cuda13]'"),
        ({"jax": "0.11.2"}, "ModuleNotFoundError: No module named 'jaxlib'", "pip install 'overlap[cuda13]'"),
        (
            {"jax": "0.11.2", "jaxlib": "0.11.2"},
            "RuntimeError: jaxlib version is not compatible",
            "pip install --force-reinstall --no-deps 'jax==0.11.2' 'jaxlib==0.11.2'",
        ),
        ({"jax": "0.11.2", "jaxlib": "0.11.2"}, "ModuleNotFoundError: No module named 'numpy'", "'numpy>=2.1'"),
    ],
)
def test_doctor_says_how_to_mend_a_jax_that_cannot_be_imported(monkeypatch, installed, error, advice):
    monkeypatch.setattr(checks, "version_of", installed.get)
    machine = _machine(jax=Jax(error=error))
    fact = checks.jax([], machine)
    assert fact.status == PROBLEM and error in fact.found and advice in fact.advice, fact
    assert checks.emulator([fact], machine) == Fact("emulator", NOTE, "not tried: see jax")


@pytest.mark.parametrize(
    ("variable", "status"),
    [("http_proxy", "note"), ("https_proxy", "note"), ("grpc_proxy", "note"), ("HTTP_PROXY", "OK"), ("no_proxy", "OK")],
)
def test_doctor_names_the_proxies_that_grpc_asks(monkeypatch, variable, status):
    """Their values may have passwords."""
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "http://me:secret@proxy:3128")
    found = checks.proxies([], _machine())
    assert (found.status, variable in found.found, "no_proxy" in found.advice) == (status, *[status == "note"] * 2)
    assert "secret" not in found.found + found.advice


def test_doctor_names_flags_that_break_fused_kernels(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_command_buffer_scheduling_mode=CONCURRENT")
    found = checks.flags([], _machine())
    assert found.status == "PROBLEM" and "leave the flag out" in found.found
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_shard_autotuning=false")
    assert checks.flags([], _machine()).status == "OK"
