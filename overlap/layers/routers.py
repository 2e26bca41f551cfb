"""Routers of `ExpertMLP`: functions from a token's logits to its experts, their gates, and probabilities for a loss.

    SoftmaxTopK    probabilities over all experts, then the largest: Mixtral, Qwen3-MoE, OLMoE
    TopKSoftmax    the largest logits, then probabilities over these: gpt-oss, whose logits have a bias
    SigmoidTopK    a probability for each expert by itself; a bias and groups decide the choice alone: DeepSeek-V3

A router of your own is a function of the logits, float32 [..., E], and the number of experts of a token, k. It returns
`Routes`, or a tuple like it. If it has parameters, make it an `nnx.Module`: it becomes a part of the layer. The layer
calls it inside `jax.shard_map`, with the logits of one device's tokens.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.tree_util import SequenceKey, register_pytree_with_keys

from overlap.layers.checks import check_flags, check_sizes
from overlap.layers.parallel import Layer


class Routes(NamedTuple):
    """What a router says of each token.

    Attributes:
      experts: integers [..., k], the experts that the token chose, which differ.
      gates: [..., k], the weight of each of them in the token's sum.
      probabilities: [..., E], by which experts differ for the load balance loss, 1 for a token in all; None: that loss
        is 0.
    """

    experts: jax.Array
    gates: jax.Array
    probabilities: jax.Array | None


type Router = Callable[[jax.Array, int], Routes]


class RouterReport(NamedTuple):
    """What an `ExpertMLP` returns beside its result, in float32, over the tokens of all devices.

    Tokens that a mask leaves out do not count. Without any token all are 0.

    Attributes:
      load_balance_loss: E · Σ f[e] · P[e], where f[e] is the share of the routes that chose expert e, and P[e] the mean
        of its probability. It is 1 if all experts are chosen alike, and at most E. Of Switch Transformer; for k experts
        per token that of Mixtral is k times as large. Add about 0.01 times it to the loss of a model.
      z_loss: the mean square of the logits' logsumexp, which keeps logits small (ST-MoE). Add about 0.001 times it.
      dropped: the share of the routes that were dropped; 0 without a capacity.
      load: [num_experts], the share of the routes that chose each expert, dropped ones too. A training that balances
        experts by `SigmoidTopK`'s selection bias lowers the bias of those with more than 1 / E: without a gradient,
        bias + rate · sign(1 / E - load), as in DeepSeek-V3.
    """

    load_balance_loss: jax.Array
    z_loss: jax.Array
    dropped: jax.Array
    load: jax.Array


# nnx.tabulate lays a tuple out by numbers, and fails on the names that jax gives the entries of a named one.
register_pytree_with_keys(
    RouterReport,
    lambda report: ([(SequenceKey(index), entry) for index, entry in enumerate(report)], None),
    lambda _, entries: RouterReport(*entries),
)


@dataclasses.dataclass(frozen=True)
class SoftmaxTopK:
    """The largest of the probabilities softmax(logits), as in Mixtral and Qwen3-MoE: the router of `ExpertMLP`.

    Attributes:
      normalize: whether the gates of a token are divided by their sum. If not, they are the probabilities.
    """

    normalize: bool = True

    def __post_init__(self) -> None:
        check_flags("SoftmaxTopK", normalize=self.normalize)

    def __call__(self, logits: jax.Array, k: int) -> Routes:
        """Routes tokens by their logits."""
        probabilities = jax.nn.softmax(logits)
        experts = _largest(probabilities, k)
        gates = _at(probabilities, experts)
        return Routes(experts, gates / gates.sum(-1, keepdims=True) if self.normalize else gates, probabilities)


@dataclasses.dataclass(frozen=True)
class TopKSoftmax:
    """The softmax over the k largest logits, as in gpt-oss: with `router_bias=True` the layer adds a bias to these."""

    def __call__(self, logits: jax.Array, k: int) -> Routes:
        """Routes tokens by their logits."""
        experts = _largest(logits, k)
        return Routes(experts, jax.nn.softmax(_at(logits, experts)), jax.nn.softmax(logits))


class SelectionBias(nnx.Variable):
    """A bias that decides about choices alone. It has no gradient, and is no nnx.Param: no optimizer touches it."""


class SigmoidTopK(Layer):
    """The largest of sigmoid(logits) + bias within the best groups, as in DeepSeek-V3.

    The experts of a token are of at most `top_groups` groups: those with the largest sums of their two largest scores.
    Gates have no bias: they are the sigmoids, divided by their sum, times `scale`.

    Parameter: `e_score_correction_bias` [num_experts], float32, at first zeros. It is a `SelectionBias`, with the name
    that it has in state dicts of Hugging Face; in a layer it is `layer.choose.e_score_correction_bias`. A training adds
    a small step to it, up where an expert has fewer routes than the mean and down where it has more; `nnx.state(layer)`
    has it, `nnx.state(layer, nnx.Param)` has not.

    Args:
      num_experts: number of experts.
      groups: number of groups of consecutive experts, which divides `num_experts`.
      top_groups: how many groups a token may choose from.
      normalize: whether the gates of a token are divided by their sum, plus 1e-20.
      scale: what gates are multiplied by, `routed_scaling_factor` in Hugging Face's configurations.

    Raises:
      TypeError: a size is no whole number, `normalize` neither True nor False, or `scale` no number.
      ValueError: a size is less than 1, `groups` does not divide `num_experts`, `top_groups` exceeds `groups`; at a
        call, the logits are of other experts, or the groups have fewer experts than a token chooses.

    Examples:
      >>> router = layers.SigmoidTopK(256, groups=8, top_groups=4, scale=2.5)  # DeepSeek-V3.
      >>> mlp = layers.ExpertMLP(7168, 2048, 256, 8, router=router, shared_features=2048, rngs=rngs)

    Source: DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), section 2.1.2.
    """

    def __init__(
        self, num_experts: int, *, groups: int = 1, top_groups: int = 1, normalize: bool = True, scale: float = 1.0
    ):
        title = "SigmoidTopK"
        check_sizes(title, num_experts=num_experts, groups=groups, top_groups=top_groups)
        check_flags(title, normalize=normalize)
        if isinstance(scale, bool) or not isinstance(scale, (int, float)):
            raise TypeError(f"{title}: scale must be a number, got {scale!r}: give 2.5, say, or leave it out")
        if num_experts % groups:
            raise ValueError(f"{title}: groups={groups} must divide num_experts={num_experts}: use groups of one size")
        if top_groups > groups:
            raise ValueError(f"{title}: top_groups={top_groups} must be at most groups={groups}: choose from fewer")
        self.num_experts = num_experts
        self.groups = groups
        self.top_groups = top_groups
        self.normalize = normalize
        self.scale = scale
        self.e_score_correction_bias = SelectionBias(jnp.zeros(num_experts, jnp.float32))

    def __call__(self, logits: jax.Array, k: int) -> Routes:
        """Routes tokens by their logits."""
        size = self.num_experts // self.groups
        if logits.shape[-1] != self.num_experts:
            raise ValueError(
                f"SigmoidTopK: num_experts={self.num_experts} must be that of the layer, got {logits.shape[-1]} logits "
                "of a token: give both the same"
            )
        if k > self.top_groups * size:
            raise ValueError(
                f"SigmoidTopK: top_groups={self.top_groups} groups of {size} must have as many experts as a token "
                f"chooses, got k={k}: choose from more groups"
            )
        scores = jax.nn.sigmoid(logits)
        choice = lax.stop_gradient(scores) + self.e_score_correction_bias[...]
        if self.top_groups < self.groups:
            of_groups = choice.reshape(*choice.shape[:-1], self.groups, size)
            best, _ = lax.top_k(of_groups, min(2, size))
            chosen = _largest(best.sum(-1), self.top_groups)
            is_open = (chosen[..., None] == jnp.arange(self.groups)).any(-2)
            choice = jnp.where(is_open[..., None], of_groups, -jnp.inf).reshape(choice.shape)
        experts = _largest(choice, k)
        gates = _at(scores, experts)
        if self.normalize:
            gates /= gates.sum(-1, keepdims=True) + 1e-20
        return Routes(experts, gates * self.scale, scores / scores.sum(-1, keepdims=True))


def check_router(layer: str, router: Any) -> None:
    """Raises TypeError if the router is no function."""
    if not callable(router) or isinstance(router, type):
        raise TypeError(
            f"{layer}: router must be a function of logits and k, got {router!r}: give layers.TopKSoftmax(), say"
        )
    if inspect.isfunction(router):
        try:
            inspect.signature(router).bind(None, None)
        except TypeError as wrong:
            raise TypeError(f"{layer}: router must be a function of logits and k, got {router!r}: {wrong}") from None


def check_routes(layer: str, found: Any, shape: tuple[int, ...], k: int) -> Routes:
    """Returns what a router returned for logits of this shape.

    Raises:
      ValueError: it is not three arrays, or they have other shapes or dtypes.
    """
    chosen = *shape[:-1], k
    wanted = (("experts", chosen, jnp.integer), ("gates", chosen, jnp.floating), ("probabilities", shape, jnp.floating))
    if not isinstance(found, tuple) or len(found) != len(wanted):
        raise ValueError(
            f"{layer}: router must return experts, gates and probabilities or None, got {type(found).__name__}: "
            "return layers.Routes"
        )
    for (name, size, kind), value in zip(wanted, found, strict=True):
        if value is None and name == "probabilities":
            continue
        dtype, got = getattr(value, "dtype", None), getattr(value, "shape", None)
        if got != size or dtype is None or not jnp.issubdtype(dtype, kind):
            found_type = type(value).__name__ if dtype is None else f"{dtype} {got}"
            raise ValueError(
                f"{layer}: router must return {name} of {kind.__name__} {size}, got {found_type}: see layers.Routes"
            )
    return Routes(*found)


def _largest(values: jax.Array, k: int) -> jax.Array:
    """The indices of the k largest values of each token; of equal ones the first."""
    return lax.top_k(lax.stop_gradient(values), k)[1]


def _at(values: jax.Array, experts: jax.Array) -> jax.Array:
    """The values of a token's experts. They are read by comparison, so that their gradient has no scatter."""
    is_chosen = experts[..., None] == jnp.arange(values.shape[-1])
    return jnp.where(is_chosen, values[..., None, :], 0).sum(-1)
