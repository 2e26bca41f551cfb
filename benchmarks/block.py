"""Compares the MLP of a transformer, as a user writes it, with XLA: the forward pass, and forward with backward.

    python -m benchmarks.block --out benchmarks/results
    python -m benchmarks.block --tokens 8192 --hidden 8192 --inner 28672

The products of gate and up share one gather of the tokens' rows. The product of down is followed by a reduce-scatter.
The methods:

    fused    `implementation="fused"`
    chosen   `implementation=None`: the library chooses
    xla      the same block in plain JAX, whose backward pass is XLA's too

Each method is a loop inside one program, in which every turn depends on the turn before. In each round the methods run
in another random order. Times are medians over the rounds, in microseconds. A ratio is XLA's time / the method's time
in the same round: the median over the rounds.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import overlap
from benchmarks import command, layer_runs
from overlap.cli import ending
from overlap.cli.arguments import WrongArguments, whole_number
from overlap.tuning.operations import AXIS
from overlap.tuning.programs import mesh_of

ROWS, COLUMNS = P(AXIS, None), P(None, AXIS)
SPECS = (ROWS, COLUMNS, COLUMNS, ROWS)  # Shardings of the tokens, and of the weights gate, up and down.
Method = Literal["fused", "plain"] | None
# The tokens and the weights, and a turn of the loop over them.
type State = tuple[jax.Array, Sequence[jax.Array]]
type Turn = Callable[[jax.Array, Sequence[jax.Array]], State]
METHODS: dict[str, Method] = {"fused": "fused", "chosen": None, "xla": "plain"}
_DRY_TURNS = 1
_US_PER_LOOP, _FLOPS_PER_US = 40e3, 650e6


def mlp(implementation: Method, x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """Computes the block on the shards of one device, inside `jax.shard_map`."""
    if implementation == "plain":
        rows = lax.all_gather(x, AXIS, tiled=True)
        return lax.psum_scatter((jax.nn.silu(rows @ gate) * (rows @ up)) @ down, AXIS, tiled=True)
    # With return_gathered, the gathered rows are kept for the backward pass, as in plain JAX.
    (gated, upped), _ = overlap.all_gather_lhs_matmul(
        x, [gate, up], AXIS, return_gathered=True, implementation=implementation
    )
    return overlap.matmul_reduce_scatter(jax.nn.silu(gated) * upped, down, AXIS, implementation=implementation)


def forward(implementation: Method) -> Turn:
    """Returns a turn of the loop, forward only, as a function (tokens, weights) -> (tokens, weights)."""
    return lambda x, weights: (layer_runs.normalized(mlp(implementation, x, *weights), x.dtype), weights)


def with_backward(implementation: Method) -> Turn:
    """Returns a turn of the loop, forward and backward, as a function (tokens, weights) -> (tokens, weights).

    A small multiple of each weight's gradient is added to the weight, so that XLA must compute all gradients.
    """

    def turn(x: jax.Array, weights: Sequence[jax.Array]) -> State:
        _, backward = jax.vjp(lambda *operands: mlp(implementation, *operands), x, *weights)
        d_x, *d_weights = backward(x)
        moved = [w + (1e-6 * d).astype(w.dtype) for w, d in zip(weights, d_weights, strict=True)]
        return layer_runs.normalized(d_x, x.dtype), moved

    return turn


def program(turn: Turn, mesh: Mesh, turns: int) -> Any:
    """Returns a jitted loop of `turns` turns: a function (tokens, *weights) -> (tokens, *weights) of global arrays."""

    def run(x: jax.Array, *weights: jax.Array) -> tuple[jax.Array, ...]:
        x, weights = lax.fori_loop(0, turns, lambda _, state: turn(*state), (x, list(weights)))
        return x, *weights

    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=SPECS, out_specs=SPECS, check_vma=False))


def operands(mesh: Mesh, tokens: int, hidden: int, inner: int) -> list[jax.Array]:
    """Draws normally distributed tokens and weights (gate, up, down). Products are about as large as the tokens."""
    shapes = ((tokens, hidden), (hidden, inner), (hidden, inner), (inner, hidden))
    scales = (1.0, hidden**-0.5, hidden**-0.5, inner**-0.5)

    def draw(seed: int) -> jax.Array:
        return (jax.random.normal(jax.random.key(seed), shapes[seed], jnp.float32) * scales[seed]).astype(jnp.bfloat16)

    return [jax.jit(draw, static_argnums=0, out_shardings=NamedSharding(mesh, s))(i) for i, s in enumerate(SPECS)]


def measure(
    mesh: Mesh,
    tokens: int,
    hidden: int,
    inner: int,
    pass_of: Callable[[Method], Turn],
    rounds: int,
    turns: int | None = None,
) -> dict[str, list[float]]:
    """Measures all methods. Returns for each the time of a turn in each round, in microseconds.

    Args:
      mesh: a mesh whose only axis is `AXIS`.
      tokens: rows of the input, on all devices together.
      hidden: width between the blocks.
      inner: width of the MLP.
      pass_of: `forward` or `with_backward`.
      rounds: how often each method is timed.
      turns: how many turns a loop has; None: as many as take about 40 ms.

    Raises:
      AssertionError: a method's result differs from XLA's.
    """
    flops = 6.0 * tokens * hidden * inner / mesh.size * (1 if pass_of is forward else 3)
    turns = turns or max(2, min(40, int(_US_PER_LOOP / (flops / _FLOPS_PER_US))))
    given = operands(mesh, tokens, hidden, inner)
    once = {name: program(pass_of(how), mesh, 1)(*given)[0] for name, how in METHODS.items()}
    for name, result in once.items():
        distance = jnp.linalg.norm((result - once["xla"]).astype(jnp.float32)) / jnp.linalg.norm(result)
        assert distance < 2e-2, f"{name} differs from XLA by {float(distance):.1e}"
    loops = {name: program(pass_of(how), mesh, turns).lower(*given).compile() for name, how in METHODS.items()}
    launches = {name: functools.partial(loop, *given) for name, loop in loops.items()}
    return layer_runs.times_us(launches, rounds, turns)


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.tool_parser("block", __doc__)
    parser.add_argument(
        "--tokens", type=layer_runs.numbers, default="8192,2048", help="of all devices, separated by commas"
    )
    parser.add_argument("--hidden", type=whole_number(1), default=8192, help="width between the blocks (default: 8192)")
    parser.add_argument("--inner", type=whole_number(1), default=28672, help="width of the MLP (default: 28672)")
    parser.add_argument("--dry-run", action="store_true", help="2 CPU devices and a tiny block, to test the harness")
    layer_runs.add_options(parser, rounds=7)
    arguments = parser.parse_args(argv)
    if arguments.dry_run:
        arguments.tokens, arguments.hidden, arguments.inner, arguments.rounds = [64], 64, 64, 1
    run = layer_runs.begin("block", arguments)
    devices = len(run.devices)
    for name in ("hidden", "inner", "tokens"):
        given = getattr(arguments, name)
        if any(size % devices for size in (given if name == "tokens" else [given])):
            raise WrongArguments(f"block: `--{name}` must be a multiple of the {devices} devices, got {given}")
    mesh = mesh_of(run.devices)
    for tokens in arguments.tokens:
        for name, pass_of in (("forward", forward), ("forward and backward", with_backward)):
            sizes = tokens, arguments.hidden, arguments.inner
            us = measure(mesh, *sizes, pass_of, arguments.rounds, _DRY_TURNS if arguments.dry_run else None)
            run.add("x".join(map(str, sizes)), name, us, reference=us["xla"])
    return 0


if __name__ == "__main__":
    sys.exit(ending.run(main))
