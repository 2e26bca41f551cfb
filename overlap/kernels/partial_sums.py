"""Lets the CTAs that share a tile exchange their sums in global memory and finish the tile together.

Each of these CTAs has computed a piece of the tile: f32 sums of the whole tile over the CTA's own k steps. It stores
these sums in global memory. When all CTAs of the tile have done so, each finishes a share of the columns:

    2 CTAs, a warpgroup tile of 4 boxes:    CTA 0 adds and stores boxes 0, 1;  CTA 1 adds and stores boxes 2, 3

So the traffic through the L2 is spread evenly over the CTAs. If each of two warpgroups of a CTA has a half of the tile,
a warpgroup exchanges its sums only with the warpgroups that have the same half in the other CTAs. A CTA also reads back
its own sums. So it no longer needs its accumulator, whose registers are free for several loads at once.

With `Config.swap_operands` the sums are transposed in registers, and lie transposed in global memory as well
(`PartialSums.at`).

Every CTA adds the pieces from the first to the last, so that results are deterministic.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from overlap.kernels.config import Config
from overlap.kernels.grid import GRID_AXIS
from overlap.kernels.stream_k import StreamK
from overlap.primitives import semaphore_signal, semaphore_wait
from overlap.primitives.integers import quotient
from overlap.primitives.types import GmemRef, Index, SemaphoreRef

# Up to this many pieces are loaded at the same time, in one round trip to the L2 instead of one for each piece.
UNROLLED_PIECES = 4


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PartialSums:
    """The global memory through which the CTAs of a tile exchange their sums.

    Attributes:
      sums: the f32 sums of each worker (a CTA or a cluster): [workers, rows, columns], or [workers, columns, rows] if
        `transposed`. There are `cluster` · `tile_m` rows and `tile_n` columns.
      flags: [workers, cluster, warpgroup tiles]: 1 as soon as the sums of a warpgroup tile have been stored. An output
        tile has at most as many warpgroup tiles as there are compute warpgroups.
      transposed: whether the mainloop keeps values as [columns, rows] (`Config.swap_operands`); static.
    """

    sums: GmemRef
    flags: SemaphoreRef
    transposed: bool = dataclasses.field(default=False, metadata={"static": True})

    def at(self, worker: Index, rows: pl.Slice, columns: pl.Slice) -> GmemRef:
        """Returns a block of a worker's sums: [rows, columns], or [columns, rows] if `transposed`."""
        return self.sums.at[worker, *_oriented(rows, columns, self.transposed)]


def _oriented[T](rows: T, columns: T, transposed: bool) -> tuple[T, T]:
    return (columns, rows) if transposed else (rows, columns)


def partial_sums_type(work: StreamK, config: Config) -> jax.ShapeDtypeStruct:
    """Returns the type of `PartialSums.sums`, to be allocated as an output of the kernel."""
    shape = _oriented(config.cluster * config.tile_m, config.tile_n, config.swap_operands)
    return jax.ShapeDtypeStruct((work.workers, *shape), jnp.float32)


def partial_sums_flags(work: StreamK, config: Config, compute_warpgroups: int) -> tuple[int, ...]:
    """Returns the shape of `PartialSums.flags`."""
    return work.workers, config.cluster, compute_warpgroups


@dataclasses.dataclass(frozen=True)
class SharedPiece:
    """One warpgroup's sums of a piece of a tile that several CTAs share.

    Attributes:
      index: the index of this CTA's piece among the pieces of the tile.
      count: how many pieces the tile is cut into; static.
      rank: this CTA's index in its cluster.
      wg_tile_index: the index of the warpgroup's part of the output tile.
      corner: first row and column of the warpgroup's values within the sums of the cluster.
      box_width: columns of a box. Each box is finished by one CTA.
    """

    index: Index
    count: int
    rank: Index
    wg_tile_index: Index
    corner: tuple[Index, Index]
    box_width: int


def share(piece: Index, boxes: int, pieces: int) -> tuple[Index, Index]:
    """Returns the boxes that the CTA with piece `piece` of `pieces` finishes: (first, end), `end` not included."""
    return quotient(piece * boxes + pieces - 1, pieces), quotient((piece + 1) * boxes + pieces - 1, pieces)


def finish_together(
    partial: PartialSums,
    shape: tuple[int, int],
    piece: SharedPiece,
    hand_over: Callable[[GmemRef], None],
    load: Callable[[GmemRef], jax.Array],
    finish: Callable[[Index, Callable[[int, int, slice], jax.Array]], None],
) -> None:
    """Exchanges a warpgroup's sums with the tile's other CTAs, and finishes the columns that are this CTA's share.

    Args:
      partial: the global memory of the exchange.
      shape: rows and columns of this warpgroup's sums.
      piece: which sums these are.
      hand_over: called with a reference in global memory to as many rows and columns as `shape` has (in the order that
        `PartialSums.at` describes): stores this warpgroup's sums there, in f32.
      load: a function from a reference to a block of sums in global memory to its values, in the layout in which the
        mainloop keeps values in registers.
      finish: called as `finish(index, total)` for each box of the share; `total(row, rows, columns)` returns the
        complete sums of some rows and columns of the box, as [columns, rows] if `PartialSums.transposed`.
    """
    first_row, first_column = piece.corner
    rows, columns = shape
    me = lax.axis_index(GRID_AXIS)
    hand_over(partial.at(me, pl.ds(first_row, rows), pl.ds(first_column, columns)))
    semaphore_signal(partial.flags.at[me, piece.rank, piece.wg_tile_index])
    begin, end = share(piece.index, columns // piece.box_width, piece.count)

    @pl.when(begin < end)
    def _wait() -> None:
        @pl.loop(me - piece.index, me - piece.index + piece.count)
        def _piece(worker: jax.Array) -> None:
            semaphore_wait(partial.flags.at[worker, piece.rank, piece.wg_tile_index], 1)

    @pl.loop(begin, end)
    def _box(index: jax.Array) -> None:
        def total(row: int, rows: int, columns: slice) -> jax.Array:
            first = first_column + index * piece.box_width + columns.start
            where = pl.ds(first_row + row, rows), pl.ds(first, columns.stop - columns.start)
            return _total(lambda i: load(partial.at(me - piece.index + i, *where)), piece.count)

        finish(index, total)


def _total(sums: Callable[[Index], jax.Array], pieces: int) -> jax.Array:
    """Returns the sum of a block over the pieces, added from the first piece to the last."""
    if pieces > UNROLLED_PIECES:
        return lax.fori_loop(1, pieces, lambda i, total: total + sums(i), sums(0))
    return functools.reduce(operator.add, map(sums, range(pieces)))
