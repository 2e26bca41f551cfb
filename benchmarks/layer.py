"""Compares a transformer's layer, as a user writes it with `overlap.layers`, with the same layer by XLA's partitioner.

    python -m benchmarks.layer --out benchmarks/results
    python -m benchmarks.layer --models llama-70b --tokens 8192

The command measures one layer of Llama 3 70B and 8B and of Qwen 3 32B: norm, query, key and value, causal attention
(`jax.nn.dot_product_attention`), output projection, norm and gated MLP, with both residuals. The input is one sequence.
At the layer's start and end its rows are sharded over the devices. The layer runs forward, and forward with all
gradients, by these methods:

    chosen      `overlap.layers` with implementation=None
    fused       `overlap.layers` with implementation="fused"
    layers xla  `overlap.layers` with implementation="xla": the same shard_map without fusion
    xla         plain matrix products and sharding constraints, for XLA's partitioner with its default flags
    xla hiding, xla windowed   the same with more flags, see `RIVALS` in `benchmarks.layer_runs`

`benchmarks.layer_runs` says how they are timed.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import layer_runs
from benchmarks.known_models import Model
from overlap import layers
from overlap.choice.dispatch import Implementation
from overlap.cli import ending

AXIS = "tensor"
BETWEEN, INSIDE = P(None, AXIS, None), P(None, None, AXIS)
METHODS = ("chosen", "fused", "layers xla", *layer_runs.RIVALS)


def flops(sizes: Model, tokens: int) -> float:
    """The floating-point operations of a forward pass, on all devices together."""
    of_heads = (2 * sizes.heads + 2 * sizes.kv_heads) * sizes.head_size
    products = 2.0 * tokens * sizes.hidden * (of_heads + 3 * sizes.mlp)
    return products + 2.0 * tokens * tokens * sizes.heads * sizes.head_size


def attend(mesh: Mesh, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Computes causal attention. Each device computes some of the heads."""
    heads = P(None, None, AXIS, None)
    on_gpu = mesh.devices.flat[0].platform == "gpu"
    local = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn" if on_gpu else "xla")
    return jax.shard_map(local, mesh=mesh, in_specs=(heads,) * 3, out_specs=heads, check_vma=False)(query, key, value)


class Layer(nnx.Module):
    """One layer, written with `overlap.layers`."""

    def __init__(self, sizes: Model, mesh: Mesh, implementation: Implementation | None) -> None:
        options: dict[str, Any] = dict(
            mesh=mesh, implementation=implementation, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)
        )
        self.mesh = mesh
        self.norm1 = layers.RMSNorm(sizes.hidden, **options)
        self.qkv = layers.QKVProjection(sizes.hidden, sizes.heads, sizes.kv_heads, sizes.head_size, **options)
        self.out = layers.OutputProjection(sizes.heads, sizes.head_size, sizes.hidden, **options)
        self.norm2 = layers.RMSNorm(sizes.hidden, **options)
        self.mlp = layers.GatedMLP(sizes.hidden, sizes.mlp, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.out(attend(self.mesh, *self.qkv(self.norm1(x))), residual=x)
        return self.mlp(self.norm2(x), residual=x)


def plain(mesh: Mesh, sizes: Model, weights: dict[str, Any], x: jax.Array) -> jax.Array:
    """Computes the layer with plain matrix products and sharding constraints, which XLA's partitioner distributes."""

    def put(value: jax.Array, spec: P) -> jax.Array:
        return lax.with_sharding_constraint(value, NamedSharding(mesh, spec))

    def norm(value: jax.Array, scale: jax.Array) -> jax.Array:
        wide = value.astype(jnp.float32)
        wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)
        return (wide * scale.astype(jnp.float32)).astype(value.dtype)

    def heads(value: jax.Array) -> jax.Array:
        return put(value, INSIDE).reshape(*value.shape[:-1], -1, sizes.head_size)

    whole = put(norm(x, weights["norm1"]["scale"]), P())
    qkv = [heads(whole @ weights["qkv"][name]["kernel"]) for name in ("query", "key", "value")]
    attended = attend(mesh, *qkv).reshape(*x.shape[:-1], -1)
    x = put(x + put(attended @ weights["out"]["kernel"], BETWEEN), BETWEEN)
    whole = put(norm(x, weights["norm2"]["scale"]), P())
    of_mlp = weights["mlp"]
    hidden = jax.nn.silu(put(whole @ of_mlp["gate"]["kernel"], INSIDE)) * put(whole @ of_mlp["up"]["kernel"], INSIDE)
    return put(x + put(hidden @ of_mlp["down"]["kernel"], BETWEEN), BETWEEN)


@dataclasses.dataclass(frozen=True)
class Case:
    """A layer on a mesh, which can be run by each method."""

    mesh: Mesh
    sizes: Model
    tokens: int
    backward: bool

    def model(self, implementation: Implementation | None) -> Any:
        """Returns the layer's definition (a module), and its parameters."""
        with jax.set_mesh(self.mesh):
            make = lambda: nnx.split(Layer(self.sizes, self.mesh, implementation))  # noqa: E731
            return nnx.jit(make)()

    def apply(self, method: str) -> layer_runs.Layer:
        """Returns the layer as a function (weights, x) -> out. The weights are a tree of arrays."""
        if method in layer_runs.RIVALS:
            return functools.partial(plain, self.mesh, self.sizes)
        graph, state = self.model({"chosen": None, "fused": "fused", "layers xla": "xla"}[method])
        del state

        def call(weights: Any, x: jax.Array) -> jax.Array:
            model = nnx.merge(graph, nnx.State(jax.tree.map(nnx.Param, weights)))
            return model(x)

        return call

    def program(self, method: str, turns: int) -> Any:
        """Returns a jitted loop of `turns` turns, as a function (x, weights) -> (x, weights)."""
        flags = layer_runs.flags_of(method, self.mesh)
        return layer_runs.loop(self.apply(method), self.backward, turns, flags)

    def operands(self) -> tuple[jax.Array, Any]:
        """Returns normally distributed tokens, and the weights."""
        _, state = self.model("xla")
        weights = nnx.to_pure_dict(state)
        shape, sharding = (1, self.tokens, self.sizes.hidden), NamedSharding(self.mesh, BETWEEN)
        draw = lambda: jax.random.normal(jax.random.key(1), shape, jnp.bfloat16)  # noqa: E731
        return jax.jit(draw, out_shardings=sharding)(), weights


def measure(case: Case, methods: Sequence[str], rounds: int, turns: int) -> dict[str, list[float]]:
    """Measures one layer by some of `METHODS`, as `block.measure` does."""
    given = case.operands()
    with jax.set_mesh(case.mesh):
        loops = layer_runs.compiled(lambda name: case.program(name, turns), methods, lambda _: given, allowed=3e-2)
        return layer_runs.times_us(loops, rounds, turns)


def main(argv: Sequence[str] | None = None) -> int:
    choices = {"methods": METHODS, "passes": layer_runs.PASSES}
    run = layer_runs.begin("layer", __doc__, choices, argv, tokens="8192,2048")
    mesh = jax.make_mesh((len(run.devices),), (AXIS,), axis_types=(AxisType.Auto,), devices=run.devices)
    for model, sizes, tokens in run.problems():
        for name in run.arguments.passes:
            case = Case(mesh, sizes, tokens, name != "forward")
            turns = run.turns(flops(sizes, tokens) * (3 if case.backward else 1))
            times = measure(case, run.arguments.methods, run.arguments.rounds, turns)
            run.add(str(tokens), f"{model}, {name}", times)
    return 0


if __name__ == "__main__":
    sys.exit(ending.run(main))
