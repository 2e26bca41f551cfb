"""Makes the tables of README.md that show results: the tables between `<!-- table: NAME -->` and `<!-- end -->`.

`python -m benchmarks.index` writes the tables into the file.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence

from benchmarks import current, provenance

FILE = provenance.REPOSITORY / "README.md"
# One run of the suite "standard" for each dtype. A mean must not mix several runs.
SUITES = {
    dtype: provenance.REPOSITORY
    / "benchmarks"
    / "experiments"
    / "2026-11-21-how-near-is-matmul-to-cublas"
    / f"matmul-h200-1-one_process-{dtype}.csv"
    for dtype in ("bf16", "f16")
}
_USUAL = "H200"  # README.md says which GPUs were measured if a row does not.
_MARKED = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
# The problems of `all_gather_lhs_matmul` that README.md shows, as far as a table has them.
_SHOWN = (
    ("1024x4096x4096", "f16"),
    ("1024x4096x8192", "bf16"),
    ("1024x3584x8192", "bf16"),
    ("1024x6144x12288", "bf16"),
    ("1024x4096x4096", "f8_e4m3fn"),
    ("1024x4096x8192", "f8_e4m3fn"),
    ("1024x6144x12288", "f8_e4m3fn"),
)
_SUMS = {
    "matmul_reduce_scatter": (
        "8192x4096x4096",
        "8192x8192x3584",
        "8192x12288x6144",
        "4096x8192x7168",
        "2048x4096x4096",
        "256x8192x4096",
    ),
    "matmul_all_reduce": (
        "16x8192x4096",
        "64x8192x4096",
        "256x8192x4096",
        "1024x8192x4096",
        "2048x8192x4096",
        "8192x8192x4096",
        "16x8192x14336",
        "256x8192x14336",
        "2048x8192x14336",
        "8192x8192x14336",
    ),
}
_WEIGHTS = ("8192x4096x4096", "8192x14336x4096", "2048x4096x4096")


def text(readme: str, tables: Sequence[current.Table]) -> str:
    """Returns the text of README.md with its tables made anew, from the current results `tables`.

    Raises:
      ValueError: the README marks an unknown table, or lacks one.
    """
    made = {name: make(tables) for name, make in _TABLES.items()}
    marked = [name for _, name, _ in _MARKED.findall(readme)]
    if sorted(marked) != sorted(made):
        raise ValueError(f"README.md must mark each of {', '.join(made)} once, and marks {', '.join(marked) or 'none'}")
    return _MARKED.sub(lambda match: f"{match[1]}{'\n'.join(made[match[2]])}\n{match[3]}", readme)


def _gpus(table: current.Table) -> str:
    """Returns how many GPUs were measured, which if they were not the usual ones, and whether each had a process."""
    kind = "" if _USUAL in table.device_kind else f" × {table.device_kind.removeprefix('NVIDIA ').split()[0]}"
    return f"{table.devices}{kind}" + (", a process each" if table.layout == "process_each" else "")


def _gathered_rows(tables: Sequence[current.Table]) -> list[str]:
    rows = []
    ours = [table for table in tables if table.operation == "all_gather_lhs_matmul"]
    for table in sorted(ours, key=lambda table: (table.devices, _USUAL not in table.device_kind, table.layout)):
        # Operands of 8 bits are measured in the layout "nt" alone. Of the others, README.md shows "nn".
        problems = {}
        for problem in table.problems():
            shape, dtype, layout = current.problem_of(problem[0])
            if layout == "nn" or dtype.startswith("f8"):
                problems[shape, dtype] = problem
        for problem in (problems[key] for key in _SHOWN if key in problems):
            fused, example = current.method(problem, "fused"), current.method(problem, "jax_example")
            shape, dtype, _ = current.problem_of(problem[0])
            rows.append(
                (
                    _gpus(table),
                    f"{shape.replace('x', ', ')} {'float8' if dtype.startswith('f8') else dtype}",
                    *(current.number(current.method(problem, name), "loop_us", 1) for name in ("fused", "xla", "roof")),
                    *(current.number(fused, f"{name}_over_this", 2) for name in ("xla", "roof")),
                    f"{float(example['loop_us']) / float(fused['loop_us']):.2f}" if fused and example else "–",
                    problem[0]["env_date"].split()[0],
                )
            )
    headings = (
        "GPUs",
        "per shard (m, n, k)",
        "fused, µs",
        "XLA, µs",
        "roof, µs",
        "XLA / fused",
        "roof / fused",
        "JAX's example / fused",
        "measured",
    )
    return current.lines(headings, rows)


def _gathered_weights(tables: Sequence[current.Table]) -> list[str]:
    prefix, rows = "all_gather_rhs_matmul_", []
    ours = [table for table in tables if table.operation.startswith(prefix) and table.layout == "one_process"]
    for table in sorted(ours, key=lambda table: (table.devices, -ord(table.operation[-1]))):
        problems = {problem[0]["shape"]: current.method(problem, "fused") for problem in table.problems()}
        cells = []
        for shape in _WEIGHTS:
            fused = problems.get(shape)
            ratios = [current.number(fused, f"{name}_over_this", 2) for name in ("xla", "roof")]
            cells.append(f"{ratios[0]} ({ratios[1]})" if fused else "–")
        rows.append((f"{_gpus(table)}, {table.operation.removeprefix(prefix)}", *cells))
    return current.lines(("GPUs, gathered along", *(shape.replace("x", "×") for shape in _WEIGHTS)), rows)


def _sums(operation: str, tables: Sequence[current.Table]) -> list[str]:
    rows = []
    ours = [table for table in tables if table.operation == operation]
    for table in sorted(ours, key=lambda table: (table.devices, table.layout)):
        problems = {current.problem_of(problem[0])[0]: problem for problem in table.problems()}
        for shape in (shape for shape in _SUMS[operation] if shape in problems):
            problem = problems[shape]
            fused = current.method(problem, "fused")
            rows.append(
                (
                    _gpus(table),
                    shape.replace("x", "×"),
                    *(current.number(current.method(problem, name), "loop_us", 1) for name in ("fused", "xla", "roof")),
                    *(current.number(fused, f"{name}_over_this", 2) for name in ("xla", "roof")),
                )
            )
    headings = ("GPUs", "m × n × k", "fused, µs", "XLA, µs", "roof, µs", "XLA / fused", "roof / fused")
    return current.lines(headings, rows)


def _products(_tables: Sequence[current.Table]) -> list[str]:
    rows = []
    for dtype, path in SUITES.items():
        ratios: dict[str, list[tuple[float, str]]] = {"nn": [], "nt": [], "tn": []}
        for row in current.read(path):
            if row["method"] == "fused" and row["roof_over_this"]:
                ratios[row["layout"]].append((float(row["roof_over_this"]), row["shape"]))
        every = sorted(pair for pairs in ratios.values() for pair in pairs)
        (least, shape), (second, _) = every[:2]
        means = [_geometric_mean([value for value, _ in pairs]) for pairs in (*ratios.values(), every)]
        rows.append(
            (dtype, *(f"{mean:.3f}" for mean in means), f"{least:.3f} ({shape.replace('x', '×')}), then {second:.3f}")
        )
    return current.lines(("", "NN", "NT", "TN", "all", "least"), rows)


def _geometric_mean(values: Sequence[float]) -> float:
    return math.exp(math.fsum(map(math.log, values)) / len(values))


_TABLES: Mapping[str, Callable[[Sequence[current.Table]], list[str]]] = {
    "all_gather_lhs_matmul": _gathered_rows,
    "all_gather_rhs_matmul": _gathered_weights,
    "matmul": _products,
    **{operation: functools.partial(_sums, operation) for operation in _SUMS},
}
