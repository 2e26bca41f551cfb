r"""Writes the table by which the library chooses between its kernels and XLA, from results of other benchmarks.

    python3 -m benchmarks all_gather_lhs_matmul --suite sweep --dtype bf16 --methods fused,xla --rounds 3 \
        --out benchmarks/results
    python3 -m benchmarks.crossover benchmarks/model/h100/[fjks]*.csv.xz benchmarks/model/h200/fitted*.csv.xz \
        benchmarks/model/h200/{few_tiles,judged,judged_more,named,known_long,short}.csv.xz \
        benchmarks/results/{[am],backward}*-one_process.csv --out overlap/choice/crossover.csv

(Add `--budget-s 120` to the first command for a quick run.) If several files have a problem, the times
of the last file count. XLA is compared with the method `fused`, for which the library has chosen the configuration. The
files to which the model is fitted (`benchmarks.configurations`) have the times of many configurations. From these files
the command takes the time of the configuration that the model chooses. From `benchmarks.backward` it takes sums of
products, each as one product of the same k in total.
"""

from __future__ import annotations

import csv
import pathlib
import sys
from collections.abc import Iterable, Sequence
from typing import Any, cast

from benchmarks import command, fit_model
from benchmarks.model_tasks import TARGETS
from benchmarks.problems import TableProblem
from overlap.choice import tables
from overlap.choice.problem import Layout
from overlap.cli import ending
from overlap.cli.arguments import WrongArguments

FOLDER = pathlib.Path(__file__).resolve().parent
_SIZES = ("op", "devices", "m", "n", "k", "dtype", "out_dtype", "layout")
_KEY = ("gpu", *_SIZES)
# The methods of `benchmarks.backward` that stand for the kernel and for XLA; of several, the fastest counts.
_OF_SUMS = {"lists": "fused", "xla hiding": "xla", "fused": ""}
# `result`: the file from which a row comes, relative to benchmarks/ and without suffixes. That file names the commit,
# the date and the command.
FIELDS = (*_KEY, "fused_us", "xla_us", "result")


def rows_of(path: pathlib.Path) -> list[dict[str, Any]]:
    """Reads one result file. Returns a row for each problem that has the times of both `fused` and `xla`.

    Raises:
      ValueError: the file is not the result of a benchmark.
    """
    times: dict[tuple[Any, ...], dict[str, float]] = {}
    if path.resolve().parent.parent == fit_model.FOLDER:
        return _rows_of_configurations(path)
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            try:
                m, n, k = map(int, row["shape"].split("x"))
                layout = cast(Layout, row.get("layout") or "nn")
                op, devices, method = row["op"], int(row["devices"]), row["method"]
                if op == "backward":
                    if "dx of" not in layout:
                        continue
                    op, layout, k, method = "matmul_reduce_scatter", "nt", k // devices, _OF_SUMS.get(method, method)
                problem = TableProblem(op, devices, m, n, k, row["dtype"], layout).library
                key = (_gpu(path), *(getattr(problem, name) for name in _SIZES))
                if method in ("fused", "xla") and row["status"] == "ok":
                    of_problem, us = times.setdefault(key, {}), float(row["loop_us"])
                    of_problem[method] = min(us, of_problem.get(method, us))
            except (KeyError, ValueError) as error:
                raise ValueError(f"{path} is no result of a benchmark: {type(error).__name__}: {error}") from error
    pairs = {key: time for key, time in times.items() if len(time) == 2}
    name = _name(path)
    return [dict(zip(FIELDS, (*key, time["fused"], time["xla"], name), strict=True)) for key, time in pairs.items()]


def _rows_of_configurations(path: pathlib.Path) -> list[dict[str, Any]]:
    gpu, rows = path.resolve().parent.name, []
    measured = fit_model.load(path, gpu)
    for problem, (_, chosen) in fit_model.losses(measured).items():
        times = measured[problem]
        if None in times:
            key = (getattr(problem, name) for name in _SIZES)
            rows.append(dict(zip(FIELDS, (gpu, *key, times[chosen], times[None], _name(path)), strict=True)))
    return rows


def _gpu(path: pathlib.Path) -> str:
    """Returns the GPU that a result's file name names (`-h100_80gb_hbm3-`, `-h200-`); "h200" if it names none."""
    parts = path.name.split("-")
    return next((gpu for gpu in TARGETS if any(part.split("_")[0] == gpu for part in parts)), "h200")


def _name(path: pathlib.Path) -> str:
    """Returns the text by which the column `result` names a file."""
    path = path.resolve().with_name(path.name.split(".")[0])
    return path.relative_to(FOLDER).as_posix() if path.is_relative_to(FOLDER) else path.name


def merged(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Keeps the last row of each problem. Returns these rows, ordered by operation and size."""
    by_key = {tuple(row[name] for name in _KEY): row for row in rows}
    return [by_key[key] for key in sorted(by_key)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.tool_parser("crossover", __doc__)
    parser.add_argument("results", nargs="+", type=pathlib.Path, help="CSV files of benchmarks")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="the table to write")
    arguments = parser.parse_args(argv)
    try:
        rows = merged(row for path in arguments.results for row in rows_of(path))
    except ValueError as error:
        raise WrongArguments(f"crossover: {error}") from None
    if not rows:
        print("no problem has the times of both `fused` and `xla`: nothing is written", file=sys.stderr)
        return 1
    lines = [FIELDS, *([row[name] for name in FIELDS] for row in rows)]
    tables.replace(arguments.out, "\n".join(",".join(map(str, line)) for line in lines) + "\n")
    print(f"{len(rows)} problems in {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(ending.run(main))
