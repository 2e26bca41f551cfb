"""Checks whether a fused kernel can run a problem with a configuration; used by calls, the chooser and the tuner."""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp

from overlap.kernels.architectures import mainloop_of
from overlap.kernels.config import Config, tile_k
from overlap.kernels.mainloop import OperandTypes
from overlap.kernels.operations import EXCHANGING, Dimension
from overlap.kernels.target import Target
from overlap.primitives.integers import ceil_div

TMA_ROW_BYTES = 16


def check(
    types: OperandTypes, sizes: Mapping[str, tuple[str, int]], config: Config, target: Target, part: Dimension = ""
) -> None:
    """Checks that the mainloop of a device can run a product with a configuration.

    Args:
      types: the types of the operands.
      sizes: m, n (of each right operand) and k, each after its name for messages.
      config: sizes of the kernel.
      target: the device.
      part: "m" or "n" if this size is only one device's part of the dimension of the operands.

    Raises:
      ValueError: the configuration contradicts itself or exceeds the device.
      NotImplementedError: the problem is valid, but this kernel cannot serve it.
    """
    mainloop = mainloop_of(target)
    mainloop.check_types(types)
    if config.chunk_bytes % TMA_ROW_BYTES:
        raise ValueError(f"`chunk_bytes` must be a multiple of {TMA_ROW_BYTES}, got {config.chunk_bytes}")
    if config.split_k > 1 and (types.transport or config.stream_k > 1):
        where = "in a fused collective" if types.transport else f"with stream_k={config.stream_k}"
        raise ValueError(f"`split_k` must be 1 {where}, got {config.split_k}: leave it out of `config`")
    _check_cluster(types, config, target)
    if types.transport in EXCHANGING and (config.cluster > 1 or config.stream_k > 1):
        raise ValueError(
            "`cluster` and `stream_k` must be 1 where results are exchanged (each CTA draws whole tiles), got "
            f"{config.cluster} and {config.stream_k}: leave them out of `config`"
        )
    mainloop.check_config(types, config, target)
    (_, k), layouts = sizes["k"], types.layouts
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
        (name, row), itemsize = sizes[dimension], jnp.dtype(kind).itemsize
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


def _check_cluster(types: OperandTypes, config: Config, target: Target) -> None:
    """Checks the size of clusters, and whether the operation, the device and the other sizes allow them along k.

    Raises ValueError.

    Args:
      types: the types of the operands.
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
    if types.transport or not target.is_hopper:
        where = "only in `matmul`" if types.transport else f"only on Hopper, and this device is {target.kind}"
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
