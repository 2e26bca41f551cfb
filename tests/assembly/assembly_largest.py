"""The kernel classes that need the most registers; `tests/assembly/assembly_space.py` defines tile and ending."""

from __future__ import annotations

from typing import Any

from overlap.kernels.hopper.limits import MOST_ACCUMULATED

# Pairs (tile, ending) for which a compute thread needs more than 160 registers. They come from the table of registers
# that `python -m tests.assembly.sweep` writes. The list also has three small tiles that need far more registers than
# tiles of similar sizes.
MOST_REGISTERS: tuple[tuple[tuple[Any, ...], tuple[bool, int, bool, bool, bool]], ...] = (
    ((256, 128, 2, "cooperative", False), (True, 1, True, True, False)),
    ((256, 128, 2, "cooperative", False), (False, 1, False, True, False)),
    ((128, 256, 2, "cooperative", False), (False, 1, True, True, False)),
    ((128, 256, 2, "cooperative", False), (False, 1, False, True, False)),
    ((128, 256, 2, "cooperative", False), (True, 1, True, True, False)),
    ((128, 64, 2, "cooperative", False), (True, 1, True, False, False)),
    ((256, 64, 2, "cooperative", False), (True, 1, True, False, False)),
    ((64, 256, 4, "pingpong", False), (False, 1, False, True, False)),
    ((128, 128, 2, "pingpong", False), (True, 1, True, True, False)),
    ((MOST_ACCUMULATED, 256, 2, "cooperative", True), (True, 1, False, True, False)),
    ((MOST_ACCUMULATED, 128, 2, "pingpong", True), (True, 1, False, True, False)),
    ((MOST_ACCUMULATED // 2, 256, 2, "pingpong", True), (False, 1, False, True, False)),
    ((MOST_ACCUMULATED, 256, 2, "cooperative", True), (False, 1, True, True, False)),
)
