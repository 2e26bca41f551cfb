"""Who computes what when, and which flag says so: pure integer functions, the same in kernels and in tests.

Notation: `me` is a device's position on the ring, `step` counts the shards in the order in which a device uses them. In
step 0 it multiplies its own shard, in step s that of the peer s places ahead, so that at any time all devices read from
different peers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from overlap.kernels.config import Config
from overlap.kernels.tile_order import TileOrder
from overlap.primitives.copies import PullPlan
from overlap.primitives.integers import ceil_div, choose, quotient, remainder


@dataclasses.dataclass(frozen=True)
class AllGatherSchedule:
    """All-gather of the left operand, then matmul, as one flat list of output tiles.

    There is no device-wide step: a CTA takes every `num_ctas`-th tile of the list, whichever shard it belongs to, and
    waits for nothing but its own rows. Where shards are pulled, the communicators of whichever CTAs run draw the chunks
    in the order in which tiles need them; on a ring, rows are passed on from the tiles themselves.

    Batch elements lie below each other and right operands side by side in the grid of a shard's tiles, each filled up
    to whole tiles: so the order of tiles keeps its locality across them, and one list still balances them all.

    Attributes:
      devices: devices on the ring.
      order: the tiles (of a cluster) of one shard's product, batch elements and right operands included.
      block_rows: rows of one tile, and of one flag.
      chunking: its sizes, and how one batch element of a shard is cut into chunks to be pulled.
      batch_size: how many batch elements a shard has; its rows are counted through them.
      sides: tile columns of each right operand; () for a single one.
      keeps_own: whether the peers' shards lie where they belong among all, beside a copy of the own one.
      scaled: whether scales of its rows are pulled with each row block, as one transfer more.
      scale_k_steps: k steps whose blocks have scales of their own, where these are scales of blocks; 0: of whole rows.
    """

    devices: int
    order: TileOrder
    block_rows: int
    chunking: PullPlan
    batch_size: int = 1
    sides: tuple[int, ...] = ()
    keeps_own: bool = False
    scaled: bool = False
    scale_k_steps: int = 0

    @staticmethod
    def of(
        devices: int,
        lhs_shard: Sequence[int],
        widths: Sequence[int],
        itemsize: int,
        config: Config,
        *,
        keeps_own: bool = False,
        scaled: bool = False,
        scale_k_steps: int = 0,
    ) -> AllGatherSchedule:
        """The schedule of a problem: the shape of one shard of the left operand, [(batch,) m_shard, k], and n each."""
        (*batches, m_shard, k), (rows, columns) = lhs_shard, config.cluster_tile
        batch, sides = math.prod(batches), tuple(ceil_div(n, columns) for n in widths)
        order = TileOrder(batch * ceil_div(m_shard, rows), sum(sides), config.order_minor, config.order_width)
        plan = PullPlan.cut(m_shard, k, itemsize, config.tile_m, config.pull.chunk_bytes)
        return AllGatherSchedule(devices, order, config.tile_m, plan, batch, sides, keeps_own, scaled, scale_k_steps)

    @property
    def tiles(self) -> int:
        """Output tiles of one device."""
        return self.devices * self.order.tiles

    def tile(self, index: Any) -> tuple[Any, Any, Any]:
        """Step, tile row within that step's shard (all its batch elements), and tile column of tile `index`."""
        step = quotient(index, self.order.tiles)
        m, n = self.order(index - step * self.order.tiles)
        return step, m, n

    def batch_of(self, m: Any) -> tuple[Any, Any]:
        """Batch element of a tile row, and the tile row within it."""
        return _split(m, self.order.m_tiles // self.batch_size, self.batch_size)

    def side_of(self, n: Any) -> tuple[Any, Any]:
        """Right operand of a tile column, and the tile column within it."""
        side, first, begin = 0, 0, 0
        for tiles in self.sides[:-1]:
            begin += tiles
            is_behind = n >= begin
            side, first = side + choose(is_behind, 1, 0), choose(is_behind, begin, first)
        return side, n - first

    def first_column(self, side: Any) -> Any:
        """The first tile column of a right operand."""
        first = 0
        for index, tiles in enumerate(self.sides[:-1]):
            first = first + choose(side > index, tiles, 0)
        return first

    def shard(self, me: Any, step: Any) -> Any:
        """Whose shard device `me` multiplies in `step`."""
        return remainder(me + step, self.devices)

    @property
    def scratch_shards(self) -> int:
        """How many shards the peers' ones lie among."""
        return self.devices if self.keeps_own else self.devices - 1

    def scratch_index(self, me: Any, step: Any) -> Any:
        """Where device `me` lays the shard of `step` ≥ 1, and its own one (0) if it keeps that."""
        return self.shard(me, step) if self.keeps_own else step - 1

    @property
    def chunks(self) -> int:
        """Chunks of one shard."""
        return self.batch_size * self.chunking.chunks

    @property
    def pulled_chunks(self) -> int:
        """Chunks that one device pulls."""
        return (self.devices - 1) * self.chunks

    def chunk(self, index: Any) -> tuple[Any, Any, Any]:
        """Step that pull `index` serves, and its first row and column within the shard."""
        before = quotient(index, self.chunks)
        return before + 1, *self.origin(index - before * self.chunks)

    def origin(self, chunk: Any) -> tuple[Any, Any]:
        """First row and column of a chunk of a shard."""
        element, within = _split(chunk, self.chunking.chunks, self.batch_size)
        row, column = self.chunking.origin(within)
        return element * self.chunking.shard_rows + row, column

    def batch_of_row(self, row: Any) -> tuple[Any, Any]:
        """Batch element of a row of a shard, and the row within it."""
        return _split(row, self.chunking.shard_rows, self.batch_size)

    @property
    def row_blocks(self) -> int:
        """Blocks of rows in a batch element of a shard; the last may have fewer rows."""
        return ceil_div(self.chunking.shard_rows, self.block_rows)

    @property
    def flags_shape(self) -> tuple[int, int]:
        """Shape of the flags: [steps with a peer's shard, row blocks]; at least one of each, since none cannot be."""
        return max(self.devices - 1, 1), self.batch_size * self.row_blocks

    def flag(self, step: Any, row: Any) -> tuple[Any, Any]:
        """The flag of a row of the shard of `step` ≥ 1."""
        element, within = self.batch_of_row(row)
        return step - 1, element * self.row_blocks + quotient(within, self.block_rows)

    def passes_on(self, step: Any, m: Any, side: Any, n: Any) -> Any:
        """On a ring: whether a CTA with this tile passes its rows on, for step + 1 of the device before this one.

        Each row block's are passed on once, from the first tile column; those of the last step nobody needs. The second
        tile of a cluster may lie wholly below the last row.
        """
        return (side == 0) & (n == 0) & (m < self.row_blocks) & (step < self.devices - 1)

    def padded_rows(self, config: Config) -> int:
        """Rows of one batch element, filled up to whole tiles of a cluster: so many scales it has in a vector."""
        return self.order.m_tiles // self.batch_size * config.cluster_tile[0]

    @property
    def scale_transfers(self) -> int:
        """Pieces of scales that one device pulls: one per row block."""
        return (self.devices - 1) * self.batch_size * self.row_blocks if self.scaled else 0

    def scale_transfer(self, index: Any) -> tuple[Any, Any, Any]:
        """Step that piece `index` of the scales serves, and the batch element and row block that it is of."""
        before = quotient(index, self.batch_size * self.row_blocks)
        return before + 1, *_split(
            index - before * (self.batch_size * self.row_blocks), self.row_blocks, self.batch_size
        )

    def flag_target(self, block: Any) -> Any:
        """How often the flag of a batch element's row block is raised where shards are pulled: once per copy."""
        per_row = self.chunking.chunks_per_row_group
        last = self.row_blocks - 1
        whole = self.block_rows // self.chunking.rows * per_row + self.scaled
        rest = ceil_div(self.chunking.shard_rows - last * self.block_rows, self.chunking.rows) * per_row + self.scaled
        return whole if rest == whole else choose(block == last, rest, whole)


def _split(index: Any, size: int, count: int) -> tuple[Any, Any]:
    """Which of `count` pieces of `size` an index lies in, and where in it."""
    if count == 1:
        return 0, index
    piece = quotient(index, size)
    return piece, index - piece * size
