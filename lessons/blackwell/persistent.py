"""Lesson 4: persistent clusters. As many clusters run as fit on the GPU; each computes every `clusters`-th output tile.

A cluster's start (launch, barriers, allocation of tensor memory) is paid once and not per tile. Two things carry over
from one tile to the next:

    stages   They are counted across tiles: `first` stages have been filled before. So only a cluster's first round
             through the stages skips the waits for a free stage.
    read     The first product of the next tile overwrites the accumulator, in both CTAs. So the leader waits until both
             CTAs have read theirs: each waits for its loads from tensor memory (`wait_load_tmem`), then arrives at
             `read`, a cluster barrier on which an arrival counts in both CTAs.

Gains: the start of all tiles but the first. What is left: the warpgroup that copies and multiplies also stores, so the
tensor cores still wait for the whole epilogue. Source: "Writing high-performance matrix multiplication kernels for
Blackwell" in the JAX documentation.
"""

from __future__ import annotations

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from lessons.blackwell.collective_mma import (
    CLUSTER,
    RANK_AXIS,
    load_halves,
    multiply_halves,
    own_part,
)
from lessons.blackwell.tiled_epilogue import epilogue_type, store_epilogue_tiles
from lessons.blackwell.tiling import tiling
from lessons.blackwell.warp_specialized import Memory, split_warps
from lessons.hopper.persistent import for_each_tile
from lessons.hopper.tiling import COMPILER_PARAMS, Tiling, num_ctas
from overlap.primitives.axes import kernel_axis
from overlap.primitives.integers import quotient, remainder
from overlap.primitives.types import BarrierRef, GmemRef, Index, ScratchType, SmemRef, TmemRef

CLUSTER_AXIS = kernel_axis("cluster")


def num_clusters(t: Tiling) -> int:
    """How many clusters to start: as many as run at the same time, and no more than there are tiles."""
    return max(1, min(num_ctas() // CLUSTER, t.m_tiles * t.n_tiles))


def read_barrier(halves: int = 1) -> ScratchType:
    """Scratch type of the barriers `read`, one for each half of the accumulator: both CTAs have read the half."""
    return plgpu.ClusterBarrier(collective_axes=(RANK_AXIS,), num_barriers=halves, orders_tensor_core=True)


def store_and_tell(acc_tmem: TmemRef, out_gmem: GmemRef, epilogue_smem: SmemRef, read: BarrierRef) -> None:
    """Stores the accumulator, and arrives at `read` in both CTAs once this CTA's accumulator may be overwritten."""
    store_epilogue_tiles(acc_tmem, out_gmem, epilogue_smem)
    plgpu.wait_load_tmem()
    plgpu.barrier_arrive(read)


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
    clusters, tiles = num_clusters(t), t.m_tiles * t.n_tiles

    def body(lhs_gmem: GmemRef, rhs_gmem: GmemRef, out_gmem: GmemRef, own: Memory) -> None:
        def compute(index: Index, ordinal: Index) -> None:
            tile, first = (quotient(index, t.n_tiles), remainder(index, t.n_tiles)), ordinal * t.k_steps

            def multiply() -> None:
                @pl.when((ordinal > 0) & (lax.axis_index(RANK_AXIS) == 0))
                def _wait_until_read() -> None:
                    plgpu.barrier_wait(own.read.at[0])

                multiply_halves(own.acc_tmem, own.done, own.pipeline, t, first=first)

            split_warps(lambda: load_halves((lhs_gmem, rhs_gmem), tile, own.pipeline, t, first=first), multiply)
            plgpu.barrier_wait(own.done)
            store_and_tell(own.acc_tmem, own_part(out_gmem, tile, t), own.out_smem, own.read.at[0])

        for_each_tile(lax.axis_index(CLUSTER_AXIS), clusters, tiles, compute)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    return plgpu.kernel(
        body,
        out_type=t.out_type,
        grid=(clusters,),
        grid_names=(CLUSTER_AXIS,),
        cluster=(CLUSTER,),
        cluster_names=(RANK_AXIS,),
        scratch_types=[
            Memory.types(t, stages, epilogue_type(t, epilogue_tile_n, ctas=CLUSTER), ctas=CLUSTER, read=read_barrier())
        ],
        compiler_params=COMPILER_PARAMS,
        kernel_name="blackwell_ladder_persistent",
    )(lhs, rhs)
