"""Compares the MLP of a transformer, as a user writes it, with XLA: the forward pass, and forward with backward.

    python -m benchmarks.block --out benchmarks/results
    python -m benchmarks.block --models llama-8b --tokens 8192 --passes "forward and backward"

The products of gate and up share one gather of the tokens' rows. The product of down is followed by a reduce-scatter.
The methods:

    fused       `implementation="fused"`
    chosen      `implementation=None`: the library chooses
    xla         the same block in plain JAX, whose backward pass is XLA's too
    xla hiding  the same with `--xla_gpu_enable_latency_hiding_scheduler=true`

`benchmarks.layer_runs` says how they are timed.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
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


def apply(method: str, mesh: Mesh) -> layer_runs.Layer:
    """Returns the block as a function (weights, tokens) -> tokens of global arrays."""
    call = functools.partial(mlp, METHODS[method])
    mapped = jax.shard_map(call, mesh=mesh, in_specs=SPECS, out_specs=ROWS, check_vma=False)
    return lambda weights, x: mapped(x, *weights)


def operands(mesh: Mesh, tokens: int, hidden: int, inner: int) -> tuple[jax.Array, list[jax.Array]]:
    """Draws normally distributed tokens, and weights (gate, up, down). Products are about as large as the tokens."""
    shapes = ((tokens, hidden), (hidden, inner), (hidden, inner), (inner, hidden))
    scales = (1.0, hidden**-0.5, hidden**-0.5, inner**-0.5)

    def draw(seed: int) -> jax.Array:
        return (jax.random.normal(jax.random.key(seed), shapes[seed], jnp.float32) * scales[seed]).astype(jnp.bfloat16)

    x, *weights = (
        jax.jit(draw, static_argnums=0, out_shardings=NamedSharding(mesh, s))(i) for i, s in enumerate(SPECS)
    )
    return x, weights


def measure(
    mesh: Mesh, sizes: tuple[int, int, int], backward: bool, methods: Sequence[str], rounds: int, turns: int
) -> dict[str, list[float]]:
    """Measures some of `METHODS`, see `layer_runs.compiled` and `layer_runs.times_us`.

    `sizes`: tokens on all devices together, width between the blocks, width of the MLP.
    """

    def of(method: str) -> Any:
        return layer_runs.loop(apply(method, mesh), backward, turns, layer_runs.flags_of(method, mesh))

    given = operands(mesh, *sizes)
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
            us = measure(mesh, sizes, backward, run.arguments.methods, run.arguments.rounds, turns)
            run.add("x".join(map(str, sizes)), name, us)
    return 0


if __name__ == "__main__":
    sys.exit(ending.run(main))
