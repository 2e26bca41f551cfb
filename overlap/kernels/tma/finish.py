"""Finishes a tile once its products are summed up: stores it, sends it, or shares it with other CTAs or devices."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
from jax import lax
from jax.experimental import pallas as pl

from overlap.kernels.config import SIDE_COLUMNS
from overlap.kernels.grid import rank
from overlap.kernels.hooks import Exchange, Tile, Values
from overlap.kernels.limits import EPILOGUE_COLUMNS
from overlap.kernels.mainloop import Loop
from overlap.kernels.partial_sums import SharedPiece, finish_together
from overlap.kernels.stream_k import Piece
from overlap.kernels.tma import exchange
from overlap.kernels.tma.cluster_sums import ClusterPiece, ClusterSums, finish_in_cluster
from overlap.kernels.tma.staging import Buffers
from overlap.kernels.tma.store import WarpgroupOutput, store
from overlap.primitives.types import GmemRef, Index


@dataclasses.dataclass(frozen=True)
class Sums:
    """One compute warpgroup's sums of products of a tile. Functions hide where the mainloop keeps them.

    Attributes:
      warpgroup: the index of the warpgroup.
      wg_tile_index: which warpgroup tile of the output tile it has.
      corner: first row and column of the warpgroup tile within the output tile.
      block: a function from a first row, a number of rows and a slice of columns of the warpgroup tile to the f32
        values there; transposed if `WarpgroupTile.transposed` says so.
      hand_over: stores all values to the reference that it is called with, which is in global memory and as large as
        the warpgroup tile (transposed as the values of `block` are).
      load: loads a block of f32 sums from global memory, or from the shared memory of a CTA of the cluster. Returns the
        values in the layout of `block`.
      terms: a function from the index of a box to the sum of its terms (the parts of it that peers have computed): a
        list of values, one for each block of rows. Needed if there is an `Exchange`.
      before_terms: called after a part has been sent directly to the peers, and before `terms`.
    """

    warpgroup: Index
    wg_tile_index: Index
    corner: tuple[Index, Index]
    block: Callable[[int, int, slice], jax.Array]
    hand_over: Callable[[GmemRef], None]
    load: Callable[[GmemRef], jax.Array]
    terms: Callable[[int], list[jax.Array]] | None = None
    before_terms: Callable[[], None] | None = None


def finish(loop: Loop, buffers: Buffers, tile: Tile, piece: Piece, sums: Sums) -> None:
    """Stores, sends or exchanges one warpgroup's sums of a piece of a tile."""
    hooks = loop.hooks
    output = WarpgroupOutput(tile, sums.corner, sums.warpgroup, sums.wg_tile_index, hooks.epilogue_at)
    if hooks.exchange is not None:
        _finish_exchanged(loop, buffers, piece, sums, output, hooks.exchange)
    elif buffers.cluster_sums is not None:
        _finish_in_cluster(loop, buffers, buffers.cluster_sums, piece, sums, output)
    elif loop.partial is None:
        _store_all(loop, buffers, sums, output)
    else:
        # Use one `lax.cond`. With two, XLA hoists the work that both branches have in common, and the kernel spills.
        whole = functools.partial(_store_all, loop, buffers, sums, output)
        lax.cond(piece.pieces_per_tile == 1, whole, functools.partial(_store_share, loop, buffers, piece, sums, output))


def _store_all(loop: Loop, buffers: Buffers, sums: Sums, output: WarpgroupOutput) -> None:
    width = EPILOGUE_COLUMNS
    sides = buffers.sides

    def of_sides(row: int, rows: int, first: int, size: int) -> Values:
        """The values of `size` columns of the result from column `first` on; of each side if there are several."""
        if sides == 1:
            return sums.block(row, rows, slice(first, first + size))
        before, within = divmod(first, SIDE_COLUMNS)
        starts = [(before * sides + side) * SIDE_COLUMNS + within for side in range(sides)]
        return tuple(sums.block(row, rows, slice(start, start + size)) for start in starts)

    for index in range(buffers.plan.wg_tile.columns // sides // width):

        def block(row: int, rows: int, columns: slice, first: int = index * width) -> Values:
            return of_sides(row, rows, first + columns.start, columns.stop - columns.start)

        store(loop, buffers, output, width, index, block)


def _store_share(loop: Loop, buffers: Buffers, piece: Piece, sums: Sums, output: WarpgroupOutput) -> None:
    """Finishes a tile that several CTAs share: each finishes some of its columns."""
    assert loop.partial is not None
    row, column = sums.corner
    box_width = buffers.out[0].shape[-1]
    own_rank = rank(loop.config)
    corner = own_rank * loop.config.tile_m + row, column
    shared = SharedPiece(
        piece.index_in_tile, loop.work.pieces_per_tile, own_rank, sums.wg_tile_index, corner, box_width
    )
    shape = buffers.plan.wg_tile.rows, buffers.plan.wg_tile.columns
    finish_share = functools.partial(store, loop, buffers, output, box_width)
    finish_together(loop.partial, shape, shared, sums.hand_over, sums.load, finish_share)


def _finish_in_cluster(
    loop: Loop, buffers: Buffers, shared: ClusterSums, piece: Piece, sums: Sums, output: WarpgroupOutput
) -> None:
    """Finishes a tile that the CTAs of a cluster share: each CTA finishes some of the tile's boxes."""
    wg_tile = buffers.plan.wg_tile
    box_width = buffers.out[0].shape[-1]

    def block(box: int) -> jax.Array:
        return sums.block(0, wg_tile.rows, slice(box * box_width, (box + 1) * box_width))

    own = ClusterPiece(
        rank=rank(loop.config),
        ctas=loop.work.ctas_per_tile,
        wg_tile_index=sums.wg_tile_index,
        wg_tiles=buffers.plan.wg_tiles,
        boxes=wg_tile.columns // box_width,
        transposed=wg_tile.transposed,
    )
    finish_in_cluster(shared, own, block, sums.load, functools.partial(store, loop, buffers, output, box_width))


def _finish_exchanged(
    loop: Loop, buffers: Buffers, piece: Piece, sums: Sums, output: WarpgroupOutput, others: Exchange
) -> None:
    """Finishes a tile of an `Exchange`: an own tile, a part of a peer's tile, or (`direct_sends`) both."""
    tile = output.tile
    store_all = functools.partial(_store_all, loop, buffers, sums)
    of_peer = dataclasses.replace(output, epilogue_at=others.part_epilogue_at, boxes=others.part_at(tile))
    own = dataclasses.replace(output, terms=sums.terms)
    if (direct_sends := others.direct_sends) is not None:
        pl.when(piece.ordinal < buffers.plan.taking_turns)(direct_sends.before)
        store_all(of_peer)
        # Announce the part before waiting for the terms: the peers wait for it, as this device waits for theirs.
        exchange.tell_stored(buffers, piece.ordinal)
        if sums.before_terms is not None:
            sums.before_terms()
        store_all(dataclasses.replace(own, terms_replace_sums=True))
        return

    def store_part() -> None:
        if others.part_has_terms is None:
            store_all(of_peer)
            return
        with_terms = dataclasses.replace(of_peer, terms=sums.terms)
        lax.cond(others.part_has_terms(tile), lambda: store_all(with_terms), lambda: store_all(of_peer))

    lax.cond(others.is_own(tile), lambda: store_all(own), store_part)
