"""Parts of tiles, to peers and from them (`Hooks.exchange`): how they pass through shared memory.

A part is stored box by box, each box one piece of memory: so it can be copied to a peer in large pieces. What peers
have computed of an own tile is loaded box after box and within these part after part, a box of each warpgroup at a
time, and added in an order that does not depend on who was first.

Two things differ between mainloops:

    where parts come     Through the stages of the operands, as further steps behind the k steps: so the loads are on
                         their way while the last products are computed (`Plan.terms_in_stages`: `load_terms`,
                         `sum_of_terms`). Or through buffers of their own.
    when the forwarder   If those who store multiply as well: a few k steps into the next tile, when the stores have
    is told of a tile    landed (`STEPS_UNTIL_LANDED`), so that no tensor core waits for them. Else at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from overlap.kernels.hooks import Boxes, DirectSends, Exchange, Tile, with_reference
from overlap.kernels.mainloop import Loop
from overlap.kernels.stream_k import Piece
from overlap.kernels.tma.staging import Buffers
from overlap.primitives import marks, wait_stores_landed
from overlap.primitives.copies import IN_BOUNDS
from overlap.primitives.integers import quotient, remainder
from overlap.primitives.marks import Work

# K steps of the next tile after which the stores of one have landed: some 6 µs of the largest tile.
K_STEPS_UNTIL_LANDED = 8
# Loads of so many parts are written out; more are a loop.
UNROLLED_TERMS = 3


def _exchange(loop: Loop) -> Exchange:
    assert loop.hooks.exchange is not None
    return loop.hooks.exchange


def box_count(buffers: Buffers) -> int:
    """Boxes of one warpgroup's part of a tile."""
    return buffers.wg_tile.columns // buffers.out[0].shape[-1]


def _rows(index: Any, rows: int) -> Any:
    """As many rows as a box in shared memory has, from the first on; of those that are not there TMA makes zeros.

    The start is a number that jax does not know (`index`: any): of one that it knows jax 0.12 refuses to go beyond.
    """
    return pl.ds(index - index, rows)


def term_stages(loop: Loop, buffers: Buffers, tile: Tile) -> Any:
    """How many stages the parts of a tile take, if they come through those of the operands."""
    if not buffers.terms_in_stages:
        return 0
    return jnp.where(_exchange(loop).has_terms(tile), box_count(buffers) * _exchange(loop).terms, 0)


def load_terms(loop: Loop, buffers: Buffers, tile: Tile, piece: Piece) -> None:
    """The producer's part of a tile to which something is added, behind its k steps."""
    exchange, config = _exchange(loop), loop.config
    count = box_count(buffers)
    first = piece.before + piece.k_steps

    def load(load_index: Any) -> None:
        fill = first + load_index
        stage = remainder(fill, config.stages)
        full = buffers.full_at(piece, stage)
        pl.when(fill >= config.stages)(lambda: plgpu.barrier_wait(buffers.consumed.at[stage]))
        load_term(loop, buffers, tile, load_index, stage, full)
        # The slot is full when as many copies have arrived as of operands.
        for _ in range(buffers.copies - buffers.wg_tiles):
            plgpu.barrier_arrive(full)

    @pl.when(exchange.has_terms(tile))
    def _load_all() -> None:
        marks.now(Work.AWAIT_ROWS, tile.step, piece.tile)
        exchange.await_terms(tile)
        marks.now(Work.LOAD, tile.step, piece.tile)
        pl.loop(0, count * exchange.terms)(load)


def load_term(loop: Loop, buffers: Buffers, tile: Tile, load_index: Any, buffer_index: Any, barrier: Any) -> None:
    """Starts the copies of one box of each part: of box `step // terms` what peer `step % terms` has computed."""
    exchange, count, boxes_smem = _exchange(loop), box_count(buffers), buffers.terms[0]
    index = quotient(load_index, exchange.terms)
    of_peer = exchange.term_at(tile, load_index - index * exchange.terms)
    for number in range(buffers.wg_tiles):
        place = of_peer.first + number * count + index
        if exchange.direct_sends is not None:
            to = buffers.terms[2].at[buffer_index, number], barrier
            with_reference(of_peer.ref, lambda ref, place=place, to=to: _load_flat_box(ref, place, *to))
            continue
        box_gmem = of_peer.ref.at[place].at[_rows(place, boxes_smem.shape[2])]
        plgpu.copy_gmem_to_smem(box_gmem, boxes_smem.at[buffer_index, number], barrier)


def _load_flat_box(ref: Any, place: Any, flat_smem: Any, barrier: Any) -> None:
    elements = ref.shape[-1]
    plgpu.copy_gmem_to_smem(ref.at[place], flat_smem.at[pl.ds(0, elements)], barrier, oob_mode=IN_BOUNDS)


def sum_of_terms(loop: Loop, buffers: Buffers, piece: Piece, wg_tile_index: Any, index: int) -> list[jax.Array]:
    """What is added to box `index` of part `part` of a tile: values for each block of rows."""
    first = piece.before + piece.k_steps + index * _exchange(loop).terms

    def term(number: Any) -> list[jax.Array]:
        stage = remainder(first + number, loop.config.stages)
        plgpu.barrier_wait(buffers.full_at(piece, stage))
        values = term_values(buffers, stage, wg_tile_index)
        plgpu.barrier_arrive(buffers.consumed.at[stage])
        return values

    return summed(_exchange(loop).terms, term)


def term_values(buffers: Buffers, buffer_index: Any, wg_tile_index: Any) -> list[jax.Array]:
    """A box of a part of a tile, as a peer has computed it: values for each block of rows."""
    terms_smem, block_rows = buffers.terms[1].at[buffer_index, wg_tile_index], buffers.wg_tile.block_rows
    blocks = range(0, buffers.wg_tile.rows, block_rows)
    return [terms_smem[pl.ds(above, block_rows)].astype(jnp.float32) for above in blocks]


def summed(terms: int, term: Callable[[Any], list[jax.Array]]) -> list[jax.Array]:
    """The sum of lists of values, `term(0)` first."""

    def add(number: Any, sums: list[jax.Array]) -> list[jax.Array]:
        return [total + more for total, more in zip(sums, term(number), strict=True)]

    sums = term(0)
    if terms > UNROLLED_TERMS:
        return lax.fori_loop(1, terms, add, sums)
    for number in range(1, terms):
        sums = add(number, sums)
    return sums


def store_boxes(boxes: Boxes, box_views: Any, buffers: Buffers, wg_tile_index: Any, first: int) -> None:
    """Starts the stores of boxes of part `part` of a peer's tile, from its box number `first` on."""
    count, rows, _ = box_views.shape
    begin = boxes.first + wg_tile_index * box_count(buffers) + first
    for box in range(count):
        to_gmem = boxes.ref.at[begin + box, _rows(begin, rows)]
        plgpu.copy_smem_to_gmem(box_views.at[box], to_gmem, commit_group=box == count - 1)


def send_boxes(
    boxes: Boxes,
    direct_sends: DirectSends,
    tile: Tile,
    flat_boxes: Any,
    buffers: Buffers,
    wg_tile_index: Any,
    first: int,
) -> None:
    """Starts the copies of boxes of part `part` of a tile to memory here (`boxes`) and on all peers."""
    begin = wg_tile_index * box_count(buffers) + first

    def send(to: Boxes, *, last: bool) -> None:
        elements, count = to.ref.shape[-1], flat_boxes.shape[0]
        for box in range(count):
            flat_smem, to_gmem = flat_boxes.at[box, pl.ds(0, elements)], to.ref.at[to.first + begin + box]
            plgpu.copy_smem_to_gmem(flat_smem, to_gmem, commit_group=last and box == count - 1)

    pl.loop(1, direct_sends.peers + 1)(lambda number: send(direct_sends.to_peer(tile, number), last=False))
    send(boxes, last=True)


def tell_stored(buffers: Buffers, ordinal: Any = 0) -> None:
    """A compute warpgroup's part of telling the forwarder warp that its stores of a tile have landed.

    Args:
      buffers: shared memory.
      ordinal: the tile's; needed if the next one may be stored before the forwarder has looked.
    """
    wait_stores_landed()
    plgpu.barrier_arrive(_stored(buffers, ordinal))


def _stored(buffers: Buffers, ordinal: Any) -> Any:
    count = buffers.stored_barriers
    return buffers.stored if count == 1 else buffers.stored.at[remainder(ordinal, count)]


def announce(loop: Loop, buffers: Buffers, tile: Tile, piece: Piece) -> None:
    """The forwarder's part of a tile."""
    marks.now(Work.AWAIT_TILE, tile.step, piece.tile)
    plgpu.barrier_wait(_stored(buffers, piece.ordinal))
    marks.now(Work.FORWARD, tile.step, piece.tile)
    hooks, is_own = _exchange(loop), _exchange(loop).is_own(tile)
    if hooks.direct_sends is not None:
        hooks.part_stored(tile)
        return
    # (Mosaic GPU has no `not` for a warp.)
    pl.when(jnp.where(is_own, 0, 1) == 1)(lambda: hooks.part_stored(tile))
    if (own_stored := hooks.own_stored) is not None:
        pl.when(is_own)(lambda: own_stored(tile))
