"""Checks, where each GPU has a process of its own, that NCCL has address space for the meshes along which kernels talk.

XLA registers its whole memory pool with NCCL, once for each mesh along which fused kernels talk. NCCL maps the pool
into address space that is set aside when the job starts (NCCL_WIN_STRIDE bytes for each GPU and mesh).
"""

from __future__ import annotations

import os

import jax

# A process has about 90 TB of address space for all meshes (H200, CUDA 13: 64 TB could be reserved, 96 TB could not).
_IN_ALL_BYTES = 90 << 40
# For each GPU: a pool of at most 280 GB, registered with one or another flag by XLA's own collectives.
STRIDE_BYTES = 1 << 40
STRIDE_VARIABLE = "NCCL_WIN_STRIDE"
# For each mesh seen, the ids of its devices in mesh order.
_meshes: set[tuple[int, ...]] = set()


def note_mesh(device_ids: tuple[int, ...]) -> None:
    """Counts a mesh. Call it when a kernel that is told its peers' addresses is lowered.

    Args:
      device_ids: the ids of the devices of the kernel's mesh, in mesh order.

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
            f"than can be had: use fewer orders, set {STRIDE_VARIABLE} smaller before the job begins, or use "
            'implementation="xla"'
        )


def require_shared_memory() -> None:
    """Raises NotImplementedError if XLA's memory cannot be shared with the peers' processes."""
    if jax.process_count() == 1:
        return
    if os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR") == "platform":
        raise NotImplementedError(
            "where each GPU has a process of its own, XLA_PYTHON_CLIENT_ALLOCATOR=platform gives kernels memory that "
            "their peers do not see: unset it (or take cuda_async), start one process with all GPUs, or use "
            'implementation="xla"'
        )
