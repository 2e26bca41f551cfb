"""Compares products of groups of rows with XLA, with JAX's own Mosaic kernel, and with cuBLAS on one matrix.

    python -m benchmarks.experts --out benchmarks/results
    python -m benchmarks.experts --models qwen3-30b --routings balanced --products up "dW of up"

The sizes are those of one device that has all experts of a layer, or a part of them, and as many rows as tokens choose
them: `up` is the product of the rows with both matrices of a gated MLP side by side, `down` the one after it, `dx` and
`dW` their gradients. The methods:

    fused     `grouped_matmul` and its gradients, with `implementation="fused"`
    xla       `jax.lax.ragged_dot` and its gradients
    jax       `ragged_dot_mgpu` of JAX's Pallas examples, with the block sizes that were fastest of a few
    batched   cuBLAS on groups of equal sizes: the same bytes, without groups of any size
    roof      cuBLAS on one matrix: the same operations, but the weights of one group only

Each is a loop in which an element of the result is written into an operand before the next turn, in place. roof/this is
the time of "roof" / the method's.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import overlap
from benchmarks import layer_runs
from overlap.cli import ending
from overlap.tuning.timing import elapsed_s

METHODS = ("fused", "xla", "jax", "batched", "roof")
ROUTINGS = ("balanced", "uniform", "zipf")
PRODUCTS = ("up", "down", "dx of up", "dW of up", "dW of down")
# How long each sample takes, and the largest relative difference from XLA.
_SAMPLE_S, _ALLOWED = 0.05, 1e-2


@dataclasses.dataclass(frozen=True)
class Experts:
    """The sizes of a layer of experts, of those that one of two devices has.

    Attributes:
      hidden: width of the tokens.
      width: of an expert's hidden layer.
      experts: how many experts.
      share: how many rows each token has on this device, on average.
    """

    hidden: int
    width: int
    experts: int
    share: float


MODELS = {
    "qwen3-30b": Experts(2048, 768, 64, 4.0),
    "qwen3-235b": Experts(4096, 1536, 64, 4.0),
    "mixtral-8x7b": Experts(4096, 14336, 4, 1.0),
    "deepseek-v3": Experts(7168, 2048, 128, 4.0),
    "tiny": Experts(64, 128, 4, 2.0),
}
type Call = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def sizes_of(routing: str, rows: int, groups: int) -> np.ndarray:
    """Draws how many rows each group has, the same in each run."""
    if routing == "balanced":
        return np.full(groups, rows // groups, np.int32)
    chance = np.random.default_rng(0)
    weights = 1 / np.arange(1, groups + 1) if routing == "zipf" else np.ones(groups)
    return chance.multinomial(rows, chance.permutation(weights / weights.sum())).astype(np.int32)


def _rows_product(implementation: str) -> Call:
    if implementation == "xla":
        return lax.ragged_dot
    return lambda lhs, rhs, sizes: overlap.grouped_matmul(lhs, rhs, sizes, implementation="fused")


def _pulled(call: Call, of_rhs: bool, lhs: jax.Array, other: jax.Array, sizes: jax.Array, like: Any) -> jax.Array:
    """The gradient of one operand, from the cotangent `other` of the result (`of_rhs`) or the right operand."""
    if of_rhs:
        (found,) = jax.linear_transpose(lambda rhs: call(lhs, rhs, sizes), like)(other)
    else:
        (found,) = jax.linear_transpose(lambda x: call(x, other, sizes), like)(lhs)
    return found


def _by_jax(transpose_rhs: bool) -> Call:
    from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu as example

    def call(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
        n = rhs.shape[1 if transpose_rhs else 2]
        return example.ragged_dot(
            lhs, rhs, group_sizes=sizes, block_m=128, block_n=128 if n % 128 == 0 else 64, block_k=64,
            max_concurrent_steps=4, grid_block_n=4, transpose_rhs=transpose_rhs,
        )  # fmt: skip

    return call


def calls(product: str, rows: int, sizes: Experts) -> tuple[dict[str, Call], tuple[tuple[int, ...], tuple[int, ...]]]:
    """Returns a function for each method, and the shapes of its two operands; of "roof" the second has no groups."""
    up, groups, of_group = 2 * sizes.width, sizes.experts, rows // sizes.experts
    k, n = (sizes.width, sizes.hidden) if product.endswith("down") else (sizes.hidden, up)
    by_group = lambda x: x.reshape(groups, of_group, x.shape[-1])  # noqa: E731
    if product.startswith("dW"):
        like = jax.ShapeDtypeStruct((groups, k, n), jnp.bfloat16)
        of = {name: lambda x, g, s, name=name: _pulled(_rows_product(name), True, x, g, s, like)
              for name in ("fused", "xla")}  # fmt: skip
        return {
            **of,
            "batched": lambda x, g, s: jnp.einsum("emk,emn->ekn", by_group(x), by_group(g)),
            "roof": lambda x, g, s: x.T @ g,
        }, ((rows, k), (rows, n))
    if product.startswith("dx"):
        like = jax.ShapeDtypeStruct((rows, k), jnp.bfloat16)
        of = {name: lambda g, w, s, name=name: _pulled(_rows_product(name), False, g, w, s, like)
              for name in ("fused", "xla")}  # fmt: skip
        return {
            **of,
            "jax": _by_jax(True),
            "batched": lambda g, w, s: jnp.einsum("emn,ekn->emk", by_group(g), w).reshape(rows, k),
            "roof": lambda g, w, s: g @ w[0].T,
        }, ((rows, n), (groups, k, n))
    return {
        **{name: _rows_product(name) for name in ("fused", "xla")},
        "jax": _by_jax(False),
        "batched": lambda x, w, s: jnp.einsum("emk,ekn->emn", by_group(x), w).reshape(rows, n),
        "roof": lambda x, w, s: x @ w[0],
    }, ((rows, k), (groups, k, n))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _normal(seed: int, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def _program(call: Call, turns: int) -> Any:
    def turn(_: Any, state: tuple[Any, ...]) -> tuple[Any, ...]:
        lhs, rhs, sizes, result = state
        corner = jnp.clip(result[(slice(0, 1),) * result.ndim].reshape(1, 1), -4, 4).astype(lhs.dtype)
        lhs = lax.dynamic_update_slice(lhs, corner, (0, 0))
        return lhs, rhs, sizes, call(lhs, rhs, sizes)

    return jax.jit(lambda state: lax.fori_loop(0, turns, turn, state), donate_argnums=0)


def measure(
    of_methods: Mapping[str, Call], shapes: Sequence[tuple[int, ...]], sizes: np.ndarray, rounds: int, turns: int
) -> dict[str, list[float]]:
    """Times the methods in turns, and compares their results with XLA's. Those that fail are reported and left out."""
    loops: dict[str, tuple[Callable[..., None], Callable[..., Any], int, int]] = {}
    expected: Any = None
    for name in sorted(of_methods, key=lambda name: name != "xla"):
        own_turns = 1 if name == "xla" else turns
        given = [_normal(i, shape) for i, shape in enumerate(shapes)]
        room = jax.eval_shape(of_methods[name], *given, jnp.asarray(sizes))
        state = [(*given, jnp.asarray(sizes), jnp.zeros(room.shape, room.dtype))]
        del given
        try:
            loop = _program(of_methods[name], own_turns).lower(state[0]).compile()

            def launch(loop: Any = loop, state: list[Any] = state) -> None:
                state[0] = loop(state[0])

            launch()
            result = state[0][-1][..., 1:, :]  # The first rows differ with the number of turns.
            if name == "xla":
                expected = result + 0
            elif name in ("fused", "jax") and expected is not None:
                distance = float(layer_runs.distance(result, expected))
                assert distance < _ALLOWED, f"{name} differs from XLA by {distance:.1e}"
            del result
            once = elapsed_s(launch, lambda state=state: state[0], 1)
        except jax.errors.JaxRuntimeError as error:  # XLA may run out of memory.
            print(f"{name}: {str(error).splitlines()[0][:150]}", flush=True)
            continue
        loops[name] = launch, lambda state=state: state[0], max(1, int(_SAMPLE_S / once)), own_turns
    times: dict[str, list[float]] = {name: [] for name in loops}
    for number in range(rounds):
        for name in np.random.default_rng(number).permutation(list(loops)):
            start, outputs, many, own_turns = loops[name]
            elapsed_s(start, outputs, many)
            times[name].append(1e6 * elapsed_s(start, outputs, many) / (many * own_turns))
    return times


def main(argv: Sequence[str] | None = None) -> int:
    choices = {"models": tuple(MODELS), "methods": METHODS, "products": PRODUCTS, "routings": ROUTINGS}
    run = layer_runs.begin("experts", __doc__, choices, argv, tokens="16384")
    for model in run.arguments.models:
        for tokens in run.arguments.tokens:
            rows = int(tokens * MODELS[model].share)
            for product in run.arguments.products:
                found, shapes = calls(product, rows, MODELS[model])
                served = {name: call for name, call in found.items() if name in run.arguments.methods}
                for routing in run.arguments.routings:
                    turns = run.turns(2.0 * rows * MODELS[model].hidden * MODELS[model].width * 2)
                    sizes = sizes_of(routing, rows, MODELS[model].experts)
                    us = measure(served, shapes, sizes, run.arguments.rounds, turns)
                    if "xla" in us:
                        run.add(
                            f"{rows}x{MODELS[model].hidden}x{MODELS[model].width}", f"{model}, {product}, {routing}", us
                        )
    return 0


if __name__ == "__main__":
    sys.exit(ending.run(main))
