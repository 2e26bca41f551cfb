"""The schedule of a gathered right operand: who computes which tile when, and which flag each k step waits for.

All functions are pure integer functions. Kernels call them with traced scalars, tests with Python ints.

The shards are gathered along n or along k. Along n, the shards lie side by side: each gives some columns of the result,
over all of k. Along k, the shards lie one below the other: each gives a part of every sum. `me` is a device's position
in its peer group. `step` counts the shards in the order in which a device uses them: step 0 is its own shard, step s
the shard of the device s positions ahead.
"""

from __future__ import annotations

import dataclasses

from overlap.kernels.config import SWIZZLE_BYTES, Config
from overlap.kernels.operations import Dimension
from overlap.kernels.tile_order import TileOrder
from overlap.primitives.copies import Chunking
from overlap.primitives.integers import ceil_div, choose, quotient, remainder, smaller
from overlap.primitives.types import Index, Predicate

# The number of k steps whose rows one flag stands for. One wait takes about as long as the tensor cores need for one k
# step. If waits are rare, the stages that are already loaded hide them.
K_STEPS_PER_FLAG = 8


@dataclasses.dataclass(frozen=True)
class GatherRhsSchedule:
    """All-gather of the right operand by pulling, then matmul.

    Gathered along n, the output tiles form one flat list that begins with the columns of the own shard. Gathered along
    k, each tile needs all shards: its sum begins with the own shard and goes on with the others in the order in which
    they arrive.

    A shard is cut into *blocks* of `block_rows` rows (k) by `block_columns` columns (n), each with a flag. Chunks are
    copied one column block after the other, so that all that the first tiles need comes first.

    Attributes:
      devices: number of devices in the peer group.
      along: the dimension of the product along which the shards are gathered.
      order: the tiles of one shard's columns ("n"), or of the whole result ("k"). The two tiles of a pair of CTAs count
        as one.
      chunking: how one shard is cut into chunks.
      tile_n: columns of one CTA's tile.
      tile_k: depth of a k step.
    """

    devices: int
    along: Dimension
    order: TileOrder
    chunking: Chunking
    tile_n: int
    tile_k: int

    @staticmethod
    def of(
        devices: int, along: Dimension, m: int, shard: tuple[int, int], itemsize: int, config: Config
    ) -> GatherRhsSchedule:
        """Makes the schedule of a problem.

        Args:
          devices: number of devices in the peer group.
          along: the dimension along which the shards are gathered.
          m: rows of the left operand.
          shard: shape of one shard of the right operand, [k_shard, n] or [k, n_shard].
          itemsize: bytes of an element of the right operand.
          config: tile sizes and chunk sizes.
        """
        depth = SWIZZLE_BYTES // itemsize
        chunking = Chunking.cut(*shard, itemsize, K_STEPS_PER_FLAG * depth, config.chunk_bytes)
        order = TileOrder.of(m, shard[1], config)
        return GatherRhsSchedule(devices, along, order, chunking, config.tile_n, depth)

    # --- Tiles and their k steps ---

    @property
    def tiles(self) -> int:
        """Number of output tiles of one device."""
        return self.order.tiles * (self.devices if self.along == "n" else 1)

    def tile(self, index: Index) -> tuple[Index, Index, Index]:
        """Returns where tile `index` of the list lies.

        Returns:
          The step whose shard gives the tile's columns (0 if gathered along k); the tile row; the tile column within
          that shard.
        """
        if self.along == "k":
            return 0 * index, *self.order(index)
        step = quotient(index, self.order.tiles)
        return step, *self.order(index - step * self.order.tiles)

    def shard(self, me: Index, step: Index) -> Index:
        """Returns the position of the device whose shard device `me` uses in `step`."""
        return remainder(me + step, self.devices)

    @property
    def shard_k_steps(self) -> int:
        """Number of k steps over the rows of one shard; the last one may be shorter."""
        return ceil_div(self.chunking.shard_rows, self.tile_k)

    @property
    def k_steps(self) -> int:
        """Number of k steps of a tile."""
        return self.shard_k_steps * (self.devices if self.along == "k" else 1)

    def rows_of_k_step(self, tile_step: Index, k_step: Index) -> tuple[Index, Index]:
        """Returns which rows of the right operand a k step multiplies: a step, and the first row in its shard.

        Args:
          tile_step: the step of the tile.
          k_step: the index of the k step in the tile.
        """
        if self.along == "n":
            return tile_step, k_step * self.tile_k
        step = quotient(k_step, self.shard_k_steps)
        return step, (k_step - step * self.shard_k_steps) * self.tile_k

    # --- Chunks ---

    @property
    def pulled_shards(self) -> int:
        """Number of shards that are copied to scratch: all but the own one."""
        return self.devices - 1

    @property
    def pulled_chunks(self) -> int:
        """Number of chunks that one device copies."""
        return self.pulled_shards * self.chunking.chunks

    def chunk(self, index: Index) -> tuple[Index, Index, Index]:
        """Returns where chunk `index` lies: the step of its shard, and its first row and column in that shard.

        Along n the chunks come shard by shard, and within a shard one column block after the other. Along k they come
        one column block after the other, and within a column block shard by shard: a tile needs its columns of every
        shard.
        """
        shards = 1 if self.along == "n" else self.pulled_shards
        before = quotient(index, shards * self.chunking.chunks)
        index = index - before * (shards * self.chunking.chunks)
        full = shards * self.chunking.row_groups * self._block_chunks
        column_block = quotient(index, full)
        within = index - column_block * full
        found = self._in_column_block(within, self._block_chunks)
        if self._last_block_chunks != self._block_chunks:
            if_last = self._in_column_block(within, self._last_block_chunks)
            is_last = column_block == self.column_blocks - 1
            found = tuple(choose(is_last, a, b) for a, b in zip(if_last, found, strict=True))
        shard, row_group, chunk_column = found
        column = (column_block * self._block_chunks + chunk_column) * self.chunking.cols
        return 1 + before + shard, row_group * self.chunking.rows, column

    def _in_column_block(self, index: Index, width: int) -> tuple[Index, ...]:
        """Returns where chunk `index` of a column block lies, which is `width` chunks wide.

        Returns:
          The index of the chunk's shard, of its row group, and of its column of chunks in the column block.
        """
        shard = quotient(index, self.chunking.row_groups * width)
        index = index - shard * (self.chunking.row_groups * width)
        return shard, quotient(index, width), remainder(index, width)

    @property
    def _block_chunks(self) -> int:
        """Number of chunks side by side in a column block.

        A column block is at least as wide as a tile (or as the shard), so that a tile needs at most two column blocks.
        """
        return min(ceil_div(self.tile_n, self.chunking.cols), self.chunking.chunks_per_row_group)

    @property
    def _last_block_chunks(self) -> int:
        """Chunks side by side in the last column block."""
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
        """Number of blocks one below the other in a shard."""
        return ceil_div(self.chunking.shard_rows, self.block_rows)

    @property
    def column_blocks(self) -> int:
        """Number of blocks side by side in a shard."""
        return ceil_div(self.chunking.chunks_per_row_group, self._block_chunks)

    @property
    def flags_shape(self) -> tuple[int, int, int]:
        """Shape of the flags: [shards in scratch (at least 1), row blocks, column blocks]."""
        return max(self.pulled_shards, 1), self.row_blocks, self.column_blocks

    def flag(self, step: Index, row: Index, column: Index) -> tuple[Index, Index, Index]:
        """Index of the flag of the block that holds (row, column) of the shard of `step` ≥ 1."""
        return step - 1, quotient(row, self.block_rows), quotient(column, self.block_columns)

    def flag_target(self, row: Index, column: Index) -> Index:
        """Returns how often the flag of the block that holds (row, column) is raised: once for each chunk."""
        per_block = self.block_rows // self.chunking.rows
        last_groups = self.chunking.row_groups - (self.row_blocks - 1) * per_block
        groups, width = per_block, self._block_chunks
        if last_groups != per_block:
            groups = choose(row >= (self.row_blocks - 1) * self.block_rows, last_groups, groups)
        if self._last_block_chunks != self._block_chunks:
            width = choose(column >= (self.column_blocks - 1) * self.block_columns, self._last_block_chunks, width)
        return groups * width

    def begins_block(self, k_step: Index) -> Predicate:
        """Whether k step `k_step` of a tile is the first one of a row block. The tile waits for the block there."""
        within = k_step if self.along == "n" else remainder(k_step, self.shard_k_steps)
        return remainder(within, K_STEPS_PER_FLAG) == 0

    def columns_of(self, n: Index) -> tuple[Index, Index]:
        """Returns the first and the last column of a shard that tile column `n` needs."""
        first = n * self.tile_n
        return first, smaller(first + self.tile_n, self.chunking.shard_cols) - 1

    @property
    def straddles(self) -> bool:
        """Whether some tile needs two column blocks."""
        return self.column_blocks > 1 and self.block_columns % self.tile_n != 0
