"""Command lines of the benchmarks: invalid ones are refused by name, and no run leaves a half-written file."""

from __future__ import annotations

import sys

import pytest

from benchmarks import __main__ as table_of_name
from benchmarks import (
    block,
    configurations,
    crossover,
    current,
    fit_model,
    known_models,
    model_tasks,
    performance,
    report,
)
from benchmarks.harness import Result
from benchmarks.problems import TableProblem
from overlap.cli import devices, ending

pytestmark = pytest.mark.one_jax
PROGRAMS = {
    "": table_of_name, "block": block, "configurations": configurations,
    "crossover": crossover, "fit_model": fit_model, "known_models": known_models,
    "model_tasks": model_tasks,
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
    assert status == (1 if "No such file" in said.err else 2) and not said.out, (status, said)
    return said.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("nothing", "got 'nothing'"),
        *((f"--dry-run --{name} {text}", f"--{name}") for name in
          ("devices", "rounds", "timeout-s") for text in NUMBERS),
        *((f"--dry-run --{name} {text}", f"--{name}") for name in ("budget-s",) for text in SECONDS),
        ("--dry-run --devices 99", "`--devices` must be at most 8 with `--dry-run`, got 99"),
        ("--dry-run --dtype zz", "--dtype: invalid choice"),
        ("--dry-run --shapes 0x8x8", "`--shapes`"),
        ("--dry-run --shapes 8x8", "`--shapes`"),
        ("--dry-run --suite zz", "--suite"),
        ("--dry-run --layouts zz", "`--layouts`"),
        ("--dry-run --variants zz", "`--variants`"),
        *((f"block --dry-run --{name} {text}", f"--{name}") for name in
          ("devices", "rounds", "tokens") for text in NUMBERS),
    ],
)  # fmt: skip
def test_a_table_refuses_by_name_what_makes_no_sense(here, capsys, line, named):
    assert named in refused(f" {line}", capsys)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("configurations --tasks missing --out new", "missing: No such file"),
        ("configurations --tasks file --out new", "`--tasks` file is no task file"),
        ("configurations --tasks empty --out new", "`--tasks` empty is empty"),
        ("configurations --tasks file --out missing/new", "--out: there is no folder missing"),
        ("configurations --tasks file --out new --budget-s nan", "--budget-s"),
        *((f"configurations --tasks file --out new --{name} 0", f"--{name}") for name in
          ("workers", "gpus", "samples")),
        ("crossover missing --out new", "missing: No such file"),
        ("crossover file --out new", "file is no result of a benchmark"),
        ("fit_model --times missing", "missing: No such file"),
        ("fit_model --judge --times file", "file holds no times"),
        ("known_models tasks --out new --limit 0", "--limit"),
        ("known_models table file --jax 0.12", "file holds no times"),
        ("model_tasks --seed nan --problems 1 --out new", "--seed"),
        ("model_tasks --seed 1 --problems 0 --out new", "--problems"),
    ],
)  # fmt: skip
def test_a_tool_refuses_by_name_what_makes_no_sense(here, capsys, line, named):
    assert named in refused(line, capsys)


def test_without_a_gpu_tables_ask_for_a_dry_run(here, capsys, monkeypatch):
    monkeypatch.setattr(devices, "why_no_gpu", lambda: "no GPU is visible")
    asked = (
        "nothing was measured: no GPU is visible; run it on GPUs, or add --dry-run to try the harness on CPU devices"
    )
    for line in (" --rounds 3", " block", " ladder", " matmul --out results"):
        assert refused(line, capsys) == asked


def test_the_command_that_makes_the_pages_takes_no_arguments(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["performance", "--check"])
    monkeypatch.setattr(performance, "generated", lambda: pytest.fail("it writes"))
    with pytest.raises(SystemExit) as end:
        performance.main()
    assert end.value.code == 2


# --- What an aborted run leaves behind --------------------------------------------------------------------------------

PROBLEM = TableProblem("matmul", 1, 1024, 4096, 4096, "bf16")
ROWS = report.Table(PROBLEM, [Result("xla", loop_us=[150.0], wall_us=[180.0])], roof="xla").rows()
FACTS = {"devices": "1 of 1 x NVIDIA H200 (one process)"}


def test_a_full_disk_ends_with_one_line_and_leaves_the_table_as_it_was(tmp_path, monkeypatch, capsys):
    before = report.add(tmp_path, ROWS, FACTS).read_text()

    def full(path, text):
        raise OSError(28, "No space left on device", path.name)

    monkeypatch.setattr(current, "replace", full)
    assert ending.run(lambda: report.add(tmp_path, ROWS, FACTS) and 0) == 1
    assert capsys.readouterr().err == "matmul-h200-1-one_process.csv: No space left on device\n"
    assert [path.read_text() for path in tmp_path.iterdir()] == [before]
