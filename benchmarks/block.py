"""Compares the MLP of a transformer, as a user writes it, with XLA: the forward pass, and forward with backward.

    python -m benchmarks.block --out benchmarks/results
    python -m benchmarks.block --models llama-8b --tokens 8192 --passes "forward and backward"

The products of gate and up share one gather of the tokens' rows. The product of down is followed by a reduce-scatter.
The methods:

    fused       `implementation="fused"`
    chosen      `implementation=None`: the library chooses
    xla         the same block in plain JAX, whose backward pass is XLA's too
    xla hiding  the same with `--xla_gpu_enable_latency_hiding_scheduler=true`

`benchmarks.layer_runs` says how they are timed. The backward pass starts from a cotangent that is computed from the
block's result, as in training: else XLA would leave out the last product.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import overlap
from benchmarks import layer_runs
from overlap.cli import ending
from overlap.tuning.operations import AXIS
from overlap.tuning.programs import mesh_of

ROWS, COLUMNS = P(AXIS, None), P(None, AXIS)
SPECS = (ROWS, COLUMNS, COLUMNS, ROWS)  # Shardings of the tokens, and of the weights gate, up and down.
Method = Literal["fused", "plain"] | None
# The tokens and the weights, and a turn of the loop over them.
type State = tuple[jax.Array, Sequence[jax.Array]]
type Turn = Callable[[jax.Array, Sequence[jax.Array]], State]
METHODS: dict[str, Method] = {"fused": "fused", "chosen": None, "xla": "plain", "xla hiding": "plain"}


def mlp(implementation: Method, x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """Computes the block on the shards of one device, inside `jax.shard_map`."""
    if implementation == "plain":
        rows = lax.all_gather(x, AXIS, tiled=True)
        return lax.psum_scatter((jax.nn.silu(rows @ gate) * (rows @ up)) @ down, AXIS, tiled=True)
    hidden = overlap.all_gather_lhs_matmul(x, [gate, up], AXIS, activation=_swiglu, implementation=implementation)
    return overlap.matmul_reduce_scatter(hidden, down, AXIS, implementation=implementation)


def _swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up


def forward(implementation: Method) -> Turn:
    """Returns a turn of the loop, forward only, as a function (tokens, weights) -> (tokens, weights)."""
    return lambda x, weights: (layer_runs.normalized(mlp(implementation, x, *weights), x.dtype), weights)


def with_backward(implementation: Method) -> Turn:
    """Returns a turn of the loop, forward and backward, as a function (tokens, weights) -> (tokens, weights).

    A small multiple of each weight's gradient is added to the weight, so that XLA must compute all gradients.
    """

    def turn(x: jax.Array, weights: Sequence[jax.Array]) -> State:
        y, backward = jax.vjp(lambda *operands: mlp(implementation, *operands), x, *weights)
        d_x, *d_weights = backward(layer_runs.normalized(y, y.dtype))
        moved = [w + (1e-6 * d).astype(w.dtype) for w, d in zip(weights, d_weights, strict=True)]
        return layer_runs.normalized(d_x, x.dtype), moved

    return turn


def program(turn: Turn, mesh: Mesh, turns: int, method: str) -> Any:
    """Returns a jitted loop of `turns` turns: a function (tokens, *weights) -> (tokens, *weights) of global arrays.

    `method`: whose compiler options it has.
    """

    def run(x: jax.Array, *weights: jax.Array) -> tuple[jax.Array, ...]:
        x, weights = lax.fori_loop(0, turns, lambda _, state: turn(*state), (x, list(weights)))
        return x, *weights

    mapped = jax.shard_map(run, mesh=mesh, in_specs=SPECS, out_specs=SPECS, check_vma=False)
    return jax.jit(mapped, compiler_options=layer_runs.flags_of(method, mesh))


def operands(mesh: Mesh, tokens: int, hidden: int, inner: int) -> list[jax.Array]:
    """Draws normally distributed tokens and weights (gate, up, down). Products are about as large as the tokens."""
    shapes = ((tokens, hidden), (hidden, inner), (hidden, inner), (inner, hidden))
    scales = (1.0, hidden**-0.5, hidden**-0.5, inner**-0.5)

    def draw(seed: int) -> jax.Array:
        return (jax.random.normal(jax.random.key(seed), shapes[seed], jnp.float32) * scales[seed]).astype(jnp.bfloat16)

    return [jax.jit(draw, static_argnums=0, out_shardings=NamedSharding(mesh, s))(i) for i, s in enumerate(SPECS)]


def measure(
    mesh: Mesh,
    sizes: tuple[int, int, int],
    pass_of: Callable[[Method], Turn],
    methods: Sequence[str],
    rounds: int,
    turns: int,
) -> dict[str, list[float]]:
    """Measures some of `METHODS`, see `layer_runs.compiled` and `layer_runs.times_us`.

    `sizes`: tokens on all devices together, width between the blocks, width of the MLP.
    """

    def of(method: str) -> Any:
        return program(pass_of(METHODS[method]), mesh, turns, method)

    given = tuple(operands(mesh, *sizes))
    loops = layer_runs.compiled(of, methods, lambda _: given, allowed=2e-2)
    return layer_runs.times_us(loops, rounds, turns)


def main(argv: Sequence[str] | None = None) -> int:
    choices = {"methods": tuple(METHODS), "passes": layer_runs.PASSES}
    run = layer_runs.begin("block", __doc__, choices, argv, tokens="8192,2048")
    mesh = mesh_of(run.devices)
    for _, model, tokens in run.problems():
        for name in run.arguments.passes:
            sizes, backward = (tokens, model.hidden, model.mlp), name != "forward"
            turns = run.turns(6.0 * tokens * model.hidden * model.mlp * (3 if backward else 1))
            pass_of = with_backward if backward else forward
            us = measure(mesh, sizes, pass_of, run.arguments.methods, run.arguments.rounds, turns)
            run.add("x".join(map(str, sizes)), name, us)
    return 0


if __name__ == "__main__":
    sys.exit(ending.run(main))
