"""Loads block scales on Blackwell together with the operand tiles, and copies them to tensor memory for the products.

For each k step a CTA needs one scale tile for its rows, and one for the columns of its tile. In a pair, the latter are
the scales of all columns of the pair's tile, since each CTA multiplies its rows by all of these columns. The scale
tiles are loaded into the stage of the k step, and count on its barrier `full`. The multiplier has the tensor cores copy
them to tensor memory, and then issues the product that reads them there. Such a copy and a later product of one thread
run in order.

Tensor memory has a place for the scales of every stage. So the scales that a product reads there are overwritten only
after the product's stage has been released (`consumed`). This matters because the PTX ISA does not list a product and a
later copy of the same thread among the pairs of operations that run in order.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from overlap.kernels.blackwell.limits import SCALE_TILES
from overlap.kernels.block_scales import SCALE_DTYPE, SCALE_TILE_BLOCKS, SCALE_TILE_ROWS, SCALE_TILE_WORDS
from overlap.kernels.config import Config
from overlap.kernels.grid import RANK_AXIS, rank
from overlap.kernels.hooks import Tile, with_reference
from overlap.kernels.mainloop import Loop
from overlap.primitives.types import Index, ScratchType, SmemRef, TmemRef

if TYPE_CHECKING:
    from overlap.kernels.blackwell.mainloop import Buffers

# The number of copies of block scales in a k step: one for each scale tile.
COPIES = SCALE_TILES
# A scale tile as the tensor cores copy it: 32 groups of 16 bytes.
_MMA_SHAPE = (1, 1, 32, 16)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScaleBuffers:
    """Memory for the block scales of all stages.

    Attributes:
      lhs: the left operand's scales in shared memory, as two views: words for TMA, and groups of 16 bytes for the
        tensor cores.
      rhs: the right operand's scales in shared memory, as the same two views.
      lhs_tmem: the left operand's scales in tensor memory.
      rhs_tmem: the right operand's scales in tensor memory.
    """

    lhs: tuple[SmemRef, SmemRef]
    rhs: tuple[SmemRef, SmemRef]
    lhs_tmem: TmemRef
    rhs_tmem: TmemRef


def buffer_types(config: Config) -> ScaleBuffers:
    """Returns the types of the buffers, for `pl.run_scoped`."""

    def in_smem() -> ScratchType:
        words = plgpu.SMEM((config.stages, 1, 1, SCALE_TILE_WORDS), jnp.int32)
        return plgpu.RefUnion(words, plgpu.SMEM((config.stages, *_MMA_SHAPE), SCALE_DTYPE))

    def in_tmem() -> ScratchType:
        shape = (SCALE_TILE_ROWS, config.stages * SCALE_TILE_BLOCKS)
        pairs = config.cluster > 1
        return plgpu.TMEM(shape, SCALE_DTYPE, layout=plgpu.TMEMLayout.SCALES_LAYOUT, collective=pairs)

    return ScaleBuffers(in_smem(), in_smem(), in_tmem(), in_tmem())


def load(loop: Loop, buffers: Buffers, tile: Tile, k_step: Index, stage: Index) -> None:
    """Starts the copies of the block scales of a k step into a stage. The producer calls this."""
    scales = buffers.scales
    config = loop.config
    assert loop.hooks.block_scales_at is not None and scales is not None
    given = loop.hooks.block_scales_at(tile)
    own = pl.ds(given.lhs_tile, 1)
    columns = pl.ds(given.rhs_tile, 1)
    k_slice = pl.ds(k_step, 1)
    of_lhs: dict[str, Any] = {}
    of_rhs: dict[str, Any] = {}
    if config.cluster > 1:
        # The first CTA's barrier counts the loads of both CTAs. Each CTA loads the scales of its own rows of the left
        # operand, and the scales of all columns of the pair's tile.
        own = pl.ds(given.lhs_tile - rank(config), config.cluster)
        of_lhs = {"collective_axes": (RANK_AXIS,), "leader_tracked": plgpu.CopyPartition.PARTITIONED(0)}
        of_rhs = {"collective_axes": (RANK_AXIS,), "leader_tracked": plgpu.CopyPartition.REPLICATED}
    full = buffers.full.at[stage]
    lhs_smem, rhs_smem = scales.lhs[0].at[stage], scales.rhs[0].at[stage]
    with_reference(given.lhs, lambda ref: plgpu.copy_gmem_to_smem(ref.at[own, k_slice], lhs_smem, full, **of_lhs))
    with_reference(given.rhs, lambda ref: plgpu.copy_gmem_to_smem(ref.at[columns, k_slice], rhs_smem, full, **of_rhs))


def to_tensor_memory(scales: ScaleBuffers | None, stage: Index, pair: str | None) -> dict[str, TmemRef]:
    """Copies the scales of a stage to tensor memory, and returns the product's arguments. The multiplier calls this."""
    if scales is None:
        return {}
    place = pl.ds(stage * SCALE_TILE_BLOCKS, SCALE_TILE_BLOCKS)
    a_scale, b_scale = scales.lhs_tmem.at[:, place], scales.rhs_tmem.at[:, place]
    plgpu.async_copy_scales_to_tmem(scales.lhs[1].at[stage], a_scale, collective_axis=pair)
    plgpu.async_copy_scales_to_tmem(scales.rhs[1].at[stage], b_scale, collective_axis=pair)
    return {"a_scale": a_scale, "b_scale": b_scale}
