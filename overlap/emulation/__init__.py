"""Run Mosaic GPU kernels of several devices on the CPU, and find their races and deadlocks.

The emulator imports nothing else of `overlap` and runs any `plgpu.kernel`. See docs/EMULATION.md. The public names load
at their first use. tests/emulation/test_emulator_layers.py says which modules a module may import.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from .cores import core_count, core_count_of_devices

if TYPE_CHECKING:
    from .entry.context import emulate
    from .entry.lowering import enable
    from .entry.replay import run_sequence
    from .execution.program import Launch
    from .foundations.errors import DeadlockError, EmulationError, ProtocolError, RaceError, StepLimitError
    from .foundations.interrupt import stoppable
    from .state.runs import Event, Run

__all__ = [
    "DeadlockError",
    "EmulationError",
    "Event",
    "Launch",
    "ProtocolError",
    "RaceError",
    "Run",
    "StepLimitError",
    "core_count",
    "core_count_of_devices",
    "emulate",
    "enable",
    "run_sequence",
    "stoppable",
]

# For each public name, its module. `__getattr__` imports from there at run time what the imports above declare.
_HOMES = {
    "DeadlockError": "foundations.errors",
    "EmulationError": "foundations.errors",
    "Event": "state.runs",
    "Launch": "execution.program",
    "ProtocolError": "foundations.errors",
    "RaceError": "foundations.errors",
    "Run": "state.runs",
    "StepLimitError": "foundations.errors",
    "emulate": "entry.context",
    "enable": "entry.lowering",
    "run_sequence": "entry.replay",
    "stoppable": "foundations.interrupt",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module 'overlap.emulation' has no attribute {name!r}")
        value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
        globals()[name] = value
        return value
