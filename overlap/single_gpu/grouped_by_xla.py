"""Products of groups of rows, and their epilogues, by XLA.

They run where no kernel can, and where an epilogue is differentiated.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad

from overlap.frame.activation import on_all
from overlap.frame.linear import Wanted, linear_map
from overlap.frame.operands import Leaf, accumulator
from overlap.kernels import groups
from overlap.kernels.config import FLOAT8

if TYPE_CHECKING:
    from overlap.single_gpu.grouped_operation import Grouped, Product


def by_xla(operands: Grouped, product: Product) -> jax.Array:
    """Computes a product with XLA's own operation for groups of rows."""
    lhs, sizes = operands.lhs, operands.sizes
    wide = accumulator(lhs.dtype)
    if product.kind == "contraction":
        return _ragged(lhs, operands.rhs_list[0], sizes, ((0,), (0,)), []).astype(product.out_dtype)
    contracting = ((1,), (2 if product.transpose_rhs else 1,))
    lefts = operands.lefts if operands.more_lefts else [lhs] * len(operands.rhs_list)
    products = [
        _ragged(lhs, rhs, sizes, contracting, [0]).astype(wide)
        for lhs, rhs in zip(lefts, operands.rhs_list, strict=True)
    ]
    if operands.more_lefts:
        products = [functools.reduce(operator.add, products)]
    return with_epilogue(products, operands, product)


def _ragged(
    lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, contracting: tuple[tuple[int], tuple[int]], grouped: list[int]
) -> jax.Array:
    if lhs.dtype in FLOAT8:
        lhs, rhs = lhs.astype(jnp.bfloat16), rhs.astype(jnp.bfloat16)
    numbers = lax.RaggedDotDimensionNumbers((contracting, ((), ())), [0], grouped)
    # XLA multiplies rows of other groups by zero instead of leaving them out, so none of them may hold a NaN.
    lhs = cleared(lhs, sizes)
    rhs = rhs if grouped else cleared(rhs, sizes)
    return lax.ragged_dot_general(lhs, rhs, sizes, numbers, preferred_element_type=accumulator(lhs.dtype))


def with_epilogue(products: Sequence[jax.Array], operands: Grouped, product: Product) -> jax.Array:
    """Returns the result of a product of rows from the bare products with each right operand, by XLA."""
    values = scaled(products, operands)
    if product.activation is not None:
        activation = on_all(functools.partial(product.activation, scalars=operands.scalars), len(values) > 1)
        values = activation(filled(values, operands.sizes))
    (out,) = values
    if operands.has_epilogue or product.activation is not None:
        out = cleared(out, operands.sizes)
    return out.astype(product.out_dtype)


def scaled(products: Sequence[jax.Array], operands: Grouped) -> Sequence[jax.Array]:
    """Returns the bare products times their scales, plus their biases."""
    values, nothing = [], [None] * len(products)
    in_groups = _in_groups(operands.sizes, products[0].shape[0])
    rows = None if operands.row_scale is None else jnp.where(in_groups, operands.row_scale[:, None], 1)
    for z, scale, bias in zip(products, operands.column_scales or nothing, operands.biases or nothing, strict=True):
        z = z if rows is None else z * rows
        z = z if scale is None else z * _of_rows(scale, operands.sizes, z.shape[0])
        values.append(z if bias is None else z + _of_rows(bias, operands.sizes, z.shape[0]))
    return values


def filled(values: Sequence[jax.Array], sizes: jax.Array) -> list[jax.Array]:
    """Gives rows of no group the values of a row that counts, before an activation.

    At zero, an activation may have no finite derivative, which times a cotangent of zero is no number.
    """
    return [jnp.where(_in_groups(sizes, z.shape[0]), z, lax.stop_gradient(z[:1])) for z in values]


def cleared(rows: jax.Array, sizes: jax.Array) -> jax.Array:
    """Sets the rows behind all groups to zero."""
    return jnp.where(_in_groups(sizes, rows.shape[0]), rows, jnp.zeros_like(rows))


def _in_groups(sizes: jax.Array, m: int) -> jax.Array:
    """Which rows belong to a group, [m, 1]."""
    return (jnp.arange(m, dtype=jnp.int32) < sizes.sum(dtype=jnp.int32))[:, None]


def _of_rows(of_groups: jax.Array, sizes: jax.Array, m: int) -> jax.Array:
    """Returns for each row the vector of its group: [groups, n] to [m, n].

    The transpose sums the rows of each group in one product, which always adds in the same order.
    """
    _, ends = groups.bounds(sizes, m)
    group = jnp.minimum((jnp.arange(m)[:, None] >= ends[None, :]).sum(1, dtype=jnp.int32), sizes.shape[0] - 1)

    def forward(residuals: Sequence[jax.Array], operands: Sequence[jax.Array]) -> list[jax.Array]:
        return [operands[0][residuals[0]]]

    def transpose(
        residuals: Sequence[jax.Array], wanted: Sequence[Wanted], cotangents: Sequence[Leaf]
    ) -> list[jax.Array]:
        rows = ad.instantiate_zeros(cotangents[0])
        own = (residuals[0][None, :] == jnp.arange(of_groups.shape[0])[:, None]).astype(rows.dtype)
        # What is no number in one group must not reach the others, as zero times it would.
        is_number = jnp.isfinite(rows)
        total, others = (
            lax.dot(own, part, precision=lax.Precision.HIGHEST)
            for part in (jnp.where(is_number, rows, 0), jnp.where(is_number, 0, 1).astype(rows.dtype))
        )
        return [jnp.where(others > 0, jnp.nan, total)]

    (out,) = linear_map(forward, transpose, [group], [of_groups])
    return out
