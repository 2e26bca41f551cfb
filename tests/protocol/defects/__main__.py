"""Runs the kernels with each defect that `outcomes.csv` lacks, and writes what showed: python -m tests.protocol.defects

Rows of defects that the source no longer has go. A defect that nothing reports needs a reason in the column `why`.
"""

from __future__ import annotations

import csv
import pathlib
import sys

import jax

FILE = pathlib.Path(__file__).parent / "outcomes.csv"
COLUMNS = ("module", "function", "kind", "code", "number", "outcome", "kernel", "schedule", "why")


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_disable_most_optimizations", True)
    from tests.protocol.defects import kernels, outcomes, source

    known = {(*row.values(),)[:5]: row for row in csv.DictReader(FILE.open())} if FILE.exists() else {}
    at_line: dict[tuple[str, int], list[str]] = {}
    for name in kernels.KERNELS:
        for place in outcomes.lines_of(name):
            at_line.setdefault(place, []).append(name)
    rows = []
    defects = {d: lines for module in source.modules() for d, lines in source.of_module(module).items()}
    try:
        for number, (defect, lines) in enumerate(defects.items()):
            key = defect.module, defect.function, defect.kind, defect.code, str(defect.number)
            file = str(source.file_of(defect.module))
            names = [name for name in kernels.KERNELS if any(name in at_line.get((file, line), ()) for line in lines)]
            if not names:
                continue
            if key not in known:
                shown, kernel, schedule = outcomes.outcome(defect, kernels.chosen(names), range(4))
                known[key] = dict(zip(COLUMNS, (*key, shown, kernel, schedule, ""), strict=True))
                print(f"{number}/{len(defects)} {defect}: {shown} ({kernel} {schedule})", flush=True)
            rows.append(known[key])
    finally:
        with FILE.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    sys.exit(main())
