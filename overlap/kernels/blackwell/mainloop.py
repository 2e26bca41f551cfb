"""Implements the Blackwell mainloop: a persistent, warp-specialized matmul with hooks, its sums in tensor memory.

The interface and most of the roles are the same as on Hopper, but the products are issued differently: one thread
issues products of 128 rows (tcgen05). The tensor cores run them one after the other and sum them up in *tensor memory*,
so no warpgroup holds an accumulator in registers. A CTA has two warpgroups:

    epilogue     waits until a tile is summed up, and takes it from tensor memory to where it is stored
    transfer     four warps with roles: producer, communicator and forwarder as on Hopper, and a
      multiplier for each output tile, for each k step: wait until the operand tiles have landed, issue their product

There are two accumulators, so that a tile is multiplied while the tile before it is stored. Barriers:

    full         per stage: its tiles have landed                     (producer's copies → multiplier, forwarder)
    consumed     per stage: nobody reads it any more                  (the tensor cores, forwarder → producer)
    accumulated  per accumulator: the sums of a tile are complete     (the tensor cores → epilogue)
    drained      per accumulator: the epilogue has read all of it     (epilogue → multiplier)

If rows of a tile's last k step do not count (`Hooks.last_k_at`; not in pairs), they must be set to zero before the
product. Only a warpgroup can store vectors, so the epilogue does it: the multiplier tells it when the k step has landed
(barrier `landed`), and waits until the rows are zero (`cleared`). The epilogue stores the tile before first. So if
tiles have few k steps, products wait for stores.

Two CTAs may form a *pair* (`Config.cluster`). The tile of the second CTA lies below the tile of the first, and one
product of 256 rows computes both. Each CTA loads its own rows of the left operand and half of the columns of the right
operand. The barrier of the first CTA counts the loads of both CTAs, and its multiplier issues the products for both;
the tensor cores then arrive at barriers of both CTAs. An accumulator is drained when both epilogues have read their
part of it.

Block scales are loaded together with the operand tiles, and are copied to tensor memory for the products: `scales.py`.

Terms (the parts of a tile that peers have computed, `Hooks.exchange`) are loaded into buffers of their own, which the
epilogue fills and reads. So the operands of the next tile need not wait for the terms.

Constraints: see `check_types` and `check_config` in `limits.py`. Source: the Blackwell matmul guide in the JAX
documentation; the PTX ISA on tcgen05. This mainloop has not run on a Blackwell GPU: it is emulated and assembled.

Shape legend: m, n, k: sizes in global memory; tile_*: `Config`; `stages`: pipeline stages in shared memory.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from overlap import _compat
from overlap.kernels.blackwell import limits, scales
from overlap.kernels.blackwell.limits import ACCUMULATORS, TERM_BUFFERS, TILE_M, rhs_columns
from overlap.kernels.blackwell.terms import Terms
from overlap.kernels.config import Config, tile_k
from overlap.kernels.grid import GRID_AXIS, RANK_AXIS, THREAD_AXIS, rank
from overlap.kernels.hooks import Tile
from overlap.kernels.limits import EPILOGUE_COLUMNS, rows_loaded
from overlap.kernels.mainloop import Loop, OperandTypes
from overlap.kernels.stream_k import Piece
from overlap.kernels.tma import clear, drawn, exchange, produce, staging
from overlap.kernels.tma.finish import Sums, finish
from overlap.kernels.tma.store import load_addends
from overlap.primitives import converge_warp, marks, wait_stores_read
from overlap.primitives.integers import following, remainder
from overlap.primitives.marks import Work
from overlap.primitives.types import Axis, BarrierRef, GmemRef, Index, ScratchType, SmemRef, TmemRef

if TYPE_CHECKING:
    from overlap.kernels.target import Target

EPILOGUE_WARPGROUP, TRANSFER_WARPGROUP = range(2)
NUM_THREADS = 2
PRODUCER_WARP, COMMUNICATOR_WARP, FORWARDER_WARP, MULTIPLIER_WARP = range(4)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Buffers(staging.Buffers):
    """Shared memory and barriers of the mainloop, and its accumulators in tensor memory: adds to `staging.Buffers`.

    Attributes:
      accumulators: the two accumulators, [128, 2 · tile_n].
      accumulated: barriers, one for each accumulator: its sums of a tile are complete.
      drained: barriers, one for each accumulator: the epilogue has read all of the accumulator.
      term_boxes: the views (box, mma) of the buffers for terms, each of which holds one box.
      term_loaded: barriers, one for each of these buffers: the box has landed.
      term_added: barriers, one for each of these buffers: all threads have read the box.
      scales: the block scales of each stage; None: the operands have none.
      landed: the barrier at which the multiplier arrives when the epilogue may clear rows of a tile's last k step.
    """

    accumulators: TmemRef = None
    accumulated: BarrierRef = None
    drained: BarrierRef = None
    term_boxes: tuple[SmemRef, ...] = ()
    term_loaded: BarrierRef = None
    term_added: BarrierRef = None
    scales: scales.ScaleBuffers | None = None
    landed: BarrierRef = None

    @property
    def terms(self) -> tuple[SmemRef, ...]:
        return tuple(self.term_boxes)

    def accumulator(self, piece: Piece, columns: pl.Slice) -> TmemRef:
        """Returns a slice of columns of the accumulator of a piece."""
        first = _turn(piece.ordinal) * self.plan.wg_tile.columns
        return self.accumulators.at[:, pl.ds(first + columns.start, columns.size)]


def _turn(ordinal: Index) -> Index:
    """Returns the index of a piece's accumulator: pieces use the two accumulators in turn."""
    return remainder(ordinal, ACCUMULATORS)


def _await_drained(buffers: Buffers, ordinal: Index) -> None:
    """Waits until the epilogue has drained a piece's accumulator; the first two pieces need not wait."""
    pl.when(ordinal >= ACCUMULATORS)(lambda: plgpu.barrier_wait(buffers.drained.at[_turn(ordinal)]))


def _tell_drained(buffers: Buffers, ordinal: Index) -> None:
    """Tells the multiplier that a piece's accumulator has been read, so that the next product may overwrite it."""
    plgpu.wait_load_tmem()
    plgpu.barrier_arrive(buffers.drained.at[_turn(ordinal)])


def _multiply(loop: Loop, buffers: Buffers, tile: Tile, piece: Piece) -> None:
    """Does the multiplier's work on one piece: issues the products of all of its k steps."""
    config = loop.config
    pair = RANK_AXIS if config.cluster > 1 else None
    last_k = None if loop.hooks.last_k_at is None else loop.hooks.last_k_at(tile)

    def issue() -> None:
        marks.now(Work.AWAIT_OPERANDS, tile.step, piece.tile)
        _await_drained(buffers, piece.ordinal)
        marks.now(Work.MULTIPLY, tile.step, piece.tile)

        def k_step(k: jax.Array, stage: jax.Array) -> jax.Array:
            plgpu.barrier_wait(buffers.full_at(piece, stage))
            if last_k is not None:
                # If only some rows of the last k step count, the epilogue warpgroup sets the others to zero first.
                cut = jnp.logical_and(k == piece.k_steps - 1, last_k < tile_k(buffers.lhs[0].dtype))
                pl.when(cut)(lambda: _await_cleared(buffers))
            _issue_k_step(loop, buffers, piece, k, stage, pair)
            return following(stage, config.stages)

        lax.fori_loop(0, piece.k_steps, k_step, remainder(piece.before, config.stages))
        plgpu.tcgen05_commit_arrive(buffers.accumulated.at[_turn(piece.ordinal)], collective_axis=pair)

    _by_the_first(config, issue)


def _by_the_first(config: Config, issue: Callable[[], None]) -> None:
    """Calls `issue`; in a pair of CTAs only in the first CTA, which issues for both."""
    if config.cluster == 1:
        issue()
    else:
        pl.when(rank(config) == 0)(issue)


def _issue_k_step(loop: Loop, buffers: Buffers, piece: Piece, k: Index, stage: Index, pair: Axis) -> None:
    """Issues the product of the operand tiles of a k step, which releases the stage when it has run."""
    config = loop.config
    layouts = loop.layouts
    lhs_mma, rhs_mma = buffers.lhs[1].at[stage], buffers.rhs[1].at[stage]
    plgpu.tcgen05_mma(
        buffers.accumulator(piece, pl.ds(0, config.tile_n)),
        lhs_mma.transpose((1, 0)) if layouts.transpose_lhs else lhs_mma,
        rhs_mma.transpose((1, 0)) if layouts.transpose_rhs else rhs_mma,
        buffers.consumed.at[stage],
        accumulate=k > 0,
        collective_axis=pair,
        **scales.to_tensor_memory(buffers.scales, stage, pair),
    )


def _await_cleared(buffers: Buffers) -> None:
    """Has the epilogue clear the rows of the last k step that do not count, and waits until it has."""
    plgpu.barrier_arrive(buffers.landed)
    plgpu.barrier_wait(buffers.cleared)


def _clear_rest(loop: Loop, buffers: Buffers, piece: Piece, last_k: Index) -> None:
    """Clears both operands' rows of a piece's last k step from `last_k` on, if there are any, for the multiplier."""

    @pl.when(last_k < tile_k(buffers.lhs[0].dtype))
    def _clear() -> None:
        plgpu.barrier_wait(buffers.landed)
        for boxes_smem in clear.operand_boxes(buffers, remainder(piece.before + piece.k_steps - 1, buffers.stages)):
            clear.clear_rows(boxes_smem, last_k)
        plgpu.commit_smem()
        plgpu.barrier_arrive(buffers.cleared)


def _wait_until_drained(pieces: Index, buffers: Buffers) -> None:
    """Keeps the first CTA of a pair alive until both CTAs have arrived at its barriers for the last time."""
    _await_drained(buffers, pieces - 1 + ACCUMULATORS)


def _load_as_values(block_gmem: GmemRef) -> jax.Array:
    return plgpu.load(block_gmem, layout=plgpu.Layout.TCGEN05, optimized=False)


def _await_what_came_with_the_rows(loop: Loop, tile: Tile) -> None:
    """Waits for the same flags as the producer, so that the epilogue may read the row scales that came with the rows.

    The flags have been raised when this is called, so each wait reads its flag only once. The waits are needed because
    nothing else orders the epilogue's reads behind the producer's wait. Only the tensor cores' barriers connect the two
    roles, and these may not make visible to the epilogue what the producer has observed. In the second CTA of a pair
    not even they do: its copies count at the first CTA's barrier, and its producer arrives at no barrier.
    """
    for wait in (loop.hooks.before_load, loop.hooks.before_lhs):
        if wait is not None:
            wait(tile)


def _store(loop: Loop, buffers: Buffers, tile: Tile, piece: Piece) -> None:
    """Does the epilogue's work on one piece: waits for its sums, and stores, sends or exchanges them."""
    others = loop.hooks.exchange
    terms = None if others is None else Terms(loop, buffers, tile, piece)

    def block(row: int, rows: int, columns: slice) -> jax.Array:
        assert (row, rows) == (0, TILE_M)
        columns_tmem = buffers.accumulator(piece, pl.ds(columns.start, columns.stop - columns.start))
        return plgpu.async_load_tmem(columns_tmem, layout=plgpu.Layout.TCGEN05)

    def hand_over(sums_gmem: GmemRef) -> None:
        for first in range(0, loop.config.tile_n, EPILOGUE_COLUMNS):
            sums_gmem[:, pl.ds(first, EPILOGUE_COLUMNS)] = block(0, TILE_M, slice(first, first + EPILOGUE_COLUMNS))

    if others is not None and terms is not None and others.direct_sends is None:
        pl.when(others.has_terms(tile))(terms.begin)
    if loop.hooks.last_k_at is not None:
        _clear_rest(loop, buffers, piece, loop.hooks.last_k_at(tile))
    load_addends(loop, buffers, tile, (0, 0), 0)
    marks.now(Work.AWAIT_OPERANDS, tile.step, piece.tile)
    plgpu.barrier_wait(buffers.accumulated.at[_turn(piece.ordinal)])
    marks.now(Work.STORE, tile.step, piece.tile)
    if loop.hooks.epilogue_at is not None:
        _await_what_came_with_the_rows(loop, tile)
    sums = Sums(
        warpgroup=0,
        wg_tile_index=0,
        corner=(0, 0),
        block=block,
        hand_over=hand_over,
        load=_load_as_values,
        terms=terms,
        before_terms=None if terms is None else terms.begin,
    )
    finish(loop, buffers, tile, piece, sums)
    _tell_drained(buffers, piece.ordinal)
    if others is not None and others.direct_sends is None:
        exchange.tell_stored(buffers, piece.ordinal)


def _plan(config: Config, types: OperandTypes) -> staging.BufferPlan:
    layouts = types.layouts
    width = staging.atom(types.dtype)
    arrivals = 1 + types.travel.forwards
    return staging.BufferPlan(
        wg_tile=staging.WarpgroupTile(TILE_M, config.tile_n, TILE_M, 1),
        wg_tiles=1,
        # The forwarder sends whole tiles, so all of their rows must be loaded.
        rows=config.tile_m
        if types.travel.forwards
        else rows_loaded(config, types.m, types.dtype, layouts.transpose_lhs),
        rhs_columns=rhs_columns(config),
        lhs_tile_rows=width if layouts.transpose_lhs else staging.SMALL_TILE_ROWS,
        rhs_tile_rows=staging.SMALL_TILE_ROWS if layouts.transpose_rhs else width,
        # The tensor cores and the forwarder read the stages, so both must release them.
        consumed=plgpu.Barrier(num_arrivals=arrivals, num_barriers=config.stages, orders_tensor_core=True),
        # The multiplier, the epilogue and the forwarder read the mailboxes.
        mail_readers=3,
        pairs=config.cluster > 1,
        terms_in_stages=False,
        copies_beside=scales.COPIES if types.block_scaled else 0,
        # There are mailboxes for two tiles, and the epilogue announces a stored tile before it begins the next tile.
        stored_barriers=staging.MAILBOXES,
    )


def _drained(config: Config) -> ScratchType:
    if config.cluster == 1:
        return plgpu.Barrier(num_arrivals=1, num_barriers=ACCUMULATORS, orders_tensor_core=True)
    # Both CTAs arrive at the barriers of the first CTA, whose multiplier waits there. The multiplier of the second CTA
    # issues no products. If it waited at barriers of its own nevertheless, it could fall two phases behind.
    both = {"collective_axes": (RANK_AXIS,), "leader_tracked": True}
    return plgpu.ClusterBarrier(num_arrivals=1, num_barriers=ACCUMULATORS, orders_tensor_core=True, **both)


class Blackwell:
    """The mainloop that the module's docstring describes; implements `overlap.kernels.mainloop.Mainloop`."""

    num_threads = NUM_THREADS
    compute_warpgroups = 1
    # For 32 the exact GELU (91 operations) spills 1612 bytes, for 16 a few; softplus (26 operations) 80, for 16 none.
    long_activation_columns = 16

    def check_types(self, types: OperandTypes) -> None:
        limits.check_types(types)

    def check_config(self, types: OperandTypes, config: Config, target: Target, beside_bytes: int = 0) -> None:
        limits.check_config(types, config, target, beside_bytes)

    def crowds_registers(self, types: OperandTypes, tiles: int, config: Config, target: Target) -> bool:
        return False  # Sums lie in tensor memory.

    def patches(self, config: Config, types: OperandTypes) -> tuple[_compat.Patch, ...]:
        return () if types.layouts.k_major else (_compat.SQUARE_TILES,)

    def buffer_types(self, config: Config, types: OperandTypes) -> Buffers:
        columns = ACCUMULATORS * config.tile_n
        term = (TERM_BUFFERS, 1, TILE_M, staging.atom(types.out_dtype))
        of_terms = {
            "term_boxes": plgpu.RefUnion(*staging.box_views(term, types)),
            "term_loaded": plgpu.Barrier(num_arrivals=1, num_barriers=TERM_BUFFERS),
            "term_added": plgpu.Barrier(num_arrivals=1, num_barriers=TERM_BUFFERS),
        }
        # The tensor cores read what the epilogue has cleared.
        of_rest = {
            "landed": plgpu.Barrier(num_arrivals=1),
            "cleared": plgpu.Barrier(num_arrivals=1, orders_tensor_core=True),
        }
        fields = staging.buffer_types(config, types, _plan(config, types))
        fields |= (of_terms if types.travel.exchanges else {}) | (of_rest if types.grouped == "k" else {})
        return Buffers(
            **fields,
            accumulators=plgpu.TMEM((TILE_M, columns), jnp.float32, collective=config.cluster > 1),
            accumulated=plgpu.Barrier(num_arrivals=1, num_barriers=ACCUMULATORS, orders_tensor_core=True),
            drained=_drained(config),
            scales=scales.buffer_types(config) if types.block_scaled else None,
        )

    def box_shape(self, config: Config, types: OperandTypes) -> tuple[int, int, int]:
        return staging.box_shape(_plan(config, types), types.out_dtype)

    def broadcast_vector(
        self, vector_gmem: GmemRef, where: pl.Slice, shape: tuple[int, ...], dimension: int
    ) -> jax.Array:
        # The vector's layout is that of values from tensor memory, without the dimension that is broadcast.
        layout = plgpu.Layout.TCGEN05.reduce(1 - dimension)
        vector = plgpu.load(vector_gmem.at[where], layout=layout, optimized=False)
        return lax.broadcast_in_dim(vector, shape, (dimension,))

    def run(self, loop: Loop, buffers: Buffers) -> None:
        work = loop.work
        hooks = loop.hooks
        warpgroup = lax.axis_index(THREAD_AXIS)
        cluster_index = lax.axis_index(GRID_AXIS)

        def for_each_piece(role: Callable[..., None]) -> None:
            if loop.counter is None:
                produce.for_each_piece(loop, buffers, cluster_index, role)
            else:
                drawn.for_each(loop, buffers, role)

        load_beside = None if buffers.scales is None else functools.partial(scales.load, loop, buffers)
        produce_piece = functools.partial(produce.produce, load_beside=load_beside)

        def load() -> None:
            if loop.counter is not None:
                drawn.deal(loop, buffers, produce_piece)
                return
            for_each_piece(produce_piece)
            if loop.config.cluster > 1:
                produce.wait_until_consumed(work.total_k_steps(cluster_index), buffers, loop.config)

        def multiply() -> None:
            for_each_piece(_multiply)
            if loop.config.cluster > 1:
                _by_the_first(loop.config, lambda: _wait_until_drained(work.pieces(cluster_index), buffers))

        def forward() -> None:
            if hooks.before_forwarding is not None:
                hooks.before_forwarding()
            for_each_piece(produce.forward)

        def store() -> None:
            for_each_piece(_store)
            # The CTA must not end, and so free its shared memory, before its stores have read it.
            wait_stores_read()

        pl.when(warpgroup == EPILOGUE_WARPGROUP)(marks.playing("epilogue", store))

        @pl.when(warpgroup == TRANSFER_WARPGROUP)
        def _transfer_role() -> None:
            @plgpu.warp_map
            def _roles(warp: jax.Array) -> None:
                pl.when(warp == PRODUCER_WARP)(marks.playing("producer", load))
                pl.when(warp == MULTIPLIER_WARP)(marks.playing("multiplier", multiply))
                if hooks.communicate is not None:
                    pl.when(warp == COMMUNICATOR_WARP)(marks.playing("communicator", hooks.communicate))
                if hooks.in_smem is not None:
                    pl.when(warp == FORWARDER_WARP)(marks.playing("forwarder", forward))
                if hooks.exchange is not None:
                    announce = functools.partial(for_each_piece, exchange.announce)
                    pl.when(warp == FORWARDER_WARP)(marks.playing("forwarder", announce))
                converge_warp()


BLACKWELL = Blackwell()
