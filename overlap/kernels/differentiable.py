"""The product as JAX sees it: differentiable, with `vmap` as the kernel's own batch; and the same by XLA."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from overlap.kernels import product
from overlap.kernels.config import FLOAT8
from overlap.kernels.hopper import Forms
from overlap.kernels.launch import sealed
from overlap.kernels.product import Operands, Plan


def _sealed(operands: Operands, plan: Plan) -> jax.Array:
    """The kernel, or the same by XLA where XLA's partitioner may split it and the caller does not insist."""
    leaves, structure = jax.tree.flatten(operands)

    def by(run: Callable[[Operands], jax.Array]) -> Callable[..., jax.Array]:
        return lambda *leaves: run(jax.tree.unflatten(structure, leaves))

    otherwise = by(lambda given: by_xla(given, plan.forms, plan.out_dtype, plan.activation))
    kernel = by(lambda given: product.launch(given, plan))
    return sealed(kernel, "matmul", None if plan.insists else otherwise)(*leaves)


# Outside `jax.jit` each call would otherwise trace, and so compile, its kernel anew.
_launch = jax.jit(_sealed, static_argnums=1)


def fused(operands: Operands, plan: Plan) -> jax.Array:
    """The kernel itself on checked operands. Differentiable; `vmap` becomes the kernel's own batch."""
    return _differentiable(operands, plan)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _differentiable(operands: Operands, plan: Plan) -> jax.Array:
    return _batchable(operands, plan)


def _batchable(operands: Operands, plan: Plan) -> jax.Array:
    leaves, structure = jax.tree.flatten(operands)

    @jax.custom_batching.custom_vmap
    def run(*leaves: jax.Array) -> jax.Array:
        return _launch(jax.tree.unflatten(structure, leaves), plan)

    @run.def_vmap
    def _batch(axis_size: int, batched: list[bool], *leaves: jax.Array) -> tuple[jax.Array, bool]:
        given = jax.tree.unflatten(structure, leaves)
        is_batched = jax.tree.unflatten(structure, batched)
        return _fold_batch(given, is_batched, axis_size, plan), True

    return run(*leaves)


def _fold_batch(given: Operands, is_batched: Operands, axis_size: int, plan: Plan) -> jax.Array:
    """One kernel over the batch that `vmap` adds in front of each batched operand (and the one that may be there)."""
    inner = jax.tree.map(lambda x, b: x[0] if b else x, given, is_batched)
    batch, *_ = product.sizes(inner, plan.forms)
    if is_batched.bias or is_batched.row_scale or is_batched.column_scale:
        # The vectors have no batch in the kernel: the product by the kernel, its epilogue by XLA.
        bare = dataclasses.replace(plan, out_dtype=jnp.dtype(jnp.float32), activation=None)
        matrices = Operands(given.lhs, given.rhs)
        if is_batched.lhs or is_batched.rhs:
            z = _fold_batch(matrices, Operands(is_batched.lhs, is_batched.rhs), axis_size, bare)
            z_axis = 0
        else:
            z, z_axis = _batchable(matrices, bare), None
        rest = dataclasses.replace(given, lhs=None, rhs=None)
        axes = jax.tree.map(lambda b: 0 if b else None, dataclasses.replace(is_batched, lhs=None, rhs=None))
        return jax.vmap(
            lambda z, rest: product.finish(z, rest, plan.out_dtype, plan.activation), in_axes=(z_axis, axes)
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
        for name in ("lhs", "rhs", "c")
    }
    out = _batchable(dataclasses.replace(given, **folded), plan)
    return out if batch is None else out.reshape(axis_size, batch, *out.shape[-2:])


def _rank(x: Any) -> int:
    return 0 if x is None else x.ndim


def _forward(operands: Operands, plan: Plan) -> Any:
    if plan.activation is None:
        return _differentiable(operands, plan), (operands, None)
    # The activation's derivative needs what goes into it, so here it runs by XLA, behind the kernel.
    z: Any = _differentiable(operands, dataclasses.replace(plan, activation=None, out_dtype=jnp.dtype(jnp.float32)))
    return plan.activation(z).astype(plan.out_dtype), (operands, z)


def _backward(plan: Plan, saved: Any, cotangent: jax.Array) -> tuple[Operands]:
    operands, z = saved
    d_z = cotangent.astype(jnp.float32)
    if plan.activation is not None:
        (d_z,) = jax.vjp(plan.activation, z)[1](d_z)
    batch, *_ = product.sizes(operands, plan.forms)
    over_batch = (0,) if batch is not None else ()
    d_rows = d_columns = None
    d_product = d_z
    if operands.row_scale is not None or operands.column_scale is not None:
        bare = _by_kernel_or_xla(operands.lhs, operands.rhs, plan, plan.forms, jnp.dtype(jnp.float32))
        row = 1.0 if operands.row_scale is None else operands.row_scale[:, None]
        column = 1.0 if operands.column_scale is None else operands.column_scale
        if operands.row_scale is not None:
            d_rows = (d_z * bare * column).sum(axis=(*over_batch, -1))
        if operands.column_scale is not None:
            d_columns = (d_z * bare * row).sum(axis=(*over_batch, -2))
        d_product = d_z * row * column
    g = d_product.astype(cotangent.dtype)
    lhs, rhs, forms = operands.lhs, operands.rhs, plan.forms
    # d_lhs = g rhsᵀ and d_rhs = lhsᵀ g, each in the form in which its operand lies in memory: nothing is transposed.
    d_lhs = (
        _by_kernel_or_xla(rhs, g, plan, Forms(forms.transpose_rhs, True), lhs.dtype)
        if forms.transpose_lhs
        else _by_kernel_or_xla(g, rhs, plan, Forms(False, not forms.transpose_rhs), lhs.dtype)
    )
    d_rhs = (
        _by_kernel_or_xla(g, lhs, plan, Forms(True, forms.transpose_lhs), rhs.dtype)
        if forms.transpose_rhs
        else _by_kernel_or_xla(lhs, g, plan, Forms(not forms.transpose_lhs, False), rhs.dtype)
    )
    unbatch = lambda d, x: d.sum(axis=0).astype(x.dtype) if d.ndim > x.ndim else d  # noqa: E731
    d_c = None if operands.c is None else unbatch(d_z, operands.c).astype(operands.c.dtype)
    d_bias = None if operands.bias is None else d_z.sum(axis=tuple(range(d_z.ndim - 1)))
    return (Operands(unbatch(d_lhs, lhs), unbatch(d_rhs, rhs), d_c, d_bias, d_rows, d_columns),)


_differentiable.defvjp(_forward, _backward)


def _by_kernel_or_xla(lhs: jax.Array, rhs: jax.Array, plan: Plan, forms: Forms, out_dtype: Any) -> jax.Array:
    """A product of the backward pass: by the kernel if it can serve it, else by XLA."""
    if lhs.dtype != rhs.dtype:  # f8 operands against a wider cotangent.
        wider = rhs.dtype if lhs.dtype in FLOAT8 else lhs.dtype
        lhs, rhs = lhs.astype(wider), rhs.astype(wider)
    operands = Operands(lhs, rhs)
    try:
        config = product.choose_config(operands, forms, out_dtype, plan.target)
    except NotImplementedError:
        return by_xla(operands, forms, out_dtype)
    return _batchable(operands, Plan(config, plan.target, forms, jnp.dtype(out_dtype), insists=plan.insists))


def by_xla(operands: Operands, forms: Forms, out_dtype: Any, activation: Any = None) -> jax.Array:
    """The whole operation by XLA."""
    bare = all(x is None for x in (operands.c, operands.bias, operands.row_scale, operands.column_scale, activation))
    dimensions = (((0 if forms.transpose_lhs else 1,), (1 if forms.transpose_rhs else 0,)), ((), ()))

    def one(lhs: jax.Array, rhs: jax.Array, c: Any) -> jax.Array:
        if bare:
            return lax.dot_general(lhs, rhs, dimensions, preferred_element_type=out_dtype)
        z = lax.dot_general(lhs, rhs, dimensions, preferred_element_type=jnp.float32)
        return product.finish(z, dataclasses.replace(operands, c=c), out_dtype, activation)

    matrices = (operands.lhs, operands.rhs, operands.c)
    axes = tuple(0 if _rank(x) == 3 else None for x in matrices)
    return (jax.vmap(one, in_axes=axes) if 0 in axes else one)(*matrices)
