"""Tests `python -m overlap doctor`: which problems it finds, and what it prints about each."""

from __future__ import annotations

import json

import pytest

import overlap
from overlap import _compat, _cuda, _settings
from overlap.cli import doctor, main
from overlap.cli.doctor import NOTE, OK, PROBLEM, Fact
from tests.tools.command import run_overlap

FINE = {name: Fact(name, OK, "") for name in doctor.CHECKS}
JAX = json.dumps({"version": "0.11.2", "numpy": "2.1", "path": "/site-packages/jax"})


def _driver(count: int, *pairs: tuple[int, int], name: str = "NVIDIA H200", sm: tuple[int, int] = (9, 0)) -> str:
    return json.dumps({"gpus": [(name, sm)] * count, "pairs": pairs})


def _nccl(version: tuple[int, int, int], *copies: str) -> str:
    return json.dumps({"version": version, "path": "/x/libnccl.so.2", "copies": copies or ("/x/libnccl.so.2",)})


@pytest.fixture
def machine(monkeypatch):
    """A machine with two H200s, a driver and jax's plugin. Returns what child processes answer, by their code."""
    answers = {
        doctor.ASK_JAX: (True, JAX),
        doctor.ASK_DRIVER: (True, _driver(2)),
        doctor.ASK_NCCL: (True, _nccl((2, 32, 3))),
        doctor.ASK_JAX_DEVICES: (True, "gpu 2 NVIDIA H200"),
        doctor.ASK_MPI: (True, "Open MPI v5.0.11"),
        doctor.EMULATED_RUN: (True, "fine"),
    }
    monkeypatch.setattr(doctor, "ask", lambda code, **keywords: answers[code])
    monkeypatch.setattr(_cuda, "driver_version", lambda: "580.65.06")
    monkeypatch.setattr(_cuda, "jax_plugin", lambda: "xla_cuda13")
    monkeypatch.setattr(doctor, "version_of", lambda package: "0.11.2" if package in ("jax", "jaxlib") else None)
    for variable in ("CUDA_VISIBLE_DEVICES", "JAX_PLATFORMS", "XLA_FLAGS", "XLA_PYTHON_CLIENT_ALLOCATOR"):
        monkeypatch.delenv(variable, raising=False)
    return answers


def test_doctor_on_a_machine_without_gpus(repository):
    """Runs the real command on a narrow terminal that can only show ASCII."""
    process = run_overlap(repository, "doctor", CUDA_VISIBLE_DEVICES="", PYTHONIOENCODING="ascii", COLUMNS="40")
    assert process.returncode == 0, process.stdout + process.stderr
    assert not process.stderr
    said = " ".join(process.stdout.split())
    for words in (
        "OK jax jax 0.1", "OK emulator all_gather_lhs_matmul", "note GPUs none is visible; CUDA_VISIBLE_DEVICES=''",
        "can run emulated on the CPU.", "? the fused kernels run emulated",
    ):  # fmt: skip
        assert words in said, words
    assert max(map(len, process.stdout.splitlines())) <= 40


def test_doctor_on_gpus(machine, capsys):
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert "2 × NVIDIA H200 (sm_90), driver 580.65.06" in said and "PROBLEM" not in said
    assert "can run on the GPUs and emulated on the CPU." in said


def test_doctor_for_programs(machine, monkeypatch, capsys):
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["version"] == overlap.__version__
    assert (found["can_run"], found["problems"]) == (["gpus", "emulated"], [])
    assert [fact["subject"] for fact in found["facts"]] == list(doctor.CHECKS)
    assert set(found["facts"][0]) == {"subject", "status", "found", "advice"}
    machine.update(dict.fromkeys(machine, (False, "broken → “so”")))
    assert main(["doctor", "--json"]) == 1
    text = capsys.readouterr().out
    assert text.isascii()
    found = json.loads(text)
    assert (found["can_run"], found["problems"]) == ([], ["jax", "GPUs", "NCCL"])
    monkeypatch.setattr(doctor, "CHECKS", {**doctor.CHECKS, "jax": lambda facts: 1 / 0})  # Other checks go on.
    assert main(["doctor", "--json"]) == 1
    assert "the check itself failed: ZeroDivisionError" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("driver", "visible", "status", "said"),
    [
        (_driver(2), None, OK, "2 × NVIDIA H200"),
        (_driver(2), "1,GPU-5", OK, "CUDA_VISIBLE_DEVICES='1,GPU-5'"),
        (_driver(1), "0,1x", PROBLEM, "1 × NVIDIA H200"),
        (_driver(0), "7", PROBLEM, "0 × "),
        (_driver(0), None, PROBLEM, "0 × "),
        (_driver(0), "-1", NOTE, "none is visible"),
        (_driver(0), "", NOTE, "none is visible"),
        (_driver(2, (0, 1)), None, PROBLEM, "no peer access in 1 pairs: 0→1"),
        (_driver(1, name="NVIDIA A100-SXM4-80GB", sm=(8, 0)), None, NOTE, "A100"),
        (None, None, PROBLEM, "no answer within"),
    ],
)
def test_doctor_on_visible_gpus(machine, monkeypatch, driver, visible, status, said):
    machine[doctor.ASK_DRIVER] = (False, "no answer within 120 s") if driver is None else (True, driver)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    fact = doctor.CHECKS["GPUs"](FINE)
    assert (fact.status, said in fact.found) == (status, True), fact


def test_doctor_on_gpus_that_jax_does_not_use(machine, monkeypatch):
    machine[doctor.ASK_JAX_DEVICES] = False, "Unknown backend gpux"
    monkeypatch.setenv("JAX_PLATFORMS", "gpux")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/cuda/lib64")
    fact = doctor.CHECKS["GPUs"](FINE)
    assert fact.status == PROBLEM and "jax says: Unknown backend gpux" in fact.found
    assert "JAX_PLATFORMS is gpux" in fact.advice and "LD_LIBRARY_PATH=/opt/cuda/lib64 may bring in" in fact.advice
    monkeypatch.setattr(_cuda, "jax_plugin", lambda: None)
    assert "jax has no CUDA plugin" in doctor.CHECKS["GPUs"](FINE).advice


@pytest.mark.parametrize(
    ("version", "jax", "status"),
    [
        ((2, 28, 9), "0.11.2", NOTE),
        ((2, 28, 9), "0.12.0.1", PROBLEM),
        ((2, 31, 2), "0.12.1", NOTE),
        ((2, 32, 3), "0.12.1", OK),
    ],
)
def test_doctor_knows_which_nccl_this_jax_needs(machine, monkeypatch, version, jax, status):
    monkeypatch.setattr(doctor, "version_of", lambda package: jax)
    machine[doctor.ASK_NCCL] = True, _nccl(version)
    fact = doctor.CHECKS["NCCL"](FINE)
    assert fact.status == status
    assert ("psum" in fact.advice) == (status == PROBLEM)
    assert (">=2.32.3" in fact.advice) == (status != OK)
    machine[doctor.ASK_NCCL] = True, _nccl(version, "/a/libnccl.so.2", "/b/libnccl.so.2")
    assert "several are loaded: /a/libnccl.so.2" in doctor.CHECKS["NCCL"](FINE).found


def test_the_nccl_that_a_jax_needs():
    for version, oldest in (("0.11.2", None), ("0.12.0", (2, 30)), ("0.12.0.1", (2, 30)), ("", None)):
        assert _compat.oldest_nccl_of_one_process(version) == oldest


def test_doctor_asks_with_a_limit():
    assert doctor.ask("import time; time.sleep(60)", timeout_s=1) == (False, "no answer within 1 s")
    assert doctor.ask("raise ValueError('so')", timeout_s=60) == (False, "ValueError: so")
    assert doctor.ask("print('a'); print('b')", timeout_s=60) == (True, "b")
    assert doctor.ask("import os; os.abort()", timeout_s=60) == (False, "the process was ended by signal 6")


@pytest.mark.parametrize(
    ("variable", "value", "status", "said"),
    [
        ("XLA_PYTHON_CLIENT_ALLOCATOR", "CUDA_ASYNC", OK, ""),
        ("XLA_PYTHON_CLIENT_ALLOCATOR", "platform", NOTE, "platform works in one process only"),
        (_settings.WAIT_TIMEOUT_VARIABLE, "5", OK, "OVERLAP_WAIT_TIMEOUT_S=5"),
        (_settings.WAIT_TIMEOUT_VARIABLE, "x", PROBLEM, "`OVERLAP_WAIT_TIMEOUT_S` must be"),
        ("XLA_FLAGS", "--xla_gpu_command_buffer_scheduling_mode=CONCURRENT", PROBLEM, "leave the flag out"),
        ("XLA_FLAGS", "--xla_gpu_shard_autotuning=false", OK, "XLA_FLAGS=--xla"),
    ],
)
def test_doctor_reads_the_settings(machine, monkeypatch, variable, value, status, said):
    monkeypatch.setenv(variable, value)
    _settings.wait_timeout_s.cache_clear()
    try:
        fact = doctor.CHECKS["settings"](FINE)
    finally:
        _settings.wait_timeout_s.cache_clear()
    assert (fact.status, said in fact.found + fact.advice) == (status, True), fact


@pytest.mark.parametrize(
    ("version", "status", "said"),
    [
        ("0.10.2", PROBLEM, "jax 0.10.2 is too old: overlap needs >= 0.11.2 and < 0.13"),
        ("0.11.2", OK, ""),
        ("0.12.1", NOTE, "not a tested version"),
        ("0.13.0", PROBLEM, "is too new"),
    ],
)
def test_doctor_judges_the_version_of_jax(machine, monkeypatch, version, status, said):
    monkeypatch.setattr(doctor, "version_of", lambda package: version if package in ("jax", "jaxlib") else None)
    machine[doctor.ASK_JAX] = True, json.dumps({"version": version, "numpy": "2.1", "path": ""})
    fact = doctor.CHECKS["jax"](FINE)
    assert (fact.status, said in fact.advice) == (status, True), fact


def test_doctor_sees_versions_that_differ(machine, monkeypatch):
    monkeypatch.setattr(doctor, "version_of", {"jax": "0.11.2", "jax-cuda13-plugin": "0.12.0"}.get)
    assert "the versions differ" in doctor.CHECKS["jax"](FINE).advice
    # The imported version counts, not the installed one.
    machine[doctor.ASK_JAX] = True, json.dumps({"version": "0.10.2", "numpy": "2.1", "path": "/elsewhere/jax"})
    fact = doctor.CHECKS["jax"](FINE)
    assert fact.status == PROBLEM
    assert "`import jax` gives /elsewhere/jax, jax 0.10.2" in fact.found and "PYTHONPATH" in fact.advice


@pytest.mark.parametrize(
    ("installed", "error", "advice"),
    [
        ({}, "ModuleNotFoundError: No module named 'jax'", "pip install 'overlap[cuda13]'"),
        (
            {"jax": "0.11.2", "jaxlib": "0.11.2"},
            "RuntimeError: jaxlib version is not compatible",
            "pip install --force-reinstall --no-deps 'jax==0.11.2' 'jaxlib==0.11.2'",
        ),
    ],
)
def test_doctor_says_how_to_repair_a_jax_that_cannot_be_imported(machine, monkeypatch, installed, error, advice):
    monkeypatch.setattr(doctor, "version_of", installed.get)
    machine[doctor.ASK_JAX] = False, error
    fact = doctor.CHECKS["jax"](FINE)
    assert fact.status == PROBLEM and error in fact.found and advice in fact.advice, fact
    assert doctor.CHECKS["emulator"]({**FINE, "jax": fact}) == Fact("emulator", NOTE, "not tried: see jax")
