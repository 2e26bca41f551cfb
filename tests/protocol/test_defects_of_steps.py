"""Each defect of `defects/steps.py` is reported, or shows in the numbers; and what does no harm is not reported."""

from __future__ import annotations

import pytest

from tests.protocol.defects import outcomes, source, steps
from tests.protocol.defects.kernels import KERNELS

pytestmark = pytest.mark.one_jax
OF_ALL = KERNELS | steps.PROGRAMS
# jax refuses the shapes of these kernels.
REFUSED = {"row scales along columns", "row scales along columns, joined"}
# `make test` runs each defect of the handshakes, and every second other one, in one kernel.
FAST = {"handshakes": 1, "gathers": 2, "rings": 2, "sums": 2, "mainloops": 3}


def _cases():
    for group, rows in steps.GROUPS.items():
        for number, (name, (kernels, *changes)) in enumerate(rows.items()):
            for place, kernel in enumerate((kernels,) if isinstance(kernels, str) else kernels):
                fast = place == 0 and number % FAST[group] == 0
                marks = [] if fast else pytest.mark.slow
                yield pytest.param(name, kernel, changes, id=f"{group}-{name}-{kernel}", marks=marks)


@pytest.mark.parametrize(("name", "kernel", "changes"), _cases())
def test_a_defect_shows(name, kernel, changes):
    shown = outcomes.first_that_shows(source.rewritten(*changes), [(kernel, *OF_ALL[kernel])])
    how, _, _, text = next(shown, ("unnoticed", "", 0, ""))
    assert how == "refused" if name in REFUSED else how in ("reported", "wrong numbers")
    if how == "reported":
        assert "device" in text and "CTA" in text and ".py:" in text


@pytest.mark.parametrize("name", steps.HARMLESS)
def test_what_does_no_harm(name):
    """If the emulator ever reports one of these, the change is a defect."""
    kernel, _, *changes = steps.HARMLESS[name]
    shown = outcomes.first_that_shows(source.rewritten(*changes), [(kernel, *OF_ALL[kernel])], (0, 1, 2))
    assert next(shown, None) is None


def test_text_that_there_is_not():
    with pytest.raises(AssertionError, match="has no text"), source.rewritten((steps.BLOCK, "no such text", "")):
        pass
