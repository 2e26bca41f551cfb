"""The mainloop's shared memory: how tiles lie in it, so that any size of operand can be loaded and stored exactly.

TMA clips a box at the edges of an array (a load then fills zeros, a store drops), but only in dimensions of the array
itself: a box over a *tiled* view of an array cannot end inside a tile. So every box here is one swizzle atom (128
bytes) wide and goes to or from the array as it is; a wider tile is several boxes side by side. The same bytes are what
the tensor cores (wgmma, tcgen05) want to see as a tiled and swizzled buffer. Each buffer is therefore a union of two
views:

    box: swizzled rows of 128 bytes, for TMA    mma: tiled and swizzled, for tensor cores and for stores from registers

An operand whose rows run along k (`[m, k]`, `[n, k]`) is one box per step; one whose rows run along m or n is a box for
every 64 of these, which tensor cores see as 64 × 64 tiles. Rows must begin at multiples of 16 bytes; nothing else is
asked.

TMA takes several times as long for a row that it fills with zeros as for one that it loads. So of a left operand that
has fewer rows than a tile only these are loaded. What is in the rest of its slots does not matter: it gets only into
the same rows of the result, which are clipped when that is stored. A warpgroup whose part of a tile has no rows does
nothing.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from overlap.kernels.config import SWIZZLE_BYTES, Config
from overlap.kernels.layouts import OperandLayouts
from overlap.kernels.mainloop import OperandTypes
from overlap.kernels.stream_k import Piece
from overlap.primitives.integers import remainder


@dataclasses.dataclass(frozen=True)
class WarpgroupTile:
    """What one compute warpgroup stores of an output tile.

    Attributes:
      rows: of what one warpgroup accumulates: a part of the tile, or all of it.
      columns: likewise.
      block_rows: how many rows of its values are in registers at a time; an epilogue is called with so many.
      warpgroups: how many compute warpgroups there are.
      transposed: whether its values are in registers as [columns, rows].
    """

    rows: int
    columns: int
    block_rows: int
    warpgroups: int
    transposed: bool = False


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Buffers:
    """The mainloop's shared memory, each a pair of views (box, mma), and its barriers.

    Of the left operand's slots only the first `rows` rows are loaded, for so many `parts` of a tile to be computed
    from, each by a warpgroup. What peers have computed of a tile (`Hooks.exchange`) is loaded into the slots of one
    operand, of which it is two further views: of each slot the first boxes, one for each part. `mail` and the barriers
    around it pass on which tile has been drawn (`drawn.py`). What is sent to peers from shared memory, and comes so,
    has a third view: boxes as pieces of memory, [..., elements].

    Static are, beside these numbers: what a warpgroup stores (`wg_tile`), how many `copies` fill a stage, and `pairs`,
    `terms_in_stages`, `stored_barriers` and `taking_turns` as in `Plan`.
    """

    lhs: Any
    rhs: Any
    out: Any
    full: Any
    consumed: Any
    rows: int = dataclasses.field(metadata={"static": True})
    parts: int = dataclasses.field(metadata={"static": True})
    wg_tile: WarpgroupTile = dataclasses.field(metadata={"static": True})
    copies: int = dataclasses.field(metadata={"static": True})
    pairs: bool = dataclasses.field(metadata={"static": True})
    terms_in_stages: bool = dataclasses.field(metadata={"static": True})
    stored_barriers: int = dataclasses.field(metadata={"static": True})
    stages: int = dataclasses.field(metadata={"static": True})
    taking_turns: int = dataclasses.field(metadata={"static": True})
    addend_loaded: Any = None
    mail: Mail | None = None
    stored: Any = None

    @property
    def terms(self) -> tuple[Any, ...]:
        """The views (box, mma) of parts of peers: [slot, box, rows, columns]; and as pieces, if they are sent."""
        return (*self.lhs[2:], *self.rhs[2:])

    def full_at(self, piece: Piece, slot: Any) -> Any:
        """The barrier of a slot that is filled for a piece."""
        if self.taking_turns == 1:
            return self.full.at[slot]
        return self.full.at[remainder(piece.ordinal, self.taking_turns) * self.stages + slot]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mail:
    """Which tiles this CTA has drawn, for two tiles at a time: numbers, whether they are there, whether all know."""

    numbers: Any
    posted: Any
    taken: Any


MAIL_SLOTS = 2
# Rows of the smallest tile that the tensor cores read: eight rows of a swizzle atom.
SMALL_TILE_ROWS = 8


def atom(dtype: Any) -> int:
    """Elements in 128 bytes, the width of a box."""
    return SWIZZLE_BYTES // jnp.dtype(dtype).itemsize


def swizzled(dtype: Any, rows: int = SMALL_TILE_ROWS) -> tuple[Any, ...]:
    """The layout that tensor cores and TMA share: tiles of `rows` × 128 bytes, swizzled."""
    return (
        plgpu.TilingTransform((rows, atom(dtype))),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(SWIZZLE_BYTES),  # pyright: ignore[reportAbstractUsage]
    )


def _views(box: tuple[int, ...], mma: tuple[int, ...], dtype: Any, rows: int = SMALL_TILE_ROWS) -> tuple[Any, Any]:
    untiled = swizzled(dtype)[1:]
    return plgpu.SMEM(box, dtype, transforms=untiled), plgpu.SMEM(mma, dtype, transforms=swizzled(dtype, rows))


def _pieces(box: tuple[int, ...], dtype: Any) -> Any:
    """Boxes as pieces of memory, whatever lies in them where."""
    *boxes, rows, columns = box
    return plgpu.SMEM((*boxes, rows * columns), dtype)


@dataclasses.dataclass(frozen=True)
class BufferPlan:
    """What a mainloop decides about its shared memory, beside what `Config` says.

    Attributes:
      wg_tile: what each compute warpgroup stores.
      parts: of how many parts a tile consists, each computed by one warpgroup; those without rows do not count.
      rows: rows of the left operand that are loaded into a stage.
      rhs_columns: columns of the right operand that this CTA loads.
      lhs_tile_rows: rows of the tiles in which the tensor cores see the left operand.
      rhs_tile_rows: likewise for the right one.
      consumed: the type of the barriers at which stages are given back.
      mail_readers: how many roles read which tile has been drawn.
      pairs: whether the CTAs of a cluster load a part of each operand for a product that is one for both.
      terms_in_stages: whether what peers have computed of a tile comes through the stages of the operands.
      copies_beside: how many copies of a k step there are beside those of its operand tiles.
      stored_barriers: how many tiles may have been stored without the forwarder having looked.
      taking_turns: how many warpgroups have tiles of their own, in turn. Each waits for the operands of its own tiles
        alone, at barriers of its own: whoever waits at a barrier must do so in each of its phases.
    """

    wg_tile: WarpgroupTile
    parts: int
    rows: int
    rhs_columns: int
    lhs_tile_rows: int
    rhs_tile_rows: int
    consumed: Any
    mail_readers: int
    pairs: bool = False
    terms_in_stages: bool = True
    copies_beside: int = 0
    stored_barriers: int = 1
    taking_turns: int = 1


def box_views(shape: tuple[int, ...], types: OperandTypes) -> tuple[Any, ...]:
    """The views (box, mma) of boxes of results, [..., rows, columns]; and as pieces of memory, if they are sent so."""
    views = _views(shape, shape, types.out_dtype)
    return (*views, _pieces(shape, types.out_dtype)) if types.sends else views


def box_shape(plan: BufferPlan, out_dtype: Any) -> tuple[int, int, int]:
    """How many boxes a tile of results is stored as, and rows and columns of each: those that the operand has."""
    width = atom(out_dtype)
    return plan.parts * plan.wg_tile.columns // width, min(plan.wg_tile.rows, plan.rows), width


def buffer_types(config: Config, types: OperandTypes, plan: BufferPlan) -> dict[str, Any]:
    """The fields of `Buffers`, as scratch types for `pl.run_scoped`."""
    dtype, layouts, wg_tile = types.dtype, types.layouts, plan.wg_tile
    width, stages, tile_k = atom(dtype), config.stages, config.tile_k
    lhs_box, lhs_mma = _operand(config.tile_m, tile_k, width, layouts.transpose_lhs)
    rhs_box, rhs_mma = _operand(plan.rhs_columns, tile_k, width, not layouts.transpose_rhs)
    out_width = atom(types.out_dtype)
    out_boxes = config.epilogue_tile_n // out_width
    out = (wg_tile.warpgroups, config.epilogue_buffers, out_boxes, wg_tile.rows, out_width)
    # In the slots of the operand that has room for a box of each part; a slot of terms is as large as one of that.
    parts = config.tile_m * config.tile_n // (wg_tile.rows * wg_tile.columns)
    lhs_has_room = config.tile_m >= parts * wg_tile.rows
    in_one = config.tile_m if lhs_has_room else config.tile_n
    term = (stages, in_one // wg_tile.rows, wg_tile.rows, out_width)
    terms = box_views(term, types) if types.exchanges and plan.terms_in_stages else ()
    in_lhs, in_rhs = (terms, ()) if lhs_has_room else ((), terms)
    copies = copies_per_step(dtype, layouts, plan) + plan.copies_beside
    lhs_views = _views((stages, *lhs_box), (stages, *lhs_mma), dtype, plan.lhs_tile_rows)
    rhs_views = _views((stages, *rhs_box), (stages, *rhs_mma), types.rhs_dtype, plan.rhs_tile_rows)
    addend_barriers = wg_tile.warpgroups * out_boxes
    return {
        "lhs": plgpu.RefUnion(*lhs_views, *in_lhs),
        "rhs": plgpu.RefUnion(*rhs_views, *in_rhs),
        "out": plgpu.RefUnion(*box_views(out, types)),
        "full": plgpu.Barrier(num_arrivals=copies, num_barriers=plan.taking_turns * stages),
        "consumed": plan.consumed,
        "rows": plan.rows,
        "parts": plan.parts,
        "wg_tile": wg_tile,
        "copies": copies,
        "pairs": plan.pairs,
        "terms_in_stages": plan.terms_in_stages,
        "addend_loaded": plgpu.Barrier(num_arrivals=1, num_barriers=addend_barriers) if types.addend else None,
        "mail": _mail(plan.mail_readers) if types.exchanges else None,
        "stored": plgpu.Barrier(num_arrivals=plan.parts, num_barriers=plan.stored_barriers)
        if types.exchanges
        else None,
        "stored_barriers": plan.stored_barriers,
        "stages": stages,
        "taking_turns": plan.taking_turns,
    }


def _mail(readers: int) -> Mail:
    return Mail(
        plgpu.SMEM((MAIL_SLOTS,), jnp.int32), plgpu.Barrier(num_arrivals=1, num_barriers=MAIL_SLOTS),
        plgpu.Barrier(num_arrivals=readers, num_barriers=MAIL_SLOTS),
    )  # fmt: skip


def _operand(tile: int, tile_k: int, width: int, across: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the box view and of the mma view of one step of an operand; `across`: its rows run across k."""
    return ((tile // width, tile_k, width), (tile_k, tile)) if across else ((tile, tile_k), (tile, tile_k))


def copies_per_step(dtype: Any, layouts: OperandLayouts, plan: BufferPlan) -> int:
    """How many boxes one k step of both operands is."""
    width = atom(dtype)
    lhs = plan.rows // width if layouts.transpose_lhs else 1
    return lhs + (1 if layouts.transpose_rhs else plan.rhs_columns // width)


def loaded_boxes(buffers: Buffers, across: bool) -> Any:
    """What is loaded of the left operand's slots, as boxes; `across`: its rows run across k."""
    boxes = buffers.lhs[0]
    _, whole, *_, width = boxes.shape
    part = buffers.rows // width if across else buffers.rows
    return boxes if part == whole else boxes.at[:, pl.ds(0, part)]


@dataclasses.dataclass(frozen=True)
class Stage:
    """Where one operand's tile of one k step is loaded to, and from where.

    Attributes:
      box_smem: the stage's memory, as boxes.
      barrier: where each copy arrives.
      start: the tile's first row (of `lhs`) or column (of `rhs`).
      across: the operand's rows run across k.
      shared_by: the cluster axis along which CTAs need the same tile: each loads its part into all of them.
      paired_by: the cluster axis of two CTAs that each load a part of their own, all of which the first one's barrier
        counts; and this CTA's rank along it. None: each CTA's barrier counts its own loads.
    """

    box_smem: Any
    barrier: Any
    start: Any
    across: bool
    shared_by: Any = None
    paired_by: tuple[Any, Any] | None = None


def load_step(operand_gmem: Any, k_start: Any, stage: Stage) -> None:
    """Starts the copies of one operand's tile for the k step that begins at `k_start`."""
    box_smem, start = stage.box_smem, stage.start
    if not stage.across:
        _load_box(operand_gmem, (start, k_start), box_smem, stage, 0)
        return
    boxes, _, columns = box_smem.shape
    for i in range(boxes):
        _load_box(operand_gmem, (k_start, start + i * columns), box_smem.at[i], stage, 1)


def _load_box(operand_gmem: Any, corner: tuple[Any, Any], box_smem: Any, stage: Stage, along: int) -> None:
    """Starts the copy of one box; `along`: the dimension of its rows (of `lhs`) or columns (of `rhs`)."""
    starts, sizes = list(corner), list(box_smem.shape)
    sharing: dict[str, Any] = {}
    if stage.shared_by is not None:
        sharing = {"collective_axes": (stage.shared_by,)}
    elif stage.paired_by is not None:
        # Of a box of twice the size each CTA loads the part of its rank. So the box begins where that part is this one.
        axis, rank = stage.paired_by
        starts[along] = starts[along] - rank * sizes[along]
        sizes[along] *= 2
        sharing = {"collective_axes": (axis,), "leader_tracked": plgpu.CopyPartition.PARTITIONED(along)}
    piece = tuple(pl.ds(first, size) for first, size in zip(starts, sizes, strict=True))
    plgpu.copy_gmem_to_smem(operand_gmem.at[piece], box_smem, barrier=stage.barrier, **sharing)


def part(mma_smem: Any, which: Any, size: int, k_columns: bool) -> Any:
    """A part of an operand's tile as [.., k] or, if its columns are not k, transposed to that.

    Args:
      mma_smem: the slot, as the tensor cores see it.
      which: the index of the part, in units of `size`.
      size: rows (or columns) of the part.
      k_columns: the slot is [tile, k], else [k, tile].
    """
    piece = pl.ds(which * size, size)
    return mma_smem.at[piece] if k_columns else mma_smem.at[:, piece]
