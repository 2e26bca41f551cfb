"""Products by XLA with their epilogues, and the products of the backward passes."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from overlap.frame import arguments, block_scales
from overlap.frame import products as of_products
from overlap.frame.activation import BoundActivation
from overlap.frame.operands import Operands, accumulator, to_rank
from overlap.frame.signatures import AnyMesh
from overlap.kernels.config import FLOAT8
from overlap.kernels.operations import OperandLayouts
from overlap.kernels.target import current_target
from overlap.primitives.types import Tree


def products(
    operands: Operands, layouts: OperandLayouts, out_dtype: DTypeLike, activation: BoundActivation
) -> tuple[jax.Array, ...]:
    """Returns activation(row_scale · (lhs @ rhs[i]) · column_scale[i] + bias[i] + addend[i]) for each right operand.

    An activation that combines the right operands makes one result.
    """
    operands = block_scales.dequantized(operands, layouts)
    sizes = operands.group_sizes
    bare = not operands.has_epilogue and activation is None and (sizes is None or not operands.more_lefts)
    wide = out_dtype if bare else accumulator(operands.lhs.dtype)

    def multiply(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return times(lhs, rhs, layouts, wide) if sizes is None else times_of_groups(lhs, rhs, sizes, layouts, wide)

    outs = tuple(multiply(*pair) for pair in operands.pairs)
    if operands.more_lefts:
        outs = (functools.reduce(operator.add, outs),)
    return outs if bare else finish(outs, operands, out_dtype, activation)


def finish(
    products: tuple[jax.Array, ...], operands: Operands, out_dtype: DTypeLike, activation: BoundActivation
) -> tuple[jax.Array, ...]:
    """Applies the epilogue to whole products, and returns results of dtype `out_dtype`."""
    values = []
    product = of_products.of(operands)
    for z, (_, column_scale, bias, addend) in zip(products, operands.per_rhs, strict=True):
        z = z if operands.row_scale is None else z * product.of_rows(operands.row_scale, z)
        z = z if column_scale is None else z * product.of_columns(column_scale, z)
        z = z if bias is None else z + product.of_columns(bias, z)
        z = z if addend is None else z + to_rank(addend.astype(z.dtype), z.ndim)
        values.append(z)
    applied = product.guarded(activation)
    if applied is not None:
        values = applied(values)
    elif operands.has_epilogue:
        values = map(product.cleared, values)
    return tuple(x.astype(out_dtype) for x in values)


def times(lhs: jax.Array, rhs: jax.Array, layouts: OperandLayouts, dtype: DTypeLike) -> jax.Array:
    """Returns one product, [(batch,) m, n] of `dtype`, of operands with or without a leading dimension."""
    k_of_lhs = 0 if layouts.transpose_lhs else 1
    k_of_rhs = 1 if layouts.transpose_rhs else 0
    numbers = (((k_of_lhs,), (k_of_rhs,)), ((), ()))

    def one(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        rhs = guarded(rhs) if lhs.size else rhs
        return lax.dot_general(lhs, rhs, numbers, preferred_element_type=dtype)

    batch_axes = tuple(0 if x.ndim == 3 else None for x in (lhs, rhs))
    return jax.vmap(one, in_axes=batch_axes)(lhs, rhs) if 0 in batch_axes else one(lhs, rhs)


def times_of_groups(
    lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, layouts: OperandLayouts, dtype: DTypeLike
) -> jax.Array:
    """Returns a product of groups of rows, of `dtype`, by XLA's own operation for them.

    rhs is [groups, k, n] (or transposed): [m, n]. Or it is [m, n], and the rows of each group are contracted: [groups,
    k, n].
    """
    if lhs.dtype in FLOAT8:
        lhs, rhs = lhs.astype(jnp.bfloat16), rhs.astype(jnp.bfloat16)
    if rhs.ndim == 2:
        contracting, grouped = ((0,), (0,)), []
    else:
        contracting, grouped = ((1,), (2 if layouts.transpose_rhs else 1,)), [0]
    numbers = lax.RaggedDotDimensionNumbers((contracting, ((), ())), [0], grouped)
    # XLA multiplies rows of other groups by zero instead of leaving them out, so none of them may hold a NaN.
    product = of_products.Groups(sizes)
    lhs = product.cleared(lhs)
    rhs = rhs if grouped else product.cleared(rhs)
    return lax.ragged_dot_general(lhs, rhs, sizes, numbers, preferred_element_type=accumulator(lhs.dtype)).astype(dtype)


def guarded(rhs: jax.Array, mesh: AnyMesh | None = None) -> jax.Array:
    """Returns the right operand of a product, behind a barrier on CPUs. `mesh`: its mesh, if not the context's.

    XLA for CPUs (jaxlib 0.10.2 to 0.12.0.1) computes wrong numbers where it fuses a product into a reduction and the
    right operand is a constant of one value, such as `jnp.ones` or the cotangent of a sum. Behind a barrier it does not
    see the constant.
    """
    return lax.optimization_barrier(rhs) if current_target(mesh).platform == "cpu" else rhs


def in_device_memory(function: Callable[[Tree], Tree], operands: Tree) -> Tree:
    """Calls `function` with the operands in device memory. Its result is brought to where the first operand lies."""
    leaves = jax.tree.leaves(operands)
    if all(arguments.memory(x) == "device" for x in leaves):
        return function(operands)
    result = function(jax.device_put(operands, jax.memory.Space.Device))
    return result if arguments.memory(leaves[0]) == "device" else jax.device_put(result, jax.memory.Space.Host)
