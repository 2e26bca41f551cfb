"""Checks whether a fused kernel can run a problem with a configuration; used by calls, the chooser and the tuner.

Here are the limits that all mainloops share: those of copies by TMA, of dtypes, and of shared memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax.typing import DTypeLike

from overlap.kernels.config import FLOAT8, FLOAT16, SIDE_COLUMNS, SWIZZLE_BYTES, Config, tile_k
from overlap.kernels.operations import TRANSPORTS, Dimension
from overlap.primitives.integers import ceil_div

if TYPE_CHECKING:
    from overlap.kernels.mainloop import Mainloop, OperandTypes
    from overlap.kernels.target import Target

TMA_ROW_BYTES = 16
BARRIER_BYTES = 8
F32_BYTES = 4
# The most warpgroups that have an epilogue buffer.
EPILOGUE_WARPGROUPS = 2
TMA_BOX_LIMIT = 256
SWIZZLE_ROWS = 8
TILE_N_UNIT = 64
# The columns of an epilogue buffer: so many a warpgroup stores at a time.
EPILOGUE_COLUMNS = 64
# Reserved for the compiler, which aligns each buffer to at most this number of bytes.
RESERVED_BYTES = 1024
# The size of `staging.Mail`: two mailboxes, padded to the alignment of the next buffer; and its number of barriers, the
# barrier `stored` included.
MAIL_BYTES = 1024
MAIL_BARRIERS = 5
# In a product of groups of rows, a box of zeros of this many rows lies in shared memory, with its barrier.
ZERO_ROWS = 8
ZEROS_BYTES = ZERO_ROWS * SWIZZLE_BYTES + BARRIER_BYTES


def check(
    mainloop: Mainloop,
    types: OperandTypes,
    sizes: Mapping[str, tuple[str, int]],
    config: Config,
    target: Target,
    part: Dimension = "",
    beside_bytes: int = 0,
) -> None:
    """Checks that a mainloop can run a product with a configuration.

    Args:
      mainloop: the mainloop of the device.
      types: the types of the operands.
      sizes: m, n (of each right operand) and k, each after its name for messages.
      config: sizes of the kernel.
      target: the device.
      part: "m" or "n" if this size is only one device's part of the dimension of the operands.
      beside_bytes: shared memory that the kernel needs beside that of the mainloop and the transport.

    Raises:
      ValueError: the configuration contradicts itself or exceeds the device.
      NotImplementedError: the problem is valid, but this kernel cannot serve it.
    """
    mainloop.check_types(types)
    if config.chunk_bytes % TMA_ROW_BYTES:
        raise ValueError(f"`chunk_bytes` must be a multiple of {TMA_ROW_BYTES}, got {config.chunk_bytes}")
    if config.split_k > 1 and (types.transport or config.stream_k > 1):
        where = "in a fused collective" if types.transport else f"with stream_k={config.stream_k}"
        raise ValueError(f"`split_k` must be 1 {where}, got {config.split_k}: leave it out of `config`")
    if types.travel.exchanges and (config.cluster > 1 or config.stream_k > 1):
        raise ValueError(
            "`cluster` and `stream_k` must be 1 where results are exchanged (each CTA draws whole tiles), got "
            f"{config.cluster} and {config.stream_k}: leave them out of `config`"
        )
    mainloop.check_config(types, config, target, beside_bytes)
    _, k = sizes["k"]
    layouts = types.layouts
    for name, size in sizes.values():
        if size < 1:
            raise NotImplementedError(
                f'the fused kernel needs {name} to be at least 1, got {name}={size}: use implementation="xla"'
            )
    for what, dimension, kind in (
        ("lhs", "m" if layouts.transpose_lhs else "k", types.dtype),
        ("rhs", "k" if layouts.transpose_rhs else "n", types.dtype),
        ("the result", "n", types.out_dtype),
    ):
        name, row = sizes[dimension]
        itemsize = jnp.dtype(kind).itemsize
        of = f"each device's part of {what}" if dimension == part and what != "the result" else what
        if row * itemsize % TMA_ROW_BYTES:
            raise NotImplementedError(
                f"the copy engine needs the rows of {of} to be multiples of {TMA_ROW_BYTES} bytes, got {name}="
                f"{row} elements of {itemsize} bytes: pad {name} to a multiple of "
                f'{TMA_ROW_BYTES // itemsize}, or use implementation="xla"'
            )
    depth = tile_k(types.dtype)
    k_steps = ceil_div(k, depth)
    if k_steps < config.ctas_per_tile:
        raise NotImplementedError(
            f"k={k} has {k_steps} k steps of {depth}, fewer than the {config.cluster} CTAs of a cluster "
            "that divide them among them (cluster_along='k'): reduce `cluster`, or leave it out of `config`"
        )
    if k_steps % config.split_k:
        raise NotImplementedError(
            f"`split_k` must divide the {k_steps} k steps of k={k} ({depth} each), got {config.split_k}: "
            'name a divisor, or use implementation="xla"'
        )


def check_groups(config: Config) -> None:
    """Raises ValueError if a product of groups of rows cannot be cut as the configuration says."""
    if not config.cluster == config.stream_k == config.split_k == 1:
        raise ValueError(
            "`cluster`, `stream_k` and `split_k` of `config` must be 1 in a grouped product, got "
            f"{config.cluster}, {config.stream_k} and {config.split_k}: leave them out"
        )


def rows_loaded(config: Config, m: int, dtype: DTypeLike, transpose_lhs: bool = False) -> int:
    """Returns how many rows of a tile are loaded from a left operand with `m` rows (per batch element, per shard).

    Args:
      config: sizes.
      m: rows of the operand.
      dtype: dtype of the operand.
      transpose_lhs: whether the operand lies in memory as [k, m].
    """
    # Rows are loaded in whole swizzle atoms. A transposed operand is loaded in whole boxes, each of 128 bytes along m.
    unit = tile_k(dtype) if transpose_lhs else SWIZZLE_ROWS
    return min(config.tile_m, ceil_div(m, unit) * unit)


def transport_bytes(config: Config, out_dtype: jnp.dtype, transport: str, wg_rows: int) -> int:
    """Returns a transport's bytes of shared memory, with its barriers; `wg_rows`: rows of a box that is exchanged."""
    travel = TRANSPORTS[transport]
    # When devices exchange parts of a tile, a chunk is at most one box.
    largest = wg_rows * SWIZZLE_BYTES if travel.exchanges else config.chunk_bytes
    chunk_bytes = min(config.chunk_bytes, largest) if travel.in_chunks else 0
    if travel.in_strips:
        itemsize = out_dtype.itemsize
        chunk_bytes = max(chunk_bytes, config.strip_rows(itemsize) * config.tile_n * itemsize)
    chunk_bytes *= config.chunk_buffers
    barriers = (config.chunk_buffers if travel.in_chunks else 0) + (MAIL_BARRIERS if travel.exchanges else 0)
    return chunk_bytes + (MAIL_BYTES if travel.exchanges else 0) + barriers * BARRIER_BYTES


def stages_bytes(config: Config) -> int:
    """Returns the shared memory of the pipeline stages of one CTA."""
    return config.stages * (config.tile_m + config.tile_n) * SWIZZLE_BYTES


def cluster_sums_bytes(config: Config) -> int:
    """Returns the memory, shared with the stages, in which a CTA stores sums for the CTAs of its cluster."""
    return 0 if config.ctas_per_tile == 1 else config.tile_m * config.tile_n * F32_BYTES


def cluster_sums_barriers(config: Config, wg_tiles: int) -> int:
    """Returns how many barriers order the exchange of sums in a cluster, if a tile has at most `wg_tiles` parts."""
    return 0 if config.ctas_per_tile == 1 else 2 * wg_tiles + 1


def check_dtypes(types: OperandTypes) -> None:
    """Checks that the tensor cores and the epilogue take these dtypes. Raises NotImplementedError."""
    dtype = jnp.dtype(types.dtype)
    out_dtype = jnp.dtype(types.out_dtype)
    in_dtypes = FLOAT16 + FLOAT8
    out_dtypes = FLOAT16 if types.travel.of_operand else (*FLOAT16, jnp.dtype(jnp.float32))
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


def check_stages(config: Config) -> None:
    """Checks that `stages` is at least 2. Raises ValueError."""
    if config.stages < 2:
        raise ValueError(f"`stages` must be at least 2, since a stage is released one k step late, got {config.stages}")


def check_sides(types: OperandTypes, config: Config, wg_columns: int) -> None:
    """Checks that a warpgroup has the columns of all right operands that lie side by side. Raises ValueError."""
    unit = types.sides * SIDE_COLUMNS
    if wg_columns % unit:
        raise ValueError(
            f"an `activation` of {types.sides} arrays needs warpgroup tiles of a multiple of {unit} columns, got "
            f"{wg_columns} of tile_n={config.tile_n}: set tile_n={TMA_BOX_LIMIT}"
        )
    for name, value in (("stream_k", config.stream_k), ("split_k", config.split_k), ("cluster", config.ctas_per_tile)):
        if value > 1:
            raise ValueError(
                f"`{name}` must not cut tiles along k with an `activation` of {types.sides} arrays, got {value}: leave "
                "it out of `config`"
            )


def check_fits(needed: int, types: OperandTypes, config: Config, target: Target) -> None:
    """Checks that `needed` bytes of shared memory fit. Raises ValueError."""
    needed += RESERVED_BYTES
    if needed > target.smem_limit_bytes:
        # Blackwell's tiles have 128 rows.
        fewest = SWIZZLE_ROWS if config.swap_operands else 64 if target.is_hopper else config.tile_m
        least = {"stages": 2, "tile_n": TILE_N_UNIT, "tile_m": fewest}
        chunks = ("chunk_bytes", "chunk_buffers") if types.travel.in_chunks else ()
        fields = {**least, **dict.fromkeys(chunks, 1)}
        given = vars(config)
        larger = [f"`{name}` ({given[name]})" for name, size in fields.items() if given[name] > size]
        ways_out = [f"reduce {', '.join(larger)}"] if larger else []
        if cluster_sums_bytes(config) > stages_bytes(config):
            ways_out.append("leave out cluster_along='k', for which a CTA keeps the sums of a tile")
        raise ValueError(
            f"the config needs {needed} bytes of shared memory and {target.kind} has {target.smem_limit_bytes} per "
            f"CTA: {', or '.join(ways_out)}"
        )


def epilogue_bytes(rows: int, out_dtype: jnp.dtype) -> int:
    """Returns the bytes of shared memory of the epilogue buffers of all warpgroups, which have `rows` rows together."""
    return rows * EPILOGUE_COLUMNS * out_dtype.itemsize


def more_boxes_bytes(rows: int, types: OperandTypes) -> int:
    """Returns how much larger the epilogue buffers are with several addends or results, with their barriers."""
    more = types.boxes - 1
    return more * (epilogue_bytes(rows, jnp.dtype(types.out_dtype)) + EPILOGUE_WARPGROUPS * BARRIER_BYTES)


def _names(dtypes: tuple[jnp.dtype, ...]) -> str:
    *most, last = [dtype.name for dtype in dtypes]
    return f"{', '.join(most)} or {last}"
