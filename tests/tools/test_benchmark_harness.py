"""The benchmark harness on CPU devices: which methods are timed, and what their loops compute and copy."""

from __future__ import annotations

import dataclasses
import functools
import json
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from benchmarks import methods, report
from benchmarks.harness import Method, Result, Session, Settings
from benchmarks.problems import DTYPES, TableProblem
from overlap.tuning.operations import AXIS, gather, product, unfused
from overlap.tuning.programs import draw_operands, error_floor
from tests.assembly import assembly

pytestmark = pytest.mark.one_jax
QUICK = Settings(rounds=2, iterations=2, launches=1, calls=1, warmup_s=0.0)
SLOW = pytest.mark.slow
GATHER = TableProblem("all_gather_lhs_matmul", 2, 128, 256, 64, "f16")
PRODUCT = TableProblem("matmul", 1, 96, 160, 64, "bf16")
reference = functools.partial(unfused, GATHER.library)


def mesh_for(problem: TableProblem) -> Mesh:
    return Mesh(np.array(jax.devices()[: problem.devices]), (AXIS,))


def measure(problem: TableProblem, *candidates: Method) -> list[Result]:
    session = Session(problem.library, mesh_for(problem), QUICK)
    for method in candidates:
        session.add(method)
    session.measure_overhead()
    for number in range(QUICK.rounds):
        session.run_round(number)
    session.finish()
    return session.results


# --- Which methods are timed ------------------------------------------------------------------------------------------


def not_a_number(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    return reference(lhs, rhs).at[0, 0].set(jnp.nan)


def one_tile_missing(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    return reference(lhs, rhs).at[:8, :8].set(0)


def coarse(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    lhs, rhs = gather(GATHER.library, lhs, rhs)
    return jnp.dot(lhs.astype(jnp.bfloat16), rhs.astype(jnp.bfloat16)).astype(lhs.dtype)


def test_right_methods_are_timed_and_others_are_shown_with_the_reason(capsys) -> None:
    right = Method("xla", reference), Method("roof", jnp.dot, gathered=True)
    wrong = not_a_number, one_tile_missing, coarse

    def raises(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        raise ValueError("no tile\nfits")

    def serves_not(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        raise NotImplementedError("not\nyet")

    results = measure(GATHER, *(Method(f.__name__, f) for f in (*wrong, raises, serves_not)), *right)
    statuses = {result.method: result.status for result in results}
    for f in wrong:
        assert statuses[f.__name__].startswith("FAILED: error "), f
    assert statuses["raises"] == "ERROR ValueError: no tile fits"
    assert statuses["serves_not"] == "NOT SERVED: not yet"
    assert [result.method for result in results if not result.served] == ["serves_not"]
    for result in results:
        assert result.ok == (result.method in ("xla", "roof"))
        assert len(result.loop_us) == len(result.wall_us) == (QUICK.rounds if result.ok else 0)
        if result.ok:
            assert min(result.loop_us) > 0 and result.error is not None and 0 < result.error < 1e-3
            assert result.first_call_s is not None and result.first_call_s > 0
    table = report.Table(GATHER, results)
    row = table.rows()[0]
    assert row["method"] == "not_a_number" and row["loop_us"] is None and row["xla_over_this"] is None
    report.show(table)
    assert "  coarse, status: FAILED: error " in capsys.readouterr().out


def test_a_result_that_goes_wrong_inside_the_loop_is_noticed_and_f8_sums_may_err_as_tensor_cores_do() -> None:
    session = Session(PRODUCT.library, mesh_for(PRODUCT), QUICK)
    session.add(Method("xla", functools.partial(product, PRODUCT.library)))
    session.run_round(0)
    loop = session.prepared[0].loop
    loop.state = (loop.operands[0], loop.out.at[:8].set(0))
    session.finish()
    assert session.results[0].status.startswith("FAILED after the loop: error ")
    assert report.Table(PRODUCT, session.results).rows()[0]["loop_us"] is None
    problem = TableProblem("matmul", 1, 8192, 8192, 8192, "f8_e4m3fn", "nt")
    one_lost_tile = 128 / 8192
    assert 3.3e-3 < error_floor(problem.library) < one_lost_tile / 2
    assert error_floor(dataclasses.replace(problem, dtype="bf16").library) == 0


def test_rounds_are_shuffled_and_repeatable(monkeypatch: pytest.MonkeyPatch) -> None:
    session, order = Session(PRODUCT.library, mesh_for(PRODUCT), QUICK), list[str]()
    session.prepared = [types.SimpleNamespace(method=Method(n, product), result=Result(n)) for n in "abc"]
    monkeypatch.setattr(session, "_time_loop", lambda prepared: order.append(prepared.method.name) or 1e-6)
    monkeypatch.setattr(session, "_time_calls", lambda prepared: 1e-6)
    for number in [*range(8), *range(8)]:
        session.run_round(number)
    rounds = ["".join(order[i : i + 3]) for i in range(0, len(order), 3)]
    assert all(sorted(r) == ["a", "b", "c"] for r in rounds)
    assert rounds[:8] == rounds[8:] and len(set(rounds)) > 2
    # A rotation would keep each method's predecessor, and with it the GPU clocks that the predecessor leaves.
    assert {r[r.index("a") - 1] for r in rounds if r[0] != "a"} == {"b", "c"}


@pytest.mark.parametrize(
    ("dtype", "layout"),
    [("f8_e4m3fn", "nt"), pytest.param("f16", "tn", marks=SLOW), pytest.param("bf16", "tt", marks=SLOW)],
)
def test_forms_of_operands(dtype: str, layout: str) -> None:
    """Operands lie as the layout says; right methods are timed, in 8 bits also in bf16, and wrong ones are not."""
    problem = dataclasses.replace(PRODUCT, dtype=dtype, layout=layout)
    lhs, rhs = draw_operands(problem.library, mesh_for(problem), 1)
    assert lhs.shape == ((64, 96) if layout[0] == "t" else (96, 64))
    assert rhs.shape == ((160, 64) if layout[1] == "t" else (64, 160))
    assert lhs.dtype == rhs.dtype == DTYPES[dtype]
    left, right = np.asarray(lhs, np.float32), np.asarray(rhs, np.float32)
    expected = (left.T if layout[0] == "t" else left) @ (right.T if layout[1] == "t" else right)
    out = product(problem.library, lhs, rhs)
    assert out.dtype == (jnp.bfloat16 if dtype.startswith("f8") else DTYPES[dtype])
    np.testing.assert_allclose(np.asarray(out, np.float32), expected, rtol=1e-2, atol=1e-1)

    def one_tile_missing(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return product(problem.library, lhs, rhs).at[:8, :8].set(0)

    ours = methods.make(problem.library, ["fused", "fused_bf16", "xla"], [])
    *timed, wrong = measure(problem, *ours, Method("wrong", one_tile_missing))
    assert [result.method for result in timed] == ["fused"] + ["fused_bf16"] * dtype.startswith("f8") + ["xla"]
    assert [result.status for result in timed] == ["ok"] * len(timed)
    assert wrong.status.startswith("FAILED: error ")


# In a process of its own, which has the compiler for GPUs. Prints what each loop contains.
LOOPS_FOR_H200 = """
import json, re
import numpy as np
from functools import partial
from jax.sharding import Mesh
import overlap
from benchmarks import methods
from benchmarks.loop_copies import copies_in_loops
from benchmarks.problems import TableProblem
from overlap.tuning import operations, programs
from tests.assembly import assembly

def compiled(problem, call, mesh, shapes):
    operands = [assembly.struct(mesh, *of) for of in zip(shapes, (problem.dtype,) * 3, operations.specs(problem))]
    loop = programs.loop_program(problem, call, mesh, 20).lower((operands[0], operands[2]), operands[1])
    return loop.compile().as_text()

found, mesh = {}, Mesh(np.array(assembly.topology("h200", 4)), ("x",))
problem = TableProblem("all_gather_lhs_matmul", 4, 4096, 4096, 4096, "f16").library
for method in methods.make(problem, ["fused", "xla", "roof", "own_matmul"], []):
    rows = 16384 if method.gathered else 4096
    hlo = compiled(problem, method.call, mesh, ((rows, 4096), (4096, 16384), (4096, 16384)))
    work = {"xla": "all-gather-start(", "roof": "dot("}.get(method.name, "mosaic_gpu")
    body = hlo[: hlo.index("ENTRY ")]
    contents = "dynamic-update-slice(" in body, work in body, "known_trip_count" in hlo
    found[method.name] = [copies_in_loops(hlo), *contents]
# The control: a copy of an operand that is put into the loop is found.
body = re.search(r"body=(%[\\w.-]+)", hlo)[1]
copied = re.sub(rf"(?m)^({re.escape(body)} [(].*)$", r"\\1\\n  %copy.99 = f16[4096,4096]{1,0} copy(%x)", hlo)
found["control"] = copies_in_loops(copied)
# A result of few tiles, cut along k: after each kernel XLA adds the parts.
problem, mesh = TableProblem("matmul", 1, 64, 384, 9152, "bf16", "nn").library, Mesh(mesh.devices[:1], ("x",))
call = partial(overlap.matmul, config=overlap.Config(tile_m=64, tile_n=128, split_k=11), implementation="fused")
hlo = compiled(problem, call, mesh, (*operations.shapes(problem), (64, 384)))
body = re.search(r"body=(%[\\w.-]+)", hlo)[1]
body = hlo[hlo.index(f"\\n{body} (") :].split("\\n}", 1)[0]
kernels = r" custom-call\\(", r"%loop_reduce\\S* = ", r"%loop_dynamic_update\\S* = "
found["kernels of an iteration"] = [len(re.findall(words, body)) for words in kernels]
print(json.dumps(found))
"""


@pytest.mark.skipif(assembly.unavailable_reason() is not None, reason=str(assembly.unavailable_reason()))
@pytest.mark.slow
def test_loops_compiled_for_h200_do_in_every_iteration_what_is_measured(repository) -> None:
    """They copy no operand, and each of eight calls does all its work."""
    line, environment = [sys.executable, "-c", LOOPS_FOR_H200], assembly.child_environment()
    options: dict = {"capture_output": True, "text": True, "timeout": 200, "check": False}
    done = subprocess.run(line, cwd=repository, env=environment, **options)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("kernels of an iteration") == [8, 8, 8] and found.pop("control") == ["copy.99: f16[4096,4096]"]
    assert found == {name: [[], True, True, True] for name in ("fused", "xla", "roof", "own_matmul")}
