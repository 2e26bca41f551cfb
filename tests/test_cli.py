"""`python -m overlap`: its exit statuses, and the emulated demo from end to end."""

from __future__ import annotations

import importlib.util
import io
import os
import re
import subprocess
import sys
from collections import Counter

import jax
import numpy as np
import pytest

import overlap
from overlap.cli import demo, devices, doctor, ending, main, trace_files
from overlap.kernels.target import emulating
from overlap.tuning import trace
from overlap.tuning.programs import draw_operands, mesh_of
from tests.command import run_overlap

pytest.importorskip("rich", reason="rich is not installed (extra `cli`)")
pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra `cli`)")


# --- demo -------------------------------------------------------------------------------------------------------------


def test_demo_runs_emulated_and_draws(repository, tmp_path):
    out = tmp_path / "picture.png"
    process = run_overlap(repository, "demo", "--out", out)
    assert process.returncode == 0, process.stderr
    errors = [(name, float(error)) for name, error in re.findall(r"(fused|xla): .*?(\d\.\d+e-\d\d)", process.stdout)]
    assert [name for name, _ in errors] == ["fused", "xla"] * 2, process.stdout
    for (_, fused), (_, xla) in zip(errors[::2], errors[1::2], strict=True):
        assert 0 < fused <= 2 * xla < 0.01
    assert "4 × emulated Hopper devices" in process.stdout and "meaningless" in process.stdout
    assert str(out) in process.stdout and out.read_bytes().startswith(b"\x89PNG")


@pytest.mark.one_jax
@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("demo --devices 0", "must be from 1"),
        ("demo --devices 1.5", "invalid whole number value: '1.5'"),
        ("demo --out /", "must name a file, got the folder"),
        ("demo --out no/x.png", "there is no folder no: make it first"),
        ("soak --minutes 0", "a finite number of minutes above 0, got 0"),
        ("soak --minutes nan", "a finite number of minutes above 0, got nan"),
        ("soak --minutes soon", "invalid number of minutes value: 'soon'"),
        ("soak --seed -1", "must be from 0"),
        ("trace --op zz", "invalid choice: 'zz'"),
    ],
)
def test_an_argument_that_makes_no_sense_is_refused_by_name(capsys, line, said):
    command, option, _ = line.split()
    with pytest.raises(SystemExit) as end:
        main(line.split())
    assert end.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"python -m overlap {command}: error: argument {option}: ") and said in last, last


def test_demo_on_more_devices_than_there_are(monkeypatch, capsys):
    assert main(["demo", "--emulate", "--devices", "99"]) == 2
    assert capsys.readouterr().err == "demo: --devices must be at most 8 where they are emulated, got 99\n"
    monkeypatch.setattr(devices, "why_not_gpus", lambda: None)
    assert main(["demo", "--devices", "99"]) == 2
    assert capsys.readouterr().err == "demo: --devices must be at most 8 on this machine, got 99\n"


@pytest.mark.parametrize("factor", [1.0, 1.01])
def test_demo_as_on_gpus(factor, monkeypatch, capsys):
    """Runs the demo's GPU code on four CPU devices, with small sizes, and XLA in place of the fused kernel."""
    methods, pictures = demo._methods, []

    def by_xla(problem, config):
        xla = methods(problem, config)["xla"]
        return {"fused": lambda lhs, rhs: xla(lhs, rhs) * factor, "xla": xla}

    monkeypatch.setattr(demo, "_methods", by_xla)
    monkeypatch.setattr(devices, "why_not_gpus", lambda: None)
    monkeypatch.setattr(demo, "_ON_GPUS", (32, 8, 16))
    monkeypatch.setattr(demo, "_WARM_UP_S", 0.0)
    monkeypatch.setattr(trace, "record", lambda *_, emulated: trace.Trace([], not emulated))
    monkeypatch.setattr(trace_files, "draw", lambda timelines, out, title, by_shard: pictures.append(str(out)))
    status = main(["demo", "--devices", "4", "--out", "x.png"])
    said = capsys.readouterr().out
    if factor == 1.0:
        assert (status, pictures) == (0, ["x.png"])
        assert len(re.findall(r"xla: .* 1\.00 ", said)) == len(re.findall(r"cuBLAS alone .* 1\.000 ", said)) == 2
    else:
        assert (status, pictures) == (1, []) and "FAILED" in said


@pytest.mark.one_jax
@pytest.mark.parametrize("gpu", ["hopper", "blackwell"])
def test_the_picture_shows_whose_rows_are_multiplied(gpu, tmp_path):
    """What `by_shard` takes for the device of a span: each device multiplies the rows of each, its own in turn."""
    mesh, firsts = mesh_of(jax.devices()[:2]), {"all_gather_lhs_matmul": 0, "matmul_reduce_scatter": 1}
    for problem in demo._problems(mesh, demo._EMULATED):
        with emulating(gpu), overlap.emulation.emulate(cores=4, completion="random", scheduler="round_robin"):
            shards = draw_operands(problem, mesh, 0)
            made = trace.record(problem, shards, mesh, demo._EMULATED_CONFIG, 256, emulated=True)
        (timeline,) = made.timelines
        steps = Counter((s.device, s.shard) for s in timeline.spans if s.work == trace_files.Work.MULTIPLY)
        assert (
            set(steps) == {(device, step) for device in range(2) for step in range(2)} and len({*steps.values()}) == 1
        )
        assert ("reduce_scatter" in timeline.kernel) == firsts[problem.op]
    trace_files.draw(made.timelines, tmp_path / "x.png", "", by_shard=True)
    image = pytest.importorskip("matplotlib.image").imread(tmp_path / "x.png")
    for color in ("#1f77b4", "#ff7f0e", trace_files.LABELS[trace_files.Work.COPY][1]):
        wanted = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        assert (np.abs(image[..., :3] - wanted).max(-1) < 0.02).mean() > 0.003, color  # As a share of all pixels.


# --- The command ------------------------------------------------------------------------------------------------------


def test_demo_without_rich(monkeypatch, capsys):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "rich" else find_spec(name))
    assert main(["demo"]) == 1
    assert "demo needs rich: pip install 'overlap[cli]'" in capsys.readouterr().err


def test_version(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith(f"overlap {overlap.__version__} (jax {jax.__version__}, Python 3.")


@pytest.mark.parametrize("line", ["", "nothing", "tune", "demo --device 2", "doctor --js"])
def test_wrong_arguments_have_a_status_of_their_own(line, capsys):
    with pytest.raises(SystemExit) as end:
        main(line.split())
    assert end.value.code == 2 and "usage: python -m overlap" in capsys.readouterr().err


def test_an_interrupt_and_a_reader_that_has_left(monkeypatch, capsys, repository):
    def interrupted(**keywords: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "run", interrupted)
    assert main(["doctor"]) == 130
    assert capsys.readouterr().err == "interrupted\n"
    read, write = os.pipe()
    os.close(read)
    line, environment = [sys.executable, "-m", "overlap", "doctor"], os.environ | {"PYTHONPATH": str(repository)}
    process = subprocess.run(line, stdout=write, stderr=subprocess.PIPE, env=environment, text=True, check=False)
    os.close(write)
    assert (process.returncode, process.stderr) == (1, "")


def test_any_output_encoding_will_do(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert ending.run(lambda: print("2 × 3 → 6") or 0) == 0
    assert written.getvalue() == b"2 ? 3 ? 6\n"
