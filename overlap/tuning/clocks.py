"""How far the clocks of a host's GPUs are apart, so that what happened on several of them can be put on one time.

Each GPU has a clock of nanoseconds (%globaltimer), and nothing says that two of them agree to the microsecond. So the
first GPU and another one send each other a flag, again and again:

    first GPU     reads its clock: sent;  raises the peer's flag
    other GPU     waits for the flag;  reads its clock: answered;  raises the first one's flag
    first GPU     waits for that;  reads its clock: returned

The peer's clock was read between `sent` and `returned`, so it is ahead of the first one's by at least
`answered - returned` and at most `answered - sent`. Of all exchanges together the tightest bounds hold.

Source: Mills, "Internet time synchronization: the Network Time Protocol" (1991), for the idea of the exchange.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import PartitionSpec as P

from overlap.kernels.launch import sealed
from overlap.primitives import PeerGroup, atomics, board, shared_flags, signal_peer
from overlap.primitives.clique import IN_CLIQUES
from overlap.primitives.integers import in_32_bits
from overlap.primitives.waits import wait_for_word
from overlap.tuning.operations import AXIS

EXCHANGES = 64
_SENT, _RETURNED, _ANSWERED = range(3)
_NAME = "overlap_clocks"


@dataclasses.dataclass(frozen=True)
class Offset:
    """How far a GPU's clock is ahead of the first one's.

    Attributes:
      ns: nanoseconds.
      error_ns: by how much that may be wrong, at most.
    """

    ns: float
    error_ns: float


def offsets(mesh: jax.sharding.Mesh) -> list[Offset]:
    """The offset of each device of a mesh whose only axis is `AXIS`, all of one process. Runs a short kernel."""
    times = np.asarray(program(mesh)())
    times = times.reshape(mesh.size, mesh.size, EXCHANGES, 3, 2)
    ns = np.ascontiguousarray(times).view(np.uint64)[..., 0].astype(np.int64)
    first = ns[0]
    others = [offset(first[d, :, _SENT], ns[d, d, :, _ANSWERED], first[d, :, _RETURNED]) for d in range(1, mesh.size)]
    return [Offset(0.0, 0.0), *others]


def offset(sent: Sequence[int] | Any, answered: Sequence[int] | Any, returned: Sequence[int] | Any) -> Offset:
    """The offset that the exchanges with one device allow; times in nanoseconds, one for each exchange."""
    sent, answered, returned = (np.asarray(times, np.int64) for times in (sent, answered, returned))
    least, most = int((answered - returned).max()), int((answered - sent).min())
    # Clocks that tick coarsely, or drift, can leave nothing between the bounds.
    return Offset((least + most) / 2, abs(most - least) / 2)


def program(mesh: jax.sharding.Mesh) -> Any:
    """A program without arguments that runs the kernel on each device of a mesh along `AXIS`."""
    group = PeerGroup(AXIS, ((AXIS, mesh.size),))
    mapped = jax.shard_map(lambda: _exchange(group), mesh=mesh, in_specs=(), out_specs=P(AXIS), check_vma=False)
    return jax.jit(mapped)


@in_32_bits
def _exchange(group: PeerGroup) -> jax.Array:
    """The kernel: int32 [D, exchanges, 3, 2]; of that only what this device has read of its clock is filled in."""
    out_type = jax.ShapeDtypeStruct((group.size, EXCHANGES, 3, 2), jnp.int32)

    def body(times_gmem: Any) -> None:
        (flags,) = shared_flags((group.size,))
        me = group.me()
        as_first, as_other = (functools.partial(part, group, flags, times_gmem) for part in (_ask, _answer))

        @plgpu.warp_map
        def _one_warp(warp: Any) -> None:
            pl.when(jnp.logical_and(warp == 0, me == 0))(as_first)
            pl.when(jnp.logical_and(warp == 0, me > 0))(as_other)

    body.__name__ = _NAME
    # With the framework's barrier: all devices have begun, and their flags are zero.
    params = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup)
    kernel = plgpu.kernel(body, out_type=out_type, grid=(1,), grid_names=("cta",), compiler_params=params)
    return sealed(kernel, _NAME, mends=(IN_CLIQUES,))()


def _ask(group: PeerGroup, flags: Any, times_gmem: Any) -> None:
    """The first device's part."""

    @pl.loop(1, group.size)
    def _peer(peer: Any) -> None:
        @pl.loop(0, EXCHANGES)
        def _turn(turn: Any) -> None:
            _read_clock(times_gmem.at[peer, turn, _SENT])
            signal_peer(flags.at[0], group, peer)
            _await(group, flags.at[peer], turn + 1, peer)
            _read_clock(times_gmem.at[peer, turn, _RETURNED])


def _answer(group: PeerGroup, flags: Any, times_gmem: Any) -> None:
    """The part of each other one. The first device raises its flag 0, it raises the first one's flag of its number."""
    me = group.me()

    @pl.loop(0, EXCHANGES)
    def _turn(turn: Any) -> None:
        _await(group, flags.at[0], turn + 1, 0)
        _read_clock(times_gmem.at[me, turn, _ANSWERED])
        signal_peer(flags.at[me], group, 0)


def _await(group: PeerGroup, flag: Any, count: Any, peer: Any) -> None:
    wait_for_word(
        flag, count, group, peer, operation=board.describe(_NAME, group), role=board.BEGUN, at_least=True
    )  # fmt: skip


def _read_clock(time_gmem: Any) -> None:
    atomics.inline(_store_time, [time_gmem])


def _store_time(_: Any, pointer: Any) -> None:
    lines = [
        *atomics.BY_LANE_0, ".reg .b64 time;", "mov.u64 time, %globaltimer;", "@first st.global.b64 [$0], time;",
    ]  # fmt: skip
    atomics.ptx(lines, pointer)
