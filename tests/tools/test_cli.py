"""`python -m overlap`: exit statuses, what is refused by name, the emulated demo from end to end, and the soak test."""

from __future__ import annotations

import argparse
import importlib.util
import io
import os
import re
import shlex
import subprocess
import sys
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import overlap
from overlap import cli
from overlap.cli import demo, devices, doctor, ending, main, soak, soak_programs, soak_step, trace_files
from overlap.emulation import emulate
from overlap.frame.explain import recorded
from overlap.kernels.target import emulating
from overlap.tuning import trace

pytest.importorskip("rich", reason="rich is not installed (extra `cli`)")
pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra `cli`)")


# --- demo -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpu", ["hopper", pytest.param("blackwell", marks=pytest.mark.slow)])
def test_demo_runs_emulated_and_draws_whose_rows_are_multiplied(gpu, tmp_path, capsys, monkeypatch):
    out, timelines, draw = tmp_path / "picture.png", [], trace_files.draw
    monkeypatch.setattr(trace_files, "draw", lambda of, *rest, **more: timelines.extend(of) or draw(of, *rest, **more))
    monkeypatch.setattr(overlap._settings, "emulated_gpu", lambda: gpu)
    monkeypatch.setattr(demo, "_EMULATED", (256, 256, 128))
    with emulating(gpu):
        assert main(["demo", "--emulate", "--devices", "2", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    errors = [(name, float(error)) for name, error in re.findall(r"(fused|xla): .*?(\d\.\d+e-\d\d)", said)]
    assert [name for name, _ in errors] == ["fused", "xla"] * 2, said
    for (_, fused), (_, xla) in zip(errors[::2], errors[1::2], strict=True):
        assert 0 < fused <= 2 * xla < 0.01
    assert f"2 × emulated {gpu.capitalize()} devices" in said and "meaningless" in said
    assert str(out) in said.replace("\n", "") and out.read_bytes().startswith(b"\x89PNG")
    # Each device multiplies the rows of each, equally often: `by_shard` paints a span in the color of their device.
    assert ["reduce_scatter" in timeline.kernel for timeline in timelines] == [False, True]
    for timeline in timelines:
        steps = Counter((s.device, s.shard) for s in timeline.spans if s.work == trace_files.Work.MULTIPLY)
        assert set(steps) == {(0, 0), (0, 1), (1, 0), (1, 1)} and len({*steps.values()}) == 1
    image = pytest.importorskip("matplotlib.image").imread(out)
    for color in ("#1f77b4", "#ff7f0e", trace_files.LABELS[trace_files.Work.COPY][1]):
        wanted = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        assert (np.abs(image[..., :3] - wanted).max(-1) < 0.02).mean() > 0.003, color  # As a share of all pixels.


def test_demo_as_on_gpus(monkeypatch, capsys):
    """Runs the demo's GPU code on two CPU devices, with small sizes, and XLA in place of the fused kernel.

    The second operation's results are wrong, so that no picture is drawn.
    """
    methods, pictures = demo._methods, []

    def by_xla(problem, config):
        xla, factor = methods(problem, config)["xla"], 1.01 if problem.op == "matmul_reduce_scatter" else 1.0
        return {"fused": lambda lhs, rhs: xla(lhs, rhs) * factor, "xla": xla}

    for owner, name, value in (
        (demo, "_methods", by_xla), (devices, "why_not_gpus", lambda: None), (demo, "_ON_GPUS", (32, 8, 16)),
        (demo, "_WARM_UP_S", 0.0), (demo, "_ROUNDS", 1), (demo, "_ITERATIONS", 2),
        (trace, "record", lambda *_, emulated: trace.Trace([], not emulated)),
        (trace_files, "draw", lambda timelines, out, title, by_shard: pictures.append(str(out))),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, value)
    assert main(["demo", "--devices", "2", "--out", "x.png"]) == 1
    said = capsys.readouterr().out
    assert len(re.findall(r"xla: .* 1\.00 ", said)) == len(re.findall(r"cuBLAS alone .* 1\.000 ", said)) == 2
    assert said.count("FAILED") == 1 and not pictures


def test_demo_on_more_devices_than_there_are_and_without_rich(monkeypatch, capsys):
    assert main(["demo", "--emulate", "--devices", "99"]) == 2
    assert capsys.readouterr().err == "demo: --devices must be at most 8 where they are emulated, got 99\n"
    monkeypatch.setattr(devices, "why_not_gpus", lambda: None)
    assert main(["demo", "--devices", "99"]) == 2
    assert capsys.readouterr().err == "demo: --devices must be at most 8 on this machine, got 99\n"
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "rich" else find_spec(name))
    assert main(["demo"]) == 1
    assert "demo needs rich: pip install 'overlap[cli]'" in capsys.readouterr().err


# --- The command ------------------------------------------------------------------------------------------------------


@pytest.mark.one_jax
def test_an_argument_that_makes_no_sense_is_refused_by_name(capsys):
    for line, said in (
        ("demo --devices 0", "must be from 1"),
        ("demo --devices 1.5", "invalid whole number value: '1.5'"),
        ("demo --out /", "must name a file, got the folder"),
        ("demo --out no/x.png", "there is no folder no: make it first"),
        ("soak --minutes 0", "a finite number of minutes above 0, got 0"),
        ("soak --minutes nan", "a finite number of minutes above 0, got nan"),
        ("soak --minutes soon", "invalid number of minutes value: 'soon'"),
        ("soak --seed -1", "must be from 0"),
        ("trace --op zz", "invalid choice: 'zz'"),
    ):
        command, option, _ = line.split()
        with pytest.raises(SystemExit) as end:
            main(line.split())
        last = capsys.readouterr().err.splitlines()[-1]
        assert end.value.code == 2 and said in last, last
        assert last.startswith(f"python -m overlap {command}: error: argument {option}: "), last
    for line in ("", "nothing", "tune", "demo --device 2", "doctor --js"):
        with pytest.raises(SystemExit) as end:
            main(line.split())
        assert end.value.code == 2 and "usage: python -m overlap" in capsys.readouterr().err


def test_version(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith(f"overlap {overlap.__version__} (jax {jax.__version__}, Python 3.")


def test_an_interrupt_and_a_reader_that_has_left(monkeypatch, capsys, repository):
    def interrupted(**keywords: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "run", interrupted)
    assert main(["doctor"]) == 130
    assert capsys.readouterr().err == "interrupted\n"
    read, write = os.pipe()
    os.close(read)
    program = "import sys\nfrom overlap.cli import ending\nsys.exit(ending.run(lambda: print('a') or 0))"
    line, environment = [sys.executable, "-c", program], os.environ | {"PYTHONPATH": str(repository)}
    process = subprocess.run(line, stdout=write, stderr=subprocess.PIPE, env=environment, text=True, check=False)
    os.close(write)
    assert (process.returncode, process.stderr) == (1, "")


def test_any_output_encoding_will_do(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert ending.run(lambda: print("2 × 3 → 6") or 0) == 0
    assert written.getvalue() == b"2 ? 3 ? 6\n"


# --- soak -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def here(monkeypatch):
    """Runs in this process, which has the emulated devices already, with programs of one operation on two meshes."""
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    monkeypatch.setattr(jax, "devices", lambda: jax.local_devices()[:2])
    monkeypatch.setattr(soak, "CASES", [case for case in soak_programs.CASES if case.name == "few rows"])
    soak_programs.program.cache_clear()
    with emulate(cores=2):
        yield
    soak_programs.program.cache_clear()


def test_counts_what_it_ran(here, capsys):
    assert cli.main(["soak", "--programs", "4", "--seed", "3"]) == 0
    said = capsys.readouterr().out
    assert "4 launches, no bit differed" in said and re.search(r"few rows +4 programs", said)


def test_a_wrong_bit_is_reported_with_the_command_that_repeats_it(here, capsys, monkeypatch):
    exact = soak_programs.exact
    monkeypatch.setattr(soak_programs, "exact", lambda *args: exact(*args).at[0, 0].add(1))
    assert cli.main(["soak", "--programs", "2", "--seed", "5"]) == 1
    said = capsys.readouterr().out
    assert re.search(r"program 0: \d wrong results of few rows along 'x' of \{'x': 2\}", said)
    (again,) = re.findall(r"to repeat it: python -m overlap (soak .*)", said)
    given = vars(cli._parser().parse_args(shlex.split(again)))
    assert (given["seed"], given["first"], given["programs"]) == (5, 0, 2)
    # What repeats it runs up to the last wrong program.
    (mesh, *_), (case, *_) = soak_programs.meshes(jax.devices()), soak.CASES
    failed = [(number, ((case, mesh, "x"), [0.0], 7), 1) for number in (30, 33)]
    soak._print(Counter({case.name: 48}), failed, argparse.Namespace(seed=5, minutes=2.0), 9)
    (again,) = re.findall(r"to repeat it: python -m overlap (soak .*)", capsys.readouterr().out)
    given = vars(cli._parser().parse_args(shlex.split(again)))
    assert (given["seed"], given["steps"], given["minutes"]) == (5, 9, 2.0)
    assert given["first"] <= 30 and given["first"] + given["programs"] == 34


def test_a_step_with_products_by_kernels_and_by_xla(here, capsys, monkeypatch):
    """On two devices as the command runs it. On four, XLA gathers weights along the other axis; a wrong bit counts."""
    monkeypatch.setattr(soak, "CASES", [soak_step.STEP])
    assert cli.main(["soak", "--programs", "1", "--seed", "3"]) == 0
    assert re.search(r"step +1 programs", capsys.readouterr().out)
    *_, mesh = soak_programs.meshes(jax.local_devices()[:4])
    late_us = soak_programs.on_all(mesh, P(("x", "y")), np.array([0, 100, 0, 0], np.float32))
    period = soak_programs.on_all(mesh, P(), np.array(1, np.int32))
    given = late_us, period, *soak_programs.operands(mesh, 3)
    exact = soak_step.exact
    for change in (0, 1):
        monkeypatch.setattr(soak_step, "exact", lambda lhs, rhs, change=change: exact(lhs, rhs) + change)
        wrong = int(soak_step.program.__wrapped__(soak_step.STEP, mesh, "y", 1)(*given))
        # On each device at least both results and the cotangent of the last weights are then wrong.
        assert wrong == 0 if change == 0 else wrong >= 3 * mesh.size
    with recorded() as found:
        jax.eval_shape(soak_step.program.__wrapped__(soak_step.STEP, mesh, "y", 1), *given)
    fused = Counter(choice.op for choice in found if choice.implementation == "fused")
    assert fused == {"all_gather_lhs_matmul": 3, "matmul_reduce_scatter": 3}
    monkeypatch.setattr(soak_step, "exact", exact)
    monkeypatch.setattr(soak_step, "spin", lambda us: us)  # The rows of the late device are then wrong.
    assert int(soak_step.program.__wrapped__(soak_step.STEP, mesh, "y", 1)(*given)) > 0


def test_every_case_is_exact_in_its_dtype_and_meshes_and_axes_of_four_devices():
    """The soak test relies on this: a right result has exactly the expected bits."""
    assert soak_step.STEP in soak.CASES
    meshes = list(soak_programs.meshes(jax.devices()[:4]))
    assert [dict(mesh.shape) for mesh in meshes] == [{"x": 4}, {"x": 4}, {"x": 2, "y": 2}, {"x": 2, "y": 2}]
    assert len({tuple(d.id for d in mesh.devices.flat) for mesh in meshes}) == 2
    assert soak_programs.axes_of(meshes[2]) == ["x", "y", ("x", "y")]
    # All whole numbers up to this are exact in bfloat16, and in float16.
    most = 2 ** (jnp.finfo(jnp.bfloat16).nmant + 1)
    for case in soak_programs.CASES:
        if isinstance(case, soak_programs.Experts):
            assert 2 * case.hidden <= most
            continue
        problem = case.problem(8)
        first, second = np.random.default_rng(0).integers(-1, 2, (2, 64, problem.whole[2]))
        assert np.abs(first @ second.T).max() <= most, case.name
        # Where sums travel, each device's part of a sum is rounded.
        assert not case.name.startswith("sums") or problem.k <= most, case.name


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(case.name, marks=[pytest.mark.slow] * (case.name != "sums for all by rows"))
        for case in soak_programs.CASES
    ],
)
def test_every_case_is_right_and_a_wrong_corner_is_noticed(name, monkeypatch):
    (case,) = (case for case in soak_programs.CASES if case.name == name)
    mesh = next(soak_programs.meshes(jax.devices()[:2]))
    late_us, period = np.zeros(2, np.float32), np.int32(7)
    given = soak_programs.operands(mesh, seed=0)
    with emulate(cores=2):
        assert int(soak_programs.program(case, mesh, "x", 1)(late_us, period, *given)) == 0
        exact = soak_programs.exact
        monkeypatch.setattr(soak_programs, "exact", lambda *args: exact(*args).at[-1, -1].add(1))
        soak_programs.program.cache_clear()
        found = int(soak_programs.program(case, mesh, "x", 1)(late_us, period, *given))
    # The corner belongs to one device, which finds the wrong result; or every device has it.
    assert found == (2 if "for all" in name else 1)
    soak_programs.program.cache_clear()
