"""What the Hopper mainloop can run, and how much shared memory and how many registers that takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from overlap.kernels.config import FLOAT8, Config
from overlap.kernels.tma import limits
from overlap.kernels.tma.limits import BARRIER_BYTES, EXCHANGING, TILE_N_UNIT, TMA_BOX_LIMIT

if TYPE_CHECKING:
    from overlap.kernels.limits import Sizes
    from overlap.kernels.target import Target

COMPUTE_WARPGROUPS = 2
# Of the 232 registers of a compute thread; the rest holds addresses, counters and the epilogue's temporaries.
MAX_ACCUMULATOR_REGISTERS = 128
WARPGROUP_THREADS = 128
WGMMA_M = 64
LARGEST_TILE_M_IN_TURN = 128


def warpgroup_tile(config: Config) -> tuple[int, int]:
    """Rows and columns that one compute warpgroup accumulates.

    All of a tile if they take turns; else half of it, cut across the rows if both keep 64 of them.
    """
    if config.in_turn:
        return config.tile_m, config.tile_n
    if config.tile_m >= COMPUTE_WARPGROUPS * WGMMA_M:
        return config.tile_m // COMPUTE_WARPGROUPS, config.tile_n
    return config.tile_m, config.tile_n // COMPUTE_WARPGROUPS


def rows_loaded(config: Config, m: int, transpose_lhs: bool = False) -> int:
    """How many rows of its tiles are loaded of a left operand with `m` rows (per batch element, per shard)."""
    return limits.rows_loaded(config, m, transpose_lhs, shared=config.cluster if config.cluster_along == "n" else 1)


def smem_bytes(config: Config, dtype: Any, out_dtype: Any, transport: str = "") -> int:
    """Shared memory of one CTA in bytes, barriers included; with the chunk buffers of a transport in chunks."""
    operand_bytes = config.stages * (config.tile_m + config.tile_n) * config.tile_k * jnp.dtype(dtype).itemsize
    wg_m, _ = warpgroup_tile(config)
    epilogue_bytes = limits.epilogue_bytes(config, COMPUTE_WARPGROUPS * wg_m, jnp.dtype(out_dtype))
    # Each slot has two barriers; if the warpgroups take turns, and so wait at barriers of their own, one more. And what
    # they have stored is told by turns.
    barriers = (3 if config.in_turn else 2) * config.stages + (config.in_turn and transport in EXCHANGING)
    transport_bytes = limits.transport_bytes(config, jnp.dtype(out_dtype), transport, wg_m)
    return operand_bytes + epilogue_bytes + transport_bytes + barriers * BARRIER_BYTES


def check_types(sizes: Sizes) -> None:
    """Whether the tensor cores and the epilogue take these dtypes and layouts. Raises NotImplementedError."""
    limits.check_dtypes(sizes)
    if sizes.block_scaled:
        raise NotImplementedError(
            "the tensor cores of Hopper take no scales of blocks: use scales of rows and columns, or "
            'implementation="xla", which runs by default'
        )
    layouts = sizes.layouts
    if jnp.dtype(sizes.dtype) in FLOAT8 and not layouts.k_major:
        raise NotImplementedError(
            "the tensor cores read 8-bit operands only with k along their rows, got transpose_lhs="
            f"{layouts.transpose_lhs} and transpose_rhs={layouts.transpose_rhs}: keep lhs as [m, k] and rhs as [n, k] "
            '(transpose_rhs=True), or use implementation="xla"'
        )


def check_config(sizes: Sizes, config: Config, target: Target) -> None:
    """Whether a configuration fits itself, the dtypes, the registers and the shared memory. Raises ValueError."""
    if config.tile_m not in (64, 128, 256):
        raise ValueError(f"`tile_m` must be 64, 128 or 256, got {config.tile_m}")
    if config.in_turn and config.tile_m > LARGEST_TILE_M_IN_TURN:
        raise ValueError(
            f"`tile_m` must be at most {LARGEST_TILE_M_IN_TURN} with schedule='pingpong', where one warpgroup computes "
            f"a whole tile, got {config.tile_m}: reduce it, or leave `schedule` out"
        )
    limits.check_tile_k(sizes, config)
    wg_m, wg_n = warpgroup_tile(config)
    if wg_n % TILE_N_UNIT or config.tile_n > TMA_BOX_LIMIT:
        unit = TILE_N_UNIT * config.tile_n // wg_n if wg_n else 2 * TILE_N_UNIT
        raise ValueError(
            f"`tile_n` must be a multiple of {unit} (for tile_m={config.tile_m}) and at most {TMA_BOX_LIMIT}, got "
            f"{config.tile_n}"
        )
    if (registers := wg_m * wg_n // WARPGROUP_THREADS) > MAX_ACCUMULATOR_REGISTERS:
        raise ValueError(
            f"a tile of {config.tile_m} × {config.tile_n} (schedule={config.schedule!r}) needs {registers} registers "
            f"per thread for its accumulator, and {MAX_ACCUMULATOR_REGISTERS} is the most: reduce `tile_m` or `tile_n`"
            + (", or leave `schedule` out" if config.in_turn else "")
        )
    limits.check_stores(sizes, config, wg_n)
    limits.check_fits(smem_bytes(config, sizes.dtype, sizes.out_dtype, sizes.transport), sizes, config, target)
