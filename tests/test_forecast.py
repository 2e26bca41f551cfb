"""The forecast for a B200: its error against the measured Hopper ladder, and properties that any forecast must have."""

from __future__ import annotations

import csv
import dataclasses
import itertools
import pathlib
import statistics

import pytest

from benchmarks import forecast as command
from benchmarks import forecast_tables
from benchmarks.forecast_chips import B200, H200, Chip
from benchmarks.forecast_fused import Fused, forecast_fused
from benchmarks.forecast_lessons import BLACKWELL, HOPPER, LADDER, Lesson, Matmul
from benchmarks.forecast_model import best, epilogue_cycles, forecast, hbm_bytes, step_cycles
from overlap.kernels import ladder

SHAPES = [LADDER, Matmul(1024, 4096, 4096), Matmul(8192, 8192, 8192), Matmul(8192, 3584, 8192)]
LADDERS = [(H200, tuple((lesson,) for lesson in HOPPER)), (B200, BLACKWELL)]
MORE_IS_FASTER = (
    "sms", "load_mhz", "sustained", "smem_bytes_per_cycle", "smem_write_bytes_per_cycle", "l2_bytes_per_cycle",
    "store_bytes_per_cycle", "tmem_bytes_per_cycle", "l2_bytes", "hbm_bytes_per_us",
)  # fmt: skip
MORE_IS_SLOWER = ("copy_latency_cycles", "cta_start_cycles", "drain_cycles", "launch_us")


def errors(chip: Chip = H200) -> list[float]:
    """Returns the errors of the forecast for the Hopper ladder, relative to the measured times."""
    measured = forecast_tables.measured_ladder()
    return [forecast(chip, lesson).us / measured[lesson.name] - 1 for lesson in HOPPER]


# --- Against measurements ---------------------------------------------------------------------------------------------


def test_the_error_against_the_measured_hopper_ladder() -> None:
    assert [lesson.name for lesson in HOPPER] == [rung.name for rung in ladder.RUNGS]
    assert statistics.mean(map(abs, errors())) < 0.025
    assert max(map(abs, errors())) < 0.06


@pytest.mark.parametrize("name", [name for name, (origin, _) in H200.origins.items() if origin == "fitted"])
def test_what_is_called_fitted_is_near_its_best_value(name: str) -> None:
    squares = {
        factor: sum(error**2 for error in errors(dataclasses.replace(H200, **{name: factor * getattr(H200, name)})))
        for factor in (0.4, 0.7, 1.0, 1.3, 1.6)
    }
    assert min(squares, key=squares.__getitem__) == 1.0


def test_fused_operations_on_hopper_are_forecast_within_ten_points_unless_nvlink_bounds_them() -> None:
    records = forecast_tables.fused_on_hopper().records
    assert len(records) > 15
    near = [record for record in records if record["nvlink_us"] < record["roof_us"]]
    assert len(near) > 15 and all(abs(record["difference"]) < 10 for record in near)


def test_nothing_is_fitted_to_blackwell_and_every_figure_has_an_origin() -> None:
    figures = {field.name for field in dataclasses.fields(Chip)} - {"name", "origins"}
    for chip in (H200, B200):
        assert set(chip.origins) == figures
    assert {origin for origin, _ in B200.origins.values()} == {"data sheet", "assumed"}
    assert B200.peak_tflops == pytest.approx(2250) and H200.peak_tflops == pytest.approx(989.4)
    for name in figures:
        if "as on the H200" in B200.origins[name][1]:
            assert getattr(B200, name) == getattr(H200, name), name


# --- Properties -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chip, lessons", LADDERS, ids=["Hopper", "Blackwell"])
def test_a_later_lesson_is_not_slower(chip: Chip, lessons: tuple[tuple[Lesson, ...], ...]) -> None:
    times = [best(chip, configs).us for configs in lessons]
    assert all(later < 1.005 * earlier for earlier, later in itertools.pairwise(times))
    assert times[-1] < 0.8 * times[0]


@pytest.mark.parametrize("chip, lessons", LADDERS, ids=["Hopper", "Blackwell"])
@pytest.mark.parametrize("problem", SHAPES, ids=lambda problem: f"{problem.m}x{problem.n}x{problem.k}")
def test_nothing_exceeds_the_peak_or_the_bandwidth_of_memory(
    chip: Chip, lessons: tuple[tuple[Lesson, ...], ...], problem: Matmul
) -> None:
    operand_bytes = 2 * (problem.m * problem.k + problem.k * problem.n + problem.m * problem.n)
    for configs in lessons:
        for lesson in configs:
            result = forecast(chip, lesson, problem)
            assert 0 < result.utilization < chip.sustained
            assert result.us > result.hbm_bytes / chip.hbm_bytes_per_us
            assert result.hbm_bytes >= operand_bytes
            assert chip.load_mhz <= result.mhz <= chip.peak_mhz


@pytest.mark.parametrize("chip, lessons", LADDERS, ids=["Hopper", "Blackwell"])
@pytest.mark.parametrize("name", MORE_IS_FASTER + MORE_IS_SLOWER)
def test_twice_the_bandwidth_never_slows_and_twice_the_latency_never_speeds_up(
    chip: Chip, lessons: tuple[tuple[Lesson, ...], ...], name: str
) -> None:
    other = dataclasses.replace(chip, **{name: 2 * getattr(chip, name)})
    sign = 1 if name in MORE_IS_FASTER else -1
    changes = [sign * (best(chip, configs).us - best(other, configs).us) for configs in lessons]
    assert all(change > -1e-9 for change in changes)
    if name in ("sms", "load_mhz", "launch_us", "cta_start_cycles"):
        assert all(change > 0 for change in changes)


def test_the_clock_rises_where_the_tensor_cores_wait_and_never_above_the_data_sheet() -> None:
    clocks = [B200.clock_mhz(busy) for busy in (1.0, 0.9, 0.6, 0.1)]
    assert clocks == sorted(clocks) and clocks[0] == B200.load_mhz and clocks[-1] == B200.peak_mhz
    assert B200.clock_mhz(0.9) ** 3 * 0.9 == pytest.approx(B200.load_mhz**3)


def test_bytes_and_cycles_of_a_known_tile() -> None:
    narrow, collective = BLACKWELL[0][0], BLACKWELL[3][0]
    steps = step_cycles(B200, narrow, 2)
    assert steps["tensor cores"] * B200.sustained == pytest.approx(128 * 128 * 64 / 4096)
    assert steps["L2"] * B200.l2_bytes_per_cycle == pytest.approx((128 + 128) * 128)
    # Two CTAs compute 256 × 256 and each loads 128 rows of both operands: the same bytes for twice the work.
    pair = step_cycles(B200, collective, 2)
    assert pair["L2"] == pytest.approx(steps["L2"]) and pair["tensor cores"] == pytest.approx(2 * steps["tensor cores"])
    assert epilogue_cycles(B200, dataclasses.replace(narrow, epilogue="chunks"), 2) < epilogue_cycles(B200, narrow, 2)
    # Half the itemsize: the same bytes per k step, and twice as many multiply-adds at twice the rate.
    assert step_cycles(B200, narrow, 1) == pytest.approx(steps)


def test_several_ctas_on_an_sm_do_not_multiply_its_tensor_cores() -> None:
    instant = dataclasses.replace(H200, copy_latency_cycles=0.0, cta_start_cycles=0.0, drain_cycles=0.0, launch_us=0.0)
    assert HOPPER[0].smem_bytes(2) * 3 <= instant.smem_limit_bytes
    assert forecast(instant, HOPPER[0]).utilization < instant.sustained * instant.load_mhz / instant.peak_mhz


def test_bands_spare_memory_traffic_where_the_operands_do_not_fit_into_l2() -> None:
    rows, bands = HOPPER[-3], HOPPER[-2]
    assert hbm_bytes(H200, bands, LADDER) < 0.5 * hbm_bytes(H200, rows, LADDER)
    # An L2 that holds one wave's operands keeps the rows of a band: lhs is read once, rhs once for each band.
    small = dataclasses.replace(H200, l2_bytes=36e6)
    assert hbm_bytes(small, bands, LADDER) <= 2 * (4096**2 + 2 * 4096 * 8192 + 4096 * 8192)
    large = dataclasses.replace(H200, l2_bytes=1e12)
    assert hbm_bytes(large, bands, LADDER) == hbm_bytes(large, rows, LADDER) == 2 * (4096**2 + 2 * 4096 * 8192)


@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.parametrize("m, n, k", [(1024, 4096, 4096), (8192, 8192, 3584), (2048, 256, 16384)])
def test_a_fused_operation_takes_as_long_as_its_product_and_its_transfer(devices: int, m: int, n: int, k: int) -> None:
    lessons = forecast_tables.MAINLOOPS["B200"]
    slow = dataclasses.replace(B200, nvlink_bytes_per_us=B200.nvlink_bytes_per_us / 2)
    for operation in ("all_gather_lhs_matmul", "matmul_reduce_scatter"):
        problem = Fused(operation, devices, m, n, k)
        result = forecast_fused(B200, problem, lessons)
        assert result.us > result.roof_us and result.us > result.nvlink_us and result.roof_fraction < 1
        assert forecast_fused(slow, problem, lessons).us >= result.us
    gathered = Fused("all_gather_lhs_matmul", devices, m, n, k)
    assert gathered.received_bytes == 2 * (devices - 1) * m * k and gathered.product.m == devices * m
    assert Fused("matmul_reduce_scatter", devices, m, n, k).received_bytes * devices == 2 * (devices - 1) * m * n


# --- The command ------------------------------------------------------------------------------------------------------


def test_the_command_prints_its_tables_and_writes_them(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "folder" / "numbers.csv"
    assert command.main(["--csv", str(file)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("forecast, not measured") == 3
    assert printed.index("Check 1") < printed.index("Check 2") < printed.index("The Blackwell ladder")
    with file.open(encoding="utf-8", newline="") as opened:
        rows = list(csv.DictReader(opened))
    assert {row["table"] for row in rows} == {
        "figures", "hopper_ladder", "fused_h200", "blackwell_ladder", "sensitivity", "fused_b200"
    }  # fmt: skip
    assert tuple(rows[0]) == forecast_tables.FIELDS
    for lesson in (row for row in rows if row["table"] == "blackwell_ladder"):
        assert lesson["measured_us"] == "" and f"{float(lesson['forecast_percent']):.1f}" in printed
    assert not [path for path in file.parent.iterdir() if path != file]


def test_a_command_that_fails_writes_nothing(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for arguments in (["--devices", "8"], ["more"], ["--csv"], ["--csv", str(tmp_path)]):
        with pytest.raises(SystemExit) as ended:
            command.main(arguments)
        assert ended.value.code == 2
    monkeypatch.setattr(forecast_tables, "RESULTS", tmp_path)
    assert command.main(["--csv", str(tmp_path / "numbers.csv")]) == 1
    assert "cannot be read" in capsys.readouterr().err and not list(tmp_path.iterdir())
