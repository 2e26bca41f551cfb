"""Moves parts of tiles through shared memory, on their way to peers and from peers (`Hooks.exchange`).

A part is stored box by box. Each box is contiguous in memory, so that large chunks of it can be copied to a peer. The
terms of an own tile (the parts that peers have computed) are loaded box after box, and for each box term after term;
one load fetches a box for each warpgroup tile. The terms are added in a fixed order, which does not depend on the order
in which they arrive.

Two things differ between mainloops:

    where terms come     Through the stages of the operands, after the k steps of the tile. So they are loaded while the
                         last products are computed (`BufferPlan.terms_in_stages`, `load_terms`, `sum_of_terms`). Or
                         through buffers of their own.
    when the forwarder   If the warpgroups that store also multiply: a few k steps into the next tile, when the stores
    is told of a tile    have landed (`K_STEPS_UNTIL_LANDED`), so that no tensor core waits for the stores. Else at
                         once.
"""

from __future__ import annotations

from collections.abc import Callable

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
from overlap.primitives.types import BarrierRef, GmemRef, Index, SmemRef

# The stores of a tile have landed after this number of k steps of the next tile: about 6 µs with the largest tile.
K_STEPS_UNTIL_LANDED = 8
# Sums of at most this number of terms are unrolled; more terms are summed in a loop.
UNROLLED_TERMS = 3


def _exchange(loop: Loop) -> Exchange:
    assert loop.hooks.exchange is not None
    return loop.hooks.exchange


def box_count(buffers: Buffers) -> int:
    """Returns how many boxes a warpgroup tile has."""
    return buffers.plan.wg_tile.columns // buffers.out[0].shape[-1]


def _rows(index: Index, rows: int) -> pl.Slice:
    """Returns a slice of a box's first `rows` rows. If the box has fewer rows, TMA fills the rest with zeros.

    jax 0.12 refuses a slice beyond the end if its start is known. So the start is `index - index`, a traced zero.
    """
    return pl.ds(index - index, rows)


def term_stages(loop: Loop, buffers: Buffers, tile: Tile) -> Index:
    """Returns how many stages the terms of a tile fill; 0 if terms are loaded into buffers of their own."""
    if not buffers.plan.terms_in_stages:
        return 0
    return jnp.where(_exchange(loop).has_terms(tile), box_count(buffers) * _exchange(loop).terms, 0)


def load_terms(loop: Loop, buffers: Buffers, tile: Tile, piece: Piece) -> None:
    """Does the producer's work on the terms of a tile, after its k steps: loads them into the operands' stages."""
    exchange = _exchange(loop)
    config = loop.config
    count = box_count(buffers)
    first = piece.before + piece.k_steps

    def load(load_index: Index) -> None:
        fill = first + load_index
        stage = remainder(fill, config.stages)
        full = buffers.full_at(piece, stage)
        pl.when(fill >= config.stages)(lambda: plgpu.barrier_wait(buffers.consumed.at[stage]))
        load_term(loop, buffers, tile, load_index, stage, full)
        # The barrier expects as many arrivals as for the operands of a k step, but a term needs fewer copies:
        # arrive for the rest.
        for _ in range(buffers.copies - buffers.plan.wg_tiles):
            plgpu.barrier_arrive(full)

    @pl.when(exchange.has_terms(tile))
    def _load_all() -> None:
        marks.now(Work.AWAIT_ROWS, tile.step, piece.tile)
        exchange.await_terms(tile)
        marks.now(Work.LOAD, tile.step, piece.tile)
        pl.loop(0, count * exchange.terms)(load)


def load_term(
    loop: Loop, buffers: Buffers, tile: Tile, load_index: Index, buffer_index: Index, barrier: BarrierRef
) -> None:
    """Starts the copies of one box of a term, for each warpgroup tile.

    Args:
      loop: what the CTA does.
      buffers: shared memory.
      tile: the tile to which the term is added.
      load_index: the number of this load. It stands for box `load_index // terms` of term `load_index % terms`.
      buffer_index: the stage (or the buffer for terms) to load the boxes into.
      barrier: the barrier at which each copy arrives.
    """
    exchange = _exchange(loop)
    count = box_count(buffers)
    boxes_smem = buffers.terms[0]
    index = quotient(load_index, exchange.terms)
    of_peer = exchange.term_at(tile, load_index - index * exchange.terms)
    for number in range(buffers.plan.wg_tiles):
        place = of_peer.first + number * count + index
        if exchange.direct_sends is not None:
            to = buffers.terms[2].at[buffer_index, number], barrier
            with_reference(of_peer.ref, lambda ref, place=place, to=to: _load_flat_box(ref, place, *to))
            continue
        box_gmem = of_peer.ref.at[place].at[_rows(place, boxes_smem.shape[2])]
        plgpu.copy_gmem_to_smem(box_gmem, boxes_smem.at[buffer_index, number], barrier)


def _load_flat_box(ref: GmemRef, place: Index, flat_smem: SmemRef, barrier: BarrierRef) -> None:
    elements = ref.shape[-1]
    plgpu.copy_gmem_to_smem(ref.at[place], flat_smem.at[pl.ds(0, elements)], barrier, oob_mode=IN_BOUNDS)


def sum_of_terms(loop: Loop, buffers: Buffers, piece: Piece, wg_tile_index: Index, index: int) -> list[jax.Array]:
    """Returns the sum of the terms of box `index` of a warpgroup tile: f32 values for each block of rows."""
    first = piece.before + piece.k_steps + index * _exchange(loop).terms

    def term(number: Index) -> list[jax.Array]:
        stage = remainder(first + number, loop.config.stages)
        plgpu.barrier_wait(buffers.full_at(piece, stage))
        values = term_values(_exchange(loop), buffers, stage, wg_tile_index)
        plgpu.barrier_arrive(buffers.consumed.at[stage])
        return values

    return summed(_exchange(loop).terms, term)


def term_values(exchange: Exchange, buffers: Buffers, buffer_index: Index, wg_tile_index: Index) -> list[jax.Array]:
    """Reads the loaded box of a term of a warpgroup tile. Returns f32 values for each block of rows."""
    terms_smem = buffers.terms[1].at[buffer_index, wg_tile_index]
    block_rows = buffers.plan.wg_tile.block_rows
    rows = buffers.plan.wg_tile.rows
    loaded = rows if exchange.direct_sends is None else min(exchange.direct_sends.rows, rows)
    values = [terms_smem[pl.ds(above, block_rows)].astype(jnp.float32) for above in range(0, loaded, block_rows)]
    # No block of rows beyond those that were sent is kept, so any values can stand for it.
    return values + values[-1:] * (rows // block_rows - len(values))


def summed(terms: int, term: Callable[[Index], list[jax.Array]]) -> list[jax.Array]:
    """Returns the sum of the lists `term(0)`, `term(1)` …, entry by entry, added in this order."""

    def add(number: Index, sums: list[jax.Array]) -> list[jax.Array]:
        return [total + more for total, more in zip(sums, term(number), strict=True)]

    sums = term(0)
    if terms > UNROLLED_TERMS:
        return lax.fori_loop(1, terms, add, sums)
    for number in range(1, terms):
        sums = add(number, sums)
    return sums


def store_boxes(boxes_gmem: GmemRef, box_views: SmemRef, first: Index) -> None:
    """Starts the stores of boxes of a tile to `boxes_gmem`, beginning with the box of index `first`."""
    count, rows, _ = box_views.shape
    for box in range(count):
        to_gmem = boxes_gmem.at[first + box, _rows(first, rows)]
        plgpu.copy_smem_to_gmem(box_views.at[box], to_gmem, commit_group=box == count - 1)


def send_boxes(boxes: Boxes, direct_sends: DirectSends, tile: Tile, flat_boxes: SmemRef, first: Index) -> None:
    """Starts the copies of boxes of a tile, from `first` on, to this device's memory (`boxes`) and all peers'."""

    def send(to: Boxes, *, last: bool) -> None:
        elements = to.ref.shape[-1]
        count = flat_boxes.shape[0]
        for box in range(count):
            flat_smem = flat_boxes.at[box, pl.ds(0, elements)]
            to_gmem = to.ref.at[to.first + first + box]
            plgpu.copy_smem_to_gmem(flat_smem, to_gmem, commit_group=last and box == count - 1)

    pl.loop(1, direct_sends.peers + 1)(lambda number: send(direct_sends.to_peer(tile, number), last=False))
    send(boxes, last=True)


def tell_stored(buffers: Buffers, ordinal: Index = 0) -> None:
    """Called by each compute warpgroup: tells the forwarder warp that the warpgroup's stores of a tile have landed.

    Args:
      buffers: shared memory.
      ordinal: how many tiles this CTA has computed before this one; needed if there are several `stored` barriers,
        because the next tile may be stored before the forwarder has seen this one.
    """
    wait_stores_landed()
    plgpu.barrier_arrive(_stored(buffers, ordinal))


def _stored(buffers: Buffers, ordinal: Index) -> BarrierRef:
    count = buffers.plan.stored_barriers
    return buffers.stored if count == 1 else buffers.stored.at[remainder(ordinal, count)]


def announce(loop: Loop, buffers: Buffers, tile: Tile, piece: Piece) -> None:
    """Does the forwarder's work on a tile: waits until the tile has been stored, and calls the hook for it."""
    marks.now(Work.AWAIT_TILE, tile.step, piece.tile)
    plgpu.barrier_wait(_stored(buffers, piece.ordinal))
    marks.now(Work.FORWARD, tile.step, piece.tile)
    hooks = _exchange(loop)
    is_own = hooks.is_own(tile)
    if hooks.direct_sends is not None:
        hooks.part_stored(tile)
        return
    # Mosaic GPU has no `not` for code of a single warp.
    pl.when(jnp.where(is_own, 0, 1) == 1)(lambda: hooks.part_stored(tile))
    if (own_stored := hooks.own_stored) is not None:
        pl.when(is_own)(lambda: own_stored(tile))
