"""Rung 3: a tiled epilogue. The accumulator leaves in *epilogue tiles* of some columns, through two small buffers.

    epilogue tile i:   wait until the store of tile i − 2 has read its buffer  →  write the buffer  →  commit  →  store

While one buffer is being stored, the next one is written. The buffers of a warpgroup shrink from the whole 64 × 256
tile (32 KB) to two of 64 × 64 (16 KB).

Gains: a shorter tail, and 32 KB of shared memory per CTA, which become a fourth stage of operands. Measured: nothing
yet (0.93 → 0.93 of cuBLAS); the next rung needs the room. What is left: the tensor cores still wait for the whole tail,
and a new CTA pays its start (barriers, the first copies) for every tile.
Source: the epilogue of CUTLASS's sm90 kernels; the Blackwell matmul guide in the JAX documentation.
"""

from __future__ import annotations

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from lessons.hopper.tiling import COMPUTE_WARPGROUPS, Tiling
from lessons.hopper.warp_specialized import tile_per_cta
from overlap.primitives.types import GmemRef, ScratchType, SmemRef

BUFFERS = 2


def epilogue_type(t: Tiling, epilogue_tile_n: int) -> ScratchType:
    """Scratch type of the epilogue buffers of both compute warpgroups: [warpgroups, buffers, rows, epilogue_tile_n]."""
    if t.tile_n % (BUFFERS * epilogue_tile_n):
        raise ValueError(f"`epilogue_tile_n` must divide half of tile_n={t.tile_n}, got {epilogue_tile_n}")
    return t.smem(COMPUTE_WARPGROUPS, BUFFERS, t.wg_tile_m, epilogue_tile_n)


def store_epilogue_tiles(values: jax.Array, out_gmem: GmemRef, epilogue_smem: SmemRef) -> None:
    """Stores values, an epilogue tile at a time: registers → shared memory → output.

    Up to `BUFFERS` stores are still in flight on return.
    """
    epilogue_tile_n = epilogue_smem.shape[-1]
    for i in range(values.shape[1] // epilogue_tile_n):
        columns = slice(i * epilogue_tile_n, (i + 1) * epilogue_tile_n)
        buffer_smem = epilogue_smem.at[i % BUFFERS]
        # After this wait, the previous store from this buffer has read it, so the buffer may be overwritten.
        plgpu.wait_smem_to_gmem(BUFFERS - 1, wait_read_only=True)
        buffer_smem[...] = values[:, columns].astype(out_gmem.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(buffer_smem, out_gmem.at[:, columns])


def matmul(
    lhs: jax.Array, rhs: jax.Array, *, tile_n: int = 256, stages: int = 4, epilogue_tile_n: int = 64
) -> jax.Array:
    """lhs[m, k] @ rhs[k, n], float16 or bfloat16; sizes are multiples of the tiles."""
    t = Tiling.of(lhs, rhs, tile_n=tile_n)
    return tile_per_cta(t, stages, epilogue_type(t, epilogue_tile_n), store_epilogue_tiles, "ladder_tiled_epilogue")(
        lhs, rhs
    )
