"""Compares each product of a transformer layer, forward and backward, with XLA and with cuBLAS on gathered data.

    python -m benchmarks.backward --out benchmarks/results
    python -m benchmarks.backward --models llama-70b --products "dx of gate+up,dh of down"

In the names of products, x is what a column-parallel product gathers (q, k, v, or gate and up), h is what a
row-parallel product multiplies (down, or o) before it scatters y. dx is the cotangent of x. The methods:

    fused        the operation of the library, with `implementation="fused"`
    lists        dx: one `matmul_reduce_scatter` of the sum of all products, if the library takes lists
    each         dx: one `matmul_reduce_scatter` for each product, in bf16; their results are added
    joined       dx: one `matmul_reduce_scatter` of operands that are concatenated first; the copies are in its time
    xla, xla hiding   plain JAX with XLA's default flags, and with `--xla_gpu_enable_latency_hiding_scheduler=true`
    roof         the same products on one device by XLA: gathered operands, nothing scattered

Each is a loop in which an element of the results is written into operands before the next turn, in place.
`benchmarks.layer_runs` says how the loops are timed. roof/this is the roof's time / the method's.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import overlap
from benchmarks import layer_runs
from benchmarks.known_models import Model
from overlap.cli import ending
from overlap.tuning.operations import AXIS
from overlap.tuning.programs import mesh_of

ROWS, COLUMNS, WHOLE = P(AXIS, None), P(None, AXIS), P()
FUSED: dict[str, Any] = {"axis_name": AXIS, "implementation": "fused"}
METHODS = ("fused", "lists", "each", "joined", "xla", "xla hiding", "roof")
type Call = Callable[..., Sequence[Any]]
type Operand = tuple[tuple[int, int], P]


@dataclasses.dataclass(frozen=True)
class Product:
    """Some products of a layer that share a gather or a scatter.

    Attributes:
      name: what it computes.
      width: of heads or of the MLP, of all products together.
      operands: the global shapes and the shardings.
      results: the shardings of the results.
      local: (operands) -> results, on one device: with the first operand gathered, and before anything is scattered.
      ours: the same by the library, with sharded operands; by method.
      gathers: whether the first operand is gathered; else the results are scattered.
      keeps: whether the gathered operand is the last result.
      moving: how many operands change from turn to turn, so that XLA can hoist nothing.
    """

    name: str
    width: int
    operands: Sequence[Operand]
    results: Sequence[P]
    local: Call
    ours: Mapping[str, Call]
    gathers: bool = True
    keeps: bool = False
    moving: int = 1

    def by_xla(self, first: jax.Array, *rest: jax.Array) -> Sequence[jax.Array]:
        """Computes the product in plain JAX."""
        if not self.gathers:
            return [lax.psum_scatter(part, AXIS, tiled=True) for part in self.local(first, *rest)]
        whole = lax.all_gather(first, AXIS, tiled=True)
        return [*self.local(whole, *rest), *([whole] if self.keeps else [])]

    def mapped(self, method: str, mesh: Mesh) -> tuple[Any, tuple[NamedSharding, ...], tuple[NamedSharding, ...]]:
        """Returns a method as a function of global arrays, and the shardings of its operands and of its results.

        The roof's parts of a sum differ from device to device. Together they are arrays of more rows.
        """
        call, operands, results = self.ours.get(method, self.by_xla), [spec for _, spec in self.operands], self.results
        if method == "roof":
            call, results = self.local, results[: len(results) - self.keeps]
            operands = [WHOLE, *operands[1:]] if self.gathers else operands
        mapped = jax.shard_map(
            lambda *given: tuple(call(*given)),
            mesh=mesh, in_specs=tuple(operands), out_specs=tuple(results), check_vma=False,
        )  # fmt: skip
        placed = [tuple(NamedSharding(mesh, spec) for spec in specs) for specs in (operands, results)]
        return mapped, placed[0], placed[1]

    def shapes(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Returns the global shapes and dtypes of the operands."""
        return tuple(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape, _ in self.operands)

    def program(self, method: str, mesh: Mesh, turns: int) -> Any:
        """Returns a jitted loop of `turns` turns: a function (operands, results) -> (operands, results)."""
        call, *shardings = self.mapped(method, mesh)

        def turn(_: Any, state: tuple[Any, Any]) -> tuple[Any, Any]:
            operands, results = state
            corner = sum(result[:1, :1].astype(jnp.float32) for result in results)
            corner = jnp.clip(corner, -4.0, 4.0).astype(jnp.bfloat16)
            moved = [lax.dynamic_update_slice(each, corner, (0, 0)) for each in operands[: self.moving]]
            operands = (*moved, *operands[self.moving :])
            return operands, call(*operands)

        return jax.jit(
            lambda operands, results: lax.fori_loop(0, turns, turn, (operands, results)),
            donate_argnums=(0, 1), out_shardings=tuple(shardings), compiler_options=layer_runs.flags_of(method, mesh),
        )  # fmt: skip

    def given(self, method: str, mesh: Mesh) -> tuple[Any, Any]:
        """Draws normally distributed operands, the same for each method, and makes room for the results."""
        call, operands, results = self.mapped(method, mesh)
        room = jax.eval_shape(call, *self.shapes())
        return _program_of(_normal, self.shapes(), operands)(), _program_of(_zeros, room, results)()


@functools.cache
def _program_of(make: Callable[..., jax.Array], shapes: Sequence[Any], shardings: tuple[NamedSharding, ...]) -> Any:
    return jax.jit(lambda: tuple(make(i, x.shape) for i, x in enumerate(shapes)), out_shardings=shardings)


def _normal(seed: int, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def _zeros(_: int, shape: tuple[int, ...]) -> jax.Array:
    return jnp.zeros(shape, jnp.bfloat16)


def _pairs(given: Sequence[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
    return list(given[: len(given) // 2]), list(given[len(given) // 2 :])


def _scattered(lhs: Any, rhs: Any) -> jax.Array:
    return overlap.matmul_reduce_scatter(lhs, rhs, transpose_rhs=True, **FUSED)


def _gathered(lhs: jax.Array, rhs: jax.Array, keeps: bool) -> Sequence[jax.Array]:
    found = overlap.all_gather_lhs_matmul(lhs, rhs, transpose_rhs=True, return_gathered=keeps, **FUSED)
    return found if isinstance(found, tuple) else (found,)


def _from_rows(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    return overlap.all_gather_rhs_matmul(lhs, rhs, dimension=0, transpose_lhs=True, **FUSED)


# dx by method. The first half of the operands are cotangents, the second half weights.
_DX: dict[str, Call] = {
    "lists": lambda *given: [_scattered(*_pairs(given))],
    "each": lambda *given: [sum(map(_scattered, *_pairs(given)))],
    "joined": lambda *given: [_scattered(*(jnp.concatenate(side, axis=1) for side in _pairs(given)))],
}


def products(sizes: Model, tokens: int) -> Iterator[Product]:
    """Yields the products of a layer of one model, forward and backward, for a number of tokens of all devices."""
    heads, of_keys = sizes.heads * sizes.head_size, sizes.kv_heads * sizes.head_size
    x: Operand = (tokens, sizes.hidden), ROWS
    for name, widths in (("gate+up", [sizes.mlp] * 2), ("q+k+v", [heads, of_keys, of_keys])):
        weights: list[Operand] = [((sizes.hidden, width), COLUMNS) for width in widths]
        several: list[Operand] = [((tokens, width), COLUMNS) for width in widths]
        columns = [COLUMNS] * len(widths)
        yield Product(
            f"forward of {name}", sum(widths), [x, *weights], columns, lambda x, *w: [x @ each for each in w],
            {"fused": lambda x, *w: overlap.all_gather_lhs_matmul(x, w, **FUSED)},
        )  # fmt: skip
        yield Product(
            f"dx of {name}", sum(widths), [*several, *weights], [ROWS],
            lambda *given: [sum(g @ w.T for g, w in zip(*_pairs(given), strict=True))],
            _DX, gathers=False, moving=2 * len(widths),
        )  # fmt: skip
        yield Product(
            f"dW of {name}", sum(widths), [x, *several], columns, lambda x, *g: [x.T @ each for each in g],
            {"fused": lambda x, *g: [_from_rows(each, x).T for each in g]},
        )  # fmt: skip
    for name, width in (("down", sizes.mlp), ("o", heads)):
        h, weight = ((tokens, width), COLUMNS), ((width, sizes.hidden), ROWS)
        yield Product(
            f"forward of {name}", width, [h, weight], [ROWS], lambda h, w: [h @ w],
            {"fused": lambda h, w: [overlap.matmul_reduce_scatter(h, w, **FUSED)]}, gathers=False,
        )  # fmt: skip
        for keeps in (True, False):
            yield Product(
                f"dh and gathered dy of {name}" if keeps else f"dh of {name}", width, [x, weight],
                [COLUMNS, WHOLE] if keeps else [COLUMNS], lambda dy, w: [dy @ w.T],
                {"fused": lambda dy, w, keeps=keeps: _gathered(dy, w, keeps)}, keeps=keeps,
            )  # fmt: skip
        yield Product(
            f"dW of {name}", width, [x, h], [ROWS], lambda dy, h: [h.T @ dy],
            {"fused": lambda dy, h: [_from_rows(h, dy)]},
        )  # fmt: skip


def measure(product: Product, mesh: Mesh, methods: Sequence[str], rounds: int, turns: int) -> dict[str, list[float]]:
    """Measures some of `METHODS`, see `layer_runs.compiled` and `layer_runs.times_us`.

    Methods that the product has not are left out, and "lists" if the library takes none.
    """

    def served(method: str) -> bool:
        if method not in product.ours:
            return method in ("roof", *layer_runs.RIVALS)
        try:
            jax.eval_shape(product.mapped(method, mesh)[0], *product.shapes())
        except ValueError as reason:
            print(f"{product.name}, {method}: {reason}", flush=True)
            return method != "lists"
        return True

    loops = layer_runs.compiled(
        lambda method: product.program(method, mesh, turns), list(filter(served, methods)), allowed=2e-2,
        given=lambda method: product.given(method, mesh), carried=True,
    )  # fmt: skip
    return layer_runs.times_us(loops, rounds, turns)


def main(argv: Sequence[str] | None = None) -> int:
    names = [product.name for product in products(layer_runs.MODELS["tiny"], 1)]
    run = layer_runs.begin("backward", __doc__, {"methods": METHODS, "products": names}, argv, tokens="8192")
    mesh = mesh_of(run.devices)
    for model, sizes, tokens in run.problems():
        for product in products(sizes, tokens):
            if product.name in run.arguments.products:
                turns = run.turns(2.0 * tokens * sizes.hidden * product.width)
                us = measure(product, mesh, run.arguments.methods, run.arguments.rounds, turns)
                run.add(f"{tokens}x{sizes.hidden}x{product.width}", f"{model}, {product.name}", us)
    return 0


if __name__ == "__main__":
    sys.exit(ending.run(main))
