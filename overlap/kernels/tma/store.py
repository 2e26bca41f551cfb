"""Stores a tile: from a compute warpgroup's values, through an epilogue buffer, to global memory."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from overlap.kernels.hooks import Boxes, Epilogue, SeveralResults, Tile, Values, with_reference
from overlap.kernels.limits import EPILOGUE_COLUMNS
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
    tile = output.tile
    row, _ = output.corner
    wg_m = buffers.plan.wg_tile.rows
    block_rows = buffers.plan.wg_tile.block_rows
    if hooks.through is not None:
        _store_through(loop, buffers, output, index, block, hooks.through)
        return
    epilogue = None if output.epilogue_at is None else output.epilogue_at(tile)
    out_rows, first_column = _place(loop, buffers, tile, output.corner, index, width)
    box_views, register_views, *flat_views = (view.at[output.warpgroup] for view in buffers.out)
    box_width = box_views.shape[-1]
    boxes = width // box_width
    # An epilogue tile is several boxes side by side, each with its place in the output.
    places = [(out_rows, pl.ds(first_column + i * box_width, box_width)) for i in range(boxes)]
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
                values = epilogue(values, pl.ds(out_rows.start + above, rows), columns, addend)
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

    with_reference(
        hooks.out_at(tile),
        lambda out_gmem: _send(
            [(box_views.at[box], out_gmem, columns) for box, (_, columns) in enumerate(places)],
            out_rows.start,
            wg_m,
            left,
        ),
    )


def _place(
    loop: Loop, buffers: Buffers, tile: Tile, corner: tuple[Index, Index], index: Index, width: int
) -> tuple[pl.Slice, Index]:
    """Returns the rows of a warpgroup tile in the output, and the first column of an epilogue tile there."""
    row, column = corner
    first_row = tile.m * loop.config.tile_m + tile.row_offset + row
    first_column = (tile.n * loop.config.tile_n + column) // buffers.sides + index * width
    return pl.ds(first_row, buffers.plan.wg_tile.rows), first_column


def load_addends(
    loop: Loop, buffers: Buffers, tile: Tile, corner: tuple[Index, Index], warpgroup: Index, index: Index = 0
) -> None:
    """Starts to load the addends of an epilogue tile, if there are any in `Hooks.through`.

    Call it for the first epilogue tile while the tile is multiplied, so that the epilogue does not wait.
    """
    if loop.hooks.through is None or not loop.hooks.through.addends:
        return
    # What was stored last has been read from the boxes.
    wait_stores_read(0)
    boxes = buffers.out[0].at[warpgroup]
    rows, column = _place(loop, buffers, tile, corner, index, EPILOGUE_COLUMNS)
    for box, addend_gmem in enumerate(loop.hooks.through.addends):
        loaded = buffers.addend_loaded.at[warpgroup * boxes.shape[0] + box]
        plgpu.copy_gmem_to_smem(addend_gmem.at[rows, pl.ds(column, EPILOGUE_COLUMNS)], boxes.at[box], loaded)


def _store_through(
    loop: Loop,
    buffers: Buffers,
    output: WarpgroupOutput,
    index: Index,
    block: Callable[[int, int, slice], Values],
    through: SeveralResults,
) -> None:
    """Stores an epilogue tile as `store` does, with several addends or results. Each has a box of the buffer."""
    tile = output.tile
    row, _ = output.corner
    wg_m = buffers.plan.wg_tile.rows
    block_rows = buffers.plan.wg_tile.block_rows
    boxes, registers = (view.at[output.warpgroup] for view in buffers.out)
    if not through.addends:
        wait_stores_read(0)
    elif not (isinstance(index, int) and index == 0):
        load_addends(loop, buffers, tile, output.corner, output.warpgroup, index)
    for box in range(len(through.addends)):
        plgpu.barrier_wait(buffers.addend_loaded.at[output.warpgroup * boxes.shape[0] + box])
    rows, column = _place(loop, buffers, tile, output.corner, index, EPILOGUE_COLUMNS)
    columns = pl.ds(column, EPILOGUE_COLUMNS)
    epilogue = through.epilogue_at(tile)
    for above in range(0, wg_m, block_rows):
        height = min(block_rows, wg_m - above)
        blocks_smem = [registers.at[box, pl.ds(above, height)] for box in range(boxes.shape[0])]

        def values(first: int, size: int, above: int = above, height: int = height) -> tuple[jax.Array, ...]:
            found = block(above, height, slice(first, first + size))
            return found if isinstance(found, tuple) else (found,)

        addends = functools.partial(_loaded, blocks_smem[: len(through.addends)])
        for results in epilogue(values, pl.ds(rows.start + above, height), columns, addends):
            for box, result in results.items():
                blocks_smem[box][...] = result
    plgpu.commit_smem()
    left = None if tile.rows is None else jnp.clip(tile.rows - row, 0, wg_m)
    _send([(boxes.at[box], out_gmem, columns) for box, out_gmem in enumerate(through.results)], rows.start, wg_m, left)


def _loaded(blocks_smem: Sequence[SmemRef]) -> list[jax.Array]:
    return [block_smem[...] for block_smem in blocks_smem]


def _send(
    boxes: Sequence[tuple[SmemRef, GmemRef, pl.Slice]], first_row: Index, rows: int, left: jax.Array | None
) -> None:
    """Stores boxes: all rows, or the first `left` in pieces of a power of two of rows.

    Args:
      boxes: each with the reference that it is stored to and its columns there.
      first_row: the row in the references at which all boxes begin.
      rows: how many rows a box has.
      left: at most `rows`; None: all.
    """

    def whole() -> None:
        _copy([(box_smem, out_gmem.at[pl.ds(first_row, rows), columns]) for box_smem, out_gmem, columns in boxes])

    def piece(begin: Index, size: int) -> None:
        where = pl.ds(first_row + begin, size)
        _copy([(box_smem.at[pl.ds(begin, size)], out_gmem.at[where, columns]) for box_smem, out_gmem, columns in boxes])

    if left is None:
        whole()
        return

    def pieces() -> None:
        for size in (128, 64, 32, 16, 8, 4, 2, 1):
            if size < rows:
                pl.when((left & size) != 0)(functools.partial(piece, left & ~(2 * size - 1), size))

    # Pallas lowers the second branch twice, to learn its types. So the short branch is the second one.
    lax.cond(left < rows, pieces, whole)


def _copy(pairs: Sequence[tuple[SmemRef, GmemRef]]) -> None:
    for number, (box_smem, place_gmem) in enumerate(pairs, 1):
        plgpu.copy_smem_to_gmem(box_smem, place_gmem, commit_group=number == len(pairs))
