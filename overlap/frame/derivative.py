"""Derivatives of any operation, to any order.

Forward mode differentiates the operation as XLA computes it. Reverse mode has a backward pass of its own, whose
products may be kernels.

Names: `d_x` is the cotangent of `x`. z is what goes into the activation (or is the result, without one). g is the
cotangent of a product lhs @ rhs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.interpreters import ad
from jax.typing import DTypeLike

from overlap.frame import by_xla, products
from overlap.frame.activation import BEFORE_ACTIVATION
from overlap.frame.kernel import kernel_of
from overlap.frame.linear import tangents_of
from overlap.frame.operands import F32, Leaf, Operands, Results, accumulator
from overlap.frame.operation import LaunchPlan
from overlap.kernels.config import FLOAT8, FLOAT16
from overlap.kernels.operations import OperandLayouts


def derivative(
    operands: Operands,
    tangents: Operands,
    plan: LaunchPlan,
    evaluate: Callable[[], Results],
    fused: Callable[..., Results],
) -> tuple[Results, Results]:
    """Returns the results of an operation and their tangents: the rule of the primitive.

    Args:
      operands: arrays.
      tangents: of the operands; symbolic zeros where an operand has none.
      plan: of the operation.
      evaluate: returns the results of the operation, without tracing it anew.
      fused: the operation itself, called as `fused(operands, plan)`.

    Returns:
      The results and their tangents. The tangents are a linear map with its own transpose (`overlap.frame.linear`).
    """
    if operands.is_block_scaled:
        return evaluate(), _tangents_by_xla(operands, tangents, plan)
    products: Sequence[jax.Array] | None = None
    if plan.activation is None:
        results = evaluate()
    else:
        # The activation's derivative needs z. So the kernel stores z, and XLA applies the activation to it. (A kernel
        # that stored z and the result was no faster.)
        bare = kernel_of(plan.operation).before_activation(plan)
        sums = dataclasses.replace(operands, scalars=())
        needs_a_call_for_each = plan.operation.combines and not bare.operation.takes_lists
        calls = [sums.for_rhs(i) for i in range(len(sums.rhs_list))] if needs_a_call_for_each else [sums]
        runs = [fused(given, bare.of(given)) for given in calls]
        products = tuple(checkpoint_name(z, BEFORE_ACTIVATION) for outs, _ in runs for z in outs)
        # What an operation returns beside its products, a gathered operand, is the same in all calls.
        kept = runs[0][1]
        results = plan.activated(operands, products), kept
    tangent = tangents_of(
        results,
        operands,
        tangents,
        by_xla=kernel_of(plan.operation).of_tangents(plan),
        backward=functools.partial(_cotangents, plan),
        saved=(products, results[1]),
    )
    return results, tangent


def _tangents_by_xla(operands: Operands, tangents: Operands, plan: LaunchPlan) -> Results:
    """Returns the tangents of the operation, by XLA.

    Reverse mode transposes this computation, so it runs by XLA as well.
    """
    leaves, structure = jax.tree.flatten(operands)
    directions = structure.flatten_up_to(tangents)
    moved = {i: x for i, x in enumerate(directions) if not isinstance(x, ad.Zero)}

    def of_moved(*given: jax.Array) -> Results:
        changed = dict(zip(moved, given, strict=True))
        values = jax.tree.unflatten(structure, [changed.get(i, x) for i, x in enumerate(leaves)])
        return plan.by_xla(values)

    return jax.jvp(of_moved, [leaves[i] for i in moved], list(moved.values()))[1]


def _cotangents(
    plan: LaunchPlan,
    operands: Operands,
    saved: tuple[Sequence[jax.Array] | None, jax.Array | None],
    cotangents: Results,
    wanted: Operands,
) -> Operands:
    """Returns the operands' cotangents, each in the wanted dtype or a wider one. Sums over a batch are in f32.

    Operands that the operation gathers are gathered again. The exception is a left operand that the operation returned
    gathered: it was saved.

    Args:
      plan: of the operation.
      operands: arrays.
      saved: z of each right operand (None without an activation), and the gathered left operand if it is a result.
      cotangents: of the results; may be symbolic zeros.
      wanted: the dtype in the place of each operand; None for operands whose cotangent is not asked for.
    """
    operation = plan.operation
    kernel = kernel_of(operation)
    d_outs, d_kept = cotangents
    d_outs = tuple(map(ad.instantiate_zeros, d_outs))
    d_kept = None if isinstance(d_kept, ad.Zero) else d_kept
    products, gathered = saved
    saved_lhs = gathered if operands.passenger is None else None
    whole = _gathered(plan, operands, saved_lhs)
    d_scalars = operands.scalars
    if products is not None:
        d_outs, d_scalars = _through_activation(plan, products, operands, d_outs)
    d_parts = d_outs
    d_lefts = None
    if operation.after.moves:
        d_part, d_lefts = _through_move(plan, d_outs[0], whole, wanted)
        d_parts = (d_part,)
    parts = [
        _through_epilogue(plan, whole, wanted, index, *d) for index, d in enumerate(zip(d_outs, d_parts, strict=True))
    ]
    gs = [part.g for part in parts]
    direct = None
    wanted_rights = (*wanted.rhs_list, *wanted.more_rights)
    if wanted.lhs is not None and len(whole.lefts) == 1 and not operation.after.moves and d_kept is None:
        # The gathered left operand, if the right operands' cotangents need it, may travel with this kernel.
        needs_lhs = saved_lhs is None and any(x is not None for x in wanted_rights)
        both = kernel.lhs_cotangent(gs, whole, operands.lhs if needs_lhs else None, wanted.lhs, plan)
        if both is not None:
            direct, arrived = both
            whole = whole if arrived is None else dataclasses.replace(whole, lhs=arrived)
    # Several results have one left operand. Products that are added have one cotangent.
    g_of_pair = gs if len(gs) > 1 else gs * len(whole.pairs)
    pairs = [(_pair(whole, *pair), g) for pair, g in zip(whole.pairs, g_of_pair, strict=True)]
    if d_lefts is None:
        wanted_lefts = (wanted.lhs, *wanted.more_lefts) * len(gs)
        d_lefts = [
            None if dtype is None or direct is not None else _lhs_cotangent(plan, pair, g, dtype)
            for (pair, g), dtype in zip(pairs, wanted_lefts, strict=True)
        ]
    d_lhs, *more_lefts = d_lefts if len(whole.lefts) > 1 else [functools.reduce(_add, d_lefts)]
    d_rights = tuple(
        None if dtype is None else _rhs_cotangent(plan, pair, g, dtype)
        for (pair, g), dtype in zip(pairs, wanted_rights, strict=True)
    )
    found = Operands(
        d_lhs,
        d_rights[: len(whole.rhs_list)],
        row_scale=functools.reduce(_add, [part.row_scale for part in parts]),
        column_scales=operands.column_scales and tuple(part.column_scale for part in parts),
        biases=operands.biases and tuple(part.bias for part in parts),
        addends=operands.addends and tuple(part.addend for part in parts),
        scalars=d_scalars,
        more_lefts=tuple(more_lefts),
        more_rights=d_rights[len(whole.rhs_list) :],
    )
    found = operation.before.scattered(found, d_kept, operands, wanted, plan.layouts)
    if operands.passenger is not None:
        found = dataclasses.replace(found, passenger=operation.after.scattered_passenger(d_kept, wanted))
    return dataclasses.replace(found, lhs=_add(found.lhs, direct))


def _gathered(plan: LaunchPlan, operands: Operands, saved_lhs: jax.Array | None) -> Operands:
    """The operands of one device's product. The left one is not gathered anew if it was saved.

    (jax and XLA remove gathers that turn out to be unused.)
    """
    before = plan.operation.before
    if saved_lhs is None:
        return before.gathered(operands, plan.layouts)
    rest = before.gathered(dataclasses.replace(operands, lhs=None), plan.layouts)
    return dataclasses.replace(rest, lhs=saved_lhs)


def _through_move(
    plan: LaunchPlan, d_result: jax.Array, whole: Operands, wanted: Operands
) -> tuple[jax.Array, Sequence[jax.Array] | None]:
    """The cotangent of a device's product, which has moved; and of all left operands, if one kernel computes both."""
    # Where products are summed, each needs the cotangent of the whole sum. It travels in the dtype of the result.
    own = d_result.astype(plan.out_dtype)
    wanted_lefts = [x for x in (wanted.lhs, *wanted.more_lefts) if x is not None]
    if wanted_lefts and not whole.is_scaled:
        both = kernel_of(plan.operation).lhs_and_product_cotangents(own, whole.rights, wanted_lefts[0], plan)
        if both is not None:
            d_lefts, d_part = both
            return d_part, d_lefts
    return plan.operation.after.product_cotangent(own), None


@dataclasses.dataclass(frozen=True)
class _Part:
    """The cotangents of one product, `g`, and of its epilogue; None for those that are not wanted."""

    g: jax.Array
    row_scale: jax.Array | None
    column_scale: jax.Array | None
    bias: jax.Array | None
    addend: jax.Array | None


def _through_epilogue(
    plan: LaunchPlan, whole: Operands, wanted: Operands, index: int, d_out: jax.Array, d_part: jax.Array
) -> _Part:
    """The cotangents of the epilogue of result `index`, but for its activation, and of its product.

    `whole` are the operands, gathered. `d_out` is the cotangent of what goes into the activation, and `d_part` that of
    this device's part of it: another one where products are summed over devices.
    """
    _, column_scale, _, addend = whole.per_rhs[index]
    _, wants_column, wants_bias, wants_addend = wanted.per_rhs[index]
    product = products.of(whole)
    wide = accumulator(plan.form.dtype)
    d_z = d_part.astype(wide)
    row = 1.0 if whole.row_scale is None else product.of_rows(whole.row_scale, d_z)
    column = 1.0 if column_scale is None else product.of_columns(column_scale, d_z)
    d_row = d_column = None
    if wanted.row_scale is not None or wants_column is not None:
        terms = [_times(plan, _pair(whole, *pair), plan.layouts, wide) for pair in whole.for_rhs(index).pairs]
        weighted = product.cleared(d_z) * functools.reduce(_add, terms)
        if wants_column is not None:
            d_column = product.sum_of_rows(weighted * row, wide)
        if wanted.row_scale is not None and whole.row_scale is not None:
            d_row = _sum_to_rank((weighted * column).sum(axis=-1), whole.row_scale.ndim)
    return _Part(
        # Where no scale has changed the cotangent, take it as it came: then it may have the operands' dtype, which a
        # kernel needs, and not f32.
        g=d_z * row * column if whole.is_scaled else d_part,
        row_scale=d_row,
        column_scale=d_column,
        bias=None if wants_bias is None else product.sum_of_rows(d_out, wide),
        addend=None if wants_addend is None else _sum_to_rank(d_out.astype(wide), addend.ndim),
    )


def _add(total: Leaf, more: Leaf) -> Leaf:
    return more if total is None else total if more is None else total + more


def _sum_to_rank(x: jax.Array, rank: int) -> jax.Array:
    """A cotangent for an operand of `rank` dimensions: summed over the batch if the operand has none."""
    return x.sum(axis=0) if x.ndim > rank else x


def _through_activation(
    plan: LaunchPlan, products: Sequence[jax.Array], operands: Operands, cotangents: Sequence[jax.Array]
) -> tuple[Sequence[jax.Array], tuple]:
    """Cotangents of what goes into the activation: of each z, in its dtype, and of the scalars (None for integers)."""
    scalars = operands.scalars
    floats = [index for index, scalar in enumerate(scalars) if jnp.issubdtype(scalar.dtype, jnp.floating)]

    def of_floats(products: Sequence[jax.Array], *values: jax.Array) -> tuple[jax.Array, ...]:
        changed = dict(zip(floats, values, strict=True))
        given = dataclasses.replace(operands, scalars=tuple(changed.get(i, x) for i, x in enumerate(scalars)))
        return plan.activated(given, products)

    d_products, *d_floats = jax.vjp(of_floats, products, *(scalars[i] for i in floats))[1](tuple(cotangents))
    found = dict(zip(floats, d_floats, strict=True))
    return d_products, tuple(found.get(index) for index in range(len(scalars)))


def _pair(whole: Operands, lhs: jax.Array, rhs: jax.Array) -> Operands:
    return Operands(lhs, (rhs,), group_sizes=whole.group_sizes)


# d_lhs = g rhsᵀ and d_rhs = lhsᵀ g, each laid out as its operand is. So nothing is transposed in memory.


def _lhs_cotangent(plan: LaunchPlan, pair: Operands, g: jax.Array, dtype: DTypeLike) -> jax.Array:
    if pair.group_sizes is not None:
        by_kernel = kernel_of(plan.operation).lhs_cotangent([g], pair, None, dtype, plan)
        if by_kernel is not None:
            return by_kernel[0]
    lhs, rhs = pair.lhs, pair.rhs_list[0]
    layouts = plan.layouts
    dtype = F32 if g.ndim > lhs.ndim else dtype
    if layouts.transpose_lhs:
        d = _times(plan, _pair(pair, rhs, g), OperandLayouts(layouts.transpose_rhs, True), dtype)
    else:
        d = _times(plan, _pair(pair, g, rhs), OperandLayouts(False, not layouts.transpose_rhs), dtype)
    return _sum_to_rank(d, lhs.ndim)


def _rhs_cotangent(plan: LaunchPlan, pair: Operands, g: jax.Array, dtype: DTypeLike) -> jax.Array:
    by_kernel = kernel_of(plan.operation).rhs_cotangent(pair, g, dtype, plan)
    if by_kernel is not None:
        return by_kernel
    lhs, rhs = pair.lhs, pair.rhs_list[0]
    layouts = plan.layouts
    if lhs.ndim > rhs.ndim and not layouts.transpose_lhs:
        # The right operand is shared by all batch elements: their rows are contracted as one long dimension.
        lhs, g = lhs.reshape(-1, lhs.shape[-1]), g.reshape(-1, g.shape[-1])
    dtype = F32 if g.ndim > rhs.ndim else dtype
    if layouts.transpose_rhs:
        d = _times(plan, _pair(pair, g, lhs), OperandLayouts(True, layouts.transpose_lhs), dtype)
    else:
        d = _times(plan, _pair(pair, lhs, g), OperandLayouts(not layouts.transpose_lhs, False), dtype)
    return _sum_to_rank(d, rhs.ndim)


def _times(plan: LaunchPlan, pair: Operands, layouts: OperandLayouts, dtype: DTypeLike) -> jax.Array:
    """Returns a product of the backward pass, in `dtype` or f32.

    Operands of different dtypes are converted to one that holds both.
    """
    if pair.group_sizes is not None:
        return kernel_of(plan.operation).times(pair, layouts, dtype, plan)
    lhs, rhs = pair.lhs, pair.rhs_list[0]
    # All 8-bit floats are exact in 16 bits.
    if lhs.dtype in FLOAT8 and rhs.dtype in FLOAT16:
        lhs = lhs.astype(rhs.dtype)
    if rhs.dtype in FLOAT8 and lhs.dtype in FLOAT16:
        rhs = rhs.astype(lhs.dtype)
    if lhs.dtype != rhs.dtype:
        both_in_8_bits = lhs.dtype in FLOAT8 and rhs.dtype in FLOAT8
        if not both_in_8_bits:
            lhs = lhs.astype(F32)
            rhs = rhs.astype(F32)
        return by_xla.times(lhs, rhs, layouts, F32)
    dtype = jnp.dtype(dtype if dtype in FLOAT16 else F32)
    return kernel_of(plan.operation).times(Operands(lhs, (rhs,)), layouts, dtype, plan)
