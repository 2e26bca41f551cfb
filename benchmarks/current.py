"""Reads and writes the current results: one table for each operation, device, number of devices and layout.

`OPERATION-DEVICE-COUNT-LAYOUT.csv` has for each problem the rows of its newest run. So the rows of a file can come from
several runs, and the first row of a problem names its commit, date and command (the columns `env_…`). LAYOUT is
`one_process` if one process has all GPUs, and `process_each` if each GPU has its own process.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence

from overlap.choice.tables import replace

FOLDER = pathlib.Path(__file__).resolve().parent / "results"
Row = dict[str, str]
_DEVICES = re.compile(r"(\d+) of \d+ x (.+) \((?:one process|(\d+) processes)\)")


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
    def process_each(self) -> bool:
        """Whether each GPU has a process of its own."""
        return self.name.endswith("process_each")

    def problems(self) -> list[list[Row]]:
        """The rows of the table, grouped by problem."""
        result: dict[tuple[str, ...], list[Row]] = {}
        for row in self.rows:
            result.setdefault(problem_of(row), []).append(row)
        return list(result.values())


def name_of(row: Mapping[str, str]) -> str:
    """Returns the stem of the file to which a row belongs."""
    devices, kind, processes = _described(row)
    several = "process_each" if processes == devices else f"{processes}_processes"
    words = re.sub(r"\W+", "_", kind.lower().removeprefix("nvidia ")).strip("_"), str(devices)
    return "-".join((row["op"], *words, "one_process" if processes == 1 else several))


def _described(row: Mapping[str, str]) -> tuple[int, str, int]:
    if (match := _DEVICES.fullmatch(row["env_devices"])) is None:
        raise ValueError(f"`env_devices` must read `2 of 2 x KIND (one process)`, got {row['env_devices']!r}")
    return int(match[1]), match[2], int(match[3] or 1)


def problem_of(row: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the shape, dtype and operand layout of a row. Rows of old files lack the layout: it is "nn"."""
    return row["shape"], row["dtype"], row.get("layout") or "nn"


def method(rows: Iterable[Row], name: str) -> Row | None:
    """Returns the row of the method `name` if its result was right and it was timed; else None."""
    return next((row for row in rows if row["method"] == name and row["loop_us"]), None)


def read(path: pathlib.Path) -> list[Row]:
    """Reads the rows of a CSV file. Each row gets the columns `env_…` of the first row of its problem."""
    with path.open(encoding="utf-8", newline="") as file:
        rows: list[Row] = list(csv.DictReader(file))
    for before, row in itertools.pairwise(rows):
        row |= {name: text for name, text in before.items() if name.startswith("env_") and not row.get("env_date")}
    return rows


def tables(folder: pathlib.Path = FOLDER) -> list[Table]:
    """Reads all tables of current results in a folder. Returns them ordered by name."""
    return [Table(path.stem, read(path)) for path in sorted(folder.glob("*.csv"))]


def merged(old: Sequence[Row], new: Sequence[Row]) -> list[Row]:
    """Merges the rows of a new run into the rows of a table. Returns the rows of the table, ordered by problem.

    All rows of a problem come from one run, since times of different runs must not be compared. If the new run has no
    time for a problem, the old rows of the problem stay.
    """
    known = {problem_of(row) for row in old}
    taken = {problem_of(row) for row in new if row["loop_us"] or problem_of(row) not in known}
    rows = [row for row in old if problem_of(row) not in taken] + [row for row in new if problem_of(row) in taken]
    return sorted(rows, key=lambda row: (row["dtype"], *map(int, row["shape"].split("x")), problem_of(row)))


def add(folder: pathlib.Path, rows: Sequence[Row]) -> pathlib.Path:
    """Adds rows of one run, all of one table, to the table's file in a folder. Returns the path of the file."""
    path = folder / f"{name_of(rows[0])}.csv"
    rows = merged(read(path) if path.exists() else [], rows)
    columns = sorted(dict.fromkeys(name for row in rows for name in row), key=lambda name: name.startswith("env_"))
    text = io.StringIO()
    # A column that only some runs have is empty in the rows of the other runs.
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    for before, row in zip([None, *rows], rows):
        told = before is not None and problem_of(before) == problem_of(row)
        writer.writerow({name: text for name, text in row.items() if not (told and name.startswith("env_"))})
    folder.mkdir(parents=True, exist_ok=True)
    replace(path, text.getvalue())
    return path
