"""Lets the CTAs of a cluster add their sums of a tile through each other's shared memory (`cluster_along="k"`).

Each CTA of the cluster has computed a piece of the tile: f32 sums of the whole tile over the CTA's own k steps. It
stores these sums in its own shared memory, and tells the cluster. The boxes of the tile (each is some columns of a
warpgroup tile) are divided among the CTAs. Each CTA reads its boxes from the shared memory of all CTAs, adds them from
the first piece to the last, so that results are deterministic, and stores them:

    2 CTAs, a tile of 4 boxes     CTA 0 reads boxes 0, 1 of both CTAs;  CTA 1 reads boxes 2, 3 of both

CTAs of different clusters exchange sums and flags through global memory (`PartialSums`). Here neither is needed.

A warpgroup exchanges sums only with the warpgroups that have the same part of the tile in the other CTAs. The sums lie
in the memory of the pipeline stages, which are not needed at the end of a tile. Three barriers order the exchange. At
the latter two, an arrival counts in all CTAs of the cluster:

    multiplied    all warpgroups of this CTA have read the last stages of a tile, so sums may be stored in their place
    stored        all CTAs have stored their sums of a tile, so they may be read
    read          all CTAs have read the sums of a tile, so the next tile's operands may be loaded, and the CTA may end

An arrival at a `plgpu.ClusterBarrier` is made by one warp, without a barrier of the warpgroup. So the whole warpgroup
must be ready before: `plgpu.commit_smem`, after the sums and at the end of each store of results, waits for it. It also
orders the stores of sums before the loads of the next tile's operands, which are asynchronous. For the reads of other
CTAs no fence is needed: the stores of a warpgroup are in this SM's shared memory when it has passed its barrier. The
other CTAs read that memory directly, not a cached copy. (This is an argument about Hopper: the arrival's PTX names no
scope, so by PTX's memory model alone it orders only the threads of one CTA.)

Sums are read, not sent. An asynchronous store to another CTA (`plgpu.async_store_smem`) updates the receiver's barrier
once for every 8 bytes: measured on an H200, two CTAs then took 2 to 3 µs longer for a tile of 128 × 128.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from overlap.kernels.grid import RANK_AXIS
from overlap.kernels.limits import F32_BYTES
from overlap.kernels.partial_sums import share
from overlap.primitives.types import BarrierRef, Index, ScratchType, SmemRef

# Rows of a layout tile, and the widths of the swizzles in bytes, from the widest to the narrowest.
_TILE_ROWS = 8
_SWIZZLES = (128, 64, 32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ClusterSums:
    """Shared memory in which a CTA stores its sums of a tile for the CTAs of its cluster.

    Attributes:
      sums: f32: [warpgroup tiles, boxes, rows, columns of a box]; the last two are swapped if the mainloop keeps
        values as [columns, rows]. They share the memory of the stages.
      multiplied: a barrier of this CTA: all of its warpgroups have finished the products of a tile.
      stored: barriers of the cluster, one for each warpgroup tile: all CTAs have stored their sums.
      read: barriers of the cluster, one for each warpgroup tile: all CTAs have read the sums.
    """

    sums: SmemRef
    multiplied: BarrierRef
    stored: BarrierRef
    read: BarrierRef


def cluster_sums_type(wg_tiles: int, rows: int, columns: int, box_width: int, *, transposed: bool) -> ClusterSums:
    """Returns `ClusterSums` as scratch types, for `wg_tiles` warpgroup tiles of `rows` × `columns` each.

    The memory of `sums` is to be united with that of the stages.
    """
    block = (box_width, rows) if transposed else (rows, box_width)
    swizzle = next(width for width in _SWIZZLES if block[1] * F32_BYTES % width == 0)
    layout = (
        plgpu.TilingTransform((_TILE_ROWS, swizzle // F32_BYTES)),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(swizzle),  # pyright: ignore[reportAbstractUsage]
    )
    barriers = plgpu.ClusterBarrier(collective_axes=(RANK_AXIS,), num_arrivals=1, num_barriers=wg_tiles)
    types: dict[str, ScratchType] = {
        "sums": plgpu.SMEM((wg_tiles, columns // box_width, *block), jnp.float32, transforms=layout),
        "multiplied": plgpu.Barrier(num_arrivals=wg_tiles),
        "stored": barriers,
        "read": barriers,
    }
    return ClusterSums(**types)


@dataclasses.dataclass(frozen=True)
class ClusterPiece:
    """Says which sums a warpgroup exchanges: those of one warpgroup tile, over the k steps of one CTA.

    Attributes:
      rank: this CTA's index in its cluster, and the index of its piece.
      ctas: how many CTAs the cluster has; static.
      wg_tile_index: the index of the warpgroup tile.
      wg_tiles: how many warpgroup tiles a tile has; static.
      boxes: how many boxes a warpgroup tile has; static.
      transposed: whether the mainloop keeps values as [columns, rows]; static.
    """

    rank: Index
    ctas: int
    wg_tile_index: Index
    wg_tiles: int
    boxes: int
    transposed: bool


def finish_in_cluster(
    shared: ClusterSums,
    piece: ClusterPiece,
    block: Callable[[int], jax.Array],
    load: Callable[[SmemRef], jax.Array],
    finish: Callable[[Index, Callable[[int, int, slice], jax.Array]], None],
) -> None:
    """Exchanges a warpgroup's sums with the cluster's other CTAs, and finishes the boxes that are this CTA's share.

    Args:
      shared: the memory and the barriers of the exchange.
      piece: which sums these are.
      block: a function from the index of a box in the warpgroup tile to its f32 sums over this CTA's k steps.
      load: a function from a reference to a block of sums in shared memory to its values, in the layout in which the
        mainloop keeps values in registers.
      finish: called as `finish(index, total)` for each box to finish, with its index in the warpgroup tile;
        `total(row, rows, columns)` returns the complete sums of some rows and columns of the box, as [columns, rows]
        if `piece.transposed`.
    """
    wg_tile = piece.wg_tile_index
    boxes = piece.boxes
    ctas = piece.ctas

    plgpu.barrier_arrive(shared.multiplied)
    plgpu.barrier_wait(shared.multiplied)
    for box in range(boxes):
        shared.sums[wg_tile, box] = block(box)
    plgpu.commit_smem()
    plgpu.barrier_arrive(shared.stored.at[wg_tile])
    plgpu.barrier_wait(shared.stored.at[wg_tile])
    # The boxes of all warpgroup tiles are numbered one after the other, and divided evenly.
    begin, end = share(piece.rank, piece.wg_tiles * boxes, ctas)
    first = wg_tile * boxes

    @pl.loop(jnp.maximum(begin, first), jnp.minimum(end, first + boxes))
    def _box(number: jax.Array) -> None:
        of_box = shared.sums.at[wg_tile, number - first]

        def total(row: int, rows: int, columns: slice) -> jax.Array:
            where = pl.ds(row, rows), pl.ds(columns.start, columns.stop - columns.start)
            of_block = of_box.at[where[::-1] if piece.transposed else where]
            sums = (load(plgpu.cluster_ref(of_block, {RANK_AXIS: jnp.int32(cta)})) for cta in range(ctas))
            return functools.reduce(operator.add, sums)

        finish(number - first, total)

    plgpu.barrier_arrive(shared.read.at[wg_tile])
    # The CTA must not end before the others have read its sums.
    plgpu.barrier_wait(shared.read.at[wg_tile])


def await_readers(shared: ClusterSums) -> None:
    """Called by the producer before it loads the operands of any tile but the first: waits until no sums are read."""
    for wg_tile in range(shared.sums.shape[0]):
        plgpu.barrier_wait(shared.read.at[wg_tile])
