"""Command lines of the benchmarks: invalid ones are refused by name, and no run leaves a half-written file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from benchmarks import __main__ as table_of_name
from benchmarks import (
    before_after,
    block,
    configurations,
    crossover,
    fit_model,
    forecast,
    index,
    known_models,
    ladder,
    matmul,
    model_tasks,
    plot,
    report,
    timeline,
)
from benchmarks.harness import Result
from benchmarks.problems import TableProblem
from benchmarks.watch import Watch
from overlap.cli import devices, ending

pytestmark = pytest.mark.one_jax
PROGRAMS = {
    "": table_of_name, "before_after": before_after, "block": block, "configurations": configurations,
    "crossover": crossover, "fit_model": fit_model, "forecast": forecast, "known_models": known_models,
    "ladder": ladder, "matmul": matmul, "model_tasks": model_tasks, "plot": plot, "timeline": timeline,
}  # fmt: skip
NUMBERS = ("0", "-1", "nan", "inf", "text", "1.5")
SECONDS = ("-1", "nan", "inf", "text")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a file, which the command lines name by a relative path."""
    (tmp_path / "file").write_text("a,b\n1,2\n")
    (tmp_path / "empty").touch()
    (tmp_path / "read-only").touch(mode=0o444)
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    yield tmp_path
    assert sorted(tmp_path.rglob("*")) == before


def refused(line: str, capsys) -> str:
    """The last line that a command prints; the command must exit with status 2."""
    name, *options = line.split(" ")
    try:
        status = ending.run(lambda: PROGRAMS[name.strip(".")].main(options))
    except SystemExit as end:
        status = end.code
    said = capsys.readouterr()
    assert status == 2 and not said.out, (status, said)
    return said.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("nothing", "got 'nothing'"),
        *((f"--dry-run --{name} {text}", f"--{name}") for name in
          ("devices", "iterations", "rounds", "launches", "calls", "example-configs", "timeout-s") for text in NUMBERS),
        *((f"--dry-run --{name} {text}", f"--{name}") for name in ("budget-s", "warmup-s") for text in SECONDS),
        ("--dry-run --devices 99", "`--devices` must be at most 8 with `--dry-run`, got 99"),
        ("--dry-run --seed -1", "--seed"),
        ("--dry-run --dtype zz", "--dtype: must be one of f16, bf16"),
        ("--dry-run --shapes 0x8x8", "`--shapes`"),
        ("--dry-run --shapes 8x8", "`--shapes`"),
        ("--dry-run --suite zz", "`--suite`"),
        ("--dry-run --layouts zz", "`--layouts`"),
        ("--dry-run --variants zz", "`--variants`"),
        ("--dry-run --out file", "--out: cannot write to 'file'"),
        ("--dry-run --out file/x", "--out: cannot write to 'file/x'"),
        ("--dry-run --out /proc/x", "--out: cannot write to '/proc/x'"),
        ("--dry-run --out /dev/full", "--out: cannot write to '/dev/full'"),
        ("--dry-run --name a/b", "--name: must be the name of a file without folders"),
        *((f"block --dry-run --{name} {text}", f"--{name}") for name in
          ("devices", "rounds", "hidden", "inner", "tokens") for text in NUMBERS),
        ("block --out file", "--out: cannot write to 'file'"),
    ],
)  # fmt: skip
def test_a_table_refuses_by_name_what_makes_no_sense(here, capsys, line, named):
    assert named in refused(f" {line}", capsys)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("before_after --before missing --before-commit x", "--before: must name a folder"),
        ("before_after --before . --before-commit x", "`--before` must be the root of a tree"),
        ("before_after --before . --before-commit x --rounds 0", "--rounds"),
        ("configurations --tasks missing --out new", "--tasks: cannot read 'missing': No such file"),
        ("configurations --tasks . --out new", "--tasks: must name a file, got the folder"),
        ("configurations --tasks file --out new", "`--tasks` file is no task file"),
        ("configurations --tasks empty --out new", "`--tasks` empty is empty"),
        ("configurations --tasks file --out missing/new", "--out: there is no folder missing"),
        ("configurations --tasks file --out new --budget-s nan", "--budget-s"),
        *((f"configurations --tasks file --out new --{name} 0", f"--{name}") for name in
          ("workers", "gpus", "samples")),
        ("crossover missing --out new", "cannot read 'missing'"),
        ("crossover file --out .", "--out: must name a file, got the folder"),
        ("crossover file --out read-only", "--out: read-only is read-only"),
        ("crossover file --out new", "file is no result of a benchmark"),
        ("fit_model --times missing", "--times: cannot read"),
        ("fit_model --judge --times file", "file holds no times"),
        ("forecast --csv /dev/full", "--csv: must name a file, got '/dev/full', which is a device or a pipe"),
        ("known_models tasks --out new --limit 0", "--limit"),
        ("known_models table file --jax 0.12", "file holds no times"),
        ("model_tasks --seed nan --problems 1 --out new", "--seed"),
        ("model_tasks --seed 1 --problems 0 --out new", "--problems"),
        ("plot missing --out new.png", "cannot read 'missing'"),
        ("plot file --out new.txt", "`--out` must end in .png or .svg"),
        ("plot file --out new.png", "none of the files holds a time"),
        ("timeline condense --raw . --out new", "`--raw` must be a folder that `record` wrote, got ."),
        ("timeline draw file", "file lacks the traces of XLA and of the fused kernel"),
    ],
)  # fmt: skip
def test_a_tool_refuses_by_name_what_makes_no_sense(here, capsys, line, named):
    assert named in refused(line, capsys)


def test_without_a_gpu_tables_ask_for_a_dry_run(here, capsys, monkeypatch):
    monkeypatch.setattr(devices, "why_no_gpu", lambda: "no GPU is visible")
    asked = (
        "nothing was measured: no GPU is visible; run it on GPUs, or add --dry-run to try the harness on CPU devices"
    )
    for line in (" --rounds 3", " block", "ladder", "matmul --out results"):
        assert refused(line, capsys) == asked


def test_the_index_takes_no_arguments(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["index", "--check"])
    monkeypatch.setattr(index, "generated", lambda: pytest.fail("it writes"))
    with pytest.raises(SystemExit) as end:
        index.main()
    assert end.value.code == 2


# --- What an aborted run leaves behind --------------------------------------------------------------------------------

PROBLEM = TableProblem("matmul", 1, 1024, 4096, 4096, "bf16")
TABLE = report.Table(
    PROBLEM, [Result("xla", loop_us=[150.0], wall_us=[180.0], error=2e-4, error_bound=4e-4)], roof="xla"
)


def test_an_interrupt_keeps_what_was_measured_and_no_partial_file(tmp_path):
    (tmp_path / "run.summary.csv.partial").write_text("of a run that was killed")
    writer = report.Writer(tmp_path, "run", {})
    with pytest.raises(KeyboardInterrupt), Watch(60, lambda: writer.keep([PROBLEM])):
        writer.add_round(PROBLEM, 0, TABLE.results)
        writer.add_table(TABLE)
        raise KeyboardInterrupt
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.csv", "run.md", "run.rounds.csv"]
    assert "left out for want of time: 1024x4096x4096 bf16 nn" in (tmp_path / "run.md").read_text()


def test_an_error_before_anything_was_measured_leaves_nothing(tmp_path):
    writer = report.Writer(tmp_path, "run", {})
    with pytest.raises(RuntimeError), Watch(60, lambda: writer.keep([PROBLEM])):
        raise RuntimeError("out of memory")
    assert not list(tmp_path.iterdir())


def test_a_full_disk_ends_with_one_line_and_leaves_nothing(tmp_path, monkeypatch, capsys):
    writer = report.Writer(tmp_path, "run", {})

    def full(suffix: str, text: str, mode: str = "w") -> None:
        raise OSError(28, "No space left on device", "run.csv.partial")

    def run() -> int:
        with Watch(60, lambda: writer.keep([PROBLEM])):
            writer.add_round(PROBLEM, 0, TABLE.results)
            monkeypatch.setattr(writer, "_write", full)
            writer.add_table(TABLE)
        return 0

    assert ending.run(run) == 1
    assert capsys.readouterr().err == "run.csv.partial: No space left on device\n"
    assert not list(tmp_path.iterdir())


def test_a_run_that_is_told_to_end_keeps_what_was_measured_though_its_thread_is_busy(repository):
    program = """
import hashlib, os, signal
from benchmarks.watch import Watch
with Watch(60, lambda: ["what there is"]):
    os.kill(os.getpid(), signal.SIGTERM)
    hashlib.scrypt(b"", salt=b"", n=2**14, r=8, p=4000, maxmem=2**30)  # Minutes, without Python's lock.
"""
    environment = os.environ | {"PYTHONPATH": str(repository), "JAX_PLATFORMS": "cpu"}
    line = [sys.executable, "-c", program]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 128 + signal.SIGTERM
    assert done.stderr == "kept what there is\nended by SIGTERM\n"
