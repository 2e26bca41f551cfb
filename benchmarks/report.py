"""Writes results as tables, CSV files and markdown.

A ratio "A/this" is the time of method A / the time of the row's method in the same round: the median over the
rounds.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import os
import pathlib
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks import current, summary
from benchmarks.harness import NOT_SERVED, Result
from benchmarks.problems import TableProblem

ROUND_COLUMNS = ("op", "devices", "shape", "dtype", "layout", "round", "method", "loop_us", "wall_us")
_IN_EVERY_ROW = ("date", "commit", "command")
SUMMARY_COLUMNS = (
    "op", "devices", "shape", "dtype", "layout", "method", "status",
    "loop_us", "loop_us_p10", "loop_us_p90", "wall_us", "wall_us_p10", "wall_us_p90", "kernel_us",
    "tflops_per_device", "percent_of_peak", "received_gb_per_s_per_device",
    "xla_over_this", "roof_over_this", "bf16_over_this", "xla_over_this_wall", "roof_over_this_wall",
    "error", "error_bound", "rounds", "loop_overhead_us", "loop_copies", "first_call_s", "compile_s", "kernel_names",
    "note", "clocks",
)  # fmt: skip


@dataclasses.dataclass
class Table:
    """The results of one problem.

    Attributes:
      problem: the problem.
      results: the result of each method.
      loop_overhead_us: microseconds of an iteration of the loop without a product.
      clocks: clock, power and temperature of the GPUs after the last round.
      xla, roof, bf16: the names of the methods whose times are the numerators of the ratios. On one GPU, XLA's product
        is the roof.
      peak_tflops: dense TFLOP/s of the data sheet, or None.
    """

    problem: TableProblem
    results: Sequence[Result]
    loop_overhead_us: float | None = None
    clocks: str = ""
    xla: str = "xla"
    roof: str = "roof"
    bf16: str = "fused_bf16"
    peak_tflops: float | None = None

    def rows(self) -> list[dict[str, Any]]:
        """Returns a row for each method, with the keys `SUMMARY_COLUMNS`. Values that were not measured are None."""
        by_name = {result.method: result for result in self.results}
        others = {name: by_name.get(getattr(self, name)) for name in ("xla", "roof", "bf16")}
        return [self._row(result, others) for result in self.results]

    def _row(self, result: Result, others: Mapping[str, Result | None]) -> dict[str, Any]:
        problem = self.problem
        row: dict[str, Any] = dict.fromkeys(SUMMARY_COLUMNS)
        row |= {"op": problem.op, "devices": problem.devices, "shape": problem.shape, "dtype": problem.dtype}
        row |= {"layout": problem.layout, "first_call_s": result.first_call_s, "kernel_names": result.kernel_names}
        row |= {"method": result.method, "status": result.status, "note": result.note, "clocks": self.clocks}
        row |= {"error": result.error, "error_bound": result.error_bound, "compile_s": result.compile_s}
        if not result.ok:
            # A wrong result gets no times.
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
        for name, other in others.items():
            if other is not None and other.ok:
                row[f"{name}_over_this"] = ratio(other.loop_us, result.loop_us)
                if f"{name}_over_this_wall" in row:
                    row[f"{name}_over_this_wall"] = ratio(other.wall_us, result.wall_us)
        return row


def ratio(numerator: Sequence[float], denominator: Sequence[float]) -> float | None:
    """Returns the median over the rounds of `numerator / denominator`; None if there are no rounds."""
    pairs = list(zip(numerator, denominator, strict=False))
    return float(np.median([above / below for above, below in pairs])) if pairs else None


# --- Files ------------------------------------------------------------------------------------------------------------


_SUFFIXES = ("rounds.csv", "csv", "summary.csv", "md")


class Writer:
    """Writes the files of a run.

    The files are written while the benchmark runs, as `NAME.partial`, so that a run that is killed loses little.
    `finish` gives the files their final names or, with `into_table`, adds their rows to the current table. A run that
    ends early calls `keep`, which does the same with what is complete and removes the rest. So partial files are left
    behind only if the process is ended without `keep`: by SIGKILL, or by the last timer of `benchmarks.watch`.

    The files are STEM.rounds.csv (every time, appended after each round), STEM.csv (a row for each method and problem,
    rewritten after each problem), STEM.md (the same as a table, with the environment) and STEM.summary.csv (see
    `benchmarks.summary`; only for several problems).

    Args:
      folder: where to write; None: nothing is written.
      stem: the stem of the files' names.
      environment: the facts about the run.
      into_table: whether `stem` names a current result (see `benchmarks.current`). Then the run replaces the rows of
        its problems there, and all other rows stay. There is no summary, since the rows may come from several runs.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None,
        stem: str,
        environment: Mapping[str, str],
        *,
        into_table: bool = False,
    ) -> None:
        self._into_table = into_table
        self._environment = environment
        # These facts are in each row, so that a row that is copied elsewhere still names its run.
        self._named = {f"env_{name}": environment[name] for name in _IN_EVERY_ROW if name in environment}
        self._tables: list[Table] = []
        self._left_out: list[str] = []
        self._measured_any = False
        # Needed because another thread may end the run: see `benchmarks.watch`.
        self._lock = threading.RLock()
        self._stem = None if folder is None else pathlib.Path(folder) / stem
        if self._stem is not None:
            self._stem.parent.mkdir(parents=True, exist_ok=True)
            self._discard()  # Partial files of a run that was killed.
            self._write("rounds.csv", _csv((*ROUND_COLUMNS, *self._named), []))

    def _partial(self, suffix: str) -> pathlib.Path:
        assert self._stem is not None
        return self._stem.with_name(f"{self._stem.name}.{suffix}.partial")

    def _write(self, suffix: str, text: str, mode: str = "w") -> None:
        with self._partial(suffix).open(mode) as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())

    def add_round(self, problem: TableProblem, number: int, results: Sequence[Result]) -> None:
        """Appends the times of one round."""
        if self._stem is None:
            return
        common = (problem.op, problem.devices, problem.shape, problem.dtype, problem.layout, number)
        rows = [
            (*common, result.method, f"{result.loop_us[-1]:.3f}", f"{result.wall_us[-1]:.3f}", *self._named.values())
            for result in results
            if result.ok and result.loop_us and result.wall_us
        ]
        with self._lock:
            self._write("rounds.csv", _csv(None, rows), "a")
            self._measured_any |= bool(rows)

    def add_table(self, table: Table) -> None:
        """Adds a finished problem."""
        with self._lock:
            self._tables.append(table)
            self._write_tables()

    @property
    def measured(self) -> int:
        """The number of finished problems."""
        return len(self._tables)

    def leave_out(self, problems: Sequence[TableProblem]) -> None:
        """Records `problems` as not measured."""
        with self._lock:
            self._left_out = [str(problem) for problem in problems]
            self._write_tables()

    def _write_tables(self) -> None:
        if self._stem is None:
            return
        facts = {f"env_{name}": value for name, value in self._environment.items()}
        self._write("csv", _csv((*SUMMARY_COLUMNS, *facts), _cells(row | facts for row in _rows(self._tables))))
        self._write("md", markdown(self._tables, self._environment, self._left_out))
        if rows := _summary(self._tables):
            named = (row | self._named for row in rows)
            self._write("summary.csv", _csv((*summary.COLUMNS, *self._named), _cells(named)))

    def show_summary(self) -> None:
        """Prints the summary of all problems."""
        if rows := _summary(self._tables):
            _print("all problems", summary.HEADINGS, [summary.texts(row) for row in rows])
        print(*(f"  {line}" for line in summary.remarks(_rows(self._tables), self._left_out)), sep="\n", flush=True)

    def keep(self, left_out: Sequence[TableProblem]) -> list[pathlib.Path]:
        """Finishes a run that ends early: keeps the measurements, and removes half-written files."""
        with self._lock:
            try:
                if self._tables:
                    self.leave_out(left_out)
                return self.finish() if self._measured_any or self._tables else []
            finally:
                self._discard()

    def _discard(self) -> None:
        if self._stem is not None:
            for suffix in _SUFFIXES:
                self._partial(suffix).unlink(missing_ok=True)

    def finish(self) -> list[pathlib.Path]:
        """Gives the temporary files their final names or, with `into_table`, adds their rows to the current table.

        Returns the paths of the written files.
        """
        if self._stem is None:
            return []
        if self._into_table:
            run, rounds = self._partial("csv"), self._partial("rounds.csv")
            done = current.add(self._stem.parent, self._stem.name, run, rounds) if run.exists() else []
            self._discard()
            return done
        done = []
        for suffix in _SUFFIXES:
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


def _cells(rows: Iterable[Mapping[str, Any]]) -> list[list[Any]]:
    def cell(value: Any) -> Any:
        return "" if value is None else f"{value:.6g}" if isinstance(value, float) else value

    return [[cell(value) for value in row.values()] for row in rows]


# --- For people -------------------------------------------------------------------------------------------------------

_HEADINGS = (
    "method",
    "loop µs",
    "p10–p90",
    "wall µs",
    "TFLOP/s",
    "% peak",
    "NVLink GB/s",
    "xla/this",
    "roof/this",
    "wall xla/this",
    "error",
    "first call s",
)


def _texts(row: Mapping[str, Any]) -> list[str]:
    if row["status"] != "ok":
        verdict = "not served" if row["status"].startswith(NOT_SERVED) else row["status"].split()[0].rstrip(":")
        return [row["method"], verdict, *[""] * (len(_HEADINGS) - 2)]

    def number(name: str, digits: int) -> str:
        return "–" if row[name] is None else f"{row[name]:.{digits}f}"

    kernel = "" if row["kernel_us"] is None else f" (kernel {row['kernel_us']:.1f})"
    return [
        f"{row['method']}{kernel}{' COPIES IN LOOP' if row['loop_copies'] else ''}",
        number("loop_us", 1),
        f"{number('loop_us_p10', 1)}–{number('loop_us_p90', 1)}",
        number("wall_us", 1),
        number("tflops_per_device", 0),
        number("percent_of_peak", 1),
        number("received_gb_per_s_per_device", 0),
        number("xla_over_this", 3),
        number("roof_over_this", 3),
        number("xla_over_this_wall", 3),
        "–" if row["error"] is None else f"{row['error']:.2e}",
        number("first_call_s", 2),
    ]


def _remarks(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Writes the lines below a table: why a method has no times, which config was chosen, which copies a loop makes."""
    remarks = []
    for row in rows:
        if row["status"] != "ok":
            remarks.append(f"{row['method']}: {row['status']}")
        if row["note"]:
            remarks.append(f"{row['method']}: {row['note']}")
        if row["bf16_over_this"] not in (None, 1.0):
            remarks.append(f"{row['method']}: {row['bf16_over_this']:.3f} x as fast as our kernel in bf16")
        if row["kernel_names"]:
            remarks.append(f"{row['method']}: kernels {row['kernel_names']}")
        if row["loop_copies"]:
            remarks.append(f"{row['method']}: its loop copies {row['loop_copies']}")
    return remarks


def _title(table: Table) -> str:
    problem = table.problem
    overhead = table.loop_overhead_us
    loop = "" if overhead is None else f", loop overhead {overhead:.1f} µs"
    return f"{problem.op}, {problem.devices} devices, (m, n, k) per shard {problem}{loop}"


def show(table: Table) -> None:
    """Prints one problem's table."""
    rows = table.rows()
    _print(_title(table), _HEADINGS, [_texts(row) for row in rows], [row["status"] for row in rows])
    print(*(f"  {line}" for line in _remarks(rows)), sep="\n", flush=True)


def _print(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], statuses: Sequence[str] = ()) -> None:
    """Prints a table: with rich if it is installed, else as plain text."""
    try:
        from rich.console import Console
        from rich.table import Table as RichTable
    except ImportError:
        print(title, " | ".join(headings), *(" | ".join(row) for row in rows), sep="\n")
        return
    shown = RichTable(title=title, title_justify="left")
    for heading in headings:
        shown.add_column(heading, justify="left" if heading == "method" else "right", overflow="fold")
    for row, status in itertools.zip_longest(rows, statuses, fillvalue="ok"):
        shown.add_row(*row, style=None if status == "ok" else "red")
    # Wide enough for every column, also if the output is a file or a narrow terminal.
    Console(width=max(Console().width, 160)).print(shown)


def _rows(tables: Sequence[Table]) -> list[dict[str, Any]]:
    return [row for table in tables for row in table.rows()]


def _summary(tables: Sequence[Table]) -> list[dict[str, Any]]:
    """Returns the rows of the summary; none for a single problem."""
    return summary.summarize(_rows(tables), tables[0].roof) if len(tables) > 1 else []


def markdown(tables: Sequence[Table], environment: Mapping[str, str], left_out: Sequence[str] = ()) -> str:
    """Writes the environment, the summary and all tables as one markdown document."""
    lines = [f"- {name}: {value}" for name, value in environment.items()]
    if rows := _summary(tables):
        lines += ["", "## All problems", "", *_md_table(summary.HEADINGS, [summary.texts(row) for row in rows])]
    if remarks := summary.remarks(_rows(tables), left_out):
        lines += ["", *(f"{line}  " for line in remarks)]
    for table in tables:
        rows = table.rows()
        lines += ["", f"## {_title(table)}", "", *_md_table(_HEADINGS, [_texts(row) for row in rows])]
        lines += ["", *(f"{line}  " for line in _remarks(rows))]
        if table.clocks:
            lines += ["", f"Clocks right after the last round: {table.clocks}"]
    return "\n".join(lines) + "\n"


def _md_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [_md_line(headings), _md_line(["---"] * len(headings)), *map(_md_line, rows)]


def _md_line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
