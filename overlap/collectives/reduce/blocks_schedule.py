"""The schedule of a sum over devices that is scattered: which tiles a device computes, sends and adds in which order.

All functions are pure integer functions. Kernels call them with traced scalars, tests with Python ints.

The result of each device is a *block*: some rows, or some columns, of the sum. Every device computes a part of every
block: in step s its part of the block of the device s + 1 positions ahead, and in the last step its part of its own
block.

With the transport "push", a device sends each part to the owner of the block, which adds all parts to its own. The part
of the device s + 1 positions before the owner is *term* s. In each step all devices send to different owners.

With the transport "ring", a device sends the tile that it has computed to the device before it. That device computes
its part of the same tile in the next step, and adds the received values to it. So from step 1 on each tile has one
term, and a device sends the sum of all parts so far.
"""

from __future__ import annotations

import dataclasses

from overlap.kernels.config import Config
from overlap.kernels.operations import Dimension
from overlap.kernels.tile_order import TileOrder
from overlap.primitives.copies import Chunking
from overlap.primitives.integers import ceil_div, larger, quotient, remainder, smaller
from overlap.primitives.types import Index, Predicate


@dataclasses.dataclass(frozen=True)
class Strips:
    """How the tiles of a device's own block are cut to be sent to all peers: a strip is some rows of one tile.

    Strips come in the order of the tiles, and no strip has rows of two tiles. In the last tile row, strips may have
    fewer rows, or none. In the last tile column, they may have fewer columns. All strips are loaded in the same size,
    padded with zeros.

    Attributes:
      order: the tiles of the block, batch elements one below the other.
      batch_size: number of batch elements.
      block: rows and columns of the block of one batch element.
      tile: rows and columns of a tile.
      rows: rows of a strip. This number divides the rows of a tile if the block has several tile rows.
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
        """None, since all strips are loaded in the same size: see `Chunking.short`."""
        return None

    @property
    def last_cols(self) -> int:
        """Columns of the strips of the last tile column."""
        return self.block[1] % self.cols or self.cols

    @property
    def per_tile(self) -> int:
        """Number of strips of one tile."""
        return ceil_div(min(self.tile[0], self.block[0]), self.rows)

    @property
    def count(self) -> int:
        """Number of strips of the block."""
        return self.order.tiles * self.per_tile

    def strip(self, index: Index) -> tuple[tuple[Index, Index], Index, Index]:
        """Returns where strip `index` lies.

        Returns:
          A pair of the strip's batch element and its tile's `ReduceScatterSchedule.index_in_block`; the strip's first
          row and its first column in the block of that batch element.
        """
        tile = quotient(index, self.per_tile)
        m, n = self.order(tile)
        m_tiles = self.order.m_tiles // self.batch_size
        batch = 0 if self.batch_size == 1 else quotient(m, m_tiles)
        first_row = (m - batch * m_tiles) * self.tile[0] + (index - tile * self.per_tile) * self.rows
        return (batch, m * self.order.n_tiles + n), first_row, n * self.cols

    def rows_at(self, row: Index) -> Index:
        """Returns the number of rows of the strip that begins at `row`; 0 below the last row of the block."""
        return smaller(larger(self.block[0] - row, 0), self.rows)


@dataclasses.dataclass(frozen=True)
class ReduceScatterSchedule:
    """Matmul, then reduce-scatter, as one flat list of output tiles: the peers' blocks first, the own one last.

    CTAs draw the tiles from a counter, in this order. So it does not matter which CTAs run, and when. With "push", a
    tile of a peer's block waits for nothing; with "ring", it waits for the same tile of the step before. A tile of the
    own block waits only for tiles that peers compute before the tiles of their own blocks. The computed tiles of peers'
    blocks are sent in chunks, which communicators draw in the same order.

    Attributes:
      devices: number of devices in the peer group.
      along: the dimension of the product along which the sum is scattered.
      order: the tiles of one block, batch elements one below the other.
      batch_size: number of batch elements.
      boxes: (number, rows, columns) of the boxes in which a tile is stored.
      chunking: how the boxes of one block, one below the other, are cut into chunks.
      uses_ring: whether sums are passed on from device to device ("ring"). Otherwise each part is sent to the owner of
        the block ("push").
    """

    devices: int
    along: Dimension
    order: TileOrder
    batch_size: int
    boxes: tuple[int, int, int]
    chunking: Chunking
    uses_ring: bool = False

    @staticmethod
    def of(
        devices: int,
        along: Dimension,
        block: tuple[int, int, int],
        boxes: tuple[int, int, int],
        itemsize: int,
        config: Config,
    ) -> ReduceScatterSchedule:
        """Makes the schedule of a problem with the transport "push".

        Args:
          devices: number of devices in the peer group.
          along: the dimension along which the result is scattered.
          block: batch elements, rows and columns of one device's result.
          boxes: the number of boxes of a tile; rows and columns of a box.
          itemsize: bytes of an element of the parts that are sent.
          config: tile sizes and chunk sizes.
        """
        batch_size, m, n = block
        count, rows, columns = boxes
        m_tiles, n_tiles = batch_size * ceil_div(m, config.tile_m), ceil_div(n, config.tile_n)
        order = TileOrder(m_tiles, n_tiles, config.order_minor, config.order_width)
        chunking = Chunking.cut(order.tiles * count * rows, columns, itemsize, rows, config.chunk_bytes)
        return ReduceScatterSchedule(devices, along, order, batch_size, boxes, chunking)

    def strips(self, block: tuple[int, int, int], rows: int, config: Config) -> Strips:
        """Cuts the own block into strips of at most `rows` rows, which are sent to all peers; `block` as in `of`."""
        _, m, n = block
        return Strips(self.order, self.batch_size, (m, n), (config.tile_m, config.tile_n), min(rows, m))

    # --- Tiles ---

    @property
    def tiles(self) -> int:
        """Number of tiles that one device computes."""
        return self.devices * self.order.tiles

    def tile(self, index: Index) -> tuple[Index, Index, Index, Index]:
        """Returns where tile `index` of the list lies.

        Returns:
          The tile's step; its batch element; its tile row within that batch element, and its tile column, in the block
          of that step.
        """
        step, row, n = self._row_of_all(index)
        if self.batch_size == 1:
            return step, 0, row, n
        m_tiles = self.order.m_tiles // self.batch_size
        batch = quotient(row, m_tiles)
        return step, batch, row - batch * m_tiles, n

    def _row_of_all(self, index: Index) -> tuple[Index, Index, Index]:
        """Returns a tile's step, its tile row counted through all batch elements of the block, and its tile column."""
        step = quotient(index, self.order.tiles)
        return step, *self.order(index - step * self.order.tiles)

    def index_in_block(self, batch: Index, m: Index, n: Index) -> Index:
        """Returns the index of a tile in its block, counted row-major: it is independent of the order of tiles."""
        m_tiles = self.order.m_tiles // self.batch_size
        return (batch * m_tiles + m) * self.order.n_tiles + n

    # --- Blocks: who computes them, sends them and receives them ---

    def block(self, me: Index, step: Index) -> Index:
        """Returns the owner of the block whose tiles device `me` computes in `step`: `me` itself in the last step."""
        return remainder(me + 1 + step, self.devices)

    def sender(self, me: Index, step: Index) -> Index:
        """Returns the position of the device that sends to device `me` the tiles that it has computed in `step`."""
        return remainder(me + (1 if self.uses_ring else self.devices - 1 - step), self.devices)

    def receiver(self, me: Index, step: Index) -> Index:
        """Returns the position of the device to which device `me` sends the tiles that it has computed in `step`."""
        return remainder(me + self.devices - 1, self.devices) if self.uses_ring else self.block(me, step)

    @property
    def last_step(self) -> int:
        """The step of the own block; also the number of blocks that a device sends, and that it receives."""
        return self.devices - 1

    # --- Terms: received parts, or sums of parts, that are added to a tile ---

    @property
    def adds_before_sending(self) -> bool:
        """Whether received tiles are added to tiles that are sent: with "ring", if there are more than two devices."""
        return self.uses_ring and self.devices > 2

    @property
    def terms(self) -> int:
        """Number of terms of a tile that has any."""
        return 1 if self.uses_ring else self.last_step

    def has_terms(self, step: Index) -> Predicate:
        """Whether the tiles of `step` have terms."""
        return step > 0 if self.uses_ring else step == self.last_step

    def step_of_term(self, step: Index, term: Index) -> Index:
        """Returns the step in which the sender has computed term `term` of a tile of `step`."""
        return step - 1 if self.uses_ring else term

    # --- Chunks, and the memory that they are sent from and received in ---

    @property
    def sent_shape(self) -> tuple[int, int, int, int]:
        """Shape of the memory that a device sends from, and of the memory that it receives in.

        [steps with a peer's block (at least 1), boxes of the tiles of a block, rows, columns].
        """
        count, rows, columns = self.boxes
        return max(self.last_step, 1), self.order.tiles * count, rows, columns

    @property
    def tile_chunks(self) -> int:
        """Number of chunks of one tile."""
        return self.chunking.chunks // self.order.tiles

    @property
    def sent_chunks(self) -> int:
        """Number of chunks that one device sends."""
        return self.last_step * self.order.tiles * self.tile_chunks

    def chunk(self, index: Index) -> tuple[Index, Index, Index]:
        """Returns where chunk `index` lies: a step, and a row and column among the boxes of the block of that step."""
        step, m, n = self._row_of_all(quotient(index, self.tile_chunks))
        row, column = self.chunking.origin(remainder(index, self.tile_chunks))
        count, rows, _ = self.boxes
        return step, self.index_in_block(0, m, n) * (count * rows) + row, column

    def box_of_row(self, row: Index) -> tuple[Index, Index]:
        """Returns the box to which a row among the boxes of a block belongs, and the row within that box."""
        _, rows, _ = self.boxes
        box = quotient(row, rows)
        return box, row - box * rows

    def tile_of_row(self, row: Index) -> Index:
        """Returns the `index_in_block` of the tile to which a row among the boxes of a block belongs."""
        count, rows, _ = self.boxes
        return quotient(row, count * rows)

    @property
    def flags_shape(self) -> tuple[int, int]:
        """Shape of the flags: [steps with a peer's block, tiles of a block]. At least 1 each."""
        return max(self.last_step, 1), self.order.tiles
