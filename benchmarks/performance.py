"""`python -m benchmarks.performance`: writes the tables of the pages in `PAGES`, and docs/figures/.

A page marks a table by `<!-- results: NAME -->` and `<!-- end -->`. All numbers come from benchmarks/results/*.csv.
"""

from __future__ import annotations

import pathlib
import re
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence

from benchmarks import command, experts, figures
from benchmarks.current import Row, Table, method, problem_of, tables
from overlap.choice.tables import replace
from overlap.cli import ending

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = (ROOT / "docs" / "performance.md", ROOT / "docs" / "steps.md", ROOT / "README.md")
_MARKED = re.compile(r"(<!-- results: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
_HEADINGS = ("GPUs", "m×n×k", "fused, µs", "XLA, µs", "XLA / fused", "cuBLAS on gathered data / fused")
# README's table: the file of each row, and the shape in bfloat16.
HEADLINE = (
    ("all_gather_lhs_matmul-h200-4-one_process", "1024x3584x8192"),
    ("all_gather_lhs_matmul-h100_80gb_hbm3-2-one_process", "1024x6144x12288"),
    ("all_gather_lhs_matmul-h100_80gb_hbm3-2-one_process", "8192x28672x8192"),
    ("all_gather_rhs_matmul_n-h200-4-one_process", "8192x4096x4096"),
    ("matmul_reduce_scatter-h200-2-process_each", "8192x8192x3584"),
    ("matmul_all_reduce-h200-2-one_process", "256x8192x4096"),
    ("matmul_all_reduce-h200-2-one_process", "8192x8192x14336"),
    ("matmul-h200-1-one_process", "8192x8192x8192"),
)
_OF_METHODS = ("block", "layer", "backward", "ladder", "experts", "loss", "step")
# The rivals in the table of experts.
_RIVALS = ("xla", "jax", "batched", "roof")
Problem = tuple[Table, Row, Row | None]  # A problem's table, the row of fused, and the row of XLA.


def _lines(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = [headings, ["---"] * len(headings), *rows]
    return "".join("| " + " | ".join(row) + " |\n" for row in cells)


def _gpus(table: Table) -> str:
    layout = ", one process per GPU" if table.process_each else ""
    return f"{table.devices} × {table.device_kind.removeprefix('NVIDIA ').split()[0]}{layout}"


def _gain(ratio: float) -> str:
    """A rival's time over ours, in bold where the rival is faster."""
    bold = "**" if ratio < 1 else ""
    return f"{bold}{ratio:.2f}{bold}"


def _cells(table: Table, row: Row, *others: Row | None, digits: int = 1) -> list[str]:
    """Returns GPUs, sizes, the times of all rows, and the ratios of `row`: in bold if XLA is faster."""
    shape, dtype, layout = problem_of(row)
    sizes = " ".join([shape.replace("x", "×"), dtype, *([] if layout == "nn" else [layout])])
    times = [f"{float(each['loop_us']):.{digits}f}" if each else "–" for each in (row, *others)]
    gain, roof = row["xla_over_this"], row.get("roof_over_this")
    ratios = _gain(float(gain)) if gain else "–", f"{float(roof):.2f}" if roof else "–"
    return [_gpus(table), sizes, *times, *ratios]


def _problems(given: Iterable[Table]) -> Iterator[Problem]:
    for table in sorted(given, key=lambda table: (table.devices, table.name)):
        for rows in table.problems():
            if (fused := method(rows, "fused")) and fused["xla_over_this"]:
                yield table, fused, method(rows, "xla")


def _of_operation(given: Sequence[Table]) -> str:
    return _lines((*_HEADINGS, "measured"), ([*_cells(*each), each[1]["env_date"][:10]] for each in _problems(given)))


def _of_methods(given: Sequence[Table]) -> str:
    rows = ([row["method"], *_cells(table, row)[:-1]] for table in given for row in table.rows if row["xla_over_this"])
    return _lines(("method", "GPUs", "problem", "µs", "XLA / this"), rows)


def _losses(given: Sequence[Table]) -> str:
    found = [(float(each[1]["xla_over_this"]), each[0].operation, _cells(*each)) for each in _problems(given)
             if each[0].devices > 1 and each[0].operation not in _OF_METHODS]  # fmt: skip
    rows = [[operation, *cells] for gain, operation, cells in sorted(found) if gain < 1]
    return f"{len(rows)} of {len(found)}:\n\n" + _lines(("operation", *_HEADINGS), rows)


def _of_experts(given: Sequence[Table]) -> str:
    """A table of layers beside tokamax, and one of products: the time of the kernels, and the ratios of the others."""
    rows = []
    layers = []
    for table in given:
        for problem in table.problems():
            of_layer = experts.ours_and_rival(problem)
            if layer := of_layer.get("ours"):
                us = float(layer["loop_us"])
                shape, _, case = problem_of(layer)
                model, rest = case.split(", layer, ")
                passed, routing = rest.rsplit(", ", 1)
                first = int(shape.split("x")[0])
                tokens, flops = experts.of_row(model, f"layer, {passed}", first, table.devices)
                cells = f"{us:.0f}", f"{flops / us / 1e6:.0f}"
                theirs = "–", "–"
                if rival := of_layer.get("tokamax"):
                    theirs = f"{float(rival['loop_us']):.0f}", _gain(float(rival["loop_us"]) / us)
                layers.append([_gpus(table), model, routing, f"{tokens:.0f}", passed, *cells, *theirs])
            if fused := method(problem, "fused"):
                us = float(fused["loop_us"])
                others = [method(problem, name) for name in _RIVALS]
                ratios = [f"{float(other['loop_us']) / us:.2f}" if other else "–" for other in others]
                rows.append([_gpus(table), *_cells(table, fused)[1:3], *ratios])
    headings = ("GPUs", "model", "routing", "tokens per GPU", "pass", "ours, µs", "TFLOP/s per GPU", "tokamax, µs",
                "tokamax / ours")  # fmt: skip
    layers.sort(key=lambda row: (*row[:3], int(row[3]), row[4]))
    of_layers = _lines(headings, layers) + "\n" if layers else ""
    return of_layers + _lines(("GPUs", "problem", "fused, µs", *(f"{name} / fused" for name in _RIVALS)), sorted(rows))


def _of_steps(given: Sequence[Table]) -> str:
    """One row for each method of each problem. Plain is the faster of the two plain methods."""
    columns = (("loop_us", ".1f", 1e-3), ("xla_over_this", ".2f", 1.0), ("peak_gib", ".1f", 1.0),
               ("peak_over_plain", ".2f", 1.0), ("first_call_s", ".1f", 1.0))  # fmt: skip
    headings = ("model, layout", "GPUs", "sequences×tokens×width×MLP×layers", "method", "ms", "plain / this",
                "peak, GiB", "peak / plain's", "first call, s")  # fmt: skip
    rows = []
    for table in given:
        for row in (row for row in table.rows if row["loop_us"]):
            shape, _, layout = problem_of(row)
            numbers = [f"{float(row[name]) * scale:{form}}" if row[name] else "–" for name, form, scale in columns]
            rows.append([layout, _gpus(table), shape.replace("x", "×"), row["method"], *numbers])
    return _lines(headings, rows)


def _means(given: Sequence[Table]) -> str:
    found: dict[tuple[str, str], list[float]] = {}
    for _, row, _ in _problems(table for table in given if table.operation == "matmul"):
        found.setdefault((row["dtype"], row["layout"]), []).append(float(row["xla_over_this"]))
    rows = ([*key, str(len(of)), f"{statistics.geometric_mean(of):.3f}", f"{min(of):.3f}"] for key, of in found.items())
    return _lines(("dtype", "layout", "products", "cuBLAS / fused, geometric mean", "least"), sorted(rows))


def _runs(given: Sequence[Table]) -> str:
    found: dict[tuple[str, ...], set[str]] = {}
    for table, run in [(each, row) for each in given for row in each.rows]:
        commit, _, remark = run["env_commit"].partition(" (")
        star = "*" if remark and not remark.startswith("unverified") else ""
        versions = run["env_jax"].split(",")[0].removeprefix("jax "), run["env_driver"], run["env_nccl"]
        found.setdefault((run["env_date"][:10], commit + star, _gpus(table), *versions), set()).add(table.operation)
    rows = ([*key, ", ".join(sorted(operations))] for key, operations in sorted(found.items()))
    return _lines(("measured", "commit", "GPUs", "jax", "driver", "NCCL", "operations"), rows)


def _headline(given: Sequence[Table]) -> str:
    found = {(each[0].name, *problem_of(each[1])): each for each in _problems(given)}
    shown = [found[(*key, "bf16", "nn")] for key in HEADLINE]
    rows = ([f"`{each[0].operation.removesuffix('_n')}`", *_cells(*each, digits=0)] for each in shown)
    return _lines(("operation", *_HEADINGS), rows)


_MAKERS = {"experts": _of_experts, "step": _of_steps}
_OF_ALL = {"losses": _losses, "means": _means, "runs": _runs, "headline": _headline}


def text(page: str, given: Sequence[Table]) -> str:
    """Returns the text of a page with its tables made anew."""

    def make(match: re.Match[str]) -> str:
        name = match[2]
        own = [table for table in given if table.operation == name]
        make_of = _MAKERS.get(name, _of_methods if name in _OF_METHODS else _of_operation)
        made = _OF_ALL[name](given) if name in _OF_ALL else make_of(own) if own else "Not measured.\n"
        return f"{match[1]}\n{made}\n{match[3]}"

    return _MARKED.sub(make, page)


def generated() -> dict[pathlib.Path, str]:
    """Returns the paths of all generated files, each with the text that the file must have."""
    given = tables()
    drawn = {ROOT / "docs" / "figures" / name: svg for name, svg in figures.drawn(given).items()}
    return drawn | {path: text(path.read_text(encoding="utf-8"), given) for path in PAGES}


def main() -> int:
    """Writes all generated files."""
    command.tool_parser("performance", __doc__).parse_args()
    for path, content in generated().items():
        replace(path, content)
    return 0


if __name__ == "__main__":
    sys.exit(ending.run(main))
