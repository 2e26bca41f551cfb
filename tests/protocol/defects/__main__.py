"""Runs the kernels with each defect that `outcomes.csv` lacks, and writes what showed: python -m tests.protocol.defects

Rows of defects that the source no longer has go. `--minutes` stops early, and the next run goes on from there.
`--again` runs all kernels, and not a few of each kind, with the defects that went unnoticed.
"""

from __future__ import annotations

import argparse
import gc
import time

import jax

from tests.protocol.defects import table

# The last runs one CTA at a time, which shows who waits for a CTA that has not started.
_SCHEDULES = (0, 2, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after so many minutes")
    parser.add_argument("--again", action="store_true", help="all kernels with the defects that went unnoticed")
    given = parser.parse_args()
    end = time.monotonic() + 60 * given.minutes
    gc.set_threshold(200_000, 20, 100)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_disable_most_optimizations", True)
    from tests.protocol.defects import kernels, outcomes

    known, reached = table.read(), outcomes.reached()
    rows = {defect: known[defect] for defect in reached if defect in known}
    rows |= {defect: table.Row("not run", "", -1) for defect, names in reached.items() if not names}
    if given.again:
        missing = [defect for defect in table.spread(rows) if rows[defect].outcome == "unnoticed"]
    else:
        missing = [defect for defect in table.spread(reached) if defect not in rows]
    try:
        for number, defect in enumerate(missing):
            if time.monotonic() > end:
                break
            names = reached[defect] if given.again else kernels.chosen(reached[defect])
            rows[defect] = table.Row(*outcomes.outcome(defect, names, _SCHEDULES))
            print(f"{number}/{len(missing)} {defect}: {rows[defect]}", flush=True)
            if number % 50 == 49:
                table.write(rows)
    finally:
        table.write(rows)


if __name__ == "__main__":
    main()
