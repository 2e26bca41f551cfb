"""Tiles that are drawn from a counter: whichever CTAs run carry all of them, in the order of the list.

For products of which a peer waits for a tile: that must not wait for a CTA that may not have started. The producer
draws a number, passes it on by *mail* in shared memory, and loads the tile's operands; the others read their mail.
There is mail for two tiles, so that the producer may be one tile ahead. The number after the last tile ends all loops.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from overlap.kernels.hooks import Tile
from overlap.kernels.mainloop import Loop
from overlap.kernels.stream_k import Piece
from overlap.kernels.tma import exchange
from overlap.kernels.tma.staging import MAIL_SLOTS, Buffers
from overlap.primitives import draw
from overlap.primitives.atomics import loop_while
from overlap.primitives.integers import remainder
from overlap.primitives.shared_words import load_word


def _turn(loop: Loop, buffers: Buffers, number: Any, ordinal: Any, before: Any) -> tuple[Tile, Piece, Any]:
    """A tile, the piece that is all of it, and the slots that have been filled behind it."""
    tile, k_steps = loop.tile_at(number), loop.work.k_steps
    filled = before + k_steps + exchange.term_steps(loop, buffers, tile)
    return tile, Piece(number, 0, k_steps, before, ordinal=ordinal), filled


def deal(loop: Loop, buffers: Buffers, produce: Callable[..., None]) -> None:
    """The producer's part: draws the tiles and calls `produce(loop, buffers, tile, piece)` for each."""
    mail, tiles = buffers.mail, loop.work.tiles
    assert mail is not None

    def post(number: Any, ordinal: Any) -> None:
        slot = remainder(ordinal, MAIL_SLOTS)
        pl.when(ordinal >= MAIL_SLOTS)(lambda: plgpu.barrier_wait(mail.taken.at[slot]))
        mail.numbers[slot] = number
        plgpu.barrier_arrive(mail.posted.at[slot])

    def turn(state: Any) -> Any:
        number, ordinal, before = state
        post(number, ordinal)
        tile, piece, filled = _turn(loop, buffers, number, ordinal, before)
        produce(loop, buffers, tile, piece)
        return draw(loop.counter, tiles, number), ordinal + 1, filled

    start = (draw(loop.counter, tiles), jnp.int32(0), jnp.int32(0))
    number, ordinal, _ = loop_while(lambda state: state[0] < tiles, turn, start)
    post(number, ordinal)


def for_each(loop: Loop, buffers: Buffers, role: Callable[..., None], *more: Any) -> Any:
    """The others' part: calls `role(loop, buffers, tile, piece, *more)` for each tile of this CTA.

    Returns:
      How many slots have been filled in all.
    """
    mail, tiles = buffers.mail, loop.work.tiles
    assert mail is not None

    def read(ordinal: Any) -> Any:
        slot = remainder(ordinal, MAIL_SLOTS)
        plgpu.barrier_wait(mail.posted.at[slot])
        return load_word(mail.numbers.at[slot])

    def turn(state: Any) -> Any:
        number, ordinal, before = state
        tile, piece, filled = _turn(loop, buffers, number, ordinal, before)
        role(loop, buffers, tile, piece, *more)
        # Only now: so the forwarder warp, which comes last, is never two tiles behind.
        plgpu.barrier_arrive(mail.taken.at[remainder(ordinal, MAIL_SLOTS)])
        return read(ordinal + 1), ordinal + 1, filled

    return loop_while(lambda state: state[0] < tiles, turn, (read(jnp.int32(0)), jnp.int32(0), jnp.int32(0)))[2]
