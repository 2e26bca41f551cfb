"""Tests that the emulator reports and gives up a launch that some devices never reach, instead of waiting silently."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from overlap.emulation import EmulationError
from overlap.emulation.entry import lowering


def test_devices_that_do_not_come_are_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(lowering, "_REPORT_AFTER_S", 0.05)
    monkeypatch.setattr(lowering, "_MEETING_TIMEOUT_S", 0.1)
    program: Any = None  # The test never runs the program.
    launcher = lowering._Launcher(program, {"x": 2, "y": 2}, "sum")
    with caplog.at_level(logging.WARNING, "overlap"), pytest.raises(EmulationError, match=r"'sum': after 0.1 s"):
        launcher(2, np.zeros(1))
    assert "'sum': after 0.05 s devices [0, 1, 3] of 4 have not reached it" in caplog.text
