"""A function with a derivative rule of its own, as a primitive of jax.

`jax.custom_jvp` would suffice for a single transformation. `primitive.py` says why its rules get lost in the gradient
of a `lax.scan` or of a `jax.checkpoint`; a primitive keeps them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir, partial_eval

from overlap.frame.operands import Leaf, Structure
from overlap.primitives.types import Tree

# Called as rule(operands, tangents), with symbolic zeros (`ad.Zero`) among the tangents; returns results and tangents.
type Rule = Callable[[tuple[Any, ...], tuple[Any, ...]], tuple[Tree, Tree]]

_function_p = Primitive("overlap_function")
_function_p.multiple_results = True


def with_rule(
    function: Callable[..., Tree], rule: Rule, *operands: Tree, last: Callable[..., jax.Array] | None = None
) -> Tree:
    """Returns `function(*operands)`, which jax differentiates by `rule`. None of these functions captures arrays.

    `last`: a function that computes the last result by itself. It runs where no other result is used, as in the
    backward pass of a `jax.checkpoint` whose policy keeps the others.
    """
    leaves, structure = jax.tree.flatten(operands)
    ruled = _Ruled(function, rule, structure, last)
    outs = _function_p.bind(*leaves, ruled=ruled)
    return jax.tree.unflatten(ruled.results, outs)


class _Ruled:
    """A function with its rule. The function is traced when it is needed: not where only the rule runs.

    Attributes:
      last: as for `with_rule`.
      results: the structure of the results, once the function or the rule has run.
    """

    def __init__(
        self,
        function: Callable[..., Tree],
        rule: Rule,
        operands: Structure,
        last: Callable[..., jax.Array] | None = None,
    ) -> None:
        self.function = function
        self.rule = rule
        self.operands = operands
        self.last = last
        self.results: Structure = None
        self.traced: dict[tuple[Leaf, ...], ClosedJaxpr] = {}

    def jaxpr(self, types: Sequence[Leaf]) -> ClosedJaxpr:
        """The function of operands of these types."""
        if (key := tuple(types)) not in self.traced:
            self.traced[key], results = jax.make_jaxpr(self.of_leaves, return_shape=True)(*types)
            self.results = jax.tree.structure(results)
        return self.traced[key]

    def alone(self, last: Callable[..., jax.Array]) -> _Ruled:
        """The function that computes the last result alone."""

        def rule(*given: Any) -> tuple[Tree, Tree]:
            outs, tangents = self.rule(*given)
            return outs[-1:], tangents[-1:]

        return _Ruled(lambda *operands: (last(*operands),), rule, self.operands)

    def of_leaves(self, *leaves: jax.Array) -> Tree:
        return self.function(*jax.tree.unflatten(self.operands, leaves))

    def rule_of_leaves(self, leaves: Sequence[jax.Array], tangents: Sequence[Leaf]) -> tuple[list[Leaf], list[Leaf]]:
        outs, of_outs = self.rule(*(jax.tree.unflatten(self.operands, values) for values in (leaves, tangents)))
        self.results = jax.tree.structure(outs)
        # To jax a symbolic zero is a tree without leaves.
        return jax.tree.leaves(outs), jax.tree.leaves(of_outs, is_leaf=lambda x: isinstance(x, ad.Zero))


@functools.partial(jax.jit, static_argnames="traced")
def _compiled(*leaves: jax.Array, traced: ClosedJaxpr) -> list[jax.Array]:
    return jaxpr_as_fun(traced)(*leaves)


@_function_p.def_impl
def _run(*leaves: jax.Array, ruled: _Ruled) -> list[jax.Array]:
    return _compiled(*leaves, traced=ruled.jaxpr(list(map(jax.typeof, leaves))))


@_function_p.def_abstract_eval
def _types(*types: Leaf, ruled: _Ruled) -> list[Leaf]:
    return ruled.jaxpr(types).out_avals


def _evaluate(*leaves: jax.Array, ruled: _Ruled) -> list[jax.Array]:
    return jaxpr_as_fun(ruled.jaxpr(list(map(jax.typeof, leaves))))(*leaves)


def _jvp(leaves: Sequence[jax.Array], tangents: Sequence[Leaf], *, ruled: _Ruled) -> tuple[list[Leaf], list[Leaf]]:
    return ruled.rule_of_leaves(leaves, tangents)


def _batched(
    leaves: Sequence[jax.Array], dims: Sequence[int | None], *, ruled: _Ruled
) -> tuple[list[jax.Array], list[int]]:
    (size,) = {x.shape[dim] for x, dim in zip(leaves, dims, strict=True) if dim is not None}
    in_front = [x if dim is None else jnp.moveaxis(x, dim, 0) for x, dim in zip(leaves, dims, strict=True)]
    axes = [None if dim is None else 0 for dim in dims]

    def of_all(*leaves: jax.Array) -> Tree:
        return jax.vmap(ruled.of_leaves, in_axes=axes, axis_size=size)(*leaves)

    def rule_of_all(leaves: Sequence[jax.Array], tangents: Sequence[Leaf]) -> tuple[Tree, Tree]:
        moved = [i for i, x in enumerate(tangents) if not isinstance(x, ad.Zero)]

        def of_one(leaves: Sequence[jax.Array], directions: Sequence[jax.Array]) -> tuple[Tree, Tree]:
            given: list[Leaf] = [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in leaves]
            for index, direction in zip(moved, directions, strict=True):
                given[index] = direction
            outs, of_outs = ruled.rule_of_leaves(leaves, given)
            return outs, [ad.instantiate_zeros(x) for x in of_outs]

        in_axes = axes, [axes[i] for i in moved]
        return jax.vmap(of_one, in_axes=in_axes, axis_size=size)(list(leaves), [tangents[i] for i in moved])

    outs = jax.tree.leaves(with_rule(of_all, lambda *given: rule_of_all(*given), *in_front))
    ruled.results = ruled.results or jax.tree.structure(jax.eval_shape(of_all, *in_front))
    return outs, [0] * len(outs)


def _without_unused(used: list[bool], *given: Any) -> tuple[list[bool], Any]:
    """What jax needs of a call whose results are not all used: which operands, and the call in its place."""
    equation = given[-1]  # From jax 0.12 on, which of its operands are live comes before.
    if not any(used):
        return [False] * len(equation.invars), None
    ruled: _Ruled = equation.params["ruled"]
    if ruled.last is not None and not any(used[:-1]):
        equation = equation.replace(outvars=equation.outvars[-1:], params={"ruled": ruled.alone(ruled.last)})
    return [True] * len(equation.invars), equation


partial_eval.dce_rules[_function_p] = _without_unused
mlir.register_lowering(_function_p, mlir.lower_fun(_evaluate, multiple_results=True))
ad.primitive_jvps[_function_p] = _jvp
batching.primitive_batchers[_function_p] = _batched
