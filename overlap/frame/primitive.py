"""An operation as a primitive of JAX, with rules of its own for `vmap` and for derivatives.

`jax.custom_jvp` and `jax.custom_vmap` would do for a single transformation. But where JAX splits what is known from
what is not (the gradient of a `lax.scan` or of a `jax.checkpoint`), it keeps the functions behind them and drops their
rules, so that a second derivative would meet a kernel. A primitive keeps its rules wherever it goes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from overlap.kernels.varying import varying
from overlap.primitives import marks

_operation_p = core.Primitive("overlap_operation")
_operation_p.multiple_results = True


@dataclasses.dataclass(frozen=True)
class Primitive:
    """What an operation is made of. `operands` and results are pytrees of arrays, `plan` is what is static.

    Attributes:
      run: from (operands, plan) to results.
      batched: the same of operands with a further leading dimension where `is_batched`: from (operands, is_batched,
        axis_size, plan) to results that all have one.
      derivative: from (operands, tangents, plan, evaluate) to (results, tangents of these); see
        `overlap.frame.linear`. `evaluate()` gives the results, without tracing the operation anew.
    """

    run: Callable[[Any, Any], Any]
    batched: Callable[[Any, Any, int, Any], Any]
    derivative: Callable[[Any, Any, Any, Callable[[], Any]], tuple[Any, Any]]

    def __call__(self, operands: Any, plan: Any) -> Any:
        """Runs the operation."""
        if marks.current() is not None:
            # Inline: what its kernel records leaves it by the side, which no primitive lets through.
            return self.run(operands, plan)
        leaves, structure = jax.tree.flatten(operands)
        traced, types = jax.make_jaxpr(
            lambda *leaves: self.run(jax.tree.unflatten(structure, leaves), plan), return_shape=True
        )(*leaves)
        static = _Static(self, plan, structure, jax.tree.structure(types), traced)
        return jax.tree.unflatten(static.results, _operation_p.bind(*leaves, static=static))


@dataclasses.dataclass(frozen=True, eq=False)
class _Static:
    """What is static about one call: with the structures of operands and results, and the traced operation."""

    operation: Primitive
    plan: Any
    operands: Any
    results: Any
    traced: Any


@_operation_p.def_impl
def _evaluate(*leaves: Any, static: _Static) -> list[Any]:
    return core.jaxpr_as_fun(static.traced)(*leaves)


@_operation_p.def_abstract_eval
def _types(*_: Any, static: _Static) -> list[Any]:
    return static.traced.out_avals


mlir.register_lowering(_operation_p, mlir.lower_fun(_evaluate, multiple_results=True))


def _jvp(leaves: Any, tangents: Any, *, static: _Static) -> Any:
    def evaluate() -> Any:
        return jax.tree.unflatten(static.results, _operation_p.bind(*leaves, static=static))

    operands, moved = (jax.tree.unflatten(static.operands, values) for values in (leaves, tangents))
    outs, of_outs = static.operation.derivative(operands, moved, static.plan, evaluate)
    return jax.tree.leaves(outs), jax.tree.leaves(of_outs)


def _transposed(cotangents: Any, *leaves: Any, static: _Static) -> list[Any]:
    """For `jax.linear_transpose` of what is linear in some operands: their gradient, which does not depend on them."""
    unknown = [index for index, x in enumerate(leaves) if ad.is_undefined_primal(x)]

    def of_unknown(*given: Any) -> list[Any]:
        changed = dict(zip(unknown, given, strict=True))
        return _operation_p.bind(*(changed.get(index, x) for index, x in enumerate(leaves)), static=static)

    avals = [leaves[index].aval for index in unknown]
    zeros = [varying(jnp.zeros(aval.shape, aval.dtype), aval.manual_axis_type.varying) for aval in avals]
    _, backward = jax.vjp(of_unknown, *zeros)
    found = dict(zip(unknown, backward([ad.instantiate_zeros(x) for x in cotangents]), strict=True))
    return [found.get(index) for index in range(len(leaves))]


def _batched(leaves: Any, dims: Any, *, static: _Static) -> Any:
    # A dimension of None: the same for all elements.
    (size,) = {x.shape[dim] for x, dim in zip(leaves, dims, strict=True) if dim is not None}
    in_front = [x if dim is None else jnp.moveaxis(x, dim, 0) for x, dim in zip(leaves, dims, strict=True)]
    is_batched = [dim is not None for dim in dims]
    operands, flags = (jax.tree.unflatten(static.operands, values) for values in (in_front, is_batched))
    outs = jax.tree.leaves(static.operation.batched(operands, flags, size, static.plan))
    return outs, [0] * len(outs)


ad.primitive_jvps[_operation_p] = _jvp
ad.primitive_transposes[_operation_p] = _transposed
batching.primitive_batchers[_operation_p] = _batched
