"""`moe_mlp` with the signature of levanter's (levanter.grug.grug_moe), by this library's operations of experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from overlap.choice.dispatch import Implementation
from overlap.frame import mesh_axes
from overlap.sharded.experts import routed_mlp


def moe_mlp(
    x: jax.Array,
    selected_experts: jax.Array,
    combine_weights: jax.Array,
    w_up_gate: jax.Array,
    w_down: jax.Array,
    *,
    token_valid: jax.Array | None = None,
    activation: Callable[[jax.Array], jax.Array] | Any = jax.nn.silu,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Computes the gated sum of each token's experts, as levanter does. No route is dropped.

    Call it as levanter's function: on global arrays, on a mesh with Explicit axes. Those named "expert" share the
    experts and cut tokens; other axes may cut tokens too.

    Args:
      x: [T, D], sharded P((..., "expert"), None).
      selected_experts: integers [T, K], sharded as `x`.
      combine_weights: floating-point [T, K], sharded as `x`.
      w_up_gate: [E, D, 2 I], gate in front, sharded P("expert", ...), in the dtype of `x`; gathered along other axes.
      w_down: [E, I, D], in the same dtype, sharded alike.
      token_valid: booleans [T]; None: all are valid. For others the result is 0.
      activation: an elementwise function of gate, or a member of levanter's ActivationFunctionEnum.
      implementation: "fused", "xla" or None, as for `overlap.grouped_matmul`; levanter's own names are not known here.

    Returns:
      [T, D], sharded as `x`.

    Raises:
      ValueError: the mesh is not Explicit, or has an axis "expert" that does not cut the tokens; shapes, dtypes or the
        implementation are wrong: the message names the argument.

    Examples:
      >>> out = moe_mlp(x, selected_experts, combine_weights, w_up_gate, w_down, implementation="fused")
    """
    if implementation not in ("fused", "xla", None):
        raise ValueError(
            f'moe_mlp: implementation must be "fused", "xla" or None, got {implementation!r}: leave it out'
        )
    (tokens, hidden) = x.shape
    (experts, _, features) = w_up_gate.shape
    for name, array, wanted in (
        ("selected_experts", selected_experts, (tokens, selected_experts.shape[-1])),
        ("combine_weights", combine_weights, selected_experts.shape),
        ("w_up_gate", w_up_gate, (experts, hidden, features // 2 * 2)),
        ("w_down", w_down, (experts, features // 2, hidden)),
    ):
        if array.shape != wanted:
            raise ValueError(f"moe_mlp: {name} must have shape {wanted}, got {array.shape}: transpose or reshape it")
    for name, array, kind, what in (
        ("selected_experts", selected_experts, jnp.integer, "integers"),
        ("combine_weights", combine_weights, jnp.floating, "floating-point numbers"),
    ):
        if not jnp.issubdtype(array.dtype, kind):
            raise ValueError(f"moe_mlp: {name} must be {what}, got {array.dtype}: cast them")
    for name, array in (("w_up_gate", w_up_gate), ("w_down", w_down)):
        if array.dtype != x.dtype:
            raise ValueError(f"moe_mlp: {name} must have the dtype of x, {x.dtype}, got {array.dtype}: cast one")
    if token_valid is not None and (token_valid.shape != (tokens,) or token_valid.dtype != jnp.dtype(bool)):
        raise ValueError(
            f"moe_mlp: token_valid must be booleans of shape {(tokens,)}, got {token_valid.dtype} of shape "
            f"{token_valid.shape}: compare or reshape it"
        )
    function = getattr(activation, "to_jax_fn", lambda: activation)()
    if not callable(function):
        raise ValueError(
            f"moe_mlp: activation must be a function or a member of levanter's ActivationFunctionEnum, got "
            f"{activation!r}: pass jax.nn.silu, say"
        )
    mesh = jax.sharding.get_abstract_mesh()
    devices = dict(mesh.shape).get("expert", 1)
    if experts % devices:
        raise ValueError(
            f'moe_mlp: w_up_gate must have a multiple of the {devices} devices along "expert", got {experts} experts: '
            "use more experts or fewer devices"
        )
    spec = jax.typeof(x).sharding.spec
    axis = ("expert",) if dict(mesh.shape).get("expert", 1) > 1 else ()
    is_explicit = not mesh.empty and {*mesh_axes.explicit_axes(mesh)} == {*mesh.axis_names}
    if not is_explicit or not {*axis} <= {*mesh_axes.axes_of_type(x)[0]}:
        raise ValueError(
            f'moe_mlp: x must be on a mesh of Explicit axes, with its tokens sharded along "expert", got {spec} under '
            f"jax.set_mesh of {dict(mesh.shape)}: jax.reshard it"
        )
    if token_valid is not None:
        selected_experts = jnp.where(token_valid[:, None], selected_experts, -1)
    _, along, _ = mesh_axes.axes_of_type(w_up_gate)
    inwards = mesh_axes.spec((axis, along, ()))
    outwards = mesh_axes.spec((axis, *mesh_axes.axes_of_type(w_down)[1:]))
    gate, up = jnp.split(jax.reshard(w_up_gate, inwards), 2, axis=-1)
    out, _ = routed_mlp(
        {"x": x, "chosen": selected_experts, "gates": combine_weights, "gate": gate, "up": up, "down": w_down},
        {"x": spec, "gate": inwards, "up": inwards, "down": outwards},
        axis,
        mesh,
        activation=lambda gate, up: function(gate) * up,
        implementation=implementation,
    )
    return out
