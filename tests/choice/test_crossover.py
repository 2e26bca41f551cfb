"""Tests the choice between the fused kernel and XLA according to stored measurements."""

import dataclasses
import itertools
import logging
import math
import statistics

import jax
import pytest

import overlap
from benchmarks import crossover as command
from overlap.choice import choose, crossover, dispatch, tables
from overlap.choice.crossover import Cause, Measured, expected_ratio, neighbours
from overlap.choice.problem import Problem
from overlap.cli.arguments import WrongArguments
from overlap.kernels.config import Config
from overlap.kernels.target import Target
from overlap.tuning.autotune import Tuning
from overlap.tuning.search import Outcome
from tests.choice.tuning_cases import no_tables  # noqa: F401
from tests.ops.explained import answer

GATHER = Problem("all_gather_lhs_matmul", 1024, 4096, 4096, "bfloat16", "bfloat16", devices=4)
H200 = Target("gpu", "NVIDIA H200", 132)


def xla_is_faster(problem, gpu="h200"):
    """Returns why XLA runs; None if the fused kernel runs."""
    xla_runs, reason, _ = crossover.verdict(problem, gpu)
    return reason if xla_runs else None


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    monkeypatch.setattr(dispatch, "_logged", set())


@pytest.fixture
def measured(monkeypatch):
    """Three measurements: XLA is faster for few rows, and for rows that are not aligned to the cache's lines."""
    few, many, ragged = (dataclasses.replace(GATHER, **sizes) for sizes in (dict(m=16), {}, dict(n=4104, k=4104)))
    pairs = (Measured(few, 30.0, 20.0), Measured(many, 200.0, 320.0), Measured(ragged, 200.0, 120.0))
    monkeypatch.setattr(crossover, "measurements", lambda: pairs)
    return pairs


def test_the_shipped_table_is_sound():
    rows = crossover.measurements()
    assert {row.problem.op for row in rows} >= {"matmul", "all_gather_lhs_matmul"}
    assert len({(row.gpu, row.problem) for row in rows}) == len(rows)
    assert {row.gpu for row in rows} == {"h100", "h200"}
    assert all(row.fused_us > 0 and row.xla_us > 0 for row in rows)
    for row in rows[::3]:
        (distance, nearest), *_ = neighbours(row.problem, row.gpu)
        # A size may have been measured in f16 or bf16, which count as one.
        of_this_kind = dataclasses.replace(nearest.problem, dtype=row.problem.dtype, out_dtype=row.problem.out_dtype)
        assert distance == 0 and of_this_kind == row.problem
        # The choice agrees with the measurement; of two equals, collectives take the kernel.
        least = 1 / crossover.LEAST_GAIN if row.problem.communicates else 1
        assert (xla_is_faster(row.problem, row.gpu) is None) == (row.ratio > least)


@pytest.mark.parametrize(
    ("sizes", "slower"),
    [
        (dict(m=16), True), (dict(m=32), True), (dict(m=512), False), (dict(m=1), True), (dict(m=1 << 15), False),
        (dict(m=16, dtype="float16", out_dtype="float16"), True), (dict(devices=8), False), (dict(n=4096 + 8), True),
    ],
)  # fmt: skip
def test_the_nearest_measurement_speaks(measured, sizes, slower):
    assert bool(xla_is_faster(dataclasses.replace(GATHER, **sizes))) == slower


def test_an_operation_that_was_never_measured_is_left_to_xla(measured, caplog):
    other = dataclasses.replace(GATHER, op="all_gather_rhs_matmul_n")
    choice = decide(other)
    assert choice.implementation == "xla" and choice.config is None and choice.cause is Cause.NOT_MEASURED
    # The reason says how to force the kernel. The result of `explain` and the log say this too.
    assert "not measured" in str(choice) and 'implementation="fused"' in choice.reason
    assert [record.levelname for record in caplog.records if "not measured" in record.getMessage()] == ["WARNING"]
    assert decide(other, implementation="fused").implementation == "fused"
    assert decide(other, config=Config()).implementation == "fused"


def test_far_from_all_that_was_measured_xla_runs(measured, caplog):
    far = dataclasses.replace(GATHER, n=128, k=256)
    assert "near this size" in str(xla_is_faster(far))
    assert xla_is_faster(dataclasses.replace(GATHER, n=1024, k=512)) is None
    with caplog.at_level(logging.INFO, logger="overlap"):
        dispatch.decide(far.op, dispatch.Asked(), H200, lambda *_: None, far)
    assert [record.levelname for record in caplog.records if "near this size" in record.getMessage()] == ["WARNING"]


def test_on_a_cpu_the_reason_is_the_cpu(measured):
    other = dataclasses.replace(GATHER, op="all_gather_rhs_matmul_n")
    on_cpu = dispatch.decide("another", dispatch.Asked(), Target("cpu", "cpu", 4), lambda *_: None, other)
    assert on_cpu.implementation == "xla" and "CPU" in on_cpu.reason


@pytest.fixture
def grid(monkeypatch):
    return lambda ratios: set_measurements(monkeypatch, ratios)


def set_measurements(monkeypatch, ratios):
    """Measurements by m_shard: the speedup of the fused kernel."""
    pairs = tuple(Measured(dataclasses.replace(GATHER, m=m), 100.0, 100.0 * ratio) for m, ratio in ratios.items())
    monkeypatch.setattr(crossover, "measurements", lambda: pairs)


def test_the_ratio_is_interpolated(grid):
    grid({16: 0.5, 64: 2.0, 4096: 9.0})

    def ratio(m):
        return expected_ratio(neighbours(dataclasses.replace(GATHER, m=m)))

    far, near = (crossover.FALLING**doublings for doublings in (5, 3))
    assert math.isclose(math.log2(ratio(512)), (-far + near + math.log2(9) * near) / (far + near + near))
    assert ratio(16) < ratio(20) < ratio(32) < ratio(50) < ratio(64)


def test_fused_is_never_picked_where_the_neighbours_say_xla(grid):
    sizes = [16, 64, 512, 2048]
    for ratios in itertools.product((0.6, 0.97, 1.05, 3.0), repeat=len(sizes)):
        grid(dict(zip(sizes, ratios, strict=True)))
        for low, high in itertools.pairwise(sizes):
            for m in {low + 1, math.isqrt(low * high), high - 1}:
                answer = xla_is_faster(dataclasses.replace(GATHER, m=m))
                if max(ratios) < 1 or min(ratios) > 1:
                    assert (answer is None) == (min(ratios) > 1), (ratios, m)
        for m, ratio in zip(sizes, ratios, strict=True):
            assert (xla_is_faster(dataclasses.replace(GATHER, m=m)) is None) == (ratio > 1)


def test_a_measurement_decides_alone_only_about_its_own_problem(grid):
    grid({16: 0.97, 64: 3.0})
    assert xla_is_faster(dataclasses.replace(GATHER, m=16)) is not None
    assert xla_is_faster(dataclasses.replace(GATHER, m=24)) is None
    # A small gain that is only predicted is not taken.
    grid({16: 1.01, 64: 1.01})
    assert xla_is_faster(dataclasses.replace(GATHER, m=16)) is None
    assert "the kernel and XLA should be about as fast (1.01 x)" in str(
        xla_is_faster(dataclasses.replace(GATHER, m=17))
    )


def test_another_dtype_counts_less_than_the_same_dtype(grid, monkeypatch):
    grid({16: 0.7})
    (few,), f8 = crossover.measurements(), dict(dtype="float8_e5m2", layout="nt")
    near, far = (dataclasses.replace(GATHER, m=m, **f8) for m in (17, 32))
    assert xla_is_faster(near) is not None
    own = Measured(far, 100.0, 130.0)
    monkeypatch.setattr(crossover, "measurements", lambda: (few, own))
    assert xla_is_faster(near) is None


def test_halfway_between_a_loss_and_a_small_gain_xla_runs(grid):
    grid({16: 0.6, 64: 1.1})
    reason = xla_is_faster(dataclasses.replace(GATHER, m=33))
    assert reason is not None and "XLA should be 1.22 x as fast by the 2 nearest" in reason and " 64x4096x" in reason


def test_rows_of_all_devices_count(monkeypatch):
    """With twice the devices, the nearest measurement has half the rows per device."""
    few, many = (Measured(dataclasses.replace(GATHER, m=m), 100.0, xla) for m, xla in ((16, 60.0), (64, 200.0)))
    monkeypatch.setattr(crossover, "measurements", lambda: (few, many))
    assert xla_is_faster(dataclasses.replace(GATHER, m=8, devices=8)) is not None
    assert xla_is_faster(dataclasses.replace(GATHER, m=32, devices=8)) is None


def test_each_measured_problem_is_chosen_well_by_the_others(monkeypatch):
    """Without their own measurement, problems are on average 2% faster than by XLA; collectives 21%."""
    every, gains = crossover.measurements(), {True: [], False: []}
    for row in every[::7]:
        monkeypatch.setattr(crossover, "measurements", lambda row=row: [x for x in every if x.problem != row.problem])
        gains[row.problem.communicates].append(1 if crossover.verdict(row.problem, row.gpu).xla_runs else row.ratio)
    collectives, products = (sorted(gains[communicates]) for communicates in (True, False))
    assert statistics.geometric_mean(collectives) > 1.17 and statistics.geometric_mean(products) > 1.015
    assert collectives[len(collectives) // 20] > 0.97 and products[len(products) // 20] > 0.92


@pytest.mark.parametrize(
    ("ratio", "op", "xla_runs"), [(0.99, "matmul", True), (1.01, "matmul", False), (0.99, GATHER.op, False)]
)
def test_measured_times_within_two_percent_count_as_equal(ratio, op, xla_runs):
    devices = 1 if op == "matmul" else 4
    runs, why, cause = Measured(dataclasses.replace(GATHER, op=op, devices=devices), 100.0, 100.0 * ratio).verdict
    assert runs == xla_runs and f"about as fast ({ratio} x)" in why and cause is Cause.MEASURED


def test_measured_times_do_not_stand_for_other_results(monkeypatch):
    """A call with f32 results of a size that was measured with bf16 results is predicted."""
    monkeypatch.setattr(crossover, "measurements", lambda: (Measured(GATHER, 100.0, 120.0),))
    assert "measured to be 1.20" in crossover.verdict(GATHER).reason
    assert crossover.verdict(dataclasses.replace(GATHER, out_dtype="float32")).cause is Cause.PREDICTED


@pytest.mark.usefixtures("no_tables")
def test_who_tuned_a_problem_has_measured_it(measured):
    """A tuning entry's XLA time applies to exactly the configuration that would run."""
    other = dataclasses.replace(GATHER, op="all_gather_rhs_matmul_n")
    for xla_us, implementation in ((90.0, "xla"), (110.0, "fused")):
        entry = tables.Entry(other, H200.kind, jax.__version__, Config(stages=3), 100.0, {"xla": xla_us})
        path = tables.user_file(H200.kind)
        assert path is not None
        tables.add(path, [entry])
        choice = decide(other)
        assert choice.implementation == implementation, choice
        with Tuning([Outcome(GATHER, result=dataclasses.replace(entry, problem=GATHER))], None):
            assert decide(GATHER).implementation == implementation
    assert choice.config == Config(stages=3)
    # A tuning run that ended before measuring XLA does not affect the choice.
    assert choose.verdict(dataclasses.replace(other, m=1 << 14), H200).cause is Cause.NOT_MEASURED


def test_the_choice_of_the_kernel_says_what_it_rests_on(grid):
    grid({16: 1.5})
    known = dataclasses.replace(GATHER, m=16)
    reason = f"the kernel was measured to be 1.50 x as fast as XLA for {known}"
    assert crossover.verdict(known) == (False, reason, Cause.MEASURED)
    predicted = (
        f"the kernel should be 1.50 x as fast as XLA by the 1 nearest measurements, the first of {known} (NVIDIA H200)"
    )
    for changes, gpu in (({"m": 17}, "h200"), ({"devices": 8}, "h200"), ({}, "h100")):
        assert crossover.verdict(dataclasses.replace(known, **changes), gpu) == (False, predicted, Cause.PREDICTED)
    assert "on 4 devices" in predicted
    assert decide(dataclasses.replace(known, devices=8)).reason == predicted


def test_a_tie_goes_to_the_fused_kernel(monkeypatch):
    for xla_us, slower in ((100.0, False), (99.0, False), (97.0, True)):
        pair = Measured(GATHER, 100.0, xla_us)
        monkeypatch.setattr(crossover, "measurements", lambda pair=pair: (pair,))
        assert bool(xla_is_faster(GATHER)) == slower


def decide(problem, config=None, implementation=None):
    return dispatch.decide(problem.op, dispatch.Asked(config, implementation), H200, lambda *_: None, problem)


def test_the_chooser_listens_and_a_wish_comes_first(measured, caplog):
    few = dataclasses.replace(GATHER, m=16)
    with caplog.at_level(logging.INFO, "overlap"):
        choice = decide(few)
    assert choice.implementation == "xla" and choice.config is None and "1.50 x as fast" in choice.reason
    # The message is no warning, because the choice is no mistake of the caller.
    assert [record.levelno for record in caplog.records if "1.50 x" in record.getMessage()] == [logging.INFO]
    assert decide(GATHER).implementation == "fused"
    assert decide(few, implementation="fused").implementation == "fused"
    assert decide(few, config=Config()).implementation == "fused"


def test_explain_says_it():
    x, w = jax.ShapeDtypeStruct((16, 8192), "bfloat16"), jax.ShapeDtypeStruct((8192, 8192), "bfloat16")
    # On a CPU the reason is the CPU; the measurements are for GPUs.
    assert "CPU" in answer(overlap.matmul, x, w).reason


def result_file(path, *rows):
    fields = "op,devices,shape,dtype,layout,method,status,loop_us"
    path.write_text("\n".join([fields, *rows]) + "\n")
    return path


def test_the_table_is_made_of_results(tmp_path, monkeypatch, capsys):
    old = result_file(
        tmp_path / "old.csv",
        "matmul,1,128x256x512,bf16,nt,fused,ok,10.0", "matmul,1,128x256x512,bf16,nt,xla,ok,9.0",
        "matmul,1,64x256x512,f8_e4m3fn,nt,fused,ok,5.0", "matmul,1,64x256x512,f8_e4m3fn,nt,xla,ok,6.0",
        "matmul,1,32x256x512,bf16,nn,fused,NOT SERVED,", "matmul,1,32x256x512,bf16,nn,xla,ok,6.0",
    )  # fmt: skip
    new = result_file(
        tmp_path / "new.csv",
        "matmul,1,128x256x512,bf16,nt,fused,ok,8.0", "matmul,1,128x256x512,bf16,nt,xla,ok,9.0",
    )  # fmt: skip
    out = tmp_path / "made" / "crossover.csv"
    assert command.main([str(old), str(new), "--out", str(out)]) == 0
    assert "2 problems" in capsys.readouterr().out
    monkeypatch.setattr(crossover, "FILE", out)
    monkeypatch.setattr(crossover, "measurements", crossover.measurements.__wrapped__)
    rows = {row.problem.m: row for row in crossover.measurements()}
    assert set(rows) == {128, 64}
    assert (rows[128].fused_us, rows[128].problem.layout) == (8.0, "nt")
    assert (rows[64].problem.dtype, rows[64].problem.out_dtype) == ("float8_e4m3fn", "bfloat16")


def test_sizes_of_gathered_weights_are_those_of_one_shard(tmp_path, monkeypatch):
    rows = [f"all_gather_rhs_matmul_{along},4,128x256x512,bf16,nn,{method},ok,10.0"
            for along in "nk" for method in ("fused", "xla")]  # fmt: skip
    out = tmp_path / "crossover.csv"
    assert command.main([str(result_file(tmp_path / "weights.csv", *rows)), "--out", str(out)]) == 0
    monkeypatch.setattr(crossover, "FILE", out)
    problems = {row.problem.gathered: row.problem for row in crossover.measurements.__wrapped__()}
    assert (problems["n"].m, problems["n"].n, problems["n"].k) == (128, 64, 512)
    assert (problems["k"].m, problems["k"].n, problems["k"].k) == (128, 256, 128)


def test_what_is_no_result_writes_nothing(tmp_path):
    out = tmp_path / "crossover.csv"
    out.write_text("as before")
    other = tmp_path / "other.csv"
    other.write_text("a,b\n1,2\n")
    with pytest.raises(WrongArguments, match=r"other\.csv is no result"):
        command.main([str(other), "--out", str(out)])
    assert command.main([str(result_file(tmp_path / "empty.csv")), "--out", str(out)]) == 1
    assert out.read_text() == "as before"
