"""Rung 1: a software pipeline. While one product runs, the operands of the next ones are on their way.

`plgpu.emit_pipeline` keeps `stages` pairs of operand tiles in shared memory and runs the body once they have landed:

    stages         how far the copies run ahead: enough of them to cover the latency of memory. Low values leave room
                   for a second CTA on the SM; where there is none, 4 to 6.
    delay_release  how many iterations late a stage is given back. A wgmma is asynchronous: with one left in flight, the
                   tensor cores go from product to product without a gap, but the stage that it still reads must not
                   be refilled. So the delay must be at least the number of products in flight. Too small a delay is a
                   data race that a test on a GPU may miss; the emulator reports it
                   (tests/ops/single_gpu/test_ladders.py).

Gains: most of the time of the copies. What is left: the warpgroup that multiplies also computes addresses and
issues copies. Source: "Software pipelining with Mosaic GPU" in the JAX documentation.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from lessons.hopper.basic import store_tile
from lessons.hopper.tiling import COMPILER_PARAMS, M_AXIS, N_AXIS, Tiling
from overlap.kernels.tma.staging import swizzled
from overlap.primitives.types import AccumulatorRef, GmemRef, Index, SmemRef


def matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    tile_n: int = 128,
    stages: int = 4,
    in_flight: int = 1,
    delay_release: int | None = None,
) -> jax.Array:
    """lhs[m, k] @ rhs[k, n], float16 or bfloat16; sizes are multiples of the tiles.

    `in_flight` products run across iterations; `delay_release` must be at least as large, and is equal by default.
    """
    t = Tiling.of(lhs, rhs, tile_n=tile_n)
    delay = in_flight if delay_release is None else delay_release

    def body(lhs_gmem: GmemRef, rhs_gmem: GmemRef, out_gmem: GmemRef, out_smem: SmemRef) -> None:
        row, column = lax.axis_index(M_AXIS), lax.axis_index(N_AXIS)

        def accumulate(acc: AccumulatorRef) -> jax.Array:
            def multiply(_: tuple[jax.Array], lhs_smem: SmemRef, rhs_smem: SmemRef) -> None:
                plgpu.wgmma(acc, lhs_smem, rhs_smem)
                plgpu.wgmma_wait(in_flight)

            def operand(shape: tuple[int, int], index_map: Callable[[jax.Array], tuple[Index, Index]]) -> pl.BlockSpec:
                return plgpu.BlockSpec(shape, index_map, transforms=swizzled(t.dtype), delay_release=delay)

            plgpu.emit_pipeline(
                multiply,
                grid=(t.k_steps,),
                in_specs=[
                    operand((t.tile_m, t.tile_k), lambda k: (row, k)),
                    operand((t.tile_k, tile_n), lambda k: (k, column)),
                ],
                max_concurrent_steps=stages,
            )(lhs_gmem, rhs_gmem)
            return acc[...]

        values = pl.run_scoped(accumulate, plgpu.WGMMAAccumulatorRef((t.tile_m, tile_n), jnp.float32))
        store_tile(values, out_gmem.at[pl.ds(row * t.tile_m, t.tile_m), pl.ds(column * tile_n, tile_n)], out_smem)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    return plgpu.kernel(
        body,
        out_type=t.out_type,
        grid=(t.m_tiles, t.n_tiles),
        grid_names=(M_AXIS, N_AXIS),
        scratch_types=[t.smem(t.tile_m, tile_n)],
        compiler_params=COMPILER_PARAMS,
        kernel_name="ladder_pipelined",
    )(lhs, rhs)
