"""Makes rows of the results of a problem, prints them, and adds them to the current results.

A ratio "A/this" is the time of method A / the time of the row's method in the same round: the median over the
rounds.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks import current
from benchmarks.harness import Result
from benchmarks.problems import TableProblem
from overlap.cli import console

COLUMNS = (
    "op", "devices", "shape", "dtype", "layout", "method", "status",
    "loop_us", "loop_us_p10", "loop_us_p90", "wall_us", "wall_us_p10", "wall_us_p90",
    "tflops_per_device", "percent_of_peak", "received_gb_per_s_per_device",
    "xla_over_this", "roof_over_this", "bf16_over_this", "xla_over_this_wall", "roof_over_this_wall",
    "error", "error_bound", "rounds", "loop_overhead_us", "loop_copies", "first_call_s", "compile_s",
    "clocks",
)  # fmt: skip


@dataclasses.dataclass
class Table:
    """The results of one problem.

    Attributes:
      problem: the problem.
      results: the result of each method.
      loop_overhead_us: microseconds of an iteration of the loop without a product.
      clocks: clock, power and temperature of the GPUs after the last round.
      roof: the method whose time is the numerator of "roof/this". On one GPU this is XLA's product.
      peak_tflops: dense TFLOP/s of the data sheet, or None.
    """

    problem: TableProblem
    results: Sequence[Result]
    loop_overhead_us: float | None = None
    clocks: str = ""
    roof: str = "roof"
    peak_tflops: float | None = None

    def rows(self) -> list[dict[str, Any]]:
        """Returns a row for each method, with the keys `COLUMNS`. Values that were not measured are None."""
        by_name = {result.method: result for result in self.results}
        others = {"xla": by_name.get("xla"), "roof": by_name.get(self.roof), "bf16": by_name.get("fused_bf16")}
        return [self._row(result, others) for result in self.results]

    def _row(self, result: Result, others: Mapping[str, Result | None]) -> dict[str, Any]:
        problem = self.problem
        row: dict[str, Any] = dict.fromkeys(COLUMNS)
        row |= {"op": problem.op, "devices": problem.devices, "shape": problem.shape, "dtype": problem.dtype}
        row |= {"layout": problem.layout, "first_call_s": result.first_call_s}
        row |= {"method": result.method, "status": result.status, "clocks": self.clocks}
        row |= {"error": result.error, "error_bound": result.error_bound, "compile_s": result.compile_s}
        if not result.ok:
            # A wrong result gets no times.
            return row
        row |= {"rounds": len(result.loop_us), "loop_overhead_us": self.loop_overhead_us}
        row["loop_copies"] = "; ".join(result.loop_copies)
        row |= spread("loop_us", result.loop_us) | spread("wall_us", result.wall_us)
        if result.loop_us:
            row["tflops_per_device"] = problem.flops_per_device / row["loop_us"] / 1e6
            if self.peak_tflops:
                row["percent_of_peak"] = 100 * row["tflops_per_device"] / self.peak_tflops
            row["received_gb_per_s_per_device"] = problem.received_bytes_per_device / row["loop_us"] / 1e3
        for name, other in others.items():
            if other is not None and other.ok:
                row[f"{name}_over_this"] = ratio(other.loop_us, result.loop_us)
                if f"{name}_over_this_wall" in row:
                    row[f"{name}_over_this_wall"] = ratio(other.wall_us, result.wall_us)
        return row


def spread(name: str, times: Sequence[float]) -> dict[str, float]:
    """Returns the median, the 10th and the 90th percentile of `times`, as columns `name`, `name_p10`, `name_p90`."""
    values = np.percentile(times, [50, 10, 90]).tolist() if times else ()
    return dict(zip((name, f"{name}_p10", f"{name}_p90"), values, strict=False))


def ratio(numerator: Sequence[float], denominator: Sequence[float]) -> float | None:
    """Returns the median over the rounds of `numerator / denominator`; None if there are no rounds."""
    pairs = list(zip(numerator, denominator, strict=False))
    return float(np.median([above / below for above, below in pairs])) if pairs else None


def add(folder: pathlib.Path, rows: Sequence[Mapping[str, Any]], facts: Mapping[str, str]) -> pathlib.Path:
    """Adds the rows of one problem, and the facts about the run as columns `env_NAME`, to a table. Returns its path."""

    def cell(value: Any) -> str:
        return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)

    of_run = {f"env_{name}": text for name, text in facts.items()}
    return current.add(folder, [{name: cell(value) for name, value in row.items()} | of_run for row in rows])


_SHOWN = (
    ("loop_us", "loop µs", ".1f"), ("loop_us_p10", "p10", ".1f"), ("loop_us_p90", "p90", ".1f"),
    ("wall_us", "wall µs", ".1f"), ("tflops_per_device", "TFLOP/s", ".0f"),
    ("percent_of_peak", "% peak", ".1f"), ("received_gb_per_s_per_device", "NVLink GB/s", ".0f"),
    ("xla_over_this", "xla/this", ".3f"), ("roof_over_this", "roof/this", ".3f"),
    ("xla_over_this_wall", "wall xla/this", ".3f"), ("error", "error", ".2e"), ("first_call_s", "first call s", ".2f"),
)  # fmt: skip


def show(table: Table) -> None:
    """Prints one problem's table; below it why a method has no times."""
    rows, columns = table.rows(), ["method", *(heading for _, heading, _ in _SHOWN)]
    loop = "" if table.loop_overhead_us is None else f", loop overhead {table.loop_overhead_us:.1f} µs"
    title = f"{table.problem.op}, {table.problem.devices} devices, (m, n, k) per shard {table.problem}{loop}"
    texts = [["–" if row[name] is None else f"{row[name]:{form}}" for name, _, form in _SHOWN] for row in rows]
    print_table(title, columns, [[row["method"], *text] for row, text in zip(rows, texts, strict=True)])
    for row in rows:
        for name in ("status", "loop_copies"):
            if row[name] not in (None, "", "ok"):
                print(f"  {row['method']}, {name}: {row[name]}", flush=True)


def print_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table, wide enough for every column, also in a file."""
    to = console.console()
    to.width = max(to.width, 180)
    console.show(to, title, headings, rows, texts=1)
