"""Deals out tiles by a counter: the CTAs that run draw the numbers of tiles, in order, until none is left.

This is for products whose tiles peers wait for. If such a tile were assigned to one CTA, and this CTA could not start
yet, the peers would wait for it. The producer draws the number of a tile, passes it to the other roles through a
mailbox in shared memory, and loads the tile's operands. There are two mailboxes, so that the producer may be one tile
ahead. A number that is not below the number of tiles ends the loops of all roles.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from overlap.kernels.hooks import Tile
from overlap.kernels.mainloop import Loop
from overlap.kernels.stream_k import Piece
from overlap.kernels.tma import exchange
from overlap.kernels.tma.staging import MAILBOXES, Buffers
from overlap.primitives import draw
from overlap.primitives.atomics import loop_while
from overlap.primitives.integers import remainder
from overlap.primitives.shared_words import load_word
from overlap.primitives.types import Index


def _turn(loop: Loop, buffers: Buffers, number: Index, ordinal: Index, before: Index) -> tuple[Tile, Piece, Index]:
    """Returns a tile, the one piece that covers it, and how many stages have been filled once it has been loaded."""
    tile = loop.tile_at(number)
    k_steps = loop.work.k_steps
    filled = before + k_steps + exchange.term_stages(loop, buffers, tile)
    return tile, Piece(number, 0, k_steps, before, ordinal=ordinal), filled


def deal(loop: Loop, buffers: Buffers, produce: Callable[..., None]) -> None:
    """Runs the producer's loop: draws tiles, and calls `produce(loop, buffers, tile, piece)` for each."""
    mail = buffers.mail
    tiles = loop.work.tiles
    assert mail is not None

    def post(number: Index, ordinal: Index) -> None:
        mailbox = remainder(ordinal, MAILBOXES)
        pl.when(ordinal >= MAILBOXES)(lambda: plgpu.barrier_wait(mail.taken.at[mailbox]))
        mail.numbers[mailbox] = number
        plgpu.barrier_arrive(mail.posted.at[mailbox])

    def turn(state: tuple[Index, Index, Index]) -> tuple[Index, Index, Index]:
        number, ordinal, before = state
        post(number, ordinal)
        tile, piece, filled = _turn(loop, buffers, number, ordinal, before)
        produce(loop, buffers, tile, piece)
        return draw(loop.counter, tiles, number), ordinal + 1, filled

    start = (draw(loop.counter, tiles), jnp.int32(0), jnp.int32(0))
    number, ordinal, _ = loop_while(lambda state: state[0] < tiles, turn, start)
    post(number, ordinal)


def for_each(loop: Loop, buffers: Buffers, role: Callable[..., None], *more: Index) -> None:
    """Runs the loop of any other role: calls `role(loop, buffers, tile, piece, *more)` for each tile of this CTA."""
    mail = buffers.mail
    tiles = loop.work.tiles
    assert mail is not None

    def read(ordinal: Index) -> jax.Array:
        mailbox = remainder(ordinal, MAILBOXES)
        plgpu.barrier_wait(mail.posted.at[mailbox])
        return load_word(mail.numbers.at[mailbox])

    def turn(state: tuple[Index, Index, Index]) -> tuple[Index, Index, Index]:
        number, ordinal, before = state
        tile, piece, filled = _turn(loop, buffers, number, ordinal, before)
        role(loop, buffers, tile, piece, *more)
        # Release the mailbox only after `role` has returned. So the forwarder warp, which is the last to finish a tile,
        # is never two tiles behind the producer.
        plgpu.barrier_arrive(mail.taken.at[remainder(ordinal, MAILBOXES)])
        return read(ordinal + 1), ordinal + 1, filled

    loop_while(lambda state: state[0] < tiles, turn, (read(jnp.int32(0)), jnp.int32(0), jnp.int32(0)))
