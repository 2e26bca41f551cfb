"""Who computes what when if the result is summed over the devices and scattered: pure integer functions.

The result of each device is a *block*: some rows, or some columns, of the sum. Every device computes its part of every
block, in step s that of the device s + 1 places ahead, and its own block last. By *push* it sends each part to the
block's owner, which adds them all to its own: the part of the device s + 1 places behind is its *term* s. So at any
time all devices send to different ones. By *ring* it sends what it has computed to the device before it, which
computes its part of the same block in the next step, and adds to that what has come: so from step 1 on each block has
one term, and what is sent is the sum of all parts so far.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from overlap.kernels.config import Config
from overlap.kernels.tile_order import TileOrder
from overlap.primitives.copies import PullPlan
from overlap.primitives.integers import ceil_div, larger, quotient, remainder, smaller


@dataclasses.dataclass(frozen=True)
class Strips:
    """How the tiles of a device's own block are cut for the peers, where these want it too: some rows of a tile each.

    Strips come in the order of the tiles, and none has rows of two. Of the last tile row some may have fewer rows, or
    none; those of the last tile column may have fewer columns. They are loaded in full, filled up with zeros.

    Attributes:
      order: the tiles of the block, batch elements one below the other.
      batch_size: how many batch elements.
      block: rows and columns of the block (of one batch element).
      tile: rows and columns of a tile.
      rows: rows of a strip: a divisor of a tile's, if the block has several tile rows.
    """

    order: TileOrder
    batch_size: int
    block: tuple[int, int]
    tile: tuple[int, int]
    rows: int

    @property
    def cols(self) -> int:
        """Columns of a strip."""
        return self.tile[1]

    @property
    def short(self) -> None:
        """All are loaded in one size."""
        return None

    @property
    def last_cols(self) -> int:
        """Columns of the strips of the last tile column."""
        return self.block[1] % self.cols or self.cols

    @property
    def per_tile(self) -> int:
        """Strips of one tile."""
        return ceil_div(min(self.tile[0], self.block[0]), self.rows)

    @property
    def count(self) -> int:
        """Strips of the block."""
        return self.order.tiles * self.per_tile

    def strip(self, index: Any) -> tuple[tuple[Any, Any], Any, Any]:
        """Of strip `index` the batch element and the tile's place, and its first row and column in the block."""
        tile = quotient(index, self.per_tile)
        row, column = self.order(tile)
        of_element = self.order.m_tiles // self.batch_size
        element = 0 if self.batch_size == 1 else quotient(row, of_element)
        first = (row - element * of_element) * self.tile[0] + (index - tile * self.per_tile) * self.rows
        return (element, row * self.order.n_tiles + column), first, column * self.cols

    def rows_at(self, row: Any) -> Any:
        """Rows of the strip that begins at `row`: there may be none."""
        return smaller(larger(self.block[0] - row, 0), self.rows)


@dataclasses.dataclass(frozen=True)
class ReduceScatterSchedule:
    """Matmul, then reduce-scatter, as one flat list of output tiles: the peers' blocks first, the own one last.

    Whichever CTAs run draw the tiles in this order. So those of a peer wait for nothing, and an own one only for what
    peers compute before theirs. What has been computed for peers is sent in chunks, which are drawn in the same order.

    Attributes:
      devices: devices on the ring.
      along: in which dimension of the product the result is scattered.
      order: the tiles of one block, batch elements one below the other.
      batch_size: how many batch elements.
      boxes: how many boxes a tile is stored as, and rows and columns of each.
      chunking: how the boxes of one block, one below the other, are cut into chunks.
      uses_ring: whether sums are passed on from device to device; else each part is pushed to the block's owner.
    """

    devices: int
    along: Literal["m", "n"]
    order: TileOrder
    batch_size: int
    boxes: tuple[int, int, int]
    chunking: PullPlan
    uses_ring: bool = False

    @staticmethod
    def of(
        devices: int,
        along: Literal["m", "n"],
        block: tuple[int, int, int],
        boxes: tuple[int, int, int],
        itemsize: int,
        config: Config,
        *,
        uses_ring: bool = False,
    ) -> ReduceScatterSchedule:
        """The schedule of a problem.

        Args:
          devices: devices on the ring.
          along: in which dimension the result is scattered.
          block: batch elements, rows and columns of one device's result.
          boxes: of a tile: how many, and rows and columns of each.
          itemsize: bytes of an element of what is sent.
          config: sizes.
          uses_ring: as the attribute.
        """
        (batch, m, n), (count, rows, columns) = block, boxes
        order = TileOrder(
            batch * ceil_div(m, config.tile_m), ceil_div(n, config.tile_n), config.order_minor, config.order_width
        )
        plan = PullPlan.cut(order.tiles * count * rows, columns, itemsize, rows, config.pull.chunk_bytes)
        return ReduceScatterSchedule(devices, along, order, batch, boxes, plan, uses_ring)

    def strips(self, block: tuple[int, int, int], rows: int, config: Config) -> Strips:
        """How the own block is cut for the peers, in strips of so many rows at most; `block` as in `of`."""
        _, m, n = block
        return Strips(self.order, self.batch_size, (m, n), (config.tile_m, config.tile_n), min(rows, m))

    # --- Tiles ---

    @property
    def tiles(self) -> int:
        """Tiles that one device computes."""
        return self.devices * self.order.tiles

    def tile(self, index: Any) -> tuple[Any, Any, Any, Any]:
        """Step, batch element, tile row within that, and tile column within the block of that step, of tile `index`."""
        step, row, n = self._row_of_all(index)
        if self.batch_size == 1:
            return step, 0, row, n
        rows = self.order.m_tiles // self.batch_size
        element = quotient(row, rows)
        return step, element, row - element * rows, n

    def _row_of_all(self, index: Any) -> tuple[Any, Any, Any]:
        """Step, tile row within the block's batch elements one below the other, and tile column."""
        step = quotient(index, self.order.tiles)
        return step, *self.order(index - step * self.order.tiles)

    def block(self, me: Any, step: Any) -> Any:
        """Whose block device `me` computes its part of in `step`: in the last one its own."""
        return remainder(me + 1 + step, self.devices)

    def sender(self, me: Any, step: Any) -> Any:
        """Who sends device `me` what it has computed in `step`."""
        return remainder(me + (1 if self.uses_ring else self.devices - 1 - step), self.devices)

    def receiver(self, me: Any, step: Any) -> Any:
        """Whom device `me` sends what it has computed in `step`."""
        return remainder(me + self.devices - 1, self.devices) if self.uses_ring else self.block(me, step)

    @property
    def last_step(self) -> int:
        """The step of the own block; so many blocks are sent, and so many come."""
        return self.devices - 1

    @property
    def adds_before_sending(self) -> bool:
        """Whether what is sent depends on what has come: by ring, but for two devices, of which only the owner adds."""
        return self.uses_ring and self.devices > 2

    @property
    def terms(self) -> int:
        """How many terms a tile has, if it has any."""
        return 1 if self.uses_ring else self.last_step

    def has_terms(self, step: Any) -> Any:
        """Whether something is added to the tiles of `step`."""
        return step > 0 if self.uses_ring else step == self.last_step

    def step_of_term(self, step: Any, term: Any) -> Any:
        """In which step the sender has computed term `term` of a tile of `step`."""
        return step - 1 if self.uses_ring else term

    def index_in_block(self, element: Any, m: Any, n: Any) -> Any:
        """The place of a tile among those of its block, the same on all devices."""
        rows = self.order.m_tiles // self.batch_size
        return (element * rows + m) * self.order.n_tiles + n

    # --- What is sent ---

    @property
    def sent_shape(self) -> tuple[int, int, int, int]:
        """Shape of what one device sends, and of what it receives: for each peer's block, all boxes of its tiles."""
        count, rows, columns = self.boxes
        return max(self.last_step, 1), self.order.tiles * count, rows, columns

    @property
    def tile_chunks(self) -> int:
        """Chunks of one tile."""
        return self.chunking.chunks // self.order.tiles

    @property
    def sent_chunks(self) -> int:
        """Chunks that one device sends."""
        return self.last_step * self.order.tiles * self.tile_chunks

    def chunk(self, index: Any) -> tuple[Any, Any, Any]:
        """The step whose block chunk `index` is of, and its first row and column among the boxes of that block."""
        step, m, n = self._row_of_all(quotient(index, self.tile_chunks))
        row, column = self.chunking.origin(remainder(index, self.tile_chunks))
        count, rows, _ = self.boxes
        return step, self.index_in_block(0, m, n) * (count * rows) + row, column

    def box_of_row(self, row: Any) -> tuple[Any, Any]:
        """The box that a row among the boxes of a block belongs to, and the row within it."""
        _, rows, _ = self.boxes
        box = quotient(row, rows)
        return box, row - box * rows

    def tile_of_row(self, row: Any) -> Any:
        """The place of the tile that a row among the boxes of a block belongs to."""
        count, rows, _ = self.boxes
        return quotient(row, count * rows)

    @property
    def flags_shape(self) -> tuple[int, int]:
        """Shape of the flags: [steps with a peer's block, tiles of a block]; at least one of each."""
        return max(self.last_step, 1), self.order.tiles
