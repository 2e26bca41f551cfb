"""`python -m overlap doctor`: which problems it finds, and what it says about each."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

import overlap
from overlap import _compat, _cuda, _settings
from overlap.cli import doctor, main
from overlap.cli.doctor import NOTE, OK, PROBLEM, Fact

FINE = {name: Fact(name, OK, "") for name in doctor.CHECKS}


def of_jax(version: str = "0.11.2", path: str = "/site-packages/jax") -> tuple[bool, str]:
    return True, json.dumps({"version": version, "numpy": "2.1", "path": path})


def of_driver(count: int, *pairs: tuple[int, int], name: str = "NVIDIA H200", sm: tuple[int, int] = (9, 0)):
    return True, json.dumps({"gpus": [(name, sm)] * count, "pairs": pairs})


def of_nccl(version: tuple[int, int, int], *copies: str) -> tuple[bool, str]:
    return True, json.dumps({"version": version, "path": "/x/libnccl.so.2", "copies": copies or ("/x/libnccl.so.2",)})


@pytest.fixture
def machine(monkeypatch):
    """A machine with two H200s, a driver and jax's plugin. Returns what child processes answer, by their code."""
    answers = {
        doctor.ASK_JAX: of_jax(),
        doctor.ASK_DRIVER: of_driver(2),
        doctor.ASK_NCCL: of_nccl((2, 32, 3)),
        doctor.ASK_JAX_DEVICES: (True, "gpu 2 NVIDIA H200"),
        doctor.ASK_MPI: (True, "Open MPI v5.0.11"),
        doctor.EMULATED_RUN: (True, "fine"),
    }
    monkeypatch.setattr(doctor, "ask", lambda code, **keywords: answers[code])
    monkeypatch.setattr(_cuda, "driver_version", lambda: "580.65.06")
    monkeypatch.setattr(_cuda, "jax_plugin", lambda: "xla_cuda13")
    monkeypatch.setattr(doctor, "version_of", dict.fromkeys(("jax", "jaxlib"), "0.11.2").get)
    for variable in ("CUDA_VISIBLE_DEVICES", "JAX_PLATFORMS", "XLA_FLAGS", "XLA_PYTHON_CLIENT_ALLOCATOR"):
        monkeypatch.delenv(variable, raising=False)
    _settings.wait_timeout_s.cache_clear()
    yield answers
    _settings.wait_timeout_s.cache_clear()


def test_doctor_on_a_machine_without_gpus(repository):
    """Runs the real command and all its checks on a narrow terminal that can only show ASCII."""
    changes = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(repository), "CUDA_VISIBLE_DEVICES": "",
               "PYTHONIOENCODING": "ascii", "COLUMNS": "40"}  # fmt: skip
    line = [sys.executable, "-m", "overlap", "doctor"]
    process = subprocess.run(line, env=os.environ | changes, capture_output=True, text=True, timeout=250, check=False)
    assert (process.returncode, process.stderr) == (0, ""), process.stdout
    said = " ".join(process.stdout.split())
    for words in (
        "OK jax jax 0.1", "OK emulator all_gather_lhs_matmul", "note GPUs none is visible; CUDA_VISIBLE_DEVICES=''",
        "can run emulated on the CPU.", "? the fused kernels run emulated",
    ):  # fmt: skip
        assert words in said, words
    assert max(map(len, process.stdout.splitlines())) <= 40


def test_doctor_on_gpus(machine, monkeypatch, capsys):
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert "2 × NVIDIA H200 (sm_90), driver 580.65.06" in said and "PROBLEM" not in said
    assert "can run on the GPUs and emulated on the CPU." in said
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["version"], found["can_run"], found["problems"]) == (overlap.__version__, ["gpus", "emulated"], [])
    assert [fact["subject"] for fact in found["facts"]] == list(doctor.CHECKS)
    assert set(found["facts"][0]) == {"subject", "status", "found", "advice"}
    machine.update(dict.fromkeys(machine, (False, "broken → “so”")))
    assert main(["doctor", "--json"]) == 1
    text = capsys.readouterr().out
    found = json.loads(text)
    assert text.isascii() and (found["can_run"], found["problems"]) == ([], ["jax", "GPUs", "NCCL"])
    monkeypatch.setattr(doctor, "CHECKS", {**doctor.CHECKS, "jax": lambda facts: 1 / 0})  # Other checks go on.
    assert main(["doctor", "--json"]) == 1
    assert "the check itself failed: ZeroDivisionError" in capsys.readouterr().out


BOTH = {"jax": "0.11.2", "jaxlib": "0.11.2"}
REINSTALL = "pip install --force-reinstall --no-deps 'jax==0.11.2' 'jaxlib==0.11.2'"


def on(code, answer):
    return {"answers": {code: answer}}


def nccl(version, jax, *copies):
    return on(doctor.ASK_NCCL, of_nccl(version, *copies)) | {"installed": {"jax": jax}}


def gpus(driver, visible=None):
    return on(doctor.ASK_DRIVER, driver) | ({} if visible is None else {"env": {"CUDA_VISIBLE_DEVICES": visible}})


def env(name, value):
    return {"env": {name: value}}


NOT_USED = on(doctor.ASK_JAX_DEVICES, (False, "Unknown backend gpux")) | {
    "env": {"JAX_PLATFORMS": "gpux", "LD_LIBRARY_PATH": "/opt/cuda/lib64"}
}


@pytest.mark.parametrize(
    ("check", "changes", "status", "said"),
    [
        ("GPUs", gpus(of_driver(2)), OK, ["2 × NVIDIA H200"]),
        ("GPUs", gpus(of_driver(2), "1,GPU-5"), OK, ["CUDA_VISIBLE_DEVICES='1,GPU-5'"]),
        ("GPUs", gpus(of_driver(1), "0,1x"), PROBLEM, ["1 × NVIDIA H200"]),
        ("GPUs", gpus(of_driver(0), "7"), PROBLEM, ["0 × "]),
        ("GPUs", gpus(of_driver(0)), PROBLEM, ["0 × "]),
        ("GPUs", gpus(of_driver(0), "-1"), NOTE, ["none is visible"]),
        ("GPUs", gpus(of_driver(0), ""), NOTE, ["none is visible"]),
        ("GPUs", gpus(of_driver(2, (0, 1))), PROBLEM, ["no peer access in 1 pairs: 0→1"]),
        ("GPUs", gpus(of_driver(1, name="NVIDIA A100-SXM4-80GB", sm=(8, 0))), NOTE, ["A100"]),
        ("GPUs", gpus((False, "no answer within 120 s")), PROBLEM, ["no answer within"]),
        ("GPUs", NOT_USED, PROBLEM, ["jax says: Unknown backend gpux", "JAX_PLATFORMS is gpux",
                                     "LD_LIBRARY_PATH=/opt/cuda/lib64 may bring in"]),
        ("GPUs", {"plugin": None}, PROBLEM, ["jax has no CUDA plugin"]),
        ("GPUs", env("JAX_PLATFORMS", "cpu"), NOTE, ["unset JAX_PLATFORMS=cpu"]),
        ("NCCL", nccl((2, 28, 9), "0.11.2"), NOTE, ["one process per GPU needs >= 2.32.3"]),
        ("NCCL", nccl((2, 30, 7), "0.12.0.1"), NOTE, ["one process per GPU needs >= 2.32.3"]),
        ("NCCL", nccl((2, 28, 9), "0.12.0.1"), PROBLEM, ["psum", ">=2.32.3"]),
        ("NCCL", nccl((2, 31, 2), "0.12.1"), NOTE, [">=2.32.3"]),
        ("NCCL", nccl((2, 32, 3), "0.12.1"), OK, []),
        ("NCCL", nccl((2, 32, 3), "0.12.1", "/a/libnccl.so.2", "/b/libnccl.so.2"), NOTE,
         ["several are loaded: /a/libnccl.so.2, /b"]),
        ("settings", env("XLA_PYTHON_CLIENT_ALLOCATOR", "CUDA_ASYNC"), OK, []),
        ("settings", env("XLA_PYTHON_CLIENT_ALLOCATOR", "platform"), NOTE, ["platform works in one process only"]),
        ("settings", env(_settings.WAIT_TIMEOUT_VARIABLE, "5"), OK, ["OVERLAP_WAIT_TIMEOUT_S=5"]),
        ("settings", env(_settings.WAIT_TIMEOUT_VARIABLE, "x"), PROBLEM, ["`OVERLAP_WAIT_TIMEOUT_S` must be"]),
        ("settings", env("XLA_FLAGS", "--xla_gpu_command_buffer_scheduling_mode=CONCURRENT"), PROBLEM,
         ["leave the flag out"]),
        ("settings", env("XLA_FLAGS", "--xla_gpu_shard_autotuning=false"), OK, ["XLA_FLAGS=--xla"]),
        *(("jax", on(doctor.ASK_JAX, of_jax(version)) | {"installed": {"jax": version}}, status, said)
          for version, status, said in (
              ("0.10.2", PROBLEM, ["jax 0.10.2 is too old: overlap needs >= 0.11.2 and < 0.13"]),
              ("0.11.2", OK, []), ("0.12.1", NOTE, ["not a tested version"]), ("0.13.0", PROBLEM, ["is too new"]))),
        ("jax", {"installed": {"jax": "0.11.2", "jax-cuda13-plugin": "0.12.0"}}, PROBLEM, ["the versions differ"]),
        ("jax", on(doctor.ASK_JAX, of_jax("0.12.0.1"))
         | {"installed": {"jax": "0.12.0.1", "jax-cuda13-plugin": "0.12.0.1", "nvidia-nvjitlink": "13.0"}},
         OK, ["assembled by nvJitLink, and the largest tiles may spill"]),
        ("jax", {"installed": {"jax": "0.11.2", "jax-cuda13-plugin": "0.11.2", "nvidia-nvjitlink": "13.0"}},
         OK, ["assembled by ptxas"]),
        ("jax", on(doctor.ASK_JAX, of_jax("0.12.0.1"))
         | {"installed": {"jax": "0.12.0.1", "jax-cuda13-plugin": "0.12.0.1"}}, OK, ["assembled by ptxas"]),
        # The imported version counts, not the installed one.
        ("jax", on(doctor.ASK_JAX, of_jax("0.10.2", "/elsewhere/jax")), PROBLEM,
         ["`import jax` gives /elsewhere/jax, jax 0.10.2", "PYTHONPATH"]),
        ("jax", on(doctor.ASK_JAX, (False, "No module named 'jax'")) | {"installed": {}}, PROBLEM,
         ["No module named 'jax'", "pip install 'overlap[cuda13]'"]),
        ("jax", on(doctor.ASK_JAX, (False, "jaxlib is not compatible")) | {"installed": BOTH}, PROBLEM, [REINSTALL]),
        ("MPI", on(doctor.ASK_MPI, (False, "No module named 'mpi4py'")), NOTE, ["No module named 'mpi4py'"]),
        ("MPI", {"launcher": "mpirun (Open MPI) 5.0.11"}, OK, ["Open MPI v5.0.11"]),
        ("MPI", {"launcher": ""}, OK, []),
        ("MPI", on(doctor.ASK_MPI, (True, "MPICH Version: 5.0.2")) | {"launcher": "HYDRA build details:"}, OK, []),
        ("MPI", on(doctor.ASK_MPI, (True, "Intel(R) MPI Library 2021")) | {"launcher": "HYDRA build"}, OK, []),
        ("MPI", on(doctor.ASK_MPI, (True, "MPICH Version: 5.0.2")) | {"launcher": "mpirun (Open MPI) 5.0.11"},
         PROBLEM, ["MPICH Version: 5.0.2", "is Open MPI's", "uninstall one"]),
        ("MPI", {"launcher": "HYDRA build details:"}, PROBLEM, ["Open MPI v5.0.11", "is MPICH's", "MPIRUN"]),
    ],
)  # fmt: skip
def test_what_each_check_finds(machine, monkeypatch, check, changes, status, said):
    machine.update(changes.get("answers", {}))
    for variable, value in changes.get("env", {}).items():
        monkeypatch.setenv(variable, value)
    if "installed" in changes:
        monkeypatch.setattr(doctor, "version_of", changes["installed"].get)
    monkeypatch.setattr(doctor, "launcher_version", lambda mpirun: changes.get("launcher", ""))
    monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/bin/{name}")
    if "plugin" in changes:
        monkeypatch.setattr(_cuda, "jax_plugin", lambda: None)
    fact = doctor.CHECKS[check](FINE)
    assert fact.status == status, fact
    assert not [words for words in said if words not in f"{fact.found}\n{fact.advice}"], fact
    assert bool(fact.advice) == (status == NOTE or (status == PROBLEM and check != "settings")), fact
    if status == PROBLEM:
        emulator = doctor.CHECKS["emulator"]({**FINE, check: fact})
        not_tried = Fact("emulator", NOTE, f"not tried: see {check}")
        assert (emulator == not_tried) == (check in ("jax", "settings"))


def test_doctor_asks_with_a_limit():
    for version, oldest in (("0.11.2", None), ("0.12.0", (2, 30)), ("0.12.0.1", (2, 30)), ("", None)):
        assert _compat.oldest_nccl_of_one_process(version) == oldest
    assert doctor.ask("import time; time.sleep(60)", timeout_s=1) == (False, "no answer within 1 s")
    assert doctor.ask("raise ValueError('so')", timeout_s=60) == (False, "ValueError: so")
    assert doctor.ask("print('a'); print('b')", timeout_s=60) == (True, "b")
    assert doctor.ask("import os; os.abort()", timeout_s=60) == (False, "the process was ended by signal 6")
    assert doctor.version_of("no-such-package") is None
    assert doctor.launcher_version(sys.executable).startswith("Python 3")
    assert doctor.launcher_version("/no/such/mpirun") == ""
