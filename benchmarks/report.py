"""Turns results into a table, CSV files and markdown. Ratios are formed per round, and their median is reported."""

from __future__ import annotations

import csv
import dataclasses
import io
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.harness import Result
from benchmarks.programs import Problem

ROUND_COLUMNS = ("op", "devices", "shape", "dtype", "round", "method", "loop_us", "wall_us")
SUMMARY_COLUMNS = (
    "op", "devices", "shape", "dtype", "method", "status",
    "loop_us", "loop_us_p10", "loop_us_p90", "wall_us", "wall_us_p10", "wall_us_p90", "kernel_us",
    "tflops_per_device", "percent_of_peak", "received_gb_per_s_per_device",
    "xla_over_this", "roof_over_this", "xla_over_this_wall", "roof_over_this_wall",
    "error", "error_bound", "rounds", "loop_overhead_us", "loop_copies", "compile_s", "note", "clocks",
)  # fmt: skip


@dataclasses.dataclass
class Table:
    """The results of one problem, with what is common to all its methods."""

    problem: Problem
    results: Sequence[Result]
    loop_overhead_us: float | None = None
    clocks: str = ""
    # The methods that ratios are formed with. On one GPU XLA's dot is the roof.
    xla: str = "xla"
    roof: str = "roof"
    # Dense TFLOP/s of the data sheet, where it is known.
    peak_tflops: float | None = None

    def rows(self) -> list[dict[str, Any]]:
        """One row per method, `SUMMARY_COLUMNS` as keys; what was not measured is None."""
        by_name = {result.method: result for result in self.results}
        return [self._row(result, by_name.get(self.xla), by_name.get(self.roof)) for result in self.results]

    def _row(self, result: Result, xla: Result | None, roof: Result | None) -> dict[str, Any]:
        problem = self.problem
        row: dict[str, Any] = dict.fromkeys(SUMMARY_COLUMNS)
        row |= {"op": problem.op, "devices": problem.devices, "shape": problem.shape, "dtype": problem.dtype}
        row |= {"method": result.method, "status": result.status, "note": result.note, "clocks": self.clocks}
        row |= {"error": result.error, "error_bound": result.error_bound, "compile_s": result.compile_s}
        if not result.ok:
            # A wrong result has no time.
            return row
        row |= {"rounds": len(result.loop_us), "kernel_us": result.kernel_us, "loop_overhead_us": self.loop_overhead_us}
        row["loop_copies"] = "; ".join(result.loop_copies)
        for name, times in (("loop_us", result.loop_us), ("wall_us", result.wall_us)):
            if times:
                row[name], row[f"{name}_p10"], row[f"{name}_p90"] = np.percentile(times, [50, 10, 90]).tolist()
        if result.loop_us:
            row["tflops_per_device"] = problem.flops_per_device / row["loop_us"] / 1e6
            if self.peak_tflops:
                row["percent_of_peak"] = 100 * row["tflops_per_device"] / self.peak_tflops
            row["received_gb_per_s_per_device"] = problem.received_bytes_per_device / row["loop_us"] / 1e3
        for name, other in (("xla", xla), ("roof", roof)):
            if other is not None and other.ok:
                row[f"{name}_over_this"] = ratio(other.loop_us, result.loop_us)
                row[f"{name}_over_this_wall"] = ratio(other.wall_us, result.wall_us)
        return row


def ratio(numerator: Sequence[float], denominator: Sequence[float]) -> float | None:
    """The median over rounds of `numerator / denominator`, each round's times with each other."""
    pairs = list(zip(numerator, denominator, strict=False))
    return float(np.median([above / below for above, below in pairs])) if pairs else None


# --- Files ------------------------------------------------------------------------------------------------------------


class Writer:
    """Writes while the benchmark runs, so that a kill loses little: `NAME.partial` until `finish` renames all.

    Files: STEM.rounds.csv (every time measured, appended after each round), STEM.csv (one row per method and problem,
    rewritten after each problem) and STEM.md (the same as a table, with the environment).
    """

    def __init__(self, folder: str | os.PathLike[str] | None, stem: str, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._tables: list[Table] = []
        self._stem = None if folder is None else pathlib.Path(folder) / stem
        if self._stem is not None:
            self._stem.parent.mkdir(parents=True, exist_ok=True)
            self._write("rounds.csv", _csv(ROUND_COLUMNS, []))

    def _partial(self, suffix: str) -> pathlib.Path:
        assert self._stem is not None
        return self._stem.with_name(f"{self._stem.name}.{suffix}.partial")

    def _write(self, suffix: str, text: str, mode: str = "w") -> None:
        with self._partial(suffix).open(mode) as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())

    def add_round(self, problem: Problem, number: int, results: Sequence[Result]) -> None:
        """Appends the times of one round."""
        if self._stem is None:
            return
        common = (problem.op, problem.devices, problem.shape, problem.dtype, number)
        rows = [
            (*common, result.method, f"{result.loop_us[-1]:.3f}", f"{result.wall_us[-1]:.3f}")
            for result in results
            if result.ok and result.loop_us and result.wall_us
        ]
        self._write("rounds.csv", _csv(None, rows), "a")

    def add_table(self, table: Table) -> None:
        """Adds a finished problem."""
        self._tables.append(table)
        if self._stem is None:
            return
        rows = [[_cell(value) for value in row.values()] for each in self._tables for row in each.rows()]
        header = (*SUMMARY_COLUMNS, *(f"env_{name}" for name in self._environment))
        self._write("csv", _csv(header, [[*row, *self._environment.values()] for row in rows]))
        self._write("md", markdown(self._tables, self._environment))

    def finish(self) -> list[pathlib.Path]:
        """Renames the complete files into place and returns their paths."""
        if self._stem is None:
            return []
        done = []
        for suffix in ("rounds.csv", "csv", "md"):
            if (partial := self._partial(suffix)).exists():
                done.append(partial.replace(partial.with_suffix("")))
        return done


def _csv(header: Sequence[str] | None, rows: Sequence[Sequence[Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    if header is not None:
        writer.writerow(header)
    writer.writerows(rows)
    return text.getvalue()


def _cell(value: Any) -> Any:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else value


# --- For people -------------------------------------------------------------------------------------------------------

_HEADINGS = (
    "method", "loop µs", "p10–p90", "wall µs", "TFLOP/s", "% peak", "NVLink GB/s",
    "xla/this", "roof/this", "wall xla/this", "error",
)  # fmt: skip


def _texts(row: Mapping[str, Any]) -> list[str]:
    if row["status"] != "ok":
        return [row["method"], row["status"].split()[0].rstrip(":"), *[""] * (len(_HEADINGS) - 2)]

    def number(name: str, digits: int) -> str:
        return "–" if row[name] is None else f"{row[name]:.{digits}f}"

    kernel = "" if row["kernel_us"] is None else f" (kernel {row['kernel_us']:.1f})"
    return [
        f"{row['method']}{kernel}{' COPIES IN LOOP' if row['loop_copies'] else ''}",
        number("loop_us", 1), f"{number('loop_us_p10', 1)}–{number('loop_us_p90', 1)}", number("wall_us", 1),
        number("tflops_per_device", 0), number("percent_of_peak", 1), number("received_gb_per_s_per_device", 0),
        number("xla_over_this", 3), number("roof_over_this", 3), number("xla_over_this_wall", 3),
        "–" if row["error"] is None else f"{row['error']:.2e}",
    ]  # fmt: skip


def _remarks(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What has no place in a column: why a method has no times, which config was chosen, what spoils a loop."""
    remarks = []
    for row in rows:
        if row["status"] != "ok":
            remarks.append(f"{row['method']}: {row['status']}")
        if row["note"]:
            remarks.append(f"{row['method']}: {row['note']}")
        if row["loop_copies"]:
            remarks.append(f"{row['method']}: its loop copies {row['loop_copies']}")
    return remarks


def _title(table: Table) -> str:
    problem = table.problem
    overhead = table.loop_overhead_us
    loop = "" if overhead is None else f", loop overhead {overhead:.1f} µs"
    return f"{problem.op}, {problem.devices} devices, (m, n, k) per shard {problem.shape} {problem.dtype}{loop}"


def show(table: Table) -> None:
    """Prints one problem's table, with rich where it is installed."""
    rows = table.rows()
    try:
        from rich.console import Console
        from rich.table import Table as RichTable
    except ImportError:
        print(_title(table), " | ".join(_HEADINGS), *(" | ".join(_texts(row)) for row in rows), sep="\n")
        return
    shown = RichTable(title=_title(table), title_justify="left")
    for heading in _HEADINGS:
        shown.add_column(heading, justify="left" if heading == "method" else "right", overflow="fold")
    for row in rows:
        shown.add_row(*_texts(row), style=None if row["status"] == "ok" else "red")
    # Wide enough for every column also where the output is a file or a narrow terminal.
    Console(width=max(Console().width, 160)).print(shown)
    print(*(f"  {line}" for line in _remarks(rows)), sep="\n")


def markdown(tables: Sequence[Table], environment: Mapping[str, str]) -> str:
    """All tables and the environment as one markdown document."""
    lines = [f"- {name}: {value}" for name, value in environment.items()]
    for table in tables:
        lines += ["", f"## {_title(table)}", "", _md_line(_HEADINGS), _md_line(["---"] * len(_HEADINGS))]
        rows = table.rows()
        lines += [_md_line(_texts(row)) for row in rows]
        lines += ["", *(f"{line}  " for line in _remarks(rows))]
        if table.clocks:
            lines += ["", f"Clocks right after the last round: {table.clocks}"]
    return "\n".join(lines) + "\n"


def _md_line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
