"""Rung 0: one CTA per output tile, one warpgroup, one thing at a time.

    for each k:  copy two operand tiles to shared memory  →  wait  →  multiply (wgmma)  →  wait
    then:        accumulator (registers)  →  shared memory  →  output

It shows the four operations that every later rung is made of: a TMA copy that counts on an mbarrier, the wait at that
mbarrier, an asynchronous wgmma whose accumulator stays in registers, and a TMA store of committed shared memory.

Gains: nothing yet. While the copies travel, the tensor cores idle, and the other way round. Only CTAs that happen to
share an SM hide a part of this. Source: "Writing Mosaic GPU kernels with Pallas" in the JAX documentation.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from lessons.hopper.tiling import COMPILER_PARAMS, M_AXIS, N_AXIS, Tiling
from overlap.primitives.types import AccumulatorRef, BarrierRef, GmemRef, SmemRef


def store_tile(values: jax.Array, out_gmem: GmemRef, out_smem: SmemRef) -> None:
    """Stores a tile at once, registers → shared memory → output. The store may still be in flight on return."""
    out_smem[...] = values.astype(out_gmem.dtype)
    plgpu.commit_smem()  # Before this fence, the copy engine may not see what threads wrote.
    plgpu.copy_smem_to_gmem(out_smem, out_gmem)


def matmul(lhs: jax.Array, rhs: jax.Array, *, tile_m: int = 128, tile_n: int = 128) -> jax.Array:
    """lhs[m, k] @ rhs[k, n], float16 or bfloat16; sizes are multiples of the tiles."""
    t = Tiling.of(lhs, rhs, tile_m=tile_m, tile_n=tile_n)

    def body(
        lhs_gmem: GmemRef, rhs_gmem: GmemRef, out_gmem: GmemRef, smem: tuple[SmemRef, ...], full: BarrierRef
    ) -> None:
        lhs_smem, rhs_smem, out_smem = smem
        m_slice = pl.ds(lax.axis_index(M_AXIS) * tile_m, tile_m)
        n_slice = pl.ds(lax.axis_index(N_AXIS) * tile_n, tile_n)

        def accumulate(acc: AccumulatorRef) -> jax.Array:
            @pl.loop(0, t.k_steps)
            def _k_step(k: jax.Array) -> None:
                k_slice = pl.ds(k * t.tile_k, t.tile_k)
                plgpu.copy_gmem_to_smem(lhs_gmem.at[m_slice, k_slice], lhs_smem, full)
                plgpu.copy_gmem_to_smem(rhs_gmem.at[k_slice, n_slice], rhs_smem, full)
                plgpu.barrier_wait(full)
                plgpu.wgmma(acc, lhs_smem, rhs_smem)
                plgpu.wgmma_wait(0)  # The next copies overwrite what this product reads.

            return acc[...]

        values = pl.run_scoped(accumulate, plgpu.WGMMAAccumulatorRef((tile_m, tile_n), jnp.float32))
        store_tile(values, out_gmem.at[m_slice, n_slice], out_smem)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # Shared memory must outlive the store that reads it.

    return plgpu.kernel(
        body,
        out_type=t.out_type,
        grid=(t.m_tiles, t.n_tiles),
        grid_names=(M_AXIS, N_AXIS),
        scratch_types=[
            (t.smem(tile_m, t.tile_k), t.smem(t.tile_k, tile_n), t.smem(tile_m, tile_n)),
            plgpu.Barrier(num_arrivals=2),
        ],
        compiler_params=COMPILER_PARAMS,
        kernel_name="ladder_basic",
    )(lhs, rhs)
