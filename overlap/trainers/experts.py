"""The experts' MLP on global arrays, for tokens that a trainer has routed and weights that lie as the trainer says."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
from jax import lax
from jax.sharding import PartitionSpec as P

import overlap
from overlap.choice.dispatch import Implementation
from overlap.collectives.rows.mlp import expert_mlp
from overlap.frame.mesh_axes import axes_of_spec
from overlap.frame.signatures import AnyMesh
from overlap.kernels.varying import axes_of, same_along
from overlap.sharded import partitions


def routed_mlp(
    tokens: Mapping[str, jax.Array],
    weights: Mapping[str, jax.Array],
    specs: Mapping[str, P],
    axis: tuple[str, ...],
    activation: Callable[..., jax.Array],
    mesh: AnyMesh,
    implementation: Implementation | None,
) -> jax.Array:
    """Computes Σ gate · down[e](activation(gate[e](x), up[e](x))) over the chosen experts e of each token.

    Args:
      tokens: "x" [..., H], "chosen" [..., k], the experts of each token, and "gates" [..., k]; global.
      weights: "gate" and "up" [E, H, I], "down" [E, I, H], and perhaps biases, as for `expert_mlp`; global, in the
        dtype of "x".
      specs: the partition of each of these, that of the tokens for all three as "x". The first entry of a weight's is
        `axis`; along other axes weights are gathered.
      axis: the mesh axes that share the experts, in the order of their numbers; none: each device has all of them.
      activation, implementation: as for `expert_mlp`.
      mesh: the mesh.

    Returns:
      [..., H], global, sharded as "x".
    """
    specs = dict.fromkeys(tokens, specs["x"]) | {name: specs[name] for name in weights}
    num_experts = weights["gate"].shape[0]

    def of_parts(parts: dict[str, jax.Array]) -> jax.Array:
        x, chosen, gates = (parts[name].reshape(-1, parts[name].shape[-1]) for name in ("x", "chosen", "gates"))
        whole = {}
        for name in weights:
            whole[name] = parts[name]
            for dimension, along in enumerate(axes_of_spec(specs[name])):
                if dimension and along:
                    gathered = lax.all_gather(whole[name], along, axis=dimension, tiled=True)
                    # Where tokens are the same along an axis, so is the result, and its type must say so.
                    whole[name] = same_along(gathered, {*along} - axes_of(x))
        routing = overlap.route(chosen, num_experts, axis or None, gates=gates)
        out = expert_mlp(x, whole, routing, axis or None, activation=activation, implementation=implementation)
        return out.reshape(parts["x"].shape)

    return partitions.on_parts(of_parts, mesh, specs, specs["x"])({**tokens, **weights})
