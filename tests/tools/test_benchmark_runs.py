"""What a run of the benchmarks shows and writes: reports of made-up times, and dry runs on CPU devices."""

from __future__ import annotations

import faulthandler
import math
import pathlib
import re
import types

import jax
import pytest

from benchmarks import current, harness, products, report
from benchmarks.harness import Result, Session
from benchmarks.problems import TableProblem

pytestmark = pytest.mark.one_jax


def synthetic() -> report.Table:
    results = [
        Result("fused", loop_us=[100.0, 200.0, 110.0], wall_us=[120.0, 130.0, 110.0], error=1e-4, error_bound=4e-4),
        Result("xla", loop_us=[150.0, 240.0, 143.0], wall_us=[180.0, 130.0, 220.0], error=2e-4, error_bound=4e-4),
        Result("roof", loop_us=[90.0, 190.0, 121.0], wall_us=[60.0, 65.0, 110.0], error=2e-4, error_bound=4e-4),
        Result("fused:stages=9", status="ERROR ValueError: too large", error_bound=4e-4),
    ]
    problem = TableProblem("all_gather_lhs_matmul", 4, 1024, 4096, 4096, "bf16")
    return report.Table(problem, results, loop_overhead_us=2.5)


def test_ratios_are_formed_per_round_and_rates_from_the_median(capsys, tmp_path) -> None:
    facts = {"devices": "4 of 4 x NVIDIA H200 (one process)", "commit": "abc", "date": "today"}
    rows = current.read(report.add(tmp_path, synthetic().rows(), facts))
    assert tuple(rows[0]) == (*report.COLUMNS, *(f"env_{name}" for name in facts)) and rows[0]["env_commit"] == "abc"
    assert float(rows[0]["xla_over_this"]) == pytest.approx(1.3)
    assert rows[3]["status"] == "ERROR ValueError: too large" and rows[3]["loop_us"] == ""
    fused, xla, roof, failed = synthetic().rows()
    # Ratios per round are 1.5, 1.2, 1.3; the ratio of the medians would be 150 / 110.
    ratios = ("xla_over_this", 1.3), ("roof_over_this", 0.95), ("xla_over_this_wall", 1.5), ("roof_over_this_wall", 0.5)
    for name, value in ratios:
        assert fused[name] == pytest.approx(value)
    assert xla["xla_over_this"] == roof["roof_over_this"] == 1.0
    assert fused["loop_us"] == 110.0
    assert fused["tflops_per_device"] == pytest.approx(2 * 4096 * 4096 * 4096 / 110e-6 / 1e12)
    assert fused["received_gb_per_s_per_device"] == pytest.approx(3 * 1024 * 4096 * 2 / 110e-6 / 1e9)
    assert failed["loop_us"] is None and failed["xla_over_this"] is None
    # Losses are shown, and a missing competitor leaves a gap.
    fused, xla, *_ = synthetic().results
    xla.loop_us = [50.0, 100.0, 55.0]
    table = report.Table(synthetic().problem, [fused, xla])
    assert table.rows()[0]["xla_over_this"] == pytest.approx(0.5) and table.rows()[0]["roof_over_this"] is None
    report.show(table)
    assert re.search(r"0\.500 │ +– │", capsys.readouterr().out)


# --- Whole runs -------------------------------------------------------------------------------------------------------


@pytest.fixture
def dry_run(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    """Makes a dry run in this process, whose CPU devices are there already. Returns its exit status and its rows."""

    def run(table: str, *options: str) -> tuple[int, list[dict[str, str]]]:
        with monkeypatch.context() as patch:
            patch.setattr(jax.config, "update", lambda *_: None)
            status = products.main(table, ["--dry-run", "--timeout-s", "9999", "--out", str(tmp_path), *options])
        (found,) = current.tables(tmp_path)
        return status, list(found.rows)

    return run


def test_a_dry_run_measures_the_emulated_operation_and_reports_a_variant_that_does_not_fit(dry_run, capsys) -> None:
    options = ["--devices", "2", "--methods", "fused,xla", "--rounds", "1", "--variants", "fused", "fused:stages=99"]
    status, rows = dry_run("all_gather_lhs_matmul", *options)
    assert [row["method"] for row in rows] == ["fused", "fused:stages=99", "xla"]
    assert [row["status"].split()[0] for row in rows] == ["ok", "ERROR", "ok"], rows
    assert float(rows[0]["error"]) <= float(rows[0]["error_bound"]) and rows[0]["shape"] == "128x256x128"
    for row in (rows[0], rows[2]):
        assert math.isfinite(float(row["loop_us"])) and float(row["xla_over_this"]) > 0
    assert status == 1, "a method that did not run shows in the exit status"
    assert "roof/this" in capsys.readouterr().out


def test_one_problem_fails_and_another_does_not_fit_into_the_budget(dry_run, tmp_path, monkeypatch, capsys) -> None:
    """A step that hangs would end the process with the stacks of its threads. The problems before it are written."""
    now, limits, measure_overhead = [0.0], [], Session.measure_overhead

    def a_minute_passes(self: Session) -> None:
        now[0] += 60
        if now[0] == 60:
            raise RuntimeError("out of memory")
        assert len(current.tables(tmp_path)) == 1
        measure_overhead(self)

    monkeypatch.setattr(harness.Session, "measure_overhead", a_minute_passes)
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda s, **options: limits.append((float(s), options)))
    clock = types.SimpleNamespace(monotonic=lambda: now[0], time=lambda: 7.0, strftime=lambda _: "now")
    monkeypatch.setattr(products, "time", clock)
    # The third problem would begin after 120 seconds and end after 180. What is not served is no error.
    shapes = "32x64x64,97x64x64,96x64x64"
    status, rows = dry_run(
        "matmul", "--shapes", shapes, "--layouts", "tn", "--methods", "fused,xla", "--budget-s", "150"
    )
    found = [(row["shape"], row["layout"], row["method"], row["status"].split(":")[0]) for row in rows]
    assert found == [
        ("32x64x64", "tn", "fused", "ERROR RuntimeError"), ("32x64x64", "tn", "xla", "ERROR RuntimeError"),
        ("97x64x64", "tn", "fused", "NOT SERVED"), ("97x64x64", "tn", "xla", "ok"),
    ]  # fmt: skip
    assert status == 1 and rows[3]["roof_over_this"] == "1"
    said = capsys.readouterr()
    assert len(limits) > 4 and all(limit == (9999.0, {"exit": True, "file": 2}) for limit in limits)  # At each step.
    assert "  xla, status: ERROR RuntimeError: out of memory" in said.out
    assert "no time left for 1 of 3 problems: 96x64x64 f16 tn" in said.err
