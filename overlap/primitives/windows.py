"""Where each GPU has a process of its own: whether XLA and NCCL can still tell a program its peers' addresses.

For each program with a fused kernel XLA registers its whole memory pool with NCCL anew, and NCCL maps it into address
space that is set aside when the job starts (NCCL_WIN_STRIDE bytes for each GPU). When that is full, the next program
fails. It is given back only when a program is, which nobody here can see; so programs are counted, and before the limit
XLA's implementation takes over.
"""

from __future__ import annotations

import os
from typing import Any

import jax

# Of the address space of a process, for all GPUs of a host together; 96 TB can no longer be had (H200, CUDA 13).
_ALL_WINDOWS_BYTES = 64 << 40
_MOST_WINDOW_BYTES = 16 << 40
STRIDE_VARIABLE = "NCCL_WIN_STRIDE"
# Windows that XLA makes for other things.
_RESERVED = 4
_STEP_BYTES = 4 << 30
_lowered: list[Any] = [None, 0]  # the last program, and how many there were


def stride_bytes(gpus: int) -> int:
    """The address space to set aside for each of so many GPUs of a host."""
    return min(_ALL_WINDOWS_BYTES // max(gpus, 1), _MOST_WINDOW_BYTES)


def note_program(program: Any) -> None:
    """Counts a program in which a kernel that is told its peers' addresses is lowered."""
    if _lowered[0] is not program:
        _lowered[:] = [program, _lowered[1] + 1]


def most_programs() -> int | None:
    """How many programs with such kernels fit; None if nobody can know."""
    stats = jax.local_devices()[0].memory_stats() or {}
    stride, pool = os.environ.get(STRIDE_VARIABLE, ""), stats.get("bytes_limit", 0)
    if not stride.isdigit() or not pool:
        return None
    # In large steps, since all processes must come to the same number.
    return max(int(stride) // (-(-pool // _STEP_BYTES) * _STEP_BYTES) - _RESERVED, 0)


def require_room() -> None:
    """Raises NotImplementedError if one more program would not be told its peers' addresses."""
    if jax.process_count() == 1:
        return
    if os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR") == "platform":
        raise NotImplementedError(
            "where each GPU has a process of its own, XLA_PYTHON_CLIENT_ALLOCATOR=platform gives kernels memory that "
            "their peers do not see: unset it (or take cuda_async), start one process with all GPUs, or use "
            'implementation="xla"'
        )
    most = most_programs()
    if most is not None and _lowered[1] >= most:
        raise NotImplementedError(
            f"{_lowered[1]} programs with fused kernels have been compiled in this process, and NCCL's address space "
            f"({STRIDE_VARIABLE}={os.environ[STRIDE_VARIABLE]}) has room for {most}: put several operations into one "
            "program, let XLA_PYTHON_CLIENT_MEM_FRACTION make the pool smaller that is mapped for each, or use "
            'implementation="xla"'
        )
