"""The program of a training step: loss, gradients, AdamW. Parameters and optimizer state are one donated tree."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import overlap
from gpt.devices import BATCH_AXES
from gpt.model import GPT
from gpt.options import Options

type State = dict[str, Any]
# Gradients with a larger norm are scaled down to it.
_LARGEST_NORM = 1.0
_WEIGHT_DECAY = 0.1
# The learning rate at the end, as a fraction of the highest.
_LAST_RATE = 0.1


class Program:
    """The computations of a run, compiled for the mesh of its options: `first_state` and `step`.

    A state is {"params": the model's nnx.State in float32, "optimizer": optax's state}. `abstract_state` is a state
    with shapes and shardings instead of arrays.
    """

    def __init__(self, options: Options) -> None:
        # Load the kernels' modules now. If they are loaded while a function is traced for the first time, jax compiles
        # the function a second time.
        _ = overlap.sharded_matmul
        self.options = options
        self.mesh: Mesh = options.axes.mesh()
        self._optimizer = _optimizer(options)
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
            self._step = jax.jit(
                self._update, donate_argnums=0, out_shardings=(shardings, NamedSharding(self.mesh, P()))
            )

    @property
    def parameters(self) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(self.abstract_state["params"]))

    def first_state(self) -> State:
        """The state before the first step."""
        with jax.set_mesh(self.mesh):
            return self._first()

    def step(self, state: State, tokens: np.ndarray, *, stop: bool) -> tuple[State, dict[str, jax.Array]]:
        """Starts one step, and returns while the devices compute.

        Args:
          state: donated: its memory is reused for the result.
          tokens: [batch, sequence + 1], the same in all processes.
          stop: whether this process wants to stop.

        Returns:
          The next state, and the metrics of this step: "loss", "gradient_norm", and "stop" (whether any process wants
          to stop).
        """
        batch = tokens.reshape(self.options.accumulate, -1, tokens.shape[-1])
        with jax.set_mesh(self.mesh):
            wishes = self._place(np.full(self.mesh.devices.shape, stop), P(*self.mesh.axis_names))
            return self._step(state, self._place(batch, P(None, BATCH_AXES)), wishes)

    def _place(self, array: np.ndarray, spec: P) -> jax.Array:
        return jax.make_array_from_callback(array.shape, NamedSharding(self.mesh, spec), lambda index: array[index])

    def _model(self) -> GPT:
        options = self.options
        return GPT(
            options.sizes,
            dtype=jnp.dtype(options.training.dtype),
            implementation=None if options.implementation == "auto" else options.implementation,
            remat=options.remat,
            rngs=nnx.Rngs(options.training.seed),
        )

    def _shardings(self, abstract: State) -> State:
        """The shardings of a state. Parameters and their moments are sharded as the layers say.

        The rest is replicated.
        """
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
        with jax.named_scope("loss"):
            losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), tokens[:, 1:])
            return losses.mean()

    def _update(self, state: State, batch: jax.Array, stop: jax.Array) -> tuple[State, dict[str, jax.Array]]:
        """Computes one step. Returns the next state and the metrics.

        `batch` is [parts, sequences, tokens]; losses and gradients of the parts are averaged in float32.
        """
        gradient_of = jax.value_and_grad(self._loss)
        if len(batch) == 1:
            loss, gradient = gradient_of(state["params"], batch[0])
        else:

            def add(total: Any, part: jax.Array) -> tuple[Any, None]:
                return jax.tree.map(jnp.add, total, gradient_of(state["params"], part)), None

            nothing = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, state["params"]))
            total, _ = jax.lax.scan(add, nothing, batch)
            loss, gradient = jax.tree.map(lambda sum: sum / len(batch), total)
        with jax.named_scope("optimizer"):
            norm = optax.tree.norm(gradient)
            updates, moments = self._optimizer.update(gradient, state["optimizer"], state["params"])
            params = optax.apply_updates(state["params"], updates)
        return {"params": params, "optimizer": moments}, {"loss": loss, "gradient_norm": norm, "stop": stop.any()}


def _optimizer(options: Options) -> optax.GradientTransformation:
    """AdamW. The rate rises during the warmup, then falls as a cosine. Gradients are clipped, and matrices decay."""
    training = options.training
    rate = optax.warmup_cosine_decay_schedule(
        0.0,
        training.learning_rate,
        training.warmup,
        max(training.steps, training.warmup + 1),
        _LAST_RATE * training.learning_rate,
    )
    return optax.chain(
        optax.clip_by_global_norm(_LARGEST_NORM),
        optax.adamw(
            rate, b2=0.95, weight_decay=_WEIGHT_DECAY, mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params)
        ),
    )
