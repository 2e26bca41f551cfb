"""The table `outcomes.csv`: what shows of each defect."""

from __future__ import annotations

import collections
import csv
import dataclasses
import hashlib
import pathlib
from collections.abc import Iterable, Mapping

from tests.protocol.defects.source import Defect

FILE = pathlib.Path(__file__).parent / "outcomes.csv"


@dataclasses.dataclass(frozen=True)
class Row:
    """What shows of a defect.

    Attributes:
      outcome: "reported", "wrong numbers", "refused" (it cannot be traced), "unnoticed", or "not run" by any kernel.
      kernel: the kernel of `kernels.KERNELS` in which it shows.
      schedule: the number of the schedule of `outcomes.SCHEDULES` under which it shows.
    """

    outcome: str
    kernel: str
    schedule: int


def read() -> dict[Defect, Row]:
    if not FILE.exists():
        return {}
    with FILE.open(newline="") as file:
        rows = csv.reader(file)
        next(rows)
        return {Defect(*row[:4], int(row[4])): Row(row[5], row[6], int(row[7])) for row in rows}


def write(rows: Mapping[Defect, Row]) -> None:
    names = [field.name for kind in (Defect, Row) for field in dataclasses.fields(kind)]
    with FILE.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(names)
        writer.writerows([*dataclasses.astuple(defect), *dataclasses.astuple(rows[defect])] for defect in sorted(rows))


def spread(defects: Iterable[Defect]) -> list[Defect]:
    """Orders defects so that any number of the first ones are of as many modules and kinds as possible.

    Apart from that the order has nothing to do with where they lie, and is always the same.
    """
    seen: collections.Counter[tuple[str, str]] = collections.Counter()
    turns = {}
    for defect in sorted(defects, key=_shuffled):
        turns[defect] = seen[defect.module, defect.kind]
        seen[defect.module, defect.kind] += 1
    return sorted(turns, key=lambda defect: (turns[defect], _shuffled(defect)))


def _shuffled(defect: Defect) -> str:
    return hashlib.sha1(str(defect).encode()).hexdigest()
