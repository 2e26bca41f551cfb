"""The emulator's public names: `mosaic_emulator` runs Mosaic GPU kernels on the CPU. See docs/EMULATION.md.

The names load at their first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mosaic_emulator
from mosaic_emulator import core_count, core_count_of_devices

if TYPE_CHECKING:
    from mosaic_emulator import (
        DeadlockError,
        EmulationError,
        Event,
        Launch,
        ProtocolError,
        RaceError,
        Run,
        StepLimitError,
        emulate,
        enable,
        run_sequence,
        stoppable,
    )

__all__ = [
    "DeadlockError", "EmulationError", "Event", "Launch", "ProtocolError", "RaceError", "Run", "StepLimitError",
    "core_count", "core_count_of_devices", "emulate", "enable", "run_sequence", "stoppable",
]  # fmt: skip

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module 'overlap.emulation' has no attribute {name!r}")
        value = globals()[name] = getattr(mosaic_emulator, name)
        return value
