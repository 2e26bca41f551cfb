"""Checks what the Hopper mainloop can run, and computes how much shared memory and how many registers it needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from overlap.kernels import limits
from overlap.kernels.config import FLOAT8, Config
from overlap.kernels.limits import BARRIER_BYTES, TILE_N_UNIT, TMA_BOX_LIMIT
from overlap.kernels.operations import TRANSPORTS
from overlap.kernels.placement import clusters_at_once

if TYPE_CHECKING:
    from overlap.kernels.mainloop import OperandTypes
    from overlap.kernels.target import Target

COMPUTE_WARPGROUPS = 2
# The most registers of a compute thread that may hold sums. A compute thread has 232 registers; the others hold
# addresses, counters and the epilogue's temporaries.
MAX_ACCUMULATOR_REGISTERS = 160
# The most registers per thread for sums. With jax 0.12 each thread has 168 registers in all, whatever its role asks for
# (docs/DESIGN.md). If too many of them hold sums, the compiler serializes wgmma: measured with 144 registers of sums,
# but not with 128.
MOST_ACCUMULATED = MAX_ACCUMULATOR_REGISTERS if jax.__version_info__ < (0, 12) else 128
MOST_ACCUMULATED_IN_CLUSTERS = 128
# With an epilogue of several results (`hooks.SeveralResults`); found by assembling such kernels with silu(gate) · up.
MOST_ACCUMULATED_WITH_RESULTS = 128 if jax.__version_info__ < (0, 12) else 64
MOST_ACCUMULATED_WITH_ADDENDS = 64
CLUSTERS = (1, 2, 4)
WARPGROUP_THREADS = 128
WGMMA_M = 64
WGMMA_N_UNIT = 8
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


def smem_bytes(config: Config, out_dtype: DTypeLike, transport: str = "") -> int:
    """Returns the shared memory of one CTA in bytes, with its barriers and the chunk buffers of the transport."""
    wg_m, _ = warpgroup_tile(config)
    epilogue_bytes = limits.epilogue_bytes(COMPUTE_WARPGROUPS * wg_m, jnp.dtype(out_dtype))
    # Each stage has two barriers, `full` and `consumed`. If the warpgroups take turns, each of the two has its own
    # `full` barrier, so a stage has three. In an exchange each then also has its own `stored` barrier: one more than is
    # counted in `transport_bytes`.
    barriers = (3 if config.in_turn else 2) * config.stages + (config.in_turn and TRANSPORTS[transport].exchanges)
    barriers += limits.cluster_sums_barriers(config, COMPUTE_WARPGROUPS)
    transport_bytes = limits.transport_bytes(config, jnp.dtype(out_dtype), transport, wg_m)
    operand_bytes = max(limits.stages_bytes(config), limits.cluster_sums_bytes(config))
    return operand_bytes + epilogue_bytes + transport_bytes + barriers * BARRIER_BYTES


def check_types(types: OperandTypes) -> None:
    """Checks that the tensor cores and the epilogue take these dtypes and layouts. Raises NotImplementedError."""
    limits.check_dtypes(types)
    if types.block_scaled:
        raise NotImplementedError(
            "the tensor cores of Hopper take no block scales: use scales of rows and columns, or "
            'implementation="xla", which runs by default'
        )
    layouts = types.layouts
    if jnp.dtype(types.dtype) in FLOAT8 and not layouts.k_major:
        raise NotImplementedError(
            "the tensor cores read 8-bit operands only with k along their rows, got transpose_lhs="
            f"{layouts.transpose_lhs} and transpose_rhs={layouts.transpose_rhs}: keep lhs as [m, k] and rhs as [n, k] "
            '(transpose_rhs=True), or use implementation="xla"'
        )


def check_config(types: OperandTypes, config: Config, target: Target, beside_bytes: int = 0) -> None:
    """Checks a configuration: its sizes, the dtypes, the registers and the shared memory. Raises ValueError."""
    if config.cluster > 1:
        _check_cluster(types, config, target)
    if config.swap_operands:
        _check_swapped(types, config)
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
    if types.sides > 1:
        limits.check_sides(types, config, wg_n)
    if types.boxes > 1:
        _check_boxes(types, config)
        beside_bytes += limits.more_boxes_bytes(COMPUTE_WARPGROUPS * warpgroup_tile(config)[0], types)
    needed = smem_bytes(config, types.out_dtype, types.transport) + beside_bytes
    limits.check_fits(needed, types, config, target)


def _check_cluster(types: OperandTypes, config: Config, target: Target) -> None:
    """Checks that the CTAs of a cluster can divide the k steps of each tile among them. Raises ValueError."""
    if config.cluster_along != "k":
        raise ValueError(
            "on Hopper the CTAs of a cluster compute one tile together, each a part of its k steps, so `cluster` needs "
            f"cluster_along='k', got cluster={config.cluster} and {config.cluster_along!r}: set it (in `matmul`), or "
            "leave `cluster` out of `config`"
        )
    if config.cluster not in CLUSTERS or config.cluster > target.num_cores:
        raise ValueError(
            f"`cluster` must be 1, 2 or 4 with cluster_along='k', and at most the {target.num_cores} cores, got "
            f"{config.cluster}"
        )
    if types.transport:
        raise ValueError(
            "cluster_along='k' can be used only in `matmul`: leave `cluster` and `cluster_along` out of `config`"
        )
    for name, value, usual in (
        ("schedule", config.schedule, "cooperative"),
        ("stream_k", config.stream_k, 1),
        ("split_k", config.split_k, 1),
    ):
        if value != usual:
            raise ValueError(
                f"`{name}` must be {usual!r} with cluster_along='k', got {value!r}: leave it out of `config`, or leave "
                "`cluster_along` out"
            )


def _check_boxes(types: OperandTypes, config: Config) -> None:
    """Checks that an epilogue with several addends or results has the registers it needs. Raises ValueError."""
    if config.swap_operands:
        raise ValueError("`swap_operands` must be False where the epilogue has several results, got True: leave it out")
    most = MOST_ACCUMULATED_WITH_ADDENDS if types.addend else MOST_ACCUMULATED_WITH_RESULTS
    if (registers := accumulator_registers(config)) > most:
        raise ValueError(
            f"a tile of {config.tile_m} × {config.tile_n} (schedule={config.schedule!r}) needs {registers} registers "
            f"per thread for its accumulator, and {most} is the most where the epilogue has several results: reduce "
            "`tile_m` or `tile_n`"
        )


def _check_swapped(types: OperandTypes, config: Config) -> None:
    """Checks that the tensor cores can compute the transposed tile. Raises ValueError."""
    leave_out = "leave `swap_operands` out of `config`"
    rows = config.tile_m
    if rows % WGMMA_N_UNIT or rows > TMA_BOX_LIMIT:
        raise ValueError(
            f"`tile_m` must be a multiple of {WGMMA_N_UNIT} and at most {TMA_BOX_LIMIT} with `swap_operands`, got "
            f"{rows}"
        )
    if config.split_k > 1:
        raise ValueError(
            f"`split_k` must be 1 with `swap_operands`, got {config.split_k}: leave one of them out of `config`"
        )
    if types.travel.forwards or types.travel.exchanges:
        what = "with transport='ring'" if types.travel.forwards else "where results are exchanged"
        raise ValueError(f"`swap_operands` must be False {what}, got True: {leave_out}")
    if types.layouts.transpose_lhs:
        raise ValueError(f"`swap_operands` needs `lhs` as [m, k], got transpose_lhs=True: {leave_out}")
    if jnp.dtype(types.out_dtype).itemsize != 2:
        raise ValueError(
            f"`swap_operands` needs a result of 16 bits, got {jnp.dtype(types.out_dtype).name}: {leave_out}"
        )


def spills(shape: Config) -> bool:
    """Whether the kernel spills registers if the epilogue uses all features. The search leaves out such kernels."""
    # Cases: `tests/assembly/space.py`. For example, 80 rows of bfloat16 with a right operand as [k, n] spill
    # 156 bytes; with 64 rows nothing is spilled, but no register is left.
    # In a cluster, 160 registers of sums spill 40 bytes or leave no register. Cut tiles need more registers than whole
    # ones if warpgroups take turns (152 leave no register).
    crowded = shape.stream_k > 1 and shape.in_turn
    most = MOST_ACCUMULATED // 2 if crowded else MOST_ACCUMULATED_IN_CLUSTERS if shape.cluster > 1 else MOST_ACCUMULATED
    return shape.swap_operands and accumulator_registers(shape) > most


def crowds_registers(types: OperandTypes, tiles: int, config: Config, target: Target) -> bool:
    """Whether a thread on Hopper may need a few more registers than it has.

    These cases were found by assembling all kernels (`tests.assembly.sweep`). In compute threads:

    - where peers' parts are added: 128 rows per warpgroup, or the largest tiles with the schedule "pingpong"
    - where finished tiles are sent to all peers as well: the largest tiles, with 8-bit operands or 32-bit results

    In the producer, in operations that gather:

    - the schedule "pingpong" with the smallest tiles
    - swapped operands with `stream_k` above 1: some of these kernels

    In both, if the CTAs of a cluster compute a tile together (`cluster_along="k"`):

    - more tiles than clusters. Then some kernels with 8-bit operands, 3 stages and exactly 8 k steps per CTA spill
      152 bytes, and some with swapped operands need 224 of the 232 registers of a compute thread
    """
    if config.ctas_per_tile > 1 and tiles > clusters_at_once(target.num_cores, config.cluster):
        return True
    transport = types.transport
    fills_warpgroup = config.in_turn and (config.tile_m == 128 or config.tile_m * config.tile_n >= 64 * 256)
    if transport in ("push", "broadcast") and (config.tile_m == 256 or fills_warpgroup):
        return True
    if config.in_turn and transport == "pull" and config.tile_m * config.tile_n <= 64 * 64:
        return True
    if config.swap_operands and transport == "pull" and config.stream_k > 1:
        return True
    has_wide_results = jnp.dtype(types.out_dtype).itemsize == 4
    is_large = config.tile_m * config.tile_n >= 128 * 256
    return transport == "broadcast" and is_large and (jnp.dtype(types.dtype).itemsize == 1 or has_wide_results)
