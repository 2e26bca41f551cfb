"""The Hopper mainloop: one persistent, warp-specialized matmul with hooks.

Plain `matmul` is this loop without hooks; a fused collective is this loop with a tile order and hooks of its own.

A CTA has three warpgroups. Two *compute* warpgroups hold the two halves of the accumulator (`Config.halves`). The third
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

Either operand may lie in memory with k along its rows or down its columns (`Forms`); the tensor cores read both. There
may be several right operands, each with an output of its own (`OneOf`): only the copies differ by which it is.

Constraints: see `Config.check`. Source: the Mosaic GPU pipelining guide and CUTLASS's cooperative persistent kernel.

Shape legend: m, n, k: global-memory sizes; tile_*: `Config`; `stages` slots; wg_*: one compute warpgroup's half.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from overlap.kernels import staging
from overlap.kernels.config import COMPUTE_WARPGROUPS, WGMMA_M, Config
from overlap.kernels.hooks import ByStep, Hooks, OneOf, Tile, at_step, spread, with_reference
from overlap.kernels.launch import sealed
from overlap.kernels.partial_sums import PartialSums, finish_together, partial_sums_flags, partial_sums_type
from overlap.kernels.staging import GRID_AXIS, PLAIN, RANK_AXIS, Buffers, Forms, buffer_types, swizzled
from overlap.kernels.stream_k import Piece, StreamK
from overlap.primitives import addresses, wait_stores_read
from overlap.primitives.axes import kernel_axis
from overlap.primitives.integers import remainder

COMPUTE_REGISTERS = 232
TRANSFER_REGISTERS = 40
PRODUCER_WARP, COMMUNICATOR_WARP, FORWARDER_WARP = range(3)
TRANSFER_WARPGROUP = COMPUTE_WARPGROUPS
NUM_THREADS = COMPUTE_WARPGROUPS + 1
THREAD_AXIS = kernel_axis("warpgroup")

__all__ = [
    "GRID_AXIS",
    "PLAIN",
    "THREAD_AXIS",
    "Buffers",
    "ByStep",
    "Forms",
    "Hooks",
    "OneOf",
    "PartialSums",
    "StreamK",
    "Tile",
    "buffer_types",
    "cta",
    "launch",
    "mainloop",
    "own_tile",
    "partial_sums_flags",
    "partial_sums_type",
    "rank",
    "spread",
    "swizzled",
]


def rank(config: Config) -> Any:
    """This CTA's place in its cluster."""
    return 0 if config.cluster == 1 else lax.axis_index(RANK_AXIS)


def own_tile(config: Config, row: Any, column: Any) -> tuple[Any, Any]:
    """This CTA's tile of the cluster's tile (row, column)."""
    place = rank(config)
    along_m, along_n = (config.cluster, 1) if config.cluster_along == "m" else (1, config.cluster)
    return row * along_m + (place if along_m > 1 else 0), column * along_n + (place if along_n > 1 else 0)


def cta(config: Config) -> Any:
    """This CTA's index on the device."""
    return lax.axis_index(GRID_AXIS) * config.cluster + rank(config)


def _produce(tile: Tile, piece: Piece, *, buffers: Buffers, hooks: Hooks, config: Config, forms: Forms) -> None:
    """The producer's part of one piece."""
    if hooks.before_load is not None:
        hooks.before_load(tile)
    lhs_box, (rhs_box, _) = staging.loaded_boxes(buffers, forms.transpose_lhs), buffers.rhs

    shared = RANK_AXIS if config.cluster > 1 else None
    lhs_shared, rhs_shared = (shared if config.cluster_along == along else None for along in ("n", "m"))

    def load(lhs_gmem: Any, rhs_gmem: Any) -> None:
        def load_operand(k: Any, operand: Any, box: Any, start: Any, across: bool, shared_by: Any) -> None:
            slot = remainder(piece.before + k, config.stages)
            choice, k_start = at_step(operand, tile.k_first + piece.k_first + k, config.tile_k)
            full = buffers.full.at[slot]
            with_reference(
                choice,
                lambda ref: staging.load_step(ref, box.at[slot], full, start, k_start, across, shared_by=shared_by),
            )

        def load_lhs(k: Any) -> None:
            load_operand(k, lhs_gmem, lhs_box, tile.m * config.tile_m, forms.transpose_lhs, lhs_shared)

        def load_rhs(k: Any) -> None:
            load_operand(k, rhs_gmem, rhs_box, tile.n * config.tile_n, not forms.transpose_rhs, rhs_shared)

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


def _wait_until_consumed(filled: Any, buffers: Buffers, config: Config) -> None:
    """Waits until the slots last filled have been consumed by both CTAs of the cluster.

    A CTA's shared memory must be there as long as its peer may load into it or arrive at its barriers.
    """

    @pl.loop(filled, filled + config.stages)
    def _slot(fill: Any) -> None:
        @pl.when(fill >= config.stages)
        def _wait() -> None:
            plgpu.barrier_wait(buffers.consumed.at[remainder(fill, config.stages)])


def _forward(tile: Tile, piece: Piece, *, buffers: Buffers, hooks: Hooks, config: Config, forms: Forms) -> None:
    """The forwarder's part of one piece."""
    del forms  # It passes tiles on as they are.
    assert hooks.in_smem is not None
    (lhs_box, _), (rhs_box, _) = buffers.lhs, buffers.rhs

    @pl.loop(0, piece.k_steps)
    def _step(k: Any) -> None:
        slot = remainder(piece.before + k, config.stages)
        plgpu.barrier_wait(buffers.full.at[slot])
        hooks.in_smem(tile, tile.k_first + piece.k_first + k, lhs_box.at[slot], rhs_box.at[slot])  # pyright: ignore[reportOptionalCall]
        plgpu.barrier_arrive(buffers.consumed.at[slot])

    if hooks.piece_done is not None:
        hooks.piece_done(tile, piece.parts)


def _compute(
    tile: Tile,
    piece: Piece,
    *,
    warpgroup: Any,
    partial: PartialSums | None,
    parts: int,
    buffers: Buffers,
    hooks: Hooks,
    config: Config,
    forms: Forms,
) -> None:
    """A compute warpgroup's part of one piece: the products, then the stores."""
    wg_m, wg_n = config.halves
    half_m, half_n = (warpgroup, 0) if wg_m < config.tile_m else (0, warpgroup)
    (_, lhs_mma), (_, rhs_mma) = buffers.lhs, buffers.rhs

    def multiply(k: Any, acc: Any) -> None:
        slot = remainder(piece.before + k, config.stages)
        plgpu.barrier_wait(buffers.full.at[slot])
        lhs_half = staging.half(lhs_mma.at[slot], half_m, wg_m, not forms.transpose_lhs)
        rhs_half = staging.half(rhs_mma.at[slot], half_n, wg_n, forms.transpose_rhs)
        plgpu.wgmma(
            acc,
            lhs_half.transpose((1, 0)) if forms.transpose_lhs else lhs_half,
            rhs_half.transpose((1, 0)) if forms.transpose_rhs else rhs_half,
        )

    def accumulate(acc: Any) -> jax.Array:
        multiply(0, acc)

        @pl.loop(1, piece.k_steps)
        def _step(k: Any) -> None:
            multiply(k, acc)
            # Invariant: one wgmma, the one just issued, may be in flight; all before it have read their slots.
            plgpu.wgmma_wait(1)
            plgpu.barrier_arrive(buffers.consumed.at[remainder(piece.before + k - 1, config.stages)])

        return acc[...]  # Waits for the last wgmma.

    values = pl.run_scoped(accumulate, plgpu.WGMMAAccumulatorRef((wg_m, wg_n), jnp.float32))
    plgpu.barrier_arrive(buffers.consumed.at[remainder(piece.before + piece.k_steps - 1, config.stages)])
    row, column = half_m * wg_m, half_n * wg_n
    store = functools.partial(
        _store, tile=tile, corner=(row, column), warpgroup=warpgroup, buffers=buffers, hooks=hooks, config=config
    )

    def store_whole() -> None:
        for index in range(wg_n // config.epilogue_tile_n):
            first = index * config.epilogue_tile_n
            store(index, lambda row, rows, first=first: values[row : row + rows, first:], width=config.epilogue_tile_n)

    def store_share() -> None:
        assert partial is not None
        # All slots are free, and the columns of a share lie side by side: its boxes take the slots in turn.
        wait_stores_read(0)
        width = buffers.out[0].shape[-1]
        finish_together(
            partial, values, functools.partial(store, width=width), part=piece.part, parts=parts, rank=rank(config),
            warpgroup=warpgroup, corner=(rank(config) * config.tile_m + row, column), width=width,
        )  # fmt: skip

    if partial is None:
        store_whole()
        return
    # One conditional, not two: else what both compute is computed before, and kept in registers that are not there.
    lax.cond(piece.parts == 1, store_whole, store_share)


def _store(
    index: Any,
    block: Callable[[int, int], jax.Array],
    *,
    width: int,
    tile: Tile,
    corner: tuple[Any, Any],
    warpgroup: Any,
    buffers: Buffers,
    hooks: Hooks,
    config: Config,
) -> None:
    """Registers → shared memory → output: piece `index` of a warpgroup's half, which begins at `corner`.

    All its pieces are `width` columns wide, and stored one after the other. `block(row, rows)` gives f32 values of some
    rows from the piece's first column on.
    """
    (row, column), slot, wg_m = corner, remainder(index, config.epilogue_slots), config.halves[0]
    epilogue = hooks.epilogue if hooks.epilogue_at is None else hooks.epilogue_at(tile)
    first_row, first_column = tile.out_row + row, tile.n * config.tile_n + column + index * width
    box_views, register_views = (view.at[warpgroup, slot] for view in buffers.out)
    box_width = box_views.shape[-1]
    boxes = width // box_width
    # A piece is several boxes side by side, each with its place in the output.
    places = [(pl.ds(first_row, wg_m), pl.ds(first_column + i * box_width, box_width)) for i in range(boxes)]
    # The slot's last store was `epilogue_slots` stores ago, maybe in the tile before.
    wait_stores_read(config.epilogue_slots - 1)
    loaded: list[Any] = []
    if hooks.addend_at is not None:
        # It passes through the slot in which the result then takes its place.
        loaded = [buffers.addend_loaded.at[warpgroup * box_views.shape[0] + box] for box in range(boxes)]
        for box, place in enumerate(places):
            plgpu.copy_gmem_to_smem(hooks.addend_at(tile).at[place], box_views.at[box], loaded[box])
    for box, (_, columns) in enumerate(places):
        if hooks.addend_at is not None:
            plgpu.barrier_wait(loaded[box])
        for above in range(0, wg_m, WGMMA_M):
            values = block(above, WGMMA_M)[:, box * box_width : (box + 1) * box_width]
            block_smem = register_views.at[box, pl.ds(above, WGMMA_M)]
            if epilogue is not None:
                addend = None if hooks.addend_at is None else block_smem[...].astype(jnp.float32)
                values = epilogue(values, pl.ds(first_row + above, WGMMA_M), columns, addend)
            block_smem[...] = values.astype(block_smem.dtype)
    plgpu.commit_smem()

    def send(out_gmem: Any) -> None:
        for box, place in enumerate(places):
            plgpu.copy_smem_to_gmem(box_views.at[box], out_gmem.at[place], commit_group=box == boxes - 1)

    with_reference(hooks.out_at(tile), send)


def mainloop(
    *,
    work: StreamK,
    tile_at: Callable[[Any], Tile],
    config: Config,
    buffers: Buffers,
    hooks: Hooks,
    forms: Forms = PLAIN,
    partial: PartialSums | None = None,
) -> None:
    """Runs all roles of this CTA over its share of the output tiles.

    Args:
      work: which tiles that is.
      tile_at: the tile order: from a tile's index to the tile, the same in every role.
      config: sizes.
      buffers: allocated from `buffer_types`.
      hooks: where operands come from and results go, and what else is to happen.
      forms: how the operands lie in memory.
      partial: needed if `work.cuts`.
    """
    warpgroup, group = lax.axis_index(THREAD_AXIS), lax.axis_index(GRID_AXIS)
    common = dict(buffers=buffers, hooks=hooks, config=config, forms=forms)

    def for_each_piece(role: Callable[..., None], **kwargs: Any) -> None:
        @pl.loop(0, work.pieces(group))
        def _piece(ordinal: Any) -> None:
            piece = work.piece(group, ordinal)
            role(tile_at(piece.tile), piece, **common, **kwargs)

    def produce() -> None:
        for_each_piece(_produce)
        if config.cluster > 1:
            _wait_until_consumed(work.total_steps(group), buffers, config)

    def forward() -> None:
        if hooks.before_forwarding is not None:
            hooks.before_forwarding()
        for_each_piece(_forward)

    @pl.when(warpgroup < buffers.warpgroups)
    def _compute_role() -> None:
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        for_each_piece(_compute, warpgroup=warpgroup, partial=partial, parts=work.parts)
        # Shared memory must outlive the stores that read it.
        wait_stores_read()

    @pl.when(warpgroup == TRANSFER_WARPGROUP)
    def _transfer_role() -> None:
        plgpu.set_max_registers(TRANSFER_REGISTERS, action="decrease")

        @plgpu.warp_map
        def _roles(warp: Any) -> None:
            pl.when(warp == PRODUCER_WARP)(produce)
            if hooks.communicate is not None:
                pl.when(warp == COMMUNICATOR_WARP)(hooks.communicate)
            if hooks.in_smem is not None:
                pl.when(warp == FORWARDER_WARP)(forward)


def launch(
    body: Callable[..., None],
    *,
    out_type: Any,
    num_ctas: int,
    name: str,
    cluster: int = 1,
    peers_read: tuple[int, ...] = (),
) -> Callable[..., Any]:
    """A `plgpu.kernel` with the mainloop's grid and threads; `body` receives operand and output references.

    Of `num_ctas`, as many run as fill whole clusters.

    It sees for itself that its peers have begun, if it has any. `peers_read`: which operands the peers read, in a
    kernel that is told their addresses (its flags are `shared_flags(..., told=True)`).

    It is one operation of jax: see `overlap.kernels.launch`.
    """
    body.__name__ = name
    semantics = plgpu.LoweringSemantics.Warpgroup
    kernel = plgpu.kernel(
        body,
        out_type=out_type,
        grid=(num_ctas // cluster,),
        grid_names=(GRID_AXIS,),
        cluster=(cluster,) if cluster > 1 else (),
        cluster_names=(RANK_AXIS,) if cluster > 1 else (),
        num_threads=NUM_THREADS,
        thread_name=THREAD_AXIS,
        compiler_params=addresses.Params(lowering_semantics=semantics, peers_read=peers_read)
        if peers_read
        else plgpu.CompilerParams(lowering_semantics=semantics, skip_device_barrier=True),
    )
    return sealed(kernel, name)
