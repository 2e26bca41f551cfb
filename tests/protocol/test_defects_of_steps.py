"""Each defect of `defects/steps.csv` is reported, or shows in the numbers; and what does no harm is not reported."""

from __future__ import annotations

import pytest

from tests.protocol.defects import outcomes, source, steps
from tests.protocol.defects.kernels import KERNELS

OF_ALL = KERNELS | steps.PROGRAMS
GROUPS = steps.read()
COUNTED = 244  # Defects, and changes that do no harm. A smaller number says that fewer are tried.
ROWS = [(name, row) for rows in GROUPS.values() for name, row in rows.items()]
HARMLESS = GROUPS.pop("harmless")
# jax refuses the shapes of these kernels.
REFUSED = {"row scales along columns", "row scales along columns, joined"}
# `make test` runs each n-th defect of a group, in one kernel.
FAST = {"handshakes": 2, "gathers": 4, "rings": 4, "sums": 7, "mainloops": 8, "experts": 5}


def _cases():
    for group, rows in GROUPS.items():
        for number, (name, defect) in enumerate(rows.items()):
            for place, kernel in enumerate(defect.kernels):
                fast = place == 0 and number % FAST[group] == 0
                marks = [] if fast else pytest.mark.slow
                yield pytest.param(name, kernel, defect.changes, id=f"{group}-{name}-{kernel}", marks=marks)


@pytest.mark.parametrize(("name", "kernel", "changes"), list(_cases()))
def test_a_defect_shows(name, kernel, changes):
    shown = outcomes.first_that_shows(source.rewritten(*changes), [(kernel, *OF_ALL[kernel])])
    how, _, _, text = next(shown, ("unnoticed", "", 0, ""))
    assert how == "refused" if name in REFUSED else how in ("reported", "wrong numbers")
    if how == "reported" and "step_limit" not in text:
        assert "device" in text and "CTA" in text and ".py:" in text


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if n % 3 else []) for n, name in enumerate(HARMLESS)]
)
def test_what_does_no_harm(name):
    """If the emulator ever reports one of these, the change is a defect."""
    change = HARMLESS[name]
    (kernel,) = change.kernels
    shown = outcomes.first_that_shows(source.rewritten(*change.changes), [(kernel, *OF_ALL[kernel])], (0, 1, 2))
    assert change.why and next(shown, None) is None


def test_no_row_drops_out():
    """`make test` runs a few of the rows, and of the others only this."""
    for name, row in ROWS:
        assert row.changes and row.kernels and OF_ALL.keys() >= {*row.kernels}, name
        source.rewritten(*row.changes)  # It says which text of steps.csv the function no longer has.
    assert len(ROWS) >= COUNTED, "steps.csv has lost rows: bring them back, or lower COUNTED and say why"


def test_text_that_there_is_not():
    function = "collectives.communicator.wait_for_block"
    with pytest.raises(AssertionError, match="has no text"), source.rewritten((function, "no such text", "")):
        pass
