"""Who computes what, and who copies what, if the gathered rows are one product: pure integer functions.

`me` and `step` are those of `overlap.collectives.schedule`: step 0 is a device's own shard, step s that of the peer s
places ahead. A *row* is one of all gathered ones unless it is said to be within a shard.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from overlap.collectives.schedule import AllGatherSchedule
from overlap.kernels.config import Config
from overlap.kernels.hooks import BLOCK_ROWS, LEAST_BLOCK_ROWS
from overlap.primitives.copies import PullPlan
from overlap.primitives.integers import ceil_div, choose, largest_divisor, quotient, remainder

# Scales that a warp reads at once, each by a load of its own: on their way together, they take as long as one.
_SCALES_AT_ONCE = 8


@dataclasses.dataclass(frozen=True)
class JoinedSchedule:
    """All-gather of the left operand by copying every shard into one matrix, then a plain product of that.

    A tile may take rows of any number of shards, so a flag stands for the rows of a tile, whosever they are. It is
    raised once per chunk, and no chunk has rows of two tiles. The same is true of pieces of scales.

    Attributes:
      devices: devices on the ring.
      product: the tiles, as of one device that holds all rows.
      chunking: how one shard is cut into chunks.
      scale_rows: how many rows a piece of scales has; 0 if rows have none.
    """

    devices: int
    product: AllGatherSchedule
    chunking: PullPlan
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
        """The schedule of a problem: the shape of one shard of the left operand, [m_shard, k], and n each."""
        m_shard, k = lhs_shard
        # Tiles begin anywhere in a shard: pieces of a common divisor lie in one tile each.
        within_a_tile = math.gcd(config.tile_m, m_shard)
        return JoinedSchedule(
            devices,
            AllGatherSchedule.of(1, (devices * m_shard, k), widths, itemsize, config),
            PullPlan.cut(m_shard, k, itemsize, within_a_tile, config.pull.chunk_bytes),
            largest_divisor(within_a_tile, _SCALES_AT_ONCE) if scaled else 0,
        )

    # --- Chunks: those of the peers first, since they have the longer way ---

    @property
    def pulled_chunks(self) -> int:
        """Chunks that one device copies from its peers."""
        return (self.devices - 1) * self.chunking.chunks

    @property
    def chunks(self) -> int:
        """Chunks that one device copies in all, its own shard's being the last."""
        return self.devices * self.chunking.chunks

    def chunk(self, index: Any) -> tuple[Any, Any, Any]:
        """Step whose shard chunk `index` is of, and its first row and column within that."""
        before = quotient(index, self.chunking.chunks)
        return remainder(before + 1, self.devices), *self.chunking.origin(index - before * self.chunking.chunks)

    def row(self, me: Any, step: Any, row: Any) -> Any:
        """Which of all rows is `row` of the shard of `step`."""
        return remainder(me + step, self.devices) * self.chunking.shard_rows + row

    # --- Scales ---

    @property
    def scale_transfers(self) -> int:
        """Pieces of scales that one device copies, its own included."""
        return self.rows // self.scale_rows if self.scale_rows else 0

    def scale_transfer(self, index: Any) -> tuple[Any, Any]:
        """Step whose shard piece `index` of the scales is of, and its first row within that."""
        per_shard = self.chunking.shard_rows // self.scale_rows
        before = quotient(index, per_shard)
        return before, (index - before * per_shard) * self.scale_rows

    @property
    def read_rows(self) -> int:
        """How many scales are read: those of whole blocks of rows as an epilogue is called with them."""
        # A tile of any number of rows (`Config.swap_operands`) ends with a block that does not begin at a multiple.
        unit = BLOCK_ROWS if self.block_rows % LEAST_BLOCK_ROWS == 0 else self.block_rows
        return ceil_div(self.rows, unit) * unit

    # --- Flags ---

    @property
    def rows(self) -> int:
        """Rows of all shards."""
        return self.devices * self.chunking.shard_rows

    @property
    def block_rows(self) -> int:
        """Rows of a tile, and of a flag; the last one may stand for fewer."""
        return self.product.block_rows

    @property
    def flags_shape(self) -> tuple[int]:
        """Shape of the flags: one per row of tiles."""
        return (ceil_div(self.rows, self.block_rows),)

    def flag(self, row: Any) -> Any:
        """The flag of a row."""
        return quotient(row, self.block_rows)

    def flag_target(self, flag: Any) -> Any:
        """How often a flag is raised: once per chunk, and per piece of scales."""
        (flags,) = self.flags_shape

        def times(rows: int) -> int:
            pieces = rows // self.scale_rows if self.scale_rows else 0
            return rows // self.chunking.rows * self.chunking.chunks_per_row_group + pieces

        whole, rest = times(self.block_rows), times(self.rows - (flags - 1) * self.block_rows)
        return whole if rest == whole else choose(flag == flags - 1, rest, whole)
