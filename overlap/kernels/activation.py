"""Makes an ordinary JAX function of values fit for the inside of a kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Literal


def inlined(function: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """The same function without calls: Mosaic GPU takes neither `custom_jvp` (as in `jax.nn.relu`) nor `custom_vjp`.

    Raises:
      ValueError: it does not map an array to one of the same shape.
    """

    def call(values: jax.Array) -> jax.Array:
        closed = jax.make_jaxpr(function)(values)
        results = _evaluate(closed.jaxpr, closed.consts, [values])
        if len(results) != 1 or results[0].shape != values.shape:
            raise ValueError(
                f"`activation` must be elementwise, got shapes {[r.shape for r in results]} from {values.shape}"
            )
        return results[0]

    return call


def _evaluate(jaxpr: Any, consts: Any, arguments: list[Any]) -> list[Any]:
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *arguments), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for equation in jaxpr.eqns:
        inner = equation.params.get("call_jaxpr", equation.params.get("jaxpr"))
        operands = [read(atom) for atom in equation.invars]
        if inner is not None:
            results = _evaluate(inner.jaxpr, inner.consts, operands)
        else:
            results = equation.primitive.bind(*operands, **equation.params)
            results = results if equation.primitive.multiple_results else [results]
        values.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]
