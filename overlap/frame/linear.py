"""Linear maps with a transpose of their own. They make operations differentiable in both modes, to any order.

An operation's derivative is a linear map of the operands' tangents. Forward mode (`jax.jvp`) evaluates the map, and
reverse mode (`jax.grad`) transposes it. Here the map itself is ordinary JAX, run by XLA. Its transpose is the
operation's own backward pass, which may run kernels. So the operation has both modes; with `jax.custom_vjp` it would
have reverse mode only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from overlap.frame.operands import Leaf, summed_as
from overlap.kernels.varying import summed_like
from overlap.primitives.types import Tree

# The dtype in which a cotangent is wanted; None if it is not wanted.
Wanted = np.dtype | None
# Called as transpose(residuals, wanted, cotangents), see `linear_map`; returns the cotangents of the operands.
Transpose = Callable[[Sequence[jax.Array], Sequence[Wanted], Sequence[Leaf]], Sequence[Leaf]]

_linear_p = Primitive("overlap_linear")
_linear_p.multiple_results = True


def linear_map(
    forward: Callable[[Sequence[jax.Array], Sequence[jax.Array]], Sequence[jax.Array]],
    transpose: Transpose,
    residuals: Sequence[jax.Array],
    operands: Sequence[jax.Array],
) -> list[jax.Array]:
    """Returns `forward(residuals, operands)`, which is linear in `operands`, with a transpose of its own.

    Args:
      forward: in terms of JAX's own operations. It captures no arrays.
      transpose: called as `transpose(residuals, wanted, cotangents)`; returns a cotangent for each operand.
        `cotangents` are those of the results, and may be symbolic zeros (`ad.Zero`). `wanted` has an entry for each
        operand: the dtype in which its cotangent is wanted, or None if it is not wanted. That dtype is that of the
        operand, or f32 if the cotangent will be added to others first. A returned cotangent may have more bits; it is
        rounded once, at the end.
      residuals: arrays.
      operands: arrays.

    Returns:
      The results of `forward`.
    """
    count = len(residuals)
    traced = jax.make_jaxpr(lambda *values: list(forward(values[:count], values[count:])))(*residuals, *operands)
    return _linear_p.bind(*residuals, *operands, forward=traced, transpose=transpose, count=count)


@_linear_p.def_impl
def _evaluate(*values: jax.Array, forward: ClosedJaxpr, transpose: Transpose, count: int) -> list[jax.Array]:
    return jaxpr_as_fun(forward)(*values)


@_linear_p.def_abstract_eval
def _types(*values: Leaf, forward: ClosedJaxpr, transpose: Transpose, count: int) -> list[Leaf]:
    return forward.out_avals


mlir.register_lowering(_linear_p, mlir.lower_fun(_evaluate, multiple_results=True))


def _jvp(
    primals: Sequence[jax.Array], tangents: Sequence[Leaf], *, forward: ClosedJaxpr, transpose: Transpose, count: int
) -> tuple[list[jax.Array], list[Leaf] | None]:
    outs = _linear_p.bind(*primals, forward=forward, transpose=transpose, count=count)
    sums: list[Leaf] | None = None
    moved = [index for index in range(count) if type(tangents[index]) is not ad.Zero]
    if moved:

        def of_residuals(*given: jax.Array) -> list[jax.Array]:
            values = list(primals)
            for index, value in zip(moved, given, strict=True):
                values[index] = value
            return jaxpr_as_fun(forward)(*values)

        _, sums = jax.jvp(of_residuals, [primals[i] for i in moved], [tangents[i] for i in moved])
    if any(type(tangent) is not ad.Zero for tangent in tangents[count:]):
        directions = [ad.instantiate_zeros(tangent) for tangent in tangents[count:]]
        of_operands = _linear_p.bind(*primals[:count], *directions, forward=forward, transpose=transpose, count=count)
        sums = of_operands if sums is None else [a + b for a, b in zip(sums, of_operands, strict=True)]
    return outs, sums


def _transposed(
    cotangents: Sequence[Leaf], *values: Leaf, forward: ClosedJaxpr, transpose: Transpose, count: int
) -> list[jax.Array | None]:
    # Operands whose cotangents are asked for are `UndefinedPrimal`s, which have a type only.
    operands = values[count:]
    wanted = [x.aval.dtype if ad.is_undefined_primal(x) else None for x in operands]
    results = transpose(values[:count], wanted, cotangents)
    found = [
        None if dtype is None else _as_operand(result, operand.aval)
        for operand, dtype, result in zip(operands, wanted, results, strict=True)
    ]
    return [None] * count + found


def _as_operand(cotangent: jax.Array, operand: Leaf) -> jax.Array:
    """A cotangent, given the operand's type. If devices sum it up, it is rounded before that, though not to 8 bits."""
    travels = jnp.float32 if operand.dtype.itemsize < 2 else summed_as(operand.dtype)
    return summed_like(cotangent.astype(travels), operand).astype(operand.dtype)


def mapped_in_front(values: Sequence[jax.Array], dims: Sequence[int | None]) -> tuple[int, list[jax.Array]]:
    """For batching rules: returns the size of the mapped dimension, and the values with that dimension in front.

    None in `dims` means that a value is the same for all elements. It has no such dimension, and stays as it is.
    """
    (size,) = {value.shape[dim] for value, dim in zip(values, dims, strict=True) if dim is not None}
    return size, [x if dim is None else jnp.moveaxis(x, dim, 0) for x, dim in zip(values, dims, strict=True)]


def _batched(
    values: Sequence[jax.Array], dims: Sequence[int | None], *, forward: ClosedJaxpr, transpose: Transpose, count: int
) -> tuple[list[jax.Array], list[int]]:
    size, values = mapped_in_front(values, dims)
    axes = [None if dim is None else 0 for dim in dims]

    def forward_of_all(residuals: Sequence[jax.Array], operands: Sequence[jax.Array]) -> list[jax.Array]:
        return jax.vmap(jaxpr_as_fun(forward), in_axes=axes, axis_size=size)(*residuals, *operands)

    def transpose_of_all(
        residuals: Sequence[jax.Array], wanted: Sequence[Wanted], cotangents: Sequence[Leaf]
    ) -> list[jax.Array | None]:
        # An operand that all elements share gets the sum of their cotangents. Ask for f32, so that they are not rounded
        # before they are added.
        axes_of_operands = axes[count:]
        dtypes = [
            dtype if axis == 0 or dtype is None else jnp.dtype(jnp.float32)
            for dtype, axis in zip(wanted, axes_of_operands, strict=True)
        ]

        def of_one(residuals: Sequence[jax.Array], cotangents: Sequence[Leaf]) -> list[jax.Array | None]:
            return list(transpose(residuals, dtypes, cotangents))

        given = [ad.instantiate_zeros(cotangent) for cotangent in cotangents]
        results = jax.vmap(of_one, in_axes=(axes[:count], 0), axis_size=size)(list(residuals), given)
        return [
            result if axis == 0 or result is None else result.sum(axis=0)
            for result, axis in zip(results, axes_of_operands, strict=True)
        ]

    outs = linear_map(forward_of_all, transpose_of_all, values[:count], values[count:])
    return outs, [0] * len(outs)


ad.primitive_jvps[_linear_p] = _jvp
ad.primitive_transposes[_linear_p] = _transposed
batching.primitive_batchers[_linear_p] = _batched


def tangents_of(
    outs: Tree,
    operands: Tree,
    tangents: Tree,
    *,
    by_xla: Callable[..., Tree],
    backward: Callable[..., Tree],
    saved: Tree = None,
) -> Tree:
    """Returns the tangents of an operation's results, for `derivative`.

    Args:
      outs: the results.
      operands: the operands.
      tangents: of the operands; symbolic zeros where an operand has none.
      by_xla: the operation in terms of JAX's own operations, for forward mode: from operands to results.
      backward: called as `backward(operands, saved, cotangents, wanted)` for reverse mode; returns the
        operands' cotangents. `wanted` has dtypes in the place of arrays, and None for cotangents that are not wanted;
        see `linear_map`.
      saved: further arrays that `backward` needs, a pytree.
    """
    leaves, structure = jax.tree.flatten(operands)
    directions = structure.flatten_up_to(tangents)
    moved = [i for i, x in enumerate(directions) if not isinstance(x, (ad.Zero, SymbolicZero))]
    out_structure = jax.tree.structure(outs)
    if not moved:
        return jax.tree.map(jnp.zeros_like, outs)
    residuals, all_structure = jax.tree.flatten((operands, saved))

    def forward(residuals: Sequence[jax.Array], directions: Sequence[jax.Array]) -> list[jax.Array]:
        values = list(residuals[: len(leaves)])

        def of_moved(*given: jax.Array) -> Tree:
            changed = dict(zip(moved, given, strict=True))
            return by_xla(jax.tree.unflatten(structure, [changed.get(i, x) for i, x in enumerate(values)]))

        return jax.tree.leaves(jax.jvp(of_moved, [values[i] for i in moved], list(directions))[1])

    def transpose(
        residuals: Sequence[jax.Array], wanted: Sequence[Wanted], cotangents: Sequence[Leaf]
    ) -> list[jax.Array | None]:
        operands, saved = jax.tree.unflatten(all_structure, residuals)
        wanted_at = dict(zip(moved, wanted, strict=True))
        wanted_of_all = jax.tree.unflatten(structure, [wanted_at.get(i) for i in range(len(leaves))])
        of_outs = jax.tree.unflatten(out_structure, cotangents)
        found = structure.flatten_up_to(backward(operands, saved, of_outs, wanted_of_all))
        return [None if wanted_at[i] is None else found[i] for i in moved]

    return jax.tree.unflatten(out_structure, linear_map(forward, transpose, residuals, [directions[i] for i in moved]))
