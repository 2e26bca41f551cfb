"""Lays out the mainloop's shared memory so that operands of any size can be loaded and stored exactly.

TMA clips a box at the edges of an array: a load fills the rest with zeros, a store drops the rest. But TMA clips only
in the dimensions of the array itself: if the array is viewed as *tiled*, a box cannot end inside a tile of this view.
So every box here is one swizzle atom (128 bytes) wide, and is copied from or to the untiled array. A wider tile is
several boxes side by side. The tensor cores (wgmma, tcgen05) read the same bytes as a tiled and swizzled buffer. So
each buffer is a union of two views:

    box: swizzled rows of 128 bytes, for TMA    mma: tiled and swizzled, for tensor cores and for stores from registers

An operand whose rows run along k (`[m, k]`, `[n, k]`) has one box per k step. An operand whose rows run along m or n
has one box for every 128 bytes along m or n (64 elements of 16 bits), which the tensor cores read as tiles of 64 × 64.
The only condition is that rows begin at multiples of 16 bytes.

TMA takes several times as long for a row that it fills with zeros as for a row that it loads. So if a left operand has
fewer rows than a tile, only its rows are loaded. The rest of a stage may hold any values: they affect only the same
rows of the result, which are clipped when the result is stored. A warpgroup does nothing if its warpgroup tile has no
rows.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from overlap.kernels.config import SIDE_COLUMNS, SWIZZLE_BYTES, Config
from overlap.kernels.hooks import SideBySide
from overlap.kernels.limits import EPILOGUE_COLUMNS
from overlap.kernels.mainloop import OperandTypes
from overlap.kernels.stream_k import Piece
from overlap.kernels.tma.cluster_sums import ClusterSums, cluster_sums_type
from overlap.primitives.integers import remainder
from overlap.primitives.types import Axis, BarrierRef, GmemRef, Index, ScratchType, SmemRef


@dataclasses.dataclass(frozen=True)
class WarpgroupTile:
    """The shape of a warpgroup tile: the part of an output tile (or all of it) that one compute warpgroup stores.

    Attributes:
      rows: rows of the warpgroup tile.
      columns: columns of the warpgroup tile.
      block_rows: the number of rows of values with which an epilogue is called at a time.
      warpgroups: how many compute warpgroups there are.
      transposed: whether the values are in registers as [columns, rows].
    """

    rows: int
    columns: int
    block_rows: int
    warpgroups: int
    transposed: bool = False


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Buffers:
    """The mainloop's shared memory and its barriers.

    `lhs`, `rhs` and `out` are each two views of the same memory: `box`, as TMA copies it, and `mma`, as the tensor
    cores read it. If terms come through the stages (`terms_in_stages`), `lhs` or `rhs` has further views for them, of
    the first boxes of each stage: one box for each warpgroup tile. Results and terms that are sent directly from shared
    memory have a third view, of *flat* boxes: [..., elements]. If the last k step may have fewer rows
    (`Hooks.last_k_at`), `lhs` and `rhs` have a third view of boxes without swizzling, in which rows can be cleared.

    Attributes:
      lhs: the stages of the left operand: (box, mma, …), each [stages, ...].
      rhs: the stages of the right operand: (box, mma, …), each [stages, ...].
      out: the epilogue buffers, (box, mma, …): [warpgroups, boxes, rows, columns].
      full: barriers at which the copies of a stage arrive.
      consumed: barriers at which the readers of a stage arrive to release it.
      plan: the choices of the mainloop (this field and the following ones, up to `boxes`, are static).
      copies: how many arrivals at `full` mean that a stage is filled.
      stages: how many stages there are.
      sides: as in `OperandTypes`.
      boxes: as in `OperandTypes`.
      addend_loaded: barriers at which the copies of an addend's boxes arrive.
      mail: the mailboxes for the numbers of the tiles that this CTA has drawn (`drawn.py`).
      stored: barriers that tell the forwarder warp that a tile has been stored.
      cleared: the barrier at which the warpgroups of a tile arrive when they have cleared the rows of a k step that do
        not count. On Hopper they wait there for each other, on Blackwell the multiplier waits for the epilogue.
      cluster_sums: the sums that the CTAs of a cluster read from each other; None: they share no tiles.
      in_stages: the memory of `lhs`, `rhs` and `cluster_sums.sums` if CTAs share tiles (`divided`); else None.
    """

    lhs: tuple[SmemRef, ...]
    rhs: tuple[SmemRef, ...]
    out: tuple[SmemRef, ...]
    full: BarrierRef
    consumed: BarrierRef
    plan: BufferPlan = dataclasses.field(metadata={"static": True})
    copies: int = dataclasses.field(metadata={"static": True})
    stages: int = dataclasses.field(metadata={"static": True})
    sides: int = dataclasses.field(metadata={"static": True})
    boxes: int = dataclasses.field(metadata={"static": True})
    addend_loaded: BarrierRef = None
    mail: Mail | None = None
    stored: BarrierRef = None
    cleared: BarrierRef = None
    cluster_sums: ClusterSums | None = None
    in_stages: SmemRef = None

    @property
    def terms(self) -> tuple[SmemRef, ...]:
        """The views (box, mma) of terms, [stages, boxes, rows, columns]; a third, of flat boxes, if sent directly."""
        return (*self.lhs[2:], *self.rhs[2:])

    def full_at(self, piece: Piece, stage: Index) -> BarrierRef:
        """Returns the barrier `full` of a stage that is filled for a piece."""
        if self.plan.taking_turns == 1:
            return self.full.at[stage]
        return self.full.at[remainder(piece.ordinal, self.plan.taking_turns) * self.stages + stage]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mail:
    """Two mailboxes, each for the number of one tile that this CTA has drawn. All roles read them.

    Attributes:
      numbers: the numbers of the tiles, one for each mailbox.
      posted: barriers, one for each mailbox: a number has been written.
      taken: barriers, one for each mailbox: all roles have finished the tile, so that the mailbox may be used again.
    """

    numbers: SmemRef
    posted: BarrierRef
    taken: BarrierRef


MAILBOXES = 2
# Rows of the smallest layout tile that the tensor cores read: eight rows of a swizzle atom.
SMALL_TILE_ROWS = 8


def atom(dtype: DTypeLike) -> int:
    """Returns how many elements take 128 bytes, the width of a box."""
    return SWIZZLE_BYTES // jnp.dtype(dtype).itemsize


def swizzled(dtype: DTypeLike, rows: int = SMALL_TILE_ROWS) -> tuple[ScratchType, ...]:
    """Returns the shared-memory layout that tensor cores and TMA both use: swizzled tiles of `rows` × 128 bytes."""
    return (
        plgpu.TilingTransform((rows, atom(dtype))),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(SWIZZLE_BYTES),  # pyright: ignore[reportAbstractUsage]
    )


def _views(
    box: tuple[int, ...], mma: tuple[int, ...], dtype: DTypeLike, rows: int = SMALL_TILE_ROWS
) -> tuple[ScratchType, ScratchType]:
    untiled = swizzled(dtype)[1:]
    return plgpu.SMEM(box, dtype, transforms=untiled), plgpu.SMEM(mma, dtype, transforms=swizzled(dtype, rows))


def _flat_boxes(box: tuple[int, ...], dtype: DTypeLike) -> ScratchType:
    """Returns the view of boxes as flat memory, [..., elements], in the order of their bytes."""
    *boxes, rows, columns = box
    return plgpu.SMEM((*boxes, rows * columns), dtype)


@dataclasses.dataclass(frozen=True)
class BufferPlan:
    """The choices of a mainloop for its shared memory that do not follow from `Config` alone.

    Attributes:
      wg_tile: the shape of a warpgroup tile.
      wg_tiles: how many warpgroup tiles an output tile has, each computed by one warpgroup; warpgroup tiles without
        rows do not count.
      rows: rows of the left operand that are loaded into a stage.
      rhs_columns: columns of the right operand that this CTA loads.
      lhs_tile_rows: rows of the layout tiles in which the tensor cores read the left operand.
      rhs_tile_rows: rows of the layout tiles in which the tensor cores read the right operand.
      consumed: the type of the barriers at which the readers of a stage arrive to release it.
      mail_readers: how many warpgroups and warps read the mailboxes (`Mail`).
      pairs: whether the two CTAs of a cluster compute one product together, for which each loads a part of each
        operand.
      terms_in_stages: whether terms (parts of a tile from peers) are loaded into the pipeline stages of the operands.
      copies_beside: how many copies a k step has in addition to the copies of its operand tiles.
      stored_barriers: how many barriers `stored` there are: the number of tiles that may have been stored before the
        forwarder has waited for the first of them.
      taking_turns: how many warpgroups compute tiles of their own, in turn; 1: all warpgroups share each tile. Each
        such warpgroup waits only for the operands of its own tiles, at barriers of its own. Two warpgroups cannot share
        these barriers, because a warpgroup that waits at a barrier must wait in each of the barrier's phases.
    """

    wg_tile: WarpgroupTile
    wg_tiles: int
    rows: int
    rhs_columns: int
    lhs_tile_rows: int
    rhs_tile_rows: int
    consumed: ScratchType
    mail_readers: int
    pairs: bool = False
    terms_in_stages: bool = True
    copies_beside: int = 0
    stored_barriers: int = 1
    taking_turns: int = 1


def box_views(shape: tuple[int, ...], types: OperandTypes) -> tuple[ScratchType, ...]:
    """Returns the views (box, mma) of shared memory that holds boxes of results: see `Buffers`.

    Boxes that are sent to peers directly from shared memory have a third view, of flat boxes.

    Args:
      shape: [..., rows, columns] of the boxes.
      types: the operands' types.
    """
    views = _views(shape, shape, types.out_dtype)
    return (*views, _flat_boxes(shape, types.out_dtype)) if types.travel.direct_sends else views


def box_shape(plan: BufferPlan, out_dtype: DTypeLike) -> tuple[int, int, int]:
    """Returns how many boxes an output tile is stored as, and the rows (at most those loaded) and columns of each."""
    width = atom(out_dtype)
    return plan.wg_tiles * plan.wg_tile.columns // width, min(plan.wg_tile.rows, plan.rows), width


def buffer_types(config: Config, types: OperandTypes, plan: BufferPlan) -> dict[str, ScratchType]:
    """Returns the fields of `Buffers`, as scratch types for `pl.run_scoped`."""
    dtype = types.dtype
    layouts = types.layouts
    wg_tile = plan.wg_tile
    width = atom(dtype)
    stages = config.stages
    lhs_box, lhs_mma = _operand(config.tile_m, width, layouts.transpose_lhs)
    rhs_box, rhs_mma = _operand(plan.rhs_columns, width, not layouts.transpose_rhs)
    out_width = atom(types.out_dtype)
    out_boxes = types.boxes * EPILOGUE_COLUMNS // out_width
    out = (wg_tile.warpgroups, out_boxes, wg_tile.rows, out_width)
    # Terms (peers' parts) are loaded into the pipeline stages of one operand, whose shared memory they reuse: of `lhs`
    # if one of its stages can hold one box per warpgroup tile, else of `rhs`. A stage of terms is as large as a stage
    # of that operand.
    wg_tiles = config.tile_m * config.tile_n // (wg_tile.rows * wg_tile.columns)
    lhs_has_room = config.tile_m >= wg_tiles * wg_tile.rows
    in_one = config.tile_m if lhs_has_room else config.tile_n
    term = (stages, in_one // wg_tile.rows, wg_tile.rows, out_width)
    terms = box_views(term, types) if types.travel.exchanges and plan.terms_in_stages else ()
    in_lhs, in_rhs = (terms, ()) if lhs_has_room else ((), terms)
    copies = copies_per_k_step(types, plan) + plan.copies_beside
    lhs_views = _views((stages, *lhs_box), (stages, *lhs_mma), dtype, plan.lhs_tile_rows)
    rhs_views = _views((stages, *rhs_box), (stages, *rhs_mma), types.rhs_dtype, plan.rhs_tile_rows)
    if types.grouped == "k":
        in_lhs = (plgpu.SMEM((stages, *lhs_box), dtype),)
        in_rhs = (plgpu.SMEM((stages, *rhs_box), types.rhs_dtype),)
    addend_barriers = wg_tile.warpgroups * out_boxes
    stages_of: dict[str, ScratchType] = {
        "lhs": plgpu.RefUnion(*lhs_views, *in_lhs),
        "rhs": plgpu.RefUnion(*rhs_views, *in_rhs),
    }
    if config.ctas_per_tile > 1:
        sums = cluster_sums_type(plan.wg_tiles, wg_tile.rows, wg_tile.columns, out_width, transposed=wg_tile.transposed)
        in_stages = plgpu.RefUnion(*zip(lhs_views, rhs_views, strict=True), (sums.sums,))
        stages_of = {
            "lhs": (),
            "rhs": (),
            "in_stages": in_stages,
            "cluster_sums": dataclasses.replace(sums, sums=None),  # pyright: ignore[reportArgumentType]
        }
    return {
        **stages_of,
        "out": plgpu.RefUnion(*box_views(out, types)),
        "full": plgpu.Barrier(num_arrivals=copies, num_barriers=plan.taking_turns * stages),
        "consumed": plan.consumed,
        "plan": plan,
        "copies": copies,
        "addend_loaded": plgpu.Barrier(num_arrivals=1, num_barriers=addend_barriers) if types.addend else None,
        "mail": _mail(plan.mail_readers) if types.travel.exchanges else None,
        "stored": plgpu.Barrier(num_arrivals=plan.wg_tiles, num_barriers=plan.stored_barriers)
        if types.travel.exchanges
        else None,
        "cleared": plgpu.Barrier(num_arrivals=wg_tile.warpgroups) if types.grouped == "k" else None,
        "stages": stages,
        "sides": types.sides,
        "boxes": types.boxes,
    }


def divided[B: Buffers](buffers: B) -> B:
    """Returns the buffers with `lhs`, `rhs` and `cluster_sums.sums`, if these share memory (`Buffers.in_stages`)."""
    if buffers.in_stages is None or buffers.cluster_sums is None:
        return buffers
    boxes, mma, (sums,) = buffers.in_stages
    lhs, rhs = zip(boxes, mma, strict=True)
    return dataclasses.replace(
        buffers, lhs=lhs, rhs=rhs, cluster_sums=dataclasses.replace(buffers.cluster_sums, sums=sums)
    )


def _mail(readers: int) -> Mail:
    return Mail(
        numbers=plgpu.SMEM((MAILBOXES,), jnp.int32),
        posted=plgpu.Barrier(num_arrivals=1, num_barriers=MAILBOXES),
        taken=plgpu.Barrier(num_arrivals=readers, num_barriers=MAILBOXES),
    )


def _operand(tile: int, width: int, across: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the shapes of the box and mma views of one k step of an operand; `across`: its rows run along m or n."""
    return ((tile // width, width, width), (width, tile)) if across else ((tile, width), (tile, width))


def copies_per_k_step(types: OperandTypes, plan: BufferPlan) -> int:
    """Returns how many copies both operands of one k step have together."""
    width = atom(types.dtype)
    layouts = types.layouts
    lhs = plan.rows // width if layouts.transpose_lhs else 1
    if layouts.transpose_rhs:
        return lhs + (1 if types.sides == 1 else plan.rhs_columns // SIDE_COLUMNS)
    return lhs + plan.rhs_columns // width


def loaded_boxes(buffers: Buffers, across: bool) -> SmemRef:
    """Returns the boxes of `lhs` stages without the rows that are not loaded; `across`: rows of `lhs` run along m."""
    boxes = buffers.lhs[0]
    _, all_loaded, *_, width = boxes.shape
    loaded = buffers.plan.rows // width if across else buffers.plan.rows
    return boxes if loaded == all_loaded else boxes.at[:, pl.ds(0, loaded)]


@dataclasses.dataclass(frozen=True)
class OperandLoad:
    """Describes how one operand's tile of one k step is loaded: its place in the operand, and the memory of the stage.

    Attributes:
      box_smem: the memory of the stage, as boxes.
      barrier: the barrier at which each copy arrives.
      start: the tile's first row (of `lhs`) or column (of `rhs`).
      across: whether the operand's rows, as stored in memory, run along m or n instead of along k.
      paired_by: the cluster axis of two CTAs that each load a part of their own, and this CTA's rank along that axis.
        The barrier of the first CTA counts the loads of both. None: each CTA's barrier counts its own loads.
      has_gaps: as `Hooks.lhs_has_gaps`.
    """

    box_smem: SmemRef
    barrier: BarrierRef
    start: Index
    across: bool
    paired_by: tuple[Axis, Index] | None = None
    has_gaps: bool = False


def load_k_step(operand_gmem: GmemRef | SideBySide, k_start: Index, load: OperandLoad) -> None:
    """Starts the copies of one operand's tile for the k step that begins at `k_start`."""
    box_smem = load.box_smem
    start = load.start
    sides = operand_gmem.refs if isinstance(operand_gmem, SideBySide) else (operand_gmem,)
    columns = SIDE_COLUMNS if len(sides) > 1 else box_smem.shape[-1 if load.across else 0]
    boxes = box_smem.shape[0] if load.across else box_smem.shape[0] // columns
    for i in range(boxes):
        side_gmem = sides[i % len(sides)]
        first = start + i // len(sides) * columns
        if load.across:
            _load_box(side_gmem, (k_start, first), box_smem.at[i], load, 1)
        else:
            box = box_smem if boxes == 1 else box_smem.at[pl.ds(i * columns, columns)]
            _load_box(side_gmem, (first, k_start), box, load, 0)


def _load_box(
    operand_gmem: GmemRef, corner: tuple[Index, Index], box_smem: SmemRef, load: OperandLoad, along: int
) -> None:
    """Starts the copy of one box; `along`: the dimension of the box that runs along m (of `lhs`) or n (of `rhs`)."""
    starts = list(corner)
    sizes = list(box_smem.shape)
    sharing: dict[str, Any] = {}
    if load.paired_by is not None:
        # The copy names a box of twice the size, of which each CTA loads one half: the first CTA the first half, the
        # second CTA the second. So choose the start such that this CTA's half is the box to load.
        axis, rank = load.paired_by
        starts[along] = starts[along] - rank * sizes[along]
        sizes[along] *= 2
        sharing = {"collective_axes": (axis,), "leader_tracked": plgpu.CopyPartition.PARTITIONED(along)}
    box_slice = tuple(pl.ds(first, size) for first, size in zip(starts, sizes, strict=True))
    with jax.named_scope("rows_apart") if load.has_gaps else contextlib.nullcontext():  # For the emulator.
        plgpu.copy_gmem_to_smem(operand_gmem.at[box_slice], box_smem, barrier=load.barrier, **sharing)


def operand_slice(mma_smem: SmemRef, which: Index, size: int, k_columns: bool) -> SmemRef:
    """Returns the rows (or columns) of an operand's tile that one warpgroup multiplies.

    Args:
      mma_smem: the stage, as the tensor cores read it.
      which: the index of the slice, in units of `size`.
      size: rows (or columns) of the slice.
      k_columns: whether the stage is [tile, k]; else it is [k, tile].

    Returns:
      A reference of shape [size, k] if `k_columns`, else [k, size].
    """
    where = pl.ds(which * size, size)
    return mma_smem.at[where] if k_columns else mma_smem.at[:, where]
