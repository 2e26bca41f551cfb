"""Implements two roles that visit the operands of each tile: the producer loads them, the forwarder passes them on.

All roles visit the same pieces of tiles in the same order. Each role counts the stages that it has used, from the first
piece to the last, and so knows which stage comes next.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from overlap.kernels.config import Config, tile_k
from overlap.kernels.grid import RANK_AXIS, rank
from overlap.kernels.hooks import ByKStep, OneOf, SideBySide, Tile, at_k_step, with_reference
from overlap.kernels.mainloop import Loop
from overlap.kernels.stream_k import Piece
from overlap.kernels.tma import cluster_sums, exchange, staging
from overlap.kernels.tma.staging import Buffers
from overlap.primitives import marks
from overlap.primitives.integers import following, quotient, remainder
from overlap.primitives.marks import Work
from overlap.primitives.types import GmemRef, Index


def for_each_piece(
    loop: Loop,
    buffers: Buffers,
    cluster_index: Index,
    role: Callable[..., None],
    *more: Index,
    first: Index = 0,
    every: int = 1,
) -> None:
    """Calls `role(loop, buffers, tile, piece, *more)` for the pieces of a CTA, or of a cluster of CTAs.

    It is called for the piece with the ordinal `first` and every `every`-th piece after it; by default for all pieces.
    """
    pieces = loop.work.pieces(cluster_index)

    @pl.loop(0, pieces if every == 1 else quotient(pieces - first + every - 1, every))
    def _piece(turn: jax.Array) -> None:
        ordinal = turn if every == 1 else first + turn * every
        piece = loop.work.piece(cluster_index, ordinal, rank(loop.config))
        role(loop, buffers, loop.tile_at(piece.tile), piece, *more)


def _operand_loads(loop: Loop, buffers: Buffers, tile: Tile) -> tuple[staging.OperandLoad, staging.OperandLoad]:
    """Describes how both operands' tiles are loaded, but not into which stage.

    `box_smem` has all stages, and `barrier` is None: `produce` fills in both for each k step.
    """
    config = loop.config
    layouts = loop.layouts
    lhs_box = staging.loaded_boxes(buffers, layouts.transpose_lhs)
    rhs_box = buffers.rhs[0]
    lhs_start = tile.m * config.tile_m + tile.row_offset
    rhs_start = tile.n * (config.tile_n // buffers.sides)
    lhs = staging.OperandLoad(lhs_box, None, lhs_start, layouts.transpose_lhs, has_gaps=loop.hooks.lhs_has_gaps)
    rhs = staging.OperandLoad(rhs_box, None, rhs_start, not layouts.transpose_rhs)
    if not buffers.plan.pairs:
        return lhs, rhs
    me = rank(config)
    paired_by = (RANK_AXIS, me)
    own_start = rhs_start + me * (config.tile_n // buffers.sides // config.cluster)
    return dataclasses.replace(lhs, paired_by=paired_by), dataclasses.replace(rhs, start=own_start, paired_by=paired_by)


def produce(
    loop: Loop,
    buffers: Buffers,
    tile: Tile,
    piece: Piece,
    load_beside: Callable[[Tile, Index, Index], None] | None = None,
) -> None:
    """Does the producer's work on one piece: loads the operand tiles of each k step, then the terms, if any.

    `load_beside(tile, k_step, stage)` starts the copies that a k step needs in addition (`BufferPlan.copies_beside`).
    """
    hooks = loop.hooks
    config = loop.config
    if (sums := buffers.cluster_sums) is not None:
        pl.when(piece.ordinal > 0)(lambda: cluster_sums.await_readers(sums))
    if hooks.before_load is not None:
        marks.now(Work.AWAIT_ROWS, tile.step, piece.tile)
        hooks.before_load(tile)
    marks.now(Work.LOAD, tile.step, piece.tile)
    tile = dataclasses.replace(tile, k_first=tile.k_first + piece.k_first)
    lhs_load, rhs_load = _operand_loads(loop, buffers, tile)

    def load_operand(
        operand: GmemRef | OneOf | SideBySide | ByKStep, operand_load: staging.OperandLoad, k: Index, stage: Index
    ) -> None:
        choice, k_start = at_k_step(operand, tile.k_first + k, tile_k(operand_load.box_smem.dtype))
        into = dataclasses.replace(
            operand_load, box_smem=operand_load.box_smem.at[stage], barrier=buffers.full_at(piece, stage)
        )
        with_reference(choice, lambda ref: staging.load_k_step(ref, k_start, into))

    def load(lhs_gmem: GmemRef | ByKStep, rhs_gmem: GmemRef | SideBySide | ByKStep) -> None:
        load_lhs = functools.partial(load_operand, lhs_gmem, lhs_load)

        def load_rhs(k: Index, stage: Index) -> None:
            load_operand(rhs_gmem, rhs_load, k, stage)
            if load_beside is not None:
                load_beside(tile, tile.k_first + k, stage)

        early: Index = 0
        if hooks.before_lhs is not None:
            # At the start all stages are free. So start to load the right operand into them before waiting for the left
            # operand.
            early = jnp.where(piece.before == 0, jnp.minimum(piece.k_steps, config.stages), 0)
            pl.loop(0, early)(lambda k: load_rhs(k, k))
            marks.now(Work.AWAIT_ROWS, tile.step, piece.tile)
            hooks.before_lhs(tile)
            marks.now(Work.LOAD, tile.step, piece.tile)
            pl.loop(0, early)(lambda k: load_lhs(k, k))

        def k_step(k: jax.Array, stage: jax.Array) -> jax.Array:
            @pl.when(piece.before + k >= config.stages)
            def _wait_until_free() -> None:
                plgpu.barrier_wait(buffers.consumed.at[stage])

            # Load the left operand first: its `ByKStep` may wait for the data of both.
            load_lhs(k, stage)
            load_rhs(k, stage)
            return following(stage, config.stages)

        lax.fori_loop(early, piece.k_steps, k_step, remainder(piece.before + early, config.stages))

    hooks.load_lhs(tile, lambda lhs: with_reference(hooks.rhs_at(tile), functools.partial(load, lhs)))
    if hooks.exchange is not None and buffers.plan.terms_in_stages:
        exchange.load_terms(loop, buffers, tile, piece)


def wait_until_consumed(filled: Index, buffers: Buffers, config: Config) -> None:
    """Waits until both CTAs of a pair have consumed the stages that were filled last.

    A CTA must not end as long as the other CTA may load into its shared memory or arrive at its barriers.

    Args:
      filled: how many stages have been filled in all.
      buffers: shared memory.
      config: sizes.
    """

    @pl.loop(filled, filled + config.stages)
    def _stage(fill: jax.Array) -> None:
        @pl.when(fill >= config.stages)
        def _wait() -> None:
            plgpu.barrier_wait(buffers.consumed.at[remainder(fill, config.stages)])


def forward(loop: Loop, buffers: Buffers, tile: Tile, piece: Piece) -> None:
    """Does the forwarder's work on one piece: calls `Hooks.in_smem` for the operand tiles of each k step."""
    hooks = loop.hooks
    stages = loop.config.stages
    assert hooks.in_smem is not None
    marks.now(Work.FORWARD, tile.step, piece.tile)
    lhs_box, rhs_box = buffers.lhs[0], buffers.rhs[0]

    def k_step(k: jax.Array, stage: jax.Array) -> jax.Array:
        plgpu.barrier_wait(buffers.full_at(piece, stage))
        hooks.in_smem(tile, tile.k_first + piece.k_first + k, lhs_box.at[stage], rhs_box.at[stage])  # pyright: ignore[reportOptionalCall]
        plgpu.barrier_arrive(buffers.consumed.at[stage])
        return following(stage, stages)

    lax.fori_loop(0, piece.k_steps, k_step, remainder(piece.before, stages))
    if hooks.piece_done is not None:
        hooks.piece_done(tile, piece.pieces_per_tile)
