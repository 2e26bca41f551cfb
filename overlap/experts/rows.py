"""Copies tokens to rows by list, and adds rows to tokens: three maps, of which each is a derivative of the others.

All three are partial derivatives of one form, which is linear in each of its three arguments:

    form(tokens, rows, gates) = sum over tokens t and slots j of gates[t, j] · <tokens[t], rows[positions[t, j]]>

    by tokens   the rows of each token, times their gates, added in the order of the slots
    by rows     a copy of each row's token, times the row's gate
    by gates    the inner product of each token with each of its rows

So a derivative of one map is made of the other two, and so is every further derivative. Each map reads by index and
writes every element once: there is no scatter, and no sum in an order that may change. Sums are in float32.

Rows behind the last one in use are not read, and are zero where they are written.

tokens: [D · T, h]. rows: [C, h]. gates: [D · T, k], or None where all are 1. See `Routing` for the letters.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import ad

from overlap.experts.routing import Routing
from overlap.frame.linear import Wanted, linear_map
from overlap.frame.signatures import Leaf

# The index of an argument of the form.
_Argument = Literal[0, 1, 2]
TOKENS, ROWS, GATES = 0, 1, 2
# The three arguments of the form; None in the place of the one by which it is derived, and for gates that are all 1.
_Factors = tuple[Leaf, ...]


def copied(tokens: jax.Array, routing: Routing) -> jax.Array:
    """Returns the rows, [C, h]: a copy of its token for each row in use, else zeros."""
    return _derivative(ROWS, tokens.dtype, (tokens, None, None), routing)


def added(rows: jax.Array, gates: jax.Array, routing: Routing) -> jax.Array:
    """Returns for each token the sum of gate · row over its routes on this device, [D · T, h], in the rows' dtype."""
    return _derivative(TOKENS, rows.dtype, (None, rows, gates), routing)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _derivative(by: _Argument, dtype: jnp.dtype, factors: _Factors, routing: Routing) -> jax.Array:
    """The partial derivative of the form by one argument, in `dtype`."""
    return (_by_tokens, _by_rows, _by_gates)[by](factors, routing).astype(dtype)


def _tangent(
    by: _Argument, dtype: jnp.dtype, primals: tuple[_Factors, Routing], tangents: tuple[_Factors, Leaf]
) -> tuple[jax.Array, jax.Array]:
    factors, routing = primals
    out: Leaf = _derivative(by, dtype, factors, routing)
    parts = [
        _linear(by, dtype, factors, index, direction, routing)
        for index, direction in enumerate(tangents[0])
        if not (direction is None or isinstance(direction, SymbolicZero))
    ]
    return out, sum(parts[1:], parts[0]) if parts else jnp.zeros_like(out)


_derivative.defjvp(_tangent, symbolic_zeros=True)


def _linear(
    by: _Argument, dtype: jnp.dtype, factors: _Factors, index: int, direction: jax.Array, routing: Routing
) -> jax.Array:
    """The derivative by `by`, with `direction` in the place of argument `index`. It is linear in `direction`.

    Its transpose is the derivative by argument `index`, with the cotangent in the place of argument `by`.
    """
    residuals, structure = jax.tree.flatten((_with(factors, index, None), routing))

    def forward(residuals: Sequence[jax.Array], operands: Sequence[jax.Array]) -> list[jax.Array]:
        others, routing = jax.tree.unflatten(structure, residuals)
        return [_derivative(by, dtype, _with(others, index, operands[0]), routing)]

    def transpose(
        residuals: Sequence[jax.Array], wanted: Sequence[Wanted], cotangents: Sequence[Leaf]
    ) -> list[jax.Array]:
        others, routing = jax.tree.unflatten(structure, residuals)
        given = _with(others, by, ad.instantiate_zeros(cotangents[0]))
        return [_derivative(index, wanted[0], given, routing)]

    return linear_map(forward, transpose, residuals, [direction])[0]


def _with(factors: _Factors, index: int, value: Leaf) -> _Factors:
    return (*factors[:index], value, *factors[index + 1 :])


def _wide(value: jax.Array) -> jax.Array:
    return value.astype(jnp.promote_types(value.dtype, jnp.float32))


def _of_rows(tokens: jax.Array, routing: Routing) -> jax.Array:
    """The token of each row. The indices are valid, so that nothing checks them."""
    return _wide(tokens.at[routing.tokens].get(mode="promise_in_bounds"))


def _by_tokens(factors: _Factors, routing: Routing) -> jax.Array:
    _, rows, gates = factors
    parts = []
    for slot in range(routing.positions.shape[1]):
        at = routing.positions[:, slot]
        row = _wide(rows.at[at].get(mode="fill", fill_value=0))
        if gates is not None:
            # A gate that is not finite counts only on the device that has the row.
            row = jnp.where((at < rows.shape[0])[:, None], _wide(gates[:, slot, None]) * row, 0)
        parts.append(row)
    return sum(parts[1:], parts[0])


def _by_rows(factors: _Factors, routing: Routing) -> jax.Array:
    tokens, _, gates = factors
    rows = _of_rows(tokens, routing)
    if gates is not None:
        rows *= _wide(gates.at[routing.tokens, routing.slots].get(mode="promise_in_bounds"))[:, None]
    return jnp.where(routing.filled[:, None], rows, 0)


def _by_gates(factors: _Factors, routing: Routing) -> jax.Array:
    tokens, rows, _ = factors
    # Positions name rows in use only, so that what lies behind them does not count.
    products = (_of_rows(tokens, routing) * _wide(rows)).sum(1)
    return products.at[routing.positions].get(mode="fill", fill_value=0)
