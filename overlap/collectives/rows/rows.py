"""Copies tokens to rows by list, and adds rows to tokens: three maps, of which each is a derivative of the others.

All three are partial derivatives of one form, which is linear in each of its three arguments:

    form(tokens, rows, gates) = Σ over devices, tokens t and slots j of gates[t, j] · <tokens[t], rows[positions[t, j]]>

Tokens are those of this device; gates are those of all devices, whose own collective is jax's.

    by tokens   the rows of each token on all devices, times their gates, added in the order of the slots
    by rows     a copy of each row's token, which any device may have, times the row's gate
    by gates    the inner product of each token, which any device may have, with each of its rows on this device

So a derivative of one map is made of the other two, and so is every further derivative. No map adds in an order that
may change. Sums are in float32; those of other devices are rounded before they travel.

Kernels compute them (`row_kernels.py`), or XLA with its own collectives. Rows behind the last one in use are not read.
Where rows are written, they are zero by XLA, and undefined by the kernel; zero by both where jax looks for NaN.

tokens: [T, h]. rows: [C, h]. gates: [D · T, k], or None where all are 1. See `Routing` for the letters.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import sequential_vmap
from jax.interpreters import ad

from overlap.collectives.rows import row_kernels
from overlap.collectives.rows.chunks import RowsPlan
from overlap.collectives.rows.routing import Routing, gathered
from overlap.frame.explain import record_backward
from overlap.frame.linear import Wanted, linear_map
from overlap.frame.rules import with_rule
from overlap.frame.signatures import AxisName, Leaf
from overlap.kernels.launch import checks_numbers
from overlap.kernels.target import Target
from overlap.primitives import PeerGroup

# The index of an argument of the form.
_Argument = Literal[0, 1, 2]
TOKENS: _Argument = 0
ROWS: _Argument = 1
GATES: _Argument = 2
# The three arguments of the form; None in the place of the one by which it is derived, and for gates that are all 1.
_Factors = tuple[Leaf, ...]


@dataclasses.dataclass(frozen=True)
class Movement:
    """How tokens and rows move.

    Attributes:
      axis_name: the mesh axis whose devices share the experts; None: one device has all.
      target: the device whose kernels move them; None: XLA moves them.
      must_fuse: whether the caller asked for the kernels.
    """

    axis_name: AxisName | None
    target: Target | None = None
    must_fuse: bool = False

    def plan(self, features: int, dtype: jnp.dtype, routing: Routing) -> RowsPlan:
        """Returns the plan of the kernels."""
        assert self.target is not None
        group = None if self.axis_name is None else PeerGroup.of(self.axis_name, caller="route")
        everything, slots = routing.positions.shape
        (rows,) = routing.tokens.shape
        group = None if group is None or group.size == 1 else group
        tokens = everything if group is None else everything // group.size
        return RowsPlan(tokens, slots, rows, features, jnp.dtype(dtype), self.target, group)

    def gathered(self, value: jax.Array) -> jax.Array:
        """Returns the values of all devices, one after the other."""
        return gathered(value, self.axis_name)

    def scattered(self, value: jax.Array) -> jax.Array:
        """Returns this device's part of the sum over devices."""
        if self.axis_name is None:
            return value
        if not value.size:  # XLA scatters no empty arrays.
            return value[: value.shape[0] // lax.axis_size(self.axis_name)]
        return lax.psum_scatter(value, self.axis_name, scatter_dimension=0, tiled=True)


def copied(tokens: jax.Array, routing: Routing, movement: Movement) -> jax.Array:
    """Returns the rows of this device, [C, h]: a copy of its token for each row in use."""
    routing = dataclasses.replace(routing, gates=None)  # They are no argument here, and not kept.
    return _derivative(ROWS, tokens.dtype, movement, (tokens, None, None), routing)


def added(rows: jax.Array, gates: jax.Array | None, routing: Routing, movement: Movement) -> jax.Array:
    """Returns for each token of this device the sum of gate · row over its routes, [T, h], in the rows' dtype.

    gates: those of this device, [T, k]; None: those of the routing.
    """
    everywhere = routing.gates if gates is None else movement.gathered(_wide(gates))
    routing = dataclasses.replace(routing, gates=None)
    return _derivative(TOKENS, rows.dtype, movement, (None, rows, everywhere), routing)


def _derivative(by: _Argument, dtype: jnp.dtype, movement: Movement, factors: _Factors, routing: Routing) -> jax.Array:
    """The partial derivative of the form by one argument, in `dtype`."""
    how = by, dtype, movement
    return with_rule(functools.partial(_evaluated, *how), functools.partial(_tangent, *how), factors, routing)


def _evaluated(by: _Argument, dtype: jnp.dtype, movement: Movement, factors: _Factors, routing: Routing) -> jax.Array:
    plan = _plan_of(movement, factors, routing)
    if plan is not None:
        return _by_kernel(by, movement, plan, factors, routing).astype(dtype)
    return (_by_tokens, _by_rows, _by_gates)[by](movement, factors, routing, dtype)


def _plan_of(movement: Movement, factors: _Factors, routing: Routing) -> RowsPlan | None:
    """The plan of the kernel; None if XLA computes the map."""
    if movement.target is None or not routing.tokens.size or not routing.positions.size:
        return None
    first, *others = [x for x in (factors[TOKENS], factors[ROWS]) if x is not None]
    plan = movement.plan(first.shape[1], first.dtype, routing)
    has_one_dtype = all(x.dtype == plan.dtype for x in others)
    return plan if has_one_dtype and plan.why_not() is None else None


def _tangent(
    by: _Argument,
    dtype: jnp.dtype,
    movement: Movement,
    primals: tuple[_Factors, Routing],
    tangents: tuple[_Factors, Leaf],
) -> tuple[jax.Array, jax.Array]:
    factors, routing = primals
    out: Leaf = _derivative(by, dtype, movement, factors, routing)
    parts = [
        _linear(by, dtype, movement, factors, index, direction, routing)
        for index, direction in zip((TOKENS, ROWS, GATES), tangents[0], strict=True)
        if not (direction is None or isinstance(direction, ad.Zero))
    ]
    return out, sum(parts[1:], parts[0]) if parts else jnp.zeros_like(out)


def _linear(
    by: _Argument, dtype: jnp.dtype, movement: Movement, factors: _Factors, index: _Argument, direction: jax.Array,
    routing: Routing,
) -> jax.Array:  # fmt: skip
    """The derivative by `by`, with `direction` in the place of argument `index`. It is linear in `direction`.

    Its transpose is the derivative by argument `index`, with the cotangent in the place of argument `by`.
    """
    residuals, structure = jax.tree.flatten((_with(factors, index, None), routing))

    def forward(residuals: Sequence[jax.Array], operands: Sequence[jax.Array]) -> list[jax.Array]:
        others, routing = jax.tree.unflatten(structure, residuals)
        return [_derivative(by, dtype, movement, _with(others, index, operands[0]), routing)]

    def transpose(
        residuals: Sequence[jax.Array], wanted: Sequence[Wanted], cotangents: Sequence[Leaf]
    ) -> list[jax.Array]:
        others, routing = jax.tree.unflatten(structure, residuals)
        given = _with(others, by, ad.instantiate_zeros(cotangents[0]))
        if (plan := _plan_of(movement, given, routing)) is not None:
            name = ("rows added to tokens", "tokens copied to rows", "tokens times their rows")[index]
            shapes = f"{plan.rows} rows of {plan.features} {plan.dtype}"
            record_backward(name, plan.target, "the kernels of the forward pass serve these rows", shapes)
        assert wanted[0] is not None
        return [_derivative(index, wanted[0], movement, given, routing)]

    return linear_map(forward, transpose, residuals, [direction])[0]


def _with(factors: _Factors, index: int, value: Leaf) -> _Factors:
    return (*factors[:index], value, *factors[index + 1 :])


# --- By the kernels ---


def _by_kernel(by: _Argument, movement: Movement, plan: RowsPlan, factors: _Factors, routing: Routing) -> jax.Array:
    """Computes the derivative by one argument from the other two, those of `factors` that are not None."""
    tokens, rows, gates = factors
    inputs = {"positions": routing.positions}
    if tokens is not None:
        inputs["tokens"] = tokens
    if rows is not None:
        inputs["rows"] = rows
    if gates is not None:
        inputs["gates"] = gates.astype(jnp.float32)
    # The kernel leaves rows that are not in use undefined. Where jax looks for NaN in results, they must be zeros.
    filled = routing.filled if by == ROWS and checks_numbers() else None
    return _launched(by, plan, movement.must_fuse, inputs, filled)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))  # Equal kernels are traced once, and lowered once per program.
def _launched(
    by: _Argument, plan: RowsPlan, must_fuse: bool, inputs: dict[str, jax.Array], filled: jax.Array | None
) -> jax.Array:
    """Runs the kernel of the derivative by one argument. Returns sums by tokens, rows by rows, and products by gates.

    `filled`: which rows are in use, if the others must be zero: the kernel leaves them undefined.
    """
    kernel = (row_kernels.added, row_kernels.copied, row_kernels.products)[by]
    result = ("sums", "rows", "products")[by]
    # If XLA's partitioner might have to split a kernel that has no peers, XLA computes the map.
    otherwise = None if must_fuse or plan.group is not None else functools.partial(_on_one_device, by, plan)

    @sequential_vmap  # A kernel has no batch: under `jax.vmap` it runs for one element after the other.
    def run(inputs: dict[str, jax.Array]) -> jax.Array:
        return kernel(inputs, plan, otherwise)[result]

    return run(inputs) if filled is None else jnp.where(filled[:, None], run(inputs), 0)


def _on_one_device(by: _Argument, plan: RowsPlan, given: row_kernels.Arrays) -> row_kernels.Arrays:
    """The same as a kernel of one device, by XLA, for a program that XLA's partitioner splits."""
    positions = given["positions"]
    gates = given.get("gates")
    if by == ROWS:
        wide = given["tokens"].astype(jnp.float32)[:, None] * (1 if gates is None else gates[..., None])
        each = jnp.broadcast_to(wide, (*positions.shape, plan.features)).astype(plan.dtype)
        return {"rows": jnp.zeros((plan.rows, plan.features), plan.dtype).at[positions].set(each, mode="drop")}
    if by == TOKENS:
        return {"sums": _sums(given["rows"], gates, positions).astype(plan.dtype)}
    rows = _of_slots(given["rows"], positions)
    return {"products": jnp.stack([(_wide(given["tokens"]) * row).sum(1) for row in rows], axis=1)}


# --- By XLA ---


def _wide(value: jax.Array) -> jax.Array:
    return value.astype(jnp.promote_types(value.dtype, jnp.float32))


def _of_rows(tokens: jax.Array, routing: Routing) -> jax.Array:
    """The token of each row. The indices are valid, so that nothing checks them."""
    return _wide(tokens.at[routing.tokens].get(mode="promise_in_bounds"))


def _of_slots(rows: jax.Array, positions: jax.Array) -> list[jax.Array]:
    """The rows of each slot of all tokens; zeros where this device has none."""
    at = (positions[:, slot] for slot in range(positions.shape[1]))
    return [_wide(rows.at[where].get(mode="fill", fill_value=0)) for where in at]


def _sums(rows: jax.Array, gates: Leaf, positions: jax.Array) -> jax.Array:
    """The sums of all tokens over the rows of this device, [D · T, h]. `gates` are those of all devices."""
    parts = _of_slots(rows, positions)
    if gates is not None:
        is_here = positions < rows.shape[0]
        # A gate that is not finite counts only on the device that has the row.
        parts = [jnp.where(is_here[:, slot, None], gates[:, slot, None] * row, 0) for slot, row in enumerate(parts)]
    return sum(parts[1:], parts[0])


def _by_tokens(movement: Movement, factors: _Factors, routing: Routing, dtype: jnp.dtype) -> jax.Array:
    _, rows, gates = factors
    gates = None if gates is None else _wide(gates)
    return movement.scattered(_sums(rows, gates, routing.positions).astype(dtype))


def _by_rows(movement: Movement, factors: _Factors, routing: Routing, dtype: jnp.dtype) -> jax.Array:
    tokens, _, gates = factors
    rows = _of_rows(movement.gathered(tokens), routing)
    if gates is not None:
        of_rows = gates.at[routing.tokens, routing.slots].get(mode="promise_in_bounds")
        rows *= _wide(of_rows)[:, None]
    return jnp.where(routing.filled[:, None], rows, 0).astype(dtype)


def _by_gates(movement: Movement, factors: _Factors, routing: Routing, dtype: jnp.dtype) -> jax.Array:
    tokens, rows, _ = factors
    # Positions name rows in use only, so that what lies behind them does not count.
    products = (_of_rows(movement.gathered(tokens), routing) * _wide(rows)).sum(1)
    return products.at[routing.positions].get(mode="fill", fill_value=0).astype(dtype)
