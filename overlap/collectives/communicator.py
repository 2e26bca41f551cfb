"""Implements the communicator warp, which copies chunks between this device and its peers.

A handshake with the peers comes before the copies, and another one after them. Gathers by *pull* use the communicator
to read the peers' shards. Sums over devices (`blocks_kernel.py`) use it to send parts to peers.

    communicator   at the start: looks for the peers; copies the own shard's chunks, if tiles read these copies
                   for each transfer of scales that it draws, if rows have scales: pulls the scales
                   for each chunk that it draws, in the order in which tiles need them:
                       peer's shard → shared memory → scratch; when the chunk has landed, raises the flag of its block
                   takes leave of the peers; copies the own shard's chunks, if the gathered operand is asked for
    producer       before it loads from scratch: waits for the flag of the rows, at GPU scope

In a gather by pull no flag crosses NVLink: only the two handshakes send signals to peers. The first handshake waits
until the peers' inputs are ready. The second keeps this device's inputs alive until all peers have read them. A peer's
data are copied once to local scratch, because reads from a peer are not cached in the local L2.

The sizes of chunks are those of a `Chunking` (`overlap/primitives/copies.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from overlap.kernels.config import Config
from overlap.kernels.grid import cta
from overlap.primitives import (
    HANDSHAKE_FLAGS,
    Chunking,
    Handshake,
    PeerGroup,
    copy_chunks,
    draw,
    each_drawn,
    fence_async_proxy,
    marks,
    semaphore_wait,
)
from overlap.primitives.marks import Work
from overlap.primitives.types import BarrierRef, GmemRef, Index, ScratchType, SemaphoreRef, SmemRef

# Why "pull" and "push" are chosen where the caller names no transport.
WHY_DIRECT = "all peers of a host are one hop away behind its switch"

# The sizes of chunks: a `Chunking`, or anything with the same `rows`, `cols`, `short` and `lacks`.
type ChunkSizes = Any
# What tells the functions of `Chunks` where a chunk belongs: often a step, or a device and a batch element.
type Shard = Any


@dataclasses.dataclass(frozen=True)
class Chunks:
    """The chunks to be copied, and functions that say from where to where. See the arguments of `copy_chunks`.

    Attributes:
      count: number of chunks.
      chunking: the sizes of the chunks: a `Chunking`, or `Strips`.
      at: maps a chunk's index to the chunk's shard, and to its first row and column in that shard.
      source: maps the shard, rows and columns of a chunk to the reference from which the chunk is copied.
      destination: maps the shard, rows and columns of a chunk to the reference to which the chunk is copied.
      landed: called when a chunk has landed, to raise its flag.
      ready: waits until a chunk may be loaded; None: all chunks may be loaded at once.
      send: starts the copies of a chunk that has been loaded, in place of one copy to `destination`.
    """

    count: int
    chunking: ChunkSizes
    at: Callable[[Index], tuple[Shard, Index, Index]]
    source: Callable[..., GmemRef]
    destination: Callable[..., GmemRef]
    landed: Callable[[Shard, Index, Index], None] = lambda *_: None
    ready: Callable[[Shard, Index, Index], None] | None = None
    send: Callable[..., None] | None = None


@dataclasses.dataclass(frozen=True)
class Communicator:
    """The work of one CTA's communicator warp.

    Attributes:
      name: the operation's name, for the message of a wait that takes too long.
      group: the devices.
      config: sizes.
      flags: the flags of the handshakes; then, if `own` or `others` is given, the counter of its chunks.
      smem: chunk buffers and their barriers, of the types `smem_types`.
      peers: the chunks that are read from or sent to peers.
      own: the chunks of the own shard; None: the own shard is not copied.
      own_first: whether tiles wait for the chunks of the own shard, so that they are copied before the peers'.
      others: chunks of another kind, and their chunk buffers in the same shared memory; None: there are none.
      others_first: whether they come before `peers`.
      scale_transfers: number of transfers of scales, which come before the chunks of `peers`.
      pull_scales: carries out a transfer of scales, given its index.
      only: the distance of the one peer whose memory is read or written; None: all peers' memory is.
    """

    name: str
    group: PeerGroup
    config: Config
    flags: tuple[SemaphoreRef, ...]
    smem: tuple[SmemRef, BarrierRef]
    peers: Chunks
    own: Chunks | None = None
    own_first: bool = False
    others: tuple[Chunks, SmemRef] | None = None
    others_first: bool = False
    scale_transfers: int = 0
    pull_scales: Callable[[Index], None] | None = None
    only: int | None = None

    def run(self) -> None:
        """Does the whole work of a communicator warp, handshakes included. Each warp calls `run` once."""
        others = 0 if self.others is None else self.others[0].count
        transfers = self.scale_transfers + self.peers.count + others
        handshake = Handshake(self.flags[0], self.group, cta(self.config), self.name, transfers, self.only)
        number = handshake.begin()
        carried = 0
        first = handshake.looks
        if self.own_first:
            self._copy_own()
        handshake.await_peers()
        marks.now(Work.COPY)
        if self.pull_scales is not None:
            pull_scales = self.pull_scales
            looks = handshake.looks
            first += self.scale_transfers
            number, carried = each_drawn(handshake.counter, number, first, lambda number: pull_scales(number - looks))
        if self.others_first:
            carried += self._copy_others()
        carried += self._copy(self.peers, number, first, handshake.counter)
        if not self.others_first:
            # Each warp begins when no chunk of `peers` is left.
            carried += self._copy_others()
        handshake.leave(carried)
        if not self.own_first:
            self._copy_own()

    def _copy_others(self) -> Index:
        if self.others is None:
            return 0
        chunks, buffers_smem = self.others
        counter = self.flags[1].at[0]
        return self._copy(chunks, draw(counter, chunks.count), 0, counter, buffers_smem)

    def _copy_own(self) -> None:
        if self.own is not None:
            counter = self.flags[1].at[0]
            self._copy(self.own, draw(counter, self.own.count), 0, counter)

    def _copy(
        self, chunks: Chunks, number: Index, first: int, counter: SemaphoreRef, buffers_smem: SmemRef | None = None
    ) -> Index:
        """Copies the chunks that this warp draws from `counter`, and returns how many they were.

        `number` is the first number that the warp has drawn, and `first` the number that stands for chunk 0.
        """
        of_chunks, loaded = self.smem
        return copy_chunks(
            number,
            (first, first + chunks.count),
            counter,
            chunks.chunking,
            at=chunks.at,
            source=chunks.source,
            destination=chunks.destination,
            landed=chunks.landed,
            chunk_buffers_smem=of_chunks if buffers_smem is None else buffers_smem,
            loaded=loaded,
            ready=chunks.ready,
            send=chunks.send,
        )


def flag_shapes(flags: tuple[int, ...], *, copies_own: bool) -> tuple[tuple[int, ...], ...]:
    """Returns the shapes of the semaphores that a kernel with communicators needs.

    These are the flags of blocks (of shape `flags`), the flags of the handshakes and, if `copies_own`, a counter for a
    second kind of chunks (`Communicator.own` or `Communicator.others`).
    """
    return flags, HANDSHAKE_FLAGS, *([(1,)] if copies_own else [])


def smem_types(
    config: Config, chunking: Chunking, dtype: DTypeLike, scales: ScratchType = None, others: ChunkSizes | None = None
) -> tuple[ScratchType, ScratchType]:
    """Returns the types of the chunk buffers and of their barriers.

    Args:
      config: holds the number of chunk buffers.
      chunking: sizes of the chunks.
      dtype: dtype of the chunks.
      scales: type of the memory for scales, which pass through the same memory before the chunks; None: no scales.
      others: sizes of `Communicator.others`, which pass through the same memory before or after the other chunks;
        None: there are none.
    """
    count: int = config.chunk_buffers
    buffers = plgpu.SMEM((count, chunking.rows, chunking.cols), dtype)
    if scales is not None:
        buffers = plgpu.RefUnion(buffers, scales)
    if others is not None:
        buffers = plgpu.RefUnion(buffers, plgpu.SMEM((count, others.rows, others.cols), dtype))
    return buffers, plgpu.Barrier(num_arrivals=1, num_barriers=count)


def wait_for_block(flag: SemaphoreRef, times: Index) -> None:
    """Waits until the flag of a block has been raised `times` times. The block is then here, and TMA may load it."""
    semaphore_wait(flag, times)
    fence_async_proxy()
