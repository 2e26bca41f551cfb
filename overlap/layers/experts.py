"""The expert MLP: a router sends each token to some of many gated MLPs, which the devices share among them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Unpack

import jax
import jax.export
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from overlap.frame import mesh_axes
from overlap.frame.activation import traced
from overlap.frame.elementwise import NotElementwise
from overlap.frame.signatures import AnyMesh
from overlap.layers.checks import (
    check_activation,
    check_dtypes,
    check_factors,
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
    row_axis,
    spec_between_layers,
)
from overlap.layers.routers import Router, RouterReport, Routes, SoftmaxTopK, check_router, check_routes
from overlap.sharded import partitions
from overlap.sharded.experts import routed_mlp


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

        chosen, gates = choose(router(x), k)      in float32; by default the k largest probabilities softmax(router(x))
                                                  of each token, divided by their sum
        result = Σ gate · down[e](activation(gate[e](x)) · up[e](x)) over the chosen experts e, + shared(x) + residual

    The experts are shared among the devices along `axis` (expert parallelism), where `GatedMLP` shares features.
    Everything else is as for `GatedMLP`: activations are sharded as between layers, the tokens of the devices along
    `axis` are gathered, and sums are scattered (`overlap.all_gather_lhs_grouped_matmul`,
    `overlap.grouped_matmul_reduce_scatter`). There is no tensor parallelism inside an expert.

    `axis` may be several mesh axes, and may name axes of `batch_axis` (expert parallelism along the data axis). Between
    layers rows are cut along those of `axis` that `batch_axis` has not, if there are any:
    - `axis="data", batch_axis="data"`: activations are P("data", None, None). Other axes' devices compute the same.
    - `axis=("data", "tensor"), batch_axis="data"`: they are P("data", "tensor", None), as between tensor-parallel
      layers, and all devices share the experts.
    In both the input must have a batch: [batch, rows, in_features].

    Parameters: `router.kernel` [in_features, num_experts], whole on all devices; `router.bias` [num_experts] with
    `router_bias`; `choose` is the router's function, with its parameters if it has any. `gate.kernel` and `up.kernel`
    [num_experts, in_features, hidden_features] and `down.kernel` [num_experts, hidden_features, in_features], all
    sharded P(axis, fsdp_axis, None). Each may have a `bias` [num_experts, features], P(axis, None). `shared` is a
    `GatedMLP`.

    Args:
      in_features: features of input and result, a multiple of the devices along `fsdp_axis`.
      hidden_features: features inside an expert, a multiple of the devices along `fsdp_axis`.
      num_experts: number of experts, a multiple of the devices along `axis`.
      experts_per_token: how many experts each token chooses (top-k).
      shared_features: hidden features of a gated MLP that all tokens pass; None: there is none. Its features are cut
        along the one axis that cuts rows between layers, so there must be one.
      normalize_gates: whether the gates of a token are divided by their sum, as in Mixtral and Qwen3-MoE. If not, they
        are the probabilities. It belongs to the default router.
      router: how tokens choose: `SoftmaxTopK`, the default, `TopKSoftmax`, `SigmoidTopK`, or a function of your own
        from (logits, experts_per_token) to `Routes`.
      router_bias: whether the logits have a bias, an nnx.Param, as in gpt-oss.
      capacity_factor: None: nothing is dropped. Else an expert takes at most capacity_factor · (its equal share of the
        routes of the devices along `axis`) rows, and further routes add nothing. It bounds memory and the slowest
        device's time. The share is that of all rows of the input, also of those that a mask leaves out. First come the
        rows of the first device, and of these the first sequences; without sequence parallelism the first sequences.
      rows_factor: None: a device has rows for all routes that may come. Else it takes at most rows_factor · (its equal
        share of the routes of the devices along `axis`) rows for all its experts, after `capacity_factor` and in the
        same order. Memory falls in proportion, and far less is dropped than with a capacity of the same memory: 1.25
        drops nothing unless a device's experts together have a quarter more than their share.
      activation: an elementwise function of gate, by default jax.nn.silu. Or one of both gate and up, in place of
        activation(gate) · up; `shared` has it, too.
      use_bias: whether each product of the experts has a bias.
      name: what profiles and the HLO's metadata call this layer.
      **options: as for `ColumnParallelLinear`. `kernel_init` draws each expert by itself. `keep_gathered` counts for
        the shared expert only; the experts keep what they gather, unless `jax.checkpoint` says otherwise.

    Raises:
      TypeError: the activation or the router is no function, a factor no number, a flag neither True nor False; or for
        the reasons of `ColumnParallelLinear`.
      ValueError: the devices do not divide the experts or features; `experts_per_token` exceeds `num_experts`; a factor
        is not positive and finite; `normalize_gates` is given beside a router; `axis` has an axis of `fsdp_axis`, or
        one of `batch_axis` beside others without sequence parallelism; there is a shared expert and not one axis that
        cuts rows; or for the reasons of `ColumnParallelLinear`.
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
        router: Router | None = None,
        router_bias: bool = False,
        capacity_factor: float | None = None,
        rows_factor: float | None = None,
        activation: Callable[..., jax.Array] = silu,
        use_bias: bool = False,
        name: str | None = None,
        **options: Unpack[LinearOptions],
    ):
        given = {key: options[key] for key in Options.__annotations__ if key in options}
        Parallel.__init__(self, name=name, **given)
        check_activation(self.title, activation, most=2)
        check_flags(self.title, normalize_gates=normalize_gates, use_bias=use_bias, router_bias=router_bias)
        if router is not None:
            check_router(self.title, router)
            if not normalize_gates:
                raise ValueError(
                    f"{self.title}: normalize_gates=False belongs to the default router, got router={router!r}: let "
                    "the router return such gates"
                )
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
        check_factors(self.title, capacity_factor=capacity_factor, rows_factor=rows_factor)
        along = row_axis(self)
        if shared_features is not None and not isinstance(along, str):
            raise ValueError(
                f"{self.title}: shared_features={shared_features} needs one axis that cuts rows between layers, got "
                f"{along!r} of axis={self.axis!r} that batch_axis={self.batch_axis!r} has not: add one to axis, or add "
                "an MLP of your own to the result"
            )
        self.in_features = in_features
        self.hidden_features = hidden_features
        self.num_experts = num_experts
        self.experts_per_token = experts_per_token
        self.normalize_gates = normalize_gates
        self.capacity_factor = capacity_factor
        self.rows_factor = rows_factor
        self.activation = activation
        self.router = nnx.Linear(
            in_features, num_experts, use_bias=router_bias, dtype=jnp.float32, param_dtype=param_dtype or jnp.float32,
            rngs=options["rngs"], kernel_metadata=metadata(self, P(None, None)), bias_metadata=metadata(self, P(None)),
        )  # fmt: skip
        self.choose = SoftmaxTopK(normalize_gates) if router is None else router
        inwards, outwards = (num_experts, in_features, hidden_features), (num_experts, hidden_features, in_features)
        self.gate = ExpertKernel(self, inwards, use_bias, options)
        self.up = ExpertKernel(self, inwards, use_bias, options)
        self.down = ExpertKernel(self, outwards, use_bias, options)
        options["part_of"] = self.title
        if isinstance(along, str):
            options["axis"] = along
        self.shared = (
            None if shared_features is None else
            GatedMLP(in_features, shared_features, activation=activation, name="shared", **options)
        )  # fmt: skip

    def _check_axis(self) -> None:
        """Raises ValueError if the experts cannot be cut along `axis`."""
        names = names_in(self.axis) if isinstance(self.axis, (str, tuple)) else ()
        if not names or len({*names}) < len(names) or {*names} & {*names_in(self.fsdp_axis)}:
            raise ValueError(
                f"{self.title}: axis must be a mesh axis, or a tuple of several, none of which is in fsdp_axis, got "
                f"axis={self.axis!r} and fsdp_axis={self.fsdp_axis!r}: name each axis in one of the two"
            )
        if self._both and len(self._both) < len(names) and not self.sequence_parallel:
            raise ValueError(
                f"{self.title}: axis={self.axis!r} must be in batch_axis={self.batch_axis!r} or outside of it without "
                "sequence parallelism: cut the batch along all of axis, or use sequence_parallel=True"
            )

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
        if x.ndim < 3 and self._both:
            raise ValueError(
                f"{self.title}: the input must be [batch, rows, features], since axis={self.axis!r} and batch_axis="
                f"{self.batch_axis!r} share {self._both}, got shape {tuple(x.shape)}: give it a batch, or other axes"
            )
        with jax.named_scope(self.name):
            x = routed = placed(self, x, spec := spec_between_layers(self, x.shape))
            if mask is not None:
                mask = placed(self, jnp.asarray(mask), P(*spec[:-1]), "the mask")
                routed = jnp.where(mask[..., None], x, 0)  # Padding may hold NaN, and 0 times NaN is NaN.
            with jax.named_scope("router"):
                gates, chosen, balance, z, load, routes = self._routes(routed, mask)
            out, dropped = self._experts(routed, gates, chosen)
            if self.shared is not None:
                residual = self.shared(x, residual)
            out = checkpoint_name(out if residual is None else out + residual, self.name)
            return out, RouterReport(balance, z, dropped.sum() / routes, load)

    def _routes(
        self, x: jax.Array, mask: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
        """Returns gates and chosen experts, [..., rows, experts_per_token]; losses and load; how many routes there are.

        `RouterReport` defines losses and load. A token that `mask` leaves out chooses expert -1, which does not exist.
        """
        logits = self.router(x)
        chosen, gates, probabilities = self._chosen(logits)
        squares = jax.nn.logsumexp(logits, axis=-1) ** 2
        tokens = jnp.maximum(jnp.float32(squares.size), 1)
        if mask is not None:
            chosen = jnp.where(mask[..., None], chosen, -1)
            gates = jnp.where(mask[..., None], gates, 0)
            squares = jnp.where(mask, squares, 0)
            tokens = jnp.maximum(mask.sum(dtype=jnp.float32), 1)
        routes = tokens * self.experts_per_token
        every = tuple(range(x.ndim - 1))
        is_chosen = chosen[..., None] == jnp.arange(self.num_experts)
        load = is_chosen.astype(jnp.float32).sum((*every, x.ndim - 1)) / routes
        balance = jnp.float32(0)
        if probabilities is not None:
            probabilities = probabilities if mask is None else jnp.where(mask[..., None], probabilities, 0)
            balance = self.num_experts * (load * probabilities.sum(every) / tokens).sum()
        return gates, chosen, balance, squares.sum() / tokens, load, routes

    def _chosen(self, logits: jax.Array) -> Routes:
        """What the router says of all tokens.

        Each device asks it for its own tokens: XLA's partitioner would gather the logits of all for `lax.top_k`.
        """
        graph, state = nnx.split(self.choose) if isinstance(self.choose, nnx.Module) else (None, ())
        leaves, structure = jax.tree.flatten(state)
        parts = {"logits": logits} | {str(i): leaf for i, leaf in enumerate(leaves)}
        spec = spec_between_layers(self, logits.shape)
        specs = {name: spec if name == "logits" else P(*[None] * value.ndim) for name, value in parts.items()}

        def of_parts(parts: dict[str, jax.Array]) -> Routes:
            logits = parts["logits"]
            given = [parts[str(i)] for i in range(len(leaves))]
            choose = self.choose if graph is None else nnx.merge(graph, jax.tree.unflatten(structure, given))
            found = choose(logits, self.experts_per_token)
            return check_routes(self.title, found, logits.shape, self.experts_per_token)

        return partitions.on_parts(of_parts, mesh_in_use(self), specs, spec)(parts)

    def _experts(self, x: jax.Array, gates: jax.Array, chosen: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The gated sum of the chosen experts, sharded as `x`, and the number of dropped routes of each device."""
        mesh = mesh_in_use(self)
        shape = x.shape
        spec = spec_between_layers(self, shape)
        limits = self._limits(shape)
        is_whole = not self.sequence_parallel and row_axis(self) is not None
        if is_whole:
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
        activation, scalars = self._activation(mesh)
        parts |= scalars
        specs |= dict.fromkeys(scalars, P())
        try:
            out, dropped = routed_mlp(
                parts, specs, self.axis, mesh, limits,
                activation=activation,
                preferred_element_type=self.preferred_element_type,
                implementation=self.implementation,
            )  # fmt: skip
        except (ValueError, NotImplementedError) as wrong:
            raise type(wrong)(f"{self.title}: {wrong}") from wrong
        return self._without_padding(out, shape) if is_whole else out, dropped

    def _activation(self, mesh: AnyMesh) -> tuple[Callable[..., jax.Array], dict[str, jax.Array]]:
        """The activation of gate and up, and the scalars that it captures, by name, if they must be handed to it.

        They must on a mesh with Explicit axes: jax lets no function inside of `jax.shard_map` capture their arrays.
        """
        function = gated(self.activation)
        if mesh_axes.explicit_axes(mesh):
            with contextlib.suppress(NotElementwise):
                proven, scalars = traced(function, arrays=2)
                if scalars:
                    return proven, {f"scalars.{i}": scalar for i, scalar in enumerate(scalars)}
        return function, {}

    def _groups(self, shape: tuple[int, ...]) -> tuple[Axis | None, int, int]:
        """The mesh axis that cuts tokens into groups, the number of groups, and that of the tokens of each.

        The devices along `axis` share the tokens of one group.
        """
        names = names_in(self.batch_axis) if len(shape) > 2 else ()
        batch_axis = tuple(name for name in names if name not in self._both) or None
        groups = devices_along(self, batch_axis)
        return batch_axis, groups, math.prod(shape[:-1]) // groups

    @property
    def _both(self) -> tuple[str, ...]:
        """The mesh axes that cut the batch and the experts."""
        return tuple(name for name in names_in(self.axis) if name in names_in(self.batch_axis))

    def _limits(self, shape: tuple[int, ...]) -> dict[str, int]:
        """The most rows of an expert and of a device, for tokens of this shape. Padding does not count."""
        capacity = "capacity", "capacity_factor", self.capacity_factor, self.num_experts
        rows = "rows", "rows_factor", self.rows_factor, devices_along(self, self.axis)
        *_, tokens = self._groups(shape)
        limits: dict[str, int] = {}
        for name, keyword, factor, parts in (capacity, rows):
            if factor is None:
                continue
            if jax.export.is_symbolic_dim(tokens):
                raise ValueError(
                    f"{self.title}: {keyword} needs numbers of rows, got symbols in shape {shape}: export a program "
                    f"for each size, or leave {keyword} out"
                )
            limits[name] = max(math.ceil(factor * tokens * self.experts_per_token / parts), 1)
        return limits

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
