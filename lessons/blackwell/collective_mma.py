"""Lesson 3: a product of two CTAs. A cluster computes a tile of 256 × 256, and each CTA loads half of each operand.

With `collective_axis`, one `tcgen05_mma` reads the shared memory of two neighbouring SMs and adds to the accumulators
of both. CTA 0 of the pair, the *leader*, issues it for the two:

               CTA 0 (leader)                         CTA 1
    left       rows 0–127                             rows 128–255            (`CopyPartition.PARTITIONED(0)`)
    right      columns 0–127                          columns 128–255         (`CopyPartition.PARTITIONED(1)`)
    sum        rows 0–127, all 256 columns            rows 128–255, all 256 columns

The barriers, and who waits at them:

    full      The copies of both CTAs count at the leader's barrier only, since only its MMA warp waits for them.
    consumed  A product arrives in both CTAs: each copies into its own half of the stage.
    done      The last product arrives in both CTAs as well: each stores its own rows.

Neither CTA may end while the other one can still access its memory. The compiler ensures this: two CTAs that share
tensor memory wait for each other before they give it back.

Gains: 32 KB per stage and CTA instead of 48 KB for the same number of products, so a third less traffic, and six stages
instead of four. What is left: every cluster pays its start, and nothing is loaded or multiplied while it stores its
tile. Source: "Writing high-performance matrix multiplication kernels for Blackwell" in the JAX documentation; PTX ISA,
tcgen05.mma with .cta_group::2.
"""

from __future__ import annotations

import functools

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from lessons.blackwell.tiled_epilogue import epilogue_type, store_epilogue_tiles
from lessons.blackwell.tiling import tiling
from lessons.blackwell.warp_specialized import (
    Memory,
    load_tiles,
    multiply_tiles,
    split_warps,
)
from lessons.hopper.tiling import COMPILER_PARAMS, M_AXIS, N_AXIS, Tiling
from lessons.hopper.warp_specialized import Pipeline
from overlap.primitives.axes import kernel_axis
from overlap.primitives.types import BarrierRef, GmemRef, Index, SmemRef, TmemRef

CLUSTER = 2
RANK_AXIS = kernel_axis("rank in the cluster")  # 0 is the leader.


def copy_half(src_gmem: GmemRef, dst_smem: SmemRef, full: BarrierRef, dimension: int) -> None:
    """Copies this CTA's half of a tile that the cluster shares along `dimension`.

    The bytes of both halves count on the barrier `full` of the cluster's first CTA, the leader.
    """
    half = plgpu.CopyPartition.PARTITIONED(dimension)
    plgpu.copy_gmem_to_smem(src_gmem, dst_smem, full, collective_axes=(RANK_AXIS,), leader_tracked=half)


load_halves = functools.partial(load_tiles, copy=copy_half)


def multiply_halves(acc_tmem: TmemRef, done: BarrierRef, pipeline: Pipeline, t: Tiling, *, first: Index = 0) -> None:
    """Issues the products of the cluster's tile, from the MMA warp: the leader issues all, the other CTA none."""

    @pl.when(lax.axis_index(RANK_AXIS) == 0)
    def _leader() -> None:
        multiply_tiles(acc_tmem, done, pipeline, t, first=first, collective_axis=RANK_AXIS)


def own_part(out_gmem: GmemRef, tile: tuple[Index, Index], t: Tiling) -> GmemRef:
    """The rows of the cluster's output tile whose sums are in this CTA's tensor memory."""
    cta_m = t.tile_m // CLUSTER
    row = tile[0] * CLUSTER + lax.axis_index(RANK_AXIS)
    return out_gmem.at[pl.ds(row * cta_m, cta_m), pl.ds(tile[1] * t.tile_n, t.tile_n)]


def matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    tile_n: int = 256,
    tile_k: int = 64,
    stages: int = 6,
    epilogue_tile_n: int = 64,
) -> jax.Array:
    """lhs[m, k] @ rhs[k, n], float16 or bfloat16; sizes are multiples of the tiles of a cluster."""
    t = tiling(lhs, rhs, tile_n=tile_n, tile_k=tile_k, stages=stages, ctas=CLUSTER)

    def body(lhs_gmem: GmemRef, rhs_gmem: GmemRef, out_gmem: GmemRef, own: Memory) -> None:
        tile = lax.axis_index(M_AXIS), lax.axis_index(N_AXIS)
        split_warps(
            lambda: load_halves((lhs_gmem, rhs_gmem), tile, own.pipeline, t),
            lambda: multiply_halves(own.acc_tmem, own.done, own.pipeline, t),
        )
        plgpu.barrier_wait(own.done)
        store_epilogue_tiles(own.acc_tmem, own_part(out_gmem, tile, t), own.out_smem)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    return plgpu.kernel(
        body,
        out_type=t.out_type,
        grid=(t.m_tiles, t.n_tiles),
        grid_names=(M_AXIS, N_AXIS),
        cluster=(CLUSTER,),
        cluster_names=(RANK_AXIS,),
        scratch_types=[Memory.types(t, stages, epilogue_type(t, epilogue_tile_n, ctas=CLUSTER), ctas=CLUSTER)],
        compiler_params=COMPILER_PARAMS,
        kernel_name="blackwell_ladder_collective_mma",
    )(lhs, rhs)
