"""Numbers are reproducible: what a time includes, to which code results belong, how they are stored and shown."""

from __future__ import annotations

import csv
import pathlib
import re
import subprocess
from typing import Any

import jax.numpy as jnp
import pytest

from benchmarks import crossover, current, environment, performance, report
from benchmarks.harness import Result
from benchmarks.problems import TableProblem, parse
from overlap.choice.crossover import FILE as CROSSOVER
from overlap.choice.problem import Problem
from overlap.tuning import timing

pytestmark = pytest.mark.one_jax
TABLES = {table.name: table for table in current.tables()}
OP = "all_gather_lhs_matmul"


# --- Times ------------------------------------------------------------------------------------------------------------


class Clock:
    """Replaces `time`: launching and waiting take the given times."""

    def __init__(self) -> None:
        self.now, self.queued, self.noise = 0.0, 0.0, list[float]()

    def launch(self) -> None:
        self.now += 1.0  # Time on the host; the devices work behind it.
        self.queued = max(self.queued, self.now) + 50.0

    def wait(self, outputs: object) -> None:
        self.now = max(self.queued, self.now) + 300.0 + (self.noise.pop(0) if self.noise else 0.0)

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    result = Clock()
    monkeypatch.setattr(timing, "time", result)
    monkeypatch.setattr(timing.jax, "block_until_ready", result.wait)
    return result


def test_what_a_program_costs_beside_its_work_is_in_no_time(clock: Clock) -> None:
    """A difference that noise has eaten is measured again."""

    def program(state: Any, fixed: Any) -> Any:
        clock.launch()
        return state

    operands, problem = (jnp.zeros(()), jnp.zeros(())), Problem("matmul", 1, 1, 1, "float16", "float16")
    loop = timing.Loop(problem, program, 10, operands, operands[0])  # Of ten calls.
    for launches in (1, 2, 5):
        assert loop.call_s(launches) == pytest.approx(50.0 / 10)
    launched = []
    call = lambda *_: launched.append(clock.launch())  # noqa: E731
    assert timing.calls_s(call, (None, None), 10) == pytest.approx((1 + 10 * 50 + 300) / 10)
    assert len(launched) == 1 + 10  # The first one is not timed.
    # In the order of the waits: the launch ahead, the short loop, the long loop.
    clock.noise = [0, 900, 0]
    assert loop.call_s(2) == pytest.approx(50.0 / 10)
    # The time is never below the observed one: all of the longer loop, including its launch.
    clock.noise = [0, 900, 0] * timing._TRIES
    assert loop.call_s(2) == pytest.approx((301 + 3 * 50) / 3 / 10)


# --- Code -------------------------------------------------------------------------------------------------------------


def git(root: pathlib.Path, *arguments: str) -> str:
    line = ["git", "-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false", *arguments]
    return subprocess.run(line, cwd=root, check=True, capture_output=True, text=True).stdout.strip()


def facts(named: str | None, root: pathlib.Path) -> dict[str, str]:
    found = environment.code_facts(named, root)
    assert found.pop("command").startswith("python ")
    return found


def test_a_clean_tree_is_its_commit_and_one_that_differs_is_refused(tmp_path: pathlib.Path) -> None:
    for name in ("overlap/kernels/a.py", "overlap/table.csv", "benchmarks/h.py", "README.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"# {name}\n")
    git(tmp_path, "init", "-q", "-b", "main")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-q", "-m", "first")
    head, folder = git(tmp_path, "rev-parse", "HEAD"), git(tmp_path, "rev-parse", "HEAD:overlap")
    expected = {"commit": head[:12], "code": f"overlap {folder[:12]}"}
    # Files that no number depends on may differ: documents, and results that are being written.
    (tmp_path / "README.md").write_text("new\n")
    (tmp_path / "benchmarks/results").mkdir()
    (tmp_path / "benchmarks/results/a.csv").write_text("1\n")
    assert facts(None, tmp_path) == facts(head[:7], tmp_path) == expected
    for path in ("overlap/kernels/a.py", "overlap/new.py", "benchmarks/h.py"):
        before = (tmp_path / path).read_bytes() if (tmp_path / path).exists() else None
        (tmp_path / path).write_text("# not committed\n")
        with pytest.raises(SystemExit, match=f"differs from commit [0-9a-f]{{12}} in {path}: commit that first"):
            facts(None, tmp_path)
        (tmp_path / path).unlink() if before is None else (tmp_path / path).write_bytes(before)
    # Without the history the commit has to be named, and can be verified later.
    (tmp_path / ".git").rename(tmp_path / "kept")
    with pytest.raises(SystemExit, match="has no commit HEAD: add --commit with all 40 digits"):
        facts(None, tmp_path)
    found = facts(head, tmp_path)
    assert found == expected | {"commit": f"{head[:12]} ({environment.UNVERIFIED})"}
    (tmp_path / "kept").rename(tmp_path / ".git")
    assert not contradiction(found, tmp_path)
    assert "another hash" in contradiction(found | {"code": "overlap 0123456789ab"}, tmp_path)


# --- The stored results -----------------------------------------------------------------------------------------------


def contradiction(facts: dict[str, str], root: pathlib.Path) -> str:
    """Says why `facts` about a run do not agree with the history of `root`; "" if they agree or say why they cannot."""
    name, _, remark = facts["commit"].partition(" (")
    if remark.startswith("not in this history"):
        return ""
    commit = environment.git(root, "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
    if commit is None or environment.git(root, "merge-base", "--is-ancestor", commit, "HEAD") is None:
        return f"{name} is no commit of this history, and does not say so"
    code = facts["code"].removeprefix("overlap ")
    if remark.startswith(environment.UNVERIFIED) and not code:
        return f"{name} is unverified, and no hash of overlap/ is recorded"
    told = environment.git(root, "rev-parse", f"{commit}:overlap") or ""
    differs = code and not remark.startswith(("with changes", "before it")) and not told.startswith(code)
    return f"overlap/ of {name} has another hash than {code}" if differs else ""


def test_every_result_names_a_commit_of_the_history_or_says_that_it_cannot() -> None:
    root = environment.REPOSITORY
    if not (root / ".git").exists() or environment.git(root, "rev-parse", "--is-shallow-repository") != "false":
        pytest.skip("needs the history: this is a copy without .git, or a shallow clone")
    runs = {(row["env_commit"], row.get("env_code") or "") for table in TABLES.values() for row in table.rows}
    assert len(runs) > 20
    assert not [said for commit, code in runs if (said := contradiction({"commit": commit, "code": code}, root))]


def test_every_row_of_the_choosers_table_is_that_of_the_result_it_names() -> None:
    measured: dict[str, dict[str, dict[str, object]]] = {}
    with CROSSOVER.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) > 100
    for row in rows:
        name = row["result"]
        if name not in measured:
            path = crossover.FOLDER / (f"{name}.csv.xz" if name.startswith("model/") else f"{name}.csv")
            measured[name] = {"/".join(str(of[key]) for key in row): of for of in crossover.rows_of(path)}
        assert (
            "/".join(str(float(text) if key.endswith("_us") else text) for key, text in row.items()) in measured[name]
        )


def test_every_file_lies_under_the_name_of_its_rows() -> None:
    assert len(TABLES) >= 10
    for name, table in TABLES.items():
        assert {current.name_of(row) for row in table.rows} == {name}
        for problem in table.problems():
            runs = {(row["env_date"], row["env_commit"]) for row in problem}
            assert len(runs) == 1, f"{name}: times of two runs are compared"
    assert {path.name for path in current.FOLDER.iterdir()} == {f"{name}.csv" for name in TABLES}
    for operation, devices, name in (
        ("matmul", "1 of 8 x NVIDIA H200 (one process)", "matmul-h200-1-one_process"),
        (OP, "8 of 8 x NVIDIA H100 80GB HBM3 (8 processes)", f"{OP}-h100_80gb_hbm3-8-process_each"),
        (OP, "8 of 8 x NVIDIA B200 (2 processes)", f"{OP}-b200-8-2_processes"),
    ):
        assert current.name_of({"op": operation, "env_devices": devices}) == name


def test_pages_and_figures_agree_with_the_results() -> None:
    pytest.importorskip("matplotlib")
    for path, text in performance.generated().items():
        assert path.read_text(encoding="utf-8") == text, f"{path}: run `python -m benchmarks.performance`"
    # The control: a number that is changed in a page is noticed.
    page, given = performance.PAGES[0].read_text(encoding="utf-8"), list(TABLES.values())
    row = next(line for line in page.splitlines() if line.startswith("| `matmul`"))
    changed = page.replace(row, row.replace(".", ",", 1))
    assert changed != page and performance.text(changed, given) == page
    needed = {table.operation for table in given} | performance._OF_ALL.keys()
    pages = "".join(path.read_text(encoding="utf-8") for path in performance.PAGES)
    assert set(re.findall(r"results: (\w+) -->", pages)) >= needed


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


def test_a_run_replaces_the_rows_of_its_problems_and_no_others_and_one_that_failed_nothing(tmp_path) -> None:
    small, large, other = parse(OP, 2, ["64x64x64", "128x64x64", "96x64x64"], "bf16", None)
    add_run(tmp_path, "day 1", [large, small], 10.0)
    add_run(tmp_path, "day 2", [small, large, other], 5.0, failed="64x64x64")
    (table,) = current.tables(tmp_path)
    assert [(row["shape"], row["method"], row["loop_us"], row["env_date"]) for row in table.rows] == [
        ("64x64x64", "fused", "10", "day 1"), ("64x64x64", "xla", "20", "day 1"),
        ("96x64x64", "fused", "5", "day 2"), ("96x64x64", "xla", "10", "day 2"),
        ("128x64x64", "fused", "5", "day 2"), ("128x64x64", "xla", "10", "day 2"),
    ]  # fmt: skip
    text = (tmp_path / f"{table.name}.csv").read_text()
    assert text.count("python -m day 2") == 2, "only the first row of a problem names its run"
