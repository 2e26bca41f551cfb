"""The benchmark harness on CPU devices: checks, output files, how ratios are formed, what a loop may copy."""

from __future__ import annotations

import functools
import json
import math
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from benchmarks import current, methods, products, report
from benchmarks.harness import Method, Result, Session, Settings
from benchmarks.loop_copies import copies_in_loops
from benchmarks.problems import TableProblem
from overlap.tuning.operations import AXIS, gather, unfused
from overlap.tuning.programs import draw_operands, loop_program
from tests import assembly

pytestmark = pytest.mark.one_jax
REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
QUICK = Settings(rounds=3, iterations=2, launches=1, calls=1, warmup_s=0.0)
PROBLEM = TableProblem("all_gather_lhs_matmul", 2, 128, 256, 64, "f16")
reference = functools.partial(unfused, PROBLEM.library)


@pytest.fixture
def mesh() -> Mesh:
    if jax.device_count() < 2:
        pytest.skip("needs 2 devices: the tests' conftest asks for several CPU devices")
    return Mesh(np.array(jax.devices()[:2]), (AXIS,))


def measure(mesh: Mesh, *candidates: Method) -> Session:
    session = Session(PROBLEM.library, mesh, QUICK)
    for method in candidates:
        session.add(method)
    for number in range(QUICK.rounds):
        session.run_round(number)
    session.finish()
    return session


# --- Which methods are timed ------------------------------------------------------------------------------------------


def test_a_right_method_is_timed_in_every_round(mesh: Mesh) -> None:
    (xla, roof) = measure(mesh, Method("xla", reference), Method("roof", jnp.dot, gathered=True)).results
    for result in (xla, roof):
        assert result.ok
        assert len(result.loop_us) == len(result.wall_us) == QUICK.rounds
        assert min(result.loop_us) > 0
        assert result.error is not None and 0 < result.error < 1e-3


def zeros(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    return jnp.zeros_like(reference(lhs, rhs))


def not_a_number(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    return reference(lhs, rhs).at[0, 0].set(jnp.nan)


def one_tile_missing(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    return reference(lhs, rhs).at[:8, :8].set(0)


def own_shard_only(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    return jnp.tile(lhs @ rhs, (2, 1))


def coarse(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    lhs, rhs = gather(PROBLEM.library, lhs, rhs)
    return jnp.dot(lhs.astype(jnp.bfloat16), rhs.astype(jnp.bfloat16)).astype(lhs.dtype)


@pytest.mark.parametrize("wrong", [zeros, not_a_number, one_tile_missing, own_shard_only, coarse])
def test_a_wrong_method_is_shown_as_failed_and_not_timed(mesh: Mesh, wrong, capsys) -> None:
    session = measure(mesh, Method("wrong", wrong), Method("xla", reference))
    bad, good = session.results
    assert bad.status.startswith("FAILED: error ")
    assert bad.loop_us == bad.wall_us == []
    assert good.ok and len(good.loop_us) == QUICK.rounds
    row = report.Table(PROBLEM, session.results).rows()[0]
    assert row["method"] == "wrong" and row["loop_us"] is None and row["xla_over_this"] is None
    report.show(report.Table(PROBLEM, session.results))
    assert "  wrong, status: FAILED: error " in capsys.readouterr().out


def test_a_method_that_raises_is_reported_and_the_others_go_on(mesh: Mesh) -> None:
    def raises(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        raise ValueError("no tile\nfits")

    bad, good = measure(mesh, Method("bad", raises), Method("xla", reference)).results
    assert bad.status == "ERROR ValueError: no tile fits"
    assert good.ok and len(good.loop_us) == QUICK.rounds


def test_a_result_that_goes_wrong_inside_the_loop_is_noticed(mesh: Mesh) -> None:
    session = Session(PROBLEM.library, mesh, QUICK)
    session.add(Method("xla", reference))
    session.run_round(0)
    loop = session.prepared[0].loop
    loop.state = (loop.operands[0], loop.out.at[:8].set(0))
    session.finish()
    (result,) = session.results
    assert result.status.startswith("FAILED after the loop: error ")
    assert report.Table(PROBLEM, session.results).rows()[0]["loop_us"] is None


def test_rounds_are_shuffled_and_repeatable(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(PROBLEM.library, mesh, QUICK)
    for name in "abc":
        session.add(Method(name, reference))
    order: list[str] = []
    monkeypatch.setattr(session, "_time_loop", lambda prepared: order.append(prepared.method.name) or 1e-6)
    monkeypatch.setattr(session, "_time_calls", lambda prepared: 1e-6)
    for number in [*range(8), *range(8)]:
        session.run_round(number)
    rounds = ["".join(order[i : i + 3]) for i in range(0, len(order), 3)]
    assert all(sorted(r) == ["a", "b", "c"] for r in rounds)
    assert rounds[:8] == rounds[8:] and len(set(rounds)) > 2
    # A rotation would keep each method's predecessor, and with it the GPU clocks that the predecessor leaves.
    assert {r[r.index("a") - 1] for r in rounds if r[0] != "a"} == {"b", "c"}


# --- The programs -----------------------------------------------------------------------------------------------------


def test_inputs_are_normal_and_differ_between_devices_and_seeds(mesh: Mesh) -> None:
    lhs, rhs = draw_operands(PROBLEM.library, mesh, 3)
    assert lhs.shape == (256, 64) and rhs.shape == (64, 512)
    values = np.asarray(lhs, np.float64)
    assert abs(values.mean()) < 0.05 and abs(values.std() - 1) < 0.05
    assert not np.array_equal(values[:128], values[128:])
    assert not np.array_equal(np.asarray(rhs)[:, :256], np.asarray(rhs)[:, 256:])
    assert not np.array_equal(values, np.asarray(draw_operands(PROBLEM.library, mesh, 4)[0], np.float64))


def test_the_loop_feeds_each_output_into_the_next_iteration(mesh: Mesh) -> None:
    lhs, rhs = draw_operands(PROBLEM.library, mesh, 5)
    expected = np.array(lhs)
    left, right = np.asarray(lhs, np.float32), np.asarray(rhs, np.float32)
    out = jnp.dot(lhs, rhs)
    product = np.asarray(out, np.float32)
    shards = [left[:128].copy(), left[128:].copy()]
    for _ in range(3):
        for device, shard in enumerate(shards):
            shard[0, 0] = np.float16(np.clip(np.float16(product[0, 256 * device]) * 64**-0.5, -4, 4))
        product = np.concatenate(shards) @ right
    state = loop_program(PROBLEM.library, reference, mesh, 3)((jnp.copy(lhs), out), rhs)
    expected = np.concatenate(shards)
    np.testing.assert_allclose(np.asarray(state[0], np.float32)[[0, 128], 0], expected[[0, 128], 0], atol=5e-3)
    np.testing.assert_allclose(np.asarray(state[1], np.float32), product, atol=0.2)
    # Without the dependency, the element would be unchanged.
    assert np.asarray(state[0])[0, 0] != np.asarray(lhs)[0, 0]


HLO = """
%wrapped_copy_computation (param_0.1: f16[1024,4096]) -> f16[1024,4096] {
  ROOT %copy.1 = f16[1024,4096]{1,0} copy(%param_0.1)
}

%body.7_spmd (param: (s32[], f16[1024,4096])) -> (s32[], f16[1024,4096]) {
  %copy.9 = s32[] copy(%counter)
  %update = f16[1024,4096]{1,0} fusion(%a, %b), kind=kLoop, calls=%fused_dynamic_update_slice
BODY
}

ENTRY %main (param.5: f16[1024,4096]) -> f16[1024,4096] {
  %copy.22 = f16[1024,4096]{1,0} copy(%param.5)
  %while.11 = (s32[], f16[1024,4096]{1,0}) while(%tuple.12), condition=%cond, body=%body.7_spmd, backend_config={}
}
"""


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("  %x = f16[1024,4096]{1,0} custom-call(%update)", []),
        ("  %copy.3 = f16[8,128]{1,0} copy(%update)", []),
        ("  %copy.3 = f16[1024,4096]{1,0} copy(%update)", ["copy.3: f16[1024,4096]"]),
        (
            "  %copy-start.1 = (f16[1024,4096]{1,0}, f16[1024,4096]{1,0}, u32[]) copy-start(%update)",
            ["copy-start.1: f16[1024,4096]"],
        ),
        (
            "  %wrapped_copy = f16[1024,4096]{1,0} fusion(%update), calls=%wrapped_copy_computation",
            ["wrapped_copy: f16[1024,4096]"],
        ),
    ],
)
def test_copies_of_operands_inside_the_loop_are_found(line: str, found: list[str]) -> None:
    assert copies_in_loops(HLO.replace("BODY", line)) == found


LOOPS_FOR_H200 = """
import json
import numpy as np
from jax.sharding import Mesh, PartitionSpec as P
from benchmarks import methods
from benchmarks.loop_copies import copies_in_loops
from benchmarks.problems import TableProblem
from overlap.tuning import programs
from tests import assembly

mesh = Mesh(np.array(assembly.topology("h200", 4)), ("x",))
found = {}
problem = TableProblem("all_gather_lhs_matmul", 4, 4096, 4096, 4096, "f16").library
for method in methods.make(problem, ["fused", "xla", "roof", "own_matmul"], []):
    rows = 16384 if method.gathered else 4096
    lhs = assembly.struct(mesh, (rows, 4096), "f16", P("x", None))
    rhs = assembly.struct(mesh, (4096, 16384), "f16", P(None, "x"))
    out = assembly.struct(mesh, (4096, 16384), "f16", P(None, "x"))
    hlo = programs.loop_program(problem, method.call, mesh, 20).lower((lhs, out), rhs).compile().as_text()
    work = {"fused": "mosaic_gpu", "own_matmul": "mosaic_gpu", "xla": "all-gather-start(", "roof": "dot("}[method.name]
    body = hlo[: hlo.index("ENTRY ")]
    found[method.name] = [copies_in_loops(hlo), "dynamic-update-slice(" in body, work in body,
                          "known_trip_count" in hlo]
print(json.dumps(found))
"""


@pytest.mark.skipif(assembly.unavailable_reason() is not None, reason=str(assembly.unavailable_reason()))
def test_loops_compiled_for_h200_do_the_work_in_every_iteration_and_copy_nothing() -> None:
    environment = assembly.child_environment()
    line = [sys.executable, "-c", LOOPS_FOR_H200]
    done = subprocess.run(
        line, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    expected = [[], True, True, True]
    assert json.loads(done.stdout.splitlines()[-1]) == dict.fromkeys(("fused", "xla", "roof", "own_matmul"), expected)


# --- Reports ----------------------------------------------------------------------------------------------------------


def synthetic() -> report.Table:
    results = [
        Result("fused", loop_us=[100.0, 200.0, 110.0], wall_us=[120.0, 130.0, 110.0], error=1e-4, error_bound=4e-4),
        Result("xla", loop_us=[150.0, 240.0, 143.0], wall_us=[180.0, 130.0, 220.0], error=2e-4, error_bound=4e-4),
        Result("roof", loop_us=[90.0, 190.0, 121.0], wall_us=[60.0, 65.0, 110.0], error=2e-4, error_bound=4e-4),
        Result("fused:stages=9", status="ERROR ValueError: too large", error_bound=4e-4),
    ]
    return report.Table(
        TableProblem("all_gather_lhs_matmul", 4, 1024, 4096, 4096, "bf16"), results, loop_overhead_us=2.5
    )


def test_ratios_are_formed_per_round_and_rates_from_the_median() -> None:
    fused, xla, roof, failed = synthetic().rows()
    # Ratios per round are 1.5, 1.2, 1.3; the ratio of the medians would be 150 / 110.
    assert fused["xla_over_this"] == pytest.approx(1.3)
    assert fused["roof_over_this"] == pytest.approx(0.95)
    assert fused["xla_over_this_wall"] == pytest.approx(1.5)
    assert fused["roof_over_this_wall"] == pytest.approx(0.5)
    assert xla["xla_over_this"] == roof["roof_over_this"] == 1.0
    assert fused["loop_us"] == 110.0
    assert fused["tflops_per_device"] == pytest.approx(2 * 4096 * 4096 * 4096 / 110e-6 / 1e12)
    assert fused["received_gb_per_s_per_device"] == pytest.approx(3 * 1024 * 4096 * 2 / 110e-6 / 1e9)
    assert failed["loop_us"] is None and failed["xla_over_this"] is None


def test_losses_are_shown_and_a_missing_competitor_leaves_a_gap(capsys) -> None:
    table = synthetic()
    table.results[1].loop_us = [50.0, 100.0, 55.0]
    table = report.Table(table.problem, [table.results[0], table.results[1]])
    row = table.rows()[0]
    assert row["xla_over_this"] == pytest.approx(0.5)
    assert row["roof_over_this"] is None
    report.show(table)
    assert re.search(r"0\.500 │ +– │", capsys.readouterr().out)


def test_rows_of_a_table_name_their_run(tmp_path: pathlib.Path) -> None:
    facts = {"devices": "4 of 4 x NVIDIA H200 (one process)", "commit": "abc", "date": "today"}
    rows = current.read(report.add(tmp_path, synthetic().rows(), facts))
    assert tuple(rows[0]) == (*report.COLUMNS, *(f"env_{name}" for name in facts))
    assert [row["method"] for row in rows] == ["fused", "xla", "roof", "fused:stages=9"]
    assert rows[0]["env_commit"] == "abc" and float(rows[0]["xla_over_this"]) == pytest.approx(1.3)
    assert rows[3]["status"] == "ERROR ValueError: too large" and rows[3]["loop_us"] == ""


# --- The command line -------------------------------------------------------------------------------------------------


def test_variants_and_shapes_are_read() -> None:
    assert methods.Variant.parse("fused").fields == {}
    assert methods.Variant.parse("fused:stages=3,order_minor=n").fields == {"stages": 3, "order_minor": "n"}
    with pytest.raises(ValueError, match="must begin with `fused`"):
        methods.Variant.parse("xla:stages=3")
    with pytest.raises(ValueError, match="FIELD=VALUE"):
        methods.Variant.parse("fused:stages")
    with pytest.raises(ValueError, match="`--methods`"):
        methods.make(PROBLEM.library, ["nccl"], [])
    arguments = products.parser("matmul").parse_args(["--shapes", "1x2x3:bf16,4x5x6"])
    first, second = products.problems(arguments, "matmul", 8)
    assert (first.m, first.n, first.k, first.dtype) == (1, 2, 3, "bf16")
    assert (second.shape, second.dtype, second.devices) == ("4x5x6", "f16", 8)


def dry_run(table: str, folder: pathlib.Path, *options: str) -> tuple[subprocess.CompletedProcess[str], list[dict]]:
    line = [sys.executable, "-m", "benchmarks", table, "--dry-run", "--out", str(folder), *options]
    done = subprocess.run(line, cwd=REPOSITORY, capture_output=True, text=True, timeout=200, check=False)
    (found,) = current.tables(folder) or pytest.fail(done.stdout + done.stderr)
    return done, list(found.rows)


def test_a_dry_run_measures_the_emulated_operation_and_reports_a_variant_that_does_not_fit(tmp_path) -> None:
    options = ["--devices", "2", "--methods", "fused,xla,roof", "--variants", "fused", "fused:stages=99"]
    done, rows = dry_run("all_gather_lhs_matmul", tmp_path, *options)
    assert [row["method"] for row in rows] == ["fused", "fused:stages=99", "xla", "roof"]
    assert [row["status"].split()[0] for row in rows] == ["ok", "ERROR", "ok", "ok"], rows
    assert float(rows[0]["error"]) <= float(rows[0]["error_bound"])
    for row in (rows[0], rows[2], rows[3]):
        assert math.isfinite(float(row["loop_us"])) and float(row["xla_over_this"]) > 0
    assert done.returncode == 1, "a method that did not run shows in the exit status"
    assert "roof/this" in done.stdout


def test_a_dry_run_of_the_single_gpu_table(tmp_path) -> None:
    _, rows = dry_run("matmul", tmp_path, "--methods", "xla")
    assert rows[0]["devices"] == "1" and rows[0]["roof_over_this"] == "1"


def test_a_run_that_hangs_ends_with_a_trace_and_keeps_finished_problems(tmp_path) -> None:
    program = """
import sys, time
from benchmarks import harness, products
run_round = harness.Session.run_round
def hang_in_the_second_problem(self, number):
    time.sleep(100 * (self.problem.m > 64))
    run_round(self, number)
harness.Session.run_round = hang_in_the_second_problem
products.main("all_gather_lhs_matmul", sys.argv[1:])
"""
    options = ["--dry-run", "--methods", "xla", "--timeout-s", "5", "--out", str(tmp_path)]
    line = [sys.executable, "-c", program, *options, "--shapes", "64x256x128,128x256x128"]
    done = subprocess.run(line, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "hang_in_the_second" in done.stderr and "round 1 of 2" in done.stderr
    (table,) = current.tables(tmp_path)
    assert [row["shape"] for row in table.rows] == ["64x256x128"]
    assert "Timeout (0:00:05)!" in done.stderr
