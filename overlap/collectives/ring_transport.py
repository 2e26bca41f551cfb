"""The transport *ring*: every device passes on what it has just multiplied to the device before it.

The shard that device d multiplies in step s is the one that device d − 1 needs in step s + 1. So it has no way of its
own: it leaves from the operand tile that is already in shared memory, by a warp that computes nothing.

    forwarder   for each piece in the first tile column, in all steps but the last:
                    for each k step: the tile of lhs → scratch of device d − 1; give back the slot when it is read
                    when all of that has landed: raise the flag of its row block at d − 1
                in step 0 also, if the gathered operand is asked for: the tile → its place in the own scratch
    producer    waits for all parts of its row block, at system scope

The flag counts parts because a tile may be cut along k, its parts carried by several CTAs (`StreamK`). All cut tiles of
a kernel have the same number of parts; a whole one counts as so many, and whoever waits need not know which it was. The
flag is raised once per piece and not after each k step: who waits needs the whole row block, so earlier signals would
help nobody, and each costs a release at system scope, with a wait for everything under way across the link before it.
Of a cluster, the CTA whose tile is in the first column sends: both, if their tiles lie below each other; one, if they
lie side by side and hold the same rows.

Before a device writes into its neighbour's memory, that one must have begun: so each looks for the device before it,
and no other. Nobody reads a peer's inputs, so these may be overwritten as soon as the own kernel has ended. What others
write here is what this device waits for: every flag belongs to a row block that some tile of this device needs, its
producer waits for the flag's final count, and no signal comes before the bytes that it stands for. So when the last CTA
leaves, all writes to this device's scratch have landed and all signals to its flags have arrived.

No deadlock where all CTAs of a device run: a tile of step s + 1 waits only for tiles of step s on the next device, each
CTA takes its tiles in the order of the steps, and a part of a tile waits for nothing of the others' parts before it has
been passed on. But rows leave by the CTA that multiplies them. If another kernel holds a core of device A until device
B gets on, and B waits for rows from a CTA that waits for that core, nobody gets on: XLA's collectives are such kernels,
and its default schedule runs them beside this one. That is why nobody is given this transport unasked.

Source: the ring collective matmul of JAX's Pallas documentation for Mosaic GPU, here without its steps.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jax.experimental import pallas as pl

from overlap.collectives.schedule import AllGatherSchedule
from overlap.collectives.transport import Shards
from overlap.kernels.config import Config
from overlap.kernels.grid import cta
from overlap.kernels.hooks import Hooks, Tile
from overlap.primitives import (
    HANDSHAKE_FLAGS,
    Handshake,
    board,
    send_tile,
    signal_peer,
    wait_stores_landed,
    wait_stores_read,
)


def _pass_on(shards: Shards, tile: Tile, k: Any, lhs_smem: Any) -> None:
    """The forwarder's part of one k step; the edges clip what lies beyond the last row or k."""
    group, schedule, config = shards.group, shards.schedule, shards.config
    me, previous = group.me(), group.peer(group.size - 1)
    place = pl.ds(tile.m * config.tile_m, config.tile_m), pl.ds(k * config.tile_k, config.tile_k)

    @pl.when(shards.schedule.passes_on(tile.step, tile.m, tile.side, tile.n))
    def _send() -> None:
        there = schedule.scratch_index(previous, tile.step + 1)
        send_tile(lhs_smem, shards.within(group.remote(shards.scratch_gmem, previous), tile.batch, there, *place))
        if schedule.keeps_own:

            @pl.when(tile.step == 0)
            def _keep() -> None:
                send_tile(
                    lhs_smem, shards.within(shards.scratch_gmem, tile.batch, schedule.scratch_index(me, 0), *place)
                )

        # The slot is given back when this returns.
        wait_stores_read()


def _announce(shards: Shards, tile: Tile, parts: Any, flags: Any) -> None:
    """The forwarder's part of one piece: all of it is there. It is one of `parts`."""

    @pl.when(shards.schedule.passes_on(tile.step, tile.m, tile.side, tile.n))
    def _signal() -> None:
        # Landed, not only read: the flag speaks of the destination.
        wait_stores_landed()
        flag, previous = flags.at[shards.flag(tile.step + 1, tile)], shards.group.peer(shards.group.size - 1)
        # A signal's increment must be a constant, so there are two signals to choose from.
        pl.when(parts == 1)(lambda: signal_peer(flag, shards.group, previous, shards.tile_pieces))
        if shards.tile_pieces > 1:
            pl.when(parts > 1)(lambda: signal_peer(flag, shards.group, previous, 1))


class RingTransport:
    """See the module's docstring; the methods are those of `transport.Transport`."""

    why = ""  # Nobody gets it unasked.
    forwards = True
    reads_inputs_only = False
    needs_all_ctas = True
    brings_scales = False

    def flag_shapes(self, schedule: AllGatherSchedule) -> tuple[tuple[int, ...], ...]:
        return schedule.flags_shape, HANDSHAKE_FLAGS

    def smem_types(self, schedule: AllGatherSchedule, config: Config, dtype: Any) -> tuple[Any, ...]:
        del schedule, config, dtype  # It sends from the mainloop's slots.
        return ()

    def hook_in(self, hooks: Hooks, shards: Shards, flags: tuple[Any, ...], smem: tuple[Any, ...]) -> Hooks:
        (row_flags, handshake_flags), () = flags, smem
        group = shards.group
        handshake = Handshake(handshake_flags, group, cta(shards.config), shards.operation, only=group.size - 1)

        def wait(tile: Tile) -> None:
            handshake.wait_for(
                board.ROWS, row_flags.at[shards.flag(tile.step, tile)], shards.tile_pieces, group.peer(1)
            )

        return dataclasses.replace(
            hooks,
            before_load=shards.wait_for_rows(wait),
            in_smem=lambda tile, k, lhs_smem, rhs_smem: _pass_on(shards, tile, k, lhs_smem),
            piece_done=lambda tile, parts: _announce(shards, tile, parts, row_flags),
            before_forwarding=handshake.await_peers,
            communicate=handshake.begin_and_leave,
        )
