"""The end of a tile, once its products are summed up: whatever the tile is part of, and wherever the sums are."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl

from overlap.kernels.grid import rank
from overlap.kernels.hooks import Exchange, Tile
from overlap.kernels.mainloop import Loop
from overlap.kernels.partial_sums import Part, finish_together
from overlap.kernels.stream_k import Piece
from overlap.kernels.tma import exchange
from overlap.kernels.tma.staging import Buffers
from overlap.kernels.tma.store import WarpgroupPart, store
from overlap.primitives import wait_stores_read


@dataclasses.dataclass(frozen=True)
class Sums:
    """One compute warpgroup's sums of products of a tile.

    Attributes:
      warpgroup: the warpgroup's index.
      part: which part of the tile it has, counted from 0.
      corner: first row and column of its part within the tile.
      block: from a first row, a number of rows and a slice of columns of the part to their f32 values; transposed if
        `WarpgroupTile.transposed` says so.
      hand_over: from a reference as large as the part in global memory: stores all values there.
      load: from a block of f32 values in global memory to values as `block` gives them.
      terms: from the index of a box to what the peers have computed of it, a list of values for each block of rows;
        needed for products that several devices compute a part of.
      before_terms: called after a part has been sent to the peers, and before `terms`.
    """

    warpgroup: Any
    part: Any
    corner: tuple[Any, Any]
    block: Callable[[int, int, slice], jax.Array]
    hand_over: Callable[[Any], None]
    load: Callable[[Any], jax.Array]
    terms: Callable[[int], list[jax.Array]] | None = None
    before_terms: Callable[[], None] | None = None


def finish(loop: Loop, buffers: Buffers, tile: Tile, piece: Piece, sums: Sums) -> None:
    """Stores, sends or exchanges one warpgroup's sums of a piece of a tile."""
    part = WarpgroupPart(tile, sums.corner, sums.warpgroup, sums.part, loop.hooks.epilogue_at)
    if loop.hooks.exchange is not None:
        _finish_exchanged(loop, buffers, piece, sums, part, loop.hooks.exchange)
    elif loop.partial is None:
        _store_all(loop, buffers, sums, part)
    else:
        # Use one `lax.cond`. With two, XLA hoists the work that both branches have in common, and the kernel spills.
        whole = functools.partial(_store_all, loop, buffers, sums, part)
        lax.cond(piece.parts == 1, whole, functools.partial(_store_share, loop, buffers, piece, sums, part))


def _store_all(loop: Loop, buffers: Buffers, sums: Sums, part: WarpgroupPart) -> None:
    width = loop.config.epilogue_tile_n
    for index in range(buffers.wg_tile.columns // width):

        def block(row: int, rows: int, columns: slice, first: int = index * width) -> jax.Array:
            return sums.block(row, rows, slice(first + columns.start, first + columns.stop))

        store(loop, buffers, part, width, index, block)


def _store_share(loop: Loop, buffers: Buffers, piece: Piece, sums: Sums, part: WarpgroupPart) -> None:
    """The end of a tile that several CTAs share: each finishes some of its columns."""
    assert loop.partial is not None
    # All slots are free, and the columns of a share lie side by side: its boxes take the slots in turn.
    wait_stores_read(0)
    (row, column), width = sums.corner, buffers.out[0].shape[-1]
    place = rank(loop.config)
    corner = place * loop.config.tile_m + row, column
    shared = Part(piece.part, loop.work.parts, place, sums.part, corner, width)
    shape = buffers.wg_tile.rows, buffers.wg_tile.columns
    finish_share = functools.partial(store, loop, buffers, part, width)
    finish_together(loop.partial, shape, shared, sums.hand_over, sums.load, finish_share)


def _finish_exchanged(
    loop: Loop, buffers: Buffers, piece: Piece, sums: Sums, part: WarpgroupPart, others: Exchange
) -> None:
    """The end of a tile that is this device's own, or a part of a peer's."""
    tile, store_all = part.tile, functools.partial(_store_all, loop, buffers, sums)
    of_peer = dataclasses.replace(part, epilogue_at=others.part_epilogue_at, boxes=others.part_at(tile))
    own = dataclasses.replace(part, terms=sums.terms)
    if (sends := others.sends) is not None:
        pl.when(piece.ordinal < buffers.taking_turns)(sends.before)
        store_all(of_peer)
        # The peers wait for it, and this one for them.
        exchange.tell_stored(buffers, piece.ordinal)
        if sums.before_terms is not None:
            sums.before_terms()
        store_all(dataclasses.replace(own, only_terms=True))
        return

    def store_part() -> None:
        if others.part_has_terms is None:
            store_all(of_peer)
            return
        with_terms = dataclasses.replace(of_peer, terms=sums.terms)
        lax.cond(others.part_has_terms(tile), lambda: store_all(with_terms), lambda: store_all(of_peer))

    lax.cond(others.is_own(tile), lambda: store_all(own), store_part)
