"""The choice between the fused kernel and XLA, by stored measurements; and the table that holds them."""

import dataclasses
import itertools
import logging
import math
import statistics

import jax
import pytest

from benchmarks import crossover as command
from benchmarks import fit_model, known_models
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


def plain(m, **fields):
    """The product of one device."""
    return sized(**{"m": m, "op": "matmul", "devices": 1, **fields})


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


@pytest.mark.parametrize("gpu", ["h100", "h200"])
def test_each_measured_problem_is_chosen_well_by_the_others(gpu):
    """Without their own measurement, plain products are on average 2% faster than by XLA, collectives 21%."""
    collectives, products = (sorted(gain for gain, _ in fit_model.left_out(gpu, of).values()) for of in (True, False))
    assert statistics.geometric_mean(collectives) > 1.208 and statistics.geometric_mean(products) > 1.02
    assert collectives[len(collectives) // 20] > 0.98 and products[len(products) // 20] > 0.92
    assert sum(gain < fit_model.LOSS for gain in collectives) <= {"h100": 1, "h200": 6}[gpu]


def test_the_losses_are_named(measure):
    """32 and 4096 rows are chosen for by 16 and 8192 rows, where the kernel is faster; these two run XLA."""
    measure({16: 1.5, 32: 0.9, 4096: 0.8, 8192: 1.6})
    lines = fit_model.judgement_of_choices("h200").splitlines()
    assert lines[0] == "collectives, 4 problems, each left out, 2 losses:"
    assert [line.split()[:3:2] for line in lines[1:3]] == [["0.800", "4096x4096x4096"], ["0.900", "32x4096x4096"]]
    assert "geometric mean 0.921" in lines[3] and "geometric mean 1.147" in lines[4]


# --- What the nearest measurements say --------------------------------------------------------------------------------


def test_the_nearest_measurement_speaks(measure):
    """XLA is faster for few rows, and for rows that are not aligned to the cache's lines."""
    measure({16: 2 / 3, 1024: 1.6, sized(n=4104, k=4104): 0.6})
    for sizes, slower in (
        (dict(m=16), True), (dict(m=32), True), (dict(m=512), False), (dict(m=1), True), (dict(m=1 << 15), False),
        (dict(m=16, dtype="float16", out_dtype="float16"), True), (dict(devices=8), False), (dict(n=4096 + 8), True),
        (dict(m=127), True), (dict(m=129), False), (dict(n=128, k=256), False),
    ):  # fmt: skip
        assert verdict(sized(**sizes)).xla_runs == slower, sizes
    assert verdict(OTHER) == crossover.NOTHING_MEASURED and crossover.NOTHING_MEASURED.ratio == 1
    # Other measurements do not count, however many there are.
    measure({16: 0.9, **{m: 2.0 for m in (256, 512, 1024, 2048)}})
    assert verdict(sized(m=32)).xla_runs and verdict(sized(m=32)).ratio == pytest.approx(0.9)
    # Of equally near ones, that of the same dtype, then the one by which the kernel is faster.
    others = dict(dtype="float16", out_dtype="float16")
    measure({16: 0.9, sized(m=16, **others): 2.0})
    assert verdict(sized(m=32)).ratio == pytest.approx(0.9) and verdict(sized(m=32, **others)).ratio == pytest.approx(2)
    for far in (16, 64):
        measure({16: 0.7, 64: 0.7, far: 1.5})
        assert not verdict(sized(m=32)).xla_runs
    # Of two that should be about as fast, the kernel runs.
    measure({16: 0.99})
    assert "the kernel should be about as fast as XLA (0.99 x)" in verdict(sized(m=17)).reason
    assert not verdict(sized(m=17)).xla_runs
    measure({16: 0.97})
    assert verdict(sized(m=16)).xla_runs and verdict(sized(m=17)).xla_runs
    # Rows of all devices count: with twice the devices, the nearest measurement has half the rows per device.
    measure({16: 0.6, 64: 2.0})
    assert verdict(sized(m=8, devices=8)).xla_runs and not verdict(sized(m=32, devices=8)).xla_runs


def test_plain_products_are_interpolated(measure):
    measure({plain(16): 0.5, plain(64): 2.0, plain(4096): 9.0})

    def ratio(m):
        assert verdict(plain(m)).ratio == expected_ratio(neighbours(plain(m)))
        return verdict(plain(m)).ratio

    far, near = (crossover.FALLING**doublings for doublings in (5, 3))
    assert math.isclose(math.log2(ratio(512)), (-far + near + math.log2(9) * near) / (far + near + near))
    assert ratio(17) < ratio(20) < ratio(32) < ratio(50) < ratio(63)
    far = verdict(plain(16, n=128, k=64))
    assert far.xla_runs and far.cause is Cause.NOT_MEASURED and "near this size" in far.reason and far.ratio == 1
    # A batch of products is not one product of more rows: each may have a right operand of its own.
    measure({plain(64): 2.0})
    batched = verdict(plain(16, batch=4))
    assert batched.cause is Cause.PREDICTED and batched.ratio == pytest.approx(2.0)


def test_a_predicted_product_needs_a_gain_and_other_properties_count_less(measure):
    measure({plain(16): 0.97, plain(64): 3.0})  # A measurement decides alone only about its own problem.
    assert verdict(plain(16)).xla_runs and not verdict(plain(24)).xla_runs
    measure({plain(16): 1.01, plain(64): 1.01})  # A small gain that is only predicted is not taken.
    assert not verdict(plain(16)).xla_runs
    near = verdict(plain(17))
    assert near.xla_runs and "the kernel should be about as fast as XLA (1.01 x)" in near.reason
    measure({plain(16): 0.6, plain(64): 1.1})  # Halfway between a loss and a small gain.
    reason = verdict(plain(33)).reason
    assert "XLA should be 1.22 x as fast by the 2 nearest" in reason and " 64x4096x" in reason
    # Another dtype counts less than the same dtype.
    near, own = (plain(m, dtype="float8_e5m2", layout="nt") for m in (17, 32))
    measure({plain(16): 0.7})
    assert verdict(near).xla_runs
    measure({plain(16): 0.7, own: 1.3})
    assert not verdict(near).xla_runs
    # A call with f32 results of a size that was measured with bf16 results is predicted.
    measure({GATHER: 1.2})
    assert "measured to be 1.20" in verdict(GATHER).reason
    assert verdict(sized(out_dtype="float32")).cause is Cause.PREDICTED


def test_the_choice_of_the_kernel_says_what_it_rests_on(measure):
    # Measured times within two percent count as equal. Then the fused kernel runs where devices communicate.
    for ratio, of, xla_runs in ((0.99, plain(1024), True), (1.01, plain(1024), False), (0.99, GATHER, False)):
        found = Measured(of, 100.0, 100.0 * ratio).verdict
        assert found.xla_runs == xla_runs and f"about as fast as XLA ({ratio} x)" in found.reason
        assert found.cause is Cause.MEASURED and found.ratio == pytest.approx(ratio)
    assert Measured(GATHER, 100.0, 97.0).verdict.xla_runs
    known = sized(m=16)
    measure({16: 1.5})
    why = f"the kernel was measured to be 1.50 x as fast as XLA for {known}"
    assert verdict(known) == (False, why, Cause.MEASURED, 1.5)
    for changes, gpu in (({"m": 17}, "h200"), ({"devices": 8}, "h200"), ({}, "h100")):
        runs, why, cause, ratio = verdict(dataclasses.replace(known, **changes), gpu)
        assert not runs and cause is Cause.PREDICTED and "1.50 x as fast as XLA by the nearest" in why
        assert f"that of {known} (NVIDIA H200)" in why and "on 4 devices" in why and ratio == pytest.approx(1.5)
    assert decide(dataclasses.replace(known, devices=8)).reason == why


def test_the_ratio_is_in_the_explanation_whatever_runs(measure):
    measure({16: 0.7, 1024: 1.6})
    for m, implementation, ratio in ((16, "xla", 0.7), (17, "xla", 0.7), (1024, "fused", 1.6), (1023, "fused", 1.6)):
        choice = decide(sized(m=m))
        assert choice.implementation == implementation and choice.ratio == pytest.approx(ratio)
    # Nothing was compared.
    assert decide(OTHER).ratio == decide(GATHER, implementation="fused").ratio == decide(GATHER, Config()).ratio == 1


# --- How rows are divided ---------------------------------------------------------------------------------------------

# Two more published models, so that there are seven.
MODELS = known_models.MODELS | {
    "Llama 3.1 405B": known_models.Model(16384, 53248, 128, 8),
    "Qwen 2.5 7B": known_models.Model(3584, 18944, 28, 4),
}
SCATTER = "matmul_reduce_scatter"


def divided(problem, batch):
    """The problem with its rows divided into elements of a batch."""
    return dataclasses.replace(problem, m=problem.m // batch, batch=batch)


def products_of(model, devices, rows):
    """The products of a layer in tensor parallelism, and those of the backward pass that communicate."""
    for n, k in model.products(devices):
        if k == model.hidden:  # Columns are sharded: the rows of all devices are gathered.
            yield Problem(GATHER.op, rows // devices, n, k, "bfloat16", "bfloat16", devices)
            yield Problem(SCATTER, rows, k, n, "bfloat16", "bfloat16", devices, "nt")
        else:
            yield Problem(SCATTER, rows, n, k, "bfloat16", "bfloat16", devices)
            yield Problem(GATHER.op, rows // devices, k, n, "bfloat16", "bfloat16", devices, "nt")


def test_published_models_run_the_kernels_however_their_rows_are_divided():
    """Of no product is nothing known. Rows as [rows], [4, rows / 4] and [16, rows / 16] give one decision.

    That holds as long as the blocks fill tiles; 16 x 128 rows on 4 devices have blocks of 32 rows.
    """
    full, wasted = [], []
    for gpu, devices, rows in itertools.product(("h100", "h200"), (2, 4), (2048, 8192)):
        for problem in itertools.chain.from_iterable(products_of(model, devices, rows) for model in MODELS.values()):
            whole = verdict(problem, gpu)
            assert whole.cause in (Cause.MEASURED, Cause.PREDICTED), problem
            full.append(whole)
            for batch in (4, 16):
                part = verdict(divided(problem, batch), gpu)
                if divided(problem, batch).block[0] >= 64:
                    assert part == whole
                else:
                    wasted.append(part.ratio / whole.ratio)
    assert len(full) == 432 and not any(x.xla_runs for x in full)
    assert len(wasted) == 108 and wasted == pytest.approx([0.5] * 108)


def test_blocks_that_do_not_fill_tiles_count_as_the_tiles_that_they_need(measure):
    measure({sized(m=2048): 1.6, sized(op=SCATTER, m=8192): 1.6})
    for whole in (sized(m=2048), sized(op=SCATTER, m=8192)):
        # 4 sequences of 2048 rows, 16 of 512, and so on.
        for batch, part in ((4, 1), (16, 1), (32, 1), (64, 1 / 2), (128, 1 / 4), (512, 1 / 16)):
            found = verdict(divided(whole, batch))
            assert found.ratio == pytest.approx(1.6 * part) and found.xla_runs == (part < 1)
            assert found.cause is (Cause.MEASURED if part == 1 else Cause.PREDICTED)
    assert "with 4 x as many tiles, since a block has only 16 rows" in verdict(divided(whole, 128)).reason
    # 80 rows need two tiles.
    assert verdict(sized(m=80, batch=24)).ratio == pytest.approx(1.6 * 80 * 24 / 64 / 48)
    # Few rows of all shards are one product, and so waste nothing.
    assert verdict(divided(sized(m=256), 16)) == verdict(sized(m=256))
    # Sums of few rows for all devices are not cut into blocks of rows.
    everywhere = sized(op="matmul_all_reduce", m=512, n=64, layout="tn")
    measure({everywhere: 1.6})
    assert divided(everywhere, 4).block[0] == 32 and verdict(divided(everywhere, 4)) == verdict(everywhere)


def test_a_product_that_was_measured_slower_is_left_to_xla_in_every_form(measure):
    measure({sized(m=2048): 0.9, sized(m=4096): 1.5})
    for batch in (1, 4, 16):
        assert verdict(divided(sized(m=2048), batch)).xla_runs and not verdict(divided(sized(m=4096), batch)).xla_runs
    # 1.5 times as fast by another measurement, but this one is nearer.
    assert verdict(divided(sized(m=2304), 4)).xla_runs


# --- Messages and tables ----------------------------------------------------------------------------------------------


def test_the_chooser_listens_and_a_wish_comes_first(measure, caplog):
    """A warning is logged where XLA runs for want of a measurement; how to force the kernel is said."""
    few, far = sized(m=16), plain(16, n=128, k=64)
    measure({16: 2 / 3, 1024: 1.6, plain(4096): 2.0})
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


def test_a_batch_is_a_distance_and_the_way_out_is_said_where_xla_runs(measure):
    measure({plain(64): 2.0})
    ((distance, _),) = neighbours(plain(16, batch=4))
    assert distance == 4  # Two doublings of the rows, and two of the batch.
    for ratio in (0.6, 1.6):
        measure({16: ratio})
        assert ('implementation="fused"' in verdict(sized(m=17)).reason) == (ratio < 1)
