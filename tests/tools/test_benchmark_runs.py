"""A run of the benchmarks: what it measures, refuses by name, shows and writes; made-up times, and dry runs on CPUs."""

from __future__ import annotations

import collections
import dataclasses
import faulthandler
import importlib
import math
import pathlib
import re
import types

import jax
import pytest
from jax import lax

from benchmarks import backward, block, current, experts, figures, harness, layer_runs, performance, products, report
from benchmarks.harness import Result, Session
from benchmarks.problems import TableProblem, parse
from overlap.cli import devices as devices_of_cli
from overlap.cli import ending
from overlap.emulation import emulate
from overlap.tuning.programs import mesh_of

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


# --- Blocks and products of layers ------------------------------------------------------------------------------------


def test_the_fused_block_computes_the_same_and_shares_what_it_can():
    """`block.measure` compares the tokens after a turn of the block with its backward pass."""
    with emulate(cores=3, keep=True) as run:
        block.measure(mesh_of(jax.devices()[:2]), (32, 64, 128), True, ("fused", "xla"), rounds=0, turns=1)
        run.check()
    # Forward: one gather and one scatter. Backward: a gather for the last product, and one scatter of the sum of the
    # products that share the first gather.
    assert collections.Counter(launch.name.split("_")[1] for launch in run.launches) == {"all": 2, "matmul": 2}


def test_a_wrong_block_and_a_wrong_product_are_noticed(monkeypatch):
    right, mesh, sizes = block.mlp, mesh_of(jax.devices()[:2]), layer_runs.MODELS["tiny"]
    monkeypatch.setattr(block, "mlp", lambda how, *a: right(how, *a) * (1.0 if how == "plain" else 1.1) + a[0])
    with pytest.raises(AssertionError, match="chosen differs from XLA"):
        block.measure(mesh, (32, 64, 128), False, ("chosen", "xla"), rounds=1, turns=1)
    (product,) = (product for product in backward.products(sizes, 32) if product.name == "dW of o")
    scaled = lambda dy, h: [1.1 * (h.T @ lax.all_gather(dy, "x", tiled=True))]  # noqa: E731
    product = dataclasses.replace(product, ours={"fused": scaled})
    with pytest.raises(AssertionError, match="fused differs from XLA"):
        backward.measure(product, mesh, ("fused", "xla"), rounds=1, turns=1)


def test_experts_may_be_measured_without_xla_and_are_drawn(tmp_path, monkeypatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    monkeypatch.setattr(experts, "measure", lambda made, rounds, turns: {name: [50.0] for name in made})
    options = "--dry-run", "--devices", "2", "--routings", "balanced", "--out", str(tmp_path), "--products"
    for methods in (["fused", "layer"], ["fused", "xla", "layer", "tokamax"]):
        assert experts.main([*options, *experts.PASSES, "up", "--methods", *methods]) == 0
        given = current.tables(tmp_path)
        page = performance.text("<!-- results: experts -->\n<!-- end -->", given)
        assert page.count(f"balanced | 50.0 | {'1.00' if 'xla' in methods else '–'} | – | – | – |") == 3
        theirs = "50 | 1.00" if "tokamax" in methods else "– | –"
        assert page.count(f" | 32 | forward | 50 | 0 | {theirs} |") == 1
        with figures._style(), monkeypatch.context() as patch:
            patch.setattr(figures, "_svg", lambda axes: [line.get_xydata().tolist() for line in axes.lines])
            points = [points for points in figures._experts(given) if points]
        # 64 tokens choose 4 experts each. Three products of 128 x 128.
        of_forward = 32 * 4 * 3 * 2 * 128 * 128 / 50 / 1e6
        expected = sorted([[[32, of_forward]], [[32, 3 * of_forward]]] * (2 if "tokamax" in methods else 1))
        assert sorted(points) == [[pytest.approx(point) for point in line] for line in expected]


# --- Problems ---------------------------------------------------------------------------------------------------------


GATHER = "all_gather_lhs_matmul"


def problems(table: str, *options: str, devices: int = 1) -> list[TableProblem]:
    return products.problems(products.parser(table).parse_args(options), table, devices)


def test_shapes_carry_a_dtype_and_a_layout() -> None:
    given = ["1x2x3", "4x5x6:bf16:nt", "7x8x9:tt", "7x8x9:f8_e5m2"]
    found = [str(problem) for problem in parse("matmul", 1, given, "f16", ["nn", "tn"])]
    assert found[:4] == ["1x2x3 f16 nn", "1x2x3 f16 tn", "4x5x6 bf16 nt", "7x8x9 f16 tt"]
    found = [str(problem) for problem in parse("matmul", 1, given, "f16", None)]
    assert found[-2:] == ["7x8x9 f16 tt", "7x8x9 f8_e5m2 nt"]
    for wrong in ("1x2", "1x2x3:f64", "1x2x3:nn:nt", "1x0x3"):
        with pytest.raises(SystemExit, match="MxNxK"):
            parse("matmul", 1, [wrong], "f16", None)
    first, second = problems("matmul", "--shapes", "1x2x3:bf16,4x5x6", devices=8)
    assert (first.m, first.n, first.k, first.dtype) == (1, 2, 3, "bf16")
    assert (second.shape, second.dtype, second.devices) == ("4x5x6", "f16", 8)


def test_the_standard_suite_is_thirteen_shapes_in_three_layouts_and_f8_in_one() -> None:
    found = problems("matmul", "--suite", "standard", "--dtype", "bf16")
    assert len(found) == len(set(found)) == 13 * 3
    assert {problem.layout for problem in found} == {"nn", "nt", "tn"}
    in_f8 = problems("matmul", "--suite", "standard", "--dtype", "f8_e4m3fn")
    assert len(in_f8) == 13 and {problem.layout for problem in in_f8} == {"nt"}
    gathered = problems(GATHER, "--shapes", "1x2x3:f8_e5m2,1x2x3:bf16", devices=2)
    assert [problem.layout for problem in gathered] == ["nt", "nn"]
    for table, options, said in (
        ("matmul", ("--layouts", "nn,xy"), "nn, nt, tn, tt"),
        ("ladder", ("--shapes", "1x2x3:nt"), "layout nn alone"),
        (GATHER, ("--shapes", "1x2x3:tn"), "layout nn, nt alone"),
    ):
        with pytest.raises(SystemExit, match=said):
            problems(table, *options, devices=2)


# --- Command lines ----------------------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with some files, which the command lines name by a relative path. Nothing may be written there."""
    (tmp_path / "file").write_text("a,b\n1,2\n")
    (tmp_path / "empty").touch()
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["empty", "file"]


def refused(line: str, capsys) -> str:
    """The last line that a command prints; the command must exit with status 2 (1 for a missing file)."""
    name, *options = line.split(" ")
    try:
        status = ending.run(lambda: importlib.import_module(f"benchmarks.{name or '__main__'}").main(options))
    except SystemExit as end:
        status = end.code
    said = capsys.readouterr()
    assert status == (1 if "No such file" in said.err else 2) and not said.out, (status, said)
    return said.err.splitlines()[-1]


TABLES = [
    (" nothing", "got 'nothing'"),
    *((f" --dry-run --{name} {text}", f"--{name}") for name in
      ("devices", "rounds", "timeout-s", "budget-s") for text in ("-1", "text")),
    (" --dry-run --devices 99", "`--devices` must be at most 8 with `--dry-run`, got 99"),
    (" --dry-run --dtype zz", "--dtype: invalid choice"),
    (" --dry-run --shapes 0x8x8", "`--shapes`"),
    (" --dry-run --suite zz", "--suite"),
    (" --dry-run --layouts zz", "`--layouts`"),
    (" --dry-run --variants xla:stages=3", "--variants: must begin with `fused`"),
    (" --dry-run --variants fused:stages", "--variants: must be NAME=VALUE"),
    *((f" block --dry-run --{name} {text}", f"--{name}") for name in
      ("devices", "rounds", "tokens") for text in ("0", "text")),
]  # fmt: skip
TOOLS = [
    ("configurations --tasks missing --out new", "missing: No such file"),
    ("configurations --tasks file --out new", "`--tasks` file is no task file"),
    ("configurations --tasks empty --out new", "`--tasks` empty is empty"),
    ("configurations --tasks file --out missing/new", "--out: there is no folder missing"),
    ("configurations --tasks file --out new --budget-s nan", "--budget-s"),
    *((f"configurations --tasks file --out new --{name} 0", f"--{name}") for name in ("workers", "gpus", "samples")),
    ("crossover missing --out new", "missing: No such file"),
    ("crossover file --out new", "file is no result of a benchmark"),
    ("fit_model --times missing", "missing: No such file"),
    ("fit_model --judge --times file", "file holds no times"),
    ("known_models tasks --out new --limit 0", "--limit"),
    ("known_models table file --jax 0.12", "file holds no times"),
    ("model_tasks --seed nan --problems 1 --out new", "--seed"),
    ("model_tasks --seed 1 --problems 0 --out new", "--problems"),
]


@pytest.mark.parametrize("lines", [TABLES, TOOLS], ids=["tables", "tools"])
def test_what_makes_no_sense_is_refused_by_name(here, capsys, lines):
    for line, named in lines:
        assert named in refused(line, capsys), line


def test_without_a_gpu_tables_ask_for_a_dry_run(here, capsys, monkeypatch):
    monkeypatch.setattr(devices_of_cli, "why_no_gpu", lambda: "no GPU is visible")
    asked = (
        "nothing was measured: no GPU is visible; run it on GPUs, or add --dry-run to try the harness on CPU devices"
    )
    for line in (" --rounds 3", " block", " ladder", " matmul --out results"):
        assert refused(line, capsys) == asked
