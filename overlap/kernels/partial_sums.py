"""Where the CTAs that share a tile meet in global memory, and finish it together.

Each has the f32 sums of the whole tile over its own k steps, and hands them over. Each then finishes a share of the
columns, as soon as all have done so:

    2 CTAs, a warpgroup's half of 4 boxes:    CTA 0 adds and stores boxes 0, 1;  CTA 1 adds and stores boxes 2, 3

So what crosses the L2 is spread evenly over them. The two warpgroups of a CTA each work with their like in the others.
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
from jax.experimental.pallas import mosaic_gpu as plgpu

from overlap.kernels.config import COMPUTE_WARPGROUPS, Config
from overlap.kernels.staging import GRID_AXIS
from overlap.kernels.stream_k import StreamK
from overlap.primitives import signal, wait_at_least
from overlap.primitives.integers import quotient

# Loads of so many parts are on their way at once: one round trip to the L2 instead of one for each.
UNROLLED_PARTS = 4


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PartialSums:
    """Where they meet.

    Attributes:
      sums: [workers, cluster · tile_m, tile_n] in f32: what each adds to the columns that others finish.
      flags: [workers, cluster, COMPUTE_WARPGROUPS]: whether a warpgroup's half of that is there.
    """

    sums: Any
    flags: Any


def partial_sums_type(work: StreamK, config: Config) -> jax.ShapeDtypeStruct:
    """The type of `PartialSums.sums`, to be allocated as an output of the kernel."""
    return jax.ShapeDtypeStruct((work.workers, config.cluster * config.tile_m, config.tile_n), jnp.float32)


def partial_sums_flags(work: StreamK, config: Config) -> tuple[int, ...]:
    """The shape of `PartialSums.flags`."""
    return work.workers, config.cluster, COMPUTE_WARPGROUPS


def share(part: Any, pieces: int, parts: int) -> tuple[Any, Any]:
    """Which of `pieces` the CTA with one of `parts` parts finishes: the first, and the first that is not its."""
    return quotient(part * pieces + parts - 1, parts), quotient((part + 1) * pieces + parts - 1, parts)


def finish_together(
    partial: PartialSums,
    values: jax.Array,
    finish: Callable[[Any, Callable[[int, int], jax.Array]], None],
    *,
    part: Any,
    parts: int,
    rank: Any,
    warpgroup: Any,
    corner: tuple[Any, Any],
    width: int,
) -> None:
    """Exchanges a warpgroup's sums with those of its like in the other CTAs, and finishes its share of the columns.

    Args:
      partial: where to meet.
      values: [rows, columns] of this CTA's half in f32.
      finish: called as `finish(index, total)` for each piece of the share; `total(row, rows)` gives the complete sums
        of some of its rows, a [rows, width] block.
      part: which part of the tile this CTA has carried.
      parts: how many there are; static.
      rank: this CTA's place in its cluster.
      warpgroup: this warpgroup's index.
      corner: first row and column of the half within the cluster's sums.
      width: columns of a piece.
    """
    (first_row, first_column), (rows, columns), me = corner, values.shape, lax.axis_index(GRID_AXIS)
    partial.sums[me, pl.ds(first_row, rows), pl.ds(first_column, columns)] = values
    signal(partial.flags.at[me, rank, warpgroup])
    begin, end = share(part, columns // width, parts)

    @pl.when(begin < end)
    def _wait() -> None:
        @pl.loop(me - part, me - part + parts)
        def _part(worker: Any) -> None:
            wait_at_least(partial.flags.at[worker, rank, warpgroup], 1)

    @pl.loop(begin, end)
    def _piece(index: Any) -> None:
        def total(row: int, rows: int) -> jax.Array:
            where = pl.ds(first_row + row, rows), pl.ds(first_column + index * width, width)
            return _total(lambda i: partial.sums.at[me - part + i, *where], parts)

        finish(index, total)


def _total(sums: Callable[[Any], Any], parts: int) -> jax.Array:
    """The sum of a block over the parts, first to last."""

    def load(i: Any) -> jax.Array:
        return plgpu.load(sums(i), layout=plgpu.Layout.WGMMA, optimized=False)

    if parts > UNROLLED_PARTS:
        return lax.fori_loop(1, parts, lambda i, total: total + load(i), load(0))
    return functools.reduce(operator.add, map(load, range(parts)))
