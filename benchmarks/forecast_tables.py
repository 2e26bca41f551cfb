"""Makes the tables of `benchmarks.forecast`: figures of the chips, two checks against H200s, forecasts for the B200."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import current, provenance
from benchmarks.forecast_chips import B200, H200, Chip
from benchmarks.forecast_fused import Fused, Operation, forecast_fused
from benchmarks.forecast_lessons import BLACKWELL, HOPPER, LADDER, Lesson
from benchmarks.forecast_model import best, forecast

RESULTS = provenance.REPOSITORY / "benchmarks" / "results"
LADDER_FILE = "ladder-h200-1-one_process"
MEASURED_FUSED: tuple[tuple[str, Operation, int], ...] = (
    ("all_gather_lhs_matmul-h200-2-one_process", "all_gather_lhs_matmul", 2),
    ("all_gather_lhs_matmul-h200-4-one_process", "all_gather_lhs_matmul", 4),
    ("matmul_reduce_scatter-h200-2-one_process", "matmul_reduce_scatter", 2),
)
# Products with fewer rows are not compared: they run other kernels (tiles cut along k, one shot).
LEAST_ROWS = 1024
# (m, n, k): for a gather, m is of one shard; for a scatter, m is of the whole result.
FORECAST_SHAPES: Mapping[Operation, Sequence[tuple[int, int, int]]] = {
    "all_gather_lhs_matmul": ((1024, 4096, 4096), (1024, 3584, 8192), (1024, 6144, 12288), (2048, 2048, 8192)),
    "matmul_reduce_scatter": ((8192, 4096, 4096), (8192, 8192, 3584), (8192, 12288, 6144)),
}
DEVICES = (2, 4, 8)
MAINLOOPS: Mapping[str, Sequence[Lesson]] = {"H200": (HOPPER[-2],), "B200": BLACKWELL[-1]}
FIELDS = (
    "table",
    "chip",
    "subject",
    "value",
    "devices",
    "shape",
    "config",
    "clock_mhz",
    "bound",
    "hbm_mb",
    "forecast_us",
    "measured_us",
    "roof_us",
    "nvlink_us",
    "forecast_percent",
    "reference_percent",
    "difference",
    "origin",
)
_NOT_MEASURED = "forecast, not measured"


@dataclasses.dataclass(frozen=True)
class Section:
    """One table: the rows to print, and the same numbers as records with the keys `FIELDS`."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    records: Sequence[Mapping[str, Any]]
    remarks: Sequence[str] = ()


def _percent(fraction: float) -> float:
    return 100 * fraction


def _spread(errors: Sequence[float], unit: str) -> str:
    sizes = [abs(error) for error in errors]
    mean, signed, worst = statistics.mean(sizes), statistics.mean(errors), max(sizes)
    return f"mean error {mean:.1f}{unit} ({signed:+.1f} with its sign), worst {worst:.1f}{unit}"


# --- The tables -------------------------------------------------------------------------------------------------------


def figures() -> Section:
    """Makes the table of the chips' figures, with the origin of each figure."""
    rows, records = [], []
    for field in dataclasses.fields(Chip):
        if field.name in ("name", "origins"):
            continue
        cells = [field.name]
        for chip in (H200, B200):
            value, (origin, where) = getattr(chip, field.name), chip.origins[field.name]
            cells += [
                "–" if math.isinf(value) else f"{value:.4g}" if value < 1e4 else f"{value:.3g}",
                f"{origin}: {where}",
            ]
            records.append(
                {
                    "table": "figures",
                    "chip": chip.name,
                    "subject": field.name,
                    "value": value,
                    "origin": f"{origin}: {where}",
                }
            )
        rows.append(cells)
    return Section("Figures (rates per cycle are of one SM)", ("figure", "H200", "from", "B200", "from"), rows, records)


def measured_ladder() -> dict[str, float]:
    """Reads the time of each Hopper rung on an H200 from the current results, in microseconds, by name."""
    return {row["method"]: float(row["loop_us"]) for row in current.read(RESULTS / f"{LADDER_FILE}.csv")}


def hopper_ladder() -> Section:
    """Makes the table that compares forecast and measurement of the Hopper ladder on an H200."""
    measured, rows, records, errors = measured_ladder(), [], [], []
    for lesson in HOPPER:
        result, us = forecast(H200, lesson), measured[lesson.name]
        errors.append(_percent(result.us / us - 1))
        config = f"{lesson.tile_m} × {lesson.tile_n}, {lesson.stages}"
        rows.append(
            (
                lesson.name,
                config,
                f"{result.us:.0f}",
                f"{us:.0f}",
                f"{errors[-1]:+.1f}%",
                f"{result.mhz:.0f}",
                result.bound,
            )
        )
        records.append(
            {
                "table": "hopper_ladder",
                "chip": "H200",
                "subject": lesson.name,
                "devices": 1,
                "shape": f"{LADDER.m}x{LADDER.n}x{LADDER.k}",
                "config": config,
                "clock_mhz": result.mhz,
                "bound": result.bound,
                "hbm_mb": result.hbm_bytes / 1e6,
                "forecast_us": result.us,
                "measured_us": us,
                "difference": errors[-1],
            }
        )
    fitted = [name for name, (origin, _) in H200.origins.items() if origin == "fitted"]
    remarks = (
        f"{_spread(errors, '%')}; the measurements themselves spread by ±3%.",
        f"Fitted to this ladder: {' and '.join(fitted)}. So this checks the form of the model, not a forecast.",
    )
    headings = ("Hopper lesson", "tile, stages", "forecast, µs", "measured, µs", "error", "clock, MHz", "bound by")
    return Section("Check 1: the Hopper ladder on an H200, 4096 × 8192 × 4096 f16", headings, rows, records, remarks)


def fused_on_hopper() -> Section:
    """Makes the table that compares forecast and measurement of fused operations on H200s.

    Nothing is fitted to these measurements.
    """
    rows, records, errors = [], [], []
    for name, operation, devices in MEASURED_FUSED:
        for row in current.read(RESULTS / f"{name}.csv"):
            m, n, k = map(int, row["shape"].split("x"))
            ours = row["method"] == "fused" and row["status"] == "ok" and bool(row["roof_over_this"])
            if not ours or row["dtype"].startswith("f8") or (row.get("layout") or "nn") != "nn" or m < LEAST_ROWS:
                continue
            result = forecast_fused(H200, Fused(operation, devices, m, n, k), MAINLOOPS["H200"])
            measured = float(row["roof_over_this"])
            errors.append(_percent(result.roof_fraction - measured))
            rows.append(
                (
                    operation,
                    str(devices),
                    f"{m}, {n}, {k} {row['dtype']}",
                    f"{result.us:.0f}",
                    f"{float(row['loop_us']):.0f}",
                    f"{result.roof_fraction:.2f}",
                    f"{measured:.2f}",
                    f"{errors[-1]:+.0f}",
                )
            )
            records.append(
                {
                    "table": "fused_h200",
                    "chip": "H200",
                    "subject": operation,
                    "devices": devices,
                    "shape": f"{row['shape']} {row['dtype']}",
                    "forecast_us": result.us,
                    "measured_us": float(row["loop_us"]),
                    "roof_us": result.roof_us,
                    "nvlink_us": result.nvlink_us,
                    "forecast_percent": _percent(result.roof_fraction),
                    "reference_percent": _percent(measured),
                    "difference": errors[-1],
                }
            )
    headings = ("operation", "GPUs", "m, n, k", "forecast, µs", "measured, µs", "of the roof", "measured", "points")
    remark = f"Fraction of the roof: {_spread(errors, ' points')}. Nothing is fitted to these."
    return Section("Check 2: fused operations on H200s", headings, rows, records, (remark,))


def blackwell_ladder(chip: Chip = B200) -> Section:
    """Makes the table with the forecast of the Blackwell ladder, beside the figures of JAX's guide to it."""
    rows, records, differences = [], [], []
    for lessons in BLACKWELL:
        result = best(chip, lessons)
        lesson, published = result.lesson, lessons[0].published or math.nan
        utilization = _percent(result.utilization)
        differences.append(utilization - published)
        config = f"{lesson.tile_m} × {lesson.tile_n}, {lesson.stages}"
        rows.append(
            (
                lesson.name,
                config,
                f"{result.us:.0f}",
                f"{result.mhz:.0f}",
                result.bound,
                f"{utilization:.1f}",
                f"{published:.2f}",
                f"{differences[-1]:+.1f}",
            )
        )
        records.append(
            {
                "table": "blackwell_ladder",
                "chip": chip.name,
                "subject": lesson.name,
                "devices": 1,
                "shape": f"{LADDER.m}x{LADDER.n}x{LADDER.k}",
                "config": config,
                "clock_mhz": result.mhz,
                "bound": result.bound,
                "hbm_mb": result.hbm_bytes / 1e6,
                "forecast_us": result.us,
                "forecast_percent": utilization,
                "reference_percent": published,
                "difference": differences[-1],
            }
        )
    headings = (
        "Blackwell lesson",
        "tile of a CTA, stages",
        "µs",
        "clock, MHz",
        "bound by",
        "% of peak",
        "guide, %",
        "points",
    )
    remarks = (
        f"Points of utilization: {_spread(differences, ' points')}.",
        "Peak: 2250 TFLOP/s, as in the guide, whose figures are those of its own kernels. Ours have not run on a B200.",
    )
    title = f"The Blackwell ladder on a {chip.name}, 4096 × 8192 × 4096 f16: {_NOT_MEASURED}"
    return Section(title, headings, rows, records, remarks)


def variations() -> dict[str, Chip]:
    """Returns variants of the B200's figures that each change one assumption, by the name of the change."""
    return {
        "as assumed": B200,
        "one clock for all lessons": dataclasses.replace(B200, clock_exponent=0.0),
        "never held back by power": dataclasses.replace(B200, load_mhz=B200.peak_mhz),
        "L2: 64 bytes per cycle": dataclasses.replace(B200, l2_bytes_per_cycle=64.0),
        "L2: twice the bytes per cycle": dataclasses.replace(B200, l2_bytes_per_cycle=2 * B200.l2_bytes_per_cycle),
        "a quarter of the tensor memory's bytes": dataclasses.replace(B200, tmem_bytes_per_cycle=128.0),
        "half the latency of a copy": dataclasses.replace(B200, copy_latency_cycles=B200.copy_latency_cycles / 2),
        "twice the start of a CTA": dataclasses.replace(B200, cta_start_cycles=2 * B200.cta_start_cycles),
    }


def sensitivity() -> Section:
    """Makes the table with the forecast of the Blackwell ladder under each of the `variations`."""
    rows, records = [], []
    for name, chip in variations().items():
        results = [best(chip, lessons) for lessons in BLACKWELL]
        rows.append((name, *(f"{_percent(result.utilization):.1f}" for result in results)))
        records += [
            {
                "table": "sensitivity",
                "chip": "B200",
                "subject": result.lesson.name,
                "config": name,
                "forecast_us": result.us,
                "forecast_percent": _percent(result.utilization),
                "reference_percent": result.lesson.published,
            }
            for result in results
        ]
    rows.append(("the guide", *(f"{lessons[0].published:.1f}" for lessons in BLACKWELL)))
    headings = ("B200, utilization in %", *(f"lesson {lessons[0].name[0]}" for lessons in BLACKWELL))
    return Section(f"What the forecast hangs on: {_NOT_MEASURED}", headings, rows, records)


def fused_on_blackwell() -> Section:
    """Makes the table with the forecasts of fused operations on 2, 4 and 8 B200s."""
    rows, records = [], []
    for operation, shapes in FORECAST_SHAPES.items():
        for m, n, k in shapes:
            for devices in DEVICES:
                result = forecast_fused(B200, Fused(operation, devices, m, n, k), MAINLOOPS["B200"])
                rows.append(
                    (
                        operation,
                        f"{m}, {n}, {k}",
                        str(devices),
                        f"{result.roof_us:.0f}",
                        f"{result.nvlink_us:.0f}",
                        f"{result.us:.0f}",
                        f"{result.roof_fraction:.2f}",
                    )
                )
                records.append(
                    {
                        "table": "fused_b200",
                        "chip": "B200",
                        "subject": operation,
                        "devices": devices,
                        "shape": f"{m}x{n}x{k}",
                        "forecast_us": result.us,
                        "roof_us": result.roof_us,
                        "nvlink_us": result.nvlink_us,
                        "forecast_percent": _percent(result.roof_fraction),
                    }
                )
    headings = ("operation", "m, n, k", "GPUs", "roof, µs", "NVLink, µs", "fused, µs", "of the roof")
    remarks = (
        "m, n, k: of one shard where rows are gathered; where the result is scattered, m is that of the whole result.",
        "Roof: the product alone by the forecast of lesson 6. The fused kernels have not run on a B200.",
        "The same formulas are too high for H200s, by the points of check 2; nothing was checked on 8 GPUs.",
    )
    return Section(f"Fused operations on B200s, 16-bit: {_NOT_MEASURED}", headings, rows, records, remarks)


def sections() -> list[Section]:
    """Makes all tables, in the order to print them."""
    return [figures(), hopper_ladder(), fused_on_hopper(), blackwell_ladder(), sensitivity(), fused_on_blackwell()]


def csv_text(shown: Sequence[Section]) -> str:
    """Writes the records of all tables as CSV text."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(FIELDS)
    for section in shown:
        for record in section.records:
            writer.writerow(
                [
                    f"{value:.6g}" if isinstance(value, float) else value
                    for value in (record.get(name, "") for name in FIELDS)
                ]
            )
    return text.getvalue()
