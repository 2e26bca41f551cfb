"""`python -m benchmarks.performance`: writes the tables of docs/performance.md and README.md, and docs/figures/.

A page marks a table by `<!-- results: NAME -->` and `<!-- end -->`. All numbers come from benchmarks/results/*.csv.
"""

from __future__ import annotations

import itertools
import math
import pathlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from benchmarks import command, figures
from benchmarks.current import Row, Table, method, problem_of, run_of, tables
from overlap.choice.tables import replace
from overlap.cli import ending

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = (ROOT / "docs" / "performance.md", ROOT / "README.md")
_MARKED = re.compile(r"(<!-- results: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
_COLUMNS = ("fused, µs", "XLA, µs", "XLA / fused", "cuBLAS on gathered data / fused")
# README's table: the file, the shape and the dtype of each row.
HEADLINE = (
    ("all_gather_lhs_matmul-h200-4-one_process", "1024x3584x8192", "bf16"),
    ("all_gather_lhs_matmul-h100_80gb_hbm3-2-one_process", "4096x2048x4096", "bf16"),
    ("all_gather_lhs_matmul-h100_80gb_hbm3-2-one_process", "8192x28672x8192", "bf16"),
    ("all_gather_rhs_matmul_n-h200-4-one_process", "8192x4096x4096", "bf16"),
    ("matmul_reduce_scatter-h200-2-process_each", "8192x8192x3584", "bf16"),
    ("matmul_all_reduce-h200-2-one_process", "256x8192x4096", "bf16"),
    ("matmul_all_reduce-h200-2-one_process", "8192x8192x14336", "bf16"),
    ("matmul-h200-1-one_process", "8192x8192x8192", "bf16"),
)


def lines(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a markdown table."""
    cells = [headings, ["---"] * len(headings), *rows]
    return "".join("| " + " | ".join(row) + " |\n" for row in cells)


def _gpus(table: Table) -> str:
    kind = table.device_kind.removeprefix("NVIDIA ").split()[0]
    return f"{table.devices} × {kind}" + (", a process each" if table.layout == "process_each" else "")


def _problem(row: Row) -> str:
    shape, dtype, layout = problem_of(row)
    return " ".join([shape.replace("x", "×"), dtype, *([] if layout == "nn" else [layout])])


def _number(row: Row | None, column: str, digits: int) -> str:
    return f"{float(row[column]):.{digits}f}" if row and row.get(column) else "–"


def _ratio(row: Row, column: str = "xla_over_this") -> str:
    """Returns a ratio of times, in bold if XLA is faster."""
    text = _number(row, column, 2)
    return f"**{text}**" if column == "xla_over_this" and float(row[column]) < 1 else text


def _measured(given: Sequence[Table], operation: str) -> Iterator[tuple[Table, Row, Row | None]]:
    """Yields each problem of an operation that fused and XLA were timed at: its table, the fused row, and XLA's row."""
    for table in sorted(given, key=lambda table: (table.devices, table.device_kind, table.layout)):
        for rows in table.problems() if table.operation == operation else ():
            if (fused := method(rows, "fused")) and fused["xla_over_this"]:
                yield table, fused, method(rows, "xla")


def _cells(table: Table, fused: Row, xla: Row | None) -> list[str]:
    times = [_number(row, "loop_us", 1) for row in (fused, xla)]
    return [_gpus(table), _problem(fused), *times, _ratio(fused), _ratio(fused, "roof_over_this")]


def operation_table(given: Sequence[Table], operation: str) -> str:
    """Returns the table of an operation, with a row for each problem."""
    rows = [[*_cells(*found), found[1]["env_date"][:10]] for found in _measured(given, operation)]
    return lines(("GPUs", "m×n×k of a device", *_COLUMNS, "measured"), rows) if rows else "Not measured.\n"


def methods_table(given: Sequence[Table], operation: str) -> str:
    """Returns a table with a row for each method of each problem."""
    rows = [
        [_gpus(table), _problem(row), row["method"].replace("_", " "), _number(row, "loop_us", 1), _ratio(row)]
        for table in given
        for row in table.rows
        if table.operation == operation and row["xla_over_this"]
    ]
    return lines(("GPUs", "problem", "method", "µs", "XLA / this"), rows) if rows else "Not measured.\n"


def _losses(given: Sequence[Table]) -> str:
    found = [(table, *rest) for table in given for _, *rest in _measured([table], table.operation)]
    lost = sorted((each for each in found if float(each[1]["xla_over_this"]) < 1),
                  key=lambda each: float(each[1]["xla_over_this"]))  # fmt: skip
    rows = [[each[0].operation, *_cells(*each)] for each in lost]
    return f"{len(lost)} of {len(found)}:\n\n" + lines(("operation", "GPUs", "m×n×k of a device", *_COLUMNS), rows)


def _means(given: Sequence[Table]) -> str:
    ratios = [(fused["dtype"], fused["layout"].upper(), float(fused["roof_over_this"]))
              for _, fused, _ in _measured(given, "matmul") if fused["roof_over_this"]]  # fmt: skip
    rows = []
    for (dtype, layout), group in itertools.groupby(sorted(ratios), key=lambda each: each[:2]):
        values = [value for *_, value in group]
        mean = math.exp(math.fsum(map(math.log, values)) / len(values))
        rows.append([dtype, layout, str(len(values)), f"{mean:.3f}", f"{min(values):.3f}"])
    return lines(("dtype", "layout", "products", "cuBLAS / fused, geometric mean", "least"), rows)


def _runs(given: Sequence[Table]) -> str:
    rows = set()
    for table, row in ((table, row) for table in given for row in table.rows):
        commit, _, remark = row["env_commit"].partition(" (")
        lost = remark.startswith(("not in this history", "with changes", "before it"))
        software = [row["env_jax"].split(",")[0].removeprefix("jax "), row.get("env_driver") or "–", row.get("env_nccl") or "–"]
        rows.add((row["env_date"][:16], commit + ("*" if lost else ""), table.operation, _gpus(table), *software))
    return lines(("measured (UTC)", "commit", "operation", "GPUs", "jax", "driver", "NCCL"), sorted(rows))


def _headline(given: Sequence[Table]) -> str:
    by_name, rows = {table.name: table for table in given}, []
    for name, shape, dtype in HEADLINE:
        found = _measured([by_name[name]], by_name[name].operation)
        cells = next(each for each in found if problem_of(each[1]) == (shape, dtype, "nn"))
        rows.append([f"`{re.sub('_[nk]$', '', by_name[name].operation)}`", *_cells(*cells)])
    return lines(("operation", "GPUs", "m×n×k of a device", *_COLUMNS), rows)


TABLES: Mapping[str, Callable[[Sequence[Table]], str]] = {
    "losses": _losses, "means": _means, "runs": _runs, "headline": _headline
}  # fmt: skip


def text(page: str, given: Sequence[Table]) -> str:
    """Returns the text of a page with its tables made anew."""

    def make(match: re.Match[str]) -> str:
        name = match[2]
        table = methods_table if name in ("block", "layer", "ladder") else operation_table
        return f"{match[1]}\n{TABLES[name](given) if name in TABLES else table(given, name)}\n{match[3]}"

    return _MARKED.sub(make, page)


def generated() -> dict[pathlib.Path, str]:
    """Returns the paths of all generated files, each with the text that the file must have."""
    given = tables()
    pages = {path: text(path.read_text(encoding="utf-8"), given) for path in PAGES}
    return pages | {ROOT / "docs" / "figures" / name: svg for name, svg in figures.drawn(given).items()}


def main() -> int:
    """Writes all generated files."""
    command.tool_parser("performance", __doc__).parse_args()
    for path, content in generated().items():
        path.parent.mkdir(exist_ok=True)
        replace(path, content)
    return 0


if __name__ == "__main__":
    sys.exit(ending.run(main))
