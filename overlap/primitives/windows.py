"""Checks, where each GPU has a process of its own, that NCCL has address space for one more program with fused kernels.

For each program with a fused kernel, XLA registers its whole memory pool with NCCL anew. NCCL maps the pool into
address space that is set aside when the job starts (NCCL_WIN_STRIDE bytes for each GPU). When that space is full, the
next program fails. The space is freed only when a program is freed, which cannot be observed here. So programs are
counted, and before the limit XLA's implementation takes over.
"""

from __future__ import annotations

import os
from typing import Any

import jax

# The address space for all GPUs of a host together, for each mesh along which kernels talk (each mesh is a communicator
# of NCCL's). A process has some 90 TB for all meshes (H200, CUDA 13: 64 TB could be reserved, 96 TB could not).
_OF_ONE_MESH_BYTES = 16 << 40
_IN_ALL_BYTES = 90 << 40
_LEAST_STRIDE_BYTES = 4 << 40
STRIDE_VARIABLE = "NCCL_WIN_STRIDE"
# The number of NCCL windows (memory that peers can reach) to leave free for XLA's own collectives.
_RESERVED = 4
_STEP_BYTES = 4 << 30
# The program lowered last, and the number of programs lowered so far.
_lowered: list[Any] = [None, 0]
# For each mesh seen, the ids of its devices in mesh order.
_meshes: set[tuple[int, ...]] = set()


def stride_bytes(gpus: int) -> int:
    """Returns the bytes of address space to set aside for each GPU of a host with `gpus` GPUs."""
    return max(_OF_ONE_MESH_BYTES // max(gpus, 1), _LEAST_STRIDE_BYTES)


def note_program(program: Any, device_ids: tuple[int, ...]) -> None:
    """Counts a program toward `most_programs`. Call it when a kernel that is told its peers' addresses is lowered.

    Args:
      program: the program that the kernel belongs to. It is counted once if its kernels are lowered one after the
      other. device_ids: the ids of the devices of the kernel's mesh, in mesh order.

    Raises:
      NotImplementedError: there is no address space for one more mesh.
    """
    _meshes.add(device_ids)
    stride = os.environ.get(STRIDE_VARIABLE, "")
    needed = len(_meshes) * len(device_ids) * int(stride) if stride.isdigit() else 0
    if needed > _IN_ALL_BYTES:
        raise NotImplementedError(
            f"fused kernels run on {len(_meshes)} meshes of different devices, or of the same in another order, and "
            f"NCCL would set aside {STRIDE_VARIABLE}={stride} for each GPU of each, {needed >> 40} TB, which is more "
            f"than can be had: use fewer orders, set {STRIDE_VARIABLE} smaller before the job begins (then fewer "
            'programs fit), or use implementation="xla"'
        )
    if _lowered[0] is not program:
        _lowered[:] = [program, _lowered[1] + 1]


def most_programs() -> int | None:
    """Returns how many programs with fused kernels NCCL's address space can hold; None if that is not known."""
    stats = jax.local_devices()[0].memory_stats() or {}
    stride, pool = os.environ.get(STRIDE_VARIABLE, ""), stats.get("bytes_limit", 0)
    if not stride.isdigit() or not pool:
        return None
    # The pool's size may differ a little from process to process. It is rounded up to large steps, so that all
    # processes compute the same number.
    return max(int(stride) // (-(-pool // _STEP_BYTES) * _STEP_BYTES) - _RESERVED, 0)


def require_room() -> None:
    """Raises NotImplementedError if XLA could not tell one more program its peers' addresses."""
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
