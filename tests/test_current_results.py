"""The current results: how runs are merged into them, and that index, README and tables agree with the files."""

from __future__ import annotations

import csv
import importlib
import pathlib
import shlex
import subprocess
import sys

import pytest

from benchmarks import command, current, index, readme, report
from benchmarks.harness import Result
from benchmarks.problems import TableProblem, parse

TABLES = {table.name: table for table in current.tables(index.RESULTS)}
OP = "all_gather_lhs_matmul"


# --- The stored files -------------------------------------------------------------------------------------------------


def test_what_is_made_from_results_agrees_with_them() -> None:
    for path, text in index.generated().items():
        assert path.read_text(encoding="utf-8") == text, f"{path}: run `python -m benchmarks.index`"


def test_a_number_that_is_changed_in_the_readme_is_noticed() -> None:
    text = readme.FILE.read_text(encoding="utf-8")
    row = next(line for line in text.splitlines() if line.startswith("| 4, a process each | 1024"))
    changed = text.replace(row, row.replace(".", ",", 1))
    assert changed != text and readme.text(changed, list(TABLES.values())) == text
    with pytest.raises(ValueError, match=r"must mark each of .* once"):
        readme.text(text.replace("<!-- table: matmul -->", ""), list(TABLES.values()))


def test_every_file_lies_under_the_name_of_its_rows() -> None:
    assert len(TABLES) >= 10
    for name, table in TABLES.items():
        assert {current.name_of_row(row) for row in table.rows} == {name}
        for problem in table.problems():
            assert len({current.run_of(row) for row in problem}) == 1, f"{name}: times of two runs are compared"
    known = {f"{name}{suffix}" for name in TABLES for suffix in (".csv", ".md", ".rounds.csv")} | {"README.md"}
    assert {path.name for path in index.RESULTS.rglob("*") if path.is_file()} <= known


def test_current_results_are_the_newest_runs_of_the_pinned_jax() -> None:
    """Only runs that compare fused and XLA count; the suite `breakdown` measures no useful sizes."""
    newest: dict[tuple[str, ...], str] = {}
    times: dict[tuple[str, ...], str] = {}
    for path in index.EXPERIMENTS.glob("*/*.csv"):
        if "." in path.stem or "breakdown" in path.name or "jax-0.12" in path.parent.name:
            continue
        rows = current.read(path)
        for row in rows:
            key = (current.name_of_row(row), *current.problem_of(row))
            times[(*key, row["method"], *current.run_of(row))] = row["loop_us"]
            if row["method"] == "fused" and row.get("xla_over_this"):
                newest[key] = max(newest.get(key, ""), row["env_date"])
    dates: dict[tuple[str, ...], str] = {
        (name, *current.problem_of(row)): row["env_date"] for name, table in TABLES.items() for row in table.rows
    }
    assert len(newest) > 100
    assert not {key: date for key, date in newest.items() if date > dates.get(key, "")}
    for name, table in TABLES.items():
        for row in table.rows:
            key = (name, *current.problem_of(row), row["method"], *current.run_of(row))
            assert times.get(key, row["loop_us"]) == row["loop_us"], f"{key}: the experiment's file says {times[key]}"


def test_an_experiment_has_a_date_a_question_and_an_answer() -> None:
    folders = {path for path in index.EXPERIMENTS.iterdir() if path.is_dir()}
    assert folders == set(index.experiments()) and len(folders) > 10
    for folder in folders:
        question, _, answer = (folder / "README.md").read_text(encoding="utf-8").partition("\n")
        assert question.startswith("# ") and question.endswith("?") and len(answer.split()) > 5, folder
        dates = {index._facts(path)["date"][:10] for path in folder.glob("*.md") if path.name != "README.md"}
        assert any(folder.name.startswith(date) for date in dates), f"{folder.name}: its runs are of {dates}"


@pytest.mark.parametrize("name", TABLES)
def test_the_command_under_a_table_measures_its_problems(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    table, asked = TABLES[name], []
    words = shlex.split(current.again(table))
    assert ("launch/mpirun.sh" in words) == (table.layout == "process_each")
    module = importlib.import_module(words[words.index("-m") + 1])

    def run(arguments, op, _, devices, **__):
        command._check_table(arguments)
        asked.extend(command.problems(arguments, op, table.devices))
        assert devices in (table.devices, None) and (str(arguments.out), arguments.name) == ("benchmarks/results", None)
        return 0

    monkeypatch.setattr(command, "run", run)
    assert module.main(words[words.index("-m") + 2 :]) == 0
    assert [problem.op for problem in asked] == [table.operation] * len(asked)
    shown = [(problem.shape, problem.dtype, problem.layout) for problem in asked]
    assert shown == [current.problem_of(problem[0]) for problem in table.problems()]


# --- How runs are merged ----------------------------------------------------------------------------------------------


def run_of(folder: pathlib.Path, date: str, problems: list[TableProblem], us: float, *, failed: str = "") -> None:
    """Writes a run as the harness does: XLA takes twice as long as the fused operation."""
    facts = {"date": date, "commit": "0123456", "command": f"python -m {date}", "jax": "jax 0.11.2, jaxlib 0.11.2",
             "devices": "2 of 2 x NVIDIA H200 (one process)"}  # fmt: skip
    writer = report.Writer(folder, current.name_of(OP, "NVIDIA H200", 2, 1), facts, into_table=True)
    for problem in problems:
        times = {"fused": us, "xla": 2 * us}
        results = [Result(name, loop_us=[time], wall_us=[time]) for name, time in times.items()]
        if problem.shape == failed:
            results = [Result(name, status="ERROR RuntimeError: out of memory") for name in times]
        writer.add_round(problem, 0, results)
        writer.add_table(report.Table(problem, results))
    names = sorted(path.name for path in writer.finish())
    assert names == [f"{OP}-h200-2-one_process{suffix}" for suffix in (".csv", ".md", ".rounds.csv")]
    assert sorted(path.name for path in folder.iterdir()) == names, "nothing else is left"


def test_a_run_replaces_the_rows_of_its_problems_and_no_others(tmp_path: pathlib.Path) -> None:
    small, large, other = parse(OP, 2, ["64x64x64", "128x64x64", "96x64x64"], "bf16", None)
    run_of(tmp_path, "day 1", [large, small], 10.0)
    run_of(tmp_path, "day 2", [large, other], 5.0)
    (table,) = current.tables(tmp_path)
    assert [(row["shape"], row["method"], row["loop_us"], row["env_date"]) for row in table.rows] == [
        ("64x64x64", "fused", "10", "day 1"), ("64x64x64", "xla", "20", "day 1"),
        ("96x64x64", "fused", "5", "day 2"), ("96x64x64", "xla", "10", "day 2"),
        ("128x64x64", "fused", "5", "day 2"), ("128x64x64", "xla", "10", "day 2"),
    ]  # fmt: skip
    rounds = current.read(tmp_path / f"{table.name}.rounds.csv")
    assert sorted((row["shape"], row["method"], float(row["loop_us"])) for row in rounds) == sorted(
        (row["shape"], row["method"], float(row["loop_us"])) for row in table.rows
    )
    text = (tmp_path / f"{table.name}.md").read_text(encoding="utf-8")
    assert text == current.markdown(table)
    for run in ("1", "2"):
        assert f"| {run} | day {run} | 0123456 | `python -m day {run}` |" in text
    assert [line.split("|")[-2].strip() for line in text.splitlines() if " | fused | " in line] == ["1", "2", "2"]


def test_a_run_that_failed_replaces_nothing(tmp_path: pathlib.Path) -> None:
    small, large = parse(OP, 2, ["64x64x64", "128x64x64"], "bf16", None)
    run_of(tmp_path, "day 1", [small], 10.0)
    run_of(tmp_path, "day 2", [small, large], 5.0, failed="64x64x64")
    (table,) = current.tables(tmp_path)
    times = {(row["shape"], row["method"]): (row["loop_us"], row["env_date"]) for row in table.rows}
    assert times["64x64x64", "fused"] == ("10", "day 1") and times["128x64x64", "fused"] == ("5", "day 2")


def test_names_say_operation_device_count_and_layout() -> None:
    assert current.name_of("matmul", "NVIDIA H200", 1, 1) == "matmul-h200-1-one_process"
    assert current.name_of(OP, "NVIDIA H100 80GB HBM3", 8, 8) == f"{OP}-h100_80gb_hbm3-8-process_each"
    assert current.name_of(OP, "NVIDIA B200", 8, 2) == f"{OP}-b200-8-2_processes"


@pytest.mark.parametrize(
    "options", [["--methods", "fused,roof"], ["--methods", "xla"], ["--variants", "fused:stages=3"]], ids=" ".join
)
def test_a_run_that_compares_nothing_is_no_current_result(options: list[str]) -> None:
    parser = command.parser("", "1x2x3", "fused,xla,roof", devices=True)
    with pytest.raises(SystemExit, match=r"compares fused and xla, and .* would not time .*--name"):
        command._check_table(parser.parse_args(["--out", "DIR", *options]))
    command._check_table(parser.parse_args(["--out", "DIR", "--name", "study", *options]))
    command._check_table(parser.parse_args(["--out", "DIR", "--variants", "fused", "fused:stages=3"]))


def test_without_a_name_the_harness_writes_the_current_table(tmp_path: pathlib.Path) -> None:
    line = [sys.executable, "-m", "benchmarks.matmul", "--dry-run", "--methods", "fused,xla", "--out", str(tmp_path)]
    done = subprocess.run(
        line, cwd=index.RESULTS.parent.parent, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    (table,) = current.tables(tmp_path)
    assert table.name == "matmul-cpu-1-one_process"
    with (tmp_path / f"{table.name}.csv").open(newline="") as file:
        assert {row["method"] for row in csv.DictReader(file)} == {"fused", "xla"}
