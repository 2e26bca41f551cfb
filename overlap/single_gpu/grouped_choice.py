"""Chooses the configuration of a product of groups of rows, and says what its kernels take.

The sizes of the groups are data. So the model is asked for as many products as there are groups, each with as many rows
as a group has on average: the time of equal groups.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp

from overlap.choice.crossover import Cause
from overlap.choice.dispatch import Explanation
from overlap.choice.problem import Problem
from overlap.choice.space import candidates, expected_us
from overlap.kernels import limits
from overlap.kernels.architectures import mainloop_of
from overlap.kernels.config import FLOAT8, Config
from overlap.kernels.mainloop import OperandTypes
from overlap.kernels.operations import OperandLayouts
from overlap.primitives.integers import ceil_div
from overlap.single_gpu.grouped_product import ZERO_BYTES

if TYPE_CHECKING:
    from overlap.single_gpu.grouped_operation import Grouped, Product


def config_of(operands: Grouped, product: Product) -> Config:
    """Returns the configuration with the least predicted time of those that fit.

    Raises:
      NotImplementedError: no kernel can serve the product.
    """
    check(operands, product, None)
    lhs, (groups,), sides = operands.lhs, operands.sizes.shape, operands.sides
    dtypes = lhs.dtype.name, jnp.dtype(product.out_dtype).name
    (m, k), n = lhs.shape, product.shape(lhs.shape, operands.rhs_list[0].shape, groups)[-1]
    of_group = max(ceil_div(m, groups), 1)
    if product.kind == "contraction":
        problem = Problem("matmul", k, n, of_group, *dtypes, layout="tn", batch=groups)
    else:
        layout, k = "nt" if product.transpose_rhs else "nn", k * len(operands.lefts)
        problem = Problem("matmul", of_group, sides * n, k, *dtypes, layout=layout, batch=groups, sides=sides)
    found = [config for config in candidates(problem, product.target) if _is_plain(config)]
    found.sort(key=lambda config: expected_us(config, problem, product.target))
    why = "no configuration of the search fits this product"
    for config in found:
        try:
            check(operands, product, config)
        except ValueError as error:
            why = str(error)
            continue
        return config
    raise NotImplementedError(f'{why}: use implementation="xla"')


def _is_plain(config: Config) -> bool:
    return config.cluster == config.stream_k == config.split_k == 1


def check(operands: Grouped, product: Product, config: Config | None) -> None:
    """Checks that the kernel can compute a product; with a configuration if one is given.

    Raises:
      ValueError: the configuration contradicts itself, the product or the device.
      NotImplementedError: the kernel cannot serve the product.
    """
    lhs, rhs, sides = operands.lhs, operands.rhs_list[0], operands.sides
    target, contracts = product.target, product.kind == "contraction"
    layouts = OperandLayouts(transpose_lhs=contracts, transpose_rhs=product.transpose_rhs)
    if sides > 2:
        raise NotImplementedError(
            f'the kernel takes at most two right operands, got {sides}: make several calls, or use implementation="xla"'
        )
    if contracts and lhs.dtype in FLOAT8:
        raise NotImplementedError('8-bit operands cannot be contracted along rows: use implementation="xla"')
    (m, k), n = lhs.shape, product.shape(lhs.shape, rhs.shape, operands.sizes.shape[0])[-1]
    rows, depth = (k, m) if contracts else (m, k)
    given = config or Config(tile_n=128 * sides, stages=2, schedule="cooperative")
    if not _is_plain(given):
        raise ValueError(
            "`cluster`, `stream_k` and `split_k` of `config` must be 1 in a grouped product, got "
            f"{given.cluster}, {given.stream_k} and {given.split_k}: leave them out"
        )
    dtypes = lhs.dtype, rhs.dtype, jnp.dtype(product.out_dtype)
    types = OperandTypes(rows, *dtypes, layouts, sides=sides, grouped="k" if contracts else "m")
    named = {"m": ("k" if contracts else "m", rows), "n": ("n", n), "k": ("m" if contracts else "k", depth)}
    zeros_bytes = 0 if contracts else ZERO_BYTES + limits.BARRIER_BYTES
    limits.check(mainloop_of(target), types, named, given, target, beside_bytes=zeros_bytes)


def explanation(operands: Grouped, product: Product, result: tuple[int, ...]) -> Explanation:
    """Returns what `explain` says of a product of the backward pass."""
    pairs = f" of {len(operands.lefts)} pairs" if operands.more_lefts else ""
    shapes = f"to {'x'.join(map(str, result))}{pairs} {jnp.dtype(operands.lhs.dtype).name}"
    why = "the kernels of the forward pass serve this product"
    return Explanation("grouped_matmul", "fused", None, why, Cause.PREDICTED, product.target, plan="backward pass",
                       shapes=shapes)  # fmt: skip
