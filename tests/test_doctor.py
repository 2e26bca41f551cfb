"""Tests `python -m overlap doctor`: which problems it finds, and what it prints about each."""

from __future__ import annotations

import inspect
import json
import os
import re

import pytest

import overlap
from overlap import _compat, _cuda, _settings
from overlap.cli import checks, doctor, facts, gpu_checks, main
from overlap.cli.facts import NOTE, OK, PROBLEM, Driver, Fact, Jax, Machine, Nccl
from tests.command import run_overlap


def test_doctor_on_a_machine_without_gpus(repository):
    """Runs the real command on a narrow terminal that can only show ASCII."""
    process = run_overlap(repository, "doctor", CUDA_VISIBLE_DEVICES="", PYTHONIOENCODING="ascii", COLUMNS="40")
    assert process.returncode == 0, process.stdout + process.stderr
    assert not process.stderr
    said = " ".join(process.stdout.split())
    for words in (
        "OK jax jax 0.1", "OK emulator all_gather_lhs_matmul", "note visible GPUs CUDA_VISIBLE_DEVICES='' hides",
        "can run emulated on the CPU.", "none is visible ? see CUDA_",
    ):  # fmt: skip
        assert words in said
    assert max(map(len, process.stdout.splitlines())) <= 40


def _machine(**answers: object) -> Machine:
    """Returns a machine with these properties. By default it has the installed jax, no GPU and no NCCL."""
    machine = Machine()
    at_hand = Jax(version="0.11.2", numpy="2.1", path="/site-packages/jax")
    machine.__dict__.update({"jax": at_hand, "driver": Driver(), "nccl": Nccl()} | answers)
    return machine


def _h200s(count: int, name: str = "NVIDIA H200", capability: tuple[int, int] = (9, 0), **more: object) -> Driver:
    return Driver((_cuda.Gpu(name, capability),) * count, **more)


def _nccl(version: tuple[int, int, int], *copies: str) -> Nccl:
    return Nccl(_cuda.NcclLibrary(version, "/x/libnccl.so.2", copies or ("/x/libnccl.so.2",)))


@pytest.fixture
def with_gpus(monkeypatch):
    """Sets up a machine with a driver and jax's plugin, whose versions fit."""
    monkeypatch.setattr(_cuda, "driver_version", lambda: "580.65.06")
    monkeypatch.setattr(_cuda, "jax_plugin", lambda: "xla_cuda13")
    monkeypatch.setattr(checks, "version_of", lambda package: "0.11.2" if package in ("jax", "jaxlib") else None)
    for variable in ("CUDA_VISIBLE_DEVICES", "JAX_PLATFORMS"):
        monkeypatch.delenv(variable, raising=False)


def _answers(monkeypatch, answer) -> None:
    """Replaces the answers of the child processes by those of `answer`."""
    for module in (checks, gpu_checks):
        monkeypatch.setattr(module, "ask", answer)


def test_doctor_on_gpus(monkeypatch, capsys, with_gpus):
    answers = {gpu_checks.JAX_DEVICES: (True, "gpu 8 NVIDIA H200"), checks.EMULATED_RUN: (True, "fine")}
    _answers(monkeypatch, lambda code, **keywords: answers.get(code, (True, "Open MPI v5.0.11")))
    assert doctor.run(machine=_machine(driver=_h200s(8), nccl=_nccl((2, 32, 3)))) == 0
    said = capsys.readouterr().out
    assert "8 × NVIDIA H200 (sm_90), driver 580.65.06" in said
    assert "PROBLEM" not in said
    assert "can run on the GPUs and emulated on the CPU." in said


def test_doctor_names_every_trouble(monkeypatch, capsys, with_gpus):
    copies = ("/a/libnccl.so.2", "/b/libnccl.so.2")
    machine = _machine(driver=_h200s(4, pairs=((0, 3),)), nccl=_nccl((2, 28, 9), *copies))
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/cuda/lib64")
    _answers(monkeypatch, lambda code, timeout_s=120, **keywords: (False, f"no answer within {timeout_s} s"))
    assert doctor.run(machine=machine) == 1
    said = " ".join(capsys.readouterr().out.split())
    for words in (
        "no answer within 120 s", "missing for 1 pairs of GPUs: 0→3", "several are loaded: /a/libnccl.so.2",
        "LD_LIBRARY_PATH=/opt/cuda/lib64 may bring in", "not possible yet, see peer access, GPUs, NCCL",
        "Wrong here: GPUs, peer access, emulator. ", "can run nowhere here",
    ):  # fmt: skip
        assert words in said, words


def test_gpus_that_do_not_reach_each_other_run_nothing(monkeypatch, capsys, with_gpus):
    answers = {gpu_checks.JAX_DEVICES: (True, "gpu 2 NVIDIA H200")}
    _answers(monkeypatch, lambda code, **keywords: answers.get(code, (True, "fine")))
    assert doctor.run(machine=_machine(driver=_h200s(2, pairs=((0, 1),))), as_json=True) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["can_run"] == ["emulated"] and "peer access" in found["problems"]
    assert "GPUs" not in found["problems"]


@pytest.mark.parametrize(("driver", "status"), [("580.65.06", PROBLEM), (None, NOTE)])
def test_doctor_where_there_is_a_driver_and_no_gpu(monkeypatch, driver, status):
    monkeypatch.setattr(_cuda, "driver_version", lambda: driver)
    assert gpu_checks.devices([], _machine()).status == status


@pytest.mark.parametrize(
    ("changed", "status", "said"),
    [({}, OK, "launch/mpirun.sh"), ({"MPI": NOTE}, NOTE, "see MPI"), ({"NCCL": NOTE}, NOTE, "see NCCL"),
     ({"jax": NOTE}, OK, ""), ({"jax": PROBLEM, "GPUs": NOTE}, NOTE, "see jax, GPUs")],
)  # fmt: skip
def test_doctor_on_a_process_for_each_gpu(changed, status, said):
    subjects = dict.fromkeys(("jax", "GPUs", "peer access", "NCCL", "MPI"), OK) | changed
    found = [Fact(subject, of_it, "") for subject, of_it in subjects.items()]
    fact = gpu_checks.one_process_per_gpu(found, _machine(driver=_h200s(2)))
    assert (fact.status, said in fact.found) == (status, True), fact


def test_doctor_notes_a_single_core(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    for allowed, status in (({3}, NOTE), ({3, 4}, OK)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, allowed=allowed: allowed)
        fact = checks.binding([], _machine())
        assert (fact.status, fact.found) == (status, f"{len(allowed)} of 8")


def test_doctor_when_the_driver_or_nccl_gives_no_answer(with_gpus):
    machine = _machine(driver=Driver(error="no answer within 60 s"), nccl=Nccl(error="ended by signal 11"))
    assert gpu_checks.devices([], machine).status == gpu_checks.nccl([], machine).status == PROBLEM


@pytest.mark.parametrize(
    ("version", "jax", "status"),
    [
        ((2, 28, 9), "0.11.2", NOTE),
        ((2, 28, 9), "0.12.0.1", PROBLEM),
        ((2, 31, 2), "0.12.1", NOTE),
        ((2, 32, 3), "0.12.1", OK),
    ],
)
def test_doctor_knows_which_nccl_this_jax_needs(version, jax, status):
    fact = gpu_checks.nccl([], _machine(driver=_h200s(2), nccl=_nccl(version), jax=Jax(version=jax)))
    assert fact.status == status
    assert ("psum" in fact.advice) == (status == PROBLEM)
    assert (">=2.32.3" in fact.advice) == (status != OK)


def test_the_nccl_that_a_jax_needs():
    for version, oldest in (("0.11.2", None), ("0.12.0", (2, 30)), ("0.12.0.1", (2, 30)), ("", None)):
        assert _compat.oldest_nccl_of_one_process(version) == oldest


def test_doctor_on_other_gpus(with_gpus):
    fact = gpu_checks.devices([], _machine(driver=_h200s(1, "NVIDIA A100-SXM4-80GB", (8, 0))))
    assert fact.status == NOTE
    assert "Hopper" in fact.advice


def test_doctor_survives_a_check_that_fails(monkeypatch, capsys):
    def broken(found: list[Fact], machine: Machine) -> Fact:
        raise OSError("no /proc here")

    monkeypatch.setattr(doctor, "CHECKS", {"CPU cores": broken, "wait limit": checks.wait_limit})
    assert doctor.run(machine=_machine()) == 1
    said = capsys.readouterr().out
    assert "the check itself failed: OSError('no /proc here')" in said and "OK       wait limit" in said


def test_doctor_asks_with_a_limit():
    assert facts.ask("import time; time.sleep(60)", timeout_s=1) == (False, "no answer within 1 s")
    works, answer = facts.ask("raise ValueError('so')", timeout_s=60)
    assert (works, answer) == (False, "ValueError: so")
    assert facts.ask("print('a'); print('b')", timeout_s=60) == (True, "b")
    works, answer = facts.ask("import os; os.abort()", timeout_s=60)
    assert (works, answer) == (False, "the process was ended by signal 6")


def test_doctor_for_programs(monkeypatch, capsys):
    monkeypatch.setattr(Machine, "jax", Jax(version="0.11.2"))
    monkeypatch.setattr(checks, "version_of", lambda package: None)
    _answers(monkeypatch, lambda code, **keywords: (True, "fine"))
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["version"] == overlap.__version__
    assert (found["can_run"], found["problems"]) == (["emulated"], [])
    by_subject = {fact["subject"]: fact for fact in found["facts"]}
    assert set(by_subject) == set(doctor.CHECKS)
    assert set(by_subject["jax"]) == {"subject", "status", "found", "advice"}
    assert by_subject["emulator"]["status"] == "OK"
    _answers(monkeypatch, lambda code, **keywords: (False, "broken → “so”"))
    assert main(["doctor", "--json"]) == 1
    text = capsys.readouterr().out
    assert text.isascii()
    found = json.loads(text)
    assert found["can_run"] == [] and "emulator" in found["problems"]


# --- Variables and versions -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "shown", "driver", "status", "said"),
    [
        ("7", 0, "580", PROBLEM, "CUDA shows 0 GPUs"),
        ("0,1x", 1, "580", PROBLEM, "CUDA shows 1 GPUs"),
        ("7", 0, None, NOTE, "there is no GPU here"),
        ("-1", 0, "580", NOTE, "hides all GPUs"),
        ("", 0, "580", NOTE, "hides all GPUs"),
        ("1,GPU-5", 2, "580", OK, "2 GPUs"),
        (None, 2, "580", OK, "is unset"),
    ],
)
def test_doctor_reads_which_gpus_are_visible(monkeypatch, given, shown, driver, status, said):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(_cuda, "driver_version", lambda: driver)
    if given is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    fact = gpu_checks.visible_devices([], _machine(driver=_h200s(shown)))
    assert (fact.status, said in fact.found) == (status, True), fact
    if "hides" in said:  # The line on GPUs points to this, and does not count as a problem.
        assert gpu_checks.devices([fact], _machine()).status == NOTE


@pytest.mark.parametrize(
    ("given", "works", "status", "said"),
    [
        ("", None, OK, "unset"),
        ("cpu", None, OK, "cpu"),
        ("cuda", True, OK, "cuda: jax starts so"),
        ("gpux", False, PROBLEM, "jax cannot start 'gpux': so"),
    ],
)
def test_doctor_reads_the_platforms(monkeypatch, given, works, status, said):
    monkeypatch.setenv("JAX_PLATFORMS", given)
    _answers(monkeypatch, lambda code, **keywords: (works, "so"))
    fact = checks.platforms([], _machine())
    assert (fact.status, fact.found.startswith(said)) == (status, True), fact


@pytest.mark.parametrize(
    ("allocator", "status", "said"),
    [
        (None, OK, "default: fused kernels run"),
        ("CUDA_ASYNC", OK, "cuda_async: fused"),
        ("platform", PROBLEM, "take cuda_async"),
        ("bfc", NOTE, "not measured"),
        ("arena", PROBLEM, "jax takes address, bfc"),
    ],
)
def test_doctor_knows_the_allocator(monkeypatch, allocator, status, said):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_ALLOCATOR", raising=False)
    if allocator is not None:
        monkeypatch.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", allocator)
    fact = gpu_checks.allocator([], _machine(driver=_h200s(2)))
    assert fact.status == status and said in fact.found + fact.advice


def test_doctor_knows_the_allocators_that_jax_takes():
    xla_client = pytest.importorskip("jaxlib.xla_client")
    source = inspect.getsource(xla_client.generate_pjrt_gpu_plugin_options)
    listed = re.search(r"allowed_allocators = \(([^)]*)\)", source)
    assert listed is not None
    assert {*gpu_checks.MEASURED_ALLOCATORS, *gpu_checks.OTHER_ALLOCATORS} == set(re.findall(r"'(\w+)'", listed[1]))


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
        ({"jax": "0.11.2", "jaxlib": "0.11.2"}, "ModuleNotFoundError: No module named 'numpy'", "'numpy>=2.1'"),
    ],
)
def test_doctor_says_how_to_mend_a_jax_that_cannot_be_imported(monkeypatch, installed, error, advice):
    monkeypatch.setattr(checks, "version_of", installed.get)
    machine = _machine(jax=Jax(error=error))
    fact = checks.jax([], machine)
    assert fact.status == PROBLEM and error in fact.found and advice in fact.advice, fact
    assert checks.emulator([fact], machine) == Fact("emulator", NOTE, "not tried: see Python and jax")


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
