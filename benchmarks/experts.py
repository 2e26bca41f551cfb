"""Compares products of groups of rows with XLA, with JAX's own Mosaic kernel, and with cuBLAS on one matrix.

    python -m benchmarks.experts --out benchmarks/results
    python -m benchmarks.experts --models qwen3-30b --routings balanced --products up "dW of up" "layer, forward"

The sizes are those of one of two devices that share the experts of a layer, with as many rows as tokens choose them.
`up` is the product of the rows with both matrices of a gated MLP side by side, `down` the one after it, `dx` and `dW`
are their gradients. The methods:

    fused     `grouped_matmul` and its gradients, with `implementation="fused"`
    xla       `jax.lax.ragged_dot` and its gradients
    jax       `ragged_dot_mgpu` of JAX's Pallas examples, with the block sizes that were fastest of a few
    batched   cuBLAS on groups of equal sizes: the same bytes, without groups of any size
    roof      cuBLAS on one matrix: the same operations, but the weights of one group only

    layer     the same kernels as `layers.ExpertMLP` runs them, for whole layers: with a backward pass of its own
    tokamax   a whole layer without this library (`expert_rival.py`); so are "tokamax 2" and "tokamax 3"

With `--products "layer, forward"` or `"layer, forward and backward"` a whole layer runs on all devices: routes, the
tokens of all devices as rows, the products, and the sums of each token's rows. The router is not part of it. "fused"
and "xla" are then the implementations of the products. `--tokens` are those of all devices; the figure of
docs/performance.md takes any number of them. XLA's products take 40 s to compile and 0.1 s each. Without them
(`--methods fused`) results are not compared, and a problem's old rows in `--out` are replaced, XLA's too.

    python -m benchmarks.experts --products "layer, forward" --tokens 1024,4096,16384 --methods fused --out …

Each is a loop in which an element of the result is written into an operand before the next turn, in place. roof/this is
the time of "roof" / the method's.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import overlap
from benchmarks import current, expert_rival, layer_runs
from benchmarks.current import Row
from overlap.cli import ending
from overlap.collectives.rows.mlp import expert_mlp
from overlap.tuning.operations import AXIS
from overlap.tuning.programs import mesh_of
from overlap.tuning.timing import elapsed_s

METHODS = ("fused", "xla", "jax", "batched", "roof", "layer", *expert_rival.CONFIGS)
# The methods of whole layers; XLA's products take too long for more than one turn.
LAYERS = ("fused", "xla", "layer", *expert_rival.CONFIGS)
ROUTINGS = ("balanced", "uniform", "zipf")
PRODUCTS = ("up", "down", "dx of up", "dW of up", "dW of down")
PASSES = ("layer, forward", "layer, forward and backward")
# How long each sample takes, and the largest relative difference from XLA.
_SAMPLE_S, _ALLOWED = 0.05, 1e-2


@dataclasses.dataclass(frozen=True)
class Experts:
    """The sizes of a layer of experts, of those that one of two devices has.

    Attributes:
      hidden: width of the tokens.
      width: of an expert's hidden layer.
      experts: how many experts; a layer has twice as many, on any number of devices.
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
    "llama4-scout": Experts(5120, 8192, 8, 0.5),
    "gpt-oss-120b": Experts(2880, 2880, 64, 2.0),
    "tiny": Experts(128, 128, 4, 2.0),
}
type Call = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
# A function from a number of turns to a jitted loop, and one that makes the state that the loop carries.
type Loop = tuple[Callable[[int], Any], Callable[[], tuple[Any, ...]]]


def sizes_of(routing: str, rows: int, groups: int) -> np.ndarray:
    """Draws how many rows each group has, the same in each run."""
    if routing == "balanced":
        return np.full(groups, rows // groups, np.int32)
    chance = np.random.default_rng(0)
    weights = 1 / np.arange(1, groups + 1) if routing == "zipf" else np.ones(groups)
    return chance.multinomial(rows, chance.permutation(weights / weights.sum())).astype(np.int32)


def of_row(name: str, passed: str, rows: int, devices: int) -> tuple[float, float]:
    """Returns for a row of results of a layer, with `rows` as its first size: a device's tokens and operations."""
    model = MODELS[name]
    tokens = rows / model.share / devices
    flops = 6.0 * tokens * 2 * model.share * model.hidden * model.width
    return tokens, flops * (1 if passed == PASSES[0] else 3)


def ours_and_rival(rows: Sequence[Row]) -> dict[str, Row]:
    """Returns the rows of a layer that were timed: "ours", and that of the fastest "tokamax"."""
    rivals = [row for name in expert_rival.CONFIGS if (row := current.method(rows, name))]
    fastest = min(rivals, key=lambda row: float(row["loop_us"]), default=None)
    found = {"ours": current.method(rows, "layer"), "tokamax": fastest}
    return {name: row for name, row in found.items() if row is not None}


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


def of_product(product: str, rows: int, model: Experts, routing: str, methods: Sequence[str]) -> dict[str, Loop]:
    """Returns the loop of each method for one product on one device."""
    found, shapes = calls(product, rows, model)

    def given(name: str) -> tuple[Any, ...]:
        operands = [_normal(i, shape) for i, shape in enumerate(shapes)]
        sizes = jnp.asarray(sizes_of(routing, rows, model.experts))
        room = jax.eval_shape(found[name], *operands, sizes)
        return *operands, sizes, jnp.zeros(room.shape, room.dtype)

    return {name: (functools.partial(_program, found[name]), functools.partial(given, name))
            for name in found if name in methods}  # fmt: skip


def of_layer(
    tokens: int, model: Experts, routing: str, mesh: Mesh, methods: Sequence[str], backward: bool
) -> dict[str, Loop]:
    """Returns the loop of each method for a whole layer of experts: routes, tokens to rows and back, three products."""
    experts = model.experts * 2
    slots = round(model.share * 2)
    shards = {"x": (tokens, model.hidden), "ids": (tokens, slots), "gates": (tokens, slots),
              "w_gate": (experts, model.hidden, model.width), "w_up": (experts, model.hidden, model.width),
              "w_down": (experts, model.width, model.hidden)}  # fmt: skip

    def layer(method: str, x: jax.Array, gates: jax.Array, weights: Sequence[jax.Array], ids: jax.Array) -> jax.Array:
        if method in expert_rival.CONFIGS:
            return expert_rival.layer(method, AXIS, _gated)(x, gates, weights, ids)
        found = overlap.route(ids, experts, AXIS, gates=gates)
        if method == "layer":
            named: dict[str, jax.Array] = dict(zip(("gate", "up", "down"), weights, strict=True))
            return expert_mlp(x, named, found, AXIS, activation=_gated, implementation="fused")
        how: dict[str, Any] = {"implementation": method}
        h = overlap.all_gather_lhs_grouped_matmul(x, weights[:2], found, AXIS, activation=_gated, **how)
        return overlap.grouped_matmul_reduce_scatter(h, weights[2], None, found, AXIS, **how)

    def program(implementation: str, turns: int) -> Any:
        def turn(_: Any, state: tuple[Any, ...]) -> tuple[Any, ...]:
            x, gates, weights, ids, gradients = state
            if not backward:
                return layer_runs.normalized(layer(implementation, x, gates, weights, ids), x.dtype), *state[1:]
            call = functools.partial(layer, implementation, ids=ids)
            y, pull = jax.vjp(call, x, gates, weights)
            d_x, d_gates, gradients = pull(layer_runs.normalized(y, y.dtype))
            return layer_runs.normalized(d_x, x.dtype), gates + 1e-6 * d_gates, weights, ids, gradients

        mapped = jax.shard_map(lambda *state: lax.fori_loop(0, turns, turn, state), mesh=mesh, in_specs=P(AXIS),
                               out_specs=P(AXIS), check_vma=False)  # fmt: skip
        return jax.jit(lambda state: mapped(*state), donate_argnums=0)

    def given(method: str) -> tuple[Any, ...]:
        placed = jax.NamedSharding(mesh, P(AXIS))
        put = lambda i, name: jax.jit(lambda: _normal(i, shards[name]), out_shardings=placed)()  # noqa: E731
        chance = np.random.default_rng(0)
        odds = np.ones(experts) if routing != "zipf" else chance.permutation(1 / np.arange(1, experts + 1))
        # The experts of a token differ: those with the largest of random keys, whose odds are those of the experts.
        keys = chance.gumbel(size=(tokens, experts)) + np.log(odds)
        chosen = np.argsort(-keys, axis=1)[:, :slots]
        if routing == "balanced":  # Each token has as many experts on each device.
            chosen = (np.arange(tokens)[:, None] + np.arange(slots) * (experts // slots)) % experts
        ids = jax.device_put(chosen.astype(np.int32), placed)
        gates = jax.device_put(np.full((tokens, slots), 1 / slots, np.float32), placed)
        weights = [put(i, name) * 0.02 for i, name in enumerate(("w_gate", "w_up", "w_down"))]
        weights = [w.astype(jnp.bfloat16) for w in weights]
        if method in expert_rival.CONFIGS:  # Whoever uses it keeps both matrices in one array.
            weights = [jax.jit(lambda *both: jnp.concatenate(both, axis=2))(*weights[:2]), weights[2]]
        return put(7, "x"), gates, weights, ids, jax.tree.map(jnp.zeros_like, weights)

    return {
        name: (functools.partial(program, name), functools.partial(given, name)) for name in LAYERS if name in methods
    }


def _gated(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up


def measure(made: Mapping[str, Loop], rounds: int, turns: int) -> dict[str, list[float]]:
    """Times the methods in turns, and compares their results with XLA's. Those that fail are reported and left out."""
    loops: dict[str, tuple[Callable[..., None], Callable[..., Any], int, int]] = {}
    expected: Any = None
    for name in sorted(made, key=lambda name: name != "xla"):
        program, given = made[name]
        own_turns = 1 if name == "xla" else turns
        try:
            state = [given()]
            loop = program(own_turns).lower(state[0]).compile()

            def launch(loop: Any = loop, state: list[Any] = state) -> None:
                state[0] = loop(state[0])

            launch()
            results = state[0][-1]  # The first rows differ with the number of turns.
            result = results[..., 1:, :] if isinstance(results, jax.Array) else None
            if name == "xla":
                expected = None if result is None else result + 0
            elif name in ("fused", "jax") and expected is not None:
                distance = float(layer_runs.distance(result, expected))
                assert distance < _ALLOWED, f"{name} differs from XLA by {distance:.1e}"
            del result, results
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
    choices = {"models": tuple(MODELS), "methods": METHODS, "products": (*PRODUCTS, *PASSES), "routings": ROUTINGS}
    run = layer_runs.begin("experts", __doc__, choices, argv, tokens="16384", needs_xla=False)
    mesh, asked = mesh_of(run.devices), run.arguments
    for name, tokens, product, routing in itertools.product(asked.models, asked.tokens, asked.products, asked.routings):
        model, rows = MODELS[name], int(tokens * MODELS[name].share)
        flops = 4.0 * rows * model.hidden * model.width
        if product in PASSES:
            backward = product == PASSES[1]
            made = of_layer(tokens, model, routing, mesh, asked.methods, backward)
            turns = run.turns(flops * (4.5 if backward else 1.5) * len(run.devices))
        else:
            made, turns = of_product(product, rows, model, routing, asked.methods), run.turns(flops)
        us = measure(made, asked.rounds, turns)
        if us:
            run.add(f"{rows}x{model.hidden}x{model.width}", f"{name}, {product}, {routing}", us)
    return 0


if __name__ == "__main__":
    sys.exit(ending.run(main))
