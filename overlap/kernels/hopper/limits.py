"""What the Hopper mainloop can run, and how much shared memory and how many registers that takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from overlap.kernels.config import FLOAT8, FLOAT16, SWIZZLE_BYTES, Config
from overlap.primitives.integers import ceil_div

if TYPE_CHECKING:
    from overlap.kernels.limits import Sizes
    from overlap.kernels.target import Target

COMPUTE_WARPGROUPS = 2
BARRIER_BYTES = 8
# Of the 232 registers of a compute thread; the rest holds addresses, counters and the epilogue's temporaries.
MAX_ACCUMULATOR_REGISTERS = 128
WARPGROUP_THREADS = 128
TILE_N_UNIT = 64
TMA_BOX_LIMIT = 256
SWIZZLE_ROWS = 8
WGMMA_M = 64
# Where the compiler may round up: it aligns each buffer to at most this.
RESERVED_BYTES = 1024
# Which tiles have been drawn (two numbers, as large as a buffer can begin behind them), and the barriers around that.
MAIL_BYTES, MAIL_BARRIERS = 1024, 5


def halves(config: Config) -> tuple[int, int]:
    """Rows and columns of the half tile of one compute warpgroup: cut across the rows if both keep 64 of them."""
    if config.tile_m >= COMPUTE_WARPGROUPS * WGMMA_M:
        return config.tile_m // COMPUTE_WARPGROUPS, config.tile_n
    return config.tile_m, config.tile_n // COMPUTE_WARPGROUPS


def rows_loaded(config: Config, m: int, transpose_lhs: bool = False) -> int:
    """How many rows of its tiles are loaded of a left operand with `m` rows (per batch element, per shard)."""
    # Whole rows of swizzle atoms, and as many by each CTA that shares the load; or whole boxes (of 128 bytes in m).
    shared = config.cluster if config.cluster_along == "n" else 1
    unit = config.tile_k if transpose_lhs else SWIZZLE_ROWS * shared
    return min(config.tile_m, ceil_div(m, unit) * unit)


def smem_bytes(config: Config, dtype: Any, out_dtype: Any, transport: str = "") -> int:
    """Shared memory of one CTA in bytes, barriers included; with the chunk buffers of a transport in chunks."""
    exchanges = transport in ("push", "spread", "one_shot")
    pulls = transport in ("pull", "push", "spread")
    operand_bytes = config.stages * (config.tile_m + config.tile_n) * config.tile_k * jnp.dtype(dtype).itemsize
    epilogue_rows, columns = COMPUTE_WARPGROUPS * halves(config)[0], config.hopper.epilogue_tile_n
    epilogue_bytes = config.hopper.epilogue_slots * epilogue_rows * columns * jnp.dtype(out_dtype).itemsize
    # What is exchanged is sent box by box, or in parts of a box.
    largest = halves(config)[0] * SWIZZLE_BYTES if exchanges else config.pull.chunk_bytes
    chunk_bytes = min(config.pull.chunk_bytes, largest) if pulls else 0
    if transport == "spread":
        itemsize = jnp.dtype(out_dtype).itemsize
        chunk_bytes = max(chunk_bytes, config.strip_rows(itemsize) * config.tile_n * itemsize)
    chunk_bytes *= config.pull.chunk_slots
    mail_bytes = MAIL_BYTES if exchanges else 0
    barriers = 2 * config.stages + (config.pull.chunk_slots if pulls else 0) + (MAIL_BARRIERS if exchanges else 0)
    return operand_bytes + epilogue_bytes + chunk_bytes + mail_bytes + barriers * BARRIER_BYTES


def check_types(sizes: Sizes) -> None:
    """Whether the tensor cores and the epilogue take these dtypes and layouts. Raises NotImplementedError."""
    dtype, out_dtype, layouts = jnp.dtype(sizes.dtype), jnp.dtype(sizes.out_dtype), sizes.layouts
    in_dtypes = FLOAT16 + FLOAT8
    out_dtypes = FLOAT16 if sizes.transport in ("pull", "ring") else (*FLOAT16, jnp.dtype(jnp.float32))
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
    if dtype in FLOAT8 and not layouts.k_major:
        raise NotImplementedError(
            "the tensor cores read 8-bit operands only with k along their rows, got transpose_lhs="
            f"{layouts.transpose_lhs} and transpose_rhs={layouts.transpose_rhs}: keep lhs as [m, k] and rhs as [n, k] "
            '(transpose_rhs=True), or use implementation="xla"'
        )


def check_config(sizes: Sizes, config: Config, target: Target) -> None:
    """Whether a configuration fits itself, the dtypes, the registers and the shared memory. Raises ValueError."""
    dtype, out_dtype = jnp.dtype(sizes.dtype), jnp.dtype(sizes.out_dtype)
    if config.tile_m not in (64, 128, 256):
        raise ValueError(f"`tile_m` must be 64, 128 or 256, got {config.tile_m}")
    swizzle_elements = SWIZZLE_BYTES // dtype.itemsize
    if config.tile_k != swizzle_elements:
        raise ValueError(
            f"`tile_k` must be {swizzle_elements} for {dtype.name} ({SWIZZLE_BYTES} bytes), got {config.tile_k}"
        )
    wg_m, wg_n = halves(config)
    if wg_n % TILE_N_UNIT or config.tile_n > TMA_BOX_LIMIT:
        unit = TILE_N_UNIT * config.tile_n // wg_n if wg_n else 2 * TILE_N_UNIT
        raise ValueError(
            f"`tile_n` must be a multiple of {unit} (for tile_m={config.tile_m}) and at most {TMA_BOX_LIMIT}, got "
            f"{config.tile_n}"
        )
    if (registers := wg_m * wg_n // WARPGROUP_THREADS) > MAX_ACCUMULATOR_REGISTERS:
        raise ValueError(
            f"a tile of {config.tile_m} × {config.tile_n} needs {registers} registers per thread for its accumulator, "
            f"and {MAX_ACCUMULATOR_REGISTERS} is the most: reduce `tile_m` or `tile_n`"
        )
    out_swizzle_elements, width = SWIZZLE_BYTES // out_dtype.itemsize, config.hopper.epilogue_tile_n
    if width % out_swizzle_elements or wg_n % width:
        raise ValueError(
            f"`epilogue_tile_n` must be a multiple of {out_swizzle_elements} that divides a warpgroup's {wg_n} "
            f"columns, got {width} for tile_n={config.tile_n}"
        )
    if (wg_n // width) % config.hopper.epilogue_slots:
        # Else a slot would come round again before `epilogue_slots` stores, which is what the epilogue waits for.
        raise ValueError(
            f"`epilogue_slots` must divide the {wg_n // width} stores of a tile ({wg_n} columns / "
            f"epilogue_tile_n={width}), got {config.hopper.epilogue_slots}"
        )
    if config.stages < 2:
        raise ValueError(f"`stages` must be at least 2, since a slot is released one step late, got {config.stages}")
    needed = smem_bytes(config, dtype, out_dtype, sizes.transport) + RESERVED_BYTES
    if needed > target.smem_limit_bytes:
        chunks = config.pull.chunk_bytes, config.pull.chunk_slots
        in_chunks = sizes.transport in ("pull", "push", "spread")
        also = " or `chunk_bytes` ({}) × `chunk_slots` ({})".format(*chunks) if in_chunks else ""
        raise ValueError(
            f"the config needs {needed} bytes of shared memory and {target.kind} has {target.smem_limit_bytes} per "
            f"CTA: reduce `stages` ({config.stages}), `tile_n` ({config.tile_n}), `epilogue_slots` "
            f"({config.hopper.epilogue_slots}){also}"
        )


def _names(dtypes: tuple[jnp.dtype, ...]) -> str:
    *most, last = [dtype.name for dtype in dtypes]
    return f"{', '.join(most)} or {last}"
