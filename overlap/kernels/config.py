"""What can be tuned in a matmul: tile sizes and buffers, with their checks and their shared-memory arithmetic."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp

from overlap.kernels.target import Target
from overlap.primitives.integers import ceil_div

COMPUTE_WARPGROUPS = 2
FLOAT16 = (jnp.dtype(jnp.float16), jnp.dtype(jnp.bfloat16))
FLOAT8 = (jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2))
BARRIER_BYTES = 8
# Of the 232 registers of a compute thread; the rest holds addresses, counters and the epilogue's temporaries.
MAX_ACCUMULATOR_REGISTERS = 128
WARPGROUP_THREADS = 128
TILE_N_UNIT = 64
TMA_BOX_LIMIT = 256
TMA_ROW_BYTES = 16
SWIZZLE_ROWS = 8
SWIZZLE_BYTES = 128
WGMMA_M = 64
# Where the compiler may round up: it aligns each buffer to at most this.
RESERVED_BYTES = 1024


@dataclasses.dataclass(frozen=True)
class Config:
    """The tunable sizes of a (fused) matmul.

    Attributes:
      tile_m: rows of the output tile of one CTA: 64, 128 or 256 (see `halves`).
      tile_n: columns of the output tile of one CTA.
      tile_k: depth of one stage, in elements; its bytes must be 128, the widest swizzle.
      stages: operand tiles in flight.
      epilogue_tile_n: columns that a warpgroup stores at a time.
      epilogue_slots: shared-memory buffers per warpgroup for that, so that one is filled while another is stored.
      order_minor: which dimension of the tile grid runs fastest, "m" or "n".
      order_width: tiles (of a cluster) per band of the order (`TileOrder`).
      stream_k: into how many parts each tile of the last, partial wave may be cut along k, so that cores that would
        idle take a share (`StreamK`); 1: none is.
      split_k: into how many parts the contraction is cut, each a tile of its own, summed by XLA in f32 in a fixed order
        afterwards: for results of few tiles (plain matmul only).
      cluster: how many CTAs (1 or 2) compute adjacent tiles and share the loads of the operand common to them.
      cluster_along: in which dimension they are adjacent: "m" (they share the right operand) or "n" (the left one).
      chunk_bytes: the most that the communicator of one CTA pulls in one copy (fused operations only).
      chunk_slots: how many such copies are in flight per CTA (fused operations only).
      joined: whether the gathered rows of all shards are tiled as those of one matrix, so that few rows per shard fill
        a tile together (`all_gather_lhs_matmul` by the transport "pull" only; elsewhere it means nothing).
    """

    tile_m: int = 128
    tile_n: int = 256
    tile_k: int = 64
    stages: int = 4
    epilogue_tile_n: int = 64
    epilogue_slots: int = 1
    order_minor: Literal["m", "n"] = "m"
    order_width: int = 8
    stream_k: int = 1
    split_k: int = 1
    cluster: int = 1
    cluster_along: Literal["m", "n"] = "m"
    chunk_bytes: int = 8192
    chunk_slots: int = 2
    joined: bool = False

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in ("order_minor", "cluster_along"):
                if not (isinstance(value, str) and value in ("m", "n")):
                    raise ValueError(f"`{field.name}` must be 'm' or 'n', got {value!r}")
            elif field.name == "joined":
                if not isinstance(value, bool):
                    raise ValueError(f"`joined` must be True or False, got {value!r}")
            elif not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"`{field.name}` must be an int of at least 1, got {value!r}")

    @property
    def halves(self) -> tuple[int, int]:
        """Rows and columns of the half tile of one compute warpgroup: cut across the rows if both keep 64 of them."""
        if self.tile_m >= COMPUTE_WARPGROUPS * WGMMA_M:
            return self.tile_m // COMPUTE_WARPGROUPS, self.tile_n
        return self.tile_m, self.tile_n // COMPUTE_WARPGROUPS

    @property
    def cluster_tile(self) -> tuple[int, int]:
        """Rows and columns of the output tile of one cluster."""
        if self.cluster_along == "m":
            return self.cluster * self.tile_m, self.tile_n
        return self.tile_m, self.cluster * self.tile_n

    def rows_loaded(self, m: int, transpose_lhs: bool = False) -> int:
        """How many rows of its tiles are loaded of a left operand with `m` rows (per batch element, per shard)."""
        # Whole rows of swizzle atoms, and as many by each CTA that shares the load; or whole boxes (of 128 bytes in m).
        shared = self.cluster if self.cluster_along == "n" else 1
        unit = self.tile_k if transpose_lhs else SWIZZLE_ROWS * shared
        return min(self.tile_m, ceil_div(m, unit) * unit)

    def smem_bytes(self, dtype: Any, out_dtype: Any, *, pulls: bool, forwards: bool = False) -> int:
        """Shared memory of one CTA in bytes, barriers included.

        `pulls`: with the communicator's chunk buffers, unless it `forwards` the operand tiles themselves.
        """
        pulls = pulls and not forwards
        operand_bytes = self.stages * (self.tile_m + self.tile_n) * self.tile_k * jnp.dtype(dtype).itemsize
        epilogue_rows = COMPUTE_WARPGROUPS * self.halves[0]
        epilogue_bytes = self.epilogue_slots * epilogue_rows * self.epilogue_tile_n * jnp.dtype(out_dtype).itemsize
        chunk_bytes = self.chunk_slots * self.chunk_bytes if pulls else 0
        barriers = 2 * self.stages + (self.chunk_slots if pulls else 0)
        return operand_bytes + epilogue_bytes + chunk_bytes + barriers * BARRIER_BYTES

    def check(
        self,
        *,
        m: int,
        n: int,
        k: int,
        dtype: Any,
        out_dtype: Any,
        target: Target,
        pulls: bool,
        forwards: bool = False,
        m_name: str = "m",
        transpose_lhs: bool = False,
        transpose_rhs: bool = False,
    ) -> None:
        """The one predicate that says whether the Hopper mainloop can run this (calls, chooser and tuner share it).

        Args:
          m: rows of the left operand (of one shard, in a collective).
          n: columns of the right operand.
          k: the contraction dimension.
          dtype: of both operands.
          out_dtype: of the result.
          target: the device.
          pulls: whether this is a fused collective, whose communicator needs its buffers as well.
          forwards: whether that collective passes shards on from the operand tiles, and needs no such buffers.
          m_name: what the caller calls `m`.
          transpose_lhs: the left operand is [k, m] in memory.
          transpose_rhs: the right operand is [n, k] in memory.

        Raises:
          ValueError: the configuration contradicts itself or exceeds the device.
          NotImplementedError: the problem is fine and this kernel cannot serve it.
        """
        target.require_hopper()
        dtype, out_dtype = jnp.dtype(dtype), jnp.dtype(out_dtype)
        in_dtypes, out_dtypes = FLOAT16 + FLOAT8, FLOAT16 if pulls else (*FLOAT16, jnp.dtype(jnp.float32))
        if dtype not in in_dtypes:
            raise NotImplementedError(
                f"the fused kernel multiplies {_names(in_dtypes)}, got {dtype.name} operands: cast them, or use "
                'implementation="xla"'
            )
        if out_dtype not in out_dtypes:
            raise NotImplementedError(
                f"the fused kernel writes {_names(out_dtypes)}, got `preferred_element_type`={out_dtype.name}: leave "
                'it out, or use implementation="xla"'
            )
        if dtype in FLOAT8 and (transpose_lhs or not transpose_rhs):
            raise NotImplementedError(
                "the tensor cores read 8-bit operands only with k along their rows, got transpose_lhs="
                f"{transpose_lhs} and transpose_rhs={transpose_rhs}: keep lhs as [m, k] and rhs as [n, k] "
                '(transpose_rhs=True), or use implementation="xla"'
            )
        self._check_itself(dtype, out_dtype, target, pulls, forwards)
        for name, size in ((m_name, m), ("n", n), ("k", k)):
            if size < 1:
                raise NotImplementedError(
                    f'the fused kernel needs {name} to be at least 1, got {name}={size}: use implementation="xla"'
                )
        for what, name, row, kind in (
            ("lhs", m_name if transpose_lhs else "k", m if transpose_lhs else k, dtype),
            ("rhs", "k" if transpose_rhs else "n", k if transpose_rhs else n, dtype),
            ("the result", "n", n, out_dtype),
        ):
            if row * kind.itemsize % TMA_ROW_BYTES:
                raise NotImplementedError(
                    f"the copy engine needs the rows of {what} to be multiples of {TMA_ROW_BYTES} bytes, got {name}="
                    f"{row} elements of {kind.itemsize} bytes: pad {name} to a multiple of "
                    f'{TMA_ROW_BYTES // kind.itemsize}, or use implementation="xla"'
                )

        if (steps := -(-k // self.tile_k)) % self.split_k:
            raise NotImplementedError(
                f"`split_k` must divide the {steps} steps of k={k} (tile_k={self.tile_k}), got {self.split_k}"
            )

    def _check_itself(self, dtype: Any, out_dtype: Any, target: Target, pulls: bool, forwards: bool) -> None:
        if self.tile_m not in (64, 128, 256):
            raise ValueError(f"`tile_m` must be 64, 128 or 256, got {self.tile_m}")
        swizzle_elements = SWIZZLE_BYTES // dtype.itemsize
        if self.tile_k != swizzle_elements:
            raise ValueError(
                f"`tile_k` must be {swizzle_elements} for {dtype.name} ({SWIZZLE_BYTES} bytes), got {self.tile_k}"
            )
        wg_m, wg_n = self.halves
        if wg_n % TILE_N_UNIT or self.tile_n > TMA_BOX_LIMIT:
            unit = TILE_N_UNIT * self.tile_n // wg_n if wg_n else 2 * TILE_N_UNIT
            raise ValueError(
                f"`tile_n` must be a multiple of {unit} (for tile_m={self.tile_m}) and at most {TMA_BOX_LIMIT}, got "
                f"{self.tile_n}"
            )
        if (registers := wg_m * wg_n // WARPGROUP_THREADS) > MAX_ACCUMULATOR_REGISTERS:
            raise ValueError(
                f"a tile of {self.tile_m} × {self.tile_n} needs {registers} registers per thread for its accumulator, "
                f"and {MAX_ACCUMULATOR_REGISTERS} is the most: reduce `tile_m` or `tile_n`"
            )
        out_swizzle_elements = SWIZZLE_BYTES // out_dtype.itemsize
        if self.epilogue_tile_n % out_swizzle_elements or wg_n % self.epilogue_tile_n:
            raise ValueError(
                f"`epilogue_tile_n` must be a multiple of {out_swizzle_elements} that divides a warpgroup's {wg_n} "
                f"columns, got {self.epilogue_tile_n} for tile_n={self.tile_n}"
            )
        if (wg_n // self.epilogue_tile_n) % self.epilogue_slots:
            # Else a slot would come round again before `epilogue_slots` stores, which is what the epilogue waits for.
            raise ValueError(
                f"`epilogue_slots` must divide the {wg_n // self.epilogue_tile_n} stores of a tile ({wg_n} columns / "
                f"epilogue_tile_n={self.epilogue_tile_n}), got {self.epilogue_slots}"
            )
        if self.stages < 2:
            raise ValueError(f"`stages` must be at least 2, since a slot is released one step late, got {self.stages}")
        if self.chunk_bytes % 16:
            raise ValueError(f"`chunk_bytes` must be a multiple of 16, got {self.chunk_bytes}")
        if self.split_k > 1 and (pulls or self.stream_k > 1):
            where = "in a fused collective" if pulls else f"with stream_k={self.stream_k}"
            raise ValueError(f"`split_k` must be 1 {where}, got {self.split_k}")
        if self.cluster not in (1, 2) or self.cluster > target.num_cores:
            raise ValueError(f"`cluster` must be 1 or 2, and at most the {target.num_cores} cores, got {self.cluster}")
        needed = self.smem_bytes(dtype, out_dtype, pulls=pulls, forwards=forwards) + RESERVED_BYTES
        if needed > target.smem_limit_bytes:
            raise ValueError(
                f"the config needs {needed} bytes of shared memory and {target.kind} has {target.smem_limit_bytes} per "
                f"CTA: reduce `stages` ({self.stages}), `tile_n` ({self.tile_n}) or `epilogue_slots` "
                f"({self.epilogue_slots})"
            )


def default_config(dtype: Any) -> Config:
    """The configuration for large problems of a dtype."""
    return Config(tile_k=SWIZZLE_BYTES // jnp.dtype(dtype).itemsize if jnp.dtype(dtype).itemsize <= 2 else 64)


def _names(dtypes: tuple[jnp.dtype, ...]) -> str:
    *most, last = [dtype.name for dtype in dtypes]
    return f"{', '.join(most)} or {last}"
