"""Compares a transformer's layer, as a user writes it with `overlap.layers`, with the same layer by XLA's partitioner.

    python -m benchmarks.layer --out benchmarks/results
    python -m benchmarks.layer --models llama-70b --tokens 8192 --breakdown

The command measures one layer of Llama 3 70B and one of Qwen 3 32B: norm, query, key and value, causal attention
(`jax.nn.dot_product_attention`), output projection, norm and gated MLP, with both residuals. The input is one sequence.
At the layer's start and end its rows are sharded over the devices. The layer runs forward, and forward with all
gradients, by these methods:

    chosen      `overlap.layers` with implementation=None
    fused       `overlap.layers` with implementation="fused"
    layers xla  `overlap.layers` with implementation="xla": the same shard_map without fusion
    XLA         plain matrix products and sharding constraints, for XLA's partitioner with its default flags
    windowed    the method XLA, with the flags by which XLA overlaps collectives and products (`WINDOWED`)

Each method is a loop inside one program, in which every turn depends on the turn before. In each round the methods run
in another random order. Times are medians over the rounds, in microseconds. A ratio is
the time of XLA or windowed, whichever is shorter / the method's time in the same round: the median over the rounds.
`--breakdown` profiles a few turns and adds up the GPU's time by kind of kernel.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import command, layer_runs
from benchmarks.profile_kinds import device_us_by_kind
from overlap import layers
from overlap.choice.dispatch import Implementation
from overlap.cli import ending
from overlap.cli.arguments import WrongArguments

AXIS = "tensor"
BETWEEN, INSIDE = P(None, AXIS, None), P(None, None, AXIS)
METHODS = ("chosen", "fused", "layers xla", "XLA", "windowed")
# Flags by which XLA itself overlaps: it cuts a gather or scatter, and runs each part beside a part of the product.
WINDOWED = {
    "xla_gpu_threshold_for_windowed_einsum_mib": 0,
    "xla_gpu_multi_streamed_windowed_einsum": True,
    "xla_gpu_enable_latency_hiding_scheduler": True,
}
_US_PER_LOOP, _FLOPS_PER_US, _MOST_TURNS = 60e3, 550e6, 20


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of a layer, as in `benchmarks.known_models`."""

    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int = 128

    def flops(self, tokens: int) -> float:
        """The floating-point operations of a forward pass, on all devices together."""
        of_heads = (2 * self.heads + 2 * self.kv_heads) * self.head_dim
        products = 2.0 * tokens * self.hidden * (of_heads + 3 * self.mlp)
        return products + 2.0 * tokens * tokens * self.heads * self.head_dim


MODELS = {
    "llama-70b": Sizes(8192, 28672, 64, 8),
    "qwen-32b": Sizes(5120, 25600, 64, 8),
    "tiny": Sizes(64, 128, 4, 2, 16),
}


def attend(mesh: Mesh, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Computes causal attention. Each device computes some of the heads."""
    heads = P(None, None, AXIS, None)
    on_gpu = mesh.devices.flat[0].platform == "gpu"
    local = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn" if on_gpu else "xla")
    return jax.shard_map(local, mesh=mesh, in_specs=(heads,) * 3, out_specs=heads, check_vma=False)(query, key, value)


class Layer(nnx.Module):
    """One layer, written with `overlap.layers`."""

    def __init__(self, sizes: Sizes, mesh: Mesh, implementation: Implementation | None) -> None:
        options: dict[str, Any] = dict(
            mesh=mesh, implementation=implementation, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)
        )
        self.mesh = mesh
        self.norm1 = layers.RMSNorm(sizes.hidden, **options)
        self.qkv = layers.QKVProjection(sizes.hidden, sizes.heads, sizes.kv_heads, sizes.head_dim, **options)
        self.out = layers.OutputProjection(sizes.heads, sizes.head_dim, sizes.hidden, **options)
        self.norm2 = layers.RMSNorm(sizes.hidden, **options)
        self.mlp = layers.GatedMLP(sizes.hidden, sizes.mlp, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.out(attend(self.mesh, *self.qkv(self.norm1(x))), residual=x)
        return self.mlp(self.norm2(x), residual=x)


def plain(mesh: Mesh, sizes: Sizes, weights: dict[str, Any], x: jax.Array) -> jax.Array:
    """Computes the layer with plain matrix products and sharding constraints, which XLA's partitioner distributes."""

    def put(value: jax.Array, spec: P) -> jax.Array:
        return lax.with_sharding_constraint(value, NamedSharding(mesh, spec))

    def norm(value: jax.Array, scale: jax.Array) -> jax.Array:
        wide = value.astype(jnp.float32)
        wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)
        return (wide * scale.astype(jnp.float32)).astype(value.dtype)

    def heads(value: jax.Array) -> jax.Array:
        return put(value, INSIDE).reshape(*value.shape[:-1], -1, sizes.head_dim)

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
    sizes: Sizes
    tokens: int
    backward: bool

    def model(self, implementation: Implementation | None) -> Any:
        """Returns the layer's definition (a module), and its parameters."""
        with jax.set_mesh(self.mesh):
            make = lambda: nnx.split(Layer(self.sizes, self.mesh, implementation))  # noqa: E731
            return nnx.jit(make)()

    def apply(self, method: str) -> Callable[[Any, jax.Array], jax.Array]:
        """Returns the layer as a function (weights, x) -> out. The weights are a tree of arrays."""
        if method in ("XLA", "windowed"):
            return functools.partial(plain, self.mesh, self.sizes)
        graph, state = self.model({"chosen": None, "fused": "fused", "layers xla": "xla"}[method])
        del state

        def call(weights: Any, x: jax.Array) -> jax.Array:
            model = nnx.merge(graph, nnx.State(jax.tree.map(nnx.Param, weights)))
            return model(x)

        return call

    def program(self, method: str, turns: int) -> Any:
        """Returns a jitted loop of `turns` turns, as a function (x, weights) -> (x, weights)."""
        layer = self.apply(method)

        def turn(_: Any, state: Any) -> Any:
            x, weights = state
            if not self.backward:
                return layer_runs.normalized(layer(weights, x), x.dtype), weights
            _, pull = jax.vjp(layer, weights, x)
            d_weights, d_x = pull(x)
            # The weights use all gradients, so XLA computes all of them.
            moved = jax.tree.map(lambda w, d: w + (1e-6 * d).astype(w.dtype), weights, d_weights)
            return layer_runs.normalized(d_x, x.dtype), moved

        options = WINDOWED if method == "windowed" and self.mesh.devices.flat[0].platform == "gpu" else None
        run = lambda x, weights: lax.fori_loop(0, turns, turn, (x, weights))  # noqa: E731
        return jax.jit(run, compiler_options=options)

    def operands(self) -> tuple[jax.Array, Any]:
        """Returns normally distributed tokens, and the weights."""
        _, state = self.model("xla")
        weights = nnx.to_pure_dict(state)
        shape, sharding = (1, self.tokens, self.sizes.hidden), NamedSharding(self.mesh, BETWEEN)
        draw = lambda: jax.random.normal(jax.random.key(1), shape, jnp.bfloat16)  # noqa: E731
        return jax.jit(draw, out_shardings=sharding)(), weights

    @property
    def turns(self) -> int:
        """How many turns a loop has, so that it takes about 60 ms."""
        flops = self.sizes.flops(self.tokens) / self.mesh.size * (3 if self.backward else 1)
        return max(2, min(_MOST_TURNS, int(_US_PER_LOOP / (flops / _FLOPS_PER_US))))


def measure(case: Case, methods: Sequence[str], rounds: int, turns: int | None, breakdown: bool) -> dict[str, Any]:
    """Measures one layer by several methods.

    Args:
      case: the layer.
      methods: some of `METHODS`.
      rounds: how often each method is timed.
      turns: how many turns a loop has; None: as many as take about 60 ms.
      breakdown: whether to profile as well.

    Returns:
      "times": for each method the microseconds of a turn, in each round. "kinds": for each method the microseconds of a
      turn by kind of kernel; empty without `breakdown`.

    Raises:
      AssertionError: a method's result differs from XLA's.
    """
    turns, given = turns or case.turns, case.operands()
    with jax.set_mesh(case.mesh):
        expected = case.program("XLA", 1)(*given)[0]
        loops = {}
        for name in methods:
            result = case.program(name, 1)(*given)[0]
            distance = jnp.linalg.norm((result - expected).astype(jnp.float32)) / jnp.linalg.norm(expected)
            assert distance < 3e-2, f"{name} differs from XLA by {float(distance):.1e}"
            loops[name] = case.program(name, turns).lower(*given).compile()
        launches = {name: functools.partial(loop, *given) for name, loop in loops.items()}
        times = layer_runs.times_us(launches, rounds, turns)
        kinds: dict[str, dict[str, float]] = {}
        for name in loops if breakdown else ():
            with tempfile.TemporaryDirectory() as folder:
                with jax.profiler.trace(folder):
                    jax.block_until_ready(launches[name]())
                kinds[name] = device_us_by_kind(folder, turns)
    return {"times": times, "kinds": kinds}


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def _parser() -> argparse.ArgumentParser:
    parser = command.tool_parser("layer", __doc__)
    parser.add_argument("--models", type=_names, default="llama-70b,qwen-32b", help=f"some of {', '.join(MODELS)}")
    parser.add_argument("--tokens", type=layer_runs.numbers, default="2048,8192,16384", help="lengths of the sequence")
    parser.add_argument("--methods", type=_names, default=",".join(METHODS), help=f"some of {', '.join(METHODS)}")
    parser.add_argument("--breakdown", action="store_true", help="also profile the GPU's time by kind of kernel")
    parser.add_argument("--dry-run", action="store_true", help="2 CPU devices and a tiny layer, to test the harness")
    layer_runs.add_options(parser, rounds=5)
    return parser


def _check(arguments: argparse.Namespace, devices: int) -> None:
    for name, known in (("models", MODELS), ("methods", METHODS)):
        if unknown := [each for each in getattr(arguments, name) if each not in known]:
            raise WrongArguments(f"layer: `--{name}` must be of {', '.join(known)}, got {', '.join(unknown)}")
    for model in arguments.models:
        if (heads := MODELS[model].kv_heads) % devices:
            raise WrongArguments(f"layer: {devices} devices do not divide the {heads} heads of keys of {model}")
    if rest := [tokens for tokens in arguments.tokens if tokens % devices]:
        raise WrongArguments(f"layer: `--tokens` must be multiples of the {devices} devices, got {rest[0]}")


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    if arguments.dry_run:
        arguments.models, arguments.tokens, arguments.rounds = ["tiny"], [32], 1
    windowed = ", ".join(f"{name}={value}" for name, value in WINDOWED.items())
    run = layer_runs.begin("layer", arguments, windowed=windowed)
    devices = len(run.devices)
    _check(arguments, devices)
    mesh = jax.make_mesh((devices,), (AXIS,), axis_types=(AxisType.Auto,), devices=run.devices)
    for model in arguments.models:
        for tokens in arguments.tokens:
            for backward in (False, True):
                case = Case(mesh, MODELS[model], tokens, backward)
                found = measure(
                    case, arguments.methods, arguments.rounds, 2 if arguments.dry_run else None, arguments.breakdown
                )
                times, label = found["times"], f"{model}, {'forward and backward' if backward else 'forward'}"
                of_xla = [times[name] for name in ("XLA", "windowed") if name in times]
                best_of_xla = [min(of_round) for of_round in zip(*of_xla, strict=True)]
                kinds = {
                    name: ", ".join(f"{kind} {us:.0f}" for kind, us in sorted(of_kind.items()))
                    for name, of_kind in found["kinds"].items()
                }
                run.add(str(tokens), label, times, best_of_xla, kinds)
    return 0


if __name__ == "__main__":
    sys.exit(ending.run(main))
