"""Checks what the Hopper mainloop can run, and computes how much shared memory and how many registers it needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax.typing import DTypeLike

from overlap.kernels.config import FLOAT8, Config
from overlap.kernels.tma import limits
from overlap.kernels.tma.limits import BARRIER_BYTES, EXCHANGING, TILE_N_UNIT, TMA_BOX_LIMIT

if TYPE_CHECKING:
    from overlap.kernels.limits import Sizes
    from overlap.kernels.target import Target

COMPUTE_WARPGROUPS = 2
# The most registers of a compute thread that may hold sums. A compute thread has 232 registers; the others hold
# addresses, counters and the epilogue's temporaries.
MAX_ACCUMULATOR_REGISTERS = 160
WARPGROUP_THREADS = 128
WGMMA_M, WGMMA_N_UNIT = 64, 8
LARGEST_TILE_M_IN_TURN = 128


def warpgroup_tile(config: Config) -> tuple[int, int]:
    """Returns rows and columns of a *warpgroup tile*: the part of an output tile that a compute warpgroup accumulates.

    If the warpgroups take turns ("pingpong"), each accumulates whole tiles. Otherwise each accumulates half of a tile:
    half of the rows if that is at least 64 rows, else half of the columns. With swapped operands it is always half of
    the columns, because the tile's columns are then the rows of wgmma.
    """
    if config.in_turn:
        return config.tile_m, config.tile_n
    if config.swap_operands:
        return config.tile_m, config.tile_n // COMPUTE_WARPGROUPS
    if config.tile_m >= COMPUTE_WARPGROUPS * WGMMA_M:
        return config.tile_m // COMPUTE_WARPGROUPS, config.tile_n
    return config.tile_m, config.tile_n // COMPUTE_WARPGROUPS


def accumulator_registers(config: Config) -> int:
    """Returns how many registers per compute thread hold sums; 0 if a warpgroup's columns are not a multiple of 64."""
    wg_m, wg_n = warpgroup_tile(config)
    return 0 if wg_n % TILE_N_UNIT else wg_m * wg_n // WARPGROUP_THREADS


def rows_loaded(config: Config, m: int, dtype: DTypeLike, transpose_lhs: bool = False) -> int:
    """Returns how many rows of a tile are loaded from a left operand with `m` rows (per batch element and shard)."""
    shared = config.cluster if config.cluster_along == "n" else 1
    return limits.rows_loaded(config, m, dtype, transpose_lhs, shared=shared)


def smem_bytes(config: Config, out_dtype: DTypeLike, transport: str = "") -> int:
    """Returns the shared memory of one CTA in bytes, with its barriers and the chunk buffers of the transport."""
    wg_m, _ = warpgroup_tile(config)
    epilogue_bytes = limits.epilogue_bytes(COMPUTE_WARPGROUPS * wg_m, jnp.dtype(out_dtype))
    # Each stage has two barriers, `full` and `consumed`. If the warpgroups take turns, each of the two has its own
    # `full` barrier, so a stage has three. In an exchange each then also has its own `stored` barrier: one more than is
    # counted in `transport_bytes`.
    barriers = (3 if config.in_turn else 2) * config.stages + (config.in_turn and transport in EXCHANGING)
    barriers += limits.cluster_sums_barriers(config, COMPUTE_WARPGROUPS)
    transport_bytes = limits.transport_bytes(config, jnp.dtype(out_dtype), transport, wg_m)
    operand_bytes = max(limits.stages_bytes(config), limits.cluster_sums_bytes(config))
    return operand_bytes + epilogue_bytes + transport_bytes + barriers * BARRIER_BYTES


def check_types(sizes: Sizes) -> None:
    """Checks that the tensor cores and the epilogue take these dtypes and layouts. Raises NotImplementedError."""
    limits.check_dtypes(sizes)
    if sizes.block_scaled:
        raise NotImplementedError(
            "the tensor cores of Hopper take no block scales: use scales of rows and columns, or "
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
    """Checks a configuration: its sizes, the dtypes, the registers and the shared memory. Raises ValueError."""
    if config.swap_operands:
        _check_swapped(sizes, config)
    elif config.tile_m not in (64, 128, 256):
        raise ValueError(
            f"`tile_m` must be 64, 128 or 256 (with swap_operands=True a multiple of 8), got {config.tile_m}"
        )
    elif config.in_turn and config.tile_m > LARGEST_TILE_M_IN_TURN:
        raise ValueError(
            f"`tile_m` must be at most {LARGEST_TILE_M_IN_TURN} with schedule='pingpong', where one warpgroup computes "
            f"a whole tile, got {config.tile_m}: reduce it, or leave `schedule` out"
        )
    limits.check_stages(config)
    _, wg_n = warpgroup_tile(config)
    if wg_n % TILE_N_UNIT or config.tile_n > TMA_BOX_LIMIT:
        unit = TILE_N_UNIT * config.tile_n // wg_n if wg_n else 2 * TILE_N_UNIT
        reason = "with `swap_operands`" if config.swap_operands else f"for tile_m={config.tile_m}"
        way_out = ": change it, or set schedule='pingpong', which takes multiples of 64" if unit > TILE_N_UNIT else ""
        raise ValueError(
            f"`tile_n` must be a multiple of {unit} ({reason}) and at most {TMA_BOX_LIMIT}, got {config.tile_n}"
            + way_out
        )
    if (registers := accumulator_registers(config)) > MAX_ACCUMULATOR_REGISTERS:
        raise ValueError(
            f"a tile of {config.tile_m} × {config.tile_n} (schedule={config.schedule!r}) needs {registers} registers "
            f"per thread for its accumulator, and {MAX_ACCUMULATOR_REGISTERS} is the most: reduce `tile_m` or `tile_n`"
            + (", or leave `schedule` out" if config.in_turn else "")
        )
    if sizes.sides > 1:
        limits.check_sides(sizes, config, wg_n)
    limits.check_fits(smem_bytes(config, sizes.out_dtype, sizes.transport), sizes, config, target)


def _check_swapped(sizes: Sizes, config: Config) -> None:
    """Checks that the tensor cores can compute the transposed tile. Raises ValueError."""
    leave_out = "leave `swap_operands` out of `config`"
    along_n, rows = config.cluster > 1 and config.cluster_along == "n", config.tile_m
    unit = WGMMA_N_UNIT * (config.cluster if along_n else 1)
    if rows % unit or rows > TMA_BOX_LIMIT:
        shares = f" and cluster={config.cluster} along n, whose CTAs load a part of the rows each" if along_n else ""
        raise ValueError(
            f"`tile_m` must be a multiple of {unit} and at most {TMA_BOX_LIMIT} with `swap_operands`{shares}, got "
            f"{rows}"
        )
    if config.split_k > 1:
        raise ValueError(
            f"`split_k` must be 1 with `swap_operands`, got {config.split_k}: leave one of them out of `config`"
        )
    if sizes.transport not in ("", "pull"):
        what = "with transport='ring'" if sizes.transport == "ring" else "where results are exchanged"
        raise ValueError(f"`swap_operands` must be False {what}, got True: {leave_out}")
    if sizes.layouts.transpose_lhs:
        raise ValueError(f"`swap_operands` needs `lhs` as [m, k], got transpose_lhs=True: {leave_out}")
    if jnp.dtype(sizes.out_dtype).itemsize != 2:
        raise ValueError(
            f"`swap_operands` needs a result of 16 bits, got {jnp.dtype(sizes.out_dtype).name}: {leave_out}"
        )
