"""The Blackwell mainloop: one persistent, warp-specialized matmul with hooks, its sums in tensor memory.

The interface and most of the roles are those of the Hopper mainloop. What differs is who multiplies: one thread issues
products of 128 rows (tcgen05), the tensor cores run them one after the other and sum them up in *tensor memory*, and
nobody holds an accumulator in registers. So a CTA has two warpgroups:

    epilogue   waits until a tile is summed up, and takes it from tensor memory to where it is stored
    transfer   four warps with roles: producer, communicator and forwarder as on Hopper, and
    multiplier for each output tile, for each k: wait until the operand tiles have landed, issue their product

There are two accumulators, so that a tile is multiplied while the one before it is stored. Barriers:

    full         per stage: its tiles have landed                     (producer's copies → multiplier, forwarder)
    consumed     per stage: nobody reads it any more                  (the tensor cores, forwarder → producer)
    accumulated  per accumulator: the sums of a tile are complete     (the tensor cores → epilogue)
    drained      per accumulator: the epilogue has read all of it     (epilogue → multiplier)

Two CTAs may form a *pair* (`Config.cluster`): their tiles lie one below the other, and are one product of 256 rows.
Each loads its own rows of the left operand and half of the columns of the right one. The first CTA's barrier counts
the loads of both, and its multiplier issues the products for both; the tensor cores then tell both CTAs. An accumulator
is drained when both epilogues have read their part of it.

Scales of blocks are loaded beside the operand tiles, and reach the products through tensor memory: `scales.py`.

What peers have computed of a tile (`Hooks.exchange`) comes through buffers of its own, which the epilogue fills and
empties: so the next tile's operands need not wait behind it.

Constraints: see `check_types` and `check_config` in `limits.py`. Source: the Blackwell matmul guide in the JAX
documentation; the PTX ISA on tcgen05. Nothing of this has run on a Blackwell GPU: it is emulated and assembled.

Shape legend: m, n, k: global-memory sizes; tile_*: `Config`; `stages` operand tiles in shared memory.
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

from overlap import _compat
from overlap.kernels.blackwell import limits, scales
from overlap.kernels.blackwell.limits import ACCUMULATORS, TERM_BUFFERS, TILE_M, rhs_columns
from overlap.kernels.config import Config
from overlap.kernels.grid import GRID_AXIS, RANK_AXIS, THREAD_AXIS, rank
from overlap.kernels.hooks import Tile
from overlap.kernels.mainloop import Loop, OperandTypes
from overlap.kernels.stream_k import Piece
from overlap.kernels.tma import drawn, exchange, produce, staging
from overlap.kernels.tma.finish import Sums, finish
from overlap.kernels.tma.limits import rows_loaded
from overlap.primitives import converge_warp, marks, wait_stores_read
from overlap.primitives.integers import remainder
from overlap.primitives.marks import Work

if TYPE_CHECKING:
    from overlap.kernels.limits import Sizes
    from overlap.kernels.target import Target

EPILOGUE_WARPGROUP, TRANSFER_WARPGROUP = range(2)
NUM_THREADS = 2
PRODUCER_WARP, COMMUNICATOR_WARP, FORWARDER_WARP, MULTIPLIER_WARP = range(4)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Buffers(staging.Buffers):
    """The mainloop's shared memory, its accumulators in tensor memory, and its barriers.

    Of the parts that peers have computed of a tile, one box after the other is loaded into `term_boxes`.
    """

    accumulators: Any = None
    accumulated: Any = None
    drained: Any = None
    term_boxes: Any = ()
    term_loaded: Any = None
    term_added: Any = None
    scales: scales.ScaleBuffers | None = None

    @property
    def terms(self) -> tuple[Any, ...]:
        return tuple(self.term_boxes)

    def accumulator(self, piece: Piece, columns: Any) -> Any:
        """Columns of the accumulator of a piece."""
        first = _turn(piece.ordinal) * self.wg_tile.columns
        return self.accumulators.at[:, pl.ds(first + columns.start, columns.size)]


def _turn(ordinal: Any) -> Any:
    """Which accumulator a piece has: the two take turns."""
    return remainder(ordinal, ACCUMULATORS)


def _await_drained(buffers: Buffers, ordinal: Any) -> None:
    """Waits until the epilogue has read what a piece's accumulator had before; the first two have theirs at once."""
    pl.when(ordinal >= ACCUMULATORS)(lambda: plgpu.barrier_wait(buffers.drained.at[_turn(ordinal)]))


def _tell_drained(buffers: Buffers, ordinal: Any) -> None:
    """Says that all of a piece's accumulator has been read, so that the next product may overwrite it."""
    plgpu.wait_load_tmem()
    plgpu.barrier_arrive(buffers.drained.at[_turn(ordinal)])


def _multiply(loop: Loop, buffers: Buffers, tile: Tile, piece: Piece) -> None:
    """The multiplier's part of one piece."""
    config = loop.config
    pair = RANK_AXIS if config.cluster > 1 else None

    def issue() -> None:
        marks.now(Work.AWAIT_OPERANDS, tile.step, piece.tile)
        _await_drained(buffers, piece.ordinal)
        marks.now(Work.MULTIPLY, tile.step, piece.tile)

        @pl.loop(0, piece.k_steps)
        def _step(k: Any) -> None:
            _issue_step(loop, buffers, piece, k, pair)

        plgpu.tcgen05_commit_arrive(buffers.accumulated.at[_turn(piece.ordinal)], collective_axis=pair)

    _by_the_first(config, issue)


def _by_the_first(config: Config, issue: Callable[[], None]) -> None:
    """Has the first CTA of a pair do something for both."""
    if config.cluster == 1:
        issue()
    else:
        pl.when(rank(config) == 0)(issue)


def _issue_step(loop: Loop, buffers: Buffers, piece: Piece, k: Any, pair: Any) -> None:
    """Has the tensor cores multiply the operand tiles of a k step once they are here, and give their stage back."""
    config, layouts = loop.config, loop.layouts
    slot = remainder(piece.before + k, config.stages)
    plgpu.barrier_wait(buffers.full_at(piece, slot))
    lhs_mma, rhs_mma = buffers.lhs[1].at[slot], buffers.rhs[1].at[slot]
    plgpu.tcgen05_mma(
        buffers.accumulator(piece, pl.ds(0, config.tile_n)),
        lhs_mma.transpose((1, 0)) if layouts.transpose_lhs else lhs_mma,
        rhs_mma.transpose((1, 0)) if layouts.transpose_rhs else rhs_mma,
        buffers.consumed.at[slot],
        accumulate=k > 0,
        collective_axis=pair,
        **scales.to_tensor_memory(buffers.scales, slot, pair),
    )


def _wait_until_drained(pieces: Any, buffers: Buffers) -> None:
    """Waits until both CTAs of a pair have read what was summed up last.

    A CTA must be there as long as the other one may arrive at its barriers, which are those of the first one.
    """

    @pl.loop(pieces, pieces + ACCUMULATORS)
    def _ordinal(ordinal: Any) -> None:
        _await_drained(buffers, ordinal)


def _load_as_values(block_gmem: Any) -> jax.Array:
    return plgpu.load(block_gmem, layout=plgpu.Layout.TCGEN05, optimized=False)


class _Terms:
    """What peers have computed of one tile, box after box and within these peer after peer."""

    def __init__(self, loop: Loop, buffers: Buffers, tile: Tile, piece: Piece) -> None:
        assert loop.hooks.exchange is not None
        self.loop, self.buffers, self.exchange = loop, buffers, loop.hooks.exchange
        self.tile, self.piece = tile, piece
        self.steps = exchange.box_count(buffers) * self.exchange.terms

    def begin(self) -> None:
        """Waits until all of it is here, and starts the first loads."""
        marks.now(Work.AWAIT_ROWS, self.tile.step, self.piece.tile)
        self.exchange.await_terms(self.tile)
        marks.now(Work.STORE, self.tile.step, self.piece.tile)
        for step in range(min(TERM_BUFFERS, self.steps)):
            self._load(step)

    def _load(self, step: Any) -> None:
        slot = remainder(step, TERM_BUFFERS)
        exchange.load_term(self.loop, self.buffers, self.tile, step, slot, self.buffers.term_loaded.at[slot])

    def _await_all_threads(self, slot: Any) -> None:
        """Waits until all threads have read a box, so that the next one may take its place."""
        plgpu.barrier_arrive(self.buffers.term_added.at[slot])
        plgpu.barrier_wait(self.buffers.term_added.at[slot])

    def __call__(self, index: int) -> list[jax.Array]:
        """What is added to box `index`."""

        def term(number: Any) -> list[jax.Array]:
            step = index * self.exchange.terms + number
            slot = remainder(step, TERM_BUFFERS)
            plgpu.barrier_wait(self.buffers.term_loaded.at[slot])
            values = exchange.term_values(self.buffers, slot, 0)
            self._await_all_threads(slot)
            pl.when(step + TERM_BUFFERS < self.steps)(lambda: self._load(step + TERM_BUFFERS))
            return values

        return exchange.summed(self.exchange.terms, term)


def _await_what_came_with_the_rows(loop: Loop, tile: Tile) -> None:
    """Waits for what the producer has waited for: the scales of gathered rows are there as well. It takes one look.

    What the producer has seen reaches the epilogue only through the tensor cores, if they pass on what was known to
    those who had them multiply; and of a pair's second CTA not even so, since its copies count at the first one's
    barrier and its producer arrives nowhere.
    """
    for wait in (loop.hooks.before_load, loop.hooks.before_lhs):
        if wait is not None:
            wait(tile)


def _store(loop: Loop, buffers: Buffers, tile: Tile, piece: Piece) -> None:
    """The epilogue's part of one piece."""
    width, others = loop.config.epilogue_tile_n, loop.hooks.exchange
    terms = None if others is None else _Terms(loop, buffers, tile, piece)

    def block(row: int, rows: int, columns: slice) -> jax.Array:
        assert (row, rows) == (0, TILE_M)
        columns_tmem = buffers.accumulator(piece, pl.ds(columns.start, columns.stop - columns.start))
        return plgpu.async_load_tmem(columns_tmem, layout=plgpu.Layout.TCGEN05)

    def hand_over(sums_gmem: Any) -> None:
        for first in range(0, loop.config.tile_n, width):
            sums_gmem[:, pl.ds(first, width)] = block(0, TILE_M, slice(first, first + width))

    if others is not None and terms is not None and others.sends is None:
        pl.when(others.has_terms(tile))(terms.begin)
    marks.now(Work.AWAIT_OPERANDS, tile.step, piece.tile)
    plgpu.barrier_wait(buffers.accumulated.at[_turn(piece.ordinal)])
    marks.now(Work.STORE, tile.step, piece.tile)
    if loop.hooks.epilogue_at is not None:
        _await_what_came_with_the_rows(loop, tile)
    sums = Sums(
        warpgroup=0,
        part=0,
        corner=(0, 0),
        block=block,
        hand_over=hand_over,
        load=_load_as_values,
        terms=terms,
        before_terms=None if terms is None else terms.begin,
    )
    finish(loop, buffers, tile, piece, sums)
    _tell_drained(buffers, piece.ordinal)
    if others is not None and others.sends is None:
        exchange.tell_stored(buffers, piece.ordinal)


def _plan(config: Config, types: OperandTypes) -> staging.BufferPlan:
    layouts, width = types.layouts, staging.atom(types.dtype)
    arrivals = 1 + types.forwards
    return staging.BufferPlan(
        wg_tile=staging.WarpgroupTile(TILE_M, config.tile_n, TILE_M, 1),
        parts=1,
        # What is passed on is passed on as whole tiles.
        rows=config.tile_m if types.forwards else rows_loaded(config, types.m, layouts.transpose_lhs),
        rhs_columns=rhs_columns(config),
        lhs_tile_rows=width if layouts.transpose_lhs else staging.SMALL_TILE_ROWS,
        rhs_tile_rows=staging.SMALL_TILE_ROWS if layouts.transpose_rhs else width,
        # The tensor cores give stages back, and the forwarder.
        consumed=plgpu.Barrier(num_arrivals=arrivals, num_barriers=config.stages, orders_tensor_core=True),
        # The multiplier, the epilogue and the forwarder.
        mail_readers=3,
        pairs=config.cluster > 1,
        terms_in_stages=False,
        copies_beside=scales.COPIES if types.block_scaled else 0,
        # Tiles are drawn two ahead, and the epilogue tells of one before it begins the next one.
        stored_barriers=staging.MAIL_SLOTS,
    )


def _drained(config: Config) -> Any:
    if config.cluster == 1:
        return plgpu.Barrier(num_arrivals=1, num_barriers=ACCUMULATORS, orders_tensor_core=True)
    # Both CTAs arrive at the first one's, whose multiplier waits. (The second one's would not be waited for by anybody:
    # if it waited as well, it could fall two phases behind.)
    return plgpu.ClusterBarrier(
        collective_axes=(RANK_AXIS,), num_arrivals=1, num_barriers=ACCUMULATORS, orders_tensor_core=True,
        leader_tracked=True,
    )  # fmt: skip


class Blackwell:
    """See the module's docstring; the methods are those of `overlap.kernels.mainloop.Mainloop`."""

    num_threads = NUM_THREADS
    compute_warpgroups = 1

    def check_types(self, sizes: Sizes) -> None:
        limits.check_types(sizes)

    def check_config(self, sizes: Sizes, config: Config, target: Target) -> None:
        limits.check_config(sizes, config, target)

    def mends(self, config: Config, types: OperandTypes) -> tuple[_compat.Mend, ...]:
        return () if types.layouts.k_major else (_compat.SQUARE_TILES,)

    def buffer_types(self, config: Config, types: OperandTypes) -> Buffers:
        columns, term = ACCUMULATORS * config.tile_n, (TERM_BUFFERS, 1, TILE_M, staging.atom(types.out_dtype))
        of_terms = {
            "term_boxes": plgpu.RefUnion(*staging.box_views(term, types)),
            "term_loaded": plgpu.Barrier(num_arrivals=1, num_barriers=TERM_BUFFERS),
            "term_added": plgpu.Barrier(num_arrivals=1, num_barriers=TERM_BUFFERS),
        }
        return Buffers(
            **staging.buffer_types(config, types, _plan(config, types)),
            accumulators=plgpu.TMEM((TILE_M, columns), jnp.float32, collective=config.cluster > 1),
            accumulated=plgpu.Barrier(num_arrivals=1, num_barriers=ACCUMULATORS, orders_tensor_core=True),
            drained=_drained(config),
            **(of_terms if types.exchanges else {}),
            scales=scales.buffer_types(config) if types.block_scaled else None,
        )

    def box_shape(self, config: Config, types: OperandTypes) -> tuple[int, int, int]:
        return staging.box_shape(_plan(config, types), types.out_dtype)

    def broadcast_vector(self, vector_gmem: Any, where: Any, shape: tuple[int, ...], dimension: int) -> jax.Array:
        # In the layout of what is loaded from tensor memory, less the dimension that a vector does not have.
        layout = plgpu.Layout.TCGEN05.reduce(1 - dimension)
        vector = plgpu.load(vector_gmem.at[where], layout=layout, optimized=False)
        return lax.broadcast_in_dim(vector, shape, (dimension,))

    def run(self, loop: Loop, buffers: Buffers) -> None:
        work, hooks = loop.work, loop.hooks
        warpgroup, group = lax.axis_index(THREAD_AXIS), lax.axis_index(GRID_AXIS)

        def for_each_piece(role: Any) -> None:
            if loop.counter is None:
                produce.for_each_piece(loop, buffers, group, role)
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
                produce.wait_until_consumed(work.total_steps(group), buffers, loop.config)

        def multiply() -> None:
            for_each_piece(_multiply)
            if loop.config.cluster > 1:
                _by_the_first(loop.config, lambda: _wait_until_drained(work.pieces(group), buffers))

        def forward() -> None:
            if hooks.before_forwarding is not None:
                hooks.before_forwarding()
            for_each_piece(produce.forward)

        def store() -> None:
            for_each_piece(_store)
            # Shared memory must outlive the stores that read it.
            wait_stores_read()

        pl.when(warpgroup == EPILOGUE_WARPGROUP)(marks.playing("epilogue", store))

        @pl.when(warpgroup == TRANSFER_WARPGROUP)
        def _transfer_role() -> None:
            @plgpu.warp_map
            def _roles(warp: Any) -> None:
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
