"""The schedule of a gathered left operand whose shards are joined: all gathered rows are computed as one product.

All functions are pure integer functions. `me` is a device's position in its peer group. `step` counts the shards in
the order in which a device uses them: step 0 is its own shard, step s the shard of the device s positions ahead. A
*row* is a row of the gathered matrix, unless it is said to be a row of a shard.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from overlap.collectives.gather.lhs_schedule import AllGatherSchedule
from overlap.kernels.config import Config
from overlap.kernels.hooks import BLOCK_ROWS, LEAST_BLOCK_ROWS
from overlap.primitives.copies import Chunking
from overlap.primitives.integers import ceil_div, choose, largest_divisor, quotient, remainder
from overlap.primitives.types import Index

# The most scales of one transfer. A warp reads each of them by a load of its own. All these loads are under way at the
# same time, so they take as long as one.
_SCALES_AT_ONCE = 8


@dataclasses.dataclass(frozen=True)
class JoinedSchedule:
    """All-gather of the left operand by copying every shard into one matrix, then a plain product of that matrix.

    A tile may have rows of several shards. So one flag stands for all rows of a tile, whichever shards they belong to.
    The flag is raised once for each chunk and once for each transfer of scales. No chunk and no transfer has rows of
    two tiles.

    Attributes:
      devices: number of devices in the peer group.
      product: the tiles: the schedule of a single device that holds all rows.
      chunking: how one shard is cut into chunks.
      scale_rows: number of rows whose scales one transfer brings; 0 if rows have no scales.
    """

    devices: int
    product: AllGatherSchedule
    chunking: Chunking
    scale_rows: int = 0

    @staticmethod
    def of(
        devices: int,
        lhs_shard: tuple[int, int],
        widths: Sequence[int],
        itemsize: int,
        config: Config,
        *,
        scaled: bool = False,
    ) -> JoinedSchedule:
        """Makes the schedule of a problem.

        Args:
          devices: number of devices in the peer group.
          lhs_shard: shape of one shard of the left operand, [m_shard, k].
          widths: n of each right operand.
          itemsize: bytes of an element of the left operand.
          config: tile sizes and chunk sizes.
          scaled: whether rows have scales.
        """
        m_shard, k = lhs_shard
        # A tile may begin anywhere in a shard. If both sizes are cut into ranges of a common divisor, each range lies
        # within one tile.
        within_a_tile = math.gcd(config.tile_m, m_shard)
        return JoinedSchedule(
            devices,
            AllGatherSchedule.of(1, (devices * m_shard, k), widths, itemsize, config),
            Chunking.cut(m_shard, k, itemsize, within_a_tile, config.chunk_bytes),
            largest_divisor(within_a_tile, _SCALES_AT_ONCE) if scaled else 0,
        )

    # --- Chunks: the peers' first, since they take longer ---

    @property
    def pulled_chunks(self) -> int:
        """Number of chunks that one device copies from its peers."""
        return (self.devices - 1) * self.chunking.chunks

    @property
    def chunks(self) -> int:
        """Number of chunks that one device copies in all; those of its own shard are the last ones."""
        return self.devices * self.chunking.chunks

    def chunk(self, index: Index) -> tuple[Index, Index, Index]:
        """Returns the step whose shard chunk `index` belongs to, and the chunk's first row and column in that shard."""
        before = quotient(index, self.chunking.chunks)
        return remainder(before + 1, self.devices), *self.chunking.origin(index - before * self.chunking.chunks)

    def row(self, me: Index, step: Index, row: Index) -> Index:
        """Returns the row of the gathered matrix in which row `row` of the shard of `step` lies."""
        return remainder(me + step, self.devices) * self.chunking.shard_rows + row

    # --- Scales ---

    @property
    def scale_transfers(self) -> int:
        """Number of transfers of scales of one device, those of its own shard included."""
        return self.rows // self.scale_rows if self.scale_rows else 0

    def scale_transfer(self, index: Index) -> tuple[Index, Index]:
        """Returns the step whose shard transfer `index` of scales serves, and the first row of it in that shard."""
        per_shard = self.chunking.shard_rows // self.scale_rows
        before = quotient(index, per_shard)
        return before, (index - before * per_shard) * self.scale_rows

    @property
    def read_rows(self) -> int:
        """Number of rows whose scales epilogues read: `rows`, and those below the last row that share its block."""
        # An epilogue's block has 64 or 128 rows, counted from the first row of its tile (`hooks.BLOCK_ROWS`). Only with
        # `Config.swap_operands` may the rows of a tile be no multiple of 64. Then a block may begin at any multiple of
        # 8, and the last block of a tile ends with the tile: round up to whole tiles.
        unit = BLOCK_ROWS if self.block_rows % LEAST_BLOCK_ROWS == 0 else self.block_rows
        return ceil_div(self.rows, unit) * unit

    # --- Flags ---

    @property
    def rows(self) -> int:
        """Rows of the gathered matrix."""
        return self.devices * self.chunking.shard_rows

    @property
    def block_rows(self) -> int:
        """Rows of a tile. One flag stands for one such block of rows; the last block may have fewer."""
        return self.product.block_rows

    @property
    def flags_shape(self) -> tuple[int]:
        """Shape of the flags: one for each row of tiles."""
        return (ceil_div(self.rows, self.block_rows),)

    def flag(self, row: Index) -> Index:
        """Index of the flag of a row."""
        return quotient(row, self.block_rows)

    def flag_target(self, flag: Index) -> Index:
        """Returns how often a flag is raised: once for each chunk, and once for each transfer of scales."""
        (flags,) = self.flags_shape

        def times(rows: int) -> int:
            scale_transfers = rows // self.scale_rows if self.scale_rows else 0
            return rows // self.chunking.rows * self.chunking.chunks_per_row_group + scale_transfers

        whole, rest = times(self.block_rows), times(self.rows - (flags - 1) * self.block_rows)
        return whole if rest == whole else choose(flag == flags - 1, rest, whole)
