"""The transport *ring*: every device passes the rows that it has just multiplied on to the device before it.

The shard that device d multiplies in step s is the shard that device d − 1 needs in step s + 1. The rows to be sent are
already in shared memory, as operand tiles of the product. So they are sent from there, by a warp that computes nothing,
and need not be loaded a second time.

    forwarder   for each piece of a tile in the first tile column, in all steps but the last:
                    for each k step: sends the tile of lhs to the scratch of device d − 1; frees the stage once the tile
                    has been read
                    when all these tiles have landed: raises the flag of their row block at device d − 1
                in step 0, if the call also returns the gathered operand: stores the tile in this device's scratch, too
    producer    waits for all pieces of a tile's row block, at system scope

The flag counts pieces because a tile may be cut along k, its pieces computed by several CTAs (`StreamK`). All cut tiles
of a kernel have the same number of pieces. A tile that is not cut adds that number to the flag at once, so a waiting
producer need not know whether the tile was cut.

The flag is raised once per piece and not after each k step. The producer waits for the whole row block, so earlier
signals would be of no use. And each signal costs a release at system scope, which waits until all earlier writes across
the link have landed.

Before a device writes into its neighbour's memory, that neighbour must have begun: so each device looks for the device
before it, and for no other. No device reads a peer's inputs, so a device's inputs may be overwritten as soon as its own
kernel has ended. This device waits for everything that others write to its memory: every flag belongs to a row block
that some tile of this device needs, the producer of that tile waits for the flag's final count, and no signal comes
before the bytes for which it stands. So when the last CTA leaves, all writes to this device's scratch have landed and
all signals to its flags have arrived.

There is no deadlock where all CTAs of a device run: a tile of step s + 1 waits only for tiles of step s on the next
device, each CTA takes its tiles in the order of the steps, and a piece of a tile is passed on before it waits for any
other piece. But rows leave by the CTA that multiplies them. Suppose that another kernel holds an SM of device A until
device B makes progress, and B waits for rows from a CTA that waits for that SM. Then neither device makes progress.
XLA's collectives are such kernels, and XLA's default schedule runs them beside this one. That is why this transport is
used only if the caller asks for it.

Source: the ring collective matmul of JAX's Pallas documentation for Mosaic GPU, here without a barrier per step.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from overlap.collectives.gather.lhs_schedule import AllGatherSchedule
from overlap.collectives.gather.transport import Shards
from overlap.kernels.config import Config, tile_k
from overlap.kernels.grid import cta
from overlap.kernels.hooks import Hooks, Tile
from overlap.primitives import (
    HANDSHAKE_FLAGS,
    Handshake,
    semaphore_signal_peer,
    stalls,
    tma_store,
    wait_stores_landed,
    wait_stores_read,
)
from overlap.primitives.types import Index, ScratchType, SemaphoreRef, SmemRef


def _pass_on(shards: Shards, tile: Tile, k_step: Index, lhs_smem: SmemRef) -> None:
    """Sends the operand tile of one k step. TMA stores nothing beyond the last row or the last k of the scratch."""
    group = shards.group
    schedule = shards.schedule
    config = shards.config
    me, previous = group.me(), group.peer(group.size - 1)
    depth = tile_k(lhs_smem.dtype)
    place = pl.ds(tile.m * config.tile_m, config.tile_m), pl.ds(k_step * depth, depth)

    @pl.when(shards.schedule.passes_on(tile.step, tile.m, tile.side, tile.n))
    def _send() -> None:
        there = schedule.scratch_index(previous, tile.step + 1)
        tma_store(lhs_smem, shards.within(group.remote_ref(shards.scratch_gmem, previous), tile.batch, there, *place))
        if schedule.keeps_own:

            @pl.when(tile.step == 0)
            def _keep() -> None:
                tma_store(
                    lhs_smem, shards.within(shards.scratch_gmem, tile.batch, schedule.scratch_index(me, 0), *place)
                )

        # The stage is freed when this function returns.
        wait_stores_read()


def _announce(shards: Shards, tile: Tile, pieces: Index, flags: SemaphoreRef) -> None:
    """Tells the device to which this one passes shards that all k steps of this tile's piece have landed there.

    That is the device one position before. `pieces`: into how many pieces the tile is cut.
    """

    @pl.when(shards.schedule.passes_on(tile.step, tile.m, tile.side, tile.n))
    def _signal() -> None:
        # The stores must have landed, not only been read: the flag tells the receiver that the data is there.
        wait_stores_landed()
        flag, previous = flags.at[shards.flag(tile.step + 1, tile)], shards.group.peer(shards.group.size - 1)
        # A signal's increment must be a constant, so there is one signal for each case.
        pl.when(pieces == 1)(lambda: semaphore_signal_peer(flag, shards.group, previous, shards.tile_pieces))
        if shards.tile_pieces > 1:
            pl.when(pieces > 1)(lambda: semaphore_signal_peer(flag, shards.group, previous, 1))


class RingTransport:
    """The transport "ring". See `transport.Transport` for the attributes and methods."""

    name: Literal["pull", "ring"] = "ring"
    why = ""  # It is never chosen unless the caller asks for it.
    reads_inputs_only = False
    needs_all_ctas = True
    brings_scales = False

    def flag_shapes(self, schedule: AllGatherSchedule) -> tuple[tuple[int, ...], ...]:
        return schedule.flags_shape, HANDSHAKE_FLAGS

    def smem_types(self, schedule: AllGatherSchedule, config: Config, dtype: DTypeLike) -> tuple[ScratchType, ...]:
        del schedule, config, dtype  # It sends from the mainloop's stages.
        return ()

    def hook_in(
        self, hooks: Hooks, shards: Shards, flags: tuple[SemaphoreRef, ...], smem: tuple[SmemRef, ...]
    ) -> Hooks:
        (row_flags, handshake_flags), () = flags, smem
        group = shards.group
        handshake = Handshake(handshake_flags, group, cta(shards.config), shards.operation, only=group.size - 1)

        def wait(tile: Tile) -> None:
            handshake.wait_for(
                stalls.ROWS, row_flags.at[shards.flag(tile.step, tile)], shards.tile_pieces, group.peer(1)
            )

        return dataclasses.replace(
            hooks,
            before_load=shards.wait_for_rows(wait),
            in_smem=lambda tile, k_step, lhs_smem, _: _pass_on(shards, tile, k_step, lhs_smem),
            piece_done=lambda tile, pieces: _announce(shards, tile, pieces, row_flags),
            before_forwarding=handshake.await_peers,
            communicate=handshake.begin_and_leave,
        )
