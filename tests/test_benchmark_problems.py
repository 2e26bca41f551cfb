"""The benchmark of single-GPU matmuls on a CPU device: layouts, dtypes, suites, unsupported problems, summary."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from benchmarks import current, methods, products, report
from benchmarks.harness import Method, Result, Session, Settings
from benchmarks.problems import DTYPES, LAYOUTS, SUITES, TableProblem, parse
from overlap.tuning.operations import AXIS, product
from overlap.tuning.programs import draw_operands, error_floor
from overlap.tuning.timing import expected_us
from tests import assembly

pytestmark = pytest.mark.one_jax
REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
QUICK = Settings(rounds=2, iterations=2, launches=1, calls=1, warmup_s=0.0)
PROBLEM = TableProblem("matmul", 1, 96, 160, 64, "bf16")
FORMS = [("f16", layout) for layout in LAYOUTS] + [("bf16", "tn"), ("f8_e4m3fn", "nt"), ("f8_e5m2", "nt")]


@pytest.fixture
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:1]), (AXIS,))


def measure(problem: TableProblem, mesh: Mesh, *candidates: Method, settings: Settings = QUICK) -> list[Result]:
    session = Session(problem.library, mesh, settings)
    for method in candidates:
        session.add(method)
    session.measure_overhead()
    for number in range(settings.rounds):
        session.run_round(number)
    session.finish()
    return session.results


# --- Layouts and dtypes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "layout"), FORMS)
def test_operands_lie_as_the_layout_says(mesh: Mesh, dtype: str, layout: str) -> None:
    problem = dataclasses.replace(PROBLEM, dtype=dtype, layout=layout)
    lhs, rhs = draw_operands(problem.library, mesh, 1)
    assert lhs.shape == ((64, 96) if layout[0] == "t" else (96, 64))
    assert rhs.shape == ((160, 64) if layout[1] == "t" else (64, 160))
    assert lhs.dtype == rhs.dtype == DTYPES[dtype]
    left, right = np.asarray(lhs, np.float32), np.asarray(rhs, np.float32)
    expected = (left.T if layout[0] == "t" else left) @ (right.T if layout[1] == "t" else right)
    out = product(problem.library, lhs, rhs)
    assert out.dtype == (jnp.bfloat16 if dtype.startswith("f8") else DTYPES[dtype])
    np.testing.assert_allclose(np.asarray(out, np.float32), expected, rtol=1e-2, atol=1e-1)


@pytest.mark.parametrize(("dtype", "layout"), FORMS)
def test_in_every_form_right_methods_are_timed_and_wrong_ones_are_not(mesh: Mesh, dtype: str, layout: str) -> None:
    problem = dataclasses.replace(PROBLEM, dtype=dtype, layout=layout)

    def one_tile_missing(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return product(problem.library, lhs, rhs).at[:8, :8].set(0)

    ours = methods.make(problem.library, ["fused", "fused_bf16", "xla"], [])
    *right, wrong = measure(problem, mesh, *ours, Method("wrong", one_tile_missing))
    assert [result.method for result in right] == ["fused"] + ["fused_bf16"] * dtype.startswith("f8") + ["xla"]
    for result in right:
        assert result.ok, result.status
        assert len(result.loop_us) == QUICK.rounds and min(result.loop_us) > 0
        assert result.first_call_s is not None and result.first_call_s > 0
    assert wrong.status.startswith("FAILED: error ")


def test_the_lhs_of_an_all_gather_is_gathered_along_its_m_dimension() -> None:
    if jax.device_count() < 2:
        pytest.skip("needs 2 devices: the tests' conftest asks for several CPU devices")
    mesh = Mesh(np.array(jax.devices()[:2]), (AXIS,))
    problem = TableProblem("all_gather_lhs_matmul", 2, 96, 160, 64, "f16", "tn")
    (result,) = measure(problem, mesh, Method("roof", functools.partial(product, problem.library), gathered=True))
    assert result.ok and result.error is not None and 0 < result.error < 1e-3


def test_fused_bf16_takes_the_values_of_the_f8_operands(mesh: Mesh) -> None:
    problem = dataclasses.replace(PROBLEM, dtype="f8_e4m3fn", layout="nt")
    session = Session(problem.library, mesh, QUICK)
    seen = []

    def call(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        seen.append((lhs.dtype, rhs.dtype))
        return product(problem.library, lhs, rhs)

    session.add(Method("fused_bf16", call, dtype=jnp.bfloat16))
    (prepared,) = session.prepared
    assert seen and all(dtype == jnp.bfloat16 for pair in seen for dtype in pair)
    np.testing.assert_array_equal(
        np.asarray(prepared.operands[1], np.float32), np.asarray(session.inputs[1], np.float32)
    )
    rows = report.Table(
        problem,
        [Result("fused", loop_us=[2.0, 4.0], wall_us=[1, 1]), Result("fused_bf16", loop_us=[3.0, 8.0], wall_us=[1, 1])],
    ).rows()
    assert [row["bf16_over_this"] for row in rows] == [pytest.approx(1.75), 1.0]


def test_f8_sums_may_err_as_tensor_cores_do_and_no_more() -> None:
    problem = TableProblem("matmul", 1, 8192, 8192, 8192, "f8_e4m3fn", "nt")
    one_lost_tile = 128 / 8192
    assert 3.3e-3 < error_floor(problem.library) < one_lost_tile / 2
    assert error_floor(dataclasses.replace(problem, dtype="bf16").library) == 0


COMPILED_FOR_H200 = """
import json, re
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from functools import partial
import overlap
from benchmarks.loop_copies import copies_in_loops
from benchmarks.problems import TableProblem
from overlap.tuning import operations, programs
from tests import assembly

mesh = Mesh(np.array(assembly.topology("h200", 1)), ("x",))
found = {}
for dtype, layout in (("bf16", "nt"), ("bf16", "tn"), ("f16", "tt"), ("f8_e4m3fn", "nt")):
    problem = TableProblem("matmul", 1, 4096, 8192, 4096, dtype, layout).library
    struct = lambda shape, type_, spec: jax.ShapeDtypeStruct(shape, type_, sharding=NamedSharding(mesh, spec))
    shapes, types = (*operations.shapes(problem), (4096, 8192)), (problem.dtype, problem.dtype, problem.out_dtype)
    lhs, rhs, out = map(struct, shapes, types, operations.specs(problem))
    loop = programs.loop_program(problem, partial(operations.product, problem), mesh, 20).lower((lhs, out), rhs)
    oracle = programs.error_program(problem, mesh).lower(lhs, rhs, out).compile().as_text()
    loop = loop.compile().as_text()
    found[f"{dtype} {layout}"] = [copies_in_loops(loop), "transpose(" in loop, "$f8" in oracle]

# A result of few tiles, cut along k: after each kernel XLA adds the parts.
problem = TableProblem("matmul", 1, 64, 384, 9152, "bf16", "nn").library
types = (problem.dtype, problem.dtype, problem.out_dtype)
lhs, rhs, out = map(struct, (*operations.shapes(problem), (64, 384)), types, operations.specs(problem))
call = partial(overlap.matmul, config=overlap.Config(tile_m=64, tile_n=128, split_k=11), implementation="fused")
loop = programs.loop_program(problem, call, mesh, 20).lower((lhs, out), rhs).compile().as_text()
body = re.search(r"body=(%[\\w.-]+)", loop)[1]
body = loop[loop.index(f"\\n{body} (") :].split("\\n}", 1)[0]
kernels = r" custom-call\\(", r"%loop_reduce\\S* = ", r"%loop_dynamic_update\\S* = "
print(json.dumps(found | {"kernels of an iteration": [len(re.findall(words, body)) for words in kernels]}))
"""


@pytest.mark.skipif(assembly.unavailable_reason() is not None, reason=str(assembly.unavailable_reason()))
def test_for_h200_loops_do_what_is_measured() -> None:
    """The roof transposes and copies nothing, the oracle is in f32, and each of eight calls does all of its work."""
    line = [sys.executable, "-c", COMPILED_FOR_H200]
    environment = assembly.child_environment()
    done = subprocess.run(
        line, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("kernels of an iteration") == [8, 8, 8]
    assert len(found) == 4 and all(value == [[], False, False] for value in found.values()), found


# --- Which problems, and how long -------------------------------------------------------------------------------------


def test_shapes_carry_a_dtype_and_a_layout() -> None:
    given = ["1x2x3", "4x5x6:bf16:nt", "7x8x9:tt", "7x8x9:f8_e5m2"]
    found = [str(problem) for problem in parse("matmul", 1, given, "f16", ["nn", "tn"])]
    assert found[:4] == ["1x2x3 f16 nn", "1x2x3 f16 tn", "4x5x6 bf16 nt", "7x8x9 f16 tt"]
    assert [str(problem) for problem in parse("matmul", 1, given, "f16", None)][-2:] == [
        "7x8x9 f16 tt",
        "7x8x9 f8_e5m2 nt",
    ]
    for wrong in ("1x2", "1x2x3:f64", "1x2x3:nn:nt", "1x2x3:xx"):
        with pytest.raises(SystemExit, match="MxNxK"):
            parse("matmul", 1, [wrong], "f16", None)
    with pytest.raises(SystemExit, match="MxNxK"):
        parse("matmul", 1, ["1x2x3"], "f64", None)


def problems(table: str, *options: str, devices: int = 1) -> list[TableProblem]:
    return products.problems(products.parser(table).parse_args(options), table, devices)


def test_the_standard_suite_is_thirteen_shapes_in_three_layouts_and_f8_in_one() -> None:
    found = problems("matmul", "--suite", "standard", "--dtype", "bf16")
    assert len(found) == len(set(found)) == 13 * 3
    assert {problem.layout for problem in found} == {"nn", "nt", "tn"}
    in_f8 = problems("matmul", "--suite", "standard", "--dtype", "f8_e4m3fn")
    assert len(in_f8) == 13 and {problem.layout for problem in in_f8} == {"nt"}
    with pytest.raises(SystemExit, match="nn, nt, tn, tt"):
        problems("matmul", "--layouts", "nn,xy")
    with pytest.raises(SystemExit, match="layout nn alone"):
        problems("ladder", "--shapes", "1x2x3:nt")
    gathered = problems(GATHER, "--shapes", "1x2x3:f8_e5m2,1x2x3:bf16", devices=2)
    assert [problem.layout for problem in gathered] == ["nt", "nn"]
    with pytest.raises(SystemExit, match="layout nn, nt alone"):
        problems(GATHER, "--shapes", "1x2x3:tn", devices=2)


GATHER, SCATTER = "all_gather_lhs_matmul", "matmul_reduce_scatter"


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_the_sweep_covers_what_the_chooser_is_asked_about(devices: int) -> None:
    found = problems(GATHER, "--suite", "sweep", "--dtype", "bf16", devices=devices)
    assert 20 <= len(found) == len(set(found)) <= 26
    assert {problem.layout for problem in found} == {"nn"}
    assert {problem.m for problem in found} == {16, 32, 64, 128, 512, 2048, 8192}
    assert (min(p.n for p in found), max(p.n for p in found)) == (256, 16384)
    assert (min(p.k for p in found), max(p.k for p in found)) == (512, 16384)
    # The budget leaves out the problems that take longest.
    times = [expected_us(problem.library) for problem in found]
    assert devices != 4 or times == sorted(times)
    assert max(times[:10]) < min(times[-5:])
    # Results are stated in shard sizes, and fit on a GPU together with their f32 oracle.
    assert all(10 * problem.library.bytes_per_device < 60e9 for problem in found)


@pytest.mark.parametrize("devices", [2, 4])
def test_the_sweep_of_what_is_scattered(devices: int) -> None:
    found = problems(SCATTER, "--suite", "scatter", "--dtype", "bf16", devices=devices)
    assert (min(p.m for p in found), max(p.m for p in found)) == (32, 32768)
    for problem in found:
        # The sizes of one device's product. The device keeps one part of the result and receives a part from each peer.
        assert problem.library.whole == (problem.m, problem.n, problem.k) and problem.m % devices == 0
        assert problem.flops_per_device == 2.0 * problem.m * problem.n * problem.k
        assert problem.received_bytes_per_device == 2 * (devices - 1) * problem.m // devices * problem.n


def test_loops_are_long_for_small_problems_and_short_for_large_ones() -> None:
    settings = Settings()
    for problem in parse("matmul", 1, SUITES["standard"].shapes, "bf16", None):
        work_us = settings.loop_iterations(problem.library) * expected_us(problem.library)
        assert 10_000 < work_us < 25_000, problem
    assert dataclasses.replace(settings, iterations=7).loop_iterations(PROBLEM.library) == 7
    assert dataclasses.replace(settings, calls=3).calls_in_a_row(PROBLEM.library) == 3


# --- Unsupported problems, and which kernels ran ----------------------------------------------------------------------


def test_what_a_method_does_not_serve_is_no_error(mesh: Mesh, capsys) -> None:
    problem = dataclasses.replace(PROBLEM, m=97, layout="tn")
    results = measure(problem, mesh, *methods.make(problem.library, ["fused", "xla"], []))
    assert results[0].status.startswith("NOT SERVED: the copy engine needs the rows of lhs")
    assert not results[0].served and results[1].ok and results[1].served
    report.show(report.Table(problem, results, roof="xla"))
    assert "  fused, status: NOT SERVED: the copy engine" in capsys.readouterr().out


def test_a_config_that_does_not_fit_is_an_error(mesh: Mesh) -> None:
    variant = methods.Variant.parse("fused:stages=99")
    (result,) = measure(PROBLEM, mesh, *methods.make(PROBLEM.library, ["fused"], [variant]))
    assert result.status.startswith("ERROR ValueError")


# --- The command line -------------------------------------------------------------------------------------------------


def run(folder: pathlib.Path, *options: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """Runs the Python code `before`, then makes a dry run of the table, in a process of its own."""
    program = (
        f"import sys\nfrom benchmarks import harness, products\n{before}\n"
        "sys.exit(products.main('matmul', sys.argv[1:]))"
    )
    line = [sys.executable, "-c", program, "--dry-run", "--out", str(folder), *options]
    return subprocess.run(line, cwd=REPOSITORY, capture_output=True, text=True, timeout=200, check=False)


def test_a_dry_run_of_the_suite_measures_all_layouts(tmp_path: pathlib.Path) -> None:
    done = run(tmp_path, "--suite", "standard", "--dtype", "bf16")
    assert done.returncode == 0, done.stderr
    (table,) = current.tables(tmp_path)
    rows = table.rows
    assert [row["layout"] for row in rows if row["method"] == "fused"] == ["nn", "nt", "tn"] * 2
    not_served = [row["shape"] for row in rows if row["status"].startswith("NOT SERVED")]
    assert not_served == ["97x136x72"] and all(float(row["first_call_s"]) > 0 for row in rows if row["status"] == "ok")


FAIL_IN_THE_SECOND = """
problems = []
measure_overhead = harness.Session.measure_overhead
def fail(self):
    problems.append(self.problem)
    if len(problems) == 2:
        raise RuntimeError("out of memory")
    measure_overhead(self)
harness.Session.measure_overhead = fail
"""


def test_if_one_problem_fails_the_rest_goes_on(tmp_path: pathlib.Path) -> None:
    shapes = ["--shapes", "32x64x64,64x64x64,96x64x64", "--methods", "xla"]
    done = run(tmp_path, *shapes, before=FAIL_IN_THE_SECOND)
    assert done.returncode == 1
    (table,) = current.tables(tmp_path)
    rows = table.rows
    assert [row["status"] for row in rows] == ["ok", "ERROR RuntimeError: out of memory", "ok"]
    assert "  xla, status: ERROR RuntimeError: out of memory" in done.stdout


A_MINUTE_EACH = """
import time, types
clock = [0.0]
products.time = types.SimpleNamespace(monotonic=lambda: clock[0], time=time.time, strftime=time.strftime)
measure_overhead = harness.Session.measure_overhead
def a_minute_passes(self):
    clock[0] += 60
    measure_overhead(self)
harness.Session.measure_overhead = a_minute_passes
"""


def test_what_does_not_fit_into_the_budget_is_left_out_and_said(tmp_path: pathlib.Path) -> None:
    shapes = ["--shapes", "32x64x64,64x64x64,96x64x64", "--methods", "xla", "--budget-s", "150"]
    done = run(tmp_path, *shapes, before=A_MINUTE_EACH)
    assert done.returncode == 0, done.stderr
    # The third problem would begin after 120 seconds and end after 180.
    (table,) = current.tables(tmp_path)
    rows = table.rows
    assert [row["shape"] for row in rows] == ["32x64x64", "64x64x64"]
    assert "no time left for 1 of 3 problems: 96x64x64 f16 nn" in done.stderr
