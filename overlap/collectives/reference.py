"""The same operations by XLA: NCCL, then cuBLAS."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from overlap.collectives.gathered_lhs import Operands, Plan, same_on_ring
from overlap.kernels.config import FLOAT8, FLOAT16
from overlap.kernels.staging import Forms
from overlap.kernels.varying import axes_of, part_of
from overlap.single_gpu.product import accumulator

# In which dimension of the product the right operand is gathered.
Along = Literal["n", "k"]


def all_gather_lhs_matmul(operands: Operands, plan: Plan) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
    """Each product, and the gathered left operand if it is asked for."""
    gathered, rows = _gathered(operands, plan)
    wide = accumulator(operands.lhs.dtype)
    outs = tuple(
        _times(gathered, side, plan.forms, plan.out_dtype)
        if rows is None and columns is None
        else _scaled(_times(gathered, side, plan.forms, wide), rows, columns).astype(plan.out_dtype)
        for side, columns in zip(operands.sides, _columns(operands), strict=True)
    )
    return outs, same_on_ring(gathered, operands.lhs, plan.ring) if plan.returns_gathered else None


def all_gather_lhs_matmul_backward(operands: Operands, plan: Plan, cotangents: Any, wanted: Operands) -> Operands:
    """Cotangents of the operands: products + one reduce-scatter, and products with the left operand gathered anew.

    Nothing is rounded below f32 but results, and what travels: the sum of all products for the left operand, with the
    cotangent of the gathered operand itself, takes its dtype before the reduce-scatter, as in JAX's own gradient.
    """
    d_outs, d_kept = cotangents
    gathered, rows = _gathered(operands, plan)
    axis_name, forms, lhs = plan.ring.axis_name, plan.forms, operands.lhs
    d_gathered: Any = (
        0.0 if d_kept is None else part_of(d_kept.astype(jnp.float32), axes_of(lhs, *operands.sides, *d_outs))
    )
    d_rows: Any = None
    d_sides, d_columns = [], []
    for side, columns, d_out, dtype in zip(operands.sides, _columns(operands), d_outs, wanted.sides, strict=True):
        g = d_out
        if rows is not None or columns is not None:
            d_z = d_out.astype(jnp.float32)
            if wanted.row_scale is not None or any(x is not None for x in wanted.column_scales or ()):
                weighted = d_z * _times(gathered, side, forms, jnp.float32)
                part = _scaled(weighted, None, columns).sum(axis=-1)
                d_rows = part if d_rows is None else d_rows + part
                d_columns.append(_scaled(weighted, rows, None).sum(axis=tuple(range(d_z.ndim - 1))))
            g = _scaled(d_z, rows, columns)
        if wanted.lhs is not None:
            pair = _alike(g, side)
            d_gathered += _times(*pair, Forms(transpose_rhs=not forms.transpose_rhs), jnp.float32)
        leading = tuple(range(g.ndim - 1))
        pair = _alike(*((g, gathered) if forms.transpose_rhs else (gathered, g)))
        d_sides.append(
            None
            if dtype is None
            else lax.dot_general(*pair, ((leading, leading), ((), ())), preferred_element_type=_result(pair, dtype))
        )
    d_lhs = None
    if wanted.lhs is not None:
        # 8 bits are too few to be summed in.
        scattered = jnp.bfloat16 if wanted.lhs in FLOAT8 else wanted.lhs
        d_lhs = lax.psum_scatter(d_gathered.astype(scattered), axis_name, scatter_dimension=lhs.ndim - 2, tiled=True)
    if wanted.row_scale is not None:
        d_rows = lax.psum_scatter(d_rows, axis_name, scatter_dimension=d_rows.ndim - 1, tiled=True)
    return Operands(
        d_lhs, tuple(d_sides), None if wanted.row_scale is None else d_rows,
        None if operands.column_scales is None else tuple(d_columns) or (None,) * len(operands.sides),
    )  # fmt: skip


def all_gather_rhs_matmul(lhs: jax.Array, rhs: jax.Array, axis_name: Any, along: Along, out_dtype: Any) -> jax.Array:
    """The product with the gathered right operand."""
    return lax.dot(lhs, _gathered_rhs(rhs, axis_name, along), preferred_element_type=out_dtype)


def all_gather_rhs_matmul_backward(
    lhs: jax.Array, rhs: jax.Array, axis_name: Any, along: Along, cotangent: jax.Array, wanted: tuple[Any, Any]
) -> tuple[jax.Array | None, jax.Array | None]:
    """Cotangents of the operands: a matmul with the right operand gathered anew, and a matmul + reduce-scatter.

    Nothing is rounded below f32 but results, and what travels to the dtype in which it is wanted.
    """
    d_lhs = d_rhs = None
    if wanted[0] is not None:
        pair = _alike(cotangent, _gathered_rhs(rhs, axis_name, along))
        d_lhs = lax.dot_general(*pair, (((1,), (1,)), ((), ())), preferred_element_type=_result(pair, wanted[0]))
    if wanted[1] is not None:
        pair = _alike(lhs, cotangent)
        d_gathered = lax.dot_general(*pair, (((0,), (0,)), ((), ())), preferred_element_type=_result(pair, wanted[1]))
        d_rhs = lax.psum_scatter(
            d_gathered.astype(wanted[1]), axis_name, scatter_dimension=_dimension(along), tiled=True
        )
    return d_lhs, d_rhs


def _gathered_rhs(rhs: jax.Array, axis_name: Any, along: Along) -> jax.Array:
    return lax.all_gather(rhs, axis_name, axis=_dimension(along), tiled=True)


def _dimension(along: Along) -> int:
    return 0 if along == "k" else 1


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


def _alike(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both in the dtype of the wider one, or in f32: nothing is lost."""
    if a.dtype == b.dtype:
        return a, b
    for narrow, wide in ((a, b), (b, a)):
        if narrow.dtype in FLOAT8 and wide.dtype in FLOAT16:
            return a.astype(wide.dtype), b.astype(wide.dtype)
    return a.astype(jnp.float32), b.astype(jnp.float32)


def _result(pair: tuple[jax.Array, jax.Array], wanted: Any) -> Any:
    """The dtype of a product: the one that is wanted, if the operands have it too; else f32."""
    return wanted if pair[0].dtype == wanted else jnp.float32
