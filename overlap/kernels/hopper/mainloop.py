"""The Hopper mainloop: one persistent, warp-specialized matmul with hooks.

Plain `matmul` is this loop without hooks; a fused collective is this loop with a tile order and hooks of its own.

A CTA has three warpgroups. Two *compute* warpgroups hold the two halves of the accumulator (`limits.halves`). The third
gives up its registers and is split into warps with roles, each with a long loop of its own:

    producer      for each output tile, for each k: wait until the slot is free, load the operand tiles by TMA
    communicator  a hook's own loop, e.g. pulling the peers' shards
    forwarder     a hook that sees each operand tile while it is in shared memory, e.g. to send it on

They meet at two mbarriers per slot: `full` (the tiles have landed) and `consumed` (nobody reads the slot any more). A
compute warpgroup leaves one wgmma in flight, so it gives back slot k − 1 only after it has issued slot k.

Two CTAs may form a *cluster* (`Config.cluster`): they compute adjacent tiles, and each loads one half of the operand
common to them into the shared memory of both. A slot is then free when both have consumed it. One of their tiles may
lie wholly beyond the result's edge: it is computed from zeros, and none of it is stored.

Every role walks the same sequence of pieces (`StreamK`: whole tiles, then the CTA's part of the last, partial wave) and
counts slots on its own across them, so that the next tile's operands are on their way while this one's accumulator is
stored. Those that share a tile exchange their sums and finish a share of its columns each (`PartialSums`).

Either operand may lie in memory with k along its rows or down its columns (`OperandLayouts`); the tensor cores read
both. There may be several right operands, each with an output of its own (`OneOf`): only the copies differ by which it
is.

Constraints: see `check_types` and `check_config` in `limits.py`. Source: the Mosaic GPU pipelining guide and CUTLASS's
cooperative persistent kernel.

Shape legend: m, n, k: global-memory sizes; tile_*: `Config`; `stages` slots; wg_*: one compute warpgroup's half.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from overlap.kernels.config import Config
from overlap.kernels.grid import GRID_AXIS, RANK_AXIS, THREAD_AXIS, rank
from overlap.kernels.hooks import Hooks, Tile, at_step, with_reference
from overlap.kernels.hopper import drawn, exchange, limits, staging
from overlap.kernels.hopper.limits import COMPUTE_WARPGROUPS, halves
from overlap.kernels.hopper.staging import Buffers
from overlap.kernels.hopper.store import Half, store
from overlap.kernels.mainloop import Loop, OperandTypes
from overlap.kernels.partial_sums import Part, finish_together
from overlap.kernels.stream_k import Piece
from overlap.primitives import converge_warp, wait_stores_read
from overlap.primitives.integers import remainder

if TYPE_CHECKING:
    from overlap.kernels.limits import Sizes
    from overlap.kernels.target import Target

# Per thread of the compute and of the transfer warpgroups: as many as the kernel is launched with. What the transfer
# warps of an exchange keep track of needs more, and most if own tiles leave as well (`Exchange.own_stored`).
REGISTERS, REGISTERS_OF_EXCHANGE, REGISTERS_OF_BOTH_WAYS = (232, 40), (224, 56), (216, 72)
PRODUCER_WARP, COMMUNICATOR_WARP, FORWARDER_WARP = range(3)
TRANSFER_WARPGROUP = COMPUTE_WARPGROUPS
NUM_THREADS = COMPUTE_WARPGROUPS + 1


def _produce(loop: Loop, buffers: Buffers, tile: Tile, piece: Piece) -> None:
    """The producer's part of one piece."""
    hooks, config, layouts = loop.hooks, loop.config, loop.layouts
    if hooks.before_load is not None:
        hooks.before_load(tile)
    tile = dataclasses.replace(tile, k_first=tile.k_first + piece.k_first)
    lhs_box, rhs_box = staging.loaded_boxes(buffers, layouts.transpose_lhs), buffers.rhs[0]
    shared = RANK_AXIS if config.cluster > 1 else None
    lhs_shared, rhs_shared = (shared if config.cluster_along == along else None for along in ("n", "m"))

    def load_operand(operand: Any, stage: staging.Stage, k: Any) -> None:
        slot = remainder(piece.before + k, config.stages)
        choice, k_start = at_step(operand, tile.k_first + k, config.tile_k)
        into = dataclasses.replace(stage, box_smem=stage.box_smem.at[slot], barrier=stage.barrier.at[slot])
        with_reference(choice, lambda ref: staging.load_step(ref, k_start, into))

    def load(lhs_gmem: Any, rhs_gmem: Any) -> None:
        full, lhs_start, rhs_start = buffers.full, tile.m * config.tile_m, tile.n * config.tile_n
        lhs = staging.Stage(lhs_box, full, lhs_start, layouts.transpose_lhs, lhs_shared)
        rhs = staging.Stage(rhs_box, full, rhs_start, not layouts.transpose_rhs, rhs_shared)
        load_lhs = functools.partial(load_operand, lhs_gmem, lhs)
        load_rhs = functools.partial(load_operand, rhs_gmem, rhs)
        early: Any = 0
        if hooks.before_lhs is not None:
            # At the start all slots are free, and the right operand may fill its part of them.
            early = jnp.where(piece.before == 0, jnp.minimum(piece.k_steps, config.stages), 0)
            pl.loop(0, early)(load_rhs)
            hooks.before_lhs(tile)
            pl.loop(0, early)(load_lhs)

        @pl.loop(early, piece.k_steps)
        def _step(k: Any) -> None:
            @pl.when(piece.before + k >= config.stages)
            def _wait_until_free() -> None:
                plgpu.barrier_wait(buffers.consumed.at[remainder(piece.before + k, config.stages)])

            # The left one first: its `ByStep` may wait for both.
            load_lhs(k)
            load_rhs(k)

    hooks.load_lhs(tile, lambda lhs: with_reference(hooks.rhs_at(tile), functools.partial(load, lhs)))
    if hooks.exchange is not None:
        exchange.load_terms(loop, buffers, tile, piece)


def _wait_until_consumed(filled: Any, buffers: Buffers, config: Config) -> None:
    """Waits until the slots last filled have been consumed by both CTAs of the cluster.

    A CTA's shared memory must be there as long as its peer may load into it or arrive at its barriers.
    """

    @pl.loop(filled, filled + config.stages)
    def _slot(fill: Any) -> None:
        @pl.when(fill >= config.stages)
        def _wait() -> None:
            plgpu.barrier_wait(buffers.consumed.at[remainder(fill, config.stages)])


def _forward(loop: Loop, buffers: Buffers, tile: Tile, piece: Piece) -> None:
    """The forwarder's part of one piece; it passes tiles on as they are."""
    hooks, stages = loop.hooks, loop.config.stages
    assert hooks.in_smem is not None
    lhs_box, rhs_box = buffers.lhs[0], buffers.rhs[0]

    @pl.loop(0, piece.k_steps)
    def _step(k: Any) -> None:
        slot = remainder(piece.before + k, stages)
        plgpu.barrier_wait(buffers.full.at[slot])
        hooks.in_smem(tile, tile.k_first + piece.k_first + k, lhs_box.at[slot], rhs_box.at[slot])  # pyright: ignore[reportOptionalCall]
        plgpu.barrier_arrive(buffers.consumed.at[slot])

    if hooks.piece_done is not None:
        hooks.piece_done(tile, piece.parts)


def _accumulate(loop: Loop, buffers: Buffers, piece: Piece, warpgroup: Any) -> jax.Array:
    """A compute warpgroup's products of one piece, summed in f32."""
    config, layouts, (wg_m, wg_n) = loop.config, loop.layouts, halves(loop.config)
    half_m, half_n = (warpgroup, 0) if wg_m < config.tile_m else (0, warpgroup)
    lhs_mma, rhs_mma = buffers.lhs[1], buffers.rhs[1]

    def multiply(k: Any, acc: Any) -> None:
        slot = remainder(piece.before + k, config.stages)
        plgpu.barrier_wait(buffers.full.at[slot])
        lhs_half = staging.half(lhs_mma.at[slot], half_m, wg_m, not layouts.transpose_lhs)
        rhs_half = staging.half(rhs_mma.at[slot], half_n, wg_n, layouts.transpose_rhs)
        plgpu.wgmma(
            acc,
            lhs_half.transpose((1, 0)) if layouts.transpose_lhs else lhs_half,
            rhs_half.transpose((1, 0)) if layouts.transpose_rhs else rhs_half,
        )

    def accumulate(acc: Any) -> jax.Array:
        multiply(0, acc)

        def step(k: Any) -> None:
            multiply(k, acc)
            # Invariant: one wgmma, the one just issued, may be in flight; all before it have read their slots.
            plgpu.wgmma_wait(1)
            plgpu.barrier_arrive(buffers.consumed.at[remainder(piece.before + k - 1, config.stages)])

        first: Any = 1
        if loop.hooks.exchange is not None and loop.hooks.exchange.sends is None:
            # The stores of the tile before have landed meanwhile.
            first = min(exchange.STEPS_UNTIL_LANDED, loop.work.k_steps)
            pl.loop(1, first)(step)
            pl.when(piece.before > 0)(lambda: exchange.tell_stored(buffers))
        pl.loop(first, piece.k_steps)(step)
        return acc[...]  # Waits for the last wgmma.

    values = pl.run_scoped(accumulate, plgpu.WGMMAAccumulatorRef((wg_m, wg_n), jnp.float32))
    plgpu.barrier_arrive(buffers.consumed.at[remainder(piece.before + piece.k_steps - 1, config.stages)])
    return values


def _compute(loop: Loop, buffers: Buffers, tile: Tile, piece: Piece, warpgroup: Any) -> None:
    """A compute warpgroup's part of one piece: the products, then the stores."""
    config, partial, (wg_m, wg_n) = loop.config, loop.partial, halves(loop.config)
    half_m, half_n = (warpgroup, 0) if wg_m < config.tile_m else (0, warpgroup)
    values = _accumulate(loop, buffers, piece, warpgroup)
    row, column, width = half_m * wg_m, half_n * wg_n, config.hopper.epilogue_tile_n
    half = Half(tile, (row, column), warpgroup, loop.hooks.epilogue_at)

    def store_all(half: Half) -> None:
        for index in range(wg_n // width):
            block = lambda row, rows, first=index * width: values[row : row + rows, first:]  # noqa: E731
            store(loop, buffers, half, width, index, block)

    def store_whole() -> None:
        store_all(half)

    def store_share() -> None:
        assert partial is not None
        # All slots are free, and the columns of a share lie side by side: its boxes take the slots in turn.
        wait_stores_read(0)
        box_width = buffers.out[0].shape[-1]
        corner = rank(config) * config.tile_m + row, column
        part = Part(piece.part, loop.work.parts, rank(config), warpgroup, corner, box_width)
        finish = functools.partial(store, loop, buffers, half, box_width)
        finish_together(partial, values, part, _load_as_accumulator, finish)

    if (others := loop.hooks.exchange) is not None:
        terms = functools.partial(exchange.sum_of_terms, loop, buffers, piece, warpgroup)
        part = dataclasses.replace(half, epilogue_at=others.part_epilogue_at, boxes=others.part_at(tile))
        own = dataclasses.replace(half, terms=terms)
        if (sends := others.sends) is not None:
            pl.when(piece.before == 0)(sends.before)
            store_all(part)
            # The peers wait for it, and this one for them.
            exchange.tell_stored(buffers)
            store_all(dataclasses.replace(own, only_terms=True))
            return

        def store_part() -> None:
            if others.part_has_terms is None:
                store_all(part)
                return
            with_terms = dataclasses.replace(part, terms=terms)
            lax.cond(others.part_has_terms(tile), lambda: store_all(with_terms), lambda: store_all(part))

        lax.cond(others.is_own(tile), lambda: store_all(own), store_part)
        return
    if partial is None:
        store_whole()
        return
    # Use one `lax.cond`. With two, XLA hoists the work that both branches have in common, and the kernel spills.
    lax.cond(piece.parts == 1, store_whole, store_share)


def _load_as_accumulator(block_gmem: Any) -> jax.Array:
    return plgpu.load(block_gmem, layout=plgpu.Layout.WGMMA, optimized=False)


def _for_each_piece(loop: Loop, buffers: Buffers, group: Any, role: Callable[..., None], *more: Any) -> None:
    @pl.loop(0, loop.work.pieces(group))
    def _piece(ordinal: Any) -> None:
        piece = loop.work.piece(group, ordinal)
        role(loop, buffers, loop.tile_at(piece.tile), piece, *more)


def _registers(hooks: Hooks) -> tuple[int, int]:
    if hooks.exchange is None:
        return REGISTERS
    return REGISTERS_OF_EXCHANGE if hooks.exchange.own_stored is None else REGISTERS_OF_BOTH_WAYS


class Hopper:
    """See the module's docstring; the methods are those of `overlap.kernels.mainloop.Mainloop`."""

    num_threads = NUM_THREADS
    compute_warpgroups = COMPUTE_WARPGROUPS

    def check_types(self, sizes: Sizes) -> None:
        limits.check_types(sizes)

    def check_config(self, sizes: Sizes, config: Config, target: Target) -> None:
        limits.check_config(sizes, config, target)

    def buffer_types(self, config: Config, types: OperandTypes) -> Buffers:
        return staging.buffer_types(config, types)

    def box_shape(self, config: Config, types: OperandTypes) -> tuple[int, int, int]:
        return staging.box_shape(config, types)

    def broadcast_vector(self, vector_gmem: Any, where: Any, shape: tuple[int, ...], dimension: int) -> jax.Array:
        # In the accumulator's layout, less the dimension that a vector does not have.
        layout = plgpu.Layout.WGMMA.reduce(1 - dimension)
        vector = plgpu.load(vector_gmem.at[where], layout=layout, optimized=False)
        return lax.broadcast_in_dim(vector, shape, (dimension,))

    def run(self, loop: Loop, buffers: Buffers) -> None:
        work, hooks = loop.work, loop.hooks
        warpgroup, group = lax.axis_index(THREAD_AXIS), lax.axis_index(GRID_AXIS)
        for_each_piece = functools.partial(_for_each_piece, loop, buffers, group)
        of_compute, of_transfer = _registers(hooks)

        def produce() -> None:
            if loop.counter is not None:
                drawn.deal(loop, buffers, _produce)
                return
            for_each_piece(_produce)
            if loop.config.cluster > 1:
                _wait_until_consumed(work.total_steps(group), buffers, loop.config)

        def forward() -> None:
            if hooks.before_forwarding is not None:
                hooks.before_forwarding()
            for_each_piece(_forward)

        def announce() -> None:
            drawn.for_each(loop, buffers, exchange.announce)

        @pl.when(warpgroup < buffers.warpgroups)
        def _compute_role() -> None:
            plgpu.set_max_registers(of_compute, action="increase")
            if loop.counter is None:
                for_each_piece(_compute, warpgroup)
            else:
                filled = drawn.for_each(loop, buffers, _compute, warpgroup)
                if hooks.exchange is not None and hooks.exchange.sends is None:
                    pl.when(filled > 0)(lambda: exchange.tell_stored(buffers))
            # Shared memory must outlive the stores that read it.
            wait_stores_read()

        @pl.when(warpgroup == TRANSFER_WARPGROUP)
        def _transfer_role() -> None:
            plgpu.set_max_registers(of_transfer, action="decrease")

            @plgpu.warp_map
            def _roles(warp: Any) -> None:
                pl.when(warp == PRODUCER_WARP)(produce)
                if hooks.communicate is not None:
                    pl.when(warp == COMMUNICATOR_WARP)(hooks.communicate)
                if hooks.in_smem is not None:
                    pl.when(warp == FORWARDER_WARP)(forward)
                if hooks.exchange is not None:
                    pl.when(warp == FORWARDER_WARP)(announce)
                converge_warp()


HOPPER = Hopper()
