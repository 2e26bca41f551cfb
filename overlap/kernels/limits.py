"""Checks whether a fused kernel can run a problem with a configuration; used by calls, the chooser and the tuner."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax.typing import DTypeLike

from overlap.kernels.architectures import mainloop_of
from overlap.kernels.config import Config, tile_k
from overlap.kernels.layouts import PLAIN, OperandLayouts
from overlap.kernels.operations import Transport
from overlap.kernels.target import Target
from overlap.primitives.integers import ceil_div

TMA_ROW_BYTES = 16
# The transports of products that are summed over devices.
SUMMING = ("push", "broadcast", "one_shot")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes, dtypes and layouts of a product that a kernel shall compute, and its transport.

    Attributes:
      m: rows of the left operand (of one shard, in a collective).
      n: columns of the right operand.
      k: the contraction dimension.
      dtype: the dtype of the operands.
      out_dtype: the dtype in which the kernel writes the result.
      layouts: how the operands lie in memory.
      transport: how a fused collective moves data. "pull" and "ring" move an operand. "push" moves parts of sums;
        "broadcast" moves parts, and then the sums to all devices; "one_shot" moves all parts to all devices. Empty:
        nothing moves.
      m_name: what the caller calls `m`, for messages.
      n_name: what the caller calls `n`, for messages.
      block_scaled: whether the operands have block scales.
      sides: how many right operands, of `n` columns each, lie side by side in a tile.
      part: "m" or "n" if this size is only one device's part of the dimension of the operands.
    """

    m: int
    n: int
    k: int
    dtype: DTypeLike
    out_dtype: DTypeLike
    layouts: OperandLayouts = PLAIN
    transport: Transport = ""
    m_name: str = "m"
    n_name: str = "n"
    block_scaled: bool = False
    sides: int = 1
    part: str = ""


def check(sizes: Sizes, config: Config, target: Target) -> None:
    """Checks that the mainloop of a device can run a product with a configuration.

    Raises:
      ValueError: the configuration contradicts itself or exceeds the device.
      NotImplementedError: the problem is valid, but this kernel cannot serve it.
    """
    mainloop = mainloop_of(target)
    mainloop.check_types(sizes)
    if config.chunk_bytes % TMA_ROW_BYTES:
        raise ValueError(f"`chunk_bytes` must be a multiple of {TMA_ROW_BYTES}, got {config.chunk_bytes}")
    if config.split_k > 1 and (sizes.transport or config.stream_k > 1):
        where = "in a fused collective" if sizes.transport else f"with stream_k={config.stream_k}"
        raise ValueError(f"`split_k` must be 1 {where}, got {config.split_k}: leave it out of `config`")
    _check_cluster(sizes, config, target)
    if sizes.transport in SUMMING and (config.cluster > 1 or config.stream_k > 1):
        raise ValueError(
            "`cluster` and `stream_k` must be 1 where results are exchanged (each CTA draws whole tiles), got "
            f"{config.cluster} and {config.stream_k}: leave them out of `config`"
        )
    mainloop.check_config(sizes, config, target)
    k, layouts = sizes.k, sizes.layouts
    named = {"m": (sizes.m_name, sizes.m), "n": (sizes.n_name, sizes.n), "k": ("k", k)}
    for name, size in named.values():
        if size < 1:
            raise NotImplementedError(
                f'the fused kernel needs {name} to be at least 1, got {name}={size}: use implementation="xla"'
            )
    for what, dimension, kind in (
        ("lhs", "m" if layouts.transpose_lhs else "k", sizes.dtype),
        ("rhs", "k" if layouts.transpose_rhs else "n", sizes.dtype),
        ("the result", "n", sizes.out_dtype),
    ):
        (name, row), itemsize = named[dimension], jnp.dtype(kind).itemsize
        of = f"each device's part of {what}" if dimension == sizes.part and what != "the result" else what
        if row * itemsize % TMA_ROW_BYTES:
            raise NotImplementedError(
                f"the copy engine needs the rows of {of} to be multiples of {TMA_ROW_BYTES} bytes, got {name}="
                f"{row} elements of {itemsize} bytes: pad {name} to a multiple of "
                f'{TMA_ROW_BYTES // itemsize}, or use implementation="xla"'
            )
    depth = tile_k(sizes.dtype)
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


def _check_cluster(sizes: Sizes, config: Config, target: Target) -> None:
    """Checks the size of clusters, and whether the operation, the device and the other sizes allow them along k.

    Raises ValueError.

    Args:
      sizes: the product.
      config: sizes of the kernel.
      target: the device.
    """
    cluster, along_k = config.cluster, config.cluster_along == "k"
    allowed = "1, 2 or 4 with cluster_along='k'" if along_k else "1 or 2"
    if cluster not in ((1, 2, 4) if along_k else (1, 2)) or cluster > target.num_cores:
        way_out = ": 4 needs cluster_along='k'" if cluster == 4 and not along_k else ""
        raise ValueError(
            f"`cluster` must be {allowed}, and at most the {target.num_cores} cores, got {cluster}{way_out}"
        )
    if config.ctas_per_tile == 1:
        return
    if sizes.transport or not target.is_hopper:
        where = "only in `matmul`" if sizes.transport else f"only on Hopper, and this device is {target.kind}"
        raise ValueError(f"cluster_along='k' can be used {where}: leave `cluster` and `cluster_along` out of `config`")
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
