"""Derivatives of any operation, to any order: XLA's in forward mode, and products of their own in reverse mode."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from overlap.frame import by_xla
from overlap.frame.linear import tangents_of
from overlap.frame.operands import F32, LaunchPlan, Operands, in_f32
from overlap.kernels.config import FLOAT8, FLOAT16
from overlap.kernels.layouts import OperandLayouts


def derivative(
    operands: Operands, tangents: Operands, plan: LaunchPlan, evaluate: Callable[[], Any], fused: Callable[..., Any]
) -> tuple[Any, Any]:
    """The results, and the linear map of the tangents, for `Primitive`; `fused`: the operation itself."""
    if operands.is_block_scaled:
        return evaluate(), _tangents_by_xla(operands, tangents, plan)
    products: Any = None
    if plan.activation is None:
        results = evaluate()
    else:
        # The activation's derivative needs what goes into it, so here it runs by XLA, behind the kernel.
        bare, sums = in_f32(operands, plan), dataclasses.replace(operands, scalars=())
        products, kept = by_xla.whole(sums, bare, None) if bare.config is None else fused(sums, bare)
        results = tuple(plan.activation(z, operands.scalars).astype(plan.out_dtype) for z in products), kept
    tangent = tangents_of(
        results, operands, tangents, saved=(products, results[1]),
        by_xla=lambda given: by_xla.whole(given, plan, plan.applied(given)),
        backward=functools.partial(_cotangents, plan),
    )  # fmt: skip
    return results, tangent


def _tangents_by_xla(operands: Operands, tangents: Operands, plan: LaunchPlan) -> Any:
    """XLA's tangents of the results, in either mode."""
    leaves, structure = jax.tree.flatten(operands)
    directions = structure.flatten_up_to(tangents)
    moved = {i: x for i, x in enumerate(directions) if not isinstance(x, ad.Zero)}

    def of_moved(*given: Any) -> Any:
        changed = dict(zip(moved, given, strict=True))
        values = jax.tree.unflatten(structure, [changed.get(i, x) for i, x in enumerate(leaves)])
        return by_xla.whole(values, plan, plan.applied(values))

    return jax.jvp(of_moved, [leaves[i] for i in moved], list(moved.values()))[1]


def _cotangents(plan: LaunchPlan, operands: Operands, saved: Any, cotangents: Any, wanted: Operands) -> Operands:
    """Cotangents of the operands, in the dtypes that are wanted or wider: nothing else is rounded below f32.

    What was gathered is gathered anew, but for a left operand that is a result as well. Cotangents of results may be
    symbolic zeros.
    """
    operation, (d_outs, d_kept), (products, gathered) = plan.operation, cotangents, saved
    is_kept = gathered is not None
    d_outs, d_kept = tuple(map(ad.instantiate_zeros, d_outs)), None if isinstance(d_kept, ad.Zero) else d_kept
    if not is_kept:
        # (What is not used of it, jax and XLA leave out.)
        whole = operation.gathered(operands, plan.layouts)
    else:
        whole = operation.gathered(dataclasses.replace(operands, lhs=None), plan.layouts)
        whole = dataclasses.replace(whole, lhs=gathered)
    several = len(d_outs) > 1 or d_kept is not None
    sums = _Sums()
    rest = {name: [] for name in ("rhs_list", "column_scales", "biases", "addends")}
    for index, ((rhs, column_scale, _, addend), d_out) in enumerate(zip(whole.of_each, d_outs, strict=True)):
        wants = wanted.of_each[index]
        d_z = d_out.astype(F32)
        if plan.activation is not None:
            d_z, d_scalars = _through_activation(plan, products[index], operands.scalars, d_out)
            sums.add_to_scalars(d_scalars)
        d_sum, d_part, direct = d_z, d_out, None
        if operation.reduces:
            # What devices have summed up goes to all of them, in the dtype in which it came.
            own = d_out if plan.activation is None else d_z.astype(d_out.dtype)
            both = None
            if wanted.lhs is not None and not whole.is_scaled:
                both = operation.spread_and_times(own, rhs, wanted.lhs, plan)
            direct, d_part = (None, operation.spread(own)) if both is None else both
            d_z = d_part.astype(F32)
        row = 1.0 if whole.row_scale is None else by_xla.to_rank(whole.row_scale[..., None], d_z.ndim)
        column = 1.0 if column_scale is None else by_xla.to_rank(column_scale, d_z.ndim)
        d_column = None
        if wanted.row_scale is not None or wants[1] is not None:
            weighted = d_z * _times(plan, whole.lhs, rhs, plan.layouts, F32)
            d_column = None if wants[1] is None else (weighted * row).sum(axis=tuple(range(d_z.ndim - 1)))
            if wanted.row_scale is not None:
                sums.rows = _plus(sums.rows, _like((weighted * column).sum(axis=-1), operands.row_scale.ndim))
        # The cotangent as it came, where nothing has changed it: the kernel can multiply it if it has the operands'
        # dtype.
        unchanged = plan.activation is None or operation.reduces
        g = d_part if unchanged and not whole.is_scaled else d_z * row * column
        if wanted.lhs is not None:
            dtype = F32 if several else wanted.lhs
            if direct is None and d_kept is None:
                direct = operation.lhs_cotangent(g, rhs, dtype, plan)
            if direct is None:
                sums.lhs = _plus(sums.lhs, _of_lhs(plan, whole.lhs, rhs, g, dtype))
            sums.direct = _plus(sums.direct, direct)
        d_rhs = None
        if wants[0] is not None:
            if not (is_kept or d_kept is not None or whole.is_scaled):
                d_rhs = operation.rhs_cotangent(operands.lhs, g, wants[0], plan)
            if d_rhs is None:
                d_rhs = _of_rhs(plan, whole.lhs, rhs, g, wants[0])
        rest["rhs_list"].append(d_rhs)
        rest["column_scales"].append(d_column)
        rest["biases"].append(None if wants[2] is None else d_sum.sum(axis=tuple(range(d_sum.ndim - 1))))
        rest["addends"].append(None if wants[3] is None else _like(d_sum, addend.ndim))
    given = {name: tuple(found) for name, found in rest.items() if getattr(operands, name) is not None}
    found = Operands(
        lhs=sums.lhs, row_scale=sums.rows, scalars=operands.scalars if sums.scalars is None else sums.scalars, **given
    )
    found = operation.scattered(found, d_kept, operands, wanted, plan.layouts)
    return dataclasses.replace(found, lhs=_plus(found.lhs, sums.direct))


@dataclasses.dataclass
class _Sums:
    """What all right operands add to; `direct`: what is scattered already."""

    lhs: Any = None
    direct: Any = None
    rows: Any = None
    scalars: tuple[Any, ...] | None = None

    def add_to_scalars(self, more: Sequence[Any]) -> None:
        before = self.scalars or (None,) * len(more)
        self.scalars = tuple(_plus(a, b) for a, b in zip(before, more, strict=True))


def _plus(total: Any, more: Any) -> Any:
    return more if total is None else total if more is None else total + more


def _like(x: jax.Array, rank: int) -> jax.Array:
    """Summed over the batch if the operand has none."""
    return x.sum(axis=0) if x.ndim > rank else x


def _through_activation(plan: LaunchPlan, z: jax.Array, scalars: Any, cotangent: jax.Array) -> tuple[jax.Array, tuple]:
    """Cotangents of what goes into the activation: of the product, and of the scalars (None for integers)."""
    activation: Any = plan.activation
    floats = [index for index, scalar in enumerate(scalars) if jnp.issubdtype(scalar.dtype, jnp.floating)]

    def of_floats(z: jax.Array, *values: Any) -> jax.Array:
        changed = dict(zip(floats, values, strict=True))
        return activation(z, [changed.get(i, x) for i, x in enumerate(scalars)]).astype(plan.out_dtype)

    d_z, *d_floats = jax.vjp(of_floats, z, *(scalars[index] for index in floats))[1](cotangent)
    found = dict(zip(floats, d_floats, strict=True))
    return d_z, tuple(found.get(index) for index in range(len(scalars)))


# d_lhs = g rhsᵀ and d_rhs = lhsᵀ g, each in the form in which its operand lies in memory: nothing is transposed.


def _of_lhs(plan: LaunchPlan, lhs: jax.Array, rhs: jax.Array, g: jax.Array, dtype: Any) -> jax.Array:
    layouts = plan.layouts
    dtype = F32 if g.ndim > lhs.ndim else dtype
    if layouts.transpose_lhs:
        d = _times(plan, rhs, g, OperandLayouts(layouts.transpose_rhs, True), dtype)
    else:
        d = _times(plan, g, rhs, OperandLayouts(False, not layouts.transpose_rhs), dtype)
    return _like(d, lhs.ndim)


def _of_rhs(plan: LaunchPlan, lhs: jax.Array, rhs: jax.Array, g: jax.Array, dtype: Any) -> jax.Array:
    layouts = plan.layouts
    if lhs.ndim > rhs.ndim and not layouts.transpose_lhs:
        # The rows of all batch elements contract as one.
        lhs, g = lhs.reshape(-1, lhs.shape[-1]), g.reshape(-1, g.shape[-1])
    dtype = F32 if g.ndim > rhs.ndim else dtype
    if layouts.transpose_rhs:
        d = _times(plan, g, lhs, OperandLayouts(True, layouts.transpose_lhs), dtype)
    else:
        d = _times(plan, lhs, g, OperandLayouts(not layouts.transpose_lhs, False), dtype)
    return _like(d, rhs.ndim)


def _times(plan: LaunchPlan, lhs: jax.Array, rhs: jax.Array, layouts: OperandLayouts, dtype: Any) -> jax.Array:
    """A product of the backward pass, in `dtype` or in f32, whatever the dtypes of its operands: nothing is lost."""
    if lhs.dtype != rhs.dtype and {lhs.dtype, rhs.dtype} & set(FLOAT16):
        # What is exact in 8 bits is so in 16.
        lhs, rhs = (x.astype(y.dtype) if x.dtype in FLOAT8 else x for x, y in ((lhs, rhs), (rhs, lhs)))
    if lhs.dtype != rhs.dtype:
        if not (lhs.dtype in FLOAT8 and rhs.dtype in FLOAT8):
            lhs, rhs = lhs.astype(F32), rhs.astype(F32)
        return by_xla.times(lhs, rhs, layouts, F32)
    dtype = jnp.dtype(dtype if dtype in FLOAT16 else F32)
    return plan.operation.times(lhs, rhs, layouts, dtype, plan)
