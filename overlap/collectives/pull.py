"""The transport *pull*: every device reads each peer's shard itself.

    communicator   at the start: looks for the peers
                   for each row block of scales that it draws, if rows have such: as the chunks
                   for each chunk that it draws, in the order in which tiles need them:
                       peer's lhs → shared memory → scratch; when it has landed, raise the flag of its row block
                   at the end: the own shard's chunks, if the gathered operand is asked for; takes leave of the peers
    producer       waits for the flag of its row block, at GPU scope

A flag never crosses NVLink: the only remote signals are the handshakes', which wait until the peers' inputs are ready
and keep a device's own alive until all peers have read them. Remote data lands once in local scratch, because reads of
a peer are not cached in the local L2.

Shape legend: chunk: `PullPlan`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from overlap.collectives.schedule import AllGatherSchedule
from overlap.collectives.transport import Site
from overlap.kernels.config import Config
from overlap.kernels.hooks import Hooks, Tile
from overlap.primitives import (
    HANDSHAKE_FLAGS,
    Handshake,
    draw,
    each_drawn,
    fence_async_proxy,
    pull_chunks,
    send_tile,
    signal,
    wait_at_least,
    wait_stores_landed,
)


def _pull_scales(site: Site, flags: Any, scales_smem: Any, loaded: Any, index: Any) -> None:
    """One of the communicator's first transfers: the scales of a tile's rows of a peer."""
    assert site.scales is not None
    (own_gmem, scratch_gmem), schedule = site.scales, site.schedule
    step, element, block = schedule.scales(index)
    row = block * schedule.block_rows
    place = pl.ds(0, 1), pl.ds(element * schedule.filled_rows(site.config) + row, schedule.block_rows)
    of_peer = site.ring.remote(own_gmem, site.ring.peer(step)).at[place]
    plgpu.copy_gmem_to_smem(of_peer, scales_smem, loaded.at[0], oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)
    plgpu.barrier_wait(loaded.at[0])
    send_tile(scales_smem, scratch_gmem.at[(step - 1, *place)])
    wait_stores_landed()
    signal(flags.at[schedule.flag(step, element * schedule.plan.shard_rows + row)])


def _pull(site: Site, flags: Any, slots_smem: Any, loaded: Any, number: Any, counter: Any, first: int) -> Any:
    """The transfers of the chunks that this CTA draws, from `number` on; returns how many."""
    schedule, ring, me = site.schedule, site.ring, site.ring.me()

    def of_peer(shard: Any, *place: Any) -> Any:
        step, batch = shard
        return site.within(ring.remote(site.lhs_gmem, ring.peer(step)), batch, *place)

    def landed(shard: Any, row: Any, column: Any) -> None:
        step, batch = shard
        signal(flags.at[schedule.flag(step, batch * schedule.plan.shard_rows + row)])

    return pull_chunks(
        number, (first, first + schedule.pulls), counter, schedule.plan,
        at=lambda index: _within(schedule, *schedule.chunk(index)), source=of_peer,
        destination=functools.partial(_destination, site, me), landed=landed, slots_smem=slots_smem, loaded=loaded,
    )  # fmt: skip


def _keep_own(site: Site, slots_smem: Any, loaded: Any, counter: Any) -> None:
    """The own shard's transfers. Nobody in this kernel reads the copy, so it comes last, and without flags."""
    schedule, me = site.schedule, site.ring.me()
    pull_chunks(
        draw(counter, schedule.chunks), (0, schedule.chunks), counter, schedule.plan,
        at=lambda index: _within(schedule, 0, *schedule.origin(index)),
        source=lambda shard, *place: site.within(site.lhs_gmem, shard[1], *place),
        destination=functools.partial(_destination, site, me), landed=lambda *_: None, slots_smem=slots_smem,
        loaded=loaded,
    )  # fmt: skip


def _within(schedule: AllGatherSchedule, step: Any, row: Any, column: Any) -> tuple[Any, Any, Any]:
    """A chunk's shard, which is a step and a batch element, and its first row and column there."""
    batch, row = schedule.batch_of_row(row)
    return (step, batch), row, column


def _destination(site: Site, me: Any, shard: Any, *place: Any) -> Any:
    step, batch = shard
    return site.within(site.scratch_gmem, batch, site.schedule.slot(me, step), *place)


class Pull:
    """See the module's docstring; the methods are those of `transport.Transport`."""

    forwards = False
    told = True
    needs_all_ctas = False
    brings_scales = True

    def flag_shapes(self, schedule: AllGatherSchedule) -> tuple[tuple[int, ...], ...]:
        return schedule.flags, HANDSHAKE_FLAGS, *([(1,)] if schedule.keeps_own else [])

    def smem_types(self, schedule: AllGatherSchedule, config: Config, dtype: Any) -> tuple[Any, ...]:
        slots = plgpu.SMEM((config.chunk_slots, schedule.plan.rows, schedule.plan.cols), dtype)
        if schedule.scaled:
            # Scales come first, through the same memory.
            slots = plgpu.RefUnion(slots, plgpu.SMEM((1, schedule.block_rows), jnp.float32))
        return slots, plgpu.Barrier(num_arrivals=1, num_barriers=config.chunk_slots)

    def hook_in(self, hooks: Hooks, site: Site, flags: tuple[Any, ...], smem: tuple[Any, ...]) -> Hooks:
        (row_flags, handshake_flags, *own_counter), (slots_smem, loaded) = flags, smem
        schedule = site.schedule
        transfers = schedule.scale_pieces + schedule.pulls
        handshake = Handshake(handshake_flags, site.ring, site.cta, site.operation, transfers)

        def wait(tile: Tile) -> None:
            wait_at_least(row_flags.at[site.flag(tile.step, tile)], schedule.flag_target(tile.m))
            fence_async_proxy()

        def communicate() -> None:
            number, carried, chunks_smem, first = handshake.begin(), 0, slots_smem, handshake.looks
            handshake.await_peers()
            if site.scales is not None:
                chunks_smem, scales_smem = slots_smem
                first += schedule.scale_pieces
                number, carried = each_drawn(
                    handshake.counter, number, first, handshake.items,
                    lambda number: _pull_scales(site, row_flags, scales_smem, loaded, number - handshake.looks),
                )  # fmt: skip
            carried += _pull(site, row_flags, chunks_smem, loaded, number, handshake.counter, first)
            handshake.leave(carried)
            if schedule.keeps_own:
                _keep_own(site, chunks_smem, loaded, own_counter[0].at[0])

        return dataclasses.replace(hooks, before_load=site.wait_for_rows(wait), communicate=communicate)
