"""The transport *pull*: every device reads each peer's shard itself.

    communicator   at the start: the entry handshake
                   for each of this CTA's row blocks of scales, if rows have such: as the chunks
                   for each of this CTA's chunks, in the order in which tiles need them:
                       peer's lhs → shared memory → scratch; when it has landed, raise the flag of its row block
                   at the end: the own shard's chunks, if the gathered operand is asked for; the exit handshake
    producer       waits for the flag of its row block, at GPU scope

A flag never crosses NVLink: the only remote signals are the handshakes', which wait until the peers' inputs are ready
and keep a device's own alive until all peers have read them. Remote data lands once in local scratch, because reads of
a peer are not cached in the local L2.

Shape legend: chunk: `PullPlan`.
"""

from __future__ import annotations

import dataclasses
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
    entry_handshake,
    exit_handshake,
    fence_async_proxy,
    pull_chunks,
    send_tile,
    share_of,
    signal,
    wait_at_least,
    wait_stores_landed,
)


def _pull_scales(site: Site, flags: Any, scales_smem: Any, loaded: Any) -> None:
    """The communicator's first transfers: the scales of the peers' rows, a tile's at a time."""
    assert site.scales is not None
    (own_gmem, scratch_gmem), schedule = site.scales, site.schedule
    filled = schedule.filled_rows(site.config)

    # Hardly any CTA has more than one piece, so none is on its way while another one is stored.
    @pl.loop(site.cta, schedule.scale_pieces, step=site.num_ctas)
    def _piece(index: Any) -> None:
        step, element, block = schedule.scales(index)
        row = block * schedule.block_rows
        place = pl.ds(0, 1), pl.ds(element * filled + row, schedule.block_rows)
        of_peer = site.ring.remote(own_gmem, site.ring.peer(step)).at[place]
        plgpu.copy_gmem_to_smem(of_peer, scales_smem, loaded.at[0], oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)
        plgpu.barrier_wait(loaded.at[0])
        send_tile(scales_smem, scratch_gmem.at[(step - 1, *place)])
        wait_stores_landed()
        signal(flags.at[schedule.flag(step, element * schedule.plan.shard_rows + row)])


def _pull(site: Site, flags: Any, slots_smem: Any, loaded: Any) -> None:
    """The communicator's transfers: this CTA's share of the chunks."""
    schedule, ring, cta, num_ctas = site.schedule, site.ring, site.cta, site.num_ctas
    me = ring.me()

    # A shard is a step and a batch element.
    def within(step: Any, row: Any, column: Any) -> tuple[Any, Any, Any]:
        batch, row = schedule.batch_of_row(row)
        return (step, batch), row, column

    def destination(shard: Any, *place: Any) -> Any:
        step, batch = shard
        return site.within(site.scratch_gmem, batch, schedule.slot(me, step), *place)

    def of_peer(shard: Any, *place: Any) -> Any:
        step, batch = shard
        return site.within(ring.remote(site.lhs_gmem, ring.peer(step)), batch, *place)

    def landed(shard: Any, row: Any, column: Any) -> None:
        step, batch = shard
        signal(flags.at[schedule.flag(step, batch * schedule.plan.shard_rows + row)])

    pull_chunks(
        share_of(schedule.pulls, cta, num_ctas), schedule.plan,
        at=lambda ordinal: within(*schedule.chunk(cta + ordinal * num_ctas)),
        source=of_peer, destination=destination, landed=landed, slots_smem=slots_smem, loaded=loaded,
    )  # fmt: skip
    if not schedule.keeps_own:
        return
    # Nobody in this kernel reads the copy, so it comes last, and without flags.
    pull_chunks(
        share_of(schedule.chunks, cta, num_ctas), schedule.plan,
        at=lambda ordinal: within(0, *schedule.origin(cta + ordinal * num_ctas)),
        source=lambda shard, *place: site.within(site.lhs_gmem, shard[1], *place),
        destination=destination, landed=lambda *_: None, slots_smem=slots_smem, loaded=loaded,
    )  # fmt: skip


class Pull:
    """See the module's docstring; the methods are those of `transport.Transport`."""

    forwards = False
    awaits_peers = True
    brings_scales = True

    def flag_shapes(self, schedule: AllGatherSchedule) -> tuple[tuple[int, ...], ...]:
        return schedule.flags, HANDSHAKE_FLAGS

    def smem_types(self, schedule: AllGatherSchedule, config: Config, dtype: Any) -> tuple[Any, ...]:
        slots = plgpu.SMEM((config.chunk_slots, schedule.plan.rows, schedule.plan.cols), dtype)
        if schedule.scaled:
            # Scales come first, through the same memory.
            slots = plgpu.RefUnion(slots, plgpu.SMEM((1, schedule.block_rows), jnp.float32))
        return slots, plgpu.Barrier(num_arrivals=1, num_barriers=config.chunk_slots)

    def hook_in(self, hooks: Hooks, site: Site, flags: tuple[Any, ...], smem: tuple[Any, ...]) -> Hooks:
        (row_flags, handshake), (slots_smem, loaded) = flags, smem

        def wait(tile: Tile) -> None:
            wait_at_least(row_flags.at[site.flag(tile.step, tile)], site.schedule.flag_target(tile.m))
            fence_async_proxy()

        def communicate() -> None:
            entry_handshake(handshake, site.ring, site.cta, site.num_ctas)
            chunks_smem = slots_smem
            if site.scales is not None:
                chunks_smem, scales_smem = slots_smem
                _pull_scales(site, row_flags, scales_smem, loaded)
            _pull(site, row_flags, chunks_smem, loaded)
            exit_handshake(handshake, site.ring, site.cta, site.num_ctas)

        return dataclasses.replace(hooks, before_load=site.wait_for_rows(wait), communicate=communicate)
