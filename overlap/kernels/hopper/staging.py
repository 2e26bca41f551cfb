"""The mainloop's shared memory: how tiles lie in it, so that any size of operand can be loaded and stored exactly.

TMA clips a box at the edges of an array (a load then fills zeros, a store drops), but only in dimensions of the array
itself: a box over a *tiled* view of an array cannot end inside a tile. So every box here is one swizzle atom (128
bytes) wide and goes to or from the array as it is; a wider tile is several boxes side by side. The same bytes are what
wgmma wants to see as a tiled and swizzled buffer. Each buffer is therefore a union of two views:

    box: swizzled rows of 128 bytes, for TMA        mma: tiled and swizzled, for wgmma and for stores from registers

An operand whose rows run along k (`[m, k]`, `[n, k]`) is one box per step; one whose rows run along m or n is a box for
every 64 of these, which wgmma sees as 64 × 64 tiles. Rows must begin at multiples of 16 bytes; nothing else is asked.

TMA takes several times as long for a row that it fills with zeros as for one that it loads. So of a left operand that
has fewer rows than a tile only these are loaded. What is in the rest of its slots does not matter: it gets only into
the same rows of the result, which are clipped when that is stored. A warpgroup whose half has no rows does nothing.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from overlap import _compat_mosaic
from overlap.kernels.config import SWIZZLE_BYTES, Config
from overlap.kernels.grid import RANK_AXIS
from overlap.kernels.hopper.limits import COMPUTE_WARPGROUPS, halves, rows_loaded
from overlap.kernels.layouts import OperandLayouts
from overlap.kernels.mainloop import OperandTypes
from overlap.primitives.integers import ceil_div


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Buffers:
    """The mainloop's shared memory, each a pair of views (box, mma), and its barriers.

    Of the left operand's slots only the first `rows` rows are loaded, for so many `warpgroups` to compute with.
    Parts of tiles that peers have computed (`Hooks.exchange`) are loaded into the slots of one operand, of which they
    are two further views: of each slot the first boxes, one for each warpgroup. `mail` and the barriers around it pass
    on which tile has been drawn (`drawn.py`). What is sent to peers from shared memory, and comes so,
    has a third view: boxes as pieces of memory, [..., elements].
    """

    lhs: Any
    rhs: Any
    out: Any
    full: Any
    consumed: Any
    rows: int = dataclasses.field(metadata={"static": True})
    warpgroups: int = dataclasses.field(metadata={"static": True})
    addend_loaded: Any = None
    mail: Mail | None = None
    stored: Any = None

    @property
    def terms(self) -> tuple[Any, ...]:
        """The views (box, mma) of parts in the slots: [slot, box, rows, columns]; and as pieces, if they are sent."""
        return (*self.lhs[2:], *self.rhs[2:])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mail:
    """Which tiles this CTA has drawn, for two tiles at a time: numbers, whether they are there, whether all know."""

    numbers: Any
    posted: Any
    taken: Any


MAIL_SLOTS = 2


def atom(dtype: Any) -> int:
    """Elements in 128 bytes, the width of a box."""
    return SWIZZLE_BYTES // jnp.dtype(dtype).itemsize


def swizzled(dtype: Any, rows: int = 8) -> tuple[Any, ...]:
    """The layout that wgmma and TMA share: tiles of `rows` × 128 bytes, swizzled."""
    return (
        plgpu.TilingTransform((rows, atom(dtype))),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(SWIZZLE_BYTES),  # pyright: ignore[reportAbstractUsage]
    )


def _views(box: tuple[int, ...], mma: tuple[int, ...], dtype: Any, rows: int = 8) -> tuple[Any, Any]:
    untiled = swizzled(dtype)[1:]
    return plgpu.SMEM(box, dtype, transforms=untiled), plgpu.SMEM(mma, dtype, transforms=swizzled(dtype, rows))


def _pieces(box: tuple[int, ...], dtype: Any) -> Any:
    """Boxes as pieces of memory, whatever lies in them where."""
    *boxes, rows, columns = box
    return plgpu.SMEM((*boxes, rows * columns), dtype)


def box_shape(config: Config, types: OperandTypes) -> tuple[int, int, int]:
    """How many boxes a tile of results is stored as, and rows and columns of each: those that the operand has."""
    (wg_m, wg_n), width = halves(config), atom(types.out_dtype)
    loaded = rows_loaded(config, types.m, types.layouts.transpose_lhs)
    return _warpgroups(config, loaded) * wg_n // width, min(wg_m, loaded), width


def _warpgroups(config: Config, loaded: int) -> int:
    """How many warpgroups have rows to compute with."""
    wg_m, _ = halves(config)
    return COMPUTE_WARPGROUPS if wg_m == config.tile_m else ceil_div(loaded, wg_m)


def buffer_types(config: Config, types: OperandTypes) -> Buffers:
    """Scratch types of `Buffers` for `pl.run_scoped`."""
    dtype, layouts, forwards = types.dtype, types.layouts, types.forwards
    width, stages, tile_k = atom(dtype), config.stages, config.tile_k
    # wgmma wants the same tiles in both operands: tall ones if one of them is made of several boxes.
    rows = 8 if layouts.k_major else width
    if not layouts.k_major:
        _compat_mosaic.offer_square_wgmma_tiles()
    if forwards and config.cluster > 1:
        _compat_mosaic.let_warps_arrive_at_cluster_barriers()
    lhs_box, lhs_mma = _operand(config.tile_m, tile_k, width, layouts.transpose_lhs)
    rhs_box, rhs_mma = _operand(config.tile_n, tile_k, width, not layouts.transpose_rhs)
    wg_m, _ = halves(config)
    out_width = atom(types.out_dtype)
    out_boxes = config.hopper.epilogue_tile_n // out_width
    # What is passed on is passed on as whole tiles.
    loaded = config.tile_m if forwards else rows_loaded(config, types.m, layouts.transpose_lhs)
    warpgroups = _warpgroups(config, loaded)
    out = (COMPUTE_WARPGROUPS, config.hopper.epilogue_slots, out_boxes, wg_m, out_width)
    addend_barriers = COMPUTE_WARPGROUPS * out_boxes
    # In the slots of the operand that has room for a box of each warpgroup; a slot of terms is as large as one of that.
    in_one = config.tile_m if wg_m < config.tile_m else config.tile_n
    term = (stages, in_one // wg_m, wg_m, out_width)
    terms = _views(term, term, types.out_dtype) if types.exchanges else ()
    out_views = _views(out, out, types.out_dtype)
    if types.sends:
        out_views, terms = (*out_views, _pieces(out, types.out_dtype)), (*terms, _pieces(term, types.out_dtype))
    in_lhs, in_rhs = (terms, ()) if wg_m < config.tile_m else ((), terms)
    return Buffers(
        lhs=plgpu.RefUnion(*_views((stages, *lhs_box), (stages, *lhs_mma), dtype, rows), *in_lhs),
        rhs=plgpu.RefUnion(*_views((stages, *rhs_box), (stages, *rhs_mma), types.rhs_dtype, rows), *in_rhs),
        out=plgpu.RefUnion(*out_views),
        full=plgpu.Barrier(num_arrivals=copies_per_step(config, dtype, layouts, loaded), num_barriers=stages),
        # The forwarder gives slots back as well.
        consumed=_consumed(config.cluster, warpgroups + forwards, stages),
        rows=loaded,
        warpgroups=warpgroups,
        addend_loaded=plgpu.Barrier(num_arrivals=1, num_barriers=addend_barriers) if types.addend else None,
        mail=_mail(warpgroups + 1) if types.exchanges else None,
        stored=plgpu.Barrier(num_arrivals=warpgroups) if types.exchanges else None,
    )


def _mail(readers: int) -> Mail:
    _compat_mosaic.let_warps_load_scalars()
    return Mail(
        plgpu.SMEM((MAIL_SLOTS,), jnp.int32), plgpu.Barrier(num_arrivals=1, num_barriers=MAIL_SLOTS),
        plgpu.Barrier(num_arrivals=readers, num_barriers=MAIL_SLOTS),
    )  # fmt: skip


def _consumed(cluster: int, arrivals: int, stages: int) -> Any:
    if cluster == 1:
        return plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages)
    # An arrival counts in all CTAs of the cluster.
    return plgpu.ClusterBarrier(collective_axes=(RANK_AXIS,), num_arrivals=arrivals, num_barriers=stages)


def _operand(tile: int, tile_k: int, width: int, across: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the box view and of the wgmma view of one step of an operand; `across`: its rows run across k."""
    return ((tile // width, tile_k, width), (tile_k, tile)) if across else ((tile, tile_k), (tile, tile_k))


def copies_per_step(config: Config, dtype: Any, layouts: OperandLayouts, rows: int) -> int:
    """How many boxes one k step of both operands is, if so many rows of the left one are loaded."""
    width = atom(dtype)
    lhs = rows // width if layouts.transpose_lhs else 1
    return lhs + (1 if layouts.transpose_rhs else config.tile_n // width)


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
    """

    box_smem: Any
    barrier: Any
    start: Any
    across: bool
    shared_by: Any = None


def load_step(operand_gmem: Any, k_start: Any, stage: Stage) -> None:
    """Starts the copies of one operand's tile for the k step that begins at `k_start`."""
    box_smem, start = stage.box_smem, stage.start
    copy = functools.partial(
        plgpu.copy_gmem_to_smem, barrier=stage.barrier,
        collective_axes=None if stage.shared_by is None else (stage.shared_by,),
    )  # fmt: skip
    if not stage.across:
        rows, columns = box_smem.shape
        copy(operand_gmem.at[pl.ds(start, rows), pl.ds(k_start, columns)], box_smem)
        return
    boxes, rows, columns = box_smem.shape
    for i in range(boxes):
        piece = (pl.ds(k_start, rows), pl.ds(start + i * columns, columns))
        copy(operand_gmem.at[piece], box_smem.at[i])


def half(mma_smem: Any, which: Any, size: int, k_columns: bool) -> Any:
    """One warpgroup's part of an operand as [.., k] or, if its columns are not k, transposed to that.

    Args:
      mma_smem: the slot, as wgmma sees it.
      which: the index of the half, in units of `size`.
      size: rows (or columns) of the half.
      k_columns: the slot is [tile, k], else [k, tile].
    """
    piece = pl.ds(which * size, size)
    return mma_smem.at[piece] if k_columns else mma_smem.at[:, piece]
