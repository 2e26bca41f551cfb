"""Implements the Hopper mainloop: a persistent, warp-specialized matmul with hooks.

Plain `matmul` is this loop without hooks; a fused collective is this loop with a tile order and hooks of its own.

A CTA has three warpgroups. Two *compute* warpgroups multiply. The third, the *transfer* warpgroup, gives up most of its
registers and is split into warps with roles, each with a long loop of its own:

    producer      for each output tile, for each k step: wait until the stage is free, load the operand tiles by TMA
    communicator  runs a hook with a loop of its own, e.g. one that pulls the peers' shards
    forwarder     calls a hook for each operand tile while it is in shared memory, e.g. to send it on

The roles synchronize at two mbarriers per stage: `full` (the tiles have landed) and `consumed` (no role reads the stage
any more). A compute warpgroup leaves one wgmma in flight, so it releases the stage of k step k − 1 only after it has
issued the product of k step k.

`Config.schedule` says how the compute warpgroups divide the tiles:

    cooperative   each holds a half of every tile: larger tiles, so each loaded byte is multiplied more often
    pingpong      they take turns, each with tiles of its own: while one stores a tile, the other multiplies the next

With "pingpong" no barrier orders the products of the two warpgroups; the order of the loads does. Operands are loaded
tile after tile, so the products of a tile begin when the products of the tile before it end. Each warpgroup has `full`
barriers of its own (`BufferPlan.taking_turns`).

With `Config.swap_operands` the tensor cores compute the transposed tile, from exchanged operands. wgmma computes 64
rows at a time, but any multiple of 8 columns, so a tile may then have any multiple of 8 rows. The sums are
[columns, rows] in registers, and are transposed on their way to shared memory.

CTAs may form a *cluster* (`Config.cluster`), which computes each tile together: each CTA takes a part of its k steps.

Every role visits the same sequence of pieces (`StreamK`: whole tiles, then the CTA's piece of the last, partial wave),
and counts the stages that it has used, from the first piece to the last. So the next tile's operands are loaded while
this tile's accumulator is stored (except in clusters, where sums lie in the stages). CTAs that share a tile exchange
their sums, and each finishes a share of its columns (`PartialSums`; in a cluster `ClusterSums`).

Either operand may lie in memory with k along its rows or along its columns (`OperandLayouts`); the tensor cores read
both. There may be several right operands, each with an output of its own (`OneOf`). They differ only in the copies that
load and store them.

Constraints: see `check_types` and `check_config` in `limits.py`. Source: the Mosaic GPU pipelining guide and CUTLASS's
cooperative persistent kernel.

Shape legend: m, n, k: sizes in global memory; tile_*: `Config`; `stages`: pipeline stages; wg_*: what one compute
warpgroup accumulates. `left` and `right`: the operands of wgmma, which are `rhs` and `lhs` if they are swapped.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from overlap import _compat
from overlap.kernels.config import Config
from overlap.kernels.epilogue import store_in_registers_order
from overlap.kernels.grid import GRID_AXIS, THREAD_AXIS
from overlap.kernels.hooks import Hooks, Tile
from overlap.kernels.hopper import limits
from overlap.kernels.hopper.limits import COMPUTE_WARPGROUPS, WGMMA_M, warpgroup_tile
from overlap.kernels.limits import rows_loaded
from overlap.kernels.mainloop import Loop, OperandTypes
from overlap.kernels.stream_k import Piece
from overlap.kernels.tma import clear, drawn, exchange, produce, staging
from overlap.kernels.tma.finish import Sums, finish
from overlap.kernels.tma.staging import Buffers
from overlap.kernels.tma.store import load_addends
from overlap.primitives import converge_warp, marks, wait_stores_read
from overlap.primitives.integers import ceil_div, following, remainder
from overlap.primitives.marks import Work
from overlap.primitives.types import AccumulatorRef, GmemRef, Index

if TYPE_CHECKING:
    from overlap.kernels.target import Target

# Registers per thread: (compute warpgroups, transfer warpgroup). Their sum over all warpgroups is the number of
# registers with which the kernel is launched. The transfer warps need more for an exchange, and the most if own tiles
# are sent to the peers as well (`Exchange.own_stored`).
REGISTERS = (232, 40)
REGISTERS_OF_EXCHANGE = (224, 56)
REGISTERS_OF_BOTH_WAYS = (216, 72)
PRODUCER_WARP, COMMUNICATOR_WARP, FORWARDER_WARP = range(3)
TRANSFER_WARPGROUP = COMPUTE_WARPGROUPS
NUM_THREADS = COMPUTE_WARPGROUPS + 1
# The stores of a tile have read the epilogue buffer after this number of k steps of the next tile.
K_STEPS_UNTIL_READ = 4


def _wg_tile_index(config: Config, warpgroup: Index) -> tuple[Index, Index, Index]:
    """Returns the index of a compute warpgroup's warpgroup tile in the output tile: overall, along m, and along n."""
    wg_m, wg_n = warpgroup_tile(config)
    if (wg_m, wg_n) == (config.tile_m, config.tile_n):
        return 0, 0, 0
    return (warpgroup, warpgroup, 0) if wg_m < config.tile_m else (warpgroup, 0, warpgroup)


def _accumulate(loop: Loop, buffers: Buffers, tile: Tile, piece: Piece, warpgroup: Index) -> jax.Array:
    """Computes a compute warpgroup's f32 sums of one piece: [wg_m, wg_n], or [wg_n, wg_m] with swapped operands."""
    config = loop.config
    layouts = loop.layouts
    wg_m = buffers.plan.wg_tile.rows
    wg_n = buffers.plan.wg_tile.columns
    _, wg_m_index, wg_n_index = _wg_tile_index(config, warpgroup)
    lhs_mma, rhs_mma = buffers.lhs[1], buffers.rhs[1]

    last_k = None if loop.hooks.last_k_at is None else loop.hooks.last_k_at(tile)

    def multiply(stage: Index, acc: AccumulatorRef, is_last: Index, have_landed: Callable[[], None]) -> None:
        plgpu.barrier_wait(buffers.full_at(piece, stage))
        have_landed()
        if last_k is not None and is_last is not False:
            cut = jnp.logical_and(is_last, last_k < lhs_mma.shape[1])
            pl.when(cut)(functools.partial(_clear_rest, loop, buffers, stage, last_k, warpgroup))
        lhs_wg_smem = staging.operand_slice(lhs_mma.at[stage], wg_m_index, wg_m, not layouts.transpose_lhs)
        rhs_wg_smem = staging.operand_slice(rhs_mma.at[stage], wg_n_index, wg_n, layouts.transpose_rhs)
        # The operands of wgmma: [rows, k] and [k, columns] of the tile that the tensor cores compute.
        left, right = (rhs_wg_smem, lhs_wg_smem) if config.swap_operands else (lhs_wg_smem, rhs_wg_smem)
        transpose_left, transpose_right = layouts.transpose_lhs, layouts.transpose_rhs
        if config.swap_operands:
            transpose_left, transpose_right = not layouts.transpose_rhs, not layouts.transpose_lhs
        plgpu.wgmma(
            acc,
            left.transpose((1, 0)) if transpose_left else left,
            right.transpose((1, 0)) if transpose_right else right,
        )

    def accumulate(acc: AccumulatorRef) -> tuple[jax.Array, Index]:
        marks.now(Work.AWAIT_OPERANDS, tile.step, piece.tile)
        begin = remainder(piece.before, config.stages)
        multiply(
            begin,
            acc,
            last_k is not None and piece.k_steps == 1,
            lambda: marks.now(Work.MULTIPLY, tile.step, piece.tile),
        )

        def k_step(k: jax.Array, last: jax.Array, is_last: bool = False) -> jax.Array:
            stage = following(last, config.stages)
            multiply(stage, acc, is_last, lambda: None)
            # Invariant: at most one wgmma is in flight, the one just issued; all before it have read their stages.
            plgpu.wgmma_wait(1)
            plgpu.barrier_arrive(buffers.consumed.at[last])
            return stage

        first = 1
        last = begin
        if _tells_later(loop):
            # After this many k steps, the stores of the tile before this one have landed.
            first = min(exchange.K_STEPS_UNTIL_LANDED, loop.work.k_steps)
            last = lax.fori_loop(1, first, k_step, last)
            pl.when(piece.before > 0)(lambda: exchange.tell_stored(buffers))
        elif loop.hooks.through is not None and loop.hooks.through.addends:
            first = min(K_STEPS_UNTIL_READ, loop.work.k_steps)
            last = lax.fori_loop(1, first, k_step, last)
            load_addends(loop, buffers, tile, (wg_m_index * wg_m, wg_n_index * wg_n), warpgroup)
        if last_k is None:
            last = lax.fori_loop(first, piece.k_steps, k_step, last)
        else:  # The loop of most k steps has no branch.
            last = lax.fori_loop(first, piece.k_steps - 1, k_step, last)
            until = jnp.maximum(piece.k_steps - 1, first)
            last = lax.fori_loop(until, piece.k_steps, functools.partial(k_step, is_last=True), last)
        return acc[...], last  # Reading `acc` waits for the last wgmma.

    shape = (wg_n, wg_m) if config.swap_operands else (wg_m, wg_n)
    values, last = pl.run_scoped(accumulate, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
    plgpu.barrier_arrive(buffers.consumed.at[last])
    return values


def _clear_rest(loop: Loop, buffers: Buffers, stage: Index, first: Index, warpgroup: Index) -> None:
    """Clears both operands' rows of the last k step that do not count.

    Warpgroups that share a tile clear one operand each.
    """
    lhs_smem, rhs_smem = clear.operand_boxes(buffers, stage)
    if loop.config.in_turn or buffers.plan.wg_tiles == 1:
        clear.clear_rows(lhs_smem, first)
        clear.clear_rows(rhs_smem, first)
        plgpu.commit_smem()
        return
    pl.when(warpgroup == 0)(lambda: clear.clear_rows(lhs_smem, first))
    pl.when(warpgroup == 1)(lambda: clear.clear_rows(rhs_smem, first))
    plgpu.commit_smem()
    plgpu.barrier_arrive(buffers.cleared)
    plgpu.barrier_wait(buffers.cleared)


def _tells_later(loop: Loop) -> bool:
    """Whether the forwarder is told that a tile has been stored only during the products of the next tile.

    If so, the tensor cores are not idle while the compute warpgroups wait for their stores. Warpgroups that take turns
    (`Config.schedule` "pingpong") wait at once instead, since the other warpgroup multiplies meanwhile. Parts that are
    sent to peers directly from shared memory are always announced at once.
    """
    exchanged = loop.hooks.exchange
    return exchanged is not None and exchanged.direct_sends is None and not loop.config.in_turn


def _compute(loop: Loop, buffers: Buffers, tile: Tile, piece: Piece, warpgroup: Index) -> None:
    """Does the work of a compute warpgroup on one piece: the products, then the stores."""
    wg_m, wg_n = warpgroup_tile(loop.config)
    wg_tile_index, wg_m_index, wg_n_index = _wg_tile_index(loop.config, warpgroup)
    values = _accumulate(loop, buffers, tile, piece, warpgroup)
    marks.now(Work.STORE, tile.step, piece.tile)

    def block(row: int, rows: int, columns: slice) -> jax.Array:
        across = slice(row, row + rows)
        return values[columns, across] if loop.config.swap_operands else values[across, columns]

    sums = Sums(
        warpgroup=warpgroup,
        wg_tile_index=wg_tile_index,
        corner=(wg_m_index * wg_m, wg_n_index * wg_n),
        block=block,
        hand_over=functools.partial(store_in_registers_order, values),
        load=_load_as_accumulator,
        terms=functools.partial(exchange.sum_of_terms, loop, buffers, piece, wg_tile_index),
    )
    finish(loop, buffers, tile, piece, sums)
    exchanged = loop.hooks.exchange
    if exchanged is not None and exchanged.direct_sends is None and not _tells_later(loop):
        exchange.tell_stored(buffers, piece.ordinal)


def _compute_own_turns(loop: Loop, buffers: Buffers, tile: Tile, piece: Piece, warpgroup: Index) -> None:
    """Does the work of a compute warpgroup on a tile, if it is this warpgroup's turn ("pingpong")."""
    pl.when(remainder(piece.ordinal, COMPUTE_WARPGROUPS) == warpgroup)(
        lambda: _compute(loop, buffers, tile, piece, warpgroup)
    )


def _load_as_accumulator(block_gmem: GmemRef) -> jax.Array:
    return plgpu.load(block_gmem, layout=plgpu.Layout.WGMMA, optimized=False)


def _registers(hooks: Hooks) -> tuple[int, int]:
    if hooks.exchange is None:
        return REGISTERS
    return REGISTERS_OF_EXCHANGE if hooks.exchange.own_stored is None else REGISTERS_OF_BOTH_WAYS


def _plan(config: Config, types: OperandTypes) -> staging.BufferPlan:
    wg_m, wg_n = warpgroup_tile(config)
    in_turn = config.in_turn
    # The forwarder sends whole tiles, so all of their rows must be loaded.
    loaded = (
        config.tile_m
        if types.travel.forwards
        else rows_loaded(config, types.m, types.dtype, types.layouts.transpose_lhs)
    )
    all_wg_tiles = config.tile_m * config.tile_n // (wg_m * wg_n)
    wg_tiles = all_wg_tiles if wg_m == config.tile_m else ceil_div(loaded, wg_m)
    # wgmma reads both operands in layout tiles of the same number of rows. If the rows of either operand run along m or
    # n, a layout tile has as many rows as 128 bytes have elements (64 for 16 bits); otherwise eight.
    tile_rows = staging.SMALL_TILE_ROWS if types.layouts.k_major else staging.atom(types.dtype)
    # With swapped operands, a warpgroup's values have as many rows as are loaded of the left operand. These values,
    # too, are stored in blocks of rows, since storing all at once would need more registers.
    rows = loaded if config.swap_operands else wg_m
    return staging.BufferPlan(
        wg_tile=staging.WarpgroupTile(rows, wg_n, WGMMA_M, COMPUTE_WARPGROUPS, config.swap_operands),
        wg_tiles=wg_tiles,
        rows=loaded,
        rhs_columns=config.tile_n,
        lhs_tile_rows=staging.SMALL_TILE_ROWS if config.swap_operands else tile_rows,
        rhs_tile_rows=tile_rows,
        # The forwarder reads the stages as well, so it must release them, too.
        consumed=plgpu.Barrier(num_arrivals=wg_tiles + types.travel.forwards, num_barriers=config.stages),
        mail_readers=(COMPUTE_WARPGROUPS if in_turn else wg_tiles) + 1,
        stored_barriers=COMPUTE_WARPGROUPS if in_turn else 1,
        taking_turns=COMPUTE_WARPGROUPS if in_turn else 1,
    )


class Hopper:
    """The mainloop that the module's docstring describes; implements `overlap.kernels.mainloop.Mainloop`."""

    num_threads = NUM_THREADS
    compute_warpgroups = COMPUTE_WARPGROUPS
    long_activation_columns = 32

    def check_types(self, types: OperandTypes) -> None:
        limits.check_types(types)

    def check_config(self, types: OperandTypes, config: Config, target: Target, beside_bytes: int = 0) -> None:
        limits.check_config(types, config, target, beside_bytes)

    def crowds_registers(self, types: OperandTypes, tiles: int, config: Config, target: Target) -> bool:
        return limits.crowds_registers(types, tiles, config, target)

    def patches(self, config: Config, types: OperandTypes) -> tuple[_compat.Patch, ...]:
        has_square_tiles = not types.layouts.k_major
        return (
            *([_compat.SQUARE_TILES] if has_square_tiles else []),
            *([_compat.UNEQUAL_TILES] if has_square_tiles and config.swap_operands else []),
            # A CTA reads the sums of the other CTAs of its cluster, box by box.
            *([_compat.CLUSTER_REFS] if config.ctas_per_tile > 1 else []),
        )

    def buffer_types(self, config: Config, types: OperandTypes) -> Buffers:
        return Buffers(**staging.buffer_types(config, types, _plan(config, types)))

    def box_shape(self, config: Config, types: OperandTypes) -> tuple[int, int, int]:
        return staging.box_shape(_plan(config, types), types.out_dtype)

    def broadcast_vector(
        self, vector_gmem: GmemRef, where: pl.Slice, shape: tuple[int, ...], dimension: int
    ) -> jax.Array:
        # Take the accumulator's layout without the dimension along which the vector is broadcast.
        layout = plgpu.Layout.WGMMA.reduce(1 - dimension)
        vector = plgpu.load(vector_gmem.at[where], layout=layout, optimized=False)
        return lax.broadcast_in_dim(vector, shape, (dimension,))

    def run(self, loop: Loop, buffers: Buffers) -> None:
        hooks = loop.hooks
        buffers = staging.divided(buffers)
        warpgroup = lax.axis_index(THREAD_AXIS)
        cluster_index = lax.axis_index(GRID_AXIS)
        for_each_piece = functools.partial(produce.for_each_piece, loop, buffers, cluster_index)
        compute_registers, transfer_registers = _registers(hooks)

        def load() -> None:
            if loop.counter is not None:
                drawn.deal(loop, buffers, produce.produce)
            else:
                for_each_piece(produce.produce)

        def forward() -> None:
            if hooks.before_forwarding is not None:
                hooks.before_forwarding()
            for_each_piece(produce.forward)

        def announce() -> None:
            drawn.for_each(loop, buffers, exchange.announce)

        in_turn = loop.config.in_turn
        compute_warpgroups = COMPUTE_WARPGROUPS if in_turn else buffers.plan.wg_tiles

        def compute() -> None:
            if loop.counter is None and in_turn:
                for_each_piece(_compute, warpgroup, first=warpgroup, every=COMPUTE_WARPGROUPS)
            elif loop.counter is None:
                for_each_piece(_compute, warpgroup)
            else:
                drawn.for_each(loop, buffers, _compute_own_turns if in_turn else _compute, warpgroup)
                if _tells_later(loop):
                    # In a CTA that has drawn no tile, nobody waits for this.
                    exchange.tell_stored(buffers)
            # The CTA must not end, and so free its shared memory, before its stores have read it.
            wait_stores_read()

        @pl.when(warpgroup < compute_warpgroups)
        def _compute_role() -> None:
            plgpu.set_max_registers(compute_registers, action="increase")
            marks.playing("compute", compute, warpgroup, compute_warpgroups)()

        @pl.when(warpgroup == TRANSFER_WARPGROUP)
        def _transfer_role() -> None:
            plgpu.set_max_registers(transfer_registers, action="decrease")

            @plgpu.warp_map
            def _roles(warp: jax.Array) -> None:
                pl.when(warp == PRODUCER_WARP)(marks.playing("producer", load))
                if hooks.communicate is not None:
                    pl.when(warp == COMMUNICATOR_WARP)(marks.playing("communicator", hooks.communicate))
                if hooks.in_smem is not None:
                    pl.when(warp == FORWARDER_WARP)(marks.playing("forwarder", forward))
                if hooks.exchange is not None:
                    pl.when(warp == FORWARDER_WARP)(marks.playing("forwarder", announce))
                converge_warp()


HOPPER = Hopper()
