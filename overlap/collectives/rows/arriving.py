"""Tokens arrive while their rows are multiplied: the transport of the products of experts whose rows are copies.

The kernel is that of `single_gpu/grouped_product.py`. Its communicator warp brings the tokens of all devices, and
writes each to all of its rows:

    communicator   for each token, in the order of the tokens' first rows: features, here or at a peer → shared memory
                   → the token's rows; when the tokens of a unit have landed, counts the unit
    producer       for each tile: waits until all units up to the tile's last row are counted; loads the rows

Tiles go in the order of rows, as in a product of rows that are there. A row is written with the first row of its
token, which is this row or one before it. So when all tokens whose first row is before some row have landed, all rows
before it have been written. That is why tokens come in this order, and not device by device: the weights are read once,
and all links are busy from the start. Ordered by device, the product alone took 1.25 times as long (4 × H200,
Qwen3-30B).

A *unit* is some rows, of which one CTA brings the tokens that have their first row there. Units are drawn. A *block*
has several units and one flag. Units end in any order, and a tile needs all blocks up to its last row. So that it waits
for one flag only, the flag also counts whether the block before is complete: whoever completes a block adds 1 to the
flag of the next one.

Why this is correct, beside what `collectives/communicator.py` says: a tile waits for units only, and these wait for
nothing but the peers' beginning. Units are drawn, so those CTAs that run bring them all. Each addition to a flag is an
acquire and a release, so the last one of a block passes on what all before it have released, in this block and in those
before. A tile also loads rows behind its last one, and waits for these, too. So one block more is counted than rows in
use. Rows that no token is copied to stay undefined; they affect rows of the result that no tile stores.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from overlap.collectives.rows.chunks import RowsPlan
from overlap.collectives.rows.routing import Routing
from overlap.kernels.config import Config
from overlap.kernels.grid import cta
from overlap.kernels.hooks import Hooks, Tile
from overlap.kernels.product_kernel import Refs
from overlap.primitives import (
    HANDSHAKE_FLAGS,
    Handshake,
    atomics,
    draw,
    fence_async_proxy,
    marks,
    semaphore_wait,
    tma_load,
    wait_stores_landed,
    wait_stores_read,
)
from overlap.primitives.integers import ceil_div, largest_divisor, quotient, remainder
from overlap.primitives.marks import Work
from overlap.primitives.shared_words import load_word
from overlap.primitives.types import GmemRef, Index, ScratchType, SemaphoreRef, Tree

# Rows of a unit and of a block. Others were not faster (8 to 32, 256).
_UNIT = 16
_BLOCK = 512
# Tokens arrive while their rows are multiplied on so many devices at least, where each expert has so many rows of each
# device, on average. Else it takes as long or longer than to copy the tokens before: on 2 × H200 up to 1.03 times, and
# on 4 × H200 with 4 rows 1.05 times. 3 devices and more than 4 have not been measured (docs/experts.md).
_LEAST_DEVICES = 3
_LEAST_ROWS = 32
# What `explain` says of the product.
ARRIVE = "tokens arrive while their rows are multiplied"
COPIED_BEFORE = "tokens are copied before, since {}"
NO_ROOM = "no kernel has room for these rows and for those that arrive"
# What the copy engine moves at least.
_LEAST_BYTES = 16
_LEAST_WORDS = 4


def why_not_faster(tokens: int, experts: int, routing: Routing) -> str:
    """Says why it would not be faster if tokens arrived while their rows are multiplied; empty if it should be.

    `tokens` and `experts` are how many this device has.
    """
    everything, slots = routing.positions.shape
    devices = everything // max(tokens, 1)
    if devices < _LEAST_DEVICES:
        return f"{devices} devices share the experts, fewer than {_LEAST_DEVICES}"
    rows = tokens * slots / (experts * devices)
    return f"an expert has {rows:.4g} rows of each device, fewer than {_LEAST_ROWS}" if rows < _LEAST_ROWS else ""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Arriving:
    """Implements `grouped_product.Arrival`, for several devices.

    Attributes:
      plan: sizes.
      positions: [D · T, k], as in `Routing`, with more columns up to a multiple of `_LEAST_WORDS`.
      firsts: [rows, in whole blocks, and one block more], the token whose first row is this one; -1: there is none.
      used: [1], the rows in use.
      unit: rows of a unit.
      block: rows of a block, as many as a tile has or more.
    """

    plan: RowsPlan = dataclasses.field(metadata={"static": True})
    positions: jax.Array
    firsts: jax.Array
    used: jax.Array
    unit: int = dataclasses.field(default=_UNIT, metadata={"static": True})
    block: int = dataclasses.field(default=_BLOCK, metadata={"static": True})

    @staticmethod
    def of(plan: RowsPlan, routing: Routing, unit: int = _UNIT, block: int = _BLOCK) -> Arriving:
        positions = jnp.pad(routing.positions, ((0, 0), (0, -plan.slots % _LEAST_WORDS)), constant_values=plan.rows)
        first = positions.min(axis=1)
        # A token without rows has the one behind all, which is a row of `firsts`.
        first = jnp.where(first < plan.rows, first, jnp.iinfo(jnp.int32).max)
        nobody = jnp.full((ceil_div(plan.rows, block) + 1) * block, -1, jnp.int32)
        firsts = nobody.at[first].set(jnp.arange(first.shape[0], dtype=jnp.int32), mode="drop")
        used = routing.group_sizes.sum(dtype=jnp.int32)[None]
        return Arriving(plan, positions, firsts, used, unit, block)

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        return self.positions, self.firsts, self.used

    def _features(self, config: Config) -> int:
        """The features of a chunk: all of a token, or an equal part of them."""
        itemsize = self.plan.dtype.itemsize
        least = largest_divisor(self.plan.features * itemsize // _LEAST_BYTES, config.chunk_bytes // _LEAST_BYTES)
        return least * _LEAST_BYTES // itemsize

    def flag_shapes(self) -> tuple[tuple[int, ...], ...]:
        return (self.firsts.shape[0] // self.block,), HANDSHAKE_FLAGS

    def smem_types(self, config: Config) -> tuple[ScratchType, ...]:
        count = config.chunk_buffers
        return (
            plgpu.SMEM((count, 1, self._features(config)), self.plan.dtype),
            plgpu.SMEM((count, 1, self.positions.shape[1]), jnp.int32),
            plgpu.SMEM((2, self.unit), jnp.int32),
            plgpu.Barrier(num_arrivals=2, num_barriers=count),
            plgpu.Barrier(num_arrivals=1, num_barriers=2),
        )

    def hook_in(self, hooks: Hooks, lhs: GmemRef, rows: GmemRef, refs: Refs[Any, Any], config: Config) -> Hooks:
        flags, handshake = refs.flags
        positions, firsts, used = refs.inputs.arrays
        transfers = _Transfers(
            self.plan, self._features(config), self.unit, self.block, lhs, rows, positions, firsts, used, flags
        )

        def wait(tile: Tile) -> None:
            assert config.tile_m <= self.block
            block = quotient(tile.row_offset + config.tile_m - 1, self.block)
            semaphore_wait(flags.at[block], transfers.expected(block))
            fence_async_proxy()

        run = functools.partial(transfers.run, handshake, refs.smem, cta(config))
        return dataclasses.replace(hooks, before_lhs=wait, communicate=run)


@dataclasses.dataclass(frozen=True)
class _Transfers:
    """The communicators' work. If a token has several parts, there is a unit for each part of some rows' tokens.

    Attributes:
      plan: sizes.
      features: of a part.
      unit, block: as in `Arriving`.
      tokens: of this device.
      rows: to which they are copied.
      positions, firsts, used: as in `Arriving`.
      flags: of the blocks.
    """

    plan: RowsPlan
    features: int
    unit: int
    block: int
    tokens: GmemRef
    rows: GmemRef
    positions: GmemRef
    firsts: GmemRef
    used: GmemRef
    flags: SemaphoreRef

    @property
    def _parts(self) -> int:
        """The parts of a token."""
        return self.plan.features // self.features

    @property
    def _of_block(self) -> int:
        """The units of a block."""
        return self.block // self.unit * self._parts

    def expected(self, block: Index) -> Index:
        """Returns the flag of a block that is complete, as are all blocks before it."""
        return self._of_block + jnp.where(block > 0, 1, 0)

    def run(self, flags: SemaphoreRef, smem: tuple[Any, ...], of_cta: Index) -> None:
        """The whole work of a CTA's communicator warp. `flags`: of the handshake."""
        assert self.plan.group is not None
        most = self.flags.shape[0] * self._of_block
        units = (quotient(self.used[0] + self.block - 1, self.block) + 1) * self._of_block
        name = f"experts {self.plan.tokens}x{self.plan.features}"
        handshake = Handshake(flags, self.plan.group, of_cta, name, most)
        number = handshake.begin()
        handshake.await_peers()
        marks.now(Work.COPY)
        number, count = self._bring(smem, number, handshake, units)
        # Whoever draws the first number behind the units stands for all those behind them.
        is_first = number == handshake.looks + units
        handshake.leave(count + jnp.where(is_first, most - units, 0))

    def _bring(self, smem: tuple[Any, ...], number: Index, handshake: Handshake, units: Index) -> tuple[Index, Index]:
        """Brings the tokens of the units that this warp draws.

        Each token has a buffer of a ring. When a token has been asked for, the oldest one that is still on its way is
        spread, so that `buffers` - 1 are on their way at any time; and the copies of the one before have landed.

        Args:
          smem: as in `Arriving.smem_types`.
          number: the first number that this warp has drawn.
          handshake: has the counter.
          units: how many there are.

        Returns:
          The first number that this warp has drawn behind the units, and how many units it has brought.
        """
        begin = handshake.looks
        end = handshake.items
        counter = handshake.counter
        tokens_smem, positions_smem, firsts_smem, loaded, known = smem
        buffers = tokens_smem.shape[0]

        def part(unit: Index) -> pl.Slice:
            return pl.ds(remainder(unit, self._parts) * self.features, self.features)

        def ask(number: Index, turn: Index) -> None:
            """Starts to load the tokens' numbers of a unit."""

            @pl.when(number < begin + units)
            def _load() -> None:
                first = quotient(number - begin, self._parts) * self.unit
                tma_load(self.firsts.at[pl.ds(first, self.unit)], firsts_smem.at[turn], known.at[turn])

        def load(token: Index, unit: Index, buffer: Index) -> None:
            assert self.plan.group is not None
            device = quotient(token, self.plan.tokens)
            row = pl.ds(token - device * self.plan.tokens, 1)
            source = self.plan.group.remote_ref(self.tokens, device).at[row, part(unit)]
            tma_load(source, tokens_smem.at[buffer], loaded.at[buffer])
            tma_load(self.positions.at[pl.ds(token, 1)], positions_smem.at[buffer], loaded.at[buffer])

        def spread(unit: Index, buffer: Index) -> None:
            """Starts the copies of a token to its rows."""
            plgpu.barrier_wait(loaded.at[buffer])
            for slot in range(self.plan.slots):
                row = load_word(positions_smem.at[buffer, 0, slot])

                def store(row: Index = row) -> None:
                    to_gmem = self.rows.at[pl.ds(row, 1), part(unit)]
                    plgpu.copy_smem_to_gmem(tokens_smem.at[buffer], to_gmem, commit_group=False)

                pl.when(row < self.plan.rows)(store)
            plgpu.commit_smem_to_gmem_group()

        def landed(unit: Index) -> None:
            """Counts a unit, and the blocks that it completes; none if it is -1."""

            def count(block: Index) -> Index:
                before = atomics.add(self.flags.at[block], 1)
                is_complete = (before + 1 == self.expected(block)) & (block + 1 < self.flags.shape[0])
                return jnp.where(is_complete, block + 1, -1)

            block = jnp.where(unit < 0, -1, quotient(jnp.maximum(unit, 0), self._of_block))
            atomics.loop_while(lambda block: block >= 0, count, block)

        def after_load(count: Index, oldest: Index, before: Index) -> Index:
            """Spreads the oldest token that is on its way, if there are enough.

            Args:
              count: how many tokens there were before the one that was asked for last.
              oldest: twice the unit of the oldest token, plus 1 if it is the unit's last one: one register.
              before: the unit that has landed when the copies of the token before that have; -1: none.

            Returns:
              The same as `before` for the oldest token.
            """
            unit = quotient(oldest, 2)

            @pl.when(count >= buffers - 1)
            def _spread() -> None:
                spread(unit, remainder(count + 1, buffers))
                wait_stores_landed(1)
                landed(before)

            return jnp.where(count >= buffers - 1, jnp.where(oldest > 2 * unit, unit, -1), before)

        def of_unit(state: Tree) -> Tree:
            number, turns, *tokens = state
            unit = number - begin
            turn = remainder(turns, 2)
            following = draw(counter, end, number)
            ask(following, remainder(turns + 1, 2))
            plgpu.barrier_wait(known.at[turn])
            token_at = lambda row: load_word(firsts_smem.at[turn, row])  # noqa: E731
            last = lax.fori_loop(
                0, self.unit, lambda row, last: jnp.where(token_at(row) >= 0, row, last), jnp.int32(-1)
            )
            pl.when(last < 0)(lambda: landed(unit))

            def of_row(row: Index, state: Tree) -> Tree:
                token = token_at(row)

                def of_token(state: Tree) -> Tree:
                    count, before, on_their_way = state
                    # The token that had this buffer was spread last.
                    wait_stores_read()
                    load(token, unit, remainder(count, buffers))
                    oldest, *others = *on_their_way, 2 * unit + jnp.where(row == last, 1, 0)
                    return count + 1, after_load(count, oldest, before), tuple(others)

                return lax.cond(token >= 0, of_token, lambda state: state, state)

            return following, turns + 1, *lax.fori_loop(0, last + 1, of_row, tuple(tokens))

        ask(number, 0)
        zero = jnp.int32(0)
        start = number, zero, zero, jnp.int32(-1), (zero,) * (buffers - 1)
        state = atomics.loop_while(lambda state: state[0] < begin + units, of_unit, start)
        number, turns, count, before, on_their_way = state
        for index, oldest in enumerate(on_their_way):
            before = after_load(count + index, oldest, before)
        wait_stores_landed()
        landed(before)
        return number, turns
