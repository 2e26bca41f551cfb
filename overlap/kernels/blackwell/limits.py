"""Checks what the Blackwell mainloop can run, and computes how much shared memory and tensor memory it needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax.typing import DTypeLike

from overlap.kernels import limits
from overlap.kernels.block_scales import SCALE_TILE_BLOCKS, SCALE_TILE_BYTES, SCALE_TILE_ROWS
from overlap.kernels.config import FLOAT8, SWIZZLE_BYTES, Config
from overlap.kernels.limits import BARRIER_BYTES, RESERVED_BYTES, TILE_N_UNIT, TMA_BOX_LIMIT
from overlap.kernels.operations import TRANSPORTS
from overlap.primitives.integers import ceil_div

if TYPE_CHECKING:
    from overlap.kernels.mainloop import OperandTypes
    from overlap.kernels.target import Target

# The tensor memory has 128 lanes, and each holds one row of an accumulator. So a tile has 128 rows.
TILE_M = 128
TENSOR_MEMORY_COLUMNS = 512
# One instruction of the tensor cores computes the tiles of at most a pair of CTAs.
MOST_CTAS = 2
# The tensor cores fill one accumulator while the epilogue reads the other one.
ACCUMULATORS = 2
# The number of buffers for terms (parts of a tile from peers): one box is loaded while another box is added.
TERM_BUFFERS = 2
# The number of scale tiles of a k step: one for each operand.
SCALE_TILES = 2
# Bytes of shared memory for the address of the allocated tensor memory.
ADDRESS_BYTES = 4
# With an epilogue of several addends and results (`hooks.SeveralResults`): more columns spill registers.
MOST_COLUMNS_WITH_ADDENDS = 128


def rhs_columns(config: Config) -> int:
    """Returns how many columns of the right operand one CTA loads: in a pair, half of the tile's columns."""
    return config.tile_n // config.cluster


def tensor_memory_columns(config: Config, *, block_scaled: bool = False) -> int:
    """Returns how many columns of tensor memory the accumulators and the block scales of all stages take together."""
    # A scale tile takes 4 columns. It has 32 lanes, and each of the four quarters of the 128 lanes holds a copy of it.
    scales = SCALE_TILES * config.stages * SCALE_TILE_BLOCKS if block_scaled else 0
    return ACCUMULATORS * config.tile_n + scales


def smem_bytes(config: Config, out_dtype: DTypeLike, transport: str = "", *, block_scaled: bool = False) -> int:
    """Returns the shared memory of one CTA in bytes, with its barriers and the buffers of the transport."""
    operand_bytes = config.stages * (config.tile_m + rhs_columns(config)) * SWIZZLE_BYTES
    epilogue_bytes = limits.epilogue_bytes(config.tile_m, jnp.dtype(out_dtype))
    exchanges = TRANSPORTS[transport].exchanges
    term_bytes = TERM_BUFFERS * config.tile_m * SWIZZLE_BYTES if exchanges else 0
    # Each buffer for terms has two barriers. One more is the second `stored` barrier; the first is counted in
    # `transport_bytes`.
    term_barriers = 2 * TERM_BUFFERS + 1 if exchanges else 0
    barriers = 2 * config.stages + 2 * ACCUMULATORS + term_barriers
    transport_bytes = limits.transport_bytes(config, jnp.dtype(out_dtype), transport, config.tile_m)
    # The compiler rounds up the scale buffer of each operand.
    scale_bytes = ceil_div(config.stages * SCALE_TILE_BYTES, RESERVED_BYTES) * RESERVED_BYTES if block_scaled else 0
    buffer_bytes = operand_bytes + epilogue_bytes + term_bytes + transport_bytes + SCALE_TILES * scale_bytes
    return buffer_bytes + barriers * BARRIER_BYTES + ADDRESS_BYTES


def check_types(types: OperandTypes) -> None:
    """Checks that the tensor cores and the epilogue take these dtypes. Raises NotImplementedError."""
    limits.check_dtypes(types)
    # A box of such an operand has 128 columns, but columns of several right operands alternate in units of 64.
    if types.sides > 1 and jnp.dtype(types.dtype) in FLOAT8 and not types.layouts.transpose_rhs:
        raise NotImplementedError(
            f"the fused kernel takes 8-bit operands with an `activation` of {types.sides} arrays only if k runs along "
            'their rows, got transpose_rhs=False: keep rhs as [n, k] (transpose_rhs=True), or use implementation="xla"'
        )


def check_config(types: OperandTypes, config: Config, target: Target, beside_bytes: int = 0) -> None:
    """Checks a configuration: its sizes, the dtypes, the tensor memory and the shared memory. Raises ValueError."""
    if config.cluster > 1 and config.cluster_along != "m":
        raise ValueError(
            f"cluster_along='k' can be used only on Hopper, and this device is {target.kind}: leave `cluster` and "
            "`cluster_along` out of `config`"
        )
    if config.cluster > min(MOST_CTAS, target.num_cores):
        raise ValueError(
            f"`cluster` must be 1 or {MOST_CTAS}, and at most the {target.num_cores} cores, got {config.cluster}"
        )
    if config.swap_operands:
        raise ValueError(f"`swap_operands` must be False on {target.kind}, got True: leave it out of `config`")
    if config.tile_m != TILE_M:
        raise ValueError(f"`tile_m` must be {TILE_M} on {target.kind}, the rows of tensor memory, got {config.tile_m}")
    if config.schedule != "cooperative":
        raise ValueError(
            f"`schedule` must be 'cooperative' on {target.kind}, where a tile is stored beside the products of the "
            f"next in any case, got {config.schedule!r}: leave it out of `config`"
        )
    limits.check_stages(config)
    # A right operand whose rows run along n is loaded in boxes of 128 bytes along n.
    width = TILE_N_UNIT if types.layouts.transpose_rhs else SWIZZLE_BYTES // jnp.dtype(types.dtype).itemsize
    unit = width * config.cluster
    if config.tile_n % unit or config.tile_n > TMA_BOX_LIMIT:
        raise ValueError(
            f"`tile_n` must be a multiple of {unit} (for cluster={config.cluster} and {jnp.dtype(types.dtype).name} "
            f"operands, transpose_rhs={types.layouts.transpose_rhs}) and at most {TMA_BOX_LIMIT}, got {config.tile_n}"
        )
    if config.cluster > 1 and types.travel.forwards:
        raise ValueError(
            "`cluster` must be 1 by the transport 'ring' on Blackwell (only the first CTA of a pair knows when the "
            f"operands are there), got {config.cluster}: leave it out of `config`"
        )
    if types.sides > 1:
        limits.check_sides(types, config, rhs_columns(config))
    if types.block_scaled:
        _check_block_scales(config)
    if types.boxes > 1:
        if types.addend and config.tile_n > MOST_COLUMNS_WITH_ADDENDS:
            raise ValueError(
                f"`tile_n` must be at most {MOST_COLUMNS_WITH_ADDENDS} where the epilogue has several results and "
                f"addends, got {config.tile_n}: reduce it"
            )
        beside_bytes += limits.more_boxes_bytes(config.tile_m, types)
    needed = smem_bytes(config, types.out_dtype, types.transport, block_scaled=types.block_scaled)
    limits.check_fits(needed + beside_bytes, types, config, target)


def _check_block_scales(config: Config) -> None:
    if config.tile_n > SCALE_TILE_ROWS:
        raise ValueError(
            f"`tile_n` must be at most {SCALE_TILE_ROWS} for block scales (in tensor memory they lie beside "
            f"{ACCUMULATORS} accumulators, {SCALE_TILE_ROWS} columns of the right operand at a time), got "
            f"{config.tile_n}"
        )
    if (columns := tensor_memory_columns(config, block_scaled=True)) > TENSOR_MEMORY_COLUMNS:
        raise ValueError(
            f"the config needs {columns} columns of tensor memory, and there are {TENSOR_MEMORY_COLUMNS}: reduce "
            f"`stages` ({config.stages}) or `tile_n` ({config.tile_n})"
        )
