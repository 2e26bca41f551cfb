"""One training step by one method, measured in a process of its own: `benchmarks.step` starts it.

    python -m benchmarks.step_program '{"case": {…}, "method": "plain", …}'

A step is forward, backward and AdamW. Weights and moments are float32, sharded, and donated; products are bfloat16.
Nothing is computed again in the backward pass. The model is a stack of transformer blocks (attention, and a gated MLP
or experts, each behind a norm and with a residual) without a vocabulary. Its loss is the mean square of the last
activations.
The process prints its results as one line of JSON.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import math
import sys
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import expert_rival, kernel_times

FSDP, TENSOR = "fsdp", "tensor"
BETWEEN = P(FSDP, TENSOR, None)
HEADS = P(FSDP, None, TENSOR, None)
# By method: the module of the layers, and their keyword `implementation` if they have one.
_PLAIN = "examples.plain_layers"
LAYERS: dict[str, tuple[str, dict[str, str | None]]] = {
    "plain": (_PLAIN, {}),
    "plain between": (_PLAIN, {}),
    "plain hiding": (_PLAIN, {}),
    "chosen": ("overlap.layers", {"implementation": None}),
    "fused": ("overlap.layers", {"implementation": "fused"}),
    "layers xla": ("overlap.layers", {"implementation": "xla"}),
}
# Steps: before the times; of each of `TIMES` times; whose losses are compared; that are profiled.
WARM_UP = 5
TIMES = 5
STEPS_PER_TIME = 5
LOSSES = 10
PROFILED = 3


@dataclasses.dataclass(frozen=True)
class Case:
    """What is trained, and on which mesh.

    Attributes:
      hidden: width of the activations between blocks.
      mlp: width of the gated MLP.
      heads: query heads.
      kv_heads: heads of keys and values.
      head_size: width of a head.
      layers: number of blocks.
      sequences: sequences of a step, on all devices together.
      tokens: tokens of a sequence.
      fsdp: devices along the mesh axis that shards batch and weights.
      tensor: devices along the mesh axis that shards each product.
      experts: MLPs in the place of each, which the devices along that axis share; 0: there are none.
      experts_per_token: of which a token takes so many.
    """

    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    head_size: int
    layers: int
    sequences: int
    tokens: int
    fsdp: int
    tensor: int
    experts: int = 0
    experts_per_token: int = 0

    @property
    def devices(self) -> int:
        return self.fsdp * self.tensor

    def misfit(self) -> str | None:
        """Says which size the mesh does not divide; None if it divides all."""
        for name, divisor in (
            ("heads", self.tensor), ("kv_heads", self.tensor), ("mlp", self.devices), ("hidden", self.devices),
            ("tokens", self.tensor), ("sequences", self.fsdp), ("experts", self.tensor),
        ):  # fmt: skip
            if (size := getattr(self, name)) % divisor:
                return f"{divisor} devices do not divide {name}={size}"
        return None


# --- The model --------------------------------------------------------------------------------------------------------


def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Causal attention. Each device computes whole heads of whole sequences, so nothing is communicated."""
    how: Any = "cudnn" if jax.default_backend() == "gpu" else "xla"
    local = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation=how)
    return jax.shard_map(local, in_specs=HEADS, out_specs=HEADS, check_vma=False)(query, key, value)


class Block(nnx.Module):
    """A transformer's block. `layers` is `overlap.layers` or `examples.plain_layers`."""

    def __init__(self, layers: Any, case: Case, **options: Any) -> None:
        self.attention_norm = layers.RMSNorm(case.hidden, **options)
        self.qkv = layers.QKVProjection(case.hidden, case.heads, case.kv_heads, case.head_size, **options)
        self.output = layers.OutputProjection(case.heads, case.head_size, case.hidden, **options)
        self.mlp_norm = layers.RMSNorm(case.hidden, **options)
        self.has_experts = case.experts > 0
        self.is_plain = layers.__name__ == _PLAIN
        if self.has_experts:  # Of plain, the parameters alone.
            module = importlib.import_module("overlap.layers")
            self.mlp = module.ExpertMLP(case.hidden, case.mlp, case.experts, case.experts_per_token, **options)
        else:
            self.mlp = layers.GatedMLP(case.hidden, case.mlp, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.output(attend(*self.qkv(self.attention_norm(x))), residual=x)
        return self._experts(x) if self.has_experts else self.mlp(self.mlp_norm(x), residual=x)

    def _experts(self, x: jax.Array) -> jax.Array:
        normed = self.mlp_norm(x)
        if self.is_plain:
            return expert_rival.of_module(self.mlp, normed, x, TENSOR, BETWEEN)
        out, _ = self.mlp(normed, residual=x)
        return out


class Transformer(nnx.Module):
    """A stack of blocks, defined once for all methods: equal names, shapes and first values of the parameters."""

    def __init__(self, case: Case, method: str) -> None:
        module, options = LAYERS[method]
        layers = importlib.import_module(module)
        shared = dict(dtype=jnp.bfloat16, axis=TENSOR, fsdp_axis=FSDP, batch_axis=FSDP, rngs=nnx.Rngs(0), **options)
        self.blocks = nnx.List([Block(layers, case, **shared) for _ in range(case.layers)])
        if method == "plain between":
            self.set_attributes(inside=False)

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return x


# --- The program ------------------------------------------------------------------------------------------------------


class Program:
    """The computations of a run, jitted for the mesh of its case. A state is (parameters, optax's state)."""

    def __init__(self, case: Case, method: str) -> None:
        if LAYERS[method][0] == "overlap.layers":
            # Load the kernels' modules before anything is traced. Otherwise jax compiles the step twice.
            _ = importlib.import_module("overlap").sharded_matmul
        devices = jax.devices()[: case.devices]
        self.mesh = jax.make_mesh((case.fsdp, case.tensor), (FSDP, TENSOR), (AxisType.Auto,) * 2, devices=devices)
        self._optimizer = optax.adamw(1e-4, b2=0.95)
        make = lambda: Transformer(case, method)  # noqa: E731
        with jax.set_mesh(self.mesh):
            self._graph, abstract = nnx.split(nnx.eval_shape(make), nnx.Param)
            shardings = self._shardings(abstract)
            self.first = jax.jit(lambda: self._first(nnx.state(make(), nnx.Param)), out_shardings=shardings)
            self.step = jax.jit(self._step, donate_argnums=0, out_shardings=(shardings, None))
        draw = lambda: jax.random.normal(  # noqa: E731
            jax.random.key(5), (case.sequences, case.tokens, case.hidden), jnp.bfloat16
        )
        self.activations = jax.jit(draw, out_shardings=NamedSharding(self.mesh, BETWEEN))

    def _shardings(self, abstract: nnx.State) -> Any:
        """Parameters and their moments are sharded as the layers say. The count of steps is whole on each device."""
        params = nnx.get_named_sharding(abstract, self.mesh)
        moments = optax.tree_utils.tree_map_params(
            self._optimizer,
            lambda _, sharding: sharding,
            jax.eval_shape(self._optimizer.init, abstract),
            params,
            transform_non_params=lambda _: NamedSharding(self.mesh, P()),
        )
        return params, moments

    def _first(self, params: nnx.State) -> Any:
        return params, self._optimizer.init(params)

    def _step(self, state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        params, moments = state

        def loss_of(params: nnx.State) -> jax.Array:
            last = nnx.merge(self._graph, params)(x)
            return jnp.mean(last.astype(jnp.float32) ** 2)

        loss, gradient = jax.value_and_grad(loss_of)(params)
        updates, moments = self._optimizer.update(gradient, moments, params)
        return (optax.apply_updates(params, updates), moments), loss


# --- A run ------------------------------------------------------------------------------------------------------------


def measure(case: Case, method: str, *, profiled: bool = False) -> dict[str, Any]:
    """Trains some steps. Returns the result of a process, which JSON can hold.

    Returns:
      "ms": milliseconds of a step, `TIMES` values, each of `STEPS_PER_TIME` steps. "first_call_s": seconds of the first
      step: trace, lower, compile and run. "losses": of the first `LOSSES` steps. "peak_bytes": the most memory in use
      on a device, None on a CPU. "kernels" if `profiled`: see `kernel_times.of_trace`.
    """
    program = Program(case, method)
    with jax.set_mesh(program.mesh):
        state = program.first()
        x = jax.block_until_ready(program.activations())
        losses: list[jax.Array] = []

        def run(steps: int) -> float:
            """Takes some steps. Returns the seconds of one of them."""
            nonlocal state
            start = time.perf_counter()
            for _ in range(steps):
                state, loss = program.step(state, x)
                losses.append(loss)
            jax.block_until_ready((state, losses))
            return (time.perf_counter() - start) / steps

        jax.block_until_ready(state)
        result: dict[str, Any] = {"first_call_s": run(1)}
        run(WARM_UP)
        result["ms"] = [1e3 * run(STEPS_PER_TIME) for _ in range(TIMES)]
        result["losses"] = [float(loss) for loss in losses[:LOSSES]]
        result["peak_bytes"] = _peak_bytes(program.mesh.devices.flat)
        if profiled:
            result["kernels"] = kernel_times.of_trace(lambda: run(PROFILED), PROFILED)
    if not all(map(math.isfinite, result["losses"])):
        raise FloatingPointError(f"a loss is not finite: {result['losses']}")
    return result


def _peak_bytes(devices: Any) -> int | None:
    found = [stats["peak_bytes_in_use"] for device in devices if (stats := device.memory_stats())]
    return max(found, default=None)


def main(argv: list[str]) -> int:
    """Measures what the first argument says, as JSON. Prints the result, and facts about the machine, as JSON."""
    given: Mapping[str, Any] = json.loads(argv[0])
    case = Case(**given["case"])
    if given["on_cpus"]:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", case.devices)
    result = measure(case, given["method"], profiled=given["profiled"])
    # Load this after the steps, so that a plain program runs without more of the library than the package `benchmarks`.
    environment = importlib.import_module("benchmarks.environment")
    print(json.dumps(result | {"facts": environment.describe(case.devices, given["code"])}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
