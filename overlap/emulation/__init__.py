"""Run Mosaic GPU kernels of several devices on the CPU, and find their races and deadlocks.

A wing of its own: it imports nothing of `overlap` and runs any `plgpu.kernel`. See docs/EMULATION.md.
"""

from .context import Event, Run, core_count, emulate
from .core_counts import core_count_of_devices
from .errors import DeadlockError, EmulationError, ProtocolError, RaceError, StepLimitError
from .lowering import enable
from .replay import run_sequence
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
]
