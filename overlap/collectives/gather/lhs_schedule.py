"""The schedule of a gathered left operand: in which order a device computes tiles, and which flag each tile waits for.

All functions are pure integer functions. Kernels call them with traced scalars, tests with Python ints.

Notation: `me` is a device's position in its peer group. `step` counts the shards in the order in which a device uses
them: step 0 is its own shard, step s the shard of the device s positions ahead. In each step all devices read from
different peers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from overlap.kernels.config import Config
from overlap.kernels.tile_order import TileOrder
from overlap.primitives.copies import Chunking
from overlap.primitives.integers import ceil_div, choose, quotient, remainder
from overlap.primitives.types import Index, Predicate


@dataclasses.dataclass(frozen=True)
class AllGatherSchedule:
    """All-gather of the left operand, then matmul, as one flat list of output tiles.

    No device-wide barrier separates the shards: a CTA takes every `num_ctas`-th tile of the list, whichever shard the
    tile belongs to, and waits only for the rows of that tile. With the transport "pull", the communicators draw the
    chunks to copy from a counter, in the order in which tiles need them; so any set of running CTAs copies all chunks.
    With the transport "ring", the CTAs that multiply rows also pass them on.

    In the grid of a shard's tiles, batch elements lie below each other and right operands side by side. Each is padded
    to whole tiles. So one list of tiles balances the work of all batch elements and right operands, and the order of
    tiles keeps its locality across them.

    Attributes:
      devices: number of devices in the peer group.
      order: the tiles of one shard's product, batch elements and right operands included. The two tiles of a pair of
        CTAs count as one.
      block_rows: rows of a CTA's tile. One flag stands for one such block of rows.
      chunking: the sizes of one batch element of a shard, and how it is cut into chunks to be pulled.
      batch_size: number of batch elements. The rows of a shard are numbered through all its batch elements.
      sides: tile columns of each right operand; () for a single one.
      keeps_own: whether the scratch holds the whole gathered operand, a copy of the own shard included, in the order of
        the devices. Otherwise it holds the peers' shards only, in the order of the steps.
      scaled: whether the scales of the rows are pulled as well, one transfer for each row block.
      scale_k_steps: for scales of blocks, the number of k steps with scales of their own; 0 for one scale per row.
    """

    devices: int
    order: TileOrder
    block_rows: int
    chunking: Chunking
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
    ) -> AllGatherSchedule:
        """Makes the schedule of a problem in which nothing but the rows of the peers travels.

        Args:
          devices: number of devices in the peer group.
          lhs_shard: shape of one shard of the left operand, [(batch,) m_shard, k].
          widths: n of each right operand.
          itemsize: bytes of an element of the left operand.
          config: tile sizes and chunk sizes.
        """
        *batches, m_shard, k = lhs_shard
        batch_size = math.prod(batches)
        sides = tuple(ceil_div(n, config.tile_n) for n in widths)
        m_tiles = batch_size * ceil_div(m_shard, config.cluster_tile_m)
        order = TileOrder(m_tiles, sum(sides), config.order_minor, config.order_width)
        chunking = Chunking.cut(m_shard, k, itemsize, config.tile_m, config.chunk_bytes)
        return AllGatherSchedule(devices, order, config.tile_m, chunking, batch_size, sides)

    # --- Tiles ---

    @property
    def tiles(self) -> int:
        """Number of output tiles of one device."""
        return self.devices * self.order.tiles

    def tile(self, index: Index) -> tuple[Index, Index, Index]:
        """Returns where tile `index` of the list lies.

        Returns:
          The tile's step; its tile row within that step's shard, counted through all batch elements; its tile column,
          counted through all right operands.
        """
        step = quotient(index, self.order.tiles)
        m, n = self.order(index - step * self.order.tiles)
        return step, m, n

    def batch_of(self, m: Index) -> tuple[Index, Index]:
        """Returns the batch element of a tile row, and the tile row within that element."""
        return _split(m, self.order.m_tiles // self.batch_size, self.batch_size)

    def side_of(self, n: Index) -> tuple[Index, Index]:
        """Returns the index of the right operand of a tile column, and the tile column within that operand."""
        side, first, begin = 0, 0, 0
        for tiles in self.sides[:-1]:
            begin += tiles
            is_behind = n >= begin
            side, first = side + choose(is_behind, 1, 0), choose(is_behind, begin, first)
        return side, n - first

    def first_column(self, side: Index) -> Index:
        """Returns the first tile column of right operand `side`."""
        first = 0
        for index, tiles in enumerate(self.sides[:-1]):
            first = first + choose(side > index, tiles, 0)
        return first

    # --- Shards, and where they lie in scratch memory ---

    def shard(self, me: Index, step: Index) -> Index:
        """Returns the position of the device whose shard device `me` multiplies in `step`."""
        return remainder(me + step, self.devices)

    @property
    def scratch_shards(self) -> int:
        """Number of shards in the scratch memory."""
        return self.devices if self.keeps_own else self.devices - 1

    def scratch_index(self, me: Index, step: Index) -> Index:
        """Returns the index of the shard of `step` in the scratch memory of device `me`.

        Step 0, the own shard, is in scratch only if `keeps_own`.
        """
        return self.shard(me, step) if self.keeps_own else step - 1

    # --- Chunks, with the transport "pull" ---

    @property
    def chunks(self) -> int:
        """Number of chunks of one shard."""
        return self.batch_size * self.chunking.chunks

    @property
    def pulled_chunks(self) -> int:
        """Number of chunks that one device pulls."""
        return (self.devices - 1) * self.chunks

    def chunk(self, index: Index) -> tuple[Index, Index, Index]:
        """Returns where pulled chunk `index` lies: a step, and the first row and column in the shard of that step."""
        before = quotient(index, self.chunks)
        return before + 1, *self.origin(index - before * self.chunks)

    def origin(self, chunk: Index) -> tuple[Index, Index]:
        """Returns the first row and column of a chunk of a shard."""
        batch, within = _split(chunk, self.chunking.chunks, self.batch_size)
        row, column = self.chunking.origin(within)
        return batch * self.chunking.shard_rows + row, column

    def batch_of_row(self, row: Index) -> tuple[Index, Index]:
        """Returns the batch element of a row of a shard, and the row within that element."""
        return _split(row, self.chunking.shard_rows, self.batch_size)

    # --- Flags ---

    @property
    def row_blocks(self) -> int:
        """Number of row blocks in a batch element of a shard; the last one may have fewer rows."""
        return ceil_div(self.chunking.shard_rows, self.block_rows)

    @property
    def flags_shape(self) -> tuple[int, int]:
        """Shape of the flags: [steps with a peer's shard, row blocks]. At least 1 each: no array of size 0 exists."""
        return max(self.devices - 1, 1), self.batch_size * self.row_blocks

    def flag(self, step: Index, row: Index) -> tuple[Index, Index]:
        """Index of the flag of a row of the shard of `step` ≥ 1."""
        batch, within = self.batch_of_row(row)
        return step - 1, batch * self.row_blocks + quotient(within, self.block_rows)

    def flag_target(self, block: Index) -> Index:
        """Returns how often the flag of row block `block` of a batch element is raised with the transport "pull".

        Once for each chunk, and once for the block's scales if they are pulled.
        """
        per_row = self.chunking.chunks_per_row_group
        last = self.row_blocks - 1
        whole = self.block_rows // self.chunking.rows * per_row + self.scaled
        rest = ceil_div(self.chunking.shard_rows - last * self.block_rows, self.chunking.rows) * per_row + self.scaled
        return whole if rest == whole else choose(block == last, rest, whole)

    # --- The transport "ring" ---

    def passes_on(self, step: Index, m: Index, side: Index, n: Index) -> Predicate:
        """Whether the CTA that computes this tile passes its rows on, for step + 1 of the device before this one.

        Only tiles of the first tile column pass rows on, so that each row block is sent once. No device needs the rows
        of the last step.
        """
        return (side == 0) & (n == 0) & (step < self.devices - 1)

    # --- Scales of rows, and of blocks ---

    def padded_rows(self, config: Config) -> int:
        """Returns the rows of one batch element, padded to whole tiles, or whole pairs of tiles.

        A vector of scales of rows has this number of entries for each batch element.
        """
        return self.order.m_tiles // self.batch_size * config.cluster_tile_m

    @property
    def scale_transfers(self) -> int:
        """Number of transfers of scales that one device pulls: one for each row block."""
        return (self.devices - 1) * self.batch_size * self.row_blocks if self.scaled else 0

    def scale_transfer(self, index: Index) -> tuple[Index, Index, Index]:
        """Returns the step, batch element and row block whose scales transfer `index` brings."""
        blocks = self.batch_size * self.row_blocks
        before = quotient(index, blocks)
        return before + 1, *_split(index - before * blocks, self.row_blocks, self.batch_size)


def _split(index: Index, size: int, count: int) -> tuple[Index, Index]:
    """Returns in which of `count` ranges of `size` an index lies, and the index within that range."""
    if count == 1:
        return 0, index
    which = quotient(index, size)
    return which, index - which * size
