"""Tiles of a product whose rows belong to groups: which tiles there are is known only when the kernel runs.

The rows of group e are `sizes[e]` rows of the left operand that follow each other, and are multiplied by right operand
e. A tile has rows of one group: the first tile of a group begins with the group's first row, and the last one may have
fewer rows than the others. So there are at most ⌊m / tile_m⌋ + groups tile rows. A table in global memory lists the
tiles; XLA computes it from the sizes. All tiles of all groups are numbered together and dealt to the CTAs in turn, so
that the SMs are idle only once, at the end.

Within a group, tiles follow each other in bands, as in `TileOrder`. CTAs that multiply at the same time then share
rows of the left operand and columns of one right operand, and load them from the L2.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from overlap.kernels.hooks import Tile
from overlap.kernels.stream_k import Piece, StreamK
from overlap.primitives.integers import choose, quotient, remainder
from overlap.primitives.types import GmemRef, Index

# More than the rows of any tile.
_MOST_ROWS = 512
# The rows of the table of contractions.
FIRST_OF_GROUP, ROWS_OF_GROUP, K_STEPS_OF_GROUP, GROUP = range(4)


def most_tile_rows(m: int, groups: int, tile_m: int) -> int:
    """Returns how many tile rows the groups may have together."""
    return m // tile_m + min(groups, m)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TileTable:
    """What `GroupedWork` reads, as arrays or references, int32.

    Attributes:
      group_and_rows, first, column: of each tile its group times `_MOST_ROWS` plus how many rows it has, its first row,
        and its tile column. XLA computes these in one kernel. It would not if the group were alone or all lay side by
        side in one array.
      tile_ends: where each group's tile rows end.
      ends: where each group's rows end, if the kernel has to know: a kernel of XLA less without it.
    """

    group_and_rows: GmemRef
    first: GmemRef
    column: GmemRef
    tile_ends: GmemRef
    ends: GmemRef = None

    def __getitem__(self, index: Index) -> Tile:
        """Returns the tile with an index."""
        packed = self.group_and_rows[index]
        group = quotient(packed, _MOST_ROWS)
        rows = packed - group * _MOST_ROWS
        return Tile(step=group, m=0, n=self.column[index], row_offset=self.first[index], rows=rows)


def tiles(sizes: jax.Array, m: int, columns: int, tile_m: int, width: int) -> TileTable:
    """Returns the table of tiles. What it says of tiles behind the last one has no meaning.

    Groups that would reach beyond row m end there.

    Args:
      sizes: rows of each group.
      m: rows of the left operand.
      columns: tile columns.
      tile_m: rows of a tile.
      width: the most tile rows of a band.
    """
    starts, ends = bounds(sizes, m)
    last = _sums_until((ends - starts + tile_m - 1) // tile_m)
    # The group of each tile row is the same array in all kernels with this `tile_m`.
    group_of_row = _group_of(jnp.arange(most_tile_rows(m, sizes.shape[0], tile_m), dtype=jnp.int32), last)
    group_of_row = lax.optimization_barrier(group_of_row)
    index = jnp.arange(group_of_row.shape[0] * columns, dtype=jnp.int32)
    group = _at(group_of_row, index // columns)
    start = _at(starts, group)
    end = _at(ends, group)
    rows = (end - start + tile_m - 1) // tile_m
    # Bands of about the same number of rows: a band of one row would load a whole right operand for itself.
    bands = jnp.maximum((rows + width - 1) // width, 1)
    height = jnp.maximum((rows + bands - 1) // bands, 1)
    within = index - (_at(last, group) - rows) * columns
    band = within // (height * columns)
    in_band = within - band * height * columns
    own_height = jnp.maximum(jnp.minimum(height, rows - band * height), 1)
    column = in_band // own_height
    row = band * height + in_band - column * own_height
    column = jnp.where(band % 2 == 1, columns - 1 - column, column)
    first = start + row * tile_m
    packed = group * _MOST_ROWS + jnp.clip(end - first, 0, tile_m)
    return TileTable(packed, first, column, last, ends)


def tile_rows(sizes: jax.Array, m: int, tile_m: int) -> tuple[jax.Array, jax.Array]:
    """Returns where values of rows lie if each group has whole tile rows of its own, one group after the other.

    That is: for each group how much further down its rows lie than in the left operand, and for each row its place.
    The place of a row behind all groups is any of them.
    """
    starts, ends = bounds(sizes, m)
    of_group = (ends - starts + tile_m - 1) // tile_m * tile_m
    shifts = _sums_until(of_group) - of_group - starts
    row = jnp.arange(m, dtype=jnp.int32)
    return shifts, row + _at(shifts, _group_of(row, ends))


def bounds(sizes: jax.Array, m: int) -> tuple[jax.Array, jax.Array]:
    """Returns first row and end of each group. Groups that would reach beyond row m end there."""
    ends = jnp.minimum(_sums_until(sizes), m)
    index = jnp.arange(ends.shape[0])
    # Not by concatenation, which would be a kernel of its own.
    return jnp.where(index > 0, _at(ends, jnp.maximum(index - 1, 0)), 0), ends


def clipped(sizes: jax.Array, m: int) -> jax.Array:
    """Returns sizes as int32 from 0 to m, so that their sums do not overflow."""
    if sizes.dtype.itemsize >= 4:
        sizes = jnp.minimum(sizes, jnp.asarray(m, sizes.dtype))
    return jnp.maximum(sizes.astype(jnp.int32), 0)


def _sums_until(values: jax.Array) -> jax.Array:
    """Returns the cumulative sums, as one small kernel of XLA, which `jnp.cumsum` is not."""
    count = values.shape[0]
    until = jnp.arange(count)[:, None] >= jnp.arange(count)[None, :]
    return jnp.where(until, values[None, :], 0).sum(axis=1, dtype=jnp.int32)


def _at(values: jax.Array, index: jax.Array) -> jax.Array:
    """Returns elements of a vector. XLA makes this part of the kernel that uses them."""
    return values.at[index].get(mode="promise_in_bounds")


def _group_of(index: jax.Array, ends: jax.Array) -> jax.Array:
    """Returns the group in which an index lies, from where groups end; the last group if it lies behind all.

    By comparison with each group, which is one small kernel of XLA; a search or a sort would be many.
    """
    return (index[:, None] >= ends[None, :-1]).sum(axis=1, dtype=jnp.int32)


@dataclasses.dataclass(frozen=True)
class GroupedWork(StreamK):
    """The pieces of each CTA: whole tiles, dealt out in turn. `tiles` is the most that there may be.

    Attributes:
      table: of the tiles.
      columns: tile columns.
    """

    table: TileTable | None = None
    columns: int = 1

    def pieces(self, cta: Index) -> Index:
        assert self.table is not None
        count = last_of(self.table.tile_ends) * self.columns
        return quotient(count + (self.num_ctas - 1) - cta, self.num_ctas)


def last_of(values_gmem: GmemRef) -> Index:
    """Returns the last element of an array with one dimension."""
    return values_gmem[values_gmem.shape[0] - 1]


def contractions(sizes: jax.Array, m: int, tiles: int, depth: int, num_ctas: int) -> tuple[jax.Array, jax.Array]:
    """Returns what `ContractedWork` reads.

    That is: of each group, those with the most rows first, its first row, its rows, its k steps and its index, int32
    [4, groups]; and of each tile how many k steps its CTA has computed before, int32 [groups · tiles].

    Args:
      sizes: rows of each group.
      m: rows of the operands.
      tiles: tiles of each group's result.
      depth: rows of a k step.
      num_ctas: CTAs of the grid.
    """
    starts, ends = bounds(sizes, m)
    rows = ends - starts
    index = jnp.arange(sizes.shape[0], dtype=jnp.int32)
    # A group without rows has one k step, too, of which no row counts: its result is zeros.
    k_steps = jnp.maximum((rows + depth - 1) // depth, 1)
    is_before = (rows[:, None] > rows) | ((rows[:, None] == rows) & (index[:, None] < index))
    # By comparison, as in `tiles`.
    is_at = is_before.sum(axis=0, dtype=jnp.int32) == index[:, None]
    table = jnp.stack([jnp.where(is_at, x, 0).sum(axis=1, dtype=jnp.int32) for x in (starts, rows, k_steps, index)])
    of_tiles = jnp.repeat(table[K_STEPS_OF_GROUP], tiles)
    count = of_tiles.shape[0]
    waves = _turned(jnp.pad(of_tiles, (0, -count % num_ctas)).reshape(-1, num_ctas))
    return table, _turned(jnp.cumsum(waves, axis=0) - waves).reshape(-1)[:count]


def _turned(waves: jax.Array) -> jax.Array:
    """Turns every second row round: from CTAs in the order of tiles to tiles in the order of CTAs, and back."""
    is_odd = jnp.arange(waves.shape[0])[:, None] % 2 == 1
    return jnp.where(is_odd, waves[:, ::-1], waves)


@dataclasses.dataclass(frozen=True)
class ContractedWork(StreamK):
    """The pieces of each CTA for contractions over the rows of a group: whole tiles, dealt out in turn.

    The groups with the most rows come first. Every second wave is dealt out from the last CTA to the first, since the
    first tiles of a wave may have more k steps than the others. With random sizes CTAs then have about the same work.
    Two other ways were measured (H100, 64 groups, 65536 rows): tiles that CTAs draw from a counter take 17% longer with
    equal groups and 7% with a Zipf distribution; tiles of the longest group that alternate with those of the shortest
    one, 14% and 2%.

    Attributes:
      groups_gmem: of each group its first row, rows, k steps and index.
      before_gmem: of each tile how many k steps its CTA has computed before.
      tiles_of_group: tiles of each group's result.
    """

    groups_gmem: GmemRef = None
    before_gmem: GmemRef = None
    tiles_of_group: int = 1

    def _place(self, cta: Index, wave: Index) -> Index:
        return cta + remainder(wave, 2) * (self.num_ctas - 1 - 2 * cta)

    def pieces(self, cta: Index) -> Index:
        return self.full_waves + choose(self._place(cta, self.full_waves) < self.left, 1, 0)

    def piece(self, cta: Index, ordinal: Index, rank: Index = 0) -> Piece:
        tile = self._place(cta, ordinal) + ordinal * self.num_ctas
        k_steps = self.groups_gmem[K_STEPS_OF_GROUP, quotient(tile, self.tiles_of_group)]
        return Piece(tile, 0, k_steps, self.before_gmem[tile], ordinal=ordinal)
