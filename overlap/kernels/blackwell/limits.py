"""What the Blackwell mainloop can run, and how much shared memory and tensor memory that takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from overlap.kernels.config import SWIZZLE_BYTES, Config
from overlap.kernels.tma import limits
from overlap.kernels.tma.limits import BARRIER_BYTES, EXCHANGING, TILE_N_UNIT, TMA_BOX_LIMIT

if TYPE_CHECKING:
    from overlap.kernels.limits import Sizes
    from overlap.kernels.target import Target

# Lanes of the tensor memory: rows of an accumulator.
TILE_M = 128
TENSOR_MEMORY_COLUMNS = 512
# One is filled by the tensor cores while the other one is read by the epilogue.
ACCUMULATORS = 2
# Buffers for what peers have computed of a tile, so that one box is on its way while another one is added.
TERM_BUFFERS = 2
# Where the tensor memory begins that has been allocated.
ADDRESS_BYTES = 4


def rhs_columns(config: Config) -> int:
    """How many columns of the right operand one CTA loads: of a pair of CTAs, each loads half."""
    return config.tile_n // config.cluster


def smem_bytes(config: Config, dtype: Any, out_dtype: Any, transport: str = "") -> int:
    """Shared memory of one CTA in bytes, barriers included; with the buffers of a transport."""
    row_bytes = config.tile_k * jnp.dtype(dtype).itemsize
    operand_bytes = config.stages * (config.tile_m + rhs_columns(config)) * row_bytes
    epilogue_bytes = limits.epilogue_bytes(config, config.tile_m, jnp.dtype(out_dtype))
    term_bytes = TERM_BUFFERS * config.tile_m * SWIZZLE_BYTES if transport in EXCHANGING else 0
    # Two for each buffer; and a second one for tiles that have been stored.
    term_barriers = 2 * TERM_BUFFERS + 1 if transport in EXCHANGING else 0
    barriers = 2 * config.stages + 2 * ACCUMULATORS + term_barriers
    transport_bytes = limits.transport_bytes(config, jnp.dtype(out_dtype), transport, config.tile_m)
    buffer_bytes = operand_bytes + epilogue_bytes + term_bytes + transport_bytes
    return buffer_bytes + barriers * BARRIER_BYTES + ADDRESS_BYTES


def check_types(sizes: Sizes) -> None:
    """Whether the tensor cores and the epilogue take these dtypes. Raises NotImplementedError."""
    limits.check_dtypes(sizes)


def check_config(sizes: Sizes, config: Config, target: Target) -> None:
    """Whether a configuration fits itself, the dtypes, the tensor memory and the shared memory. Raises ValueError."""
    if config.tile_m != TILE_M:
        raise ValueError(f"`tile_m` must be {TILE_M} on {target.kind}, the rows of tensor memory, got {config.tile_m}")
    limits.check_tile_k(sizes, config)
    # A right operand whose rows run along n is loaded in boxes of 128 bytes of these.
    width = TILE_N_UNIT if sizes.layouts.transpose_rhs else SWIZZLE_BYTES // jnp.dtype(sizes.dtype).itemsize
    unit = width * config.cluster
    if config.tile_n % unit or config.tile_n > TMA_BOX_LIMIT:
        raise ValueError(
            f"`tile_n` must be a multiple of {unit} (for cluster={config.cluster} and {jnp.dtype(sizes.dtype).name} "
            f"operands, transpose_rhs={sizes.layouts.transpose_rhs}) and at most {TMA_BOX_LIMIT}, got {config.tile_n}"
        )
    if config.cluster > 1 and config.cluster_along != "m":
        raise ValueError(
            "`cluster_along` must be 'm' on Blackwell, where a pair of CTAs computes one tile of twice the rows, got "
            f"{config.cluster_along!r}"
        )
    if config.cluster > 1 and sizes.transport == "ring":
        raise ValueError(
            "`cluster` must be 1 by the transport 'ring' on Blackwell (of a pair's operands only the first CTA knows "
            f"that they are there), got {config.cluster}: leave it out of `config`"
        )
    limits.check_stores(sizes, config, config.tile_n)
    limits.check_fits(smem_bytes(config, sizes.dtype, sizes.out_dtype, sizes.transport), sizes, config, target)
