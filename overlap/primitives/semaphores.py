"""Flags: semaphores in global memory that only grow, and the fence that goes with them."""

from __future__ import annotations

import math
from typing import Any

from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from overlap.primitives.addresses import FLAG_BYTES, TABLE_FLAGS
from overlap.primitives.peers import PeerGroup

# XLA lays out what collective kernels use in one arena, and NCCL's windows (one process per GPU) must begin at
# multiples of 4096 bytes there, which XLA does not see to (openxla/xla#47406). So whatever a kernel adds is padded.
_WINDOW_BYTES = 4096


def shared_semaphores(*shapes: tuple[int, ...], told: bool = False) -> tuple[Any, ...]:
    """Flags shared by all CTAs of a device, zero at launch: one array of them per shape. Call once, first in the body.

    (Semaphores among a kernel's `scratch_types` are private to each CTA: waited on from another one, they hang.)

    Args:
      *shapes: the shapes.
      told: whether a table of the peers' addresses stands in front of the flags (`overlap/primitives/addresses.py`).
    """
    table = [(TABLE_FLAGS,)] if told else []
    flags = [pl.get_global(plgpu.SemaphoreType.REGULAR(shape)) for shape in (*table, *shapes)]
    filler = -sum(math.prod(shape) for shape in (*table, *shapes)) % (_WINDOW_BYTES // FLAG_BYTES)
    if filler:
        pl.get_global(plgpu.SemaphoreType.REGULAR((filler,)))
    return tuple(flags[len(table) :])


def semaphore_signal(flag: Any, increment: Any = 1) -> None:
    """Raises a flag of this device. A release at GPU scope: for waiters on this device only."""
    plgpu.semaphore_signal(flag, increment, memory_scope="gpu")


def semaphore_signal_peer(flag: Any, group: PeerGroup, position: Any, increment: Any = 1) -> None:
    """Raises the flag of the device at `position` of the ring. A release at system scope."""
    plgpu.semaphore_signal(flag, increment, device_id=None if group.size == 1 else group.device_id(position))


def semaphore_wait(flag: Any, value: Any) -> None:
    """Waits until a flag that this device's CTAs raise has reached `value`, and leaves it as it is. An acquire.

    For one that other devices raise, see `waits.wait_for_word`.
    """
    plgpu.semaphore_wait(flag, value, decrement=False, memory_scope="gpu")


def _fence_proxy_async(_: Any) -> None:
    mgpu_utils.inline_ptx("fence.proxy.async.global;", has_side_effects=True)


def _converge_warp(_: Any) -> None:
    mgpu_utils.inline_ptx("bar.warp.sync 0xffffffff;", has_side_effects=True)


def converge_warp() -> None:
    """Waits until all lanes of the warp are here. To be called at the end of each warp's part of a `plgpu.warp_map`.

    The warps of a warpgroup meet behind it at an aligned barrier, where each must arrive as one. But of a copy that one
    elected lane starts, ptxas makes a branch around it for the others, and if the copy is the last thing that the warp
    does, the branch ends at that barrier: the lanes arrive in two groups, the barrier counts one warp too many, and the
    last warp waits there for ever. (Seen on H200, as a kernel that never ended.)
    """
    plgpu.inline_mgpu()(_converge_warp)()


def fence_async_proxy() -> None:
    """Lets the copy engine's later loads see what a wait on a flag has made visible to this thread."""
    plgpu.inline_mgpu()(_fence_proxy_async)()
