"""Flags of XLA that break fused kernels: see docs/DESIGN.md, "What a fused kernel needs of XLA".

The library only reports such flags and sets none: XLA ends the process at a flag that it does not know.
"""

from __future__ import annotations

import os
import re

# With these values XLA may run two kernels at the same time that its schedule has one after the other.
_CONCURRENT_MODES = ("CONCURRENT", "CONCURRENT_REGIONS")
_SCHEDULING_MODE = "xla_gpu_command_buffer_scheduling_mode"


def breaking(flags: str | None = None) -> list[str]:
    """Which of XLA's flags break fused kernels: a sentence for each, with the way out.

    Args:
      flags: the text of the environment variable XLA_FLAGS; None: read the variable.

    Examples:
      >>> from overlap import _xla_flags
      >>> _xla_flags.breaking("--xla_gpu_enable_latency_hiding_scheduler=true")
      []
    """
    given = dict(
        re.findall(r"--(\w+)(?:=([^\s]*))?", os.environ.get("XLA_FLAGS", "") if flags is None else flags)
    )  # Of a flag that is given twice, the last one counts.
    mode = given.get(_SCHEDULING_MODE, "").strip("'\"").upper()
    if mode not in _CONCURRENT_MODES:
        return []
    return [
        f"XLA_FLAGS has --{_SCHEDULING_MODE}={mode}: within a CUDA graph XLA then runs kernels at the same time that "
        "do not depend on each other. Two fused kernels may each hold some cores of one GPU and wait for the other's "
        "on a peer, for ever: leave the flag out (LHS is its default), or set it to SERIALIZE"
    ]
