"""The current results: how runs are merged into them, and that pages and figures agree with the files."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import pytest

from benchmarks import current, performance, report
from benchmarks.harness import Result
from benchmarks.problems import TableProblem, parse

TABLES = {table.name: table for table in current.tables()}
OP = "all_gather_lhs_matmul"


# --- The stored files -------------------------------------------------------------------------------------------------


def test_what_is_made_from_results_agrees_with_them() -> None:
    pytest.importorskip("matplotlib")
    for path, text in performance.generated().items():
        assert path.read_text(encoding="utf-8") == text, f"{path}: run `python -m benchmarks.performance`"


def test_a_number_that_is_changed_in_a_page_is_noticed() -> None:
    page, given = performance.PAGES[0].read_text(encoding="utf-8"), list(TABLES.values())
    row = next(line for line in page.splitlines() if line.startswith("| `matmul`"))
    changed = page.replace(row, row.replace(".", ",", 1))
    assert changed != page and performance.text(changed, given) == page
    needed = {table.operation for table in given} | performance._OF_ALL.keys()
    assert set(re.findall(r"results: (\w+) -->", page)) >= needed


def test_every_file_lies_under_the_name_of_its_rows() -> None:
    assert len(TABLES) >= 10
    for name, table in TABLES.items():
        assert {current.name_of(row) for row in table.rows} == {name}
        for problem in table.problems():
            runs = {(row["env_date"], row["env_commit"]) for row in problem}
            assert len(runs) == 1, f"{name}: times of two runs are compared"
    assert {path.name for path in current.FOLDER.iterdir()} == {f"{name}.csv" for name in TABLES}


# --- How runs are merged ----------------------------------------------------------------------------------------------


def add_run(folder: pathlib.Path, date: str, problems: list[TableProblem], us: float, *, failed: str = "") -> None:
    """Writes a run as the harness does: XLA takes twice as long as the fused operation."""
    facts = {"date": date, "commit": "0123456", "command": f"python -m {date}", "jax": "jax 0.11.2, jaxlib 0.11.2",
             "devices": "2 of 2 x NVIDIA H200 (one process)"}  # fmt: skip
    for problem in problems:
        times = {"fused": us, "xla": 2 * us}
        results = [Result(name, loop_us=[time], wall_us=[time]) for name, time in times.items()]
        if problem.shape == failed:
            results = [Result(name, status="ERROR RuntimeError: out of memory") for name in times]
        path = report.add(folder, report.Table(problem, results).rows(), facts)
        assert path == folder / f"{OP}-h200-2-one_process.csv" and list(folder.iterdir()) == [path]


def test_a_run_replaces_the_rows_of_its_problems_and_no_others(tmp_path: pathlib.Path) -> None:
    small, large, other = parse(OP, 2, ["64x64x64", "128x64x64", "96x64x64"], "bf16", None)
    add_run(tmp_path, "day 1", [large, small], 10.0)
    add_run(tmp_path, "day 2", [large, other], 5.0)
    (table,) = current.tables(tmp_path)
    assert [(row["shape"], row["method"], row["loop_us"], row["env_date"]) for row in table.rows] == [
        ("64x64x64", "fused", "10", "day 1"), ("64x64x64", "xla", "20", "day 1"),
        ("96x64x64", "fused", "5", "day 2"), ("96x64x64", "xla", "10", "day 2"),
        ("128x64x64", "fused", "5", "day 2"), ("128x64x64", "xla", "10", "day 2"),
    ]  # fmt: skip
    text = (tmp_path / f"{table.name}.csv").read_text()
    assert text.count("python -m day 2") == 2, "only the first row of a problem names its run"


def test_a_run_that_failed_replaces_nothing(tmp_path: pathlib.Path) -> None:
    small, large = parse(OP, 2, ["64x64x64", "128x64x64"], "bf16", None)
    add_run(tmp_path, "day 1", [small], 10.0)
    add_run(tmp_path, "day 2", [small, large], 5.0, failed="64x64x64")
    (table,) = current.tables(tmp_path)
    times = {(row["shape"], row["method"]): (row["loop_us"], row["env_date"]) for row in table.rows}
    assert times["64x64x64", "fused"] == ("10", "day 1") and times["128x64x64", "fused"] == ("5", "day 2")


@pytest.mark.parametrize(
    ("operation", "devices", "name"),
    [
        ("matmul", "1 of 8 x NVIDIA H200 (one process)", "matmul-h200-1-one_process"),
        (OP, "8 of 8 x NVIDIA H100 80GB HBM3 (8 processes)", f"{OP}-h100_80gb_hbm3-8-process_each"),
        (OP, "8 of 8 x NVIDIA B200 (2 processes)", f"{OP}-b200-8-2_processes"),
    ],
)
def test_names_say_operation_device_count_and_layout(operation: str, devices: str, name: str) -> None:
    assert current.name_of({"op": operation, "env_devices": devices}) == name


@pytest.mark.parametrize(
    ("table", "methods"), [("matmul", {"fused", "xla"}), ("block", {"chosen", "xla", "xla again"})]
)
def test_the_harness_adds_to_the_current_table(table: str, methods: set[str], tmp_path: pathlib.Path) -> None:
    options = ["--methods", "fused,xla" if table == "matmul" else "chosen,xla"]
    line = [sys.executable, "-m", "benchmarks", table, "--dry-run", *options, "--out", str(tmp_path)]
    done = subprocess.run(line, cwd=performance.ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    (found,) = current.tables(tmp_path)
    assert found.name == f"{table}-cpu-{found.devices}-one_process" and found.device_kind == "cpu"
    assert {row["method"] for row in found.rows} == methods
