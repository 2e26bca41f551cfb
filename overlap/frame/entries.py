"""A primitive that applies a traced function of single values to every entry of arrays, whatever the arrays' types.

An activation is traced at the call, on types that say nothing of a mesh. The arrays that it is applied to may
vary along mesh axes (`varying.py`) or be sharded over Explicit axes, and its jaxpr would not fit these types. So the
jaxpr is the parameter of a primitive. The primitive's result has the type of the operands, and the jaxpr appears only
when the primitive is lowered.

The derivative is the sum of the partial derivatives, which are functions of single values again, times the tangents.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from overlap import _compat
from overlap.frame.linear import mapped_in_front
from overlap.frame.signatures import Leaf
from overlap.kernels.varying import alike

_entries_p = Primitive("overlap_entries")


@contextlib.contextmanager
def typeless() -> Iterator[None]:
    """Inside this context, types of traced values say nothing of a mesh, even within `jax.shard_map`."""
    with _compat.without_varying_axes(), jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        yield


def elementwise_map(of_entry: ClosedJaxpr, *operands: jax.Array) -> jax.Array:
    """Applies `of_entry` to every entry of arrays of one shape.

    Args:
      of_entry: a closed jaxpr from single values, [] each, to one value, [].
      operands: arrays of one shape, as many as `of_entry` has arguments.
    """
    return _entries_p.bind(*alike(operands), of_entry=of_entry)


def _evaluate(*operands: jax.Array, of_entry: ClosedJaxpr) -> jax.Array:
    def evaluate(*entries: jax.Array) -> jax.Array:
        return jaxpr_as_fun(of_entry)(*entries)[0]

    for _ in range(operands[-1].ndim):
        evaluate = jax.vmap(evaluate)
    return evaluate(*operands)


# Outside of jit too it is lowered: arrays of Explicit axes have types that the jaxpr does not fit.
_entries_p.def_impl(jax.jit(_entries_p.bind, static_argnames="of_entry"))


@_entries_p.def_abstract_eval
def _type(*operands: Leaf, of_entry: Any) -> Leaf:
    return operands[-1].update(dtype=of_entry.out_avals[0].dtype, weak_type=False)


def _lower(context: mlir.LoweringRuleContext, *operands: Leaf, of_entry: ClosedJaxpr) -> list[Leaf]:
    avals: list[Leaf] = list(context.avals_in)
    plain = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
    with typeless():
        lowered = jax.make_jaxpr(lambda *operands: _evaluate(*operands, of_entry=of_entry))(*plain)
        within = context.replace(avals_in=lowered.in_avals, avals_out=lowered.out_avals)
        return mlir.lower_fun(jaxpr_as_fun(lowered), multiple_results=True)(within, *operands)


def _jvp(operands: Sequence[jax.Array], tangents: Sequence[Leaf], *, of_entry: ClosedJaxpr) -> tuple[Leaf, Leaf]:
    out = elementwise_map(of_entry, *operands)
    moved = [index for index, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]
    if not moved or not jnp.issubdtype(out.dtype, jnp.floating):
        return out, ad.Zero(jax.typeof(out).to_tangent_aval())
    total: Leaf = None
    for index in moved:
        partial = elementwise_map(_partial(of_entry, index), *operands)
        part = partial.astype(out.dtype) * tangents[index].astype(out.dtype)
        total = part if total is None else total + part
    return out, total


def _partial(of_entry: Any, index: int) -> ClosedJaxpr:
    """Returns the partial derivative with respect to one operand.

    The derivative is taken in reverse mode, since an activation may have a `jax.custom_vjp`.
    """
    with typeless():
        types = [jax.ShapeDtypeStruct((), aval.dtype) for aval in of_entry.in_avals]
        return jax.make_jaxpr(jax.grad(lambda *entries: jaxpr_as_fun(of_entry)(*entries)[0], index))(*types)


def _batched(
    operands: Sequence[jax.Array], dims: Sequence[int | None], *, of_entry: ClosedJaxpr
) -> tuple[jax.Array, int]:
    size, in_front = mapped_in_front(operands, dims)
    of_all = [
        jnp.broadcast_to(x, (size, *x.shape)) if dim is None else x for x, dim in zip(in_front, dims, strict=True)
    ]
    return elementwise_map(of_entry, *of_all), 0


ad.primitive_jvps[_entries_p] = _jvp
batching.primitive_batchers[_entries_p] = _batched
mlir.register_lowering(_entries_p, _lower)
