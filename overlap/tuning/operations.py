"""What is measured: a call of the operation of a problem, the shardings of its operands, and its unfused counterparts.

All calls are made inside a `jax.shard_map` over a mesh whose only axis is `AXIS`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from overlap.choice.dispatch import Implementation
from overlap.choice.problem import Problem
from overlap.kernels.block_scales import ones_for
from overlap.kernels.config import Config

AXIS = "x"


def call_operation(
    problem: Problem,
    lhs: jax.Array,
    rhs: jax.Array,
    config: Config | None,
    implementation: Implementation,
    **keywords: Any,
) -> jax.Array:
    """Calls the public function of a problem's operation, inside `jax.shard_map`. All scales of blocks are 1."""
    spec = problem.spec
    function = spec.load_function()
    if spec.groups:
        keywords["group_sizes"] = jnp.full(problem.batch, problem.m)
    else:
        keywords["transpose_lhs"] = problem.transpose_lhs
    if problem.block_scaled:
        # Scales of 1 change neither the product nor its time.
        left = -2 if problem.transpose_lhs else -1
        right = -1 if problem.transpose_rhs else -2
        function = functools.partial(function, lhs_scale=ones_for(lhs, left), rhs_scale=ones_for(rhs, right))
    return function(
        lhs,
        rhs,
        *([AXIS] if spec.transports else []),
        **dict([spec.keyword] if spec.keyword else []),
        preferred_element_type=problem.out_dtype,
        transpose_rhs=problem.transpose_rhs,
        config=config,
        implementation=implementation,
        **keywords,
    )


# --- How operands lie -------------------------------------------------------------------------------------------------


def _dimensions(problem: Problem) -> tuple[str, str, str]:
    """The dimensions of lhs, rhs and the result as they lie in memory, such as ("mk", "kn", "mn").

    "b" is the batch, or the groups, and "r" the rows of all groups.
    """
    if problem.spec.groups:
        return "rk", "bnk" if problem.transpose_rhs else "bkn", "rn"
    batch = "b" if problem.batch > 1 else ""
    lhs = "km" if problem.transpose_lhs else "mk"
    rhs = "nk" if problem.transpose_rhs else "kn"
    return batch + lhs, batch + rhs, batch + "mn"


def specs(problem: Problem) -> tuple[P, P, P]:
    """The shardings of lhs, rhs and the result."""
    lhs, rhs, out = (
        P(*(AXIS if dimension == sharded else None for dimension in dimensions))
        for dimensions, sharded in zip(_dimensions(problem), problem.spec.sharded, strict=True)
    )
    return lhs, rhs, out


def shapes(problem: Problem) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of both operands, per shard."""
    sizes = {"b": problem.batch, "m": problem.m, "n": problem.n, "k": problem.k, "r": problem.batch * problem.m}
    lhs, rhs, _ = _dimensions(problem)
    # If rhs is gathered along k, lhs has all of k on each device.
    lhs_sizes = sizes | {"k": problem.whole[2]}
    return tuple(lhs_sizes[dimension] for dimension in lhs), tuple(sizes[dimension] for dimension in rhs)


def gathered_first[T](problem: Problem, first: T, second: T) -> tuple[T, T]:
    """Turns (lhs, rhs) into (gathered operand, other operand). Applied to its result, it gives (lhs, rhs) again."""
    return (second, first) if problem.spec.gathers_rhs else (first, second)


# --- Without fusion (inside shard_map) --------------------------------------------------------------------------------


def gather(problem: Problem, lhs: jax.Array, rhs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Gathers by XLA the operand that the operation gathers. Returns (lhs, rhs)."""
    if not (problem.communicates and problem.gathered):
        return lhs, rhs
    shard, other = gathered_first(problem, lhs, rhs)
    dimensions, _ = gathered_first(problem, *_dimensions(problem)[:2])
    along = dimensions.index(problem.gathered)
    return gathered_first(problem, lax.all_gather(shard, AXIS, axis=along, tiled=True), other)


def product(problem: Problem, lhs: jax.Array, rhs: jax.Array, implementation: Implementation = "xla") -> jax.Array:
    """Multiplies gathered operands on one device, as they are stored: no copy transposes them."""
    alone = dataclasses.replace(problem, op="matmul", devices=1, block_scaled=False)
    return call_operation(alone, lhs, rhs, None, implementation)


def unfused(problem: Problem, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """Runs XLA's collective and XLA's product one after the other. Fused kernels are compared with this."""
    return call_operation(problem, lhs, rhs, None, "xla")
