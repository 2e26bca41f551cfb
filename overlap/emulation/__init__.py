"""Run Mosaic GPU kernels of several devices on the CPU, and find their races and deadlocks.

The emulator imports nothing else of `overlap` and runs any `plgpu.kernel`. See docs/EMULATION.md. The public names load
at their first use. tests/emulation/test_emulator_layers.py says which modules a module may import.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .cores import core_count

if TYPE_CHECKING:
    from .context import emulate
    from .core_counts import core_count_of_devices
    from .errors import DeadlockError, EmulationError, ProtocolError, RaceError, StepLimitError
    from .interrupt import stoppable
    from .lowering import enable
    from .replay import run_sequence
    from .runs import Event, Run
    from .sequence import Launch

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
    "DeadlockError": "errors",
    "EmulationError": "errors",
    "Event": "runs",
    "Launch": "sequence",
    "ProtocolError": "errors",
    "RaceError": "errors",
    "Run": "runs",
    "StepLimitError": "errors",
    "core_count_of_devices": "core_counts",
    "emulate": "context",
    "enable": "lowering",
    "run_sequence": "replay",
    "stoppable": "interrupt",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'overlap.emulation' has no attribute {name!r}")
        value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
        globals()[name] = value
        return value
