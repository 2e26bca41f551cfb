"""Where the CTAs that share a tile meet in global memory, and finish it together.

Each has the f32 sums of the whole tile over its own k steps, and hands them over. Each then finishes a share of the
columns, as soon as all have done so:

    2 CTAs, a warpgroup's half of 4 boxes:    CTA 0 adds and stores boxes 0, 1;  CTA 1 adds and stores boxes 2, 3

So what crosses the L2 is spread evenly over them. Where two warpgroups of a CTA have a half of the tile each, they work
with their like in the others.
Its own sums, too, a CTA reads back: the accumulator is then dead, and its registers are free for several loads at once.

The sums are added from the first part to the last, whoever adds them, so that results are deterministic.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from overlap.kernels.config import Config
from overlap.kernels.grid import GRID_AXIS
from overlap.kernels.stream_k import StreamK
from overlap.primitives import semaphore_signal, semaphore_wait
from overlap.primitives.integers import quotient

# Loads of so many parts are on their way at once: one round trip to the L2 instead of one for each.
UNROLLED_PIECES = 4


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PartialSums:
    """Where they meet.

    Attributes:
      sums: [workers, cluster · tile_m, tile_n] in f32: what each adds to the columns that others finish.
      flags: [workers, cluster, parts of a tile]: whether a warpgroup's part of that is there; at most as many parts as
        compute warpgroups.
    """

    sums: Any
    flags: Any


def partial_sums_type(work: StreamK, config: Config) -> jax.ShapeDtypeStruct:
    """The type of `PartialSums.sums`, to be allocated as an output of the kernel."""
    return jax.ShapeDtypeStruct((work.workers, config.cluster * config.tile_m, config.tile_n), jnp.float32)


def partial_sums_flags(work: StreamK, config: Config, compute_warpgroups: int) -> tuple[int, ...]:
    """The shape of `PartialSums.flags`."""
    return work.workers, config.cluster, compute_warpgroups


@dataclasses.dataclass(frozen=True)
class SharedPiece:
    """One warpgroup's part of a piece of a tile that several CTAs share.

    Attributes:
      index: which part of the k steps this CTA has carried.
      count: how many parts there are; static.
      rank: this CTA's place in its cluster.
      of_tile: which part of the tile this warpgroup has.
      corner: first row and column of the warpgroup's values within the cluster's sums.
      width: columns of a piece, which one CTA finishes.
    """

    index: Any
    count: int
    rank: Any
    wg_tile_index: Any
    corner: tuple[Any, Any]
    box_width: int


def share(piece: Any, boxes: int, pieces: int) -> tuple[Any, Any]:
    """Which of `pieces` the CTA with one of `parts` parts finishes: the first, and the first that is not its."""
    return quotient(piece * boxes + pieces - 1, pieces), quotient((piece + 1) * boxes + pieces - 1, pieces)


def finish_together(
    partial: PartialSums,
    shape: tuple[int, int],
    piece: SharedPiece,
    hand_over: Callable[[Any], None],
    load: Callable[[Any], jax.Array],
    finish: Callable[[Any, Callable[[int, int, slice], jax.Array]], None],
) -> None:
    """Exchanges a warpgroup's sums with its counterparts in the tile's other CTAs, and finishes its share of columns.

    Args:
      partial: where to meet.
      shape: rows and columns of this warpgroup's sums.
      part: whose they are.
      hand_over: from a reference of that shape in global memory: stores this warpgroup's sums there, in f32.
      load: from a block of sums in global memory to its values, as the mainloop keeps them in registers.
      finish: called as `finish(index, total)` for each piece of the share; `total(row, rows, columns)` gives the
        complete sums of some of its rows and columns.
    """
    (first_row, first_column), (rows, columns), me = piece.corner, shape, lax.axis_index(GRID_AXIS)
    hand_over(partial.sums.at[me, pl.ds(first_row, rows), pl.ds(first_column, columns)])
    semaphore_signal(partial.flags.at[me, piece.rank, piece.wg_tile_index])
    begin, end = share(piece.index, columns // piece.box_width, piece.count)

    @pl.when(begin < end)
    def _wait() -> None:
        @pl.loop(me - piece.index, me - piece.index + piece.count)
        def _piece_of(worker: Any) -> None:
            semaphore_wait(partial.flags.at[worker, piece.rank, piece.wg_tile_index], 1)

    @pl.loop(begin, end)
    def _box(index: Any) -> None:
        def total(row: int, rows: int, columns: slice) -> jax.Array:
            first = first_column + index * piece.box_width + columns.start
            where = pl.ds(first_row + row, rows), pl.ds(first, columns.stop - columns.start)
            return _total(lambda i: load(partial.sums.at[me - piece.index + i, *where]), piece.count)

        finish(index, total)


def _total(sums: Callable[[Any], jax.Array], pieces: int) -> jax.Array:
    """The sum of a block over the parts, first to last."""
    if pieces > UNROLLED_PIECES:
        return lax.fori_loop(1, pieces, lambda i, total: total + sums(i), sums(0))
    return functools.reduce(operator.add, map(sums, range(pieces)))
