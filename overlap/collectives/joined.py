"""All-gather of the left operand and matmul for few rows per shard: the rows of all shards as one product.

With a tile for each shard, 16 rows of 4 shards would be 4 tiles of 64 rows, each of which passes all weights through
shared memory. Here the shards are copied into one matrix, whose tiles then are those of a plain matmul:

    producer       first of all: the right operand's tiles of as many k steps as there are slots
                   for each output tile: wait for the flag of its rows, whosever they are; load
    communicator   looks for the peers; while they begin, for each chunk of the own shard that it draws:
                       lhs → shared memory → scratch; when it has landed, raise the flag of its rows
                   for each piece of the rows' scales that it draws: the same, by loads and stores
                   for each chunk of a peer's shard that it draws: as for the own ones; takes leave of the peers
    compute        the mainloop of `overlap.kernels.hopper`; its few tiles are narrow or cut along k (`Config.stream_k`)

Such a product takes as long as its weights take to arrive, and that does not begin with the gather: while the rows are
on their way, 132 CTAs have up to 25 MB of weights on theirs.

Where it is not used, and why: by the transport "ring", which passes on tiles that are each of one shard; and wherever
`Config.joined` is not set, as for many rows, where no tile may wait for the last shard.

Constraints, source: those of `overlap.collectives.all_gather_matmul`. A batch is folded into the rows of the shard, and
the result is transposed by XLA.

Shape legend: D: devices; m_shard: rows of one shard, the batch in them; k, n: as ever; chunk: `PullPlan`.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from overlap.collectives import gathered_lhs
from overlap.collectives.gathered_lhs import Operands, Plan
from overlap.collectives.joined_schedule import JoinedSchedule
from overlap.kernels import hopper
from overlap.primitives import (
    HANDSHAKE_FLAGS,
    Handshake,
    Ring,
    draw,
    each_drawn,
    fence_async_proxy,
    pull_chunks,
    shared_flags,
    signal,
    wait_at_least,
)
from overlap.primitives.integers import ceil_div, smaller

NAME = "all_gather_lhs_matmul_joined"


def serves(plan: Plan) -> bool:
    """Whether a planned call runs by this kernel."""
    return plan.config is not None and plan.config.joined and plan.transport == "pull" and plan.ring.size > 1


def _copy(number: Any, numbers: tuple[int, int], counter: Any, own: bool, lhs_gmem: Any, scratch_gmem: Any, flags: Any,
          slots_smem: Any, loaded: Any, ring: Ring, schedule: JoinedSchedule) -> Any:  # fmt: skip
    """The transfers of the chunks that this CTA draws, from `number` on: the peers' ones, or the `own` ones."""
    me = ring.me()

    def destination(step: Any, rows: Any, columns: Any) -> Any:
        return scratch_gmem.at[pl.ds(schedule.row(me, step, rows.start), rows.size), columns]

    def source(step: Any, *place: Any) -> Any:
        return (lhs_gmem if own else ring.remote(lhs_gmem, ring.peer(step))).at[place]

    return pull_chunks(
        number, numbers, counter, schedule.plan,
        at=lambda index: schedule.chunk(index + own * schedule.pulls), source=source, destination=destination,
        landed=lambda step, row, column: signal(flags.at[schedule.flag(schedule.row(me, step, row))]),
        slots_smem=slots_smem, loaded=loaded,
    )  # fmt: skip


def _copy_scales(
    index: Any, own_gmem: Any, scratch_gmem: Any, flags: Any, ring: Ring, schedule: JoinedSchedule
) -> None:
    """A piece of the scales: too little for the copy engine, and too unevenly placed."""
    step, row = schedule.scales(index)
    of_peer, first = ring.remote(own_gmem, ring.peer(step)), schedule.row(ring.me(), step, row)
    values = [of_peer[row + i] for i in range(schedule.scale_rows)]
    if schedule.read_rows > schedule.rows:
        # While they are on their way: what is read with the last ones, and gets into rows that are not stored.
        @pl.when(first + schedule.scale_rows == schedule.rows)
        def _fill() -> None:
            @pl.loop(schedule.rows, schedule.read_rows)
            def _row(filler: Any) -> None:
                scratch_gmem[filler] = jnp.float32(0)

    for i, value in enumerate(values):
        scratch_gmem[first + i] = value
    signal(flags.at[schedule.flag(first)])


def _kernel(inputs: Any, outputs: Any, *, schedule: JoinedSchedule, work: hopper.StreamK, plan: Plan) -> None:
    """The kernel's body: hooks and buffers for the mainloop.

    `inputs` are `Operands` of references; `outputs`: results, where the rows of all shards lie, partial sums and where
    the scales of the rows lie (each a list of one, or empty).
    """
    (lhs_gmem, sides_gmem), (outs_gmem, scratch_gmem, sums_gmem, scales_gmem) = (inputs.lhs, inputs.sides), outputs
    config: Any = plan.config
    shared = [hopper.partial_sums_flags(work, config)] if work.cuts else []
    flags, handshake_flags, own_counter, *sums_flags = shared_flags(
        schedule.flags, HANDSHAKE_FLAGS, (1,), *shared, told=True
    )
    transfers = schedule.scale_pieces + schedule.pulls
    handshake = Handshake(handshake_flags, plan.ring, hopper.cta(config), NAME, transfers)
    partial = hopper.PartialSums(*sums_gmem, *sums_flags) if work.cuts else None

    def tile_at(index: Any) -> hopper.Tile:
        step, row, column = schedule.product.tile(index)
        side, column = schedule.product.side_of(column)
        m, n = hopper.own_tile(config, row, column)
        return hopper.Tile(step, m, n, out_row=m * config.tile_m, side=side)

    def wait_for_rows(tile: hopper.Tile) -> None:
        # The second tile of a cluster may lie wholly below the last row: it waits for those whose scales it takes.
        flag = smaller(tile.m, schedule.flags[0] - 1)
        wait_at_least(flags.at[flag], schedule.flag_target(flag))
        fence_async_proxy()

    def epilogue_at(tile: hopper.Tile) -> Any:
        first_column = schedule.product.first_column(tile.side) * config.cluster_tile[1]

        def epilogue(values: jax.Array, rows: Any, columns: Any, addend: Any) -> jax.Array:
            del addend
            for gathered_gmem in scales_gmem:  # They are here if the rows are.
                # Where there are no rows, nothing is stored, and the scales of the last ones serve.
                start = smaller(rows.start, schedule.read_rows - rows.size)
                values = values * hopper.spread(gathered_gmem, pl.ds(start, rows.size), values.shape, 0)
            if inputs.column_scales is not None:
                where = pl.ds(first_column + columns.start, columns.size)
                values = values * hopper.spread(inputs.column_scales, where, values.shape, 1)
            return values

        return epilogue

    def run(buffers: hopper.Buffers, slots_smem: Any, loaded: Any) -> None:
        def communicate() -> None:
            copy = functools.partial(
                _copy, lhs_gmem=lhs_gmem, scratch_gmem=scratch_gmem, flags=flags, slots_smem=slots_smem, loaded=loaded,
                ring=plan.ring, schedule=schedule,
            )  # fmt: skip
            number, carried, first = handshake.begin(), 0, handshake.looks
            own, counter = schedule.chunks - schedule.pulls, own_counter.at[0]
            copy(draw(counter, own), (0, own), counter, own=True)
            handshake.await_peers()
            for gathered_gmem in scales_gmem:
                first += schedule.scale_pieces
                number, carried = each_drawn(
                    handshake.counter, number, first, handshake.items,
                    lambda number, gathered_gmem=gathered_gmem: _copy_scales(
                        number - handshake.looks, inputs.row_scale, gathered_gmem, flags, plan.ring, schedule
                    ),
                )  # fmt: skip
            carried += copy(number, (first, handshake.items), handshake.counter, own=False)
            handshake.leave(carried)

        hopper.mainloop(
            work=work,
            tile_at=tile_at,
            config=config,
            buffers=buffers,
            partial=partial,
            forms=plan.forms,
            hooks=hopper.Hooks(
                load_lhs=lambda tile, load: load(scratch_gmem),
                rhs_at=lambda tile: hopper.OneOf(sides_gmem, tile.side),
                out_at=lambda tile: hopper.OneOf(outs_gmem, tile.side),
                before_lhs=wait_for_rows,
                communicate=communicate,
                epilogue_at=None if inputs.row_scale is None and inputs.column_scales is None else epilogue_at,
            ),
        )

    pl.run_scoped(
        run,
        hopper.buffer_types(config, lhs_gmem.dtype, outs_gmem[0].dtype, m=schedule.rows, forms=plan.forms,
                            rhs_dtype=sides_gmem[0].dtype),
        plgpu.SMEM((config.chunk_slots, schedule.plan.rows, schedule.plan.cols), lhs_gmem.dtype),
        plgpu.Barrier(num_arrivals=1, num_barriers=config.chunk_slots),
        collective_axes=hopper.THREAD_AXIS,
    )  # fmt: skip


def launch(operands: Operands, plan: Plan) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
    """Runs the kernel on checked operands: [(batch,) D · m_shard, n] of each right operand, and the gathered one."""
    lhs, devices, config = operands.lhs, plan.ring.size, plan.config
    assert config is not None
    *batch, rows_shard, k = lhs.shape
    m_shard = math.prod(batch) * rows_shard
    widths = [side.shape[0 if plan.forms.transpose_rhs else 1] for side in operands.sides]
    scaled = operands.row_scale is not None
    schedule = JoinedSchedule.of(devices, m_shard, widths, k, lhs.dtype.itemsize, config, scaled=scaled)
    work = hopper.StreamK(
        schedule.product.tiles, ceil_div(k, config.tile_k), plan.target.num_cores // config.cluster, config.stream_k
    )
    inputs = Operands(
        lhs.reshape(m_shard, k), operands.sides, operands.row_scale.reshape(m_shard) if scaled else None,
        gathered_lhs.filled_columns(operands.column_scales, config),
    )  # fmt: skip
    out_types = (
        [jax.ShapeDtypeStruct((schedule.rows, n), plan.out_dtype) for n in widths],
        jax.ShapeDtypeStruct((schedule.rows, k), lhs.dtype),
        [hopper.partial_sums_type(work, config)] if work.cuts else [],
        [jax.ShapeDtypeStruct((schedule.read_rows,), jnp.float32)] * scaled,
    )
    body = functools.partial(_kernel, schedule=schedule, work=work, plan=plan)
    outs, scratch, *_ = gathered_lhs.launch(
        body, inputs, out_types, plan, f"overlap_{NAME}", told=True, reads_scales=scaled
    )

    def by_batch(x: jax.Array) -> jax.Array:
        """From the shards' order of rows, [D, batch, rows], to [batch, D · rows]."""
        if math.prod(batch) == 1:
            return x.reshape(*batch, schedule.rows, -1)
        apart = x.reshape(devices, *batch, rows_shard, -1)
        return jnp.moveaxis(apart, 0, len(batch)).reshape(*batch, devices * rows_shard, -1)

    return tuple(map(by_batch, outs)), by_batch(scratch) if plan.returns_gathered else None
