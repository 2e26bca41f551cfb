"""Rung 5: cluster multicast. Two CTAs, one above the other, share the right operand: each loads half of it for both.

A cluster is a group of CTAs on neighbouring SMs that can write each other's shared memory. Here a cluster is two CTAs
with adjacent tile rows and the same tile column. A copy with `collective_axes` is *multicast*: each of the two CTAs
issues it and fetches one half of the slice. Both halves land in both CTAs, and count on each CTA's own `full` barrier.

Two rules follow from multicast:

    refill   A CTA's copy overwrites the stage of the other CTA as well. So a stage is free when the compute warpgroups
             of *both* CTAs have given it back: `consumed` is a cluster barrier, on which an arrival counts in both.
    leave    A CTA must not end as long as the other CTA may write to its shared memory. So the memory warpgroup waits
             at the end until both CTAs have given back the last stages.

Gains: for a cluster tile of 256 × 256, 32 KB of the right operand come through L2 once instead of twice per k step: a
third less traffic in all. Measured: 0.97 → 0.99 of cuBLAS, and much more where each row lies across two cache
lines: 4097 × 4104 × 4104 by `overlap.matmul`, 286 → 224 µs. Nothing here crosses NVLink. Source: PTX ISA,
cp.async.bulk.tensor with .multicast::cluster; CUTLASS's cluster shapes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from lessons.hopper.persistent import for_each_tile
from lessons.hopper.tiled_epilogue import epilogue_type, store_epilogue_tiles
from lessons.hopper.tiling import COMPILER_PARAMS, COMPUTE_WARPGROUPS, Tiling, num_ctas
from lessons.hopper.warp_specialized import THREADS, Pipeline, accumulate_tile, load_tiles, split_roles
from overlap.primitives.axes import kernel_axis
from overlap.primitives.integers import quotient, remainder
from overlap.primitives.types import GmemRef, Index, SmemRef

CLUSTER = 2
CLUSTER_AXIS, RANK_AXIS = kernel_axis("cluster"), kernel_axis("rank in the cluster")  # The rank says which tile row.


def wait_until_peers_are_done(filled: Index, pipeline: Pipeline) -> None:
    """Waits until both CTAs have given back all stages that were filled: the end of the memory warpgroup's work."""

    @pl.loop(filled, filled + pipeline.stages)
    def _stage(fill: jax.Array) -> None:
        @pl.when(fill >= pipeline.stages)
        def _wait() -> None:
            plgpu.barrier_wait(pipeline.consumed.at[remainder(fill, pipeline.stages)])


def for_each_own_tile(
    t: Tiling,
    mine: tuple[Index, Index],
    counts: tuple[int, int],
    tile_at: Callable[[Index], tuple[Index, Index]],
    visit: Callable[[Index, Index, Index], None],
) -> None:
    """Calls `visit(row, column, first)` for each tile of this CTA; `first`: how many k steps it has done before.

    Args:
      t: sizes.
      mine: the index of this CTA's cluster, and the CTA's rank in it.
      counts: how many clusters and how many pairs of tiles there are.
      tile_at: as in `clustered`.
      visit: called for each tile.
    """
    (cluster, rank), (clusters, pairs) = mine, counts

    def at(index: Index, ordinal: Index) -> None:
        pair_row, column = tile_at(index)
        visit(pair_row * CLUSTER + rank, column, ordinal * t.k_steps)

    for_each_tile(cluster, clusters, pairs, at)


def clustered(
    t: Tiling,
    *,
    stages: int,
    name: str,
    epilogue_tile_n: int = 64,
    tile_at: Callable[[Index], tuple[Index, Index]] | None = None,
    activation: Callable[[jax.Array], jax.Array] | None = None,
) -> Callable[..., jax.Array]:
    """Makes the kernel of this rung, with parameters for what the next two rungs change.

    Args:
      t: sizes; `m_tiles` must be even, since a cluster computes a pair of tiles.
      stages: stages of the pipeline.
      name: the name of the kernel.
      epilogue_tile_n: columns per store.
      tile_at: a function from the index of a pair of tiles to (row of pairs, column of tiles); None: row by row
        (rung 6 changes this).
      activation: applied to the accumulator before it is stored (the templated epilogue).

    Raises:
      ValueError: the rows of output tiles cannot be paired.
    """
    if t.m_tiles % CLUSTER:
        raise ValueError(f"m must be a multiple of {CLUSTER * t.tile_m}, a cluster's rows, got m={t.m}")
    pairs = t.m_tiles // CLUSTER * t.n_tiles
    clusters = max(1, min(num_ctas() // CLUSTER, pairs))
    tile_at = tile_at or (lambda index: (quotient(index, t.n_tiles), remainder(index, t.n_tiles)))

    def body(
        lhs_gmem: GmemRef, rhs_gmem: GmemRef, out_gmem: GmemRef, pipeline: Pipeline, epilogue_smem: SmemRef
    ) -> None:
        cluster, rank = lax.axis_index(CLUSTER_AXIS), lax.axis_index(RANK_AXIS)

        mine = functools.partial(for_each_own_tile, t, (cluster, rank), (clusters, pairs), tile_at)

        def memory() -> None:
            @mine
            def _tile(row: Index, column: Index, first: Index) -> None:
                load_tiles((lhs_gmem, rhs_gmem), (row, column), pipeline, t, first=first, shared_by=RANK_AXIS)

            my_tiles = quotient(pairs - 1 - cluster, clusters) + 1
            wait_until_peers_are_done(my_tiles * t.k_steps, pipeline)

        def compute(warpgroup: Index) -> None:
            @mine
            def _tile(row: Index, column: Index, first: Index) -> None:
                values = accumulate_tile(pl.ds(warpgroup * t.wg_tile_m, t.wg_tile_m), pipeline, t, first=first)
                values = values if activation is None else activation(values)
                rows = pl.ds(row * t.tile_m + warpgroup * t.wg_tile_m, t.wg_tile_m)
                store_epilogue_tiles(
                    values, out_gmem.at[rows, pl.ds(column * t.tile_n, t.tile_n)], epilogue_smem.at[warpgroup]
                )

            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        split_roles(memory, compute)

    consumed = plgpu.ClusterBarrier(collective_axes=(RANK_AXIS,), num_arrivals=COMPUTE_WARPGROUPS, num_barriers=stages)
    return plgpu.kernel(
        body,
        out_type=t.out_type,
        grid=(clusters,),
        grid_names=(CLUSTER_AXIS,),
        cluster=(CLUSTER,),
        cluster_names=(RANK_AXIS,),
        **THREADS,
        scratch_types=[Pipeline.types(t, stages, consumed), epilogue_type(t, epilogue_tile_n)],
        compiler_params=COMPILER_PARAMS,
        kernel_name=name,
    )


def matmul(
    lhs: jax.Array, rhs: jax.Array, *, tile_n: int = 256, stages: int = 4, epilogue_tile_n: int = 64
) -> jax.Array:
    """lhs[m, k] @ rhs[k, n], float16 or bfloat16; sizes are multiples of the tiles, m of twice its tile."""
    t = Tiling.of(lhs, rhs, tile_n=tile_n)
    return clustered(t, stages=stages, epilogue_tile_n=epilogue_tile_n, name="ladder_cluster_multicast")(lhs, rhs)
