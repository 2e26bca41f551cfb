"""`python -m overlap`: the demo end to end, emulated, and the doctor."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import jax
import numpy as np
import pytest

import overlap
from overlap import _compat, _cuda
from overlap.cli import demo, doctor, main, measure, picture, spans
from overlap.emulation import Event

pytest.importorskip("rich", reason="rich is not installed (extra `cli`)")
pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra `cli`)")


def _overlap(repository: pathlib.Path, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "overlap", *map(str, arguments)]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(repository), "COLUMNS": "140"} | environment
    return subprocess.run(
        command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=250, check=False
    )


# --- demo -------------------------------------------------------------------------------------------------------------


def test_demo_runs_emulated_and_draws(repository, tmp_path):
    out = tmp_path / "picture.png"
    process = _overlap(repository, "demo", "--out", out)
    assert process.returncode == 0, process.stderr
    errors = {name: float(error) for name, error in re.findall(r"(fused|xla)\s.*?(\d\.\d+e-\d\d)", process.stdout)}
    assert set(errors) == {"fused", "xla"}, process.stdout
    assert 0 < errors["fused"] <= 2 * errors["xla"] < 0.01
    assert "4 × emulated CPU devices" in process.stdout
    assert "meaningless" in process.stdout
    assert str(out) in process.stdout.replace("\n", "")
    assert out.read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == [out]


def test_demo_on_another_number_of_devices(repository, tmp_path):
    process = _overlap(repository, "demo", "--devices", "2", "--out", tmp_path / "two.png")
    assert process.returncode == 0, process.stderr
    assert "2 × emulated CPU devices" in process.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--devices", "0"], "--devices must be at least 1"),
        (["--out", "/nowhere/x.png"], "there is no folder /nowhere"),
    ],
)
def test_demo_says_what_is_wrong_with_its_arguments(repository, tmp_path, arguments, said):
    process = _overlap(repository, "demo", *arguments)
    assert process.returncode == 2
    assert said in process.stderr
    assert "Traceback" not in process.stderr


def _xla(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    return overlap.all_gather_lhs_matmul(lhs, rhs, measure.AXIS, implementation="xla")


def test_loop_program_runs_every_iteration():
    """Three runs, each with an element of the one before in its operand, as NumPy does it."""
    mesh = demo._mesh(2)
    lhs, rhs = measure.make_inputs(mesh, 8, 16, 8)
    out = measure.program(_xla, mesh)(lhs, rhs)
    looped = np.asarray(measure.loop_program(_xla, mesh, 3)(lhs, rhs, out), np.float32)
    shards = list(np.asarray(lhs, np.float32).reshape(2, 8, 16))
    expected = np.asarray(out, np.float32)
    for _ in range(3):
        for device in range(2):
            shards[device][0, 0] = np.clip(expected[0, device * 8], -1, 1)
        expected = (np.concatenate(shards) @ np.asarray(rhs, np.float32)).astype(np.float16).astype(np.float32)
    np.testing.assert_allclose(looped, expected, atol=2e-2)
    assert np.abs(looped - np.asarray(out, np.float32)).max() > 0.1  # It does not return its first argument.


def _on_gpus(monkeypatch, fused: measure.Call) -> list[str]:
    """Runs what the demo does on GPUs, on four CPU devices; returns the pictures that it asked for."""
    pictures: list[str] = []
    monkeypatch.setattr(demo, "_ON_GPUS", demo._Problem(32, 16, 8, overlap.Config()))
    monkeypatch.setattr(demo, "_methods", lambda problem: {"fused": fused, "xla": _xla})
    monkeypatch.setattr(demo, "_why_not_gpus", lambda: None)
    monkeypatch.setattr(measure, "_WARM_UP_S", 0.0)
    monkeypatch.setattr(demo, "_picture_by_emulation", lambda devices, out, step: pictures.append(f"{devices}: {out}"))
    return pictures


def test_demo_as_on_gpus(monkeypatch, capsys):
    pictures = _on_gpus(monkeypatch, _xla)
    assert demo.run(pathlib.Path("x.png"), devices=4) == 0
    said = capsys.readouterr().out
    assert re.search(r"xla .* 1\.00 ", said)
    assert re.search(r"roof .* 1\.000 ", said)
    assert pictures == ["4: x.png"]


def test_demo_reports_a_wrong_result(monkeypatch, capsys):
    pictures = _on_gpus(monkeypatch, lambda lhs, rhs: _xla(lhs, rhs) * 1.01)
    assert demo.run(pathlib.Path("x.png"), devices=4) == 1
    assert "FAILED" in capsys.readouterr().out
    assert not pictures


def test_spans_name_the_shards():
    def event(kind: str, thread: str, start: int, end: int, target: str = "", peer: int | None = None) -> Event:
        return Event(2, 1, thread, kind, "", target, peer, start, end, 0, "")

    events = [
        event("remote_copy", "wg2.warp1", 1, 5, "slots_smem[0]", peer=3),
        event("wgmma", "wg0", 2, 3), event("wgmma", "wg0", 4, 6),
        event("copy", "wg0", 7, 9, "output 0[640:704, 0:64] of device 2 (gmem)"),
        event("copy", "wg0", 8, 9, "output 0[640:704, 64:128] of device 2 (gmem)"),
        event("copy", "wg2.warp1", 6, 8, "output 1[0, 0:16, 0:256] of device 2 (gmem)"),
    ]  # fmt: skip
    assert sorted(spans.spans_of(events, m_shard=256), key=lambda span: span.lane) == [
        spans.Span(2, 1, "multiplies", 2, 2, 7),
        spans.Span(2, 1, "receives", 3, 1, 5),
        spans.Span(3, 1, "sends", 2, 1, 5),
    ]


def test_demo_without_rich(monkeypatch, capsys):
    find_spec = doctor.importlib.util.find_spec
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None if name == "rich" else find_spec(name))
    assert main(["demo"]) == 1
    assert "demo needs rich: pip install 'overlap[cli]'" in capsys.readouterr().err


def test_a_failed_write_leaves_nothing(tmp_path):
    def write(temporary: str) -> None:
        pathlib.Path(temporary).write_text("half")
        raise OSError("disk full")

    (tmp_path / "kept.png").write_text("old")
    with pytest.raises(OSError, match="disk full"):
        picture.write_whole(tmp_path / "kept.png", write)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


# --- doctor -----------------------------------------------------------------------------------------------------------


def test_doctor_on_a_machine_without_gpus(repository):
    process = _overlap(repository, "doctor", CUDA_VISIBLE_DEVICES="")
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
