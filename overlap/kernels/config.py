"""What can be tuned in a matmul: tile sizes and buffers, with their checks and their shared-memory arithmetic."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp

from overlap.kernels.target import Target

COMPUTE_WARPGROUPS = 2
SUPPORTED_DTYPES = (jnp.dtype(jnp.float16), jnp.dtype(jnp.bfloat16))
BARRIER_BYTES = 8
# Registers hand out 255 per thread; what is not accumulator holds addresses, counters and the epilogue's temporaries.
MAX_ACCUMULATOR_REGISTERS = 200
TMA_BOX_LIMIT = 256
SWIZZLE_BYTES = 128
WGMMA_M = 64
# Where the compiler may round up: it aligns each buffer to at most this.
RESERVED_BYTES = 1024


@dataclasses.dataclass(frozen=True)
class Config:
    """The tunable sizes of a (fused) matmul.

    Attributes:
      tile_m: rows of the output tile of one CTA, shared by two warpgroups (so 128 is 2 × 64).
      tile_n: columns of the output tile of one CTA.
      tile_k: depth of one stage, in elements; its bytes must be 128, the widest swizzle.
      stages: operand tiles in flight.
      epilogue_tile_n: columns that a warpgroup stores at a time.
      epilogue_slots: shared-memory buffers per warpgroup for that, so that one is filled while another is stored.
      order_minor: which dimension of the tile grid runs fastest, "m" or "n".
      order_width: tiles per band of the order (`TileOrder`).
      chunk_bytes: the most that the communicator of one CTA pulls in one copy (fused operations only).
      chunk_slots: how many such copies are in flight per CTA (fused operations only).
    """

    tile_m: int = 128
    tile_n: int = 256
    tile_k: int = 64
    stages: int = 4
    epilogue_tile_n: int = 64
    epilogue_slots: int = 1
    order_minor: Literal["m", "n"] = "m"
    order_width: int = 8
    chunk_bytes: int = 8192
    chunk_slots: int = 2

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "order_minor":
                if value not in ("m", "n"):
                    raise ValueError(f"`order_minor` must be 'm' or 'n', got {value!r}")
            elif not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"`{field.name}` must be an int of at least 1, got {value!r}")

    def smem_bytes(self, dtype: Any, out_dtype: Any, *, pulls: bool) -> int:
        """Shared memory of one CTA in bytes, barriers included. `pulls`: with the communicator's chunk buffers."""
        operand_bytes = self.stages * (self.tile_m + self.tile_n) * self.tile_k * jnp.dtype(dtype).itemsize
        epilogue_bytes = self.epilogue_slots * self.tile_m * self.epilogue_tile_n * jnp.dtype(out_dtype).itemsize
        chunk_bytes = self.chunk_slots * self.chunk_bytes if pulls else 0
        barriers = 2 * self.stages + (self.chunk_slots if pulls else 0)
        return operand_bytes + epilogue_bytes + chunk_bytes + barriers * BARRIER_BYTES

    def check(
        self, *, m: int, n: int, k: int, dtype: Any, out_dtype: Any, target: Target, pulls: bool, m_name: str = "m"
    ) -> None:
        """The one predicate that says whether the Hopper mainloop can run this (calls, chooser and tuner share it).

        Args:
          m: rows of the left operand (of one shard, in a collective).
          n: columns of the right operand.
          k: the contraction dimension.
          dtype: of both operands.
          out_dtype: of the result.
          target: the device.
          pulls: whether a communicator needs its buffers as well.
          m_name: what the caller calls `m`.

        Raises:
          ValueError: the configuration contradicts itself or exceeds the device.
          NotImplementedError: the problem is fine and this kernel cannot serve it.
        """
        target.require_hopper()
        dtype, out_dtype = jnp.dtype(dtype), jnp.dtype(out_dtype)
        if dtype not in SUPPORTED_DTYPES:
            raise NotImplementedError(
                f"the fused kernel multiplies float16 or bfloat16, got {dtype.name} operands: cast them, or use "
                'implementation="xla"'
            )
        if out_dtype not in SUPPORTED_DTYPES:
            raise NotImplementedError(
                f"the fused kernel writes float16 or bfloat16, got `preferred_element_type`={out_dtype.name}: leave it "
                'out, or use implementation="xla"'
            )
        self._check_itself(dtype, out_dtype, target, pulls)
        for name, size, tile_name, tile in (
            (m_name, m, "tile_m", self.tile_m),
            ("n", n, "tile_n", self.tile_n),
            ("k", k, "tile_k", self.tile_k),
        ):
            if size == 0 or size % tile:
                raise NotImplementedError(
                    f"the fused kernel needs {name} to be a positive multiple of `{tile_name}`, got {name}={size} and "
                    f"{tile_name}={tile}: pad, pass a `config` with a {tile_name} that divides it, or use "
                    'implementation="xla"'
                )

    def _check_itself(self, dtype: Any, out_dtype: Any, target: Target, pulls: bool) -> None:
        if self.tile_m != COMPUTE_WARPGROUPS * WGMMA_M:
            raise ValueError(
                f"`tile_m` must be {COMPUTE_WARPGROUPS * WGMMA_M} ({COMPUTE_WARPGROUPS} warpgroups of {WGMMA_M} rows), "
                f"got {self.tile_m}"
            )
        swizzle_elements = SWIZZLE_BYTES // dtype.itemsize
        if self.tile_k != swizzle_elements:
            raise ValueError(
                f"`tile_k` must be {swizzle_elements} for {dtype.name} ({SWIZZLE_BYTES} bytes), got {self.tile_k}"
            )
        if self.tile_n % swizzle_elements or self.tile_n > TMA_BOX_LIMIT:
            raise ValueError(
                f"`tile_n` must be a multiple of {swizzle_elements} and at most {TMA_BOX_LIMIT}, got {self.tile_n}"
            )
        if self.epilogue_tile_n % (SWIZZLE_BYTES // out_dtype.itemsize) or self.tile_n % self.epilogue_tile_n:
            raise ValueError(
                f"`epilogue_tile_n` must be a multiple of {SWIZZLE_BYTES // out_dtype.itemsize} that divides `tile_n`, "
                f"got {self.epilogue_tile_n} for tile_n={self.tile_n}"
            )
        if (self.tile_n // self.epilogue_tile_n) % self.epilogue_slots:
            # Else a slot would come round again before `epilogue_slots` stores, which is what the epilogue waits for.
            raise ValueError(
                f"`epilogue_slots` must divide the {self.tile_n // self.epilogue_tile_n} stores of a tile (tile_n="
                f"{self.tile_n} / epilogue_tile_n={self.epilogue_tile_n}), got {self.epilogue_slots}"
            )
        if self.stages < 2:
            raise ValueError(f"`stages` must be at least 2, since a slot is released one step late, got {self.stages}")
        if self.chunk_bytes % 16:
            raise ValueError(f"`chunk_bytes` must be a multiple of 16, got {self.chunk_bytes}")
        if (needed := self.smem_bytes(dtype, out_dtype, pulls=pulls) + RESERVED_BYTES) > target.smem_limit_bytes:
            raise ValueError(
                f"the config needs {needed} bytes of shared memory and {target.kind} has {target.smem_limit_bytes} per "
                f"CTA: reduce `stages` ({self.stages}), `tile_n` ({self.tile_n}) or `epilogue_slots` "
                f"({self.epilogue_slots})"
            )
