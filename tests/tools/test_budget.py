"""The budget of the tests fails a run that takes too long, on a machine of any speed."""

from __future__ import annotations

import types
from typing import Any

import pytest

from tests.budget import Budget

pytestmark = pytest.mark.one_jax


def finished(used_of_budget: float, slowness: float) -> pytest.ExitCode:
    budget, session = Budget("jax-0-11"), types.SimpleNamespace(exitstatus=pytest.ExitCode.OK)
    seconds = {folder: used_of_budget * slowness * most for folder, most in budget.budget_s.items()}
    for folder, cpu_s in seconds.items():
        properties = [("cpu_s", cpu_s), ("loop_s", slowness * budget.loop_s)]
        report: Any = types.SimpleNamespace(nodeid=f"tests/{folder}/test_x.py::test_y", user_properties=properties)
        budget.pytest_runtest_logreport(report)
    budget.pytest_sessionfinish(session)  # pyright: ignore[reportArgumentType]
    return session.exitstatus


def test_a_run_over_its_budget_fails():
    for slowness in (1.0, 3.0):
        assert finished(1.0, slowness) == finished(1.2, slowness) == pytest.ExitCode.OK
        assert finished(1.3, slowness) == pytest.ExitCode.TESTS_FAILED
    with pytest.raises(pytest.UsageError, match=r"--budget jax-0-1: tests/budget.toml has no table"):
        Budget("jax-0-1")
