"""`python -m overlap`: its exit statuses, and the emulated demo from end to end."""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import os
import pathlib
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Callable

import jax
import numpy as np
import pytest
from rich.console import Console

import overlap
from overlap.choice.problem import Problem
from overlap.cli import arguments, demo, doctor, ending, main, picture, spans, tables
from overlap.kernels.target import emulating
from overlap.tuning.operations import call_operation
from overlap.tuning.programs import Call
from tests.command import run_overlap

pytest.importorskip("rich", reason="rich is not installed (extra `cli`)")
pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra `cli`)")


# --- demo -------------------------------------------------------------------------------------------------------------


def test_demo_runs_emulated_and_draws(repository, tmp_path):
    out = tmp_path / "picture.png"
    process = run_overlap(repository, "demo", "--out", out)
    assert process.returncode == 0, process.stderr
    errors = [(name, float(error)) for name, error in re.findall(r"(fused|xla)\s.*?(\d\.\d+e-\d\d)", process.stdout)]
    assert [name for name, _ in errors] == ["fused", "xla"] * 2, process.stdout
    for (_, fused), (_, xla) in zip(errors[::2], errors[1::2], strict=True):
        assert 0 < fused <= 2 * xla < 0.01
    assert "4 × emulated CPU devices" in process.stdout
    assert "meaningless" in process.stdout
    assert str(out) in process.stdout.replace("\n", "")
    assert out.read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.one_jax
def test_demo_on_another_number_of_devices(repository, tmp_path):
    process = run_overlap(repository, "demo", "--devices", "2", "--out", tmp_path / "two.png")
    assert process.returncode == 0, process.stderr
    assert "2 × emulated CPU devices" in process.stdout


@pytest.fixture
def places(tmp_path):
    """Invalid values of `--out`, with the words that describe each."""
    (tmp_path / "old.png").touch(mode=0o444)
    (tmp_path / "file").touch()
    yield {"READ-ONLY": tmp_path / "old.png", "FOLDER": tmp_path, "IN-A-FILE": tmp_path / "file/x.png",
           "NOWHERE": tmp_path / "no/x.png", "LONG": tmp_path / ("x" * 300)}  # fmt: skip
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "old.png"]


@pytest.mark.one_jax
@pytest.mark.parametrize(
    ("line", "said"),
    [
        *((f"demo --devices {text}", "a whole number, at least 1") for text in ("0", "-1", "nan", "1.5", "9" * 5000)),
        ("demo --out FOLDER", "must name a file, got the folder"),
        ("demo --out NOWHERE", "there is no folder"),
        ("demo --out IN-A-FILE", "there is no folder"),
        ("demo --out READ-ONLY", "is read-only"),
        ("demo --out LONG", "File name too long"),
        ("demo --out /dev/full", "a device or a pipe"),
        ("demo --out /proc/x.png", "cannot write to '/proc/x.png'"),
        *((f"soak --minutes {text}", "a finite number of minutes above 0") for text in ("0", "nan", "inf", "soon")),
        ("soak --steps 0", "at least 1"),
        ("soak --programs 0", "at least 1"),
        ("soak --first -1", "at least 0"),
        ("soak --seed inf", "at least 0"),
    ],
)  # fmt: skip
def test_an_argument_that_makes_no_sense_is_refused_by_name(capsys, places, line, said):
    command, option, text = line.split()
    with pytest.raises(SystemExit) as end:
        main([command, option, str(places.get(text, text))])
    assert end.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"python -m overlap {command}: error: argument {option}: ") and said in last, last


def test_the_limits_of_a_number_are_allowed():
    read = arguments.whole_number(1, 7)
    assert [read("1"), read("7")] == [1, 7]
    assert arguments.finite_number("seconds", at_least=0)("0") == 0


def test_demo_on_more_devices_than_are_emulated(monkeypatch, capsys):
    assert main(["demo", "--emulate", "--devices", "99"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        "demo: --devices must be at most 8 where they are emulated, got 99"
    )


def _xla(problem: Problem) -> Call:
    return lambda lhs, rhs: call_operation(problem, lhs, rhs, None, "xla")


def _on_gpus(monkeypatch, fused: Callable[[Problem], Call]) -> list[str]:
    """Runs the demo's GPU code on four CPU devices; returns the pictures that the code asked for."""
    pictures: list[str] = []
    small = tuple(dataclasses.replace(problem, m=32, n=8, k=16) for problem in demo._ON_GPUS)
    monkeypatch.setattr(demo, "_ON_GPUS", small)
    monkeypatch.setattr(demo, "_methods", lambda problem, config: {"fused": fused(problem), "xla": _xla(problem)})
    monkeypatch.setattr(demo, "why_not_gpus", lambda: None)
    monkeypatch.setattr(demo, "_WARM_UP_S", 0.0)
    monkeypatch.setattr(demo, "_picture_by_emulation", lambda devices, out, step: pictures.append(f"{devices}: {out}"))
    return pictures


def test_demo_as_on_gpus(monkeypatch, capsys):
    pictures = _on_gpus(monkeypatch, _xla)
    assert demo.run(pathlib.Path("x.png"), devices=4) == 0
    said = capsys.readouterr().out
    assert len(re.findall(r"xla .* 1\.00 ", said)) == 2
    assert len(re.findall(r"roof .* 1\.000 ", said)) == 2
    assert pictures == ["4: x.png"]


ROWS = [["fused", "one kernel", "140", "1.25"], ["xla", "all-gather, then dot", "–", "[1]"]]


@pytest.mark.parametrize("columns", [16, 28, 44, 60])
def test_a_table_that_is_too_wide_wraps_and_then_becomes_paragraphs(columns, capsys):
    console = Console(width=columns)
    headings = ("method", "what runs", "loop, µs", "XLA / this")
    tables.show(console, "a title", headings, ROWS, text_columns=headings[:2])
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= columns and "…" not in said
    words = said.replace("│", " ").replace(":", "").split()
    assert {"fused", "all-gather,", "then", "140", "1.25", "[1]", "XLA"} <= set(words), said
    assert ("┃" in said) == (columns >= 44)
    if columns == 60:
        assert "all-gather, then dot" in said and "XLA / this" in said
    if columns == 28:
        assert "method xla\n  what runs: all-gather," in said and "–" not in said


@pytest.mark.parametrize(
    "line",
    ["demo --device 2", "doctor --js", "soak --minute 1", "trace --dtyp bf16", "tune --shapes 8x8x8 --layout nn"],
)
def test_options_are_not_abbreviated(line, capsys):
    with pytest.raises(SystemExit) as end:
        main(line.split())
    assert end.value.code == 2 and "unrecognized arguments: --" in capsys.readouterr().err


def test_demo_with_more_devices_than_there_are(monkeypatch, capsys):
    _on_gpus(monkeypatch, _xla)
    assert demo.run(pathlib.Path("x.png"), devices=1000) == 2
    assert "--devices must be at most 8 on this machine, got 1000" in " ".join(capsys.readouterr().err.split())


def test_demo_reports_a_wrong_result(monkeypatch, capsys):
    pictures = _on_gpus(monkeypatch, lambda problem: lambda lhs, rhs: _xla(problem)(lhs, rhs) * 1.01)
    assert demo.run(pathlib.Path("x.png"), devices=4) == 1
    assert "FAILED" in capsys.readouterr().out
    assert not pictures


def test_what_was_measured_is_shown_even_if_no_picture_can_be_written(monkeypatch, capsys):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    row = demo._Row("matmul_reduce_scatter", "xla", "cuBLAS, then NCCL", 1e-4, loop_us=150.0, wall_us=180.0)
    others = [dataclasses.replace(row, method=method, loop_us=100.0) for method in ("fused", "roof")]
    rows = [dataclasses.replace(each, op=op) for op in spans.LANES for each in (*others, row)]
    monkeypatch.setattr(demo, "why_not_gpus", lambda: None)
    monkeypatch.setattr(demo, "_run_on_gpus", lambda devices, step: (rows, 4))
    monkeypatch.setattr(demo, "_picture_by_emulation", full)
    monkeypatch.setenv("COLUMNS", "40")
    assert demo.run(pathlib.Path("x.png"), devices=4) == 1
    said = capsys.readouterr()
    assert said.err.splitlines()[-1] == "demo: no picture was written: [Errno 28] No space left on device"
    # With so few columns, each cell has a line of its own.
    assert len(re.findall(r"^  XLA / this: 1\.50$", said.out, re.MULTILINE)) == 4


def test_a_replay_that_fails_is_said(monkeypatch, tmp_path):
    failed = subprocess.CompletedProcess([], 1, "", "… starting\ndemo: no room\n")
    monkeypatch.setattr(demo.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(RuntimeError, match="the emulated replay for it failed: demo: no room"):
        demo._picture_by_emulation(2, tmp_path / "x.png", lambda text: None)


@pytest.fixture(scope="module")
def recorded() -> dict[str, list[spans.Span]]:
    """A recording of the demo's own run on 3 devices."""
    mesh = demo._mesh(3)
    return {problem.op: demo._emulated(demo._of(problem, 3), mesh, lambda text: None)[1] for problem in demo._EMULATED}


@pytest.mark.one_jax
@pytest.mark.parametrize("op", spans.LANES)
def test_the_spans_of_a_recorded_run_are_its_whole_work(recorded, op):
    devices, problem, config = range(3), demo._EMULATED[0], demo._EMULATED_CONFIG
    # Each compute warpgroup has half of each tile.
    per_shard = 2 * (problem.m // config.tile_m) * (problem.n // config.tile_n)
    multiplied = Counter((span.device, span.shard) for span in recorded[op] if span.lane == "multiplies")
    assert multiplied == {(device, shard): per_shard for device in devices for shard in devices}
    pairs = {(device, peer) for device in devices for peer in devices if device != peer}
    for lane in ("receives", "sends"):
        assert {(span.device, span.shard) for span in recorded[op] if span.lane == lane} == pairs
    assert all(span.start < span.end for span in recorded[op] if span.lane == "multiplies")


@pytest.mark.one_jax
def test_the_spans_on_blackwell_are_its_whole_work():
    """On Blackwell, different threads multiply and store a tile."""
    devices, mesh, config = range(2), demo._mesh(2), demo._EMULATED_CONFIG
    for problem in demo._EMULATED:
        with emulating("blackwell"):
            found = demo._emulated(demo._of(problem, 2), mesh, lambda text: None)[1]
        rows = demo._EMULATED[0]
        tiles = (rows.m // config.tile_m) * (rows.n // config.tile_n)
        multiplied = Counter((span.device, span.shard) for span in found if span.lane == "multiplies")
        assert multiplied == {(device, shard): tiles for device in devices for shard in devices}
        assert all(span.start < span.end for span in found if span.lane == "multiplies")
        added = Counter((span.device, span.shard) for span in found if span.lane == "adds")
        assert added == ({(device, device): tiles for device in devices} if "scatter" in problem.op else {})


@pytest.mark.one_jax
def test_what_is_added_are_the_own_rows_once_they_have_come_from_all(recorded):
    found = recorded["matmul_reduce_scatter"]
    problem, config = demo._EMULATED[1], demo._EMULATED_CONFIG
    adds = [span for span in found if span.lane == "adds"]
    per_shard = 2 * (problem.m // config.tile_m) * (problem.n // config.tile_n)
    assert Counter((span.device, span.shard) for span in adds) == {(device, device): per_shard for device in range(3)}
    for device in range(3):
        first = {span.shard: span.end for span in reversed(found) if (span.device, span.lane) == (device, "receives")}
        assert set(first) == set(range(3)) - {device}
        assert max(first.values()) < min(span.end for span in adds if span.device == device)


@pytest.mark.one_jax
def test_the_spans_of_a_recorded_run_are_in_the_order_of_the_schedule(recorded):
    recorded_spans = recorded["all_gather_lhs_matmul"]
    for device in range(3):
        first = {
            lane: {shard: min(span.start for span in recorded_spans
                              if (span.device, span.lane, span.shard) == (device, lane, shard))
                   for shard in range(3) if lane == "multiplies" or shard != device}
            for lane in ("multiplies", "receives")
        }  # fmt: skip
        assert min(first["multiplies"], key=first["multiplies"].__getitem__) == device  # Its own shard is here already.
        for peer, start in first["receives"].items():
            assert start < first["multiplies"][peer]


@pytest.mark.one_jax
def test_every_lane_of_the_picture_is_drawn(recorded, tmp_path):
    image = pytest.importorskip("matplotlib.image")
    picture.draw(recorded, tmp_path / "all.png", devices=3, title="")
    whole = image.imread(tmp_path / "all.png")
    for op, lanes in spans.LANES.items():
        for lane in lanes:
            less = recorded | {op: [span for span in recorded[op] if span.lane != lane]}
            picture.draw(less, tmp_path / "less.png", devices=3, title="")
            missing = np.abs(whole - image.imread(tmp_path / "less.png")).max(axis=-1) > 0.1
            assert missing.mean() > 0.003, (op, lane)  # As a share of all pixels.


def test_demo_without_rich(monkeypatch, capsys):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "rich" else find_spec(name))
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


# --- The command ------------------------------------------------------------------------------------------------------


def test_version(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith(f"overlap {overlap.__version__} (jax {jax.__version__}, Python 3.")


@pytest.mark.parametrize("arguments", [[], ["nothing"], ["demo", "--devices", "two"], ["tune"]])
def test_wrong_arguments_have_a_status_of_their_own(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert "usage: python -m overlap" in capsys.readouterr().err


def test_an_interrupt_and_an_output_that_cannot_be_written(monkeypatch, capsys, repository):
    def interrupted(**keywords: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "run", interrupted)
    assert main(["doctor"]) == 130
    assert capsys.readouterr().err == "interrupted\n"
    # With the reader gone, the first line already fails; nor can anything be written to a full disk.
    line = [sys.executable, "-m", "overlap", "doctor"]
    environment = os.environ | {"PYTHONPATH": str(repository)}
    read, write = os.pipe()
    os.close(read)
    process = subprocess.run(line, stdout=write, stderr=subprocess.PIPE, env=environment, text=True, check=False)
    os.close(write)
    assert (process.returncode, process.stderr) == (1, "")
    with open("/dev/full", "w") as full:
        process = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, env=environment, text=True, check=False)
    assert (process.returncode, process.stderr) == (1, "the output: No space left on device\n")
    # Without any output stream, the command still does its work.
    process = subprocess.run(["sh", "-c", f"{shlex.join(line[:-1])} --version >&- 2>&-"], env=environment, check=False)
    assert process.returncode == 0


def test_any_output_encoding_will_do(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))

    def say() -> int:
        print("2 × 3 → 6 µs … “é”")
        return 0

    assert ending.run(say) == 0
    assert written.getvalue() == b"2 x 3 -> 6 us ... '?'\n"
