"""Gathers of weights whose results are not kept for the backward pass, which gathers them again.

`jax.checkpoint` would do this too, but there XLA starts the second gather only when the cotangent of the result is
there. Here it needs the shards alone, so XLA can start it beside an earlier product.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.interpreters import ad

from overlap.frame.linear import Wanted, tangents_of
from overlap.frame.operands import Leaf

Arrays = dict[str, jax.Array]
Results = tuple[jax.Array, ...]


def with_gathered(
    multiply: Callable[[Arrays], Results], gather: Callable[[Arrays], Arrays], operands: Arrays
) -> Results:
    """Returns `multiply(operands | gather(operands))`. Its derivative keeps no result of `gather`.

    Args:
      multiply: maps operands, some of them gathered, to results.
      gather: maps operands to those of them that are gathered. It is linear.
      operands: arrays, by name.
    """

    def run(operands: Arrays) -> Results:
        return multiply(operands | gather(operands))

    def derivative(primals: tuple[Arrays], tangents: tuple[dict[str, Leaf]]) -> tuple[Results, Results]:
        (operands,) = primals
        gathered = gather(operands)
        outs, pull = jax.vjp(multiply, operands | gathered)
        leaves, structure = jax.tree.flatten(pull)
        # Which of the arrays that the backward pass needs is a gathered one.
        names = [next((name for name, x in gathered.items() if x is leaf), None) for leaf in leaves]
        kept = [None if name else leaf for name, leaf in zip(names, leaves, strict=True)]

        def backward(operands: Arrays, kept: list[Leaf], d_outs: Results, wanted: dict[str, Wanted]) -> Any:
            # Behind the barrier XLA does not see that these gathers are those of the forward pass.
            shards = {name: lax.optimization_barrier(operands[name]) for name in gathered}
            again, push = jax.vjp(lambda shards: gather(operands | shards), shards)
            found = [again[name] if name else leaf for name, leaf in zip(names, kept, strict=True)]
            (d_operands,) = jax.tree.unflatten(structure, found)(tuple(ad.instantiate_zeros(d) for d in d_outs))
            (d_shards,) = push({name: d_operands[name] for name in gathered})
            return {name: d if wanted[name] else None for name, d in (d_operands | d_shards).items()}

        return outs, tangents_of(outs, operands, tangents[0], by_xla=run, backward=backward, saved=kept)

    function = jax.custom_jvp(run)
    function.defjvp(derivative, symbolic_zeros=True)
    return function(operands)
