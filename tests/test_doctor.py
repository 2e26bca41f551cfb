"""`python -m overlap doctor`: what it finds, and what it says about it."""

from __future__ import annotations

import inspect
import json
import re

import jax
import pytest

import overlap
from overlap import _compat, _cuda, _settings
from overlap.cli import allocators, doctor, main
from tests.command import run_overlap


def test_doctor_on_a_machine_without_gpus(repository):
    process = run_overlap(repository, "doctor", CUDA_VISIBLE_DEVICES="")
    assert process.returncode == 0, process.stdout + process.stderr
    assert not process.stderr
    assert re.search(r"^OK +jax +jax \d", process.stdout, re.MULTILINE)
    assert re.search(r"^OK +emulator ", process.stdout, re.MULTILINE)
    assert "can run emulated on the CPU." in process.stdout


def _h200s(monkeypatch, count: int, name: str = "NVIDIA H200", capability: tuple[int, int] = (9, 0)) -> None:
    monkeypatch.setattr(_cuda, "visible_gpus", lambda: (_cuda.Gpu(name, capability),) * count)
    monkeypatch.setattr(_cuda, "driver_version", lambda: "580.65.06")
    monkeypatch.setattr(_cuda, "jax_plugin", lambda: "xla_cuda13")
    monkeypatch.setattr(_cuda, "pairs_without_peer_access", list)


def test_doctor_on_gpus(monkeypatch, capsys):
    _h200s(monkeypatch, 8)
    monkeypatch.setattr(_cuda, "nccl", lambda: _cuda.NcclLibrary((2, 30, 7), "/x/libnccl.so.2", ("/x/libnccl.so.2",)))
    answers = {doctor._JAX_DEVICES: (True, "gpu 8 NVIDIA H200"), doctor._EMULATED_RUN: (True, "fine")}
    monkeypatch.setattr(doctor, "_ask", lambda code, **keywords: answers.get(code, (True, "Open MPI v5.0.11")))
    assert doctor.run() == 0
    said = capsys.readouterr().out
    assert "8 × NVIDIA H200 (sm_90), driver 580.65.06" in said
    assert "PROBLEM" not in said
    assert "can run on the GPUs and emulated on the CPU." in said


def test_doctor_names_every_trouble(monkeypatch, capsys):
    _h200s(monkeypatch, 4)
    monkeypatch.setattr(_cuda, "pairs_without_peer_access", lambda: [(0, 3)])
    copies = ("/a/libnccl.so.2", "/b/libnccl.so.2")
    monkeypatch.setattr(_cuda, "nccl", lambda: _cuda.NcclLibrary((2, 28, 9), copies[0], copies))
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/cuda/lib64")
    monkeypatch.setattr(doctor, "_ask", lambda code, timeout_s, **keywords: (False, f"no answer within {timeout_s} s"))
    assert doctor.run() == 1
    said = " ".join(capsys.readouterr().out.split())
    for words in (
        "no answer within 120 s", "missing for 1 pairs of GPUs: 0→3", "several are loaded: /a/libnccl.so.2",
        "LD_LIBRARY_PATH=/opt/cuda/lib64 may bring in", "not possible yet, see GPUs, peer access, NCCL",
        "can run nowhere here",
    ):  # fmt: skip
        assert words in said, words


@pytest.mark.parametrize(
    ("version", "oldest", "status"),
    [((2, 28, 9), None, "note"), ((2, 28, 9), (2, 30), "PROBLEM"), ((2, 30, 7), (2, 30), "OK")],
)
def test_doctor_knows_which_nccl_this_jax_needs(monkeypatch, version, oldest, status):
    _h200s(monkeypatch, 2)
    monkeypatch.setattr(_cuda, "nccl", lambda: _cuda.NcclLibrary(version, "/x/libnccl.so.2", ("/x/libnccl.so.2",)))
    monkeypatch.setattr(_compat, "oldest_nccl_of_one_process", lambda: oldest)
    fact = doctor._nccl([])
    assert fact.status == status
    assert ("psum" in fact.advice) == (status == "PROBLEM")
    assert (">=2.30" in fact.advice) == (status != "OK")


def test_the_nccl_that_a_jax_needs(monkeypatch):
    for version, oldest in (((0, 11, 2), None), ((0, 12, 0), (2, 30)), ((0, 12, 1), (2, 30))):
        monkeypatch.setattr(jax, "__version_info__", version)
        assert _compat.oldest_nccl_of_one_process() == oldest


def test_doctor_on_other_gpus(monkeypatch):
    _h200s(monkeypatch, 1, "NVIDIA A100-SXM4-80GB", (8, 0))
    fact = doctor._devices([])
    assert fact.status == "note"
    assert "Hopper" in fact.advice


def test_doctor_survives_a_check_that_fails(monkeypatch, capsys):
    def broken(facts: list[doctor.Fact]) -> doctor.Fact:
        raise OSError("no /proc here")

    monkeypatch.setattr(doctor, "_binding", broken)
    monkeypatch.setattr(doctor, "_ask", lambda code, **keywords: (True, "fine"))
    assert doctor.run() == 0
    assert "the check itself failed: OSError('no /proc here')" in capsys.readouterr().out


def test_doctor_asks_with_a_limit():
    assert doctor._ask("import time; time.sleep(60)", timeout_s=1) == (False, "no answer within 1 s")
    works, answer = doctor._ask("raise ValueError('so')", timeout_s=60)
    assert (works, answer) == (False, "ValueError: so")
    assert doctor._ask("print('a'); print('b')", timeout_s=60) == (True, "b")


def test_doctor_for_programs(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "_ask", lambda code, **keywords: (True, "fine"))
    monkeypatch.setattr(_cuda, "visible_gpus", tuple)
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["version"] == overlap.__version__
    assert found["can_run"] == ["emulated"]
    facts = {fact["subject"]: fact for fact in found["facts"]}
    assert set(facts["jax"]) == {"subject", "status", "found", "advice"}
    assert facts["emulator"]["status"] == "OK"
    monkeypatch.setattr(doctor, "_ask", lambda code, **keywords: (False, "broken"))
    assert main(["doctor", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["can_run"] == []


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
    # What is not measured is a note until it is, whatever comes out.
    verdicts = {key: allocators.Verdict("not measured", "not measured") for key in allocators.VERDICTS}
    monkeypatch.setattr(allocators, "VERDICTS", verdicts | {("default", True): allocators.Verdict("runs", "runs")})
    fact = doctor._allocator([])
    assert (fact.status, fact.found.startswith(said)) == (status, True), fact
    assert ("jax takes address, bfc" in fact.advice) == (status == "PROBLEM")


def test_doctor_refuses_an_allocator_that_fails(monkeypatch):
    _h200s(monkeypatch, 2)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")
    verdict = allocators.Verdict("runs", "fails")
    monkeypatch.setattr(allocators, "VERDICTS", {**allocators.VERDICTS, ("platform", False): verdict})
    fact = doctor._allocator([])
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
        ("5", "OK", "5 s for another"),
        ("0", "OK", "none for another"),
        ("x", "PROBLEM", "`OVERLAP_WAIT_TIMEOUT_S` must be"),
    ],
)
def test_doctor_knows_how_long_a_wait_may_take(monkeypatch, text, status, said):
    monkeypatch.setenv(_settings.WAIT_TIMEOUT_VARIABLE, text)
    _settings.wait_timeout_s.cache_clear()
    try:
        fact = doctor._wait_limit([])
    finally:
        _settings.wait_timeout_s.cache_clear()
    assert fact.status == status
    assert fact.found.startswith(said)


@pytest.mark.parametrize(("version", "status"), [("0.11.1", "PROBLEM"), ("0.12.1", "note"), ("0.13.0", "PROBLEM")])
def test_doctor_judges_the_version_of_jax(monkeypatch, version, status):
    monkeypatch.setattr(doctor, "_version", lambda package: version if package in ("jax", "jaxlib") else None)
    assert doctor._jax([]).status == status


def test_doctor_sees_versions_that_differ(monkeypatch):
    versions = {"jax": "0.11.2", "jaxlib": "0.11.2", "jax-cuda13-plugin": "0.12.0"}
    monkeypatch.setattr(doctor, "_version", versions.get)
    fact = doctor._jax([])
    assert fact.status == "PROBLEM"
    assert "the versions differ" in fact.advice


def test_doctor_names_flags_that_break_fused_kernels(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_command_buffer_scheduling_mode=CONCURRENT")
    found = doctor._flags([])
    assert found.status == "PROBLEM" and "leave the flag out" in found.found
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_shard_autotuning=false")
    assert doctor._flags([]).status == "OK"
