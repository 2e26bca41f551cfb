"""The transport *pull*: every device reads each peer's shard itself.

The communicator serves what is pushed to peers as well (`scattered.py`).

    communicator   at the start: looks for the peers; the own shard's chunks, where all shards are joined
                   for each piece of the rows' scales that it draws, if rows have such
                   for each chunk that it draws, in the order in which tiles need them:
                       peer's shard → shared memory → scratch; when it has landed, raise the flag of its block
                   takes leave of the peers; the own shard's chunks, if the gathered operand is asked for
    producer       waits for the flag of what it loads, at GPU scope

A flag never crosses NVLink: the only remote signals are the handshakes', which wait until the peers' inputs are ready
and keep a device's own alive until all peers have read them. Remote data lands once in local scratch, because reads of
a peer are not cached in the local L2.

Shape legend: chunk: `PullPlan`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu

from overlap.kernels.config import Config
from overlap.kernels.grid import cta
from overlap.primitives import (
    HANDSHAKE_FLAGS,
    Handshake,
    PeerGroup,
    PullPlan,
    draw,
    each_drawn,
    fence_async_proxy,
    marks,
    pull_chunks,
    wait_at_least,
)
from overlap.primitives.marks import Work

WHY_DIRECT = "all peers of a host are one hop away behind its switch"


@dataclasses.dataclass(frozen=True)
class Chunks:
    """What is copied in chunks. See `pull_chunks`, whose arguments these are.

    Attributes:
      count: how many chunks.
      chunking: their sizes.
      at: from a chunk's index to its shard and place there.
      source: from there to the reference.
      destination: likewise.
      landed: raises the flag.
      ready: waits until a chunk may be loaded; None: all may be.
      send: starts the copies of a chunk that has been loaded, in place of one to `destination`.
    """

    count: int
    chunking: Any
    at: Callable[[Any], tuple[Any, Any, Any]]
    source: Callable[..., Any]
    destination: Callable[..., Any]
    landed: Callable[[Any, Any, Any], None] = lambda *_: None
    ready: Callable[[Any, Any, Any], None] | None = None
    send: Callable[..., None] | None = None


@dataclasses.dataclass(frozen=True)
class Communicator:
    """The work of one CTA's communicator warp.

    Attributes:
      name: the operation's, for whoever waits too long.
      ring: the devices.
      config: sizes.
      flags: those of the handshake, and a counter for the own shard's chunks if there are such.
      smem: as `smem_types` says.
      peers: the peers' chunks.
      own: the own shard's; None if these are not copied.
      own_first: whether tiles wait for these, so that they come before the peers'.
      results: chunks that come behind the peers', and their slots in the same shared memory: (chunks, slots).
      scale_transfers: pieces of scales that come before the chunks.
      pull_scales: copies one of these, by its index.
      only: the distance of the one peer whose memory is read or written; None: that of all peers.
    """

    name: str
    group: PeerGroup
    config: Config
    flags: tuple[Any, ...]
    smem: tuple[Any, Any]
    peers: Chunks
    own: Chunks | None = None
    own_first: bool = False
    results: tuple[Chunks, Any] | None = None
    scale_transfers: int = 0
    pull_scales: Callable[[Any], None] | None = None
    only: int | None = None

    def run(self) -> None:
        """To be called by that warp, once (`Hooks.communicate`)."""
        behind = 0 if self.results is None else self.results[0].count
        transfers = self.scale_transfers + self.peers.count + behind
        handshake = Handshake(self.flags[0], self.group, cta(self.config), self.name, transfers, self.only)
        number, carried, first = handshake.begin(), 0, handshake.looks
        if self.own_first:
            self._copy_own()
        handshake.await_peers()
        marks.now(Work.COPY)
        if self.pull_scales is not None:
            pull_scales, looks = self.pull_scales, handshake.looks
            first += self.scale_transfers
            number, carried = each_drawn(
                handshake.counter, number, first, handshake.items, lambda number: pull_scales(number - looks)
            )
        carried += self._copy(self.peers, number, first, handshake.counter)
        if self.results is not None:
            # From a counter of their own: each warp comes to these when it finds no chunk before them any more.
            chunks, buffers_smem = self.results
            counter = self.flags[1].at[0]
            carried += self._copy(chunks, draw(counter, chunks.count), 0, counter, buffers_smem)
        handshake.leave(carried)
        if not self.own_first:
            self._copy_own()

    def _copy_own(self) -> None:
        if self.own is not None:
            counter = self.flags[1].at[0]
            self._copy(self.own, draw(counter, self.own.count), 0, counter)

    def _copy(self, chunks: Chunks, number: Any, first: int, counter: Any, buffers_smem: Any = None) -> Any:
        of_chunks, loaded = self.smem
        buffers_smem = of_chunks if buffers_smem is None else buffers_smem
        return pull_chunks(
            number,
            (first, first + chunks.count),
            counter,
            chunks.chunking,
            at=chunks.at,
            source=chunks.source,
            destination=chunks.destination,
            landed=chunks.landed,
            slots_smem=buffers_smem,
            loaded=loaded,
            ready=chunks.ready,
            send=chunks.send,
        )


def flag_shapes(flags: tuple[int, ...], *, copies_own: bool) -> tuple[tuple[int, ...], ...]:
    """Flags of blocks, of the handshake, and a counter if the own shard's chunks are copied as well."""
    return flags, HANDSHAKE_FLAGS, *([(1,)] if copies_own else [])


def smem_types(config: Config, plan: PullPlan, dtype: Any, scales: Any = None, results: Any = None) -> tuple[Any, Any]:
    """Chunk buffers with their barriers. `scales`, of this type, come first through the same memory, `results` last."""
    slots = plgpu.SMEM((config.pull.chunk_buffers, plan.rows, plan.cols), dtype)
    if scales is not None:
        slots = plgpu.RefUnion(slots, scales)
    if results is not None:
        slots = plgpu.RefUnion(slots, plgpu.SMEM((config.pull.chunk_buffers, results.rows, results.cols), dtype))
    return slots, plgpu.Barrier(num_arrivals=1, num_barriers=config.pull.chunk_buffers)


def wait_for_block(flag: Any, times: Any) -> None:
    """Waits until a block has landed, whose flag is raised so many times; TMA may then load from it."""
    wait_at_least(flag, times)
    fence_async_proxy()
