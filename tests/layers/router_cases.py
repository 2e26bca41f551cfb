"""Routers by formulas of NumPy, and layers of experts on meshes of several axes with a plain reference."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from overlap import layers
from tests.layers.layer_cases import AUTO, EXPLICIT

EXPERTS, CHOSEN = 8, 3


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def top(x: np.ndarray, k: int) -> np.ndarray:
    return np.argsort(-x, axis=-1, kind="stable")[..., :k]


# --- Formulas of the models, in float64 ---


def mixtral(logits: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    p = softmax(logits)
    ids = top(p, k)
    gates = np.take_along_axis(p, ids, -1)
    return ids, gates / gates.sum(-1, keepdims=True)


def gpt_oss(logits: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    ids = top(logits, k)
    return ids, softmax(np.take_along_axis(logits, ids, -1))


def deepseek(
    logits: np.ndarray, k: int, bias: np.ndarray, groups: int, top_groups: int, scale: float, normalize: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """As `DeepseekV3TopkRouter` of transformers, one token after the other."""
    scores = 1 / (1 + np.exp(-logits))
    ids, gates = [], []
    for token in scores.reshape(-1, scores.shape[-1]):
        choice = (token + bias).reshape(groups, -1)
        best = np.sort(choice, axis=1)[:, -2:].sum(1)
        closed = [group for group in range(groups) if group not in top(best, top_groups)]
        choice[closed] = -np.inf
        chosen = top(choice.reshape(-1), k)
        ids.append(chosen)
        gates.append(token[chosen] / ((token[chosen].sum() + 1e-20) if normalize else 1) * scale)
    return np.array(ids).reshape(*logits.shape[:-1], k), np.array(gates).reshape(*logits.shape[:-1], k)


def by_id(ids: Any, gates: Any, experts: int) -> np.ndarray:
    """The gate of each expert; 0 of those that a token did not choose."""
    found = np.zeros((*np.shape(ids)[:-1], experts))
    np.put_along_axis(found, np.asarray(ids), np.asarray(gates), -1)
    return found


def sigmoid_router(experts: int, seed: int, **options: Any) -> tuple[layers.SigmoidTopK, np.ndarray]:
    made = layers.SigmoidTopK(experts, **options)
    bias = np.random.default_rng(seed).standard_normal(experts) / 4
    made.e_score_correction_bias[...] = jnp.asarray(bias, jnp.float32)
    return made, bias


def gpt_oss_activation(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Of gpt-oss: gate at most 7, up within ±7, alpha 1.702."""
    gate = jnp.minimum(gate, 7)
    return (jnp.clip(up, -7, 7) + 1) * gate * jax.nn.sigmoid(1.702 * gate)


@dataclasses.dataclass(frozen=True)
class Case:
    """A layer on a mesh with axes of two devices, its axes, and how activations lie between layers."""

    axes: tuple[str, ...]
    options: dict[str, Any]
    between: P
    kind: Any = AUTO
    router: str = "softmax"


CASES = {
    "data axis": Case(("data",), {"axis": "data", "batch_axis": "data"}, P("data", None, None), EXPLICIT, "sigmoid"),
    "data and tensor, shared": Case(
        ("data", "tensor"), {"axis": ("data", "tensor"), "batch_axis": "data", "shared_features": 16},
        P("data", "tensor", None), EXPLICIT, "gpt-oss"),
    "two axes for rows": Case(("a", "b"), {"axis": ("a", "b")}, P(None, ("a", "b"), None)),
    "one axis of the batch's two": Case(
        ("data", "expert"), {"axis": "expert", "batch_axis": ("data", "expert"), "sequence_parallel": False},
        P(("data", "expert"), None, None), AUTO, "sigmoid"),
    "data axis, fsdp beside it": Case(
        ("data", "tensor"), {"axis": "data", "batch_axis": "data", "fsdp_axis": "tensor"}, P("data", None, None)),
}  # fmt: skip


def mesh_of(case: Case) -> Mesh:
    shape = (2,) * len(case.axes)
    devices = np.array(jax.devices()[: math.prod(shape)]).reshape(shape)
    return Mesh(devices, case.axes, axis_types=(case.kind,) * len(shape))


def built(case: Case, **more: Any) -> layers.ExpertMLP:
    """Inside `jax.set_mesh`. Biases are drawn, so that a misplaced one would show."""
    options = dict(case.options)
    if case.router == "gpt-oss":
        options |= {"router": layers.TopKSoftmax(), "router_bias": True, "activation": gpt_oss_activation,
                    "use_bias": True, "bias_init": jax.nn.initializers.normal(0.5)}  # fmt: skip

    def make() -> layers.ExpertMLP:
        router: Any = {"router": layers.SigmoidTopK(EXPERTS, groups=4, top_groups=2, scale=2.0)}
        extra: Any = router if case.router == "sigmoid" else {}
        made = layers.ExpertMLP(8, 12, EXPERTS, CHOSEN, rngs=nnx.Rngs(0), **options | extra | more)
        if case.router == "sigmoid":
            choose: Any = made.choose
            choose.e_score_correction_bias[...] = jnp.cos(jnp.arange(EXPERTS) * 3.0) / 4
        if made.router.bias is not None:
            made.router.bias[...] = jnp.sin(jnp.arange(EXPERTS) * 2.0)
        return made

    return nnx.jit(make)()


def mlp(p: Any, x: jax.Array, activation: Any, *expert: int) -> jax.Array:
    def linear(name: str, x: jax.Array) -> jax.Array:
        bias = p[name].get("bias")
        return x @ p[name]["kernel"][expert] + (0 if bias is None else bias[expert])

    return linear("down", activation(linear("gate", x), linear("up", x)))


def chosen_by(case: Case, p: Any, x: np.ndarray) -> np.ndarray:
    """The experts of each token."""
    logits = np.float64(x) @ p["router"]["kernel"] + p["router"].get("bias", 0)
    if case.router != "sigmoid":
        return gpt_oss(logits, CHOSEN)[0]
    return deepseek(logits, CHOSEN, np.cos(np.arange(EXPERTS) * 3.0) / 4, 4, 2, 2.0)[0]


def reference(case: Case, p: Any, x: jax.Array, ids: np.ndarray, counts: Any = True) -> jax.Array:
    """The layer expert by expert. `counts`: which routes are not dropped."""
    activation = gpt_oss_activation if case.router == "gpt-oss" else lambda gate, up: jax.nn.silu(gate) * up
    logits = x @ p["router"]["kernel"] + p["router"].get("bias", 0)
    scores = (jax.nn.sigmoid if case.router == "sigmoid" else jax.nn.softmax)(logits)
    gates = jnp.take_along_axis(scores, ids, -1)
    gates = gates / gates.sum(-1, keepdims=True) * (2.0 if case.router == "sigmoid" else 1.0) * counts
    out = x + mlp(p["shared"], x, activation) if "shared" in p else x
    for expert in range(EXPERTS):
        out += jnp.where(ids == expert, gates, 0).sum(-1, keepdims=True) * mlp(p, x, activation, expert)
    return out


def of_weights(out: Any) -> Any:
    return (out * np.cos(np.arange(out.size) * 2).reshape(out.shape)).sum()


@nnx.jit
@functools.partial(nnx.value_and_grad, argnums=(0, 1), has_aux=True)
def run(layer: layers.ExpertMLP, x: jax.Array) -> Any:
    found = layer(x, x)
    return of_weights(found[0]), found


def right_of(case: Case, p: Any, x: np.ndarray, *counts: Any) -> Any:
    """The result, and the gradients by the parameters and by `x`."""
    ids = chosen_by(case, p, x)

    def loss(p: Any, x: Any) -> Any:
        out = reference(case, p, x, ids, *counts)
        return of_weights(out), out

    with jax.default_matmul_precision("highest"):
        (_, out), grads = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(p, x)
    return out, grads
