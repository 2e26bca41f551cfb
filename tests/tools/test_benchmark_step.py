"""`python -m benchmarks step` on CPU devices: whole steps of a tiny model, by plain layers and by overlap's."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import jax
import numpy as np
import pytest

for package in ("flax", "optax"):
    pytest.importorskip(package, reason=f"{package} is not installed (extra `examples`)")

from benchmarks import current, expert_rival, kernel_times, performance, step, step_program  # noqa: E402  # isort: skip
from overlap.cli.arguments import WrongArguments  # noqa: E402  # isort: skip

pytestmark = pytest.mark.one_jax


def test_plain_layers_have_the_parameters_of_overlaps():
    arguments = step.parser().parse_args(["--dry-run"])
    case = step.case_of("tiny", "both", 4, arguments)

    def named(method: str) -> dict[str, jax.Array]:
        program = step_program.Program(case, method)
        with jax.set_mesh(program.mesh):
            leaves = jax.tree_util.tree_leaves_with_path(program.first())
        return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}

    plain = named("plain")
    ours = named("layers xla")
    assert plain.keys() == ours.keys() and len(plain) == 3 * 9 + 1  # Weights and two moments, and the count of steps.
    for name, leaf in plain.items():
        assert leaf.sharding.is_equivalent_to(ours[name].sharding, leaf.ndim), name
        np.testing.assert_array_equal(leaf, ours[name], name)
    kernel = next(leaf for name, leaf in plain.items() if "'down'" in name)
    assert kernel.dtype == np.float32 and kernel.addressable_shards[0].data.shape == (128 // 2, 64 // 2)


@pytest.fixture
def in_this_process(monkeypatch):
    """Measures in this process, which has its devices already. Some methods get made-up results, in the dict."""
    made_up: dict[str, dict[str, Any]] = {}
    facts = {"devices": "4 of 8 x cpu (one process)", "date": "today", "commit": "abc"}

    def run(case, method, arguments, code):
        return made_up[method] if method in made_up else step_program.measure(case, method) | {"facts": facts}

    monkeypatch.setattr(step, "run_process", run)
    monkeypatch.setattr(step_program, "TIMES", 2)
    return made_up


def test_both_layers_train_alike_and_a_method_with_wrong_losses_gets_no_times(in_this_process, tmp_path, capsys):
    options = ["--dry-run", "--devices", "4", "--rounds", "1", "--layouts", "both", "--out", str(tmp_path)]
    methods = ["plain", "plain hiding", "chosen", "fused", "layers xla"]
    wrong = {"losses": [1.5] * step_program.LOSSES, "ms": [1e-9], "first_call_s": 1.0, "peak_bytes": None}
    in_this_process |= {"plain hiding": wrong, "chosen": wrong, "fused": {"error": "did not end within 9 s"}}
    assert step.main([*options, "--methods", *methods]) == 1
    (table,) = current.tables(tmp_path)
    rows = {row["method"]: row for row in table.rows}
    assert list(rows) == methods and rows["fused"]["status"] == "ERROR did not end within 9 s"
    for method in ("plain hiding", "chosen"):
        assert rows[method]["status"].startswith("FAILED: a loss differs from plain's by ")
    for method in ("plain hiding", "chosen", "fused"):
        assert rows[method]["loop_us"] == rows[method]["xla_over_this"] == ""
    # Products are rounded in another order. Ten steps of AdamW keep the losses together.
    assert 0 < float(rows["layers xla"]["loss_difference"]) < 2e-3
    ratio = float(rows["plain"]["loop_us"]) / float(rows["layers xla"]["loop_us"])
    assert float(rows["layers xla"]["xla_over_this"]) == pytest.approx(ratio, rel=1e-4)
    assert rows["plain"]["xla_over_this"] == "1" and rows["plain"]["loss_difference"] == "0"
    assert "did not end within 9 s" in capsys.readouterr().out
    page = performance.text("<!-- results: step -->\n<!-- end -->", [table])
    assert page.count("| tiny, both | 4 × cpu | 2×32×64×128×1 |") == 2 and "| plain | " in page


def test_ratios_refer_to_the_faster_plain_and_times_of_all_rounds_count():
    def result(ms: float, gib: float) -> dict[str, Any]:
        return {"ms": [ms, ms], "losses": [2.0, 1.0], "first_call_s": ms, "peak_bytes": int(gib * 2**30)}

    times = {"plain": (30.0, 4.0), "plain hiding": (20.0, 5.0), "fused": (10.0, 10.0)}
    plain, hiding, fused = step.rows_of({name: [result(*given), result(*given)] for name, given in times.items()})
    assert [row["xla_over_this"] for row in (plain, hiding, fused)] == [pytest.approx(2 / 3), 1.0, 2.0]
    assert [row["peak_over_plain"] for row in (plain, hiding, fused)] == [0.8, 1.0, 2.0]
    (fused,) = step.rows_of({"fused": [result(10.0, 1.0), result(30.0, 2.0)]})
    assert (fused["loop_us"], fused["peak_gib"], fused["xla_over_this"]) == (20e3, 2.0, None)
    # A round that fails, and a loss that is wrong in one round only, are no results.
    assert step.rows_of({"plain": [result(1.0, 1.0), {"error": "lost"}]})[0]["status"] == "ERROR lost"
    other = result(1.0, 1.0) | {"losses": [2.0, 1.01]}
    (row,) = step.rows_of({"plain": [result(1.0, 1.0), other]})
    assert row["status"] == "FAILED: a loss differs from plain's by 1.0e-02" and row["loop_us"] is None


def test_a_process_that_fails_or_does_not_end_says_so(capsys):
    python = [sys.executable, "-I", "-S", "-c"]
    assert step.called([*python, "print('noise'); print('{\"ms\": [1]}')"], {}, 60.0) == {"ms": [1]}
    error = step.called([*python, "raise SystemExit('no memory')"], {}, 60.0)
    assert error == {"error": "exit status 1: no memory"} and "no memory" in capsys.readouterr().err
    assert step.called([*python, "import time; time.sleep(60)"], {}, 0.2) == {"error": "did not end within 0.2 s"}
    for options, said in ((["--devices", "3"], "even number of devices, got 3"), (["--tokens", "33"], "tokens=33")):
        arguments = step.parser().parse_args(["--dry-run", *options])
        with pytest.raises(WrongArguments, match=said):
            step.case_of("tiny", "both", arguments.devices or 4, arguments)


def test_kernels_of_the_first_gpu_are_summed_by_name():
    def kernel(name: str, pid: int, ts: float, dur: float, **arguments: Any) -> dict[str, Any]:
        return {"ph": "X", "pid": pid, "name": name, "ts": ts, "dur": dur, "args": arguments}

    gpus = [
        {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": f"/device:GPU:{pid - 2}"}} for pid in (3, 2)
    ]
    kernels = [
        kernel("dot", 2, 10.0, 4.0, hlo_op="dot.1"), kernel("dot", 2, 20.0, 6.0, hlo_op="dot.2"),
        kernel("copy", 2, 14.0, 1.0, correlation_id=7), kernel("dot", 3, 0.0, 50.0, hlo_op="dot.1"),
        kernel("a module", 2, 0.0, 90.0),
    ]  # fmt: skip
    found = kernel_times.summed([*gpus, *kernels], steps=2)
    assert found == {"wall_us": 8.0, "kernels": [["dot", 5.0, 1.0], ["copy", 0.5, 0.5]]}
    assert "5.0 µs  x   1.0  dot" in kernel_times.text("gpt", found)


def test_experts_of_the_rival_are_those_of_the_layer(monkeypatch):
    """The same losses, with XLA's product of groups in tokamax's place, which is not installed here."""
    monkeypatch.setattr(expert_rival, "_ragged_dot", lambda config: jax.lax.ragged_dot)
    sizes = dataclasses.asdict(step.MODELS["tiny"].sizes)
    case = step_program.Case(
        **sizes, layers=1, sequences=2, tokens=32, fsdp=2, tensor=2, experts=8, experts_per_token=2
    )
    plain, ours = (step_program.measure(case, method)["losses"] for method in ("plain", "layers xla"))
    # Later, a token whose experts are nearly as good as others chooses others after another rounding.
    assert step.difference(ours[:1], plain[:1]) < 3e-4 and step.difference(ours, plain) < step.LOSS_BOUND
