"""The transport *pull* of the gathered left operand, for the kernel in which each shard has tiles of its own.

Every device reads each peer's shard: its communicators copy the chunks to its scratch memory (`communicator.py`).
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from overlap.collectives import communicator
from overlap.collectives.communicator import Chunks, Communicator
from overlap.collectives.gather.lhs_schedule import AllGatherSchedule
from overlap.collectives.gather.transport import Shards
from overlap.kernels.block_scales import SCALE_TILE_BYTES, SCALE_TILE_WORDS
from overlap.kernels.config import Config
from overlap.kernels.hooks import Hooks, Tile
from overlap.primitives import semaphore_signal, tma_store, wait_stores_landed
from overlap.primitives.integers import largest_divisor
from overlap.primitives.types import BarrierRef, GmemRef, Index, ScratchType, SemaphoreRef, SmemRef


def _pull_scales(shards: Shards, flags: SemaphoreRef, scales_smem: SmemRef, loaded: BarrierRef, index: Index) -> None:
    """Carries out transfer `index` of scales of rows: copies the scales of one row block of a peer to scratch."""
    assert shards.scales is not None
    own_gmem, scratch_gmem = shards.scales
    schedule = shards.schedule
    step, batch, block = schedule.scale_transfer(index)
    row = block * schedule.block_rows
    place = pl.ds(0, 1), pl.ds(batch * schedule.padded_rows(shards.config) + row, schedule.block_rows)
    of_peer = shards.group.remote_ref(own_gmem, shards.group.peer(step)).at[place]
    plgpu.copy_gmem_to_smem(of_peer, scales_smem, loaded.at[0], oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)
    plgpu.barrier_wait(loaded.at[0])
    tma_store(scales_smem, scratch_gmem.at[(step - 1, *place)])
    wait_stores_landed()
    semaphore_signal(flags.at[schedule.flag(step, batch * schedule.chunking.shard_rows + row)])


def _pull_block_scales(
    shards: Shards, flags: SemaphoreRef, scales_smem: SmemRef, loaded: BarrierRef, index: Index
) -> None:
    """Carries out transfer `index` of scales of blocks: copies the scales of one row block of a peer to scratch.

    It copies the scales of a few k steps at a time.
    """
    assert shards.scales is not None
    own_gmem, scratch_gmem = shards.scales
    schedule = shards.schedule
    step, batch, block = schedule.scale_transfer(index)
    tile = batch * schedule.row_blocks + block
    count = scales_smem.shape[0]
    of_peer = shards.group.remote_ref(own_gmem, shards.group.peer(step))

    @pl.loop(0, schedule.scale_k_steps // count)
    def _chunk(number: Index) -> None:
        k_steps = pl.ds(number * count, count)
        plgpu.copy_gmem_to_smem(
            of_peer.at[tile, k_steps], scales_smem, loaded.at[0], oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS
        )
        plgpu.barrier_wait(loaded.at[0])
        tma_store(scales_smem, scratch_gmem.at[(step - 1) * own_gmem.shape[0] + tile, k_steps])
        wait_stores_landed()

    semaphore_signal(flags.at[schedule.flag(step, batch * schedule.chunking.shard_rows + block * schedule.block_rows)])


def _scales_type(schedule: AllGatherSchedule, config: Config) -> ScratchType:
    """Returns the type of the shared memory through which scales are pulled; None if no scales are pulled."""
    if not schedule.scaled:
        return None
    if not schedule.scale_k_steps:
        return plgpu.SMEM((1, schedule.block_rows), jnp.float32)
    k_steps = largest_divisor(schedule.scale_k_steps, max(config.chunk_bytes // SCALE_TILE_BYTES, 1))
    return plgpu.SMEM((k_steps, SCALE_TILE_WORDS), jnp.int32)


@dataclasses.dataclass(frozen=True)
class _Places:
    """Gives the source and the destination of each chunk.

    What `Chunks` calls a shard is here one batch element of the shard of one step: a pair (step, batch element).
    """

    shards: Shards
    flags: SemaphoreRef
    me: Index

    def peers(self) -> Chunks:
        schedule = self.shards.schedule
        at = lambda index: self._within(*schedule.chunk(index))  # noqa: E731
        return Chunks(schedule.pulled_chunks, schedule.chunking, at, self._at_peer, self._destination, self._landed)

    def own(self) -> Chunks:
        """Returns the own shard's chunks, which are copied last and raise no flags: no tile reads these copies."""
        shards = self.shards
        schedule = self.shards.schedule
        at = lambda index: self._within(0, *schedule.origin(index))  # noqa: E731
        here = lambda shard, *place: shards.within(shards.lhs_gmem, shard[1], *place)  # noqa: E731
        return Chunks(schedule.chunks, schedule.chunking, at, here, self._destination)

    def _within(self, step: Index, row: Index, column: Index) -> tuple[tuple[Index, Index], Index, Index]:
        batch, row = self.shards.schedule.batch_of_row(row)
        return (step, batch), row, column

    def _at_peer(self, shard: tuple[Index, Index], *place: pl.Slice) -> GmemRef:
        step, batch = shard
        shards = self.shards
        return shards.within(shards.group.remote_ref(shards.lhs_gmem, shards.group.peer(step)), batch, *place)

    def _destination(self, shard: tuple[Index, Index], *place: pl.Slice) -> GmemRef:
        step, batch = shard
        shards = self.shards
        return shards.within(shards.scratch_gmem, batch, shards.schedule.scratch_index(self.me, step), *place)

    def _landed(self, shard: tuple[Index, Index], row: Index, column: Index) -> None:
        step, batch = shard
        schedule = self.shards.schedule
        semaphore_signal(self.flags.at[schedule.flag(step, batch * schedule.chunking.shard_rows + row)])


class PullTransport:
    """The transport "pull". See `transport.Transport` for the attributes and methods."""

    name: Literal["pull", "ring"] = "pull"
    why = communicator.WHY_DIRECT
    reads_inputs_only = True
    needs_all_ctas = False
    brings_scales = True

    def flag_shapes(self, schedule: AllGatherSchedule) -> tuple[tuple[int, ...], ...]:
        return communicator.flag_shapes(schedule.flags_shape, copies_own=schedule.keeps_own)

    def smem_types(self, schedule: AllGatherSchedule, config: Config, dtype: DTypeLike) -> tuple[ScratchType, ...]:
        return communicator.smem_types(config, schedule.chunking, dtype, _scales_type(schedule, config))

    def hook_in(
        self, hooks: Hooks, shards: Shards, flags: tuple[SemaphoreRef, ...], smem: tuple[SmemRef, ...]
    ) -> Hooks:
        row_flags, *rest = flags
        buffers_smem, loaded = smem
        schedule = shards.schedule
        pull_scales = None
        if shards.scales is not None:
            buffers_smem, scales_smem = buffers_smem
            of_kind = _pull_block_scales if schedule.scale_k_steps else _pull_scales
            pull_scales = lambda index: of_kind(shards, row_flags, scales_smem, loaded, index)  # noqa: E731

        def communicate() -> None:
            places = _Places(shards, row_flags, shards.group.me())
            Communicator(
                shards.operation,
                shards.group,
                shards.config,
                tuple(rest),
                (buffers_smem, loaded),
                places.peers(),
                places.own() if schedule.keeps_own else None,
                scale_transfers=schedule.scale_transfers,
                pull_scales=pull_scales,
            ).run()

        def wait(tile: Tile) -> None:
            communicator.wait_for_block(row_flags.at[shards.flag(tile.step, tile)], schedule.flag_target(tile.m))

        return dataclasses.replace(hooks, before_load=shards.wait_for_rows(wait), communicate=communicate)
