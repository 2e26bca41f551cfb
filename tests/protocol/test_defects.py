"""Defects made from the library's source show as `defects/outcomes.csv` says: in a report, or in the numbers.

`make test` runs a sample of all modules and kinds of change, `make test-all` all of them.
"""

from __future__ import annotations

import functools
import re

import pytest

from tests.protocol.defects import outcomes, source, table
from tests.protocol.defects.kernels import KERNELS
from tests.protocol.defects.source import Defect
from tests.protocol.defects.table import Row

pytestmark = pytest.mark.one_jax
ROWS = table.read()
SHOWN = [defect for defect in table.spread(ROWS) if ROWS[defect].outcome in ("reported", "wrong numbers")]
SAMPLE = 24
COMMAND = "python -m tests.protocol.defects"


@functools.cache
def _of_today() -> set[Defect]:
    return {defect for module in source.modules() for defect in source.of_module(module)}


@pytest.mark.parametrize(
    "defect",
    [pytest.param(d, id=str(d), marks=[] if n < SAMPLE else pytest.mark.slow) for n, d in enumerate(SHOWN)],
)
def test_a_defect_shows(defect):
    if defect not in _of_today():
        pytest.skip(f"the source has changed: run {COMMAND}")
    name, schedule = ROWS[defect].kernel, ROWS[defect].schedule
    rest = [number for number in range(len(outcomes.SCHEDULES)) if number != schedule]
    kernels = [(name, *KERNELS[name])]
    shown = next(outcomes.first_that_shows(source.injected(defect), kernels, [schedule, *rest]), None)
    assert shown is not None, f"{defect} goes unnoticed in the kernel {name!r}"
    assert shown[0] != "refused", shown


def test_few_defects_of_the_source_are_unknown():
    unknown = _of_today() - ROWS.keys()
    print(f"{len(unknown)} of {len(_of_today())} defects are not in the table")
    assert 20 * len(unknown) < len(_of_today()), f"run {COMMAND}"


# The rows of the table. A smaller number says that fewer defects are tried.
COUNTED = 2485


def test_no_row_drops_out():
    """A row whose function was moved, or whose text was changed, would only be skipped."""
    stale = [str(defect) for defect in ROWS if defect not in _of_today()]
    assert not stale, f"run {COMMAND}: {len(stale)} rows have no defect in the source, such as {stale[0]!r}"
    assert len(ROWS) >= COUNTED, f"the table has lost rows: run {COMMAND}, or lower COUNTED and say why"


# Why some defects do no harm, or why no kernel of `defects/kernels.py` shows them: patterns of the defects.
REASONS = {
    "it says, stores, waits or fences once more":
        [": repeat", "wait_read_only=True", "last=False", ": always .*(wait|before)", "_finish_exchanged: (al|other)"],
    "texts and numbers for reports and traces: test_waits.py":
        [r"primitives\.(windows|stalls|addresses|peers)", "_ticks", "_write_record", r"\.sender:", "'asked for'",
         "_why_", "MOST_DEVICES", "oldest - begin", "number - begin"],
    "chunks of rows, and buffers: any sizes will do, and one device has no distances":
        [r"RowsPlan\.(chunk|buffers|ctas):", "RowsPlan.parts: .*features - first", "Refs.at: one more than 0 #1",
         "_own_later: (other side of rest|one more than 0)"],
    "a device tells itself of its own sums, or waits for peers too early": [
        r"row_kernels\.(_added_body|_await_peers): .*chunk\.distance > 0"],
    "the compute warpgroup finds nothing left to draw": ["Refs.run: always @pl.when\\(thread == _TRANSFER"],
    "any order of tiles will do": [r"placement\.", r"tile_order\.", r"grid\.cta", "_begin: (other side|always)"],
    "tables with room for more, and copies that end at the end of an array":
        [r"groups\.(most_tile_rows|tiles):", "_clear: (one|always)", "contraction: one", "clear_rows: always"],
    "which of two warpgroups clears which operand": ["_clear_rest: other side"],
    "only programs for a GPU: test_slices.py": ["_kept_apart"],
    "the same sum in a loop, or unrolled": ["UNROLLED"],
    "the emulator runs a warp as one thread": ["converge_warp"],
    "what jax needs to compile for a GPU: tests/assembly":
        [r"\.patches:", "_compat", "lowering_semantics", r"varying\.", "_plan: other side of config"],
    "sizes, of which too large ones do no harm: test_walks_*.py":
        [r"_schedule:|Schedule\.\w*:|schedule\.(Strips|tiles)", r"Chunking\.", "shared_semaphores",
         r"\.(chunks|padded)\b", r"columns\.start \+ strips\.cols", "read_rows"],
    "these kernels have one batch element, one row of tiles, or one side: steps.csv, tests/ops":
        ["batch", r"\bsides\b", r"\bbox(es|_smem)\b", "of_pairs", "in_blocks", r"len\(\w+\) == 1",
         r"tile\.(step|m)\b", r"at\[flag\]", "vector", "bias", "scale", "whole=|of_part="],
    "these kernels have no cut tiles of pairs of CTAs: steps.csv": [r"StreamK\.", "finish_together", "for_each_piece"],
    "the emulator has no registers: tests/assembly": ["set_max_registers"],
    "any other key is as good": [r"handshake\._key:"],
    "marks of a recording: tests/tools/test_trace.py": ["drop have_landed"],
    "these kernels have operands of one layout, and no columns of several right operands: tests/ops":
        [r"staging\.(load_k_step|copies_per_k_step|loaded_boxes):", r"first_column\(tile\.side\)",
         r"epilogue\.(_is_zero|epilogue|filled):", r"store: one (more|less) than addend \+ given"],
    "a count that only one value reaches": ["at_least", r"self\.only", "term_stages"],
    "the emulator takes a CTA's fence for all that it knows of": ["finish_in_cluster: drop plgpu.commit_smem"],
    "a choice in Python that makes no difference": [r"integers\.(choose|smaller|larger)", "_wait_until_drained.work"],
}  # fmt: skip


def test_what_goes_unnoticed_has_a_reason():
    patterns = re.compile("|".join(pattern for of_reason in REASONS.values() for pattern in of_reason))
    unnoticed = [str(defect) for defect, row in ROWS.items() if row.outcome == "unnoticed"]
    unexplained = [text for text in unnoticed if not patterns.search(text)]
    print(*unexplained, sep="\n")
    # A few may wait for their reason, or for `--again`.
    assert 25 * len(unexplained) <= len(ROWS)
    # Most defects show.
    assert 3 * len(unnoticed) <= len(ROWS)


def test_the_table_can_be_wrong():
    """Without its defect, a kernel shows nothing: what the sample finds is the defects."""
    row = ROWS[SHOWN[0]]
    make, cores = KERNELS[row.kernel]
    assert outcomes.run(row.kernel, cores, make(), row.schedule) == ("unnoticed", "")
    assert isinstance(row, Row)
