"""The expert MLP: a router sends each token to some of many gated MLPs, which the devices share among them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple, Unpack

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx.nn import dtypes
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import SequenceKey, register_pytree_with_keys

import overlap
from overlap.frame import mesh_axes
from overlap.kernels.varying import axes_of, same_along
from overlap.layers.checks import (
    check_activation,
    check_dtypes,
    check_features,
    check_flags,
    check_mask,
    check_residual,
    check_sizes,
)
from overlap.layers.linear import BIAS_INIT, KERNEL_INIT
from overlap.layers.mlp import GatedMLP, gated, silu
from overlap.layers.parallel import (
    Axis,
    LinearOptions,
    Options,
    Parallel,
    devices_along,
    divides,
    mesh_in_use,
    metadata,
    names_in,
    placed,
    spec_between_layers,
)
from overlap.sharded import partitions


class RouterReport(NamedTuple):
    """What an `ExpertMLP` returns beside its result: scalars in float32, over the tokens of all devices.

    Tokens that a mask leaves out do not count. If it leaves out all, the three are 0.

    Attributes:
      load_balance_loss: E · Σ f[e] · P[e], where f[e] is the share of the routes that chose expert e, and P[e] the mean
        of its probability. It is 1 if all experts are chosen alike, and at most E. Of Switch Transformer; for k experts
        per token that of Mixtral is k times as large. Add about 0.01 times it to the loss of a model.
      z_loss: the mean square of the logits' logsumexp, which keeps logits small (ST-MoE). Add about 0.001 times it.
      dropped: the share of the routes that were dropped; 0 without a capacity.
    """

    load_balance_loss: jax.Array
    z_loss: jax.Array
    dropped: jax.Array


# nnx.tabulate lays a tuple out by numbers, and fails on the names that jax gives the entries of a named one.
register_pytree_with_keys(
    RouterReport,
    lambda report: ([(SequenceKey(index), entry) for index, entry in enumerate(report)], None),
    lambda _, entries: RouterReport(*entries),
)


class ExpertKernel(nnx.Module):
    """The weights of all experts for one product: kernel [experts, in, out], bias [experts, out] or None."""

    def __init__(self, parallel: Parallel, shape: tuple[int, int, int], use_bias: bool, options: LinearOptions):
        init, bias_init = options.get("kernel_init", KERNEL_INIT), options.get("bias_init", BIAS_INIT)
        rngs = options["rngs"]
        dtype = options.get("param_dtype", jnp.float32)
        experts, *of_one = shape
        # Each expert is drawn by itself, as the kernel of an nnx.Linear.
        drawn = jax.vmap(lambda key: init(key, tuple(of_one), dtype))(jax.random.split(rngs.params(), experts))
        self.kernel = nnx.Param(drawn, **metadata(parallel, P(parallel.axis, parallel.fsdp_axis, None)))
        at_bias = metadata(parallel, P(parallel.axis, None))
        shape_of_bias = experts, of_one[1]
        self.bias = nnx.Param(bias_init(rngs.params(), shape_of_bias, dtype), **at_bias) if use_bias else None


class ExpertMLP(Parallel):
    """The sum of gated MLPs that a router chooses for each token, as in Mixtral and Qwen3-MoE.

        probability = softmax(router(x))          in float32, over all experts
        gates, chosen = the largest probabilities of each token, divided by their sum
        result = Σ gate · down[e](activation(gate[e](x)) · up[e](x)) over the chosen experts e, + shared(x) + residual

    The experts are shared among the devices along `axis` (expert parallelism), where `GatedMLP` shares features.
    Everything else is as for `GatedMLP`: activations are sharded as between layers, the tokens of the devices along
    `axis` are gathered, and sums are scattered (`overlap.all_gather_lhs_grouped_matmul`,
    `overlap.grouped_matmul_reduce_scatter`). There is no tensor parallelism inside an expert.

    Parameters: `router.kernel` [in_features, num_experts], whole on all devices. `gate.kernel` and `up.kernel`
    [num_experts, in_features, hidden_features] and `down.kernel` [num_experts, hidden_features, in_features], all
    sharded P(axis, fsdp_axis, None). Each may have a `bias` [num_experts, features], P(axis, None). `shared` is a
    `GatedMLP`.

    Args:
      in_features: features of input and result, a multiple of the devices along `fsdp_axis`.
      hidden_features: features inside an expert, a multiple of the devices along `fsdp_axis`.
      num_experts: number of experts, a multiple of the devices along `axis`.
      experts_per_token: how many experts each token chooses (top-k).
      shared_features: hidden features of a gated MLP that all tokens pass; None: there is none.
      normalize_gates: whether the gates of a token are divided by their sum, as in Mixtral and Qwen3-MoE. If not, they
        are the probabilities.
      capacity_factor: None: nothing is dropped. Else an expert takes at most capacity_factor · (its equal share of the
        routes of the devices along `axis`) rows, and further routes add nothing. It bounds memory and the slowest
        device's time. The share is that of all rows of the input, also of those that a mask leaves out. First come the
        rows of the first device, and of these the first sequences; without sequence parallelism the first sequences.
      activation: an elementwise function of gate, by default jax.nn.silu. Or one of both gate and up, in place of
        activation(gate) · up; `shared` has it, too.
      use_bias: whether each product of the experts has a bias. The router has none.
      name: what profiles and the HLO's metadata call this layer.
      **options: as for `ColumnParallelLinear`. `kernel_init` draws each expert by itself. `keep_gathered` counts for
        the shared expert only; the experts keep what they gather, unless `jax.checkpoint` says otherwise.

    Raises:
      TypeError: the activation is no function, `capacity_factor` no number, a flag neither True nor False; or for the
        reasons of `ColumnParallelLinear`.
      ValueError: the devices do not divide the experts or features; `experts_per_token` exceeds `num_experts`;
        `capacity_factor` is not positive and finite; or for the reasons of `ColumnParallelLinear`.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        num_experts: int,
        experts_per_token: int,
        *,
        shared_features: int | None = None,
        normalize_gates: bool = True,
        capacity_factor: float | None = None,
        activation: Callable[..., jax.Array] = silu,
        use_bias: bool = False,
        name: str | None = None,
        **options: Unpack[LinearOptions],
    ):
        given = {key: options[key] for key in Options.__annotations__ if key in options}
        Parallel.__init__(self, name=name, **given)
        check_activation(self.title, activation)
        check_flags(self.title, normalize_gates=normalize_gates, use_bias=use_bias)
        sizes = {"in_features": in_features, "hidden_features": hidden_features, "num_experts": num_experts}
        check_sizes(self.title, **sizes, experts_per_token=experts_per_token)
        names = ("dtype", "param_dtype", "preferred_element_type")
        self.dtype, param_dtype, self.preferred_element_type = (options.get(key) for key in names)
        check_dtypes(self.title, dtype=self.dtype, param_dtype=param_dtype,
                     preferred_element_type=self.preferred_element_type)  # fmt: skip
        divides(self, "num_experts", num_experts, self.axis, "use more experts, or shard along fewer devices")
        for what in ("in_features", "hidden_features"):
            divides(self, what, sizes[what], self.fsdp_axis, "pad the features, or shard along fewer devices")
        if experts_per_token > num_experts:
            raise ValueError(
                f"{self.title}: experts_per_token={experts_per_token} must be at most num_experts={num_experts}: a "
                "token chooses each expert once"
            )
        if capacity_factor is not None:
            way_out = f"got {capacity_factor!r}: give 1.25, say, or leave it out to drop nothing"
            if isinstance(capacity_factor, bool) or not isinstance(capacity_factor, (int, float, np.number)):
                raise TypeError(f"{self.title}: capacity_factor must be a number, {way_out}")
            if not 0 < capacity_factor < math.inf:
                raise ValueError(f"{self.title}: capacity_factor must be positive and finite, {way_out}")
        self.in_features = in_features
        self.hidden_features = hidden_features
        self.num_experts = num_experts
        self.experts_per_token = experts_per_token
        self.normalize_gates = normalize_gates
        self.capacity_factor = capacity_factor
        self.activation = activation
        self.router = nnx.Linear(
            in_features, num_experts, use_bias=False, dtype=jnp.float32, param_dtype=param_dtype or jnp.float32,
            rngs=options["rngs"], kernel_metadata=metadata(self, P(None, None)),
        )  # fmt: skip
        inwards, outwards = (num_experts, in_features, hidden_features), (num_experts, hidden_features, in_features)
        self.gate = ExpertKernel(self, inwards, use_bias, options)
        self.up = ExpertKernel(self, inwards, use_bias, options)
        self.down = ExpertKernel(self, outwards, use_bias, options)
        options["part_of"] = self.title
        self.shared = (
            None if shared_features is None else
            GatedMLP(in_features, shared_features, activation=activation, name="shared", **options)
        )  # fmt: skip

    def __call__(
        self, x: jax.Array, residual: jax.Array | None = None, mask: jax.Array | None = None
    ) -> tuple[jax.Array, RouterReport]:
        """Computes the experts' sum + shared(x) + residual.

        Args:
          x: [..., rows, in_features], sharded as between layers (`Parallel`).
          residual: of the same shape, sharded as the result, to which it is added.
          mask: booleans [..., rows], sharded as `x`: True for a token, False for padding; None: all are tokens. For
            padding the experts' sum is 0; `shared` and `residual` are added to it as to others. Padding takes no
            expert's capacity, counts in no loss, and has no effect on gradients through the experts and the router.

        Returns:
          [..., rows, in_features], sharded as `x`; and the `RouterReport`, whose losses a training adds to its own.
        """
        check_features(self.title, x, "in_features", self.in_features)
        check_residual(self.title, residual, tuple(x.shape))
        check_mask(self.title, mask, tuple(x.shape[:-1]))
        with jax.named_scope(self.name):
            x = routed = placed(self, x, spec := spec_between_layers(self, x.shape))
            if mask is not None:
                mask = placed(self, jnp.asarray(mask), P(*spec[:-1]), "the mask")
                routed = jnp.where(mask[..., None], x, 0)  # Padding may hold NaN, and 0 times NaN is NaN.
            with jax.named_scope("router"):
                gates, chosen, balance, z, routes = self._routes(routed, mask)
            out, dropped = self._experts(routed, gates, chosen)
            if self.shared is not None:
                residual = self.shared(x, residual)
            out = checkpoint_name(out if residual is None else out + residual, self.name)
            return out, RouterReport(balance, z, dropped.sum() / routes)

    def _routes(
        self, x: jax.Array, mask: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
        """Returns gates and chosen experts, [..., rows, experts_per_token]; load_balance_loss, z_loss; how many routes.

        `RouterReport` defines the two losses. Gates are read by comparison instead of by index, so that their gradient
        has no scatter. A token that `mask` leaves out chooses expert -1, which does not exist.
        """
        logits = self.router(x)
        probabilities = jax.nn.softmax(logits)
        _, chosen = lax.top_k(lax.stop_gradient(probabilities), self.experts_per_token)
        squares = jax.nn.logsumexp(logits, axis=-1) ** 2
        tokens = jnp.float32(squares.size)
        if mask is not None:
            chosen = jnp.where(mask[..., None], chosen, -1)
            probabilities = jnp.where(mask[..., None], probabilities, 0)
            squares = jnp.where(mask, squares, 0)
            tokens = jnp.maximum(mask.sum(dtype=jnp.float32), 1)
        is_chosen = chosen[..., None] == jnp.arange(self.num_experts)
        gates = jnp.where(is_chosen, probabilities[..., None, :], 0).sum(-1)
        if self.normalize_gates:
            total = gates.sum(-1, keepdims=True)
            gates /= total if mask is None else jnp.where(mask[..., None], total, 1)
        every = tuple(range(x.ndim - 1))
        routes = tokens * self.experts_per_token
        share = is_chosen.astype(jnp.float32).sum((*every, x.ndim - 1)) / routes
        balance = self.num_experts * (share * probabilities.sum(every) / tokens).sum()
        return gates, chosen, balance, squares.sum() / tokens, routes

    def _experts(self, x: jax.Array, gates: jax.Array, chosen: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The gated sum of the chosen experts, sharded as `x`, and the number of dropped routes of each device."""
        mesh = mesh_in_use(self)
        shape = x.shape
        spec = spec_between_layers(self, shape)
        capacity = self._capacity(shape)
        if not self.sequence_parallel:
            # Each device along `axis` has all tokens of its group: let it bring a part of them to the experts.
            axis_of_groups, *_ = self._groups(shape)
            spec = P(axis_of_groups, self.axis, None)
            x, gates, chosen = self._padded(x, 0), self._padded(gates, 0), self._padded(chosen, -1)
        weights = self._weights()
        promoted = dtypes.promote_dtype((x, *weights.values()), dtype=self.dtype)
        parts = dict(zip(("x", *weights), promoted, strict=True)) | {"gates": gates, "chosen": chosen}
        specs = {name: P(self.axis, None) if "bias" in name else P(self.axis, self.fsdp_axis, None) for name in weights}
        specs |= dict.fromkeys(("x", "gates", "chosen"), spec)
        parts = {name: placed(self, value, specs[name]) for name, value in parts.items()}
        of_parts = functools.partial(self._of_parts, capacity)
        try:
            out, dropped = partitions.on_parts(of_parts, mesh, specs, spec)(parts)
        except (ValueError, NotImplementedError) as wrong:
            raise type(wrong)(f"{self.title}: {wrong}") from wrong
        return out if self.sequence_parallel else self._without_padding(out, shape), dropped

    def _groups(self, shape: tuple[int, ...]) -> tuple[Axis | None, int, int]:
        """The mesh axis that cuts tokens into groups, the number of groups, and that of the tokens of each.

        The devices along `axis` share the tokens of one group.
        """
        batch_axis = self.batch_axis if len(shape) > 2 else None
        groups = devices_along(self, batch_axis)
        return batch_axis, groups, math.prod(shape[:-1]) // groups

    def _capacity(self, shape: tuple[int, ...]) -> int | None:
        """The most rows of one expert, for tokens of this shape; None: no limit. Padding does not count."""
        if self.capacity_factor is None:
            return None
        *_, tokens = self._groups(shape)
        if jax.export.is_symbolic_dim(tokens):
            raise ValueError(
                f"{self.title}: capacity_factor needs numbers of rows, got symbols in shape {shape}: export a "
                "program for each size, or leave capacity_factor out"
            )
        return math.ceil(self.capacity_factor * tokens * self.experts_per_token / self.num_experts)

    def _padded(self, value: jax.Array, empty: int) -> jax.Array:
        """Values of tokens as [groups, tokens, features], with `empty` added so that `axis` divides the tokens."""
        axis_of_groups, groups, tokens = self._groups(value.shape)
        of_groups = self._reshaped(value, (groups, tokens, value.shape[-1]), P(axis_of_groups, None, None))
        more = -tokens % devices_along(self, self.axis)
        return jnp.pad(of_groups, [(0, 0), (0, more), (0, 0)], constant_values=empty)

    def _without_padding(self, out: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """The inverse of `_padded`: an array of this shape, with all tokens of a group on each of its devices."""
        axis_of_groups, _, tokens = self._groups(shape)
        out = partitions.placed(out, P(axis_of_groups, None, None), mesh_in_use(self))
        return self._reshaped(out[:, :tokens], shape, spec_between_layers(self, shape))

    def _weights(self) -> dict[str, jax.Array]:
        """The kernels of all experts, "gate", "up" and "down", and their biases, "gate.bias", …, if there are any."""
        modules = {"gate": self.gate, "up": self.up, "down": self.down}
        weights = {name: module.kernel[...] for name, module in modules.items()}
        features = self.in_features, self.hidden_features
        for name, kernel in weights.items():
            wanted = self.num_experts, *(features[::-1] if name == "down" else features)
            if kernel.shape != wanted:
                raise ValueError(
                    f"{self.title}: {name}.kernel must be [experts, in, out] = {list(wanted)}, got "
                    f"{list(kernel.shape)}: load weights that are stored [experts, out, in] as weights.swapaxes(1, 2)"
                )
        return weights | {f"{name}.bias": one.bias[...] for name, one in modules.items() if one.bias is not None}

    def _reshaped(self, x: jax.Array, shape: tuple[int, ...], spec: P) -> jax.Array:
        """The array in another shape. On an Explicit mesh, `spec` says how the result is sharded."""
        mesh = mesh_in_use(self)
        return lax.reshape(x, shape, out_sharding=NamedSharding(mesh, spec) if mesh_axes.explicit_axes(mesh) else None)

    def _of_parts(self, capacity: int | None, parts: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """The result for this device's tokens, and the number of its dropped routes, with as many dimensions."""
        x, gates, chosen = (parts[name].reshape(-1, parts[name].shape[-1]) for name in ("x", "gates", "chosen"))
        axes = names_in(self.fsdp_axis)

        def whole(name: str) -> jax.Array:
            if not axes:
                return parts[name]
            gathered = lax.all_gather(parts[name], axes, axis=1, tiled=True)
            # Where the tokens are the same along an axis of FSDP, so is the result, and its type must say so.
            return same_along(gathered, set(axes) - axes_of(x))

        routing = overlap.route(chosen, self.num_experts, self.axis, capacity=capacity)
        with_bias = "gate.bias" in parts
        common = {"preferred_element_type": self.preferred_element_type, "implementation": self.implementation}
        with jax.named_scope("gate_up"):
            hidden = overlap.all_gather_lhs_grouped_matmul(
                x, [whole("gate"), whole("up")], routing, self.axis,
                activation=gated(self.activation),
                bias=[parts["gate.bias"], parts["up.bias"]] if with_bias else None, **common,
            )  # fmt: skip
        with jax.named_scope("down"):
            out = overlap.grouped_matmul_reduce_scatter(
                checkpoint_name(hidden, "hidden").astype(x.dtype), whole("down"), gates, routing, self.axis,
                bias=parts["down.bias"] if with_bias else None, **common,
            )  # fmt: skip
        return out.reshape(parts["x"].shape), routing.dropped.reshape((1,) * parts["x"].ndim)
