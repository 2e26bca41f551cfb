"""Lesson 0: one CTA per output tile, one warpgroup, an accumulator in tensor memory.

Unlike on Hopper, the product (`tcgen05_mma`) is issued by one thread and adds to an accumulator in *tensor memory*
(TMEM: 128 lanes × 512 columns of 32 bits per SM). So the accumulator takes no registers until the epilogue, and
products queue up one behind the other without a wait between them.

    pipeline     copy the operand tiles of the next k steps to shared memory while the tensor cores work
    each k step  issue a product that arrives at consumed[k % 2] when it is done; wait for the product before it
    then         accumulator (TMEM)  →  registers  →  shared memory  →  output

One product is in flight across k steps, so its stage must not be refilled in the next k step: `delay_release=1`. This
needs two barriers. With one barrier, the waiting threads could not tell apart the arrivals of two successive products.

Gains: nothing yet; every later lesson is compared with this one. What is left: the warpgroup that issues products also
issues copies and waits for both. Source: "Writing high-performance matrix multiplication kernels for Blackwell" in the
JAX documentation.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from lessons.blackwell.tiling import accumulator_type, tiling
from lessons.hopper.basic import store_tile
from lessons.hopper.tiling import COMPILER_PARAMS, M_AXIS, N_AXIS
from overlap.kernels.tma.staging import swizzled
from overlap.primitives.integers import remainder
from overlap.primitives.types import BarrierRef, GmemRef, Index, SmemRef, TmemRef


def matmul(lhs: jax.Array, rhs: jax.Array, *, tile_n: int = 128, tile_k: int = 64, stages: int = 4) -> jax.Array:
    """lhs[m, k] @ rhs[k, n], float16 or bfloat16; sizes are multiples of the tiles."""
    t = tiling(lhs, rhs, tile_n=tile_n, tile_k=tile_k, stages=stages)

    def body(
        lhs_gmem: GmemRef,
        rhs_gmem: GmemRef,
        out_gmem: GmemRef,
        acc_tmem: TmemRef,
        out_smem: SmemRef,
        consumed: BarrierRef,
    ) -> None:
        row, column = lax.axis_index(M_AXIS), lax.axis_index(N_AXIS)

        def multiply(indices: tuple[jax.Array], lhs_smem: SmemRef, rhs_smem: SmemRef) -> None:
            (k,) = indices
            plgpu.tcgen05_mma(acc_tmem, lhs_smem, rhs_smem, consumed.at[remainder(k, 2)], accumulate=k > 0)

            @pl.when(k > 0)
            def _wait_for_previous() -> None:
                plgpu.barrier_wait(consumed.at[remainder(k + 1, 2)])

        def operand(shape: tuple[int, int], index_map: Callable[[jax.Array], tuple[Index, Index]]) -> pl.BlockSpec:
            return plgpu.BlockSpec(shape, index_map, transforms=swizzled(t.dtype), delay_release=1)

        plgpu.emit_pipeline(
            multiply,
            grid=(t.k_steps,),
            in_specs=[
                operand((t.tile_m, tile_k), lambda k: (row, k)),
                operand((tile_k, tile_n), lambda k: (k, column)),
            ],
            max_concurrent_steps=stages,
        )(lhs_gmem, rhs_gmem)
        plgpu.barrier_wait(consumed.at[(t.k_steps - 1) % 2])
        out_slice = (pl.ds(row * t.tile_m, t.tile_m), pl.ds(column * tile_n, tile_n))
        store_tile(plgpu.async_load_tmem(acc_tmem), out_gmem.at[out_slice], out_smem)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # Shared memory must outlive the store that reads it.

    return plgpu.kernel(
        body,
        out_type=t.out_type,
        grid=(t.m_tiles, t.n_tiles),
        grid_names=(M_AXIS, N_AXIS),
        scratch_types=[
            accumulator_type(t),
            t.smem(t.tile_m, tile_n),
            plgpu.Barrier(num_barriers=2, orders_tensor_core=True),
        ],
        compiler_params=COMPILER_PARAMS,
        kernel_name="blackwell_ladder_basic",
    )(lhs, rhs)
