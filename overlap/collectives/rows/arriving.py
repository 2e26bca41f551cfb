"""Tokens arrive while their rows are multiplied: the transport of the first product of experts.

The kernel is that of `single_gpu/grouped_product.py`. Its communicator warps bring the tokens of all devices, the own
ones first, then those of the peers d+1, d+2, …, and write each to its rows. A CTA has two or three such warps, since
one alone spends most of its time waiting, for a number that it draws, for memory, and for its flag:

    communicators  for each chunk of tokens that it draws: tokens, here or at a peer → shared memory → their rows;
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
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from overlap.collectives.rows.chunks import RowsPlan
from overlap.collectives.rows.routing import Routing
from overlap.kernels.architectures import mainloop_of
from overlap.kernels.config import Config
from overlap.kernels.grid import cta
from overlap.kernels.groups import MOST_BLOCKS, Blocks
from overlap.kernels.hooks import Hooks, Tile
from overlap.kernels.product_kernel import Refs
from overlap.primitives import (
    HANDSHAKE_FLAGS,
    Chunking,
    Handshake,
    draw,
    fence_async_proxy,
    semaphore_signal,
    semaphore_wait,
    tma_load,
    wait_stores_landed,
)
from overlap.primitives.atomics import loop_while
from overlap.primitives.integers import largest_divisor, quotient, remainder
from overlap.primitives.shared_words import load_word
from overlap.primitives.types import GmemRef, Index, ScratchType, SemaphoreRef, Tree

# Into how many steps the tiles are ordered, at least: the weights are read once in each step.
_STEPS = 4
# A warp has so many chunk buffers, at least: of one the copies land, the other one is spread.
_BUFFERS = 2
# The copy engine moves 16 bytes, so many positions, at least.
_SLOTS = 4


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Arriving:
    """Implements `grouped_product.Arrival`.

    Attributes:
      plan: sizes.
      positions: [D · T, k], as in `Routing`, with more columns up to a multiple of `_SLOTS`.
      block_ends: as in `Routing`.
    """

    plan: RowsPlan = dataclasses.field(metadata={"static": True})
    positions: jax.Array
    block_ends: jax.Array

    @staticmethod
    def of(plan: RowsPlan, routing: Routing) -> Arriving:
        """The routing has `block_ends`."""
        assert routing.block_ends is not None
        positions = jnp.pad(routing.positions, ((0, 0), (0, -plan.slots % _SLOTS)))
        return Arriving(plan, positions, routing.block_ends)

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
        return (flags, (1,)) if self.plan.group is None else (flags, HANDSHAKE_FLAGS, (1,))

    def smem_types(self, config: Config) -> tuple[ScratchType, ...]:
        chunking = self._chunking(config)
        count = config.chunk_buffers  # A part of them for each warp.
        return (
            plgpu.SMEM((count, chunking.rows, chunking.cols), self.plan.dtype),
            plgpu.SMEM((count, chunking.rows, self.positions.shape[1]), jnp.int32),
            plgpu.Barrier(num_arrivals=2, num_barriers=count),
        )

    def hook_in(self, hooks: Hooks, lhs: GmemRef, rows: GmemRef, refs: Refs[Any, Any], config: Config) -> Hooks:
        flags, *rest = refs.flags
        warps = min(mainloop_of(self.plan.target).communicators, config.chunk_buffers // _BUFFERS)
        transfers = _Transfers(
            self.plan, self._chunking(config), self._blocks, lhs, rows, refs.inputs.arrays, flags, warps
        )

        def wait(tile: Tile) -> None:
            first = quotient(tile.blocks, MOST_BLOCKS)

            @pl.loop(first, tile.blocks - first * MOST_BLOCKS + 1)
            def _block(block: jax.Array) -> None:
                semaphore_wait(flags.at[block], transfers.chunks_of_block)

            fence_async_proxy()

        def communicate(warp: Index) -> None:
            pl.when(warp < warps)(functools.partial(transfers.run, tuple(rest), refs.smem, cta(config), warp))

        return dataclasses.replace(hooks, before_lhs=wait, communicate_each=communicate)


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
      warps: communicator warps of a CTA.
    """

    plan: RowsPlan
    chunking: Chunking
    blocks: int
    tokens: GmemRef
    rows: GmemRef
    positions: GmemRef
    flags: SemaphoreRef
    warps: int

    @property
    def chunks_of_block(self) -> int:
        return self.chunking.chunks // self.blocks

    def run(self, flags: tuple[SemaphoreRef, ...], smem: tuple[Any, ...], of_cta: Index, warp: Index) -> None:
        """The work of communicator warp number `warp` of a CTA."""
        group = self.plan.group
        chunks = self.chunking.chunks
        counter = flags[-1].at[0]
        copy = functools.partial(self._copy, smem, warp)
        if group is None:
            copy(lambda index: (0, 0, index), draw(counter, chunks), (0, chunks), counter)
            return
        me = group.me()
        of_peers = (group.size - 1) * chunks
        name = f"experts {self.plan.tokens}x{self.plan.features}"
        # Of all warps of the device, the first one of CTA 0 is number 0.
        handshake = Handshake(flags[0], group, of_cta * self.warps + warp, name, of_peers)
        number = handshake.begin()
        copy(lambda index: (0, me, index), draw(counter, chunks), (0, chunks), counter)
        handshake.await_peers()

        def of_peer(index: Index) -> tuple[Index, Index, Index]:
            before = quotient(index, chunks)
            return before + 1, remainder(me + before + 1, group.size), index - before * chunks

        first = handshake.looks
        handshake.leave(copy(of_peer, number, (first, first + of_peers), handshake.counter))

    def _copy(
        self,
        smem: tuple[Any, ...],
        warp: Index,
        at: Callable[[Index], tuple[Index, Index, Index]],
        number: Index,
        numbers: tuple[int, int],
        counter: SemaphoreRef,
    ) -> Index:
        """Copies the chunks that this warp draws, and returns how many they were.

        While a chunk's copies to its rows are under way, the flag of the chunk before is raised, and the chunks after
        it are loaded.

        Args:
          smem: the chunk buffers, the positions of their tokens, and the barriers of both, of all warps.
          warp: which of them are this warp's.
          at: from a chunk's index to the distance and the position of its device, and the chunk's index there.
          number, numbers, counter: as for `copy_chunks`.
        """
        begin, end = numbers
        chunks_smem, positions_smem, loaded = smem
        buffers = chunks_smem.shape[0] // self.warps
        of_warp = warp * buffers

        def place(number: Index) -> tuple[Index, Index, Index, Index]:
            """The distance and the position of the device, the chunk's first token and column there."""
            distance, device, index = at(number - begin)
            return distance, device, *self.chunking.origin(index)

        def load(number: Index, buffer: Index) -> None:
            @pl.when(number < end)
            def _start() -> None:
                distance, device, row, column = place(number)
                rows = pl.ds(row, self.chunking.rows)
                tokens = self._tokens_of(distance).at[rows, pl.ds(column, self.chunking.cols)]
                tma_load(tokens, chunks_smem.at[of_warp + buffer], loaded.at[of_warp + buffer])
                of_rows = pl.ds(device * self.plan.tokens + row, self.chunking.rows)
                tma_load(self.positions.at[of_rows], positions_smem.at[of_warp + buffer], loaded.at[of_warp + buffer])

        def spread(number: Index, buffer: Index) -> Index:
            """Starts the copies of a chunk to its rows, and returns the index of its block."""
            _, device, row, column = place(number)
            columns = pl.ds(column, self.chunking.cols)
            for token in range(self.chunking.rows):
                for slot in range(self.plan.slots):
                    at_row = load_word(positions_smem.at[of_warp + buffer, token, slot])

                    def store(token: int = token, at_row: Index = at_row) -> None:
                        to_gmem = self.rows.at[pl.ds(at_row, 1), columns]
                        from_smem = chunks_smem.at[of_warp + buffer, pl.ds(token, 1)]
                        plgpu.copy_smem_to_gmem(from_smem, to_gmem, commit_group=False)

                    pl.when(at_row < self.plan.rows)(store)
            plgpu.commit_smem_to_gmem_group()
            return device * self.blocks + quotient(row, self.plan.tokens // self.blocks)

        def landed(block: Index) -> None:
            pl.when(block >= 0)(lambda: semaphore_signal(self.flags.at[jnp.maximum(block, 0)]))

        # The numbers of the chunks that are being loaded, from the oldest on, and the one after them.
        drawn = [number]
        for buffer in range(buffers - 1):
            load(drawn[buffer], buffer)
            drawn.append(draw(counter, end, drawn[buffer]))

        def carry(state: Tree) -> Tree:
            buffer, count, before, (oldest, *others, following) = state
            plgpu.barrier_wait(loaded.at[of_warp + buffer])
            block = spread(oldest, buffer)
            wait_stores_landed(1)
            landed(before)
            # The buffer of the chunk before is free.
            load(following, remainder(buffer + buffers - 1, buffers))
            after = draw(counter, end, following)
            return remainder(buffer + 1, buffers), count + 1, block, (*others, following, after)

        start = (jnp.int32(0), jnp.int32(0), jnp.int32(-1), tuple(drawn))
        _, count, last, _ = loop_while(lambda state: state[3][0] < end, carry, start)
        wait_stores_landed()
        landed(last)
        return count

    def _tokens_of(self, distance: Index) -> GmemRef:
        group = self.plan.group
        if group is None or isinstance(distance, int):
            return self.tokens
        return group.remote_ref(self.tokens, group.peer(distance))
