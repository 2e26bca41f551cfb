"""Who computes what when, and which flag says so: pure integer functions, the same in kernels and in tests.

Notation: `me` is a device's position on the ring, `step` counts the shards in the order in which a device uses them. In
step 0 it multiplies its own shard, in step s that of the peer s places ahead, so that at any time all devices read from
different peers.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from overlap.kernels.tile_order import TileOrder
from overlap.primitives.copies import PullPlan
from overlap.primitives.integers import ceil_div, choose, quotient, remainder


@dataclasses.dataclass(frozen=True)
class AllGatherSchedule:
    """All-gather of the left operand by pulling, then matmul, as one flat list of output tiles.

    There is no device-wide step: a CTA takes every `num_ctas`-th tile of the list, whichever shard it belongs to, and
    waits for nothing but its own rows. Chunks are dealt to the CTAs' communicators in the same manner.

    Attributes:
      devices: devices on the ring.
      order: the tiles (of a cluster) of one shard's product.
      block_rows: rows of one tile, and of one flag.
      plan: how one shard is cut into chunks.
    """

    devices: int
    order: TileOrder
    block_rows: int
    plan: PullPlan

    @property
    def tiles(self) -> int:
        """Output tiles of one device."""
        return self.devices * self.order.tiles

    def tile(self, index: Any) -> tuple[Any, Any, Any]:
        """Step, tile row within that step's shard, and tile column of tile `index`."""
        step = quotient(index, self.order.tiles)
        m, n = self.order(index - step * self.order.tiles)
        return step, m, n

    def shard(self, me: Any, step: Any) -> Any:
        """Whose shard device `me` multiplies in `step`."""
        return remainder(me + step, self.devices)

    @property
    def pulls(self) -> int:
        """Chunks that one device pulls."""
        return (self.devices - 1) * self.plan.chunks

    def chunk(self, index: Any) -> tuple[Any, Any, Any]:
        """Step that pull `index` serves, and its first row and column within the shard."""
        before = quotient(index, self.plan.chunks)
        row, column = self.plan.origin(index - before * self.plan.chunks)
        return before + 1, row, column

    @property
    def row_blocks(self) -> int:
        """Blocks of rows in a shard; the last may have fewer rows."""
        return ceil_div(self.plan.shard_rows, self.block_rows)

    @property
    def flags(self) -> tuple[int, int]:
        """Shape of the flags: [steps with a pulled shard, row blocks]; at least one of each, since none cannot be."""
        return max(self.devices - 1, 1), self.row_blocks

    def flag(self, step: Any, row: Any) -> tuple[Any, Any]:
        """The flag of a row of the shard of `step` ≥ 1."""
        return step - 1, quotient(row, self.block_rows)

    def flag_target(self, block: Any) -> Any:
        """How often the flag of a row block is raised: once per chunk. The last block may have fewer rows."""
        per_row = self.plan.chunks_per_row_group
        last = self.row_blocks - 1
        whole = self.block_rows // self.plan.rows * per_row
        rest = (self.plan.shard_rows - last * self.block_rows) // self.plan.rows * per_row
        return whole if rest == whole else choose(block == last, rest, whole)
