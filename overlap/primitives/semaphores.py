"""Semaphores in global memory, used as flags that only grow, and the fence that follows a wait."""

from __future__ import annotations

import math

from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from overlap import _compat
from overlap.primitives.addresses import FLAG_BYTES, TABLE_FLAGS
from overlap.primitives.arguments import in_kernel, require_constant, require_index, require_semaphore
from overlap.primitives.peers import PeerGroup, require_group
from overlap.primitives.types import Index, SemaphoreRef

# XLA lays out the memory of collective kernels in one arena. NCCL's windows (one process per GPU) must begin at
# multiples of 4096 bytes there, which XLA does not ensure (openxla/xla#47406). So whatever a kernel adds is padded to
# that size.
_WINDOW_BYTES = 4096
_COUNT_SIGNALS = "signal by a constant, and let the waiter wait for the sum of the signals"


def shared_semaphores(*shapes: tuple[int, ...], told: bool = False) -> tuple[SemaphoreRef, ...]:
    """Returns semaphores in global memory that all CTAs of a device share and that peers can reach.

    All semaphores are zero at launch.

    Call it once, first in the kernel's body. (Semaphores among a kernel's `scratch_types` are private to each CTA: a
    wait for a signal of another CTA would hang.)

    Args:
      *shapes: the shape of each array of semaphores.
      told: whether a table of the peers' addresses precedes the semaphores (`overlap/primitives/addresses.py`).

    Returns:
      One array of semaphores for each shape.

    Raises:
      NotImplementedError: the kernel is mapped by `jax.vmap`, or the call is inside `plgpu.warp_map`.
      ValueError: the call is outside of a kernel.

    Examples:
      `counter, arrived = shared_semaphores((1,), (group.size,))`
    """
    if _compat.has_axis_of_jax():
        raise NotImplementedError(
            "`shared_semaphores` was called in a kernel that `jax.vmap` maps (or inside `plgpu.warp_map`, where it may "
            "not be called). `jax.vmap` runs all elements in one launch with the same flags and counters, and the "
            "results would be wrong: map with `jax.lax.map`, give the function that calls the kernel to "
            "`jax.custom_batching.sequential_vmap` before `jax.vmap`, or give the kernel a batch dimension"
        )
    table = [(TABLE_FLAGS,)] if told else []
    with in_kernel("shared_semaphores"):
        flags = [pl.get_global(plgpu.SemaphoreType.REGULAR(shape)) for shape in (*table, *shapes)]
    # Whole windows, for kernels whose flags lie behind these.
    filler = -sum(math.prod(shape) for shape in (*table, *shapes)) % (_WINDOW_BYTES // FLAG_BYTES)
    if filler:
        pl.get_global(plgpu.SemaphoreType.REGULAR((filler,)))
    return tuple(flags[len(table) :])


def semaphore_signal(flag: SemaphoreRef, increment: int = 1) -> None:
    """Raises a flag of this device.

    Call it in one warp or in one warpgroup. It signals once.

    Ordering: a release at GPU scope. It is for waiters on this device only (`semaphore_wait`).

    Args:
      flag: one semaphore, as `flags.at[i]`.
      increment: by how much; a Python int of at least 1.

    Raises:
      TypeError: `flag` is no reference, or `increment` is not a Python int.
      ValueError: `increment` is less than 1.
    """
    require_semaphore("semaphore_signal", "flag", flag)
    require_constant("semaphore_signal", "increment", increment, 1, _COUNT_SIGNALS)
    plgpu.semaphore_signal(flag, increment, memory_scope="gpu")


def semaphore_signal_peer(flag: SemaphoreRef, group: PeerGroup, position: Index, increment: int = 1) -> None:
    """Raises a flag of the peer at `position`.

    Call it in one warp or in one warpgroup. It signals once. In a group of one device the peer is the device itself.

    Ordering: a release at system scope. The peer waits with `semaphore_wait_peer`. If the flag stands for bytes that
    this device has stored, they must have landed (`wait_stores_landed`).

    Args:
      flag: one semaphore, as `flags.at[i]`: this device's own reference. The peer's semaphore at the same place is
        raised.
      group: the peers.
      position: the peer's position in the group: a Python int or an int32 scalar.
      increment: by how much; a Python int of at least 1.

    Raises:
      TypeError: `flag` is no reference, `group` is no `PeerGroup`, `position` is not an integer scalar, or `increment`
        is not a Python int.
      ValueError: `position` is a Python int outside of the group, or `increment` is less than 1.
    """
    require_group("semaphore_signal_peer", group)
    require_semaphore("semaphore_signal_peer", "flag", flag)
    require_index("semaphore_signal_peer", "position", position, "a position in the group", group.size)
    require_constant("semaphore_signal_peer", "increment", increment, 1, _COUNT_SIGNALS)
    device_id = None if group.size == 1 else group.device_id(position)
    plgpu.semaphore_signal(flag, increment, device_id=device_id)


def semaphore_wait(flag: SemaphoreRef, value: Index) -> None:
    """Waits until CTAs of this device have raised a flag to at least `value`. The flag keeps its value.

    Call it in one warp or in one warpgroup. The wait has no time limit. For a flag that peers raise there is
    `semaphore_wait_peer`.

    Ordering: an acquire at GPU scope. Before a TMA load of the data that the flag stands for, call `fence_async_proxy`.

    Args:
      flag: one semaphore, as `flags.at[i]`.
      value: what the flag must reach: a Python int or an int32 scalar, at least 0.

    Raises:
      TypeError: `flag` is no reference, or `value` is not an integer scalar.
      ValueError: `value` is a negative Python int.
    """
    require_semaphore("semaphore_wait", "flag", flag)
    require_index("semaphore_wait", "value", value, "the number that the flag must reach")
    plgpu.semaphore_wait(flag, value, decrement=False, memory_scope="gpu")


def _fence_proxy_async(_: object) -> None:
    mgpu_utils.inline_ptx("fence.proxy.async.global;", has_side_effects=True)


def _converge_warp(_: object) -> None:
    mgpu_utils.inline_ptx("bar.warp.sync 0xffffffff;", has_side_effects=True)


def converge_warp() -> None:
    """Waits until all lanes of the warp are here. Call it at the end of each warp's part of a `plgpu.warp_map`.

    After a `warp_map`, the warps of a warpgroup meet at an aligned barrier, where all lanes of a warp must arrive
    together. If the last thing that a warp does is a copy that one elected lane starts, ptxas makes the other lanes
    branch around the copy, straight to that barrier. The lanes then arrive in two groups, the barrier counts one warp
    too many, and the last warp waits for ever. (Seen on H200, as a kernel that never ended.)
    """
    with in_kernel("converge_warp"):
        plgpu.inline_mgpu()(_converge_warp)()


def fence_async_proxy() -> None:
    """Makes the copy engine's later loads see what a wait on a flag has made visible to this thread.

    Call it between `semaphore_wait` and a TMA load of the data that the flag stands for.
    """
    with in_kernel("fence_async_proxy"):
        plgpu.inline_mgpu()(_fence_proxy_async)()
