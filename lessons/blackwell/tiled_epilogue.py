"""Lesson 2: a tiled epilogue. The accumulator leaves in *epilogue tiles* of some columns, through two small buffers.

    epilogue tile i:   wait until the store of tile i − 2 has read its buffer  →  TMEM → registers → buffer  →  store

While one buffer is being stored, the next one is written. Tensor memory makes this simpler than on Hopper: the columns
of an epilogue tile are loaded when they are needed. So a thread holds `epilogue_tile_n` values at a time, and not the
whole row of the tile.

Gains: a shorter tail, and room for tiles of 128 × 256, which move a quarter fewer bytes per product than 128 × 128.
With a buffer for the whole tile (64 KB) three stages would fit; with two of 128 × 64 (32 KB) four do. What is left:
each CTA loads all operand tiles that it needs by itself.
Source: "Writing high-performance matrix multiplication kernels for Blackwell" in the JAX documentation; lesson 3 of
Hopper's ladder.
"""

from __future__ import annotations

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from lessons.blackwell.tiling import tiling
from lessons.blackwell.warp_specialized import tile_per_cta
from lessons.hopper.tiled_epilogue import BUFFERS
from lessons.hopper.tiling import SWIZZLE_BYTES, Tiling
from overlap.primitives.types import GmemRef, ScratchType, SmemRef, TmemRef


def epilogue_type(t: Tiling, epilogue_tile_n: int, *, ctas: int = 1) -> ScratchType:
    """Scratch type of a CTA's epilogue buffers: [buffers, rows, epilogue_tile_n]."""
    if epilogue_tile_n < 1 or t.tile_n % epilogue_tile_n or epilogue_tile_n % (SWIZZLE_BYTES // t.dtype.itemsize):
        raise ValueError(
            f"`epilogue_tile_n` must be a multiple of 64 that divides tile_n={t.tile_n}, got {epilogue_tile_n}"
        )
    return t.smem(BUFFERS, t.tile_m // ctas, epilogue_tile_n)


def store_epilogue_tiles(acc_tmem: TmemRef, out_gmem: GmemRef, epilogue_smem: SmemRef) -> None:
    """Stores the accumulator, one epilogue tile after the other; up to `BUFFERS` stores stay in flight.

    Each goes from tensor memory through registers and shared memory to the output.
    """
    epilogue_tile_n = epilogue_smem.shape[-1]
    for i in range(acc_tmem.shape[1] // epilogue_tile_n):
        columns = slice(i * epilogue_tile_n, (i + 1) * epilogue_tile_n)
        buffer_smem = epilogue_smem.at[i % BUFFERS]
        # Invariant: all stores but the last BUFFERS − 1 have read their buffers; so has the last store of this buffer.
        plgpu.wait_smem_to_gmem(BUFFERS - 1, wait_read_only=True)
        buffer_smem[...] = plgpu.async_load_tmem(acc_tmem.at[:, columns]).astype(out_gmem.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(buffer_smem, out_gmem.at[:, columns])


def matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    tile_n: int = 256,
    tile_k: int = 64,
    stages: int = 4,
    epilogue_tile_n: int = 64,
) -> jax.Array:
    """lhs[m, k] @ rhs[k, n], float16 or bfloat16; sizes are multiples of the tiles."""
    t = tiling(lhs, rhs, tile_n=tile_n, tile_k=tile_k, stages=stages)
    return tile_per_cta(
        t, stages, epilogue_type(t, epilogue_tile_n), store_epilogue_tiles, "blackwell_ladder_tiled_epilogue"
    )(lhs, rhs)
