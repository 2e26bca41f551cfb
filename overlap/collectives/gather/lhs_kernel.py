"""The kernel of `all_gather_lhs_matmul` where each shard has tiles of its own.

    producer     for each output tile, first those of the own shard, then those of the peers d+1, d+2, …:
                     a peer's tile: waits for the flag of its row block; then loads from scratch
                     an own tile:   loads from lhs
    transport    brings the peers' shards into scratch and raises flags; "pull" also brings the scales of their rows or
                 blocks

Several right operands share one gather: their tiles lie side by side in the list of tiles (`AllGatherSchedule`).

Shape legend: D: number of devices; m_shard, k, n_shard: per-shard sizes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from overlap.collectives.gather.lhs_schedule import AllGatherSchedule
from overlap.collectives.gather.refs import Inputs, Outputs
from overlap.collectives.gather.transport import Shards, Transport
from overlap.frame.operands import Operands, Results
from overlap.frame.operation import LaunchPlan
from overlap.kernels import block_scales, epilogue
from overlap.kernels.config import tile_k
from overlap.kernels.grid import own_row
from overlap.kernels.hooks import BlockScales, Epilogue, Hooks, OneOf, SideBySide, Tile
from overlap.kernels.product_kernel import ProductKernel, Refs
from overlap.kernels.stream_k import StreamK
from overlap.primitives import PeerGroup
from overlap.primitives.integers import ceil_div
from overlap.primitives.types import GmemRef, Index


def launch(operands: Operands, plan: LaunchPlan, group: PeerGroup, transport: Transport, *, keeps_own: bool) -> Results:
    """Runs the kernel on checked operands.

    Args:
      operands: the operands; `lhs` is [(batch,) m_shard, k].
      plan: the configuration and the layouts.
      group: the devices.
      transport: how the shards travel.
      keeps_own: whether the gathered left operand is a result.

    Returns:
      [(batch,) D · m_shard, n] for each right operand, or one if the activation combines them; the gathered left
      operand, or None.
    """
    lhs = operands.lhs
    config = plan.config
    *batch, m_shard, k = lhs.shape
    widths = plan.form.widths
    types = plan.types(operands, m_shard, transport.name)
    has_scales = operands.row_scale is not None or operands.is_block_scaled
    blocks = _packed(operands, plan)
    tiled = widths if types.sides == 1 else [types.sides * widths[0]]
    schedule = dataclasses.replace(
        AllGatherSchedule.of(group.size, lhs.shape, tiled, lhs.dtype.itemsize, config),
        keeps_own=keeps_own,
        scaled=has_scales and transport.brings_scales,
        scale_k_steps=blocks[0].shape[1] if blocks else 0,
    )
    if schedule.batch_size == 1:
        batch = []
    work = StreamK.on(plan.target, config, schedule.tiles, ceil_div(k, tile_k(lhs.dtype)))
    row_scale = _padded_row_scale(operands.row_scale, schedule, plan, group)
    rows_of_batch = lhs.reshape(*batch, m_shard, k)
    inputs = Inputs(rows_of_batch, operands.rhs_list, plan.vectors(operands, row_scale), blocks)
    scales: Any = blocks[0] if blocks else row_scale
    out_types = Outputs(
        [jax.ShapeDtypeStruct((*batch, group.size, m_shard, n), plan.out_dtype) for n in plan.result_widths],
        jax.ShapeDtypeStruct((*batch, schedule.scratch_shards, m_shard, k), lhs.dtype),
        [_peer_scales_type(scales, schedule)] if schedule.scaled else [],
    )
    # The indices of the inputs that peers read: the left operand (0) and, if its scales travel, these scales. In the
    # list of inputs the scales, of rows or of blocks, follow the right operands.
    peers_read = (0, *([1 + len(operands.rhs_list)] if schedule.scaled else []))
    kernel = ProductKernel(
        f"overlap_{plan.operation.name}",
        plan.target,
        config,
        types,
        work,
        transport.flag_shapes(schedule),
        transport.smem_types(schedule, config, lhs.dtype),
        peers_read if transport.reads_inputs_only else (),
    )
    name = str(plan)

    def body_of(refs: Refs[Inputs, Outputs]) -> _Body:
        inputs, outputs = refs.inputs, refs.outputs
        own_scales = inputs.blocks[0] if inputs.blocks else inputs.vectors.row_scale
        scales = (own_scales, *outputs.scales) if outputs.scales else None
        shards = Shards(name, group, schedule, config, work.pieces_per_tile, inputs.lhs, outputs.scratch, scales)
        return _Body(kernel, transport, plan.program, shards, refs, group.me())

    results = kernel.launch(inputs, out_types, body_of)
    rows = (*operands.lhs.shape[:-2], group.size * m_shard)
    gathered = results.scratch.reshape(*rows, k) if keeps_own else None
    return tuple(out.reshape(*rows, out.shape[-1]) for out in results.outs), gathered


def _packed(operands: Operands, plan: LaunchPlan) -> tuple[()] | tuple[jax.Array, Sequence[jax.Array]]:
    """Returns the scales of blocks in the order in which tiles load them; () if there are none.

    Returns:
      [tiles, k steps, words] for all rows of the left operand; a list of the same for each right operand.
    """
    if operands.rhs_block_scales is None:
        return ()
    tile = plan.config.tile_m, plan.config.tile_n
    left, right = block_scales.of_tiles(operands.lhs_block_scale, operands.rhs_block_scales, plan.layouts, tile)
    return left.reshape(-1, *left.shape[-2:]), right


def _peer_scales_type(scales: jax.Array, schedule: AllGatherSchedule) -> jax.ShapeDtypeStruct:
    """Returns shape and dtype of the memory for the peers' scales. `scales` are the scales of this device."""
    peers = schedule.devices - 1
    first, *rest = scales.shape
    shape = (peers * first, *rest) if schedule.scale_k_steps else (peers, *scales.shape)
    return jax.ShapeDtypeStruct(shape, scales.dtype)


def _padded_row_scale(
    row_scale: jax.Array | None, schedule: AllGatherSchedule, plan: LaunchPlan, group: PeerGroup
) -> jax.Array | None:
    """Returns the scales of rows, padded so that the rows of each batch element fill whole tiles.

    Returns:
      [1, entries], the scales of this device's shard, if the transport brings the scales with the rows. Otherwise
      [entries], the scales of all shards, gathered by XLA. None if there are no scales of rows.
    """
    if row_scale is None:
        return None
    scales = row_scale if schedule.scaled else lax.all_gather(row_scale, group.axis_name)
    missing = schedule.padded_rows(plan.config) - scales.shape[-1]
    padded = jnp.pad(scales, ((0, 0),) * (scales.ndim - 1) + ((0, missing),))
    return padded.reshape(1, -1) if schedule.scaled else padded.reshape(-1)


@dataclasses.dataclass(frozen=True)
class _Body:
    """The kernel's body: its tiles, and where their operands lie.

    Attributes:
      kernel: the static part of the kernel: configuration, mainloop, work.
      transport: how the shards travel.
      program: the activation; None: there is none.
      shards: where the shards lie, and which device multiplies them when.
      refs: the kernel's references.
      me: this device's position in the peer group.
    """

    kernel: ProductKernel
    transport: Transport
    program: epilogue.Program | None
    shards: Shards
    refs: Refs[Inputs, Outputs]
    me: Index

    def tile_at(self, index: Index) -> Tile:
        schedule = self.shards.schedule
        step, row, column = schedule.tile(index)
        batch, row = schedule.batch_of(row)
        side, column = schedule.side_of(column)
        return Tile(step, own_row(self.kernel.config, row), column, side=side, batch=batch)

    def hooks(self) -> Hooks:
        inputs = self.refs.inputs
        sides = self.kernel.types.sides
        rhs_gmem = inputs.rhs_list
        has_epilogue = self.program is not None or jax.tree.leaves(inputs.vectors)
        hooks = Hooks(
            load_lhs=self._load_rows,
            rhs_at=lambda tile: OneOf(rhs_gmem, tile.side) if sides == 1 else SideBySide(rhs_gmem),
            out_at=self._out_at,
            epilogue_at=self._epilogue_at if has_epilogue else None,
            block_scales_at=self._block_scales_at if inputs.blocks else None,
        )
        return self.transport.hook_in(hooks, self.shards, self.refs.flags, self.refs.smem)

    def _load_rows(self, tile: Tile, load: Callable[[GmemRef], None]) -> None:
        shards = self.shards
        pl.when(tile.step == 0)(lambda: load(shards.within(shards.lhs_gmem, tile.batch)))
        index = shards.schedule.scratch_index(self.me, tile.step)
        pl.when(tile.step > 0)(lambda: load(shards.within(shards.scratch_gmem, tile.batch, index)))

    def _block_scales_at(self, tile: Tile) -> BlockScales:
        blocks = self.refs.inputs.blocks
        schedule = self.shards.schedule
        assert blocks and self.shards.scales is not None
        own, of_peers = self.shards.scales
        # The second tile of a pair may lie wholly below the last row. No scales arrive for such a tile. So it loads
        # scales of the own shard, which are there and are not used.
        is_own = jnp.logical_or(tile.step == 0, tile.m >= schedule.row_blocks)
        lhs_tile = tile.batch * schedule.row_blocks + tile.m + jnp.where(is_own, 0, (tile.step - 1) * own.shape[0])
        lhs = OneOf((own, of_peers), jnp.where(is_own, 0, 1))
        return BlockScales(lhs, lhs_tile, OneOf(blocks[1], tile.side), tile.n)

    def _out_at(self, tile: Tile) -> OneOf:
        # The shards have a dimension of their own, so that TMA clips a tile at the last row of its shard.
        shard = self.shards.schedule.shard(self.me, tile.step)
        return OneOf([self.shards.within(out, tile.batch, shard) for out in self.refs.outputs.outs], tile.side)

    def _epilogue_at(self, tile: Tile) -> Epilogue:
        # Scales of rows are padded to whole tiles for each batch element, scales of columns for each right operand.
        # Scales that the transport brings lie in the order of the steps, scales that XLA gathers in the order of the
        # devices.
        vectors = self.refs.inputs.vectors
        schedule = self.shards.schedule
        config = self.kernel.config
        mainloop = self.kernel.mainloop
        scales = self.shards.scales
        shard = 0 if scales else schedule.shard(self.me, tile.step)
        first_row = (shard * schedule.batch_size + tile.batch) * schedule.padded_rows(config)
        first_column = schedule.first_column(tile.side) * config.tile_n

        def row_scales(rows: pl.Slice, shape: tuple[int, ...]) -> jax.Array:
            def broadcast(vector_gmem: GmemRef) -> jax.Array:
                where = pl.ds(first_row + rows.start, rows.size)
                return mainloop.broadcast_vector(vector_gmem, where, shape, 1 if config.swap_operands else 0)

            if scales is None:
                return broadcast(vectors.row_scale)
            # The producer has waited for the flag of the peer's rows, which also stands for their scales: so the scales
            # have landed. Two CTAs of a cluster compute a pair of tiles, one below the other, and the second may lie
            # wholly below the last row. No scales arrive for such a tile, and its values are not stored. It reads those
            # of the own shard, so that it reads no memory that is not there.
            own, of_peers = scales
            return lax.cond(
                jnp.logical_or(tile.step == 0, tile.m >= schedule.row_blocks),
                lambda: broadcast(own.at[0]),
                lambda: broadcast(of_peers.at[tile.step - 1, 0]),
            )

        return epilogue.epilogue(
            vectors,
            self.program,
            mainloop,
            first_column=first_column,
            row_scales=None if vectors.row_scale is None else row_scales,
            transposed=config.swap_operands,
        )
