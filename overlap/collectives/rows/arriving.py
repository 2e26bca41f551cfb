"""Tokens arrive while their rows are multiplied: the transport of the first product of experts.

The kernel is that of `single_gpu/grouped_product.py`. Its communicator warps bring the tokens of all devices, the own
ones first, then those of the peers d+1, d+2, …, and write each to its rows:

    communicator   for each chunk of tokens that it draws: tokens, here or at a peer → shared memory → their rows;
                   when these have landed, raises the flag of the block that the chunk belongs to
    producer       for each tile: waits for the flags of all blocks that the tile's rows come from; loads the rows

Rows are sorted by expert, then by token, so the rows of a tile come from blocks that follow each other. Chunks end in
any order, so that a tile waits for each of these blocks. Tiles go in the order in which their last blocks arrive
(`groups.arriving_tiles`), which matters for speed alone.

Why this is correct, beside what `collectives/communicator.py` says: a tile waits for chunks only, and these wait for
nothing but the peers' beginning. Chunks are drawn, so those CTAs that run bring them all. A tile also loads rows behind
its last one, which belong to the next group and may be written meanwhile; they affect rows of the result that the tile
does not store. Rows that no token is copied to stay undefined.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
from jax.experimental import pallas as pl

from overlap.collectives import communicator
from overlap.collectives.communicator import Chunks, Communicator
from overlap.collectives.rows.chunks import RowsPlan
from overlap.collectives.rows.routing import Routing
from overlap.kernels.config import Config
from overlap.kernels.groups import MOST_BLOCKS, Blocks
from overlap.kernels.hooks import Hooks, Tile
from overlap.kernels.product_kernel import Refs
from overlap.primitives import (
    Chunking,
    copy_chunks,
    draw,
    fence_async_proxy,
    semaphore_signal,
    semaphore_wait,
    tma_store,
    wait_stores_landed,
)
from overlap.primitives.integers import largest_divisor, quotient
from overlap.primitives.types import GmemRef, Index, ScratchType, SemaphoreRef, SmemRef

# Into how many steps the tiles are ordered, at least: the weights are read once in each step.
_STEPS = 4


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Arriving:
    """Implements `grouped_product.Arrival`.

    Attributes:
      plan: sizes.
      positions: [D · T, k], as in `Routing`.
      block_ends: as in `Routing`.
    """

    plan: RowsPlan = dataclasses.field(metadata={"static": True})
    positions: jax.Array
    block_ends: jax.Array

    @staticmethod
    def of(plan: RowsPlan, routing: Routing) -> Arriving:
        """The routing has `block_ends`."""
        assert routing.block_ends is not None
        return Arriving(plan, routing.positions, routing.block_ends)

    @property
    def _blocks(self) -> int:
        """Blocks of a device's tokens."""
        return self.block_ends.shape[0] // self.plan.devices

    @property
    def blocks(self) -> Blocks:
        group = self.plan.group
        parts = largest_divisor(self._blocks, max(_STEPS // self.plan.devices, 1))  # Sources of each device.
        first = 0 if group is None else group.me() * parts
        return Blocks(self.block_ends, self.plan.devices * parts, first)

    @property
    def arrays(self) -> jax.Array:
        return self.positions

    @property
    def reads_peers(self) -> bool:
        return self.plan.group is not None

    def _chunking(self, config: Config) -> Chunking:
        tokens, features = self.plan.tokens, self.plan.features
        block = tokens // self._blocks
        return Chunking.cut(tokens, features, self.plan.dtype.itemsize, block, config.chunk_bytes)

    def flag_shapes(self) -> tuple[tuple[int, ...], ...]:
        flags = (self.block_ends.shape[0],)
        return (flags, (1,)) if self.plan.group is None else communicator.flag_shapes(flags, copies_own=True)

    def smem_types(self, config: Config) -> tuple[ScratchType, ...]:
        return communicator.smem_types(config, self._chunking(config), self.plan.dtype)

    def hook_in(self, hooks: Hooks, lhs: GmemRef, rows: GmemRef, refs: Refs[Any, Any], config: Config) -> Hooks:
        flags, *rest = refs.flags
        transfers = _Transfers(self.plan, self._chunking(config), self._blocks, lhs, rows, refs.inputs.arrays, flags)

        def wait(tile: Tile) -> None:
            first = quotient(tile.blocks, MOST_BLOCKS)

            @pl.loop(first, tile.blocks - first * MOST_BLOCKS + 1)
            def _block(block: jax.Array) -> None:
                semaphore_wait(flags.at[block], transfers.chunks_of_block)

            fence_async_proxy()

        communicate = functools.partial(transfers.run, config, tuple(rest), refs.smem)
        return dataclasses.replace(hooks, before_lhs=wait, communicate=communicate)


@dataclasses.dataclass(frozen=True)
class _Transfers:
    """The communicators' work.

    Attributes:
      plan: sizes.
      chunking: how a device's tokens are cut into chunks.
      blocks: of a device's tokens.
      tokens: of this device.
      rows: to which they are copied.
      positions: the row of each slot of all tokens.
      flags: of all blocks.
    """

    plan: RowsPlan
    chunking: Chunking
    blocks: int
    tokens: GmemRef
    rows: GmemRef
    positions: GmemRef
    flags: SemaphoreRef

    @property
    def chunks_of_block(self) -> int:
        return self.chunking.chunks // self.blocks

    def run(self, config: Config, flags: tuple[SemaphoreRef, ...], smem: tuple[Any, ...]) -> None:
        group = self.plan.group
        chunks = self.chunking.chunks
        own = self._chunks(chunks, lambda index: (0, *self.chunking.origin(index)))
        if group is not None:
            name = f"experts {self.plan.tokens}x{self.plan.features}"
            Communicator(name, group, config, flags, smem, self._peers(), own, own_first=True).run()
            return
        buffers_smem, loaded = smem
        counter = flags[0].at[0]
        copy_chunks(
            draw(counter, chunks),
            (0, chunks),
            counter,
            self.chunking,
            at=own.at,
            source=own.source,
            destination=own.destination,
            landed=own.landed,
            chunk_buffers_smem=buffers_smem,
            loaded=loaded,
            send=own.send,
        )

    def _peers(self) -> Chunks:
        chunks = self.chunking.chunks

        def at(index: Index) -> tuple[Index, Index, Index]:
            before = quotient(index, chunks)
            return before + 1, *self.chunking.origin(index - before * chunks)

        return self._chunks((self.plan.devices - 1) * chunks, at)

    def _chunks(self, count: int, at: Any) -> Chunks:
        """Chunks whose shard is the distance of a device."""
        return Chunks(count, self.chunking, at, self._source, self._nowhere, send=self._spread)

    def _source(self, distance: Index, *place: pl.Slice) -> GmemRef:
        group = self.plan.group
        if group is None or isinstance(distance, int):
            return self.tokens.at[place]
        return group.remote_ref(self.tokens, group.peer(distance)).at[place]

    def _nowhere(self, *_: Any) -> GmemRef:
        raise AssertionError("chunks are spread")

    def _spread(self, distance: Index, tokens: pl.Slice, columns: pl.Slice, chunk_smem: SmemRef) -> None:
        """Copies a chunk's tokens to their rows, and raises the flag of the block when they have landed."""
        group = self.plan.group
        device = 0 if group is None else group.peer(distance)
        first = device * self.plan.tokens + tokens.start
        # All positions are read before the first is used: a read takes longer than a copy.
        places = [
            [self.positions[first + token, slot] for slot in range(self.plan.slots)] for token in range(tokens.size)
        ]
        for token, of_token in enumerate(places):
            for place in of_token:

                def store(token: int = token, place: Index = place) -> None:
                    tma_store(chunk_smem.at[pl.ds(token, 1)], self.rows.at[pl.ds(place, 1), columns])

                pl.when(place < self.plan.rows)(store)
        wait_stores_landed()
        block = quotient(tokens.start, self.plan.tokens // self.blocks)
        semaphore_signal(self.flags.at[device * self.blocks + block])
