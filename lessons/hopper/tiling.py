"""Shared by all rungs of the ladder: a problem cut into tiles, and how a kernel is compiled."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from overlap.kernels.target import current_target
from overlap.kernels.tma.staging import swizzled
from overlap.primitives.axes import kernel_axis
from overlap.primitives.types import ScratchType

COMPUTE_WARPGROUPS = 2  # From rung 2 on.
SWIZZLE_BYTES = 128
# Code is written for a whole warpgroup, and the compiler distributes values over its 128 threads.
COMPILER_PARAMS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup)
# The axes of a grid with a CTA for each output tile. They are objects and not strings, so that they differ from all
# axis names of a user's mesh.
M_AXIS, N_AXIS = kernel_axis("tile row"), kernel_axis("tile column")


@dataclasses.dataclass(frozen=True)
class Tiling:
    """lhs[m, k] @ rhs[k, n] in output tiles of tile_m × tile_n, each a sum of k_steps products over tile_k.

    Raises:
      ValueError: an operand is no float16 or bfloat16 matrix, or a size is no multiple of its tile.
    """

    m: int
    n: int
    k: int
    dtype: jnp.dtype
    tile_m: int
    tile_n: int
    tile_k: int

    @classmethod
    def of(cls, lhs: jax.Array, rhs: jax.Array, *, tile_m: int = 128, tile_n: int, tile_k: int | None = None) -> Tiling:
        """The tiling of two operands, checked.

        By default `tile_m` is 128, 64 rows for each of two warpgroups, and `tile_k` takes 128 bytes, as the swizzle.
        """
        if lhs.ndim != 2 or rhs.ndim != 2 or lhs.shape[1] != rhs.shape[0]:
            raise ValueError(f"`lhs` and `rhs` must be [m, k] and [k, n], got {lhs.shape} and {rhs.shape}")
        if lhs.dtype != rhs.dtype or lhs.dtype not in (jnp.float16, jnp.bfloat16):
            raise ValueError(f"`lhs` and `rhs` must both be float16 or bfloat16, got {lhs.dtype} and {rhs.dtype}")
        (m, k), n = lhs.shape, rhs.shape[1]
        if tile_k is None:
            tile_k = SWIZZLE_BYTES // lhs.dtype.itemsize
        t = cls(m, n, k, lhs.dtype, tile_m, tile_n, tile_k)
        for name, size, tile in (("m", t.m, tile_m), ("n", t.n, tile_n), ("k", t.k, tile_k)):
            if size % tile or not size:
                raise ValueError(f"{name} must be a positive multiple of {tile} on the ladder, got {name}={size}")
        return t

    @property
    def m_tiles(self) -> int:
        """How many rows of output tiles there are."""
        return self.m // self.tile_m

    @property
    def n_tiles(self) -> int:
        """How many columns of output tiles there are."""
        return self.n // self.tile_n

    @property
    def k_steps(self) -> int:
        """How many k steps an output tile takes."""
        return self.k // self.tile_k

    @property
    def wg_tile_m(self) -> int:
        """Rows of an output tile that one compute warpgroup holds."""
        return self.tile_m // COMPUTE_WARPGROUPS

    @property
    def out_type(self) -> jax.ShapeDtypeStruct:
        """The result: [m, n], of the operands' dtype."""
        return jax.ShapeDtypeStruct((self.m, self.n), self.dtype)

    def smem(self, *shape: int) -> ScratchType:
        """The type of a shared-memory buffer in the layout that both TMA and wgmma use."""
        return plgpu.SMEM(shape, self.dtype, transforms=swizzled(self.dtype))


def num_ctas() -> int:
    """How many CTAs run at the same time if each fills an SM; on a CPU, as many as the emulator says."""
    return current_target().num_cores
