"""Rung 4: persistent CTAs. As many as there are SMs, each computes every `num_ctas`-th output tile.

A CTA's start is paid once and not per tile. And what matters more: the roles count slots across tiles, so the memory
warpgroup begins the next tile while the compute warpgroups still store this one:

    memory    | load tile 0 . . . . . | load tile 1 . . . . . |
    compute       | multiply tile 0 . . . . | store | multiply tile 1 . . . .

`first`, the number of slots that earlier tiles have used, is all that the loop adds to rung 2's roles. The waits for a
free slot are skipped in the CTA's first round through the slots only, and not in each tile's.

Gains: the epilogue no longer starves the copies, and no wave of CTAs ends with a drained pipeline. Measured: 0.93 →
0.97 of cuBLAS. What is left: both operands come from L2 for every CTA, and the order of the tiles pays no heed to what
is there already.
Source: CUTLASS's persistent cooperative kernels; the Blackwell matmul guide in the JAX documentation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from overlap.kernels.ladder.tiled_epilogue import chunk_type, store_chunks
from overlap.kernels.ladder.tiling import COMPILER_PARAMS, Tiling, num_ctas
from overlap.kernels.ladder.warp_specialized import THREADS, Pipeline, accumulate_tile, load_tiles, split_roles
from overlap.primitives.axes import kernel_axis
from overlap.primitives.integers import quotient, remainder

CTA_AXIS = kernel_axis("cta")


def for_each_tile(worker: Any, workers: int, tiles: int, visit: Callable[[Any, Any], None]) -> None:
    """Calls `visit(index, ordinal)` for every `workers`-th tile from `worker` on; `ordinal` counts them from 0."""

    @pl.loop(0, quotient(tiles - 1 - worker, workers) + 1)
    def _tile(ordinal: Any) -> None:
        visit(worker + ordinal * workers, ordinal)


def for_each_own_tile(t: Tiling, ctas: int, visit: Callable[[Any, Any, Any], None]) -> None:
    """Calls `visit(row, column, first)` for each tile of this CTA; `first`: k steps that it has done before."""

    def at(index: Any, ordinal: Any) -> None:
        visit(quotient(index, t.n_tiles), remainder(index, t.n_tiles), ordinal * t.k_steps)

    for_each_tile(lax.axis_index(CTA_AXIS), ctas, t.m_tiles * t.n_tiles, at)


def matmul(lhs: jax.Array, rhs: jax.Array, *, tile_n: int = 256, stages: int = 4, chunk_n: int = 64) -> jax.Array:
    """lhs[m, k] @ rhs[k, n], float16 or bfloat16; sizes are multiples of the tiles."""
    t = Tiling.of(lhs, rhs, tile_n=tile_n)
    ctas = min(num_ctas(), t.m_tiles * t.n_tiles)

    def body(lhs_gmem: Any, rhs_gmem: Any, out_gmem: Any, pipeline: Pipeline, chunks_smem: Any) -> None:
        mine = functools.partial(for_each_own_tile, t, ctas)

        def load(row: Any, column: Any, first: Any) -> None:
            load_tiles(lhs_gmem, rhs_gmem, row, column, pipeline, t, first=first)

        def compute(warpgroup: Any) -> None:
            @mine
            def _tile(row: Any, column: Any, first: Any) -> None:
                values = accumulate_tile(pl.ds(warpgroup * t.wg_tile_m, t.wg_tile_m), pipeline, t, first=first)
                rows = pl.ds(row * t.tile_m + warpgroup * t.wg_tile_m, t.wg_tile_m)
                store_chunks(values, out_gmem.at[rows, pl.ds(column * tile_n, tile_n)], chunks_smem.at[warpgroup])

            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        split_roles(lambda: mine(load), compute)

    return plgpu.kernel(
        body,
        out_type=t.out_type,
        grid=(ctas,),
        grid_names=(CTA_AXIS,),
        **THREADS,
        scratch_types=[Pipeline.types(t, stages), chunk_type(t, chunk_n)],
        compiler_params=COMPILER_PARAMS,
        kernel_name="ladder_persistent",
    )(lhs, rhs)
