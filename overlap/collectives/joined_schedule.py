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
from overlap.primitives.copies import PullPlan
from overlap.primitives.integers import ceil_div, choose, quotient, remainder


@dataclasses.dataclass(frozen=True)
class JoinedSchedule:
    """All-gather of the left operand by copying every shard into one matrix, then a plain product of that.

    A tile may take rows of any number of shards, so a flag stands for the rows of a tile, whosever they are. It is
    raised once per chunk, and no chunk has rows of two tiles.

    Attributes:
      devices: devices on the ring.
      product: the tiles, as of one device that holds all rows.
      plan: how one shard is cut into chunks.
    """

    devices: int
    product: AllGatherSchedule
    plan: PullPlan

    @staticmethod
    def of(
        devices: int, m_shard: int, n_shards: Sequence[int], k: int, itemsize: int, config: Config
    ) -> JoinedSchedule:
        """The schedule of a problem of the given per-shard sizes."""
        return JoinedSchedule(
            devices,
            AllGatherSchedule.of(1, devices * m_shard, n_shards, k, itemsize, config),
            # Tiles begin anywhere in a shard: chunks of a common divisor lie in one tile each.
            PullPlan.cut(m_shard, k, itemsize, math.gcd(config.tile_m, m_shard), config.chunk_bytes),
        )

    # --- Chunks: those of the peers first, since they have the longer way ---

    @property
    def pulls(self) -> int:
        """Chunks that one device copies from its peers."""
        return (self.devices - 1) * self.plan.chunks

    @property
    def chunks(self) -> int:
        """Chunks that one device copies in all, its own shard's being the last."""
        return self.devices * self.plan.chunks

    def chunk(self, index: Any) -> tuple[Any, Any, Any]:
        """Step whose shard chunk `index` is of, and its first row and column within that."""
        before = quotient(index, self.plan.chunks)
        return remainder(before + 1, self.devices), *self.plan.origin(index - before * self.plan.chunks)

    def row(self, me: Any, step: Any, row: Any) -> Any:
        """Which of all rows is `row` of the shard of `step`."""
        return remainder(me + step, self.devices) * self.plan.shard_rows + row

    # --- Flags ---

    @property
    def rows(self) -> int:
        """Rows of all shards."""
        return self.devices * self.plan.shard_rows

    @property
    def block_rows(self) -> int:
        """Rows of a tile, and of a flag; the last one may stand for fewer."""
        return self.product.block_rows

    @property
    def flags(self) -> tuple[int]:
        """Shape of the flags: one per row of tiles."""
        return (ceil_div(self.rows, self.block_rows),)

    def flag(self, row: Any) -> Any:
        """The flag of a row."""
        return quotient(row, self.block_rows)

    def flag_target(self, flag: Any) -> Any:
        """How often a flag is raised: once per chunk."""
        (flags,), per_row = self.flags, self.plan.chunks_per_row_group
        whole = self.block_rows // self.plan.rows * per_row
        rest = (self.rows - (flags - 1) * self.block_rows) // self.plan.rows * per_row
        return whole if rest == whole else choose(flag == flags - 1, rest, whole)
