"""Who computes what when if the right operand is gathered: pure integer functions, the same in kernels and in tests.

The shards lie side by side (gathered along n: each gives some columns of the result, over all of k) or one below the
other (gathered along k: each gives a part of every sum). `me` and `step` are those of `overlap.collectives.schedule`:
step 0 is a device's own shard, step s that of the peer s places ahead.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from overlap.kernels.config import Config
from overlap.kernels.tile_order import TileOrder
from overlap.primitives.copies import PullPlan
from overlap.primitives.integers import ceil_div, choose, quotient, remainder, smaller

# A flag stands for so many k steps. One wait takes about as long as the tensor cores need for one step, and the slots
# in flight hide it if it is rare.
K_STEPS_PER_FLAG = 8


@dataclasses.dataclass(frozen=True)
class GatherRhsSchedule:
    """All-gather of the right operand by pulling, then matmul.

    Gathered along n, the output tiles form one flat list, own shard's columns first. Gathered along k, each tile needs
    all shards: it begins its sum with the own one and goes on in the order in which the others arrive.

    A shard is cut into *blocks* of `block_rows` rows (k) by `block_columns` columns (n), each with a flag. Chunks come
    column block by column block: what the first tiles need all of comes before anything else.

    Attributes:
      devices: devices on the ring.
      along: in which dimension of the product the shards are gathered.
      order: the tiles (of a cluster) of one shard's columns ("n"), or of the whole result ("k").
      chunking: how one shard is cut into chunks.
      tile_n: columns of one CTA's tile.
      tile_k: depth of a k step.
    """

    devices: int
    along: Literal["n", "k"]
    order: TileOrder
    chunking: PullPlan
    tile_n: int
    tile_k: int

    @staticmethod
    def of(
        devices: int, along: Literal["n", "k"], m: int, shard: tuple[int, int], itemsize: int, config: Config
    ) -> GatherRhsSchedule:
        """The schedule of a problem: `m` rows of the left operand, and the shape of one shard of the right one."""
        plan = PullPlan.cut(*shard, itemsize, K_STEPS_PER_FLAG * config.tile_k, config.pull.chunk_bytes)
        return GatherRhsSchedule(devices, along, TileOrder.of(m, shard[1], config), plan, config.tile_n, config.tile_k)

    # --- Tiles and their k steps ---

    @property
    def tiles(self) -> int:
        """Output tiles of one device."""
        return self.order.tiles * (self.devices if self.along == "n" else 1)

    def tile(self, index: Any) -> tuple[Any, Any, Any]:
        """Step (along k: 0), tile row, and tile column within that step's shard, of tile `index`."""
        if self.along == "k":
            return 0 * index, *self.order(index)
        step = quotient(index, self.order.tiles)
        return step, *self.order(index - step * self.order.tiles)

    def shard(self, me: Any, step: Any) -> Any:
        """Whose shard device `me` uses in `step`."""
        return remainder(me + step, self.devices)

    @property
    def shard_k_steps(self) -> int:
        """K steps over the rows of one shard; the last may be shorter."""
        return ceil_div(self.chunking.shard_rows, self.tile_k)

    @property
    def k_steps(self) -> int:
        """K steps of a tile."""
        return self.shard_k_steps * (self.devices if self.along == "k" else 1)

    def rows_of_k_step(self, tile_step: Any, k: Any) -> tuple[Any, Any]:
        """The step whose shard, and the first row of it, that k step `k` of a tile multiplies."""
        if self.along == "n":
            return tile_step, k * self.tile_k
        step = quotient(k, self.shard_k_steps)
        return step, (k - step * self.shard_k_steps) * self.tile_k

    # --- Chunks ---

    @property
    def pulled_shards(self) -> int:
        """How many shards are copied to scratch: the peers'."""
        return self.devices - 1

    @property
    def pulled_chunks(self) -> int:
        """Chunks that one device copies."""
        return self.pulled_shards * self.chunking.chunks

    def chunk(self, index: Any) -> tuple[Any, Any, Any]:
        """Step that copy `index` serves, and its first row and column within the shard.

        Along n: shard by shard, within each a column block after the other. Along k: the column blocks of all shards,
        one after the other, since a tile needs its columns of every shard.
        """
        shards = 1 if self.along == "n" else self.pulled_shards
        before = quotient(index, shards * self.chunking.chunks)
        index = index - before * (shards * self.chunking.chunks)
        full = shards * self.chunking.row_groups * self._block_chunks
        column_block = quotient(index, full)
        within = index - column_block * full
        step, group, part = self._in_block(within, self._block_chunks)
        if self._last_block_chunks != self._block_chunks:
            last = self._in_block(within, self._last_block_chunks)
            is_last = column_block == self.column_blocks - 1
            step, group, part = (choose(is_last, a, b) for a, b in zip(last, (step, group, part), strict=True))
        column = (column_block * self._block_chunks + part) * self.chunking.cols
        return 1 + before + step, group * self.chunking.rows, column

    def _in_block(self, index: Any, parts: int) -> tuple[Any, Any, Any]:
        """Shard, group of rows, and part of these, of a chunk within a column block that is `parts` chunks wide."""
        step = quotient(index, self.chunking.row_groups * parts)
        index = index - step * (self.chunking.row_groups * parts)
        return step, quotient(index, parts), remainder(index, parts)

    @property
    def _block_chunks(self) -> int:
        """Chunks side by side in a column block: as many as a tile is wide, so that a tile meets two blocks at most."""
        return min(ceil_div(self.tile_n, self.chunking.cols), self.chunking.chunks_per_row_group)

    @property
    def _last_block_chunks(self) -> int:
        """The same of the last column block."""
        return self.chunking.chunks_per_row_group - (self.column_blocks - 1) * self._block_chunks

    # --- Flags ---

    @property
    def block_rows(self) -> int:
        """Rows of a block; the last one of a shard may have fewer."""
        return K_STEPS_PER_FLAG * self.tile_k

    @property
    def block_columns(self) -> int:
        """Columns of a block; the last one may have fewer."""
        return self._block_chunks * self.chunking.cols

    @property
    def row_blocks(self) -> int:
        """Blocks one below the other in a shard."""
        return ceil_div(self.chunking.shard_rows, self.block_rows)

    @property
    def column_blocks(self) -> int:
        """Blocks side by side in a shard."""
        return ceil_div(self.chunking.chunks_per_row_group, self._block_chunks)

    @property
    def flags_shape(self) -> tuple[int, int, int]:
        """Shape of the flags: [shards in scratch, row blocks, column blocks]."""
        return max(self.pulled_shards, 1), self.row_blocks, self.column_blocks

    def flag(self, step: Any, row: Any, column: Any) -> tuple[Any, Any, Any]:
        """The flag of an element of the shard of `step` ≥ 1."""
        return step - 1, quotient(row, self.block_rows), quotient(column, self.block_columns)

    def flag_target(self, row: Any, column: Any) -> Any:
        """How often the flag of the block that holds (row, column) is raised: once per chunk."""
        per_block = self.block_rows // self.chunking.rows
        last_groups = self.chunking.row_groups - (self.row_blocks - 1) * per_block
        groups, parts = per_block, self._block_chunks
        if last_groups != per_block:
            groups = choose(row >= (self.row_blocks - 1) * self.block_rows, last_groups, groups)
        if self._last_block_chunks != self._block_chunks:
            parts = choose(column >= (self.column_blocks - 1) * self.block_columns, self._last_block_chunks, parts)
        return groups * parts

    def begins_block(self, k: Any) -> Any:
        """Whether k step `k` is the first of a row block: where a tile waits."""
        within = k if self.along == "n" else remainder(k, self.shard_k_steps)
        return remainder(within, K_STEPS_PER_FLAG) == 0

    def columns_of(self, n: Any) -> tuple[Any, Any]:
        """First and last column, within the shard, that tile column `n` needs; the first ≥ shard_cols if none."""
        first = n * self.tile_n
        return first, smaller(first + self.tile_n, self.chunking.shard_cols) - 1

    @property
    def straddles(self) -> bool:
        """Whether a tile may need two column blocks."""
        return self.column_blocks > 1 and self.block_columns % self.tile_n != 0
