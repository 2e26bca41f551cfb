"""The model of examples/train.py, a decoder-only transformer of overlap's layers, and the program of a step.

With `implementation="plain"` the same model is made of plain_layers.py, the program that a user has without overlap.
"""

from __future__ import annotations

import argparse
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import plain_layers
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import overlap
import overlap.layers

DATA, FSDP, TENSOR = "data", "fsdp", "tensor"
BATCH_AXES = (DATA, FSDP)  # The batch is split along these axes.
VOCABULARY = 256  # A token is a byte. A larger vocabulary has entries that no text uses.
EXPERTS_PER_TOKEN = 2  # As in Mixtral, if there are experts.
BALANCE, Z = 1e-2, 1e-3  # The weights of a router's losses, as in Switch Transformer and ST-MoE.

type State = dict[str, Any]


def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Causal attention. Each device computes whole heads: nothing is communicated.

    XLA's attention keeps the scores [batch, heads, sequence, sequence] of every layer for the backward pass. That is
    most of a step's memory, so cuDNN computes it where it can.
    """
    cudnn = jax.default_backend() == "gpu" and query.dtype == jnp.bfloat16 and query.shape[-1] in (64, 128)
    attention = functools.partial(
        jax.nn.dot_product_attention, is_causal=True, implementation="cudnn" if cudnn else "xla"
    )
    heads = P(BATCH_AXES, None, TENSOR, None)
    with jax.named_scope("attention"):
        return jax.shard_map(attention, in_specs=heads, out_specs=heads, check_vma=False)(query, key, value)


class Block(nnx.Module):
    """Attention and a gated MLP (or experts), each behind a norm and with a residual connection.

    `layers` is the module of the layers, `overlap.layers` or `plain_layers`.
    """

    def __init__(self, layers: Any, options: argparse.Namespace, **layer: Any):
        features, heads = options.features, options.heads
        self.attention_norm = layers.RMSNorm(features, **layer)
        self.qkv = layers.QKVProjection(features, heads, **layer)
        self.output = layers.OutputProjection(heads, features // heads, features, **layer)
        self.mlp_norm = layers.RMSNorm(features, **layer)
        if options.experts:
            # There are no plain experts: beside plain layers, XLA computes overlap's.
            layer = {"implementation": "xla"} | layer
            chosen = min(EXPERTS_PER_TOKEN, options.experts)
            self.mlp = overlap.layers.ExpertMLP(features, options.hidden, options.experts, chosen, **layer)
        else:
            self.mlp = layers.GatedMLP(features, options.hidden, **layer)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array | float]:
        """Maps [batch, sequence, features], sharded P(batch axes, tensor, None), to the same, and the router's loss."""
        query, key, value = self.qkv(self.attention_norm(x))
        x = self.output(attend(query, key, value), residual=x)
        if not isinstance(self.mlp, overlap.layers.ExpertMLP):
            return self.mlp(self.mlp_norm(x), residual=x), 0.0
        x, report = self.mlp(self.mlp_norm(x), residual=x)
        return x, BALANCE * report.load_balance_loss + Z * report.z_loss


class GPT(nnx.Module):
    """Maps tokens, int32 [batch, sequence], and the next ones to the loss of each token, [batch, sequence].

    The second result is the mean of the routers' losses, 0 without experts.
    """

    def __init__(self, options: argparse.Namespace):
        rngs, dtype = nnx.Rngs(options.seed), jnp.dtype(options.dtype)
        layer: dict[str, Any] = {"dtype": dtype, "axis": TENSOR, "fsdp_axis": FSDP, "batch_axis": BATCH_AXES,
                                 "rngs": rngs}  # fmt: skip
        layers: Any = plain_layers
        if options.implementation != "plain":
            layers = overlap.layers
            layer["implementation"] = None if options.implementation == "auto" else options.implementation
        small = nnx.initializers.normal(0.02)
        # The two tables are small, so each device has them whole.
        self.tokens = nnx.Embed(options.vocabulary, options.features, dtype=dtype, embedding_init=small, rngs=rngs)
        self.positions = nnx.Embed(options.sequence, options.features, dtype=dtype, embedding_init=small, rngs=rngs)
        self.blocks = nnx.List([Block(layers, options, **layer) for _ in range(options.layers)])
        self.norm = layers.RMSNorm(options.features, **layer)
        if options.implementation == "plain":
            self.logits = layers.ColumnParallelLinear(options.features, options.vocabulary, use_bias=False, **layer)
        else:  # Where logits take much memory, they are not stored.
            self.logits = layers.CrossEntropyHead(options.features, options.vocabulary, **layer)
        self.remat = options.remat
        if options.implementation == "plain" and options.fsdp == 1:
            self.set_attributes(inside=False)  # The faster rival: where weights are smaller than rows, XLA moves them.

    def __call__(self, tokens: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array | float]:
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        # From here on each device of the tensor axis has a part of every sequence (sequence parallelism).
        x = jax.lax.with_sharding_constraint(x, P(BATCH_AXES, TENSOR, None))
        routers = 0.0
        for block in self.blocks:
            x, loss = nnx.remat(Block.__call__)(block, x) if self.remat else block(x)
            routers += loss / len(self.blocks)
        x = self.norm(x)
        if isinstance(self.logits, overlap.layers.CrossEntropyHead):
            return self.logits.loss(x, targets), routers
        logits = self.logits(x).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets), routers


class Program:
    """The computations of a run, compiled for the mesh of its options.

    A state is {"params": the model's nnx.State in float32, "optimizer": optax's state}. `abstract_state` is a state
    with shapes and shardings instead of arrays.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        # Load the kernels' modules now. If they are loaded while a function is traced for the first time, jax compiles
        # the function a second time.
        _ = overlap.sharded_matmul
        self._options, shape = options, (options.data, options.fsdp, options.tensor)
        devices = jax.devices()[: math.prod(shape)]
        self._mesh = jax.make_mesh(shape, (DATA, FSDP, TENSOR), (AxisType.Auto,) * 3, devices=devices)
        self._everywhere, rate = NamedSharding(self._mesh, P()), options.learning_rate
        schedule = optax.warmup_cosine_decay_schedule(
            0.0, rate, options.warmup, max(options.steps, options.warmup + 1), 0.1 * rate
        )
        matrices = lambda params: jax.tree.map(lambda p: p.ndim > 1, params)  # noqa: E731
        adam = optax.adamw(schedule, b2=0.95, weight_decay=0.1, mask=matrices)
        self._optimizer = optax.chain(optax.clip_by_global_norm(1.0), adam)
        with jax.set_mesh(self._mesh):
            self._graph, params = nnx.split(nnx.eval_shape(lambda: GPT(options)), nnx.Param)
            abstract = {"params": params, "optimizer": jax.eval_shape(self._optimizer.init, params)}
            shardings = self._shardings(abstract)
            self.abstract_state: State = jax.tree.map(
                lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
                abstract, shardings,
            )  # fmt: skip
            self._first = jax.jit(self._first_state, out_shardings=shardings)
            self._step = jax.jit(self._update, donate_argnums=0, out_shardings=(shardings, self._everywhere))

    def first(self) -> State:
        """The state before the first step, made on the devices, so that none ever holds a whole large weight."""
        with jax.set_mesh(self._mesh):
            return self._first()

    def step(self, state: State, tokens: np.ndarray, *, stop: bool) -> tuple[State, dict[str, jax.Array]]:
        """Starts one step, and returns while the devices compute.

        Args:
          state: donated: its memory is reused for the result.
          tokens: [batch, sequence + 1], the same in all processes.
          stop: whether this process wants to stop.

        Returns:
          The next state, and "loss", "gradient_norm" and "stop" (whether any process wants to stop).
        """
        batch = tokens.reshape(self._options.accumulate, -1, tokens.shape[-1])
        with jax.set_mesh(self._mesh):
            wishes = self._place(np.full(self._mesh.devices.shape, stop), P(*self._mesh.axis_names))
            return self._step(state, self._place(batch, P(None, BATCH_AXES)), wishes)

    def _place(self, array: np.ndarray, spec: P) -> jax.Array:
        return jax.make_array_from_callback(array.shape, NamedSharding(self._mesh, spec), lambda index: array[index])

    def _shardings(self, abstract: State) -> State:
        """Parameters and their moments are sharded as the layers say. The rest is replicated."""
        params = nnx.get_named_sharding(abstract["params"], self._mesh)
        moments = optax.tree_utils.tree_map_params(
            self._optimizer, lambda _, sharding: sharding, abstract["optimizer"], params,
            transform_non_params=lambda _: self._everywhere,
        )  # fmt: skip
        return {"params": params, "optimizer": moments}

    def _first_state(self) -> State:
        params = nnx.state(GPT(self._options), nnx.Param)
        return {"params": params, "optimizer": self._optimizer.init(params)}

    def _loss(self, params: nnx.State, tokens: jax.Array) -> jax.Array:
        losses, routers = nnx.merge(self._graph, params)(tokens[:, :-1], tokens[:, 1:])
        return losses.mean() + routers

    def _update(self, state: State, batch: jax.Array, stop: jax.Array) -> tuple[State, dict[str, jax.Array]]:
        """Computes one step. `batch` is [parts, sequences, tokens]; losses and gradients of the parts are averaged."""

        def add(total: Any, part: jax.Array) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, jax.value_and_grad(self._loss)(state["params"], part)), None

        nothing = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, state["params"]))
        if len(batch) == 1:
            loss, gradient = jax.value_and_grad(self._loss)(state["params"], batch[0])
        else:
            loss, gradient = jax.tree.map(lambda sum: sum / len(batch), jax.lax.scan(add, nothing, batch)[0])
        updates, moments = self._optimizer.update(gradient, state["optimizer"], state["params"])
        metrics = {"loss": loss, "gradient_norm": optax.tree.norm(gradient), "stop": stop.any()}
        return {"params": optax.apply_updates(state["params"], updates), "optimizer": moments}, metrics
