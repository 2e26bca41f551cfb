"""Parts of tiles, to peers and from them (`Hooks.exchange`): how they pass through shared memory.

A part is stored box by box, each box one piece of memory: so it can be copied to a peer in large pieces. What peers
have computed of an own tile comes through the slots of the operands as further steps behind the k steps, a box of each
warpgroup in one step, box after box and within these part after part. So the loads are on their way while the last
products are computed, and they are added in an order that does not depend on who was first.

That a tile has been stored is told to the forwarder warp a few k steps into the next tile: its stores have landed by
then, so that the tensor cores wait neither for them nor for a signal.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from overlap.kernels.config import Config
from overlap.kernels.hooks import BLOCK_ROWS, Boxes, Exchange, Sends, Tile, with_reference
from overlap.kernels.hopper.limits import halves
from overlap.kernels.hopper.staging import Buffers, copies_per_step
from overlap.kernels.mainloop import Loop
from overlap.kernels.stream_k import Piece
from overlap.primitives import wait_stores_landed
from overlap.primitives.copies import IN_BOUNDS
from overlap.primitives.integers import quotient, remainder

# K steps of the next tile after which the stores of one have landed: some 6 µs of the largest tile.
STEPS_UNTIL_LANDED = 8
# Loads of so many parts are written out; more are a loop.
UNROLLED_TERMS = 3


def _exchange(loop: Loop) -> Exchange:
    assert loop.hooks.exchange is not None
    return loop.hooks.exchange


def _boxes(buffers: Buffers, config: Config) -> int:
    """Boxes of one warpgroup's half."""
    return halves(config)[1] // buffers.out[0].shape[-1]


def _rows(index: Any, rows: int) -> Any:
    """As many rows as a box in shared memory has, from the first on; of those that are not there TMA makes zeros.

    The start is a number that jax does not know (`index`: any): of one that it knows jax 0.12 refuses to go beyond.
    """
    return pl.ds(index - index, rows)


def term_steps(loop: Loop, buffers: Buffers, tile: Tile) -> Any:
    """How many steps the parts of a tile take."""
    return jnp.where(_exchange(loop).has_terms(tile), _boxes(buffers, loop.config) * _exchange(loop).terms, 0)


def load_terms(loop: Loop, buffers: Buffers, tile: Tile, piece: Piece) -> None:
    """The producer's part of a tile to which something is added, behind its k steps."""
    exchange, config = _exchange(loop), loop.config
    count = _boxes(buffers, config)
    first = piece.before + piece.k_steps
    copies = copies_per_step(config, buffers.lhs[0].dtype, loop.layouts, buffers.rows)
    boxes_smem = buffers.terms[0]

    def load(step: Any) -> None:
        fill, index = first + step, quotient(step, exchange.terms)
        slot = remainder(fill, config.stages)
        pl.when(fill >= config.stages)(lambda: plgpu.barrier_wait(buffers.consumed.at[slot]))
        part = exchange.term_at(tile, step - index * exchange.terms)
        for warpgroup in range(buffers.warpgroups):
            place = part.first + warpgroup * count + index
            if exchange.sends is not None:
                to = buffers.terms[2].at[slot, warpgroup], buffers.full.at[slot]
                with_reference(part.ref, lambda ref, place=place, to=to: _load_piece(ref, place, *to))
                continue
            rows = _rows(fill, boxes_smem.shape[2])
            box_gmem = part.ref.at[place].at[rows]
            plgpu.copy_gmem_to_smem(box_gmem, boxes_smem.at[slot, warpgroup], buffers.full.at[slot])
        # The slot is full when as many copies have arrived as of operands.
        for _ in range(copies - buffers.warpgroups):
            plgpu.barrier_arrive(buffers.full.at[slot])

    @pl.when(exchange.has_terms(tile))
    def _load_all() -> None:
        exchange.await_terms(tile)
        pl.loop(0, count * exchange.terms)(load)


def _load_piece(ref: Any, place: Any, piece_smem: Any, barrier: Any) -> None:
    elements = ref.shape[-1]
    plgpu.copy_gmem_to_smem(ref.at[place], piece_smem.at[pl.ds(0, elements)], barrier, oob_mode=IN_BOUNDS)


def sum_of_terms(loop: Loop, buffers: Buffers, piece: Piece, warpgroup: Any, index: int) -> list[jax.Array]:
    """What is added to box `index` of a compute warpgroup's half of a tile: values for each `BLOCK_ROWS` rows."""
    exchange, config = _exchange(loop), loop.config
    first = piece.before + piece.k_steps + index * exchange.terms
    blocks = range(0, halves(config)[0], BLOCK_ROWS)
    values_smem = buffers.terms[1]

    def term(step: Any) -> list[jax.Array]:
        slot = remainder(first + step, config.stages)
        plgpu.barrier_wait(buffers.full.at[slot])
        of_slot = values_smem.at[slot, warpgroup]
        values = [of_slot[pl.ds(above, BLOCK_ROWS)].astype(jnp.float32) for above in blocks]
        plgpu.barrier_arrive(buffers.consumed.at[slot])
        return values

    def add(step: Any, sums: list[jax.Array]) -> list[jax.Array]:
        return [total + more for total, more in zip(sums, term(step), strict=True)]

    sums = term(0)
    if exchange.terms > UNROLLED_TERMS:
        return lax.fori_loop(1, exchange.terms, add, sums)
    for step in range(1, exchange.terms):
        sums = add(step, sums)
    return sums


def store_boxes(boxes: Boxes, box_views: Any, buffers: Buffers, config: Config, warpgroup: Any, first: int) -> None:
    """Starts the stores of boxes of a compute warpgroup's half of a peer's tile, from its box number `first` on."""
    count, rows, _ = box_views.shape
    begin = boxes.first + warpgroup * _boxes(buffers, config) + first
    for box in range(count):
        to_gmem = boxes.ref.at[begin + box, _rows(begin, rows)]
        plgpu.copy_smem_to_gmem(box_views.at[box], to_gmem, commit_group=box == count - 1)


def send_boxes(boxes: Boxes, sends: Sends, tile: Tile, pieces: Any, buffers: Buffers, config: Config, warpgroup: Any,
               first: int) -> None:  # fmt: skip
    """Starts the copies of boxes of a compute warpgroup's half of a tile to memory here (`boxes`) and on all peers."""
    begin = warpgroup * _boxes(buffers, config) + first

    def send(to: Boxes, *, last: bool) -> None:
        elements, count = to.ref.shape[-1], pieces.shape[0]
        for box in range(count):
            piece_smem, to_gmem = pieces.at[box, pl.ds(0, elements)], to.ref.at[to.first + begin + box]
            plgpu.copy_smem_to_gmem(piece_smem, to_gmem, commit_group=last and box == count - 1)

    pl.loop(1, sends.peers + 1)(lambda number: send(sends.to_peer(tile, number), last=False))
    send(boxes, last=True)


def tell_stored(buffers: Buffers) -> None:
    """A compute warpgroup's part of telling the forwarder warp that its stores of a tile have landed."""
    wait_stores_landed()
    plgpu.barrier_arrive(buffers.stored)


def announce(loop: Loop, buffers: Buffers, tile: Tile, piece: Piece) -> None:
    """The forwarder's part of a tile."""
    del piece
    plgpu.barrier_wait(buffers.stored)
    hooks, is_own = _exchange(loop), _exchange(loop).is_own(tile)
    if hooks.sends is not None:
        hooks.part_stored(tile)
        return
    # (Mosaic GPU has no `not` for a warp.)
    pl.when(jnp.where(is_own, 0, 1) == 1)(lambda: hooks.part_stored(tile))
    if (own_stored := hooks.own_stored) is not None:
        pl.when(is_own)(lambda: own_stored(tile))
