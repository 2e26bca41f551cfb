"""Lets the CTAs of a cluster add their sums of a tile through each other's shared memory (`cluster_along="k"`).

Each CTA of the cluster has computed a piece of the tile: f32 sums of the whole tile over the CTA's own k steps. The
boxes of the tile are divided among the CTAs. Each CTA stores every box into the shared memory of the CTA that finishes
it (its own boxes into its own memory), where the sums of all CTAs lie side by side:

    2 CTAs, a tile of 4 boxes     CTA 0 receives boxes 0, 1 of both CTAs;  CTA 1 receives boxes 2, 3 of both

No flag and no sum passes through global memory, as they do between CTAs of different clusters (`PartialSums`).

Why no CTA writes to memory that is still in use: before the sums of its second tile and of each later one, a warpgroup
waits at the barrier `read`, at which the same warpgroups of all CTAs arrive when they have read the sums of the tile
before. Why no CTA ends too early: each CTA waits for everything that is sent to it, and there is no arrival at `read`
after the last tile.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from overlap.kernels.grid import RANK_AXIS
from overlap.kernels.partial_sums import share
from overlap.kernels.tma.limits import F32_BYTES, boxes_of_share
from overlap.primitives.types import BarrierRef, Index, SmemRef

# Rows of a layout tile, and the widths of the swizzles in bytes, from the widest to the narrowest.
_TILE_ROWS, _SWIZZLES = 8, (128, 64, 32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ClusterSums:
    """Shared memory for the sums that the CTAs of a cluster send each other.

    Attributes:
      sums: f32: [boxes that a CTA finishes, CTAs, rows, columns of a box]; the last two are exchanged if the mainloop
        keeps values as [columns, rows].
      arrived: barriers, one for each box that a CTA finishes: the sums of all CTAs have arrived.
      read: barriers, one for each warpgroup tile: all CTAs of the cluster have read the sums of a tile.
    """

    sums: SmemRef
    arrived: BarrierRef
    read: BarrierRef


def cluster_sums_type(
    wg_tiles: int, ctas: int, rows: int, columns: int, box_width: int, *, transposed: bool
) -> ClusterSums:
    """Returns `ClusterSums` as scratch types, for `wg_tiles` warpgroup tiles of `rows` × `columns` each."""
    places = boxes_of_share(wg_tiles * columns // box_width, ctas)
    block = (box_width, rows) if transposed else (rows, box_width)
    swizzle = next(width for width in _SWIZZLES if block[1] * F32_BYTES % width == 0)
    layout = (
        plgpu.TilingTransform((_TILE_ROWS, swizzle // F32_BYTES)),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(swizzle),  # pyright: ignore[reportAbstractUsage]
    )
    types: dict[str, Any] = {
        "sums": plgpu.SMEM((places, ctas, *block), jnp.float32, transforms=layout),
        "arrived": plgpu.Barrier(num_arrivals=ctas, num_barriers=places),
        "read": plgpu.ClusterBarrier(collective_axes=(RANK_AXIS,), num_arrivals=1, num_barriers=wg_tiles),
    }
    return ClusterSums(**types)


@dataclasses.dataclass(frozen=True)
class Sharing:
    """How the CTAs of a cluster share the boxes of a tile.

    Attributes:
      ctas: how many CTAs the cluster has, each with a piece of the tile.
      wg_tiles: how many warpgroup tiles the tile has.
      boxes: how many boxes a warpgroup tile has. The boxes of all warpgroup tiles are numbered one after the other.
      rank: this CTA's index in its cluster, and the index of its piece.
      transposed: whether the mainloop keeps values as [columns, rows].
    """

    ctas: int
    wg_tiles: int
    boxes: int
    rank: Index
    transposed: bool

    def finished_by(self, box: int) -> tuple[int, int]:
        """Returns which CTA finishes a box, and the box's place among those that this CTA finishes."""
        for cta in range(self.ctas):
            begin, end = share(cta, self.wg_tiles * self.boxes, self.ctas)
            if begin <= box < end:
                return cta, box - begin
        raise AssertionError("every box is finished by a CTA")


def finish_in_cluster(
    sums: ClusterSums,
    sharing: Sharing,
    wg_tile_index: int | Index,
    *,
    waits: jax.Array,
    tells: jax.Array,
    block_of: Callable[[int], jax.Array],
    finish: Callable[[Index, Callable[[int, int, slice], jax.Array]], None],
) -> None:
    """Exchanges a warpgroup's sums with the cluster's other CTAs, and finishes those boxes that are this CTA's share.

    Args:
      sums: shared memory.
      sharing: which CTA finishes which boxes.
      wg_tile_index: the index of the warpgroup tile.
      waits: whether the cluster has computed a tile before this one, whose sums must have been read.
      tells: whether the cluster computes another tile after this one.
      block_of: a function from the index of a box in the warpgroup tile to its f32 sums over this CTA's k steps.
      finish: called as `finish(index, total)` for each box to finish, with its index in the warpgroup tile;
        `total(row, rows, columns)` returns the complete sums of some rows and columns of the box, transposed if the
        values are.
    """
    boxes, ctas = sharing.boxes, sharing.ctas
    pl.when(waits)(lambda: plgpu.barrier_wait(sums.read.at[wg_tile_index]))

    def send(box: int, cta: Index, place: Index) -> None:
        to = sums.sums.at[place, sharing.rank], sums.arrived.at[place]
        plgpu.async_store_smem(block_of(box), *to, cluster_idx=cta, cluster_dim=RANK_AXIS)

    for box in range(boxes):
        # The CTA and the place differ between warpgroups, which run the same code.
        of_each = [sharing.finished_by(wg_tile * boxes + box) for wg_tile in range(sharing.wg_tiles)]
        cta, place = (_chosen(values, wg_tile_index) for values in zip(*of_each, strict=True))
        send(box, cta, place)
    begin, end = share(sharing.rank, sharing.wg_tiles * boxes, ctas)
    first = wg_tile_index * boxes

    @pl.loop(jnp.maximum(begin, first), jnp.minimum(end, first + boxes))
    def _box(box: jax.Array) -> None:
        place = box - begin
        plgpu.barrier_wait(sums.arrived.at[place])

        def total(row: int, rows: int, columns: slice) -> jax.Array:
            where = pl.ds(row, rows), pl.ds(columns.start, columns.stop - columns.start)
            where = where[::-1] if sharing.transposed else where
            return functools.reduce(operator.add, (sums.sums[place, cta, *where] for cta in range(ctas)))

        finish(box - first, total)

    # The sums have been read. Nobody waits for this after the cluster's last tile.
    pl.when(tells)(lambda: plgpu.barrier_arrive(sums.read.at[wg_tile_index]))


def _chosen(values: tuple[int, ...], index: Index) -> Index:
    """Returns the value with an index that is known only when the kernel runs."""
    chosen: Index = jnp.int32(values[0])
    for i, value in enumerate(values[1:], 1):
        chosen = jnp.where(index == i, value, chosen)
    return chosen
