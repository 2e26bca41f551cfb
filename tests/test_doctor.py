"""Tests `python -m overlap doctor`: which problems it finds, and what it prints about each."""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil

import pytest

import overlap
from overlap import _compat, _cuda
from overlap.cli import checks, doctor, facts, gpu_checks, main
from overlap.cli import machine as machines
from overlap.cli.facts import NOTE, OK, PROBLEM, Fact
from overlap.cli.machine import Driver, Jax, Machine, Nccl
from tests.command import run_overlap


def test_doctor_on_a_machine_without_gpus(repository):
    """Runs the real command on a narrow terminal that can only show ASCII."""
    process = run_overlap(repository, "doctor", CUDA_VISIBLE_DEVICES="", PYTHONIOENCODING="ascii", COLUMNS="40")
    assert process.returncode == 0, process.stdout + process.stderr
    assert not process.stderr
    assert re.search(r"^OK +jax\n  jax \d", process.stdout, re.MULTILINE)
    assert re.search(r"^OK +emulator\n  all_gather_lhs_matmul", process.stdout, re.MULTILINE)
    assert re.search(r"^note +visible GPUs\n  CUDA_VISIBLE_DEVICES='' hides all", process.stdout, re.MULTILINE)
    assert "can run emulated on the CPU." in " ".join(process.stdout.split())
    assert "  -> the fused kernels run" in process.stdout  # → is not ASCII.
    assert max(map(len, process.stdout.splitlines())) <= 40


def _machine(**answers: object) -> Machine:
    """Returns a machine with these properties. By default it has the installed jax, no GPU and no NCCL."""
    machine = Machine()
    at_hand = Jax(version="0.11.2", numpy="2.1", path="/site-packages/jax")
    machine.__dict__.update({"jax": at_hand, "driver": Driver(), "nccl": Nccl()} | answers)
    return machine


def _h200s(count: int, name: str = "NVIDIA H200", capability: tuple[int, int] = (9, 0), **more: object) -> Driver:
    return Driver((_cuda.Gpu(name, capability),) * count, count, **more)


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
    _answers(monkeypatch, lambda code, timeout_s, **keywords: (False, f"no answer within {timeout_s} s"))
    assert doctor.run(machine=machine) == 1
    said = " ".join(capsys.readouterr().out.split())
    for words in (
        "no answer within 120 s", "missing for 1 pairs of GPUs: 0→3", "several are loaded: /a/libnccl.so.2",
        "LD_LIBRARY_PATH=/opt/cuda/lib64 may bring in", "not possible yet, see GPUs, peer access, NCCL",
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


def test_gpus_are_counted_without_the_variable_that_hides_some(monkeypatch):
    def asked(code, timeout_s, **environment):
        shown = 4 if environment == {"CUDA_VISIBLE_DEVICES": None} else 2
        return True, {"gpus": [["NVIDIA H200", [9, 0]]] * shown, "pairs": [[0, 1]]}

    monkeypatch.setattr(machines, "_asked", asked)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert Machine().driver == Driver(_h200s(2).gpus, 4, ((0, 1),))


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
    assert (works, answer[:38]) == (False, "the process was ended by signal 6 (Abo")


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


# --- Invalid variables and libraries ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "there", "status", "said"),
    [
        ("7", 2, PROBLEM, "there is no GPU 7; CUDA shows 0 of 2 GPUs"),
        ("7", 0, NOTE, "there is no GPU here"),
        ("abc", 0, PROBLEM, "'abc' is neither the number of a GPU nor a UUID"),
        ("0,1x", 2, PROBLEM, "'1x' is neither the number"),
        ("0,0", 0, PROBLEM, "'0' is listed twice"),
        ("0,,1", 2, PROBLEM, "'' is neither"),
        ("0,-1", 2, PROBLEM, "'-1' is neither"),
        ("-1", 2, NOTE, "hides all GPUs (2 are here)"),
        ("", 2, NOTE, "hides all GPUs (2 are here)"),
        ("1,GPU-5", 2, OK, "0 of 2"),
        (None, 2, OK, "is unset"),
    ],
)
def test_doctor_reads_which_gpus_are_visible(monkeypatch, given, there, status, said):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if given is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    fact = gpu_checks.visible_devices([], _machine(driver=Driver(in_all=there)))
    assert (fact.status, said in fact.found) == (status, True), fact
    # The line on GPUs then points to this problem, and does not count as a second one.
    if there:
        assert gpu_checks.devices([fact], _machine(driver=Driver(in_all=there))).status == NOTE


@pytest.mark.parametrize(
    ("given", "works", "status", "said"),
    [
        ("", None, OK, "unset"),
        ("cpu", None, OK, "cpu"),
        ("cuda", True, OK, "cuda: jax starts so"),
        ("gpux", False, PROBLEM, "jax cannot start 'gpux': so"),
        ("cuda", False, PROBLEM, "jax cannot start 'cuda' (jax has no CUDA plugin here): so"),
    ],
)
def test_doctor_reads_the_platforms(monkeypatch, given, works, status, said):
    monkeypatch.setenv("JAX_PLATFORMS", given)
    monkeypatch.setattr(_cuda, "jax_plugin", lambda: None)
    _answers(monkeypatch, lambda code, **keywords: (works, "so"))
    fact = checks.platforms([], _machine())
    assert (fact.status, fact.found.startswith(said)) == (status, True), fact


@pytest.fixture(scope="module")
def fakes(tmp_path_factory):
    """Makes folders with files named libnccl.so.2 that are not NCCL."""
    folder = tmp_path_factory.mktemp("fakes")
    for name in ("empty", "text", "other"):
        (folder / name).mkdir()
    (folder / "empty/libnccl.so.2").touch()
    (folder / "text/libnccl.so.2").write_text("not a library, but longer than the header of one: " * 3)
    maps = pathlib.Path("/proc/self/maps").read_text()
    (maths,) = {line.split()[-1] for line in maps.splitlines() if "libm.so" in line or "/libm-" in line}
    shutil.copy(maths, folder / "other/libnccl.so.2")
    return folder


@pytest.mark.parametrize(
    ("variable", "kind", "reason"),
    [
        ("LD_LIBRARY_PATH", "empty", "file too short"),
        ("LD_LIBRARY_PATH", "text", "invalid ELF header"),
        ("LD_LIBRARY_PATH", "other", "it has no ncclGetVersion"),
        ("LD_PRELOAD", "text", "invalid ELF header"),
        ("LD_PRELOAD", "other", "it has no ncclGetVersion"),
    ],
)
def test_doctor_names_a_library_that_is_no_nccl(monkeypatch, fakes, variable, kind, reason):
    path = fakes / kind / "libnccl.so.2"
    monkeypatch.setenv(variable, str(path.parent if variable == "LD_LIBRARY_PATH" else path))
    machine = Machine()
    machine.__dict__["driver"] = Driver()
    fact = gpu_checks.nccl([], machine)
    monkeypatch.delenv(variable)
    there = f"{path} (from {variable}) is no NCCL: {reason}"
    assert there in fact.found and variable in os.environ | {variable: ""}
    assert fact.status == (NOTE if machine.nccl.library else PROBLEM)
    # It is no problem if a valid library is used anyway.
    machine.__dict__["nccl"] = Nccl(_nccl((2, 30, 7)).library, machine.nccl.fakes)
    fact = gpu_checks.nccl([], machine)
    assert fact.status == NOTE and there in fact.found and "NCCL 2.30.7" in fact.found
