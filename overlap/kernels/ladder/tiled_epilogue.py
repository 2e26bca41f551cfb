"""Rung 3: a tiled epilogue. The accumulator leaves in chunks of columns, through two small buffers.

    chunk i:   wait until the store of chunk i − 2 has read its buffer  →  write the buffer  →  commit  →  store

While one buffer is being stored the next is written, and a warpgroup's buffers shrink from the whole 64 × 256 tile
(32 KB) to two of 64 × 64 (16 KB).

Gains: a shorter tail, and 32 KB of shared memory per CTA, which become a fourth stage of operands. Measured: nothing
yet (0.93 → 0.93 of cuBLAS); the next rung needs the room. What is left: the tensor cores still wait for the whole tail,
and a new CTA pays its start (barriers, the first copies) for every tile.
Source: the epilogue of CUTLASS's sm90 kernels; the Blackwell matmul guide in the JAX documentation.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from overlap.kernels.ladder.tiling import COMPUTE_WARPGROUPS, Tiling
from overlap.kernels.ladder.warp_specialized import tile_per_cta

BUFFERS = 2


def chunk_type(t: Tiling, chunk_n: int) -> Any:
    """Scratch type of the epilogue's buffers, for both compute warpgroups."""
    if t.tile_n % (BUFFERS * chunk_n):
        raise ValueError(f"`chunk_n` must divide half of tile_n={t.tile_n}, got {chunk_n}")
    return t.smem(COMPUTE_WARPGROUPS, BUFFERS, t.wg_tile_m, chunk_n)


def store_chunks(values: jax.Array, out_gmem: Any, chunks_smem: Any) -> None:
    """Registers → shared memory → output, a buffer at a time; leaves up to `BUFFERS` stores in flight."""
    chunk_n = chunks_smem.shape[-1]
    for i in range(values.shape[1] // chunk_n):
        columns = slice(i * chunk_n, (i + 1) * chunk_n)
        chunk_smem = chunks_smem.at[i % BUFFERS]
        # Invariant: all stores but the last BUFFERS − 1 have read their buffer, this one's last among them.
        plgpu.wait_smem_to_gmem(BUFFERS - 1, wait_read_only=True)
        chunk_smem[...] = values[:, columns].astype(out_gmem.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(chunk_smem, out_gmem.at[:, columns])


def matmul(lhs: jax.Array, rhs: jax.Array, *, tile_n: int = 256, stages: int = 4, chunk_n: int = 64) -> jax.Array:
    """lhs[m, k] @ rhs[k, n], float16 or bfloat16; sizes are multiples of the tiles."""
    t = Tiling.of(lhs, rhs, tile_n=tile_n)
    return tile_per_cta(t, stages, chunk_type(t, chunk_n), store_chunks, "ladder_tiled_epilogue")(lhs, rhs)
