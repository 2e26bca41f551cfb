"""The same operations by XLA: NCCL, then cuBLAS."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from overlap.collectives.gathered_lhs import Operands, Plan, same_on_ring
from overlap.kernels.config import FLOAT8
from overlap.kernels.staging import Forms
from overlap.kernels.varying import axes_of, part_of


def all_gather_lhs_matmul(operands: Operands, plan: Plan) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
    """Each product, and the gathered left operand if it is asked for."""
    gathered, rows = _gathered(operands, plan)
    outs = tuple(
        _times(gathered, side, plan.forms, plan.out_dtype)
        if rows is None and columns is None
        else _scaled(_times(gathered, side, plan.forms, jnp.float32), rows, columns).astype(plan.out_dtype)
        for side, columns in zip(operands.sides, _columns(operands), strict=True)
    )
    return outs, same_on_ring(gathered, operands.lhs, plan.ring) if plan.returns_gathered else None


def all_gather_lhs_matmul_backward(
    operands: Operands, plan: Plan, d_outs: tuple[jax.Array, ...], d_kept: jax.Array | None
) -> Operands:
    """Cotangents of all operands: products + one reduce-scatter, and products with the left operand gathered anew.

    The products for the left operand are summed in f32 before that, with the cotangent of the gathered operand itself.
    """
    gathered, rows = _gathered(operands, plan)
    axis_name, forms, lhs = plan.ring.axis_name, plan.forms, operands.lhs
    d_gathered: Any = (
        0.0 if d_kept is None else part_of(d_kept.astype(jnp.float32), axes_of(lhs, *operands.sides, *d_outs))
    )
    d_rows: Any = None
    d_sides, d_columns = [], []
    for side, columns, d_out in zip(operands.sides, _columns(operands), d_outs, strict=True):
        g = d_out
        if rows is not None or columns is not None:
            d_z = d_out.astype(jnp.float32)
            bare = _times(gathered, side, forms, jnp.float32)
            if rows is not None:
                part = (d_z * _scaled(bare, None, columns)).sum(axis=-1)
                d_rows = part if d_rows is None else d_rows + part
            if columns is not None:
                d_columns.append((d_z * _scaled(bare, rows, None)).sum(axis=tuple(range(d_z.ndim - 1))))
            g = _scaled(d_z, rows, columns).astype(d_out.dtype)
        d_gathered += _times(g, _wide(side, g), Forms(transpose_rhs=not forms.transpose_rhs), jnp.float32)
        leading = tuple(range(g.ndim - 1))
        pair = (_wide(gathered, g), g)
        d_side = lax.dot_general(
            *(pair[::-1] if forms.transpose_rhs else pair), ((leading, leading), ((), ())),
            preferred_element_type=jnp.float32 if side.dtype in FLOAT8 else side.dtype,
        )  # fmt: skip
        d_sides.append(d_side.astype(side.dtype))
    scattered = plan.out_dtype if lhs.dtype in FLOAT8 else lhs.dtype
    d_lhs = lax.psum_scatter(d_gathered.astype(scattered), axis_name, scatter_dimension=lhs.ndim - 2, tiled=True)
    if d_rows is not None:
        d_rows = lax.psum_scatter(d_rows, axis_name, scatter_dimension=d_rows.ndim - 1, tiled=True)
    return Operands(d_lhs.astype(lhs.dtype), tuple(d_sides), d_rows, tuple(d_columns) or None)


def _gathered(operands: Operands, plan: Plan) -> tuple[jax.Array, jax.Array | None]:
    """The gathered left operand, and its rows' scale as one column."""
    axis_name, row_scale = plan.ring.axis_name, operands.row_scale
    gathered = lax.all_gather(operands.lhs, axis_name, axis=operands.lhs.ndim - 2, tiled=True)
    if row_scale is None:
        return gathered, None
    return gathered, lax.all_gather(row_scale, axis_name, axis=row_scale.ndim - 1, tiled=True)[..., None]


def _columns(operands: Operands) -> tuple[Any, ...]:
    return operands.column_scales or (None,) * len(operands.sides)


def _scaled(product: jax.Array, rows: Any, columns: Any) -> jax.Array:
    product = product if rows is None else product * rows
    return product if columns is None else product * columns


def _times(lhs: jax.Array, side: jax.Array, forms: Forms, out_dtype: Any) -> jax.Array:
    dimensions = (((lhs.ndim - 1,), (1 if forms.transpose_rhs else 0,)), ((), ()))
    return lax.dot_general(lhs, side, dimensions, preferred_element_type=out_dtype)


def _wide(x: jax.Array, cotangent: jax.Array) -> jax.Array:
    """f8 operands against a wider cotangent take its dtype."""
    return x.astype(cotangent.dtype) if x.dtype in FLOAT8 else x
