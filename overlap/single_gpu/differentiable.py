"""The product as JAX sees it: differentiable, with `vmap` as the kernel's own batch; and the same by XLA."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from overlap.frame.linear import tangents_of
from overlap.frame.operation import Operation
from overlap.kernels.config import FLOAT8, FLOAT16
from overlap.kernels.hopper import Forms
from overlap.kernels.launch import sealed
from overlap.single_gpu import product
from overlap.single_gpu.product import Operands, Plan

F32 = jnp.dtype(jnp.float32)


def _sealed(operands: Operands, plan: Plan) -> jax.Array:
    """The kernel, or the same by XLA where XLA's partitioner may split it and the caller does not insist."""
    leaves, structure = jax.tree.flatten(operands)

    def by(run: Callable[[Operands], jax.Array]) -> Callable[..., jax.Array]:
        return lambda *leaves: run(jax.tree.unflatten(structure, leaves))

    otherwise = by(lambda given: by_xla(given, plan.forms, plan.out_dtype, plan.computed(given)))
    kernel = by(lambda given: product.launch(given, plan))
    return sealed(kernel, "matmul", None if plan.insists else otherwise)(*leaves)


# Outside `jax.jit` each call would otherwise trace, and so compile, its kernel anew.
_launch = jax.jit(_sealed, static_argnums=1)


def fused(operands: Operands, plan: Plan) -> jax.Array:
    """The kernel itself on checked operands. Differentiable; `vmap` becomes the kernel's own batch."""
    return _product(operands, plan)


# --- vmap -------------------------------------------------------------------------------------------------------------


def _fold_batch(given: Operands, is_batched: Operands, axis_size: int, plan: Plan) -> jax.Array:
    """One kernel over the batch that `vmap` adds in front of each batched operand (and the one that may be there)."""
    inner = jax.tree.map(lambda x, b: jax.ShapeDtypeStruct(x.shape[1:] if b else x.shape, x.dtype), given, is_batched)
    batch, m, n, _ = product.sizes(inner, plan.forms)
    if axis_size == 0:
        return jnp.zeros((0, *(() if batch is None else (batch,)), m, n), plan.out_dtype)
    if is_batched.bias or is_batched.row_scale or is_batched.column_scale or any(is_batched.scalars):
        # The vectors have no batch in the kernel: the product by the kernel, its epilogue by XLA.
        bare = dataclasses.replace(plan, out_dtype=F32, activation=None)
        matrices = Operands(given.lhs, given.rhs)
        if is_batched.lhs or is_batched.rhs:
            z = _fold_batch(matrices, Operands(is_batched.lhs, is_batched.rhs), axis_size, bare)
            z_axis = 0
        else:
            z, z_axis = fused(matrices, bare), None
        rest = dataclasses.replace(given, lhs=None, rhs=None)
        axes = jax.tree.map(lambda b: 0 if b else None, dataclasses.replace(is_batched, lhs=None, rhs=None))
        return jax.vmap(
            lambda z, rest: product.finish(z, rest, plan.out_dtype, plan.applied(rest)), in_axes=(z_axis, axes)
        )(z, rest)

    def fold(x: Any, batched: bool, has_inner: bool) -> Any:
        if x is None or not (batched or has_inner):
            return x
        if batch is None:
            return x
        x = x if batched else jnp.broadcast_to(x, (axis_size, *x.shape))
        x = x if has_inner else jnp.broadcast_to(x[:, None], (axis_size, batch, *x.shape[1:]))
        return x.reshape(-1, *x.shape[-2:])

    folded = {
        name: fold(getattr(given, name), bool(getattr(is_batched, name)), _rank(getattr(inner, name)) == 3)
        for name in ("lhs", "rhs", "addend")
    }
    out: Any = fused(dataclasses.replace(given, **folded), plan)
    return out if batch is None else out.reshape(axis_size, batch, *out.shape[-2:])


def _rank(x: Any) -> int:
    return 0 if x is None else x.ndim


# --- Derivatives ------------------------------------------------------------------------------------------------------


def _derivative(
    operands: Operands, tangents: Operands, plan: Plan, evaluate: Callable[[], jax.Array]
) -> tuple[jax.Array, Any]:
    """The result, and the linear map of the tangents: XLA's in forward mode, `_cotangents` in reverse mode."""
    z: Any = None
    if plan.activation is None:
        out = evaluate()
    else:
        # The activation's derivative needs what goes into it, so here it runs by XLA, behind the kernel.
        bare = dataclasses.replace(plan, activation=None, out_dtype=F32)
        z = fused(dataclasses.replace(operands, scalars=()), bare)
        out = plan.activation(z, operands.scalars).astype(plan.out_dtype)
    tangent = tangents_of(
        out, operands, tangents, saved=z,
        by_xla=lambda given: by_xla(given, plan.forms, plan.out_dtype, plan.applied(given)),
        backward=functools.partial(_cotangents, plan),
    )  # fmt: skip
    return out, tangent


def _cotangents(plan: Plan, operands: Operands, z: Any, cotangent: jax.Array, wanted: Operands) -> Operands:
    """Cotangents of the operands, in the dtypes that are wanted or wider: nothing else is rounded below f32."""
    d_z, d_scalars = cotangent.astype(F32), operands.scalars
    if plan.activation is not None:
        d_z, d_scalars = _through_activation(plan, z, operands.scalars, cotangent)
    batch, *_ = product.sizes(operands, plan.forms)
    over_batch = (0,) if batch is not None else ()
    rows, columns = operands.row_scale, operands.column_scale
    row, column = 1.0 if rows is None else rows[:, None], 1.0 if columns is None else columns
    d_rows = d_columns = None
    if wanted.row_scale is not None or wanted.column_scale is not None:
        weighted = d_z * _times(operands.lhs, operands.rhs, plan, plan.forms, F32)
        d_rows = None if wanted.row_scale is None else (weighted * column).sum(axis=(*over_batch, -1))
        d_columns = None if wanted.column_scale is None else (weighted * row).sum(axis=(*over_batch, -2))
    # The cotangent as it came, where nothing has changed it: the kernel can multiply it if it has the operands' dtype.
    unchanged = plan.activation is None and rows is None and columns is None
    g = cotangent if unchanged else d_z * row * column
    return Operands(
        lhs=None if wanted.lhs is None else _of_lhs(operands, g, plan, wanted.lhs),
        rhs=None if wanted.rhs is None else _of_rhs(operands, g, plan, wanted.rhs),
        addend=None if wanted.addend is None else d_z.sum(axis=0) if d_z.ndim > operands.addend.ndim else d_z,
        bias=None if wanted.bias is None else d_z.sum(axis=tuple(range(d_z.ndim - 1))),
        row_scale=d_rows, column_scale=d_columns, scalars=d_scalars,
    )  # fmt: skip


def _through_activation(plan: Plan, z: jax.Array, scalars: Any, cotangent: jax.Array) -> tuple[jax.Array, tuple]:
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


def _of_lhs(operands: Operands, g: jax.Array, plan: Plan, dtype: Any) -> jax.Array:
    lhs, rhs, forms = operands.lhs, operands.rhs, plan.forms
    is_shared = g.ndim > lhs.ndim
    dtype = F32 if is_shared else dtype
    if forms.transpose_lhs:
        d = _times(rhs, g, plan, Forms(forms.transpose_rhs, True), dtype)
    else:
        d = _times(g, rhs, plan, Forms(False, not forms.transpose_rhs), dtype)
    return d.sum(axis=0) if is_shared else d


def _of_rhs(operands: Operands, g: jax.Array, plan: Plan, dtype: Any) -> jax.Array:
    lhs, rhs, forms = operands.lhs, operands.rhs, plan.forms
    if lhs.ndim > rhs.ndim and not forms.transpose_lhs:
        # The rows of all batch elements contract as one.
        lhs, g = lhs.reshape(-1, lhs.shape[-1]), g.reshape(-1, g.shape[-1])
    is_shared = g.ndim > rhs.ndim
    dtype = F32 if is_shared else dtype
    if forms.transpose_rhs:
        d = _times(g, lhs, plan, Forms(True, forms.transpose_lhs), dtype)
    else:
        d = _times(lhs, g, plan, Forms(not forms.transpose_lhs, False), dtype)
    return d.sum(axis=0) if is_shared else d


def _times(lhs: jax.Array, rhs: jax.Array, plan: Plan, forms: Forms, dtype: Any) -> jax.Array:
    """A product of the backward pass, in `dtype` or in f32: by the kernel if it loses nothing there, else by XLA."""
    if lhs.dtype != rhs.dtype and {lhs.dtype, rhs.dtype} & set(FLOAT16):
        # What is exact in 8 bits is so in 16.
        lhs, rhs = (x.astype(y.dtype) if x.dtype in FLOAT8 else x for x, y in ((lhs, rhs), (rhs, lhs)))
    operands = Operands(lhs, rhs)
    if lhs.dtype != rhs.dtype:
        if not (lhs.dtype in FLOAT8 and rhs.dtype in FLOAT8):
            operands = Operands(lhs.astype(F32), rhs.astype(F32))
        return by_xla(operands, forms, F32)
    dtype = jnp.dtype(dtype if dtype in FLOAT16 else F32)
    try:
        config = product.choose_config(operands, forms, dtype, plan.target)
    except NotImplementedError:
        return by_xla(operands, forms, dtype)
    return fused(operands, Plan(config, plan.target, forms, dtype, insists=plan.insists))


def _run(operands: Operands, plan: Plan) -> jax.Array:
    # The cache of `jax.jit` keeps its static arguments.
    kept = plan if plan.activation is None else dataclasses.replace(plan, activation=plan.activation.alone)
    return _launch(operands, kept)


_product = Operation(_run, _fold_batch, _derivative)


# --- By XLA -----------------------------------------------------------------------------------------------------------


def by_xla(
    operands: Operands, forms: Forms, out_dtype: Any, activation: Callable[[jax.Array], jax.Array] | None = None
) -> jax.Array:
    """The whole operation by XLA."""
    epilogue = (operands.addend, operands.bias, operands.row_scale, operands.column_scale, activation)
    bare = all(x is None for x in epilogue)
    dimensions = (((0 if forms.transpose_lhs else 1,), (1 if forms.transpose_rhs else 0,)), ((), ()))
    accumulator = product.accumulator(operands.lhs.dtype)

    def one(lhs: jax.Array, rhs: jax.Array, addend: Any) -> jax.Array:
        if bare:
            return lax.dot_general(lhs, rhs, dimensions, preferred_element_type=out_dtype)
        z = lax.dot_general(lhs, rhs, dimensions, preferred_element_type=accumulator)
        return product.finish(z, dataclasses.replace(operands, addend=addend), out_dtype, activation)

    matrices = (operands.lhs, operands.rhs, operands.addend)
    axes = tuple(0 if _rank(x) == 3 else None for x in matrices)
    return (jax.vmap(one, in_axes=axes) if 0 in axes else one)(*matrices)
