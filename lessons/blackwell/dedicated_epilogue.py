"""Lesson 5: a warpgroup for the epilogue, and an accumulator in two halves of tensor memory.

A cluster's tile takes 256 of the 512 columns of tensor memory. With the other 256 as a second accumulator, the first
warpgroup multiplies tile i + 1 while the second one stores tile i:

    warpgroup 0   | tile 0 → half 0 . . | tile 1 → half 1 . . | tile 2 → half 0 . . |
    warpgroup 1                         | store half 0 |      | store half 1 |      | store half 0 |

Each of the two barriers of lesson 4 becomes a pair, with one barrier for each half:

    done[half]   the half holds the sum of its tile           (warpgroup 1 waits)
    read[half]   both CTAs have read the half                 (the leader's MMA warp waits, from the third tile on)

One `read` for both halves would not do: the epilogue may arrive for tile i + 1 before the MMA warp waits for tile i,
and to a waiter a barrier that is two phases ahead looks as if it had not advanced at all.

Gains: the tensor cores work through all tiles of a cluster without a pause, as long as an epilogue takes no longer than
the products of a tile. What is left: the order of the tiles does not depend on what is in L2. Source: "Writing
high-performance matrix multiplication kernels for Blackwell" in the JAX documentation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

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
from lessons.blackwell.persistent import CLUSTER_AXIS, num_clusters, read_barrier, store_and_tell
from lessons.blackwell.tiled_epilogue import epilogue_type
from lessons.blackwell.tiling import tiling
from lessons.blackwell.warp_specialized import Memory, split_warps
from lessons.hopper.persistent import for_each_tile
from lessons.hopper.tiling import COMPILER_PARAMS, Tiling
from overlap.primitives.axes import kernel_axis
from overlap.primitives.integers import quotient, remainder
from overlap.primitives.types import GmemRef, Index, TmemRef

HALVES = 2
THREAD_AXIS = kernel_axis("warpgroup")
PRODUCT_WARPGROUP, EPILOGUE_WARPGROUP = 0, 1


def double_buffered(
    t: Tiling,
    *,
    stages: int,
    epilogue_tile_n: int,
    name: str,
    tile_at: Callable[[Index], tuple[Index, Index]] | None = None,
) -> Callable[..., jax.Array]:
    """Makes the kernel; `tile_at` maps an index to (tile row, tile column), row by row if None (see lesson 6)."""
    clusters, tiles = num_clusters(t), t.m_tiles * t.n_tiles
    tile_at = tile_at or (lambda index: (quotient(index, t.n_tiles), remainder(index, t.n_tiles)))

    def body(lhs_gmem: GmemRef, rhs_gmem: GmemRef, out_gmem: GmemRef, own: Memory) -> None:
        warpgroup = lax.axis_index(THREAD_AXIS)
        for_each_own_tile = functools.partial(for_each_tile, lax.axis_index(CLUSTER_AXIS), clusters, tiles)

        def accumulator(half: Index) -> TmemRef:
            return own.acc_tmem.at[:, pl.ds(half * t.tile_n, t.tile_n)]

        def load(index: Index, ordinal: Index) -> None:
            load_halves((lhs_gmem, rhs_gmem), tile_at(index), own.pipeline, t, first=ordinal * t.k_steps)

        def multiply(index: Index, ordinal: Index) -> None:
            half = remainder(ordinal, HALVES)

            @pl.when((ordinal >= HALVES) & (lax.axis_index(RANK_AXIS) == 0))
            def _wait_until_read() -> None:
                plgpu.barrier_wait(own.read.at[half])

            multiply_halves(accumulator(half), own.done.at[half], own.pipeline, t, first=ordinal * t.k_steps)

        def store(index: Index, ordinal: Index) -> None:
            half = remainder(ordinal, HALVES)
            plgpu.barrier_wait(own.done.at[half])
            store_and_tell(accumulator(half), own_part(out_gmem, tile_at(index), t), own.out_smem, own.read.at[half])

        @pl.when(warpgroup == PRODUCT_WARPGROUP)
        def _products() -> None:
            split_warps(lambda: for_each_own_tile(load), lambda: for_each_own_tile(multiply))

        @pl.when(warpgroup == EPILOGUE_WARPGROUP)
        def _epilogue() -> None:
            for_each_own_tile(store)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    return plgpu.kernel(
        body,
        out_type=t.out_type,
        grid=(clusters,),
        grid_names=(CLUSTER_AXIS,),
        cluster=(CLUSTER,),
        cluster_names=(RANK_AXIS,),
        num_threads=2,
        thread_name=THREAD_AXIS,
        scratch_types=[
            Memory.types(
                t,
                stages,
                epilogue_type(t, epilogue_tile_n, ctas=CLUSTER),
                ctas=CLUSTER,
                halves=HALVES,
                read=read_barrier(HALVES),
            )
        ],
        compiler_params=COMPILER_PARAMS,
        kernel_name=name,
    )


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
    kernel = double_buffered(
        t, stages=stages, epilogue_tile_n=epilogue_tile_n, name="blackwell_ladder_dedicated_epilogue"
    )
    return kernel(lhs, rhs)
