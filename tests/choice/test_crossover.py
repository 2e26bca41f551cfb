"""The choice between the fused kernel and XLA, by stored measurements; and the table that holds them."""

import dataclasses
import logging
import math
import statistics

import jax
import pytest

from benchmarks import crossover as command
from overlap.choice import choose, crossover, dispatch, tables
from overlap.choice.crossover import Cause, Measured, expected_ratio, neighbours, verdict
from overlap.choice.problem import Problem
from overlap.kernels.config import Config
from overlap.kernels.target import Target
from overlap.tuning.autotune import Tuning
from overlap.tuning.search import Outcome
from tests.choice.tuning_cases import H200, no_tables  # noqa: F401

GATHER = Problem("all_gather_lhs_matmul", 1024, 4096, 4096, "bfloat16", "bfloat16", devices=4)
OTHER = dataclasses.replace(GATHER, op="all_gather_rhs_matmul_n")


def sized(**fields):
    return dataclasses.replace(GATHER, **fields)


def decide(problem, config=None, implementation=None):
    return dispatch.decide(problem.op, dispatch.Asked(config, implementation), H200, lambda *_: None, problem)


@pytest.fixture
def measure(monkeypatch):
    """Replaces the measurements by pairs of a problem (or m of `GATHER`) and the speedup of the fused kernel."""
    monkeypatch.setattr(dispatch, "_logged", set())

    def set_to(ratios):
        rows = ((of if isinstance(of, Problem) else sized(m=of), ratio) for of, ratio in ratios.items())
        pairs = tuple(Measured(of, 100.0, 100.0 * ratio) for of, ratio in rows)
        monkeypatch.setattr(crossover, "measurements", lambda: pairs)

    return set_to


# --- The shipped table ------------------------------------------------------------------------------------------------


def test_the_shipped_table_is_sound():
    rows = crossover.measurements()
    assert {row.problem.op for row in rows} >= {"matmul", "all_gather_lhs_matmul"}
    assert len({(row.gpu, row.problem) for row in rows}) == len(rows)
    assert {row.gpu for row in rows} == {"h100", "h200"}
    assert all(row.fused_us > 0 and row.xla_us > 0 for row in rows)
    for row in rows[::9]:
        (distance, nearest), *_ = neighbours(row.problem, row.gpu)
        # A size may have been measured in f16 or bf16, which count as one.
        assert distance == 0
        assert dataclasses.replace(nearest.problem, dtype=row.problem.dtype, out_dtype=row.problem.out_dtype) == (
            row.problem
        )
        # The choice agrees with the measurement; of two equals, collectives take the kernel.
        least = 1 / crossover.LEAST_GAIN if row.problem.communicates else 1
        assert verdict(row.problem, row.gpu).xla_runs == (row.ratio <= least)


def test_each_measured_problem_is_chosen_well_by_the_others(monkeypatch):
    """Without their own measurement, problems are on average 2% faster than by XLA; collectives 21%."""
    every, gains = crossover.measurements(), {True: [], False: []}
    for row in every[::7]:
        monkeypatch.setattr(crossover, "measurements", lambda row=row: [x for x in every if x.problem != row.problem])
        gains[row.problem.communicates].append(1 if verdict(row.problem, row.gpu).xla_runs else row.ratio)
    collectives, products = (sorted(gains[communicates]) for communicates in (True, False))
    assert statistics.geometric_mean(collectives) > 1.17 and statistics.geometric_mean(products) > 1.015
    assert collectives[len(collectives) // 20] > 0.97 and products[len(products) // 20] > 0.92


# --- What the nearest measurements say --------------------------------------------------------------------------------


def test_the_nearest_measurement_speaks(measure):
    """XLA is faster for few rows, and for rows that are not aligned to the cache's lines."""
    measure({16: 2 / 3, 1024: 1.6, sized(n=4104, k=4104): 0.6})
    for sizes, slower in (
        (dict(m=16), True), (dict(m=32), True), (dict(m=512), False), (dict(m=1), True), (dict(m=1 << 15), False),
        (dict(m=16, dtype="float16", out_dtype="float16"), True), (dict(devices=8), False), (dict(n=4096 + 8), True),
    ):  # fmt: skip
        assert verdict(sized(**sizes)).xla_runs == slower, sizes
    far = verdict(sized(n=128, k=256))
    assert far.xla_runs and far.cause is Cause.NOT_MEASURED and "near this size" in far.reason
    assert not verdict(sized(n=1024, k=512)).xla_runs
    assert verdict(OTHER) == crossover.NOTHING_MEASURED


def test_the_ratio_is_interpolated(measure):
    measure({16: 0.5, 64: 2.0, 4096: 9.0})

    def ratio(m):
        return expected_ratio(neighbours(sized(m=m)))

    far, near = (crossover.FALLING**doublings for doublings in (5, 3))
    assert math.isclose(math.log2(ratio(512)), (-far + near + math.log2(9) * near) / (far + near + near))
    assert ratio(16) < ratio(20) < ratio(32) < ratio(50) < ratio(64)


def test_a_prediction_needs_a_gain_and_other_properties_count_less(measure, monkeypatch):
    measure({16: 0.97, 64: 3.0})  # A measurement decides alone only about its own problem.
    assert verdict(sized(m=16)).xla_runs and not verdict(sized(m=24)).xla_runs
    measure({16: 1.01, 64: 1.01})  # A small gain that is only predicted is not taken.
    assert not verdict(sized(m=16)).xla_runs
    assert "the kernel and XLA should be about as fast (1.01 x)" in verdict(sized(m=17)).reason
    measure({16: 0.6, 64: 1.1})  # Halfway between a loss and a small gain.
    reason = verdict(sized(m=33)).reason
    assert "XLA should be 1.22 x as fast by the 2 nearest" in reason and " 64x4096x" in reason
    # Another dtype counts less than the same dtype.
    near, own = (sized(m=m, dtype="float8_e5m2", layout="nt") for m in (17, 32))
    measure({16: 0.7})
    assert verdict(near).xla_runs
    measure({16: 0.7, own: 1.3})
    assert not verdict(near).xla_runs
    # A call with f32 results of a size that was measured with bf16 results is predicted.
    measure({GATHER: 1.2})
    assert "measured to be 1.20" in verdict(GATHER).reason
    assert verdict(sized(out_dtype="float32")).cause is Cause.PREDICTED
    # Rows of all devices count: with twice the devices, the nearest measurement has half the rows per device.
    measure({16: 0.6, 64: 2.0})
    assert verdict(sized(m=8, devices=8)).xla_runs and not verdict(sized(m=32, devices=8)).xla_runs


def test_the_choice_of_the_kernel_says_what_it_rests_on(measure):
    # Measured times within two percent count as equal. Then the fused kernel runs where devices communicate.
    for ratio, op, xla_runs in ((0.99, "matmul", True), (1.01, "matmul", False), (0.99, GATHER.op, False)):
        runs, why, cause = Measured(sized(op=op, devices=1 if op == "matmul" else 4), 100.0, 100.0 * ratio).verdict
        assert runs == xla_runs and f"about as fast ({ratio} x)" in why and cause is Cause.MEASURED
    assert Measured(GATHER, 100.0, 97.0).verdict.xla_runs
    known = sized(m=16)
    measure({16: 1.5})
    assert verdict(known) == (False, f"the kernel was measured to be 1.50 x as fast as XLA for {known}", Cause.MEASURED)
    for changes, gpu in (({"m": 17}, "h200"), ({"devices": 8}, "h200"), ({}, "h100")):
        runs, why, cause = verdict(dataclasses.replace(known, **changes), gpu)
        assert not runs and cause is Cause.PREDICTED and "1.50 x as fast as XLA by the 1 nearest" in why
        assert f"the first of {known} (NVIDIA H200)" in why and "on 4 devices" in why
    assert decide(dataclasses.replace(known, devices=8)).reason == why


def test_the_chooser_listens_and_a_wish_comes_first(measure, caplog):
    """A warning is logged where XLA runs for want of a measurement; how to force the kernel is said."""
    few, far = sized(m=16), sized(n=128, k=256)
    measure({16: 2 / 3, 1024: 1.6})
    with caplog.at_level(logging.INFO, "overlap"):
        for of, cause, level, words in (
            (few, Cause.MEASURED, "INFO", "1.50 x as fast"),
            (OTHER, Cause.NOT_MEASURED, "WARNING", "not measured"),
            (far, Cause.NOT_MEASURED, "WARNING", "near this size"),
        ):
            choice = decide(of)
            assert (choice.implementation, choice.config, choice.cause) == ("xla", None, cause)
            assert words in choice.reason and (level == "INFO" or 'implementation="fused"' in choice.reason)
            said = [record.levelname for record in caplog.records if words in record.getMessage()]
            assert said == [level]
            caplog.clear()
            assert decide(of).implementation == "xla" and not caplog.records  # Said once.
            assert decide(of, implementation="fused").implementation == "fused"
            assert decide(of, config=Config()).implementation == "fused"
    assert decide(GATHER).implementation == "fused"
    on_cpu = dispatch.decide("another", dispatch.Asked(), Target("cpu", "cpu", 4), lambda *_: None, OTHER)
    assert on_cpu.implementation == "xla" and "CPU" in on_cpu.reason and on_cpu.cause is Cause.EMULATED


@pytest.mark.usefixtures("no_tables")
def test_who_tuned_a_problem_has_measured_it(measure):
    """A tuning entry's XLA time applies to exactly the configuration that would run."""
    measure({16: 2 / 3, 1024: 1.6})
    for xla_us, implementation in ((90.0, "xla"), (110.0, "fused")):
        entry = tables.Entry(OTHER, H200.kind, jax.__version__, Config(stages=3), 100.0, {"xla": xla_us})
        path = tables.user_file(H200.kind)
        assert path is not None
        tables.add(path, [entry])
        choice = decide(OTHER)
        assert choice.implementation == implementation, choice
        with Tuning([Outcome(GATHER, result=dataclasses.replace(entry, problem=GATHER))], None):
            assert decide(GATHER).implementation == implementation
    assert choice.config == Config(stages=3)
    # A tuning run that ended before measuring XLA does not affect the choice.
    assert choose.verdict(dataclasses.replace(OTHER, m=1 << 14), H200).cause is Cause.NOT_MEASURED


def test_the_table_is_made_of_results(tmp_path, monkeypatch, capsys):
    """Newer results replace older ones. Sizes of gathered weights are those of one shard."""
    first = (
        "matmul,1,128x256x512,bf16,nt,fused,ok,10.0", "matmul,1,128x256x512,bf16,nt,xla,ok,9.0",
        "matmul,1,64x256x512,f8_e4m3fn,nt,fused,ok,5.0", "matmul,1,64x256x512,f8_e4m3fn,nt,xla,ok,6.0",
        "matmul,1,32x256x512,bf16,nn,fused,NOT SERVED,", "matmul,1,32x256x512,bf16,nn,xla,ok,6.0",
        *(f"all_gather_rhs_matmul_{along},4,128x256x512,bf16,nn,{method},ok,10.0"
          for along in "nk" for method in ("fused", "xla")),
    )  # fmt: skip
    then = ("matmul,1,128x256x512,bf16,nt,fused,ok,8.0", "matmul,1,128x256x512,bf16,nt,xla,ok,9.0")
    for name, rows in (("old", first), ("new", then)):
        text = "\n".join(["op,devices,shape,dtype,layout,method,status,loop_us", *rows, ""])
        (tmp_path / f"{name}.csv").write_text(text)
    out = tmp_path / "made" / "crossover.csv"
    assert command.main([str(tmp_path / "old.csv"), str(tmp_path / "new.csv"), "--out", str(out)]) == 0
    assert "4 problems" in capsys.readouterr().out
    monkeypatch.setattr(crossover, "FILE", out)
    rows = {(row.problem.gathered or "", row.problem.m): row for row in crossover.measurements.__wrapped__()}
    assert set(rows) == {("", 128), ("", 64), ("n", 128), ("k", 128)}
    assert (rows["", 128].fused_us, rows["", 128].problem.layout) == (8.0, "nt")
    assert (rows["", 64].problem.dtype, rows["", 64].problem.out_dtype) == ("float8_e4m3fn", "bfloat16")
    assert (rows["n", 128].problem.n, rows["n", 128].problem.k) == (64, 512)
    assert (rows["k", 128].problem.n, rows["k", 128].problem.k) == (256, 128)
