"""The choice between the fused kernel and XLA by what was measured."""

import dataclasses
import logging

import jax
import pytest

import overlap
from benchmarks import crossover as command
from overlap.kernels import dispatch
from overlap.kernels.config import Config
from overlap.kernels.target import Target
from overlap.tuning import crossover
from overlap.tuning.crossover import Measured, nearest, xla_is_faster
from overlap.tuning.problem import Problem

GATHER = Problem("all_gather_lhs_matmul", 1024, 4096, 4096, "bfloat16", "bfloat16", devices=4)
H200 = Target("gpu", "NVIDIA H200", 132)


@pytest.fixture
def measured(monkeypatch):
    """Three measurements: XLA is faster for few rows and for rows that lie across the cache's lines."""
    few, many, ragged = (dataclasses.replace(GATHER, **sizes) for sizes in (dict(m=16), {}, dict(n=4104, k=4104)))
    pairs = (Measured(few, 30.0, 20.0), Measured(many, 200.0, 300.0), Measured(ragged, 200.0, 180.0))
    monkeypatch.setattr(crossover, "_measurements", lambda: pairs)
    return pairs


def test_the_shipped_table_is_sound():
    rows = crossover._measurements()
    assert {row.problem.op for row in rows} >= {"matmul", "all_gather_lhs_matmul"}
    assert len({row.problem for row in rows}) == len(rows)
    for row in rows:
        assert nearest(row.problem) is row
        assert row.fused_us > 0 and row.xla_us > 0
        # It says what it was measured to be.
        assert (xla_is_faster(row.problem) is None) == (row.ratio >= crossover.LEAST_RATIO)


@pytest.mark.parametrize(
    ("sizes", "slower"),
    [
        (dict(m=16), True), (dict(m=32), True), (dict(m=512), False), (dict(m=1), True), (dict(m=1 << 15), False),
        (dict(m=16, dtype="float16", out_dtype="float16"), True), (dict(devices=8), False), (dict(n=4096 + 8), True),
    ],
)  # fmt: skip
def test_the_nearest_measurement_speaks(measured, sizes, slower):
    assert bool(xla_is_faster(dataclasses.replace(GATHER, **sizes))) == slower


def test_an_operation_that_was_never_measured_is_left_alone(measured):
    assert xla_is_faster(dataclasses.replace(GATHER, op="another", m=16)) is None


def test_a_tie_goes_to_the_fused_kernel(monkeypatch):
    for xla_us, slower in ((96.0, False), (94.0, True)):
        pair = Measured(GATHER, 100.0, xla_us)
        monkeypatch.setattr(crossover, "_measurements", lambda pair=pair: (pair,))
        assert bool(xla_is_faster(GATHER)) == slower


def decide(problem, config=None, implementation=None):
    return dispatch.decide(problem.op, implementation, H200, config, lambda *_: None, problem)


def test_the_chooser_listens_and_a_wish_comes_first(measured, caplog):
    few = dataclasses.replace(GATHER, m=16)
    with caplog.at_level(logging.INFO, "overlap"):
        choice = decide(few)
    assert choice.implementation == "xla" and choice.config is None and "1.50 x as fast" in choice.reason
    # It is no surprise, and no fault of the caller's.
    assert [record.levelno for record in caplog.records if "1.50 x" in record.getMessage()] == [logging.INFO]
    assert decide(GATHER).implementation == "fused"
    assert decide(few, implementation="fused").implementation == "fused"
    assert decide(few, config=Config()).implementation == "fused"


def test_explain_says_it():
    x, w = jax.ShapeDtypeStruct((16, 8192), "bfloat16"), jax.ShapeDtypeStruct((8192, 8192), "bfloat16")
    # On a CPU the reason is the CPU; the measurements are for GPUs.
    assert "CPU" in overlap.explain(overlap.matmul, x, w).reason


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
    monkeypatch.setattr(crossover, "_measurements", crossover._measurements.__wrapped__)
    rows = {row.problem.m: row for row in crossover._measurements()}
    assert set(rows) == {128, 64}
    assert (rows[128].fused_us, rows[128].problem.layout) == (8.0, "nt")
    assert (rows[64].problem.dtype, rows[64].problem.out_dtype) == ("float8_e4m3fn", "bfloat16")


def test_what_is_no_result_writes_nothing(tmp_path):
    out = tmp_path / "crossover.csv"
    out.write_text("as before")
    other = tmp_path / "other.csv"
    other.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"other\.csv is no result"):
        command.main([str(other), "--out", str(out)])
    assert command.main([str(result_file(tmp_path / "empty.csv")), "--out", str(out)]) == 1
    assert out.read_text() == "as before"
