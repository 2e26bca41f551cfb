"""The experts' MLP on global arrays, for tokens that are routed already and weights that lie as the caller says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec as P

from overlap.collectives.rows.mlp import expert_mlp
from overlap.collectives.rows.routing import route
from overlap.frame.mesh_axes import axes_of_spec
from overlap.frame.signatures import AnyMesh, AxisName
from overlap.kernels.varying import axes_of, same_along
from overlap.sharded import partitions


def routed_mlp(
    arrays: Mapping[str, jax.Array],
    specs: Mapping[str, P],
    axis: AxisName,
    mesh: AnyMesh,
    limits: Mapping[str, int] | None = None,
    **how: Any,
) -> tuple[jax.Array, jax.Array]:
    """Computes Σ gate · down[e](activation(gate[e](x), up[e](x))) over the chosen experts e of each token.

    Args:
      arrays: global: "x" [..., H], "chosen" [..., k], the experts of each token, and "gates" [..., k]; the weights
        "gate" and "up" [E, H, I], "down" [E, I, H], and perhaps biases, as for `expert_mlp`, in the dtype of "x"; and
        perhaps "scalars.0" and so on, those of `expert_mlp`.
      specs: the partition of each of these, that of the tokens for all three as "x". The first entry of a weight's is
        `axis`; along other axes weights are gathered.
      axis: the mesh axes that share the experts, in the order of their numbers; (): each device has all of them.
      mesh: the mesh.
      limits: the most rows, as for `overlap.route`: "capacity" of an expert, "rows" of a device.
      **how: the activation and the other keywords of `expert_mlp`.

    Returns:
      [..., H], global, sharded as "x"; and the number of dropped routes of each device, with as many dimensions.
    """
    specs = {**specs, "chosen": specs["x"], "gates": specs["x"]}
    num_experts = arrays["gate"].shape[0]

    def of_parts(parts: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x, chosen, gates = (parts[name].reshape(-1, parts[name].shape[-1]) for name in ("x", "chosen", "gates"))
        routing = route(chosen, num_experts, axis or None, gates=gates, **(limits or {}))
        weights = {name: parts[name] for name in arrays if name.split(".")[0] in ("gate", "up", "down")}
        for name, weight in weights.items():
            for dimension, along in enumerate(axes_of_spec(specs[name])):
                if dimension and along:
                    weight = lax.all_gather(weight, along, axis=dimension, tiled=True)
                    # Where tokens are the same along an axis, so is the result, and its type must say so.
                    weight = same_along(weight, {*along} - axes_of(x))
            weights[name] = weight
        # In their own order: `parts` is in the order of names, where "scalars.10" comes before "scalars.2".
        scalars = [parts[name] for name in arrays if name.startswith("scalars.")]
        out = expert_mlp(x, weights, routing, axis or None, scalars=scalars or None, **how)
        return out.reshape(parts["x"].shape), routing.dropped.reshape((1,) * parts["x"].ndim)

    return partitions.on_parts(of_parts, mesh, specs, specs["x"])(dict(arrays))
