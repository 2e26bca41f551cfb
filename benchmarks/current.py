"""Reads and writes the current results: one table for each operation, device, number of devices and layout.

`OPERATION-DEVICE-COUNT-LAYOUT.csv` has for each problem the rows of its newest run. So the rows of a file can come from
several runs, and each row names its commit, date and command. LAYOUT is `one_process` if one process has all GPUs, and
`process_each` if each GPU has its own process. The markdown file of a table is made from its CSV.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence

from overlap.choice.tables import replace

Row = dict[str, str]
NOT_RECORDED = "command not recorded"
_DEVICES = re.compile(r"(\d+) of \d+ x (.+) \((?:one process|(\d+) processes)\)")
_PROBLEM = ("shape", "dtype", "layout")
# For each operation, the module that measures it, with the options that are always needed. An operation that is not
# listed is measured by the module with the operation's own name.
_MODULES = {
    "all_gather_lhs_matmul": "all_gather_matmul",
    "all_gather_rhs_matmul_n": "all_gather_rhs_matmul --along n",
    "all_gather_rhs_matmul_k": "all_gather_rhs_matmul --along k",
    "matmul_reduce_scatter": "matmul_reduce_scatter",
    "matmul_reduce_scatter_n": "matmul_reduce_scatter --along n",
    "matmul_all_reduce": "matmul_all_reduce",
}
_ONE_DEVICE = ("matmul", "ladder")


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of current results: the rows of its file, in order."""

    name: str
    rows: Sequence[Row]

    @property
    def operation(self) -> str:
        return self.rows[0]["op"]

    @property
    def devices(self) -> int:
        return int(self.rows[0]["devices"])

    @property
    def device_kind(self) -> str:
        return _described(self.rows[0])[1]

    @property
    def layout(self) -> str:
        """`one_process`, `process_each`, or `N_processes` if N processes share the devices."""
        return layout_of(self.devices, _described(self.rows[0])[2])

    def problems(self) -> list[list[Row]]:
        """The rows of the table, grouped by problem."""
        result: dict[tuple[str, ...], list[Row]] = {}
        for row in self.rows:
            result.setdefault(problem_of(row), []).append(row)
        return list(result.values())

    def runs(self) -> list[Row]:
        """One row of each run, ordered by time."""
        return sorted({run_of(row): row for row in reversed(self.rows)}.values(), key=run_of)


def layout_of(devices: int, processes: int) -> str:
    """Returns the layout of processes and GPUs as the names of files have it, such as `one_process`."""
    if processes == 1:
        return "one_process"
    return "process_each" if processes == devices else f"{processes}_processes"


def name_of(operation: str, device_kind: str, devices: int, processes: int) -> str:
    """Returns the stem of a table's files.

    Args:
      operation: as in the column `op`.
      device_kind: jax's name of the device, such as "NVIDIA H200".
      devices: how many devices are used.
      processes: how many processes share them.
    """
    device = re.sub(r"\W+", "_", device_kind.lower().removeprefix("nvidia ")).strip("_")
    return f"{operation}-{device}-{devices}-{layout_of(devices, processes)}"


def name_of_row(row: Mapping[str, str]) -> str:
    """Returns the stem of the files of the table to which a row belongs."""
    devices, kind, processes = _described(row)
    return name_of(row["op"], kind, devices, processes)


def _described(row: Mapping[str, str]) -> tuple[int, str, int]:
    match = _DEVICES.fullmatch(row["env_devices"])
    if match is None:
        raise ValueError(f"`env_devices` must read `2 of 2 x KIND (one process)`, got {row['env_devices']!r}")
    return int(match[1]), match[2], int(match[3] or 1)


def problem_of(row: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the shape, dtype and operand layout of a row. Rows of old files lack the layout: it is "nn"."""
    return tuple(row.get(name) or "nn" for name in _PROBLEM)


def run_of(row: Mapping[str, str]) -> tuple[str, str]:
    """Returns the date and the commit of a row. Two rows come from the same run if and only if both are equal."""
    return row["env_date"], row["env_commit"]


# --- Reading and writing ----------------------------------------------------------------------------------------------


def read(path: pathlib.Path) -> list[Row]:
    """Reads the rows of a CSV file."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def tables(folder: pathlib.Path) -> list[Table]:
    """Reads all tables of current results in a folder. Returns them ordered by name."""
    paths = [path for path in sorted(folder.glob("*.csv")) if "." not in path.stem]
    return [Table(path.stem, read(path)) for path in paths]


def merged(old: Sequence[Row], new: Sequence[Row]) -> tuple[list[Row], set[tuple[str, ...]]]:
    """Merges the rows of a new run into the rows of a table.

    All rows of a problem come from one run, since times of different runs must not be compared. If the new run has no
    time for a problem, the old rows of the problem stay.

    Returns:
      The rows of the table, ordered by problem; and the problems whose rows the run has replaced or added.
    """
    timed = {problem_of(row) for row in new if row["loop_us"]}
    known = {problem_of(row) for row in old}
    taken = timed | ({problem_of(row) for row in new} - known)
    rows = [row for row in old if problem_of(row) not in taken] + [row for row in new if problem_of(row) in taken]
    return sorted(rows, key=_order), taken


def _order(row: Row) -> tuple[object, ...]:
    shape, dtype, layout = problem_of(row)
    return (dtype, *map(int, shape.split("x")), layout)


def add(folder: pathlib.Path, name: str, run: pathlib.Path, rounds: pathlib.Path | None = None) -> list[pathlib.Path]:
    """Adds a run to the table `name` of a folder. Returns the files that it has written.

    Args:
      folder: the folder of the current results.
      name: the table's name, see `name_of`.
      run: the CSV file of the run, one row per method and problem.
      rounds: the CSV file of each round's times.
    """
    path, rounds_path = folder / f"{name}.csv", folder / f"{name}.rounds.csv"
    rows, taken = merged(read(path) if path.exists() else [], read(run))
    written = [_replace(path, text_of(rows)), _replace(folder / f"{name}.md", markdown(Table(name, rows)))]
    if rounds is not None:
        kept = read(rounds_path) if rounds_path.exists() else []
        times = [row for row in kept if problem_of(row) not in taken]
        times += [row for row in read(rounds) if problem_of(row) in taken]
        written.append(_replace(rounds_path, text_of(times)))
    return written


def text_of(rows: Sequence[Row]) -> str:
    """Writes the rows as CSV text. A column that only some runs have is empty in the rows of the other runs."""
    measured = dict.fromkeys(name for row in rows for name in row if not name.startswith("env_"))
    environment = dict.fromkeys(name for row in rows for name in row if name.startswith("env_"))
    text = io.StringIO()
    writer = csv.DictWriter(text, [*measured, *environment], restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _replace(path: pathlib.Path, text: str) -> pathlib.Path:
    replace(path, text)
    return path


# --- For people -------------------------------------------------------------------------------------------------------


def again(table: Table) -> str:
    """Returns the command line that measures all problems of a table again and replaces its rows."""
    shapes = ",".join(":".join(problem_of(rows[0])) for rows in table.problems())
    collective = table.operation not in _ONE_DEVICE
    words = []
    if collective and all(row.get("env_NCCL_NVLS_ENABLE") == "0" for row in table.rows):
        words.append("NCCL_NVLS_ENABLE=0")
    if table.layout != "one_process":
        words.append(f"launch/mpirun.sh -np {_described(table.rows[0])[2]} --")
    words.append(f"python -m benchmarks.{_MODULES.get(table.operation, table.operation)}")
    if collective and table.layout == "one_process":
        words.append(f"--devices {table.devices}")
    return " ".join([*words, f"--shapes {shapes}", "--out benchmarks/results"])


def number(row: Mapping[str, str] | None, column: str, digits: int) -> str:
    """Formats the number in a cell of a CSV file with `digits` decimal places. Returns a dash if the cell is empty."""
    return f"{float(row[column]):.{digits}f}" if row and row.get(column) else "–"


def method(rows: Iterable[Row], name: str) -> Row | None:
    """Returns the row of the method `name` if its result was right and it was timed; else None."""
    return next((row for row in rows if row["method"] == name and row["loop_us"]), None)


def lines(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Returns the lines of a markdown table."""
    cells = [headings, ["---"] * len(headings), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells]


def run_lines(table: Table) -> list[str]:
    """Lists the runs of a table, ordered and numbered by time, as the lines of a markdown table."""
    headings = ("run", "measured", "commit", "command", "jax", "driver", "NCCL")
    return lines(
        headings,
        [
            (
                str(position),
                run["env_date"],
                run["env_commit"],
                command_of(run.get("env_command", "")),
                run["env_jax"].split(",")[0].removeprefix("jax "),
                run.get("env_driver") or "–",
                run.get("env_nccl") or "–",
            )
            for position, run in enumerate(table.runs(), 1)
        ],
    )


def command_of(command: str) -> str:
    """Returns a recorded command line as markdown code, or "command not recorded"."""
    return f"`{command}`" if command else NOT_RECORDED


def run_number(table: Table, row: Row) -> str:
    """Returns the number that `run_lines` gives to the run from which `row` comes."""
    return str([run_of(run) for run in table.runs()].index(run_of(row)) + 1)


def title(table: Table) -> str:
    """Describes the table in words, for a heading."""
    layout = "a process each" if table.layout == "process_each" else table.layout.replace("_", " ")
    return f"{table.operation}, {table.devices} x {table.device_kind}" + (f", {layout}" if table.devices > 1 else "")


def words_of_problem(row: Row) -> str:
    """Describes the problem of a row in words: sizes, dtype, and operand layout."""
    return " ".join(problem_of(row))


def markdown(table: Table) -> str:
    """Writes the table as markdown text: a row for every method of every problem, and the runs that measured them."""
    headings = (
        "(m, n, k) per shard",
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
        "run",
    )
    rows, remarks = [], []
    for row in table.rows:
        rows.append(
            (
                words_of_problem(row),
                row["method"],
                number(row, "loop_us", 1) if row["loop_us"] else row["status"],
                f"{number(row, 'loop_us_p10', 1)}–{number(row, 'loop_us_p90', 1)}",
                number(row, "wall_us", 1),
                number(row, "tflops_per_device", 0),
                number(row, "percent_of_peak", 1),
                number(row, "received_gb_per_s_per_device", 0),
                number(row, "xla_over_this", 3),
                number(row, "roof_over_this", 3),
                number(row, "xla_over_this_wall", 3),
                f"{float(row['error']):.2e}" if row["error"] else "–",
                run_number(table, row),
            )
        )
        remarks += [f"{words_of_problem(row)}, {row['method']}: {text}  " for text in _remarks(row)]
    text = [
        f"# {title(table)}",
        "",
        f"Made by `python -m benchmarks.index` from {table.name}.csv, which has more columns; do not edit.",
        "",
        "To measure all of it again, from the root of the repository, on a tree that is committed:",
        "",
        f"    {again(table)}",
        "",
        *lines(headings, rows),
        "",
        *([*remarks, ""] if remarks else []),
        *run_lines(table),
    ]
    return "\n".join(text) + "\n"


def _remarks(row: Row) -> list[str]:
    texts = {
        "note": "{}",
        "kernel_names": "kernels {}",
        "loop_copies": "its loop copies {}",
        "bf16_over_this": "{} x as fast as our kernel in bf16",
    }
    return [text.format(row[column]) for column, text in texts.items() if row.get(column) not in (None, "", "1")]
