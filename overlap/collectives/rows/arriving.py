"""Tokens arrive while their rows are multiplied: the transport of the first product of experts.

The kernel is that of `single_gpu/grouped_product.py`. Its communicator warp brings the tokens of all devices, and writes
each to all of its rows:

    communicator   for each token, in the order of its first row: its features, here or at a peer → shared memory → its
                   rows; when the tokens of a unit have landed, counts the unit
    producer       for each tile: waits until all units up to its last row are counted; loads the rows

Tiles go in the order of rows, as in a product of rows that are there. A row is written with the first row of its token,
which is this row or one before it. So when all tokens whose first row is up to some row have landed, all rows up to it
have been written. This is why tokens come in this order, and not device by device: the weights are read once, and all
links are busy from the start.

A *unit* is `_UNIT` rows, which one CTA draws; the tokens whose first row is one of them are brought. A *group* is
`_GROUP` rows with one flag. Units end in any order, and a tile needs all groups up to its last row. So that it waits for
one flag only, a group's flag also counts whether the group before is complete: whoever completes a group adds 1 to the
flag of the next one.

Why this is correct, beside what `collectives/communicator.py` says: a tile waits for units only, and these wait for
nothing but the peers' beginning. Units are drawn, so those CTAs that run bring them all. Each addition to a flag is an
acquire and a release, so the last one of a group passes on what all before have released, in this group and in those
before. A tile also loads rows behind its last one, and waits for these, too. So one group more is counted than has rows
in use. Rows that no token is copied to stay undefined; they affect rows of the result that no tile stores.
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
    semaphore_wait,
    tma_load,
    wait_stores_landed,
    wait_stores_read,
)
from overlap.primitives.integers import ceil_div, largest_divisor, quotient, remainder
from overlap.primitives.shared_words import load_word
from overlap.primitives.types import GmemRef, Index, ScratchType, SemaphoreRef, Tree

_UNIT, _GROUP = 16, 512
# What the copy engine moves at least: so many bytes, and so many positions.
_WORD_BYTES = 16
_SLOTS = _WORD_BYTES // 4


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Arriving:
    """Implements `grouped_product.Arrival`.

    Attributes:
      plan: sizes.
      positions: [D · T, k], as in `Routing`, with more columns up to a multiple of `_SLOTS`.
      firsts: [rows, in whole groups, and one group more], the token whose first row is this one; -1: there is none.
      used: [1], the rows in use.
    """

    plan: RowsPlan = dataclasses.field(metadata={"static": True})
    positions: jax.Array
    firsts: jax.Array
    used: jax.Array

    @staticmethod
    def of(plan: RowsPlan, routing: Routing) -> Arriving:
        positions = jnp.pad(routing.positions, ((0, 0), (0, -plan.slots % _SLOTS)), constant_values=plan.rows)
        # Of a token without rows it is the row behind all, which may be a row of padding.
        first = jnp.where(positions < plan.rows, positions, jnp.iinfo(jnp.int32).max).min(axis=1)
        nobody = jnp.full((ceil_div(plan.rows, _GROUP) + 1) * _GROUP, -1, jnp.int32)
        tokens = jnp.arange(first.shape[0], dtype=jnp.int32)
        firsts = nobody.at[first].set(tokens, mode="drop", unique_indices=True)
        return Arriving(plan, positions, firsts, routing.group_sizes.sum(dtype=jnp.int32)[None])

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        return self.positions, self.firsts, self.used

    @property
    def reads_peers(self) -> bool:
        return self.plan.group is not None

    def _cols(self, config: Config) -> int:
        """Features that are copied at once: all, or an equal part."""
        itemsize = self.plan.dtype.itemsize
        words = largest_divisor(self.plan.features * itemsize // _WORD_BYTES, config.chunk_bytes // _WORD_BYTES)
        return words * _WORD_BYTES // itemsize

    def flag_shapes(self) -> tuple[tuple[int, ...], ...]:
        flags = (self.firsts.shape[0] // _GROUP,)
        return (flags, (1,)) if self.plan.group is None else (flags, HANDSHAKE_FLAGS)

    def smem_types(self, config: Config) -> tuple[ScratchType, ...]:
        count = config.chunk_buffers
        return (
            plgpu.SMEM((count, 1, self._cols(config)), self.plan.dtype),
            plgpu.SMEM((count, 1, self.positions.shape[1]), jnp.int32),
            plgpu.SMEM((2, _UNIT), jnp.int32),
            plgpu.Barrier(num_arrivals=2, num_barriers=count),
            plgpu.Barrier(num_arrivals=1, num_barriers=2),
        )

    def hook_in(self, hooks: Hooks, lhs: GmemRef, rows: GmemRef, refs: Refs[Any, Any], config: Config) -> Hooks:
        flags, *rest = refs.flags
        transfers = _Transfers(self.plan, self._cols(config), lhs, rows, *refs.inputs.arrays, flags)

        def wait(tile: Tile) -> None:
            group = quotient(tile.row_offset + config.tile_m - 1, _GROUP)
            semaphore_wait(flags.at[group], transfers.expected(group))
            fence_async_proxy()

        communicate = functools.partial(transfers.run, rest[0], refs.smem, cta(config))
        return dataclasses.replace(hooks, before_lhs=wait, communicate=communicate)


@dataclasses.dataclass(frozen=True)
class _Transfers:
    """The communicator's work.

    Attributes:
      plan: sizes.
      cols: features of a chunk.
      tokens: of this device.
      rows: to which they are copied.
      positions, firsts, used: as in `Arriving`.
      flags: of all groups.
    """

    plan: RowsPlan
    cols: int
    tokens: GmemRef
    rows: GmemRef
    positions: GmemRef
    firsts: GmemRef
    used: GmemRef
    flags: SemaphoreRef

    @property
    def _parts(self) -> int:
        """Chunks of a token."""
        return self.plan.features // self.cols

    @property
    def _of_group(self) -> int:
        """Units of a group, counted once for each part."""
        return _GROUP // _UNIT * self._parts

    def expected(self, group: Index) -> Index:
        """Returns the flag of a complete group, if the groups before are complete, too."""
        return self._of_group + jnp.where(group > 0, 1, 0)

    def run(self, flags: SemaphoreRef, smem: tuple[Any, ...], of_cta: Index) -> None:
        """The whole work of a CTA's communicator."""
        most = self.firsts.shape[0] // _UNIT * self._parts
        units = (quotient(self.used[0] + _GROUP - 1, _GROUP) + 1) * self._of_group
        group = self.plan.group
        if group is None:
            counter = flags.at[0]
            self._bring(smem, draw(counter, most), (0, most, units), counter)
            return
        handshake = Handshake(flags, group, of_cta, f"experts {self.plan.tokens}x{self.plan.features}", most)
        number = handshake.begin()
        handshake.await_peers()
        number, count = self._bring(smem, number, (handshake.looks, handshake.items, units), handshake.counter)
        # Who draws the first unit that has no rows stands for all of these.
        is_end = number == handshake.looks + units
        handshake.leave(count + jnp.where(is_end, most - units, 0))

    def _bring(
        self, smem: tuple[Any, ...], number: Index, numbers: tuple[int, int, Index], counter: SemaphoreRef
    ) -> tuple[Index, Index]:
        """Brings the tokens of the units that this CTA draws. Returns the number that has none, and how many they were.

        Of `buffers` tokens, all but one are being loaded while the copies of the oldest are under way.

        Args:
          smem: as in `Arriving.smem_types`.
          number: the first number that this CTA has drawn.
          numbers: of unit 0; the end of all numbers; how many units there are.
          counter: of the numbers.
        """
        begin, end, units = numbers
        chunks_smem, positions_smem, firsts_smem, loaded, known = smem
        buffers = chunks_smem.shape[0]

        def columns(unit: Index) -> pl.Slice:
            return pl.ds(remainder(unit, self._parts) * self.cols, self.cols)

        def ask(number: Index, turn: Index) -> None:
            """Loads which tokens a unit has."""

            @pl.when(number < begin + units)
            def _load() -> None:
                first = quotient(number - begin, self._parts) * _UNIT
                tma_load(self.firsts.at[pl.ds(first, _UNIT)], firsts_smem.at[turn], known.at[turn])

        def load(token: Index, unit: Index, buffer: Index) -> None:
            device = quotient(token, self.plan.tokens)
            row = pl.ds(token - device * self.plan.tokens, 1)
            source = self.tokens if self.plan.group is None else self.plan.group.remote_ref(self.tokens, device)
            tma_load(source.at[row, columns(unit)], chunks_smem.at[buffer], loaded.at[buffer])
            tma_load(self.positions.at[pl.ds(token, 1)], positions_smem.at[buffer], loaded.at[buffer])

        def spread(unit: Index, buffer: Index) -> None:
            """Starts the copies of a token to its rows."""
            plgpu.barrier_wait(loaded.at[buffer])
            for slot in range(self.plan.slots):
                row = load_word(positions_smem.at[buffer, 0, slot])

                def store(row: Index = row) -> None:
                    to_gmem = self.rows.at[pl.ds(row, 1), columns(unit)]
                    plgpu.copy_smem_to_gmem(chunks_smem.at[buffer], to_gmem, commit_group=False)

                pl.when(row < self.plan.rows)(store)
            plgpu.commit_smem_to_gmem_group()

        def landed(unit: Index) -> None:
            """Counts a unit, and the groups that it completes."""

            def count(group: Index) -> Index:
                before = atomics.add(self.flags.at[group], 1)
                is_complete = (before + 1 == self.expected(group)) & (group + 1 < self.flags.shape[0])
                return jnp.where(is_complete, group + 1, -1)

            group = jnp.where(unit >= 0, quotient(jnp.maximum(unit, 0), self._of_group), -1)
            atomics.loop_while(lambda group: group >= 0, count, group)

        # Of each token that is being loaded, the oldest first, and of the one whose copies are under way: its unit, and
        # whether it is the unit's last one.
        def turn(count: Index, oldest: Tree, before: Index) -> Index:
            """Spreads the oldest token. Returns the unit that has landed when the copies have; -1: none."""
            unit, is_last = oldest

            @pl.when(count >= buffers - 1)
            def _spread() -> None:
                spread(unit, remainder(count + 1, buffers))
                wait_stores_landed(1)
                landed(before)

            return jnp.where(count >= buffers - 1, jnp.where(is_last > 0, unit, -1), before)

        def of_unit(state: Tree) -> Tree:
            number, turns, count, before, pending = state
            unit = number - begin
            of_turn = remainder(turns, 2)
            following = draw(counter, end, number)
            ask(following, remainder(turns + 1, 2))
            plgpu.barrier_wait(known.at[of_turn])
            has_token = lambda row: load_word(firsts_smem.at[of_turn, row]) >= 0  # noqa: E731
            last = lax.fori_loop(0, _UNIT, lambda row, last: jnp.where(has_token(row), row, last), jnp.int32(-1))
            pl.when(last < 0)(lambda: landed(unit))

            def of_row(row: Index, state: Tree) -> Tree:
                token = load_word(firsts_smem.at[of_turn, row])

                def of_token(state: Tree) -> Tree:
                    count, before, pending = state
                    # The copies of the token that had this buffer have been started last.
                    wait_stores_read()
                    load(token, unit, remainder(count, buffers))
                    pending = (*pending, (unit, jnp.where(row == last, 1, 0)))
                    before = turn(count, pending[0], before)
                    return count + 1, before, pending[1:]

                return lax.cond(token >= 0, of_token, lambda state: state, state)

            count, before, pending = lax.fori_loop(0, last + 1, of_row, (count, before, pending))
            return following, turns + 1, count, before, pending

        zero = jnp.int32(0)
        ask(number, 0)
        pending = ((zero, zero),) * (buffers - 1)
        start = (number, zero, zero, jnp.int32(-1), pending)
        number, turns, count, before, pending = atomics.loop_while(
            lambda state: state[0] < begin + units, of_unit, start
        )
        for index, oldest in enumerate(pending):
            before = turn(count + index, oldest, before)
        wait_stores_landed()
        landed(before)
        return number, turns
