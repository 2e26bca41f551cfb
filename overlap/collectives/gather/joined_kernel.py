"""The kernel of `all_gather_lhs_matmul` for few rows per shard: the rows of all shards as one product.

If each shard had its own tiles, 16 rows of each of 4 shards would give 4 tiles of 64 rows, and each of these tiles
would load all weights into shared memory. Here the shards are copied into one matrix, which has the tiles of a plain
matmul:

    producer       first of all: loads the right operand's tiles of as many k steps as there are stages
                   for each output tile: waits for the flag of the tile's rows, whichever shards they belong to; loads
    communicator   as in `communicator.py`: copies the chunks of the own shard first, while the peers begin
    compute        runs the mainloop; the few tiles are narrow or cut along k (`Config.stream_k`)

Such a product takes as long as loading its weights takes. The weights need not wait for the gather: while the rows
travel, 132 CTAs load up to 25 MB of weights.

This kernel is not used with the transport "ring", which passes on tiles that have rows of one shard only. Nor is it
used where `Config.joined` is not set. That is so for many rows, where a tile should not wait for shards that arrive
late.

Batch elements are folded into the rows of a shard, and XLA transposes the result.

Shape legend: D: number of devices; m_shard: rows of one shard, all batch elements included; k: contraction size;
n: columns of a result.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from overlap.collectives import communicator
from overlap.collectives.communicator import Chunks, Communicator
from overlap.collectives.gather.joined_schedule import JoinedSchedule
from overlap.collectives.gather.refs import Inputs, Outputs
from overlap.frame.operands import Operands, Results, folded
from overlap.frame.operation import LaunchPlan
from overlap.kernels import epilogue
from overlap.kernels.config import tile_k
from overlap.kernels.grid import own_row
from overlap.kernels.hooks import Epilogue, Hooks, OneOf, SideBySide, Tile
from overlap.kernels.product_kernel import ProductKernel, Refs
from overlap.kernels.stream_k import StreamK
from overlap.primitives import PeerGroup, semaphore_signal
from overlap.primitives.integers import ceil_div, smaller
from overlap.primitives.types import GmemRef, Index, SemaphoreRef

NAME = "all_gather_lhs_matmul_joined"


def launch(operands: Operands, plan: LaunchPlan, group: PeerGroup, *, returns_gathered: bool) -> Results:
    """Runs the kernel on checked operands.

    Args:
      operands: the operands; `lhs` is one shard, [(batch,) rows, k].
      plan: the configuration and the layouts.
      group: the devices.
      returns_gathered: whether the gathered left operand is a result.

    Returns:
      [(batch,) D · rows, n] for each right operand; the gathered left operand, or None.
    """
    config = plan.config
    *batch, rows_shard, k = operands.lhs.shape
    of_rows = folded(operands)
    lhs = of_rows.lhs
    rhs_list = of_rows.rhs_list
    scaled = of_rows.row_scale is not None
    widths = plan.form.widths
    types = plan.types(of_rows, group.size * lhs.shape[0], "pull")
    tiled = widths if types.sides == 1 else (types.sides * widths[0],)
    schedule = JoinedSchedule.of(group.size, lhs.shape, tiled, lhs.dtype.itemsize, config, scaled=scaled)
    work = StreamK.on(plan.target, config, schedule.product.tiles, ceil_div(k, tile_k(lhs.dtype)))
    out_types = Outputs(
        [jax.ShapeDtypeStruct((schedule.rows, n), plan.out_dtype) for n in plan.result_widths],
        jax.ShapeDtypeStruct((schedule.rows, k), lhs.dtype),
        [jax.ShapeDtypeStruct((schedule.read_rows,), jnp.float32)] * scaled,
    )
    kernel = ProductKernel(
        f"overlap_{NAME}",
        plan.target,
        config,
        types,
        work,
        communicator.flag_shapes(schedule.flags_shape, copies_own=True),
        communicator.smem_types(config, schedule.chunking, lhs.dtype),
        peers_read=(0, 1 + len(widths)) if scaled else (0,),
    )
    inputs = Inputs(lhs, rhs_list, plan.vectors(of_rows, of_rows.row_scale))
    results = kernel.launch(inputs, out_types, functools.partial(_Body, kernel, plan.program, schedule, group))

    def by_batch(x: jax.Array) -> jax.Array:
        """Rearranges [D, batch, rows, columns], the order of rows in the shards, to [batch, D · rows, columns]."""
        if math.prod(batch) == 1:
            return x.reshape(*batch, schedule.rows, -1)
        by_shard = x.reshape(group.size, *batch, rows_shard, -1)
        return jnp.moveaxis(by_shard, 0, len(batch)).reshape(*batch, group.size * rows_shard, -1)

    return tuple(map(by_batch, results.outs)), by_batch(results.scratch) if returns_gathered else None


@dataclasses.dataclass(frozen=True)
class _Body:
    """The kernel's body: its tiles, and where their operands lie.

    Attributes:
      kernel: the static part of the kernel: configuration, mainloop, work.
      program: the activation; None: there is none.
      schedule: the tiles, chunks and flags.
      group: the devices.
      refs: the kernel's references.
    """

    kernel: ProductKernel
    program: epilogue.Program | None
    schedule: JoinedSchedule
    group: PeerGroup
    refs: Refs[Inputs, Outputs]

    def tile_at(self, index: Index) -> Tile:
        schedule = self.schedule
        step, row, column = schedule.product.tile(index)
        side, column = schedule.product.side_of(column)
        return Tile(step, own_row(self.kernel.config, row), column, side=side)

    def hooks(self) -> Hooks:
        rhs_gmem = self.refs.inputs.rhs_list
        vectors = self.refs.inputs.vectors
        sides = self.kernel.types.sides
        outs_gmem, scratch_gmem = self.refs.outputs.outs, self.refs.outputs.scratch
        return Hooks(
            load_lhs=lambda tile, load: load(scratch_gmem),
            rhs_at=lambda tile: OneOf(rhs_gmem, tile.side) if sides == 1 else SideBySide(rhs_gmem),
            out_at=lambda tile: OneOf(outs_gmem, tile.side),
            before_lhs=self._wait_for_rows,
            communicate=self._communicate,
            epilogue_at=self._epilogue_at if self.program is not None or jax.tree.leaves(vectors) else None,
        )

    def _wait_for_rows(self, tile: Tile) -> None:
        # The second tile of a pair may lie wholly below the last row. It waits for the last rows, since its epilogue
        # reads their scales.
        flag = smaller(tile.m, self.schedule.flags_shape[0] - 1)
        communicator.wait_for_block(self.refs.flags[0].at[flag], self.schedule.flag_target(flag))

    def _communicate(self) -> None:
        refs = self.refs
        schedule = self.schedule
        group = self.group
        lhs_gmem = refs.inputs.lhs
        vectors = refs.inputs.vectors
        scratch_gmem, scales_gmem = refs.outputs.scratch, refs.outputs.scales
        flags, *rest = refs.flags
        me = group.me()

        def destination(step: Index, rows: pl.Slice, columns: pl.Slice) -> GmemRef:
            return scratch_gmem.at[pl.ds(schedule.row(me, step, rows.start), rows.size), columns]

        def landed(step: Index, row: Index, column: Index) -> None:
            semaphore_signal(flags.at[schedule.flag(schedule.row(me, step, row))])

        def of_peer(step: Index, *place: pl.Slice) -> GmemRef:
            return group.remote_ref(lhs_gmem, group.peer(step)).at[place]

        peers = Chunks(schedule.pulled_chunks, schedule.chunking, schedule.chunk, of_peer, destination, landed)
        own = Chunks(
            schedule.chunks - schedule.pulled_chunks,
            schedule.chunking,
            lambda index: schedule.chunk(index + schedule.pulled_chunks),
            lambda step, *place: lhs_gmem.at[place],
            destination,
            landed,
        )
        pull_scales = None
        if scales_gmem:
            (of_all,) = scales_gmem
            pull_scales = lambda index: _pull_scales(index, vectors.row_scale, of_all, flags, group, schedule)  # noqa: E731
        Communicator(
            NAME,
            group,
            self.kernel.config,
            tuple(rest),
            refs.smem,
            peers,
            own,
            own_first=True,
            scale_transfers=schedule.scale_transfers,
            pull_scales=pull_scales,
        ).run()

    def _epilogue_at(self, tile: Tile) -> Epilogue:
        vectors = self.refs.inputs.vectors
        scales_gmem = self.refs.outputs.scales
        schedule = self.schedule
        mainloop = self.kernel.mainloop
        swapped = self.kernel.config.swap_operands

        def row_scales(rows: pl.Slice, shape: tuple[int, ...]) -> jax.Array:
            # The scales have landed if the rows have. Results below the last row are not stored, so any scales will do
            # there: read those of the last rows.
            start = smaller(rows.start, schedule.read_rows - rows.size)
            return mainloop.broadcast_vector(scales_gmem[0], pl.ds(start, rows.size), shape, 1 if swapped else 0)

        first_column = schedule.product.first_column(tile.side) * self.kernel.config.tile_n
        return epilogue.epilogue(
            vectors,
            self.program,
            mainloop,
            first_column=first_column,
            row_scales=row_scales if scales_gmem else None,
            transposed=swapped,
        )


def _pull_scales(
    index: Index,
    own_gmem: GmemRef,
    scratch_gmem: GmemRef,
    flags: SemaphoreRef,
    group: PeerGroup,
    schedule: JoinedSchedule,
) -> None:
    """Carries out transfer `index` of scales: copies the scales of some rows of a shard to scratch.

    Plain loads and stores do this, since the copy engine needs aligned addresses.
    """
    step, row = schedule.scale_transfer(index)
    of_peer = group.remote_ref(own_gmem, group.peer(step))
    first = schedule.row(group.me(), step, row)
    values = [of_peer[row + i] for i in range(schedule.scale_rows)]
    if schedule.read_rows > schedule.rows:
        # While the loads are under way, set the scales past the last row to zero. The epilogue of the last tile reads
        # them too, for rows that are not stored.
        @pl.when(first + schedule.scale_rows == schedule.rows)
        def _fill() -> None:
            @pl.loop(schedule.rows, schedule.read_rows)
            def _row(row: Index) -> None:
                scratch_gmem[row] = jnp.float32(0)

    for i, value in enumerate(values):
        scratch_gmem[first + i] = value
    semaphore_signal(flags.at[schedule.flag(first)])
