"""Stores a tile: from a compute warpgroup's values, through an epilogue buffer, to global memory."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from overlap.kernels.hooks import Boxes, Epilogue, Tile, Values, with_reference
from overlap.kernels.mainloop import Loop
from overlap.kernels.tma import exchange
from overlap.kernels.tma.staging import Buffers
from overlap.primitives import wait_stores_read
from overlap.primitives.types import BarrierRef, GmemRef, Index, SmemRef


@dataclasses.dataclass(frozen=True)
class WarpgroupOutput:
    """One warpgroup's share of an output tile (its warpgroup tile), and how and where it is stored.

    Attributes:
      tile: the output tile.
      corner: first row and column of the warpgroup tile within the output tile.
      warpgroup: the index of the warpgroup, whose epilogue buffer is used.
      wg_tile_index: the index of the warpgroup tile within the output tile.
      epilogue_at: as in `Hooks`; None: the values are stored without an epilogue.
      terms: a function from the index of a box to the values that are added to it, for each block of rows; None:
        nothing is added.
      boxes: where the tile is stored as boxes; None: it is stored to `Hooks.out_at`.
      terms_replace_sums: whether the terms replace the warpgroup's own values instead of being added to them.
    """

    tile: Tile
    corner: tuple[Index, Index]
    warpgroup: Index
    wg_tile_index: Index
    epilogue_at: Callable[[Tile], Epilogue] | None
    terms: Callable[[int], list[jax.Array]] | None = None
    boxes: Boxes | None = None
    terms_replace_sums: bool = False


def store(
    loop: Loop,
    buffers: Buffers,
    output: WarpgroupOutput,
    width: int,
    index: Index,
    block: Callable[[int, int, slice], Values],
) -> None:
    """Stores one epilogue tile (some columns of a warpgroup tile): registers → epilogue buffer → global memory.

    Args:
      loop: what the CTA does.
      buffers: shared memory.
      output: the warpgroup tile, and where it is stored.
      width: columns of each epilogue tile of this warpgroup tile.
      index: the index of the epilogue tile within the warpgroup tile.
      block: called as `block(row, rows, columns)`: the f32 values of some rows and columns of the epilogue tile,
        transposed if `WarpgroupTile.transposed` says so. Of each side if there are several (`Buffers.sides`).
    """
    hooks = loop.hooks
    config = loop.config
    tile = output.tile
    row, column = output.corner
    wg_m = buffers.plan.wg_tile.rows
    block_rows = buffers.plan.wg_tile.block_rows
    epilogue = None if output.epilogue_at is None else output.epilogue_at(tile)
    first_row = tile.m * config.tile_m + tile.row_offset + row
    first_column = (tile.n * config.tile_n + column) // buffers.sides + index * width
    box_views, register_views, *flat_views = (view.at[output.warpgroup] for view in buffers.out)
    box_width = box_views.shape[-1]
    boxes = width // box_width
    # An epilogue tile is several boxes side by side, each with its place in the output.
    places = [(pl.ds(first_row, wg_m), pl.ds(first_column + i * box_width, box_width)) for i in range(boxes)]
    # How many rows of this warpgroup tile are stored; None: TMA leaves out what lies beyond the output.
    left = None if tile.rows is None else jnp.clip(tile.rows - row, 0, wg_m)
    # The last store has read the epilogue buffer, possibly while the previous tile was stored.
    wait_stores_read(0)
    loaded: list[BarrierRef] = []
    # The addend is added once, to the whole sum. So it is not added to a part of a peer's tile.
    addend_at = hooks.addend_at if output.boxes is None else None
    if addend_at is not None:
        # The addend is loaded into the epilogue buffer, where the result then overwrites it.
        loaded = [buffers.addend_loaded.at[output.warpgroup * box_views.shape[0] + box] for box in range(boxes)]
        for box, place in enumerate(places):
            plgpu.copy_gmem_to_smem(addend_at(tile).at[place], box_views.at[box], loaded[box])
    for box, (_, columns) in enumerate(places):
        if addend_at is not None:
            plgpu.barrier_wait(loaded[box])
        terms = None if output.terms is None else output.terms(index * boxes + box)
        for above in range(0, wg_m, block_rows):
            rows = min(block_rows, wg_m - above)
            addend = None if terms is None else terms[above // block_rows]
            if output.terms_replace_sums and addend is not None:
                values = addend
                addend = None
            else:
                values = block(above, rows, slice(box * box_width, (box + 1) * box_width))
            block_smem = register_views.at[box, pl.ds(above, rows)]
            if buffers.plan.wg_tile.transposed:
                block_smem = block_smem.transpose((1, 0))
            if addend_at is not None:
                given = block_smem[...].astype(jnp.float32)
                addend = given if addend is None else addend + given
            if epilogue is not None:
                values = epilogue(values, pl.ds(first_row + above, rows), columns, addend)
            assert not isinstance(values, tuple)
            if epilogue is None and addend is not None:
                values = values + addend
            block_smem[...] = values.astype(block_smem.dtype)
    plgpu.commit_smem()
    if output.boxes is not None:
        in_tile = output.wg_tile_index * exchange.box_count(buffers)
        if flat_views:
            assert hooks.exchange is not None and hooks.exchange.direct_sends is not None
            exchange.send_boxes(output.boxes, hooks.exchange.direct_sends, tile, flat_views[0], in_tile + index * boxes)
        else:
            exchange.store_boxes(output.boxes.ref, box_views, output.boxes.first + in_tile + index * boxes)
        return

    if left is not None:
        with_reference(hooks.out_at(tile), functools.partial(_send_rows, box_views, places, left))
        return

    def send(out_gmem: GmemRef) -> None:
        for box, place in enumerate(places):
            plgpu.copy_smem_to_gmem(box_views.at[box], out_gmem.at[place], commit_group=box == boxes - 1)

    with_reference(hooks.out_at(tile), send)


def _send_rows(
    box_views: SmemRef,
    places: Sequence[tuple[pl.Slice, pl.Slice]],
    left: jax.Array,
    out_gmem: GmemRef,
) -> None:
    """Stores the first `left` rows of some boxes: all rows at once, or pieces of a power of two of rows."""
    (rows, _), *_ = places

    @pl.when(left >= rows.size)
    def _whole() -> None:
        for box, place in enumerate(places):
            plgpu.copy_smem_to_gmem(box_views.at[box], out_gmem.at[place], commit_group=box == len(places) - 1)

    for size in (128, 64, 32, 16, 8, 4, 2, 1):

        @pl.when(jnp.logical_and(left < rows.size, (left & size) != 0))
        def _piece(size: int = size) -> None:
            begin = left & ~(2 * size - 1)
            for box, (_, columns) in enumerate(places):
                piece_gmem = out_gmem.at[pl.ds(rows.start + begin, size), columns]
                plgpu.copy_smem_to_gmem(
                    box_views.at[box, pl.ds(begin, size)], piece_gmem, commit_group=box == len(places) - 1
                )
