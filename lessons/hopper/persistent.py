"""Rung 4: persistent CTAs. There are as many CTAs as SMs, and each computes every `num_ctas`-th output tile.

The start of a CTA is paid once and not per tile. A larger gain: the roles count stages across tiles, so the memory
warpgroup begins to load the next tile while the compute warpgroups still store this one:

    memory    | load tile 0 . . . . . | load tile 1 . . . . . |
    compute       | multiply tile 0 . . . . | store | multiply tile 1 . . . .

The roles of rung 2 get one more argument, `first`: how many stages earlier tiles have used. Only a CTA's first round
through the stages skips the waits for a free stage, not the first round of each tile.

Gains: the copies no longer pause during the epilogue, and no wave of CTAs ends with a drained pipeline. Measured:
0.93 → 0.97 of cuBLAS. What is left: every CTA loads both operands through L2 by itself, and the order of the tiles does
not depend on what is in L2 already.
Source: CUTLASS's persistent cooperative kernels; the Blackwell matmul guide in the JAX documentation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from lessons.hopper.tiled_epilogue import epilogue_type, store_epilogue_tiles
from lessons.hopper.tiling import COMPILER_PARAMS, Tiling, num_ctas
from lessons.hopper.warp_specialized import THREADS, Pipeline, accumulate_tile, load_tiles, split_roles
from overlap.primitives.axes import kernel_axis
from overlap.primitives.integers import quotient, remainder
from overlap.primitives.types import GmemRef, Index, SmemRef

CTA_AXIS = kernel_axis("cta")


def for_each_tile(worker: Index, workers: int, tiles: int, visit: Callable[[Index, Index], None]) -> None:
    """Calls `visit(index, ordinal)` for every `workers`-th tile from `worker` on; `ordinal` counts them from 0."""

    @pl.loop(0, quotient(tiles - 1 - worker, workers) + 1)
    def _tile(ordinal: jax.Array) -> None:
        visit(worker + ordinal * workers, ordinal)


def for_each_own_tile(t: Tiling, ctas: int, visit: Callable[[Index, Index, Index], None]) -> None:
    """Calls `visit(row, column, first)` for each tile of this CTA; `first`: how many k steps it has done before."""

    def at(index: Index, ordinal: Index) -> None:
        visit(quotient(index, t.n_tiles), remainder(index, t.n_tiles), ordinal * t.k_steps)

    for_each_tile(lax.axis_index(CTA_AXIS), ctas, t.m_tiles * t.n_tiles, at)


def matmul(
    lhs: jax.Array, rhs: jax.Array, *, tile_n: int = 256, stages: int = 4, epilogue_tile_n: int = 64
) -> jax.Array:
    """lhs[m, k] @ rhs[k, n], float16 or bfloat16; sizes are multiples of the tiles."""
    t = Tiling.of(lhs, rhs, tile_n=tile_n)
    ctas = min(num_ctas(), t.m_tiles * t.n_tiles)

    def body(
        lhs_gmem: GmemRef, rhs_gmem: GmemRef, out_gmem: GmemRef, pipeline: Pipeline, epilogue_smem: SmemRef
    ) -> None:
        mine = functools.partial(for_each_own_tile, t, ctas)

        def load(row: Index, column: Index, first: Index) -> None:
            load_tiles((lhs_gmem, rhs_gmem), (row, column), pipeline, t, first=first)

        def compute(warpgroup: Index) -> None:
            @mine
            def _tile(row: Index, column: Index, first: Index) -> None:
                values = accumulate_tile(pl.ds(warpgroup * t.wg_tile_m, t.wg_tile_m), pipeline, t, first=first)
                rows = pl.ds(row * t.tile_m + warpgroup * t.wg_tile_m, t.wg_tile_m)
                store_epilogue_tiles(
                    values, out_gmem.at[rows, pl.ds(column * tile_n, tile_n)], epilogue_smem.at[warpgroup]
                )

            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        split_roles(lambda: mine(load), compute)

    return plgpu.kernel(
        body,
        out_type=t.out_type,
        grid=(ctas,),
        grid_names=(CTA_AXIS,),
        **THREADS,
        scratch_types=[Pipeline.types(t, stages), epilogue_type(t, epilogue_tile_n)],
        compiler_params=COMPILER_PARAMS,
        kernel_name="ladder_persistent",
    )(lhs, rhs)
