"""Measures how far the clocks of a host's GPUs are apart, to give events on several GPUs a common time.

Each GPU has a clock that counts nanoseconds (%globaltimer). Nothing guarantees that two of them agree to the
microsecond. So the first GPU and each other GPU send each other flags, many times:

    first GPU     reads its clock: sent;  raises the other GPU's flag
    other GPU     waits for the flag;  reads its clock: answered;  raises the first GPU's flag
    first GPU     waits for its flag;  reads its clock: returned

The other GPU read its clock between `sent` and `returned`. So its clock is ahead of the first GPU's by at least
`answered - returned` and at most `answered - sent`. The tightest bounds of all exchanges hold.

Source of the idea: Mills, "Internet time synchronization: the Network Time Protocol" (1991).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import PartitionSpec as P
from numpy.typing import ArrayLike

from overlap.kernels.launch import sealed
from overlap.primitives import PeerGroup, atomics, semaphore_signal_peer, shared_semaphores, stalls
from overlap.primitives.clique import IN_CLIQUES
from overlap.primitives.integers import in_32_bits
from overlap.primitives.types import GmemRef, Index, SemaphoreRef
from overlap.primitives.waits import wait_for_word
from overlap.tuning.operations import AXIS

EXCHANGES = 64
_SENT, _RETURNED, _ANSWERED = range(3)
_NAME = "overlap_clocks"


@dataclasses.dataclass(frozen=True)
class Offset:
    """How far a GPU's clock is ahead of the first GPU's.

    Attributes:
      ns: the offset in nanoseconds.
      error_ns: the largest possible error of `ns`.
    """

    ns: float
    error_ns: float


def offsets(mesh: jax.sharding.Mesh) -> list[Offset]:
    """Measures the offset of each device of `mesh`, whose only axis is `AXIS`. All devices belong to this process."""
    times = np.asarray(program(mesh)())
    times = times.reshape(mesh.size, mesh.size, EXCHANGES, 3, 2)
    ns = np.ascontiguousarray(times).view(np.uint64)[..., 0].astype(np.int64)
    first = ns[0]
    others = [offset(first[d, :, _SENT], ns[d, d, :, _ANSWERED], first[d, :, _RETURNED]) for d in range(1, mesh.size)]
    return [Offset(0.0, 0.0), *others]


def offset(sent: ArrayLike, answered: ArrayLike, returned: ArrayLike) -> Offset:
    """The offset of one device, from the times of its exchanges in nanoseconds, one for each exchange."""
    sent, answered, returned = (np.asarray(times, np.int64) for times in (sent, answered, returned))
    least, most = int((answered - returned).max()), int((answered - sent).min())
    # If clocks tick coarsely or drift, the lower bound can be above the upper bound.
    return Offset((least + most) / 2, abs(most - least) / 2)


def program(mesh: jax.sharding.Mesh) -> Any:
    """Makes a program without arguments that runs the kernel on each device of `mesh`, whose only axis is `AXIS`."""
    group = PeerGroup(AXIS, ((AXIS, mesh.size),))
    mapped = jax.shard_map(lambda: _exchange(group), mesh=mesh, in_specs=(), out_specs=P(AXIS), check_vma=False)
    return jax.jit(mapped)


@in_32_bits
def _exchange(group: PeerGroup) -> jax.Array:
    """Runs the kernel. Returns int32 [D, exchanges, 3, 2]: 64-bit times as pairs. Only this device's times are set."""
    out_type = jax.ShapeDtypeStruct((group.size, EXCHANGES, 3, 2), jnp.int32)

    def body(times_gmem: GmemRef) -> None:
        (flags,) = shared_semaphores((group.size,))
        me = group.me()
        as_first, as_other = (functools.partial(part, group, flags, times_gmem) for part in (_ask, _answer))

        @plgpu.warp_map
        def _one_warp(warp: Index) -> None:
            pl.when(jnp.logical_and(warp == 0, me == 0))(as_first)
            pl.when(jnp.logical_and(warp == 0, me > 0))(as_other)

    body.__name__ = _NAME
    # Pallas's barrier runs before the kernel: all devices have begun, and their flags are zero.
    params = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup)
    kernel = plgpu.kernel(body, out_type=out_type, grid=(1,), grid_names=("cta",), compiler_params=params)
    return sealed(kernel, _NAME, patches=(IN_CLIQUES,))()


def _ask(group: PeerGroup, flags: SemaphoreRef, times_gmem: GmemRef) -> None:
    """The first device's role: exchanges flags with each other device in turn, and stores `sent` and `returned`."""

    @pl.loop(1, group.size)
    def _peer(peer: Index) -> None:
        @pl.loop(0, EXCHANGES)
        def _one(index: Index) -> None:
            _read_clock(times_gmem.at[peer, index, _SENT])
            semaphore_signal_peer(flags.at[0], group, peer)
            _await(group, flags.at[peer], index + 1, peer)
            _read_clock(times_gmem.at[peer, index, _RETURNED])


def _answer(group: PeerGroup, flags: SemaphoreRef, times_gmem: GmemRef) -> None:
    """Each other device's role: waits for its flag 0, stores `answered`, and raises the first device's flag `me`."""
    me = group.me()

    @pl.loop(0, EXCHANGES)
    def _one(index: Index) -> None:
        _await(group, flags.at[0], index + 1, 0)
        _read_clock(times_gmem.at[me, index, _ANSWERED])
        semaphore_signal_peer(flags.at[me], group, 0)


def _await(group: PeerGroup, flag: SemaphoreRef, count: Index, peer: Index) -> None:
    wait_for_word(flag, count, group, peer, operation=stalls.describe(_NAME, group), role=stalls.BEGUN, at_least=True)


def _read_clock(time_gmem: GmemRef) -> None:
    """Stores the GPU's clock at `time_gmem`, by one thread of the warp."""
    atomics.inline(_store_time, [time_gmem])


def _store_time(_: Any, pointer: Any) -> None:
    lines = [
        *atomics.BY_LANE_0,
        ".reg .b64 time;",
        "mov.u64 time, %globaltimer;",
        "@first st.global.b64 [$0], time;",
    ]
    atomics.ptx(lines, pointer)
