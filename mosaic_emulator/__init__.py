"""Run Mosaic GPU kernels of several devices on the CPU, and find their races and deadlocks.

It runs any `plgpu.kernel`, and imports nothing of `overlap`. See README.md and docs/EMULATION.md. The public names load
at their first use. tests/emulation/test_layers.py says which modules a module may import.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from .cores import core_count, core_count_of_devices

if TYPE_CHECKING:
    from .entry.context import emulate
    from .entry.lowering import enable
    from .entry.sequence import run_sequence
    from .execution.program import Launch
    from .foundations.errors import DeadlockError, EmulationError, ProtocolError, RaceError, StepLimitError
    from .foundations.interrupt import stoppable
    from .state.runs import Event, Run

__all__ = [
    "DeadlockError", "EmulationError", "Event", "Launch", "ProtocolError", "RaceError", "Run", "StepLimitError",
    "core_count", "core_count_of_devices", "emulate", "enable", "run_sequence", "stoppable",
]  # fmt: skip

# The modules of these names. `__getattr__` imports from there at run time what the imports above declare.
_HOMES = {
    "entry.context": ["emulate"],
    "entry.lowering": ["enable"],
    "entry.sequence": ["run_sequence"],
    "execution.program": ["Launch"],
    "foundations.errors": ["DeadlockError", "EmulationError", "ProtocolError", "RaceError", "StepLimitError"],
    "foundations.interrupt": ["stoppable"],
    "state.runs": ["Event", "Run"],
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        for home, names in _HOMES.items():
            if name in names:
                value = globals()[name] = getattr(importlib.import_module(f".{home}", __name__), name)
                return value
        raise AttributeError(f"module 'mosaic_emulator' has no attribute {name!r}")
