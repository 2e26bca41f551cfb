"""The program of a training step: loss, gradients, AdamW. Parameters and optimizer state are one donated tree."""

from __future__ import annotations

import argparse
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import overlap
from gpt.model import BATCH_AXES, DATA, FSDP, GPT, TENSOR

type State = dict[str, Any]


class Program:
    """The computations of a run, compiled for the mesh of its options.

    A state is {"params": the model's nnx.State in float32, "optimizer": optax's state}. `abstract_state` is a state
    with shapes and shardings instead of arrays. `first()` returns the state before the first step.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        # Load the kernels' modules now. If they are loaded while a function is traced for the first time, jax compiles
        # the function a second time.
        _ = overlap.sharded_matmul
        self.options, shape = options, (options.data, options.fsdp, options.tensor)
        devices = jax.devices()[: math.prod(shape)]
        self.mesh = jax.make_mesh(shape, (DATA, FSDP, TENSOR), (AxisType.Auto,) * 3, devices=devices)
        rate = optax.warmup_cosine_decay_schedule(
            0.0,
            options.learning_rate,
            options.warmup,
            max(options.steps, options.warmup + 1),
            0.1 * options.learning_rate,
        )
        matrices = lambda params: jax.tree.map(lambda p: p.ndim > 1, params)  # noqa: E731
        self._optimizer = optax.chain(
            optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.95, weight_decay=0.1, mask=matrices)
        )
        with jax.set_mesh(self.mesh):
            self._graph, params = nnx.split(nnx.eval_shape(self._model), nnx.Param)
            abstract = {"params": params, "optimizer": jax.eval_shape(self._optimizer.init, params)}
            shardings = self._shardings(abstract)
            self.abstract_state: State = jax.tree.map(
                lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
                abstract,
                shardings,
            )
            self._first = jax.jit(self._first_state, out_shardings=shardings)
            metrics = NamedSharding(self.mesh, P())
            self._step = jax.jit(self._update, donate_argnums=0, out_shardings=(shardings, metrics))

    def first(self) -> State:
        with jax.set_mesh(self.mesh):
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
        batch = tokens.reshape(self.options.accumulate, -1, tokens.shape[-1])
        with jax.set_mesh(self.mesh):
            wishes = self._place(np.full(self.mesh.devices.shape, stop), P(*self.mesh.axis_names))
            return self._step(state, self._place(batch, P(None, BATCH_AXES)), wishes)

    def _place(self, array: np.ndarray, spec: P) -> jax.Array:
        return jax.make_array_from_callback(array.shape, NamedSharding(self.mesh, spec), lambda index: array[index])

    def _model(self) -> GPT:
        return GPT(self.options, rngs=nnx.Rngs(self.options.seed))

    def _shardings(self, abstract: State) -> State:
        """Parameters and their moments are sharded as the layers say. The rest is replicated."""
        everywhere = NamedSharding(self.mesh, P())
        params = nnx.get_named_sharding(abstract["params"], self.mesh)
        moments = optax.tree_utils.tree_map_params(
            self._optimizer,
            lambda _, sharding: sharding,
            abstract["optimizer"],
            params,
            transform_non_params=lambda _: everywhere,
        )
        return {"params": params, "optimizer": moments}

    def _first_state(self) -> State:
        params = nnx.state(self._model(), nnx.Param)
        return {"params": params, "optimizer": self._optimizer.init(params)}

    def _loss(self, params: nnx.State, tokens: jax.Array) -> jax.Array:
        logits = nnx.merge(self._graph, params)(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), tokens[:, 1:]).mean()

    def _update(self, state: State, batch: jax.Array, stop: jax.Array) -> tuple[State, dict[str, jax.Array]]:
        """Computes one step. `batch` is [parts, sequences, tokens]; losses and gradients of the parts are averaged."""
        gradient_of = jax.value_and_grad(self._loss)
        if len(batch) == 1:
            loss, gradient = gradient_of(state["params"], batch[0])
        else:

            def add(total: Any, part: jax.Array) -> tuple[Any, None]:
                return jax.tree.map(jnp.add, total, gradient_of(state["params"], part)), None

            nothing = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, state["params"]))
            total, _ = jax.lax.scan(add, nothing, batch)
            loss, gradient = jax.tree.map(lambda sum: sum / len(batch), total)
        norm = optax.tree.norm(gradient)
        updates, moments = self._optimizer.update(gradient, state["optimizer"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "optimizer": moments}, {"loss": loss, "gradient_norm": norm, "stop": stop.any()}
