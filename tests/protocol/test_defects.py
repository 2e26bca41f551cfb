"""Defects made from the library's source show as `defects/outcomes.csv` says: in a report, or in the numbers.

`make test` runs a sample of all modules and kinds of change, `make test-all` all of them.
"""

from __future__ import annotations

import re

import pytest

from tests.protocol.defects import outcomes, source, table
from tests.protocol.defects.kernels import KERNELS
from tests.protocol.defects.source import Defect
from tests.protocol.defects.table import Row

pytestmark = pytest.mark.one_jax
ROWS = table.read()
SHOWN = [defect for defect in table.spread(ROWS) if ROWS[defect].outcome in ("reported", "wrong numbers")]
SAMPLE = 60
COMMAND = "python -m tests.protocol.defects"


def _of_today(defect: Defect) -> bool:
    return source.file_of(defect.module).exists() and defect in source.of_module(defect.module)


@pytest.mark.parametrize(
    "defect",
    [pytest.param(d, id=str(d), marks=[] if n < SAMPLE else pytest.mark.slow) for n, d in enumerate(SHOWN)],
)
def test_a_defect_shows(defect):
    if not _of_today(defect):
        pytest.skip(f"the source has changed: run {COMMAND}")
    name, schedule = ROWS[defect].kernel, ROWS[defect].schedule
    rest = [number for number in range(len(outcomes.SCHEDULES)) if number != schedule]
    kernels = [(name, *KERNELS[name])]
    shown = next(outcomes.first_that_shows(source.injected(defect), kernels, [schedule, *rest]), None)
    assert shown is not None, f"{defect} goes unnoticed in the kernel {name!r}"
    assert shown[0] != "refused", shown


def test_few_defects_of_the_source_are_unknown():
    of_today = {defect for module in source.modules() for defect in source.of_module(module)}
    unknown, stale = of_today - ROWS.keys(), ROWS.keys() - of_today
    print(f"{len(unknown)} of {len(of_today)} defects are not in the table, {len(stale)} rows have no defect")
    assert 20 * max(len(unknown), len(stale)) < len(of_today), f"run {COMMAND}"


# Why some defects do no harm, or why no kernel here can show them. The first text that is found in a defect counts.
REASONS = {
    r"^primitives\.(windows|stalls|addresses)|_ticks|_write_record|\.sender:": "the report of a wait, see test_waits.py",
    r"\.patches:|launch\.|_compat": "what jax needs to compile a kernel for a GPU: tests/assembly",
    r"UNROLLED": "the same sum in a loop, or unrolled",
    r"placement\.|tile_order\.|grid\.cta": "which CTA has which tile: any order will do",
    r"(: repeat).*(\.run\(\)|_copy|_look|pull_scales)": "the counter has nothing left for the second time",
    r": repeat": "the same is stored, signalled or converged once more before anyone looks",
    r"\.(block_columns|pulled_chunks|block_rows|short|padded_rows|chunks)\b": "sizes, walked in test_walks_*.py",
}


def test_what_goes_unnoticed_has_a_reason():
    unnoticed = [str(defect) for defect, row in ROWS.items() if row.outcome == "unnoticed"]
    unexplained = [text for text in unnoticed if not any(re.search(pattern, text) for pattern in REASONS)]
    assert not unexplained, "\n".join(unexplained)


def test_the_table_can_be_wrong():
    """Without its defect, a kernel shows nothing: what the sample finds is the defects."""
    row = ROWS[SHOWN[0]]
    make, cores = KERNELS[row.kernel]
    assert outcomes.run(row.kernel, cores, make(), row.schedule) == ("unnoticed", "")
    assert isinstance(row, Row)
