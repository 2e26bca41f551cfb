"""The budget of the tests in CPU seconds by folder: what a run took, beside what tests/budget.toml allows.

`--budget NAME` prints the table and fails the run if a folder takes more than 1.25 times its budget. Seconds are those
of the process and of its children, divided by the machine's slowness: the time of a fixed loop over the loop's time on
the machine where the budget was written. The loop runs now and then between tests, so that it is as slow as they are on
a busy machine. To give a folder more, take it from another one: the sum is budgeted too.
"""

from __future__ import annotations

import collections
import os
import pathlib
import statistics
import time
import tomllib
from collections.abc import Generator

import pytest

ALLOWED = 1.25
_FILE = pathlib.Path(__file__).with_name("budget.toml")
_PROPERTY, _LOOP, _LOOP_EVERY = "cpu_s", "loop_s", 20  # Tests.


def _cpu_s() -> float:
    return sum(os.times()[:4])


def _loop_s() -> float:
    """Times the fixed loop."""
    start = time.process_time()
    sum(number * number for number in range(200_000))
    return time.process_time() - start


def slowness() -> float:
    """Returns how many times slower this machine is now than the one where the budget was written."""
    return max(1.0, _loop_s() / tomllib.loads(_FILE.read_text())["loop_s"])


class Budget:
    """A plugin of pytest. With xdist the workers measure, and the controller adds what their reports say."""

    def __init__(self, name: str) -> None:
        text = tomllib.loads(_FILE.read_text())
        self.loop_s: float = text["loop_s"]
        if name not in text:
            raise pytest.UsageError(f"--budget {name}: tests/budget.toml has no table of this name")
        self.budget_s: dict[str, float] = text[name]
        self.used_s: collections.Counter[str] = collections.Counter()
        self.last_s, self.tests = _cpu_s(), 0
        self.loops_s: list[float] = []
        self.table: list[tuple[str, float, float]] = []

    def pytest_collection_finish(self) -> None:
        self.last_s = _cpu_s()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        report.user_properties.append((_PROPERTY, _cpu_s() - self.last_s))
        self.tests += report.when == "teardown"
        if report.when == "teardown" and self.tests % _LOOP_EVERY == 0:
            report.user_properties.append((_LOOP, _loop_s()))
        self.last_s = _cpu_s()
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        folder = report.nodeid.split("/")[1]
        for name, value in report.user_properties:
            self.used_s[folder] += value if name == _PROPERTY else 0.0
            self.loops_s += [value] if name == _LOOP else []

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        slowness = max(1.0, statistics.median([*self.loops_s, self.loop_s]) / self.loop_s)
        folders = sorted({*self.used_s, *self.budget_s})
        self.table = [(name, self.used_s[name] / slowness, self.budget_s.get(name, 0.0)) for name in folders]
        self.table.append(("all", sum(row[1] for row in self.table), sum(row[2] for row in self.table)))
        if any(map(_over, self.table)) and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("CPU seconds by folder, beside the budget")
        terminalreporter.line(f"The fixed loop took {statistics.median(self.loops_s or [0.0]):.4f} s.")
        for row in self.table:
            remark = f"  more than {ALLOWED} times the budget (tests/budget.toml)" * _over(row)
            terminalreporter.line("{:12}{:8.0f} of {:5.0f}".format(*row) + remark, red=_over(row))


def _over(row: tuple[str, float, float]) -> bool:
    return row[1] > ALLOWED * row[2]
