"""The experts' MLP: both operations of `experts.py` one after the other, with a backward pass of its own.

    h = activation(gate, up), gate = rows @ w_gate + b_gate, up = rows @ w_up + b_up        rows: copies of tokens
    out = the sums of each token's rows of h @ w_down + b_down, times their gates

Each operation's own backward pass would apply the derivative of the activation by XLA, to all rows that there may be,
and keep the rows of `out` for the gradient of the gates. Here both are part of a product, for the rows in use alone:

    forward    one product stores gate, up and h
    backward   rows of the cotangent are copied without their gates; the product with w_down gives d, and its epilogue
               makes of d, gate, up and the row's weight w (its gate) the cotangents of gate and up, and w · h for the
               gradient of w_down; and it sums d · h over the row, the gradient of w

Forward mode and derivatives of higher orders are those of the two operations.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.interpreters import ad
from jax.typing import DTypeLike

from overlap.choice.dispatch import Implementation
from overlap.collectives.rows.experts import gathered_product, grouped_matmul_reduce_scatter
from overlap.collectives.rows.mlp_run import Arrays, MlpCall, MlpRun
from overlap.collectives.rows.routing import Routing
from overlap.frame.activation import traced
from overlap.frame.elementwise import NotElementwise
from overlap.frame.explain import record, recorded
from overlap.frame.linear import tangents_of
from overlap.frame.rules import with_rule
from overlap.frame.signatures import AnyArray, Arguments, AxisName, Leaf
from overlap.kernels.config import FLOAT16
from overlap.kernels.launch import checks_numbers


def expert_mlp(
    tokens: jax.Array,
    weights: Mapping[str, AnyArray],
    routing: Routing,
    axis_name: AxisName | None,
    *,
    activation: Callable[..., jax.Array],
    scalars: Sequence[jax.Array] | None = None,
    preferred_element_type: DTypeLike | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Sends tokens through the gated MLPs of their experts. Call it inside `jax.shard_map`.

    Args:
      tokens: of this device, [T, H].
      weights: of this device's experts: "gate" and "up", [E / D, H, I], and "down", [E / D, I, H]; of the dtype of
        `tokens`. Perhaps "gate.bias", "up.bias", [E / D, I], and "down.bias", [E / D, H].
      routing: what `overlap.route` returned for the same axis, with gates.
      axis_name: as for `overlap.route`.
      activation: an elementwise function of gate and up; or an `Activation` that is traced already.
      scalars: those that such an `Activation` captures; else None.
      preferred_element_type, implementation: see `overlap.grouped_matmul`.

    Returns:
      [T, H]: the gated sums.
    """
    static = MlpCall(axis_name, activation, preferred_element_type, implementation)
    arrays: dict[str, Leaf] = {"tokens": tokens, "gates": routing.gates, **weights}
    if scalars is not None:
        arrays["scalars"] = tuple(scalars)
        return _by_operations(static, arrays, dataclasses.replace(routing, gates=None))
    routing = dataclasses.replace(routing, gates=None)
    out_dtype = jnp.dtype(preferred_element_type or tokens.dtype)
    if tokens.dtype not in FLOAT16 or out_dtype != tokens.dtype or implementation == "xla" or checks_numbers():
        return _by_operations(static, arrays, routing)
    try:
        proven, captured = traced(activation, arrays=2)
    except NotElementwise:
        return _by_operations(static, arrays, routing)
    if captured:  # They may be differentiated, which takes a sum over all rows.
        return _by_operations(static, arrays, routing)
    static = dataclasses.replace(static, proven=proven)
    rule = functools.partial(_tangent, static)
    return with_rule(functools.partial(_by_operations, static), rule, arrays, routing)


def _by_operations(static: MlpCall, arrays: Arrays, routing: Routing) -> jax.Array:
    """The MLP by both operations, with their derivatives."""
    tokens, gate, up = (arrays[name] for name in ("tokens", "gate", "up"))
    with jax.named_scope("gate_up"):
        given = Arguments(tokens, [gate, up], **static.of_first(arrays))
        hidden = gathered_product(given, routing, static.axis_name)
    with jax.named_scope("down"):
        return grouped_matmul_reduce_scatter(
            checkpoint_name(hidden, "hidden").astype(tokens.dtype),
            arrays["down"],
            None,
            dataclasses.replace(routing, gates=arrays["gates"]),
            static.axis_name,
            bias=arrays.get("down.bias"),
            preferred_element_type=static.preferred_element_type,
            implementation=static.implementation,
        )


def _tangent(
    static: MlpCall, primals: tuple[Arrays, Routing], tangents: tuple[Arrays, Routing]
) -> tuple[jax.Array, jax.Array]:
    arrays, routing = primals
    moved = {name: x for name, x in tangents[0].items() if not isinstance(x, ad.Zero)}
    with recorded() as found:
        run = MlpRun.of(static, arrays, routing)
    if run is None:

        def of_moved(moved: Arrays) -> jax.Array:
            return _by_operations(static, {**arrays, **moved}, routing)

        return jax.jvp(of_moved, ({name: arrays[name] for name in moved},), (moved,))
    for choice in found:
        record(choice)
    out, saved = run.forward(arrays, routing)
    tangent = tangents_of(
        out,
        primals,
        tangents,
        by_xla=functools.partial(_in_forward_mode, static),
        backward=functools.partial(_cotangents, run),
        saved=saved,
    )
    return out, tangent


def _in_forward_mode(static: MlpCall, operands: tuple[Arrays, Routing]) -> jax.Array:
    with recorded():  # It is traced for every derivative, and is part of the program in forward mode only.
        return _by_operations(static, *operands)


def _cotangents(
    run: MlpRun, operands: tuple[Arrays, Routing], saved: Arrays, cotangent: Leaf, wanted: tuple[Arrays, Routing]
) -> tuple[dict[str, Leaf], Routing]:
    """The backward pass, as `tangents_of` calls it."""
    arrays, routing = operands
    asked, nothing = wanted
    names = tuple(name for name, dtype in asked.items() if dtype is not None)
    found = run.backward(names, arrays, routing, saved, ad.instantiate_zeros(cotangent))
    return {**dict.fromkeys(arrays), **found}, jax.tree.map(lambda _: None, nothing)
