"""The operations that can be measured: their calls, the shardings of their operands, and their unfused counterparts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec as P

from overlap.choice.dispatch import Implementation
from overlap.choice.problem import LAYOUTS, Problem
from overlap.collectives.all_gather_matmul import all_gather_lhs_matmul
from overlap.collectives.all_gather_rhs_matmul import all_gather_rhs_matmul
from overlap.collectives.matmul_all_reduce import matmul_all_reduce
from overlap.collectives.matmul_reduce_scatter import matmul_reduce_scatter
from overlap.kernels.block_scales import ones_for
from overlap.kernels.config import Config
from overlap.single_gpu.matmul import matmul

AXIS = "x"


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation on a mesh whose only axis is `AXIS`.

    Attributes:
      call: (problem, lhs, rhs, config, implementation) -> out, inside `jax.shard_map`.
      sharded: for lhs, rhs and the result, the dimension along which it is sharded; "" if it is not sharded.
      gathers: which operand is gathered: 0 for lhs, 1 for rhs.
      layouts: how the operands may lie in memory, see `Problem.layout`.
    """

    call: Callable[[Problem, jax.Array, jax.Array, Config | None, Implementation], jax.Array]
    sharded: tuple[str, str, str] = ("", "", "")
    gathers: int = 0
    layouts: tuple[str, ...] = LAYOUTS


def _matmul(
    problem: Problem, lhs: jax.Array, rhs: jax.Array, config: Config | None, implementation: Implementation
) -> jax.Array:
    scales: dict[str, Any] = {}
    if problem.block_scaled:
        # All scales are 1: this changes neither the product nor its time.
        left, right = -2 if problem.transpose_lhs else -1, -1 if problem.transpose_rhs else -2
        scales = {"lhs_scale": ones_for(lhs, left), "rhs_scale": ones_for(rhs, right)}
    return matmul(
        lhs,
        rhs,
        preferred_element_type=problem.out_dtype,
        config=config,
        implementation=implementation,
        transpose_lhs=problem.transpose_lhs,
        transpose_rhs=problem.transpose_rhs,
        **scales,
    )


def _all_gather_lhs_matmul(
    problem: Problem, lhs: jax.Array, rhs: jax.Array, config: Config | None, implementation: Implementation
) -> jax.Array:
    return all_gather_lhs_matmul(
        lhs,
        rhs,
        AXIS,
        preferred_element_type=problem.out_dtype,
        config=config,
        implementation=implementation,
        transpose_rhs=problem.transpose_rhs,
    )


def _all_gather_rhs_matmul(
    problem: Problem, lhs: jax.Array, rhs: jax.Array, config: Config | None, implementation: Implementation
) -> jax.Array:
    return all_gather_rhs_matmul(
        lhs,
        rhs,
        AXIS,
        gather_dimension=0 if problem.gathered == "k" else 1,
        preferred_element_type=problem.out_dtype,
        config=config,
        implementation=implementation,
        transpose_lhs=problem.transpose_lhs,
    )


def _matmul_reduce_scatter(
    problem: Problem, lhs: jax.Array, rhs: jax.Array, config: Config | None, implementation: Implementation
) -> jax.Array:
    return matmul_reduce_scatter(
        lhs,
        rhs,
        AXIS,
        scatter_dimension=0 if problem.scattered == "m" else 1,
        preferred_element_type=problem.out_dtype,
        config=config,
        implementation=implementation,
        transpose_lhs=problem.transpose_lhs,
        transpose_rhs=problem.transpose_rhs,
    )


def _matmul_all_reduce(
    problem: Problem, lhs: jax.Array, rhs: jax.Array, config: Config | None, implementation: Implementation
) -> jax.Array:
    return matmul_all_reduce(
        lhs,
        rhs,
        AXIS,
        preferred_element_type=problem.out_dtype,
        config=config,
        implementation=implementation,
        transpose_lhs=problem.transpose_lhs,
        transpose_rhs=problem.transpose_rhs,
    )


OPERATIONS: dict[str, Operation] = {
    "matmul": Operation(_matmul),
    "all_gather_lhs_matmul": Operation(_all_gather_lhs_matmul, ("m", "n", "n"), layouts=("nn", "nt")),
    "all_gather_rhs_matmul_n": Operation(_all_gather_rhs_matmul, ("m", "n", "m"), 1, ("nn", "tn")),
    "all_gather_rhs_matmul_k": Operation(_all_gather_rhs_matmul, ("m", "k", "m"), 1, ("nn", "tn")),
    "matmul_reduce_scatter": Operation(_matmul_reduce_scatter, ("k", "k", "m")),
    "matmul_reduce_scatter_n": Operation(_matmul_reduce_scatter, ("k", "k", "n")),
    "matmul_all_reduce": Operation(_matmul_all_reduce, ("k", "k", "")),
}


def require_layout(op: str, layout: str, option: str) -> None:
    """Raises ValueError if the operation takes no operands in this layout.

    Args:
      op: the name of the operation.
      layout: the layout, such as "nt".
      option: the user's argument or option that gave the layout, for the message.
    """
    if layout not in OPERATIONS[op].layouts:
        raise ValueError(f"{option} must be one of {', '.join(OPERATIONS[op].layouts)} for {op}, got {layout}")


def require_equal_parts(problem: Problem, option: str) -> None:
    """Raises ValueError if the problem's operation cannot give each device an equal part of the result.

    Args:
      problem: the problem.
      option: the user's argument or option that gave the sizes, for the message.
    """
    name, devices = problem.scattered, problem.devices
    size = {"m": problem.m, "n": problem.n}.get(name, 0)
    # A sum that all devices get is the same on each.
    if size % devices and not problem.replicates:
        what = "rows" if name == "m" else "columns"
        raise ValueError(
            f"{option}: {problem.op} gives each of the {devices} devices the same number of {what}, got {name}={size}: "
            f"name a multiple of {devices}"
        )


# --- How operands lie -------------------------------------------------------------------------------------------------


def _dimensions(problem: Problem) -> tuple[str, str, str]:
    """The dimensions of lhs, rhs and the result as they lie in memory, such as ("mk", "kn", "mn"). "b" is the batch."""
    batch = "b" if problem.batch > 1 else ""
    lhs, rhs = "km" if problem.transpose_lhs else "mk", "nk" if problem.transpose_rhs else "kn"
    return batch + lhs, batch + rhs, batch + "mn"


def specs(problem: Problem) -> tuple[P, P, P]:
    """The shardings of lhs, rhs and the result."""
    lhs, rhs, out = (
        P(*(AXIS if dimension == sharded else None for dimension in dimensions))
        for dimensions, sharded in zip(_dimensions(problem), OPERATIONS[problem.op].sharded, strict=True)
    )
    return lhs, rhs, out


def shapes(problem: Problem) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of both operands, per shard."""
    sizes = {"b": problem.batch, "m": problem.m, "n": problem.n, "k": problem.k}
    lhs, rhs, _ = _dimensions(problem)
    # If rhs is gathered along k, lhs has all of k on each device.
    lhs_sizes = sizes | {"k": problem.whole[2]}
    return tuple(lhs_sizes[dimension] for dimension in lhs), tuple(sizes[dimension] for dimension in rhs)


def gathered_first[T](problem: Problem, first: T, second: T) -> tuple[T, T]:
    """Turns (lhs, rhs) into (gathered operand, other operand). Applied to its result, it gives (lhs, rhs) again."""
    return (second, first) if OPERATIONS[problem.op].gathers else (first, second)


# --- The operations without fusion (inside shard_map) -----------------------------------------------------------------


def gather(problem: Problem, lhs: jax.Array, rhs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Gathers by XLA the operand that the operation gathers. Returns (lhs, rhs)."""
    if not (problem.communicates and problem.gathered):
        return lhs, rhs
    shard, other = gathered_first(problem, lhs, rhs)
    along = _dimensions(problem)[OPERATIONS[problem.op].gathers].index(problem.gathered)
    return gathered_first(problem, lax.all_gather(shard, AXIS, axis=along, tiled=True), other)


def product(problem: Problem, lhs: jax.Array, rhs: jax.Array, **keywords: Any) -> jax.Array:
    """Multiplies gathered operands by XLA, as they are stored: no copy transposes them."""
    lhs_dimensions, rhs_dimensions, _ = _dimensions(problem)
    contracting = (lhs_dimensions.index("k"),), (rhs_dimensions.index("k"),)
    batch = ((0,), (0,)) if problem.batch > 1 else ((), ())
    return lax.dot_general(lhs, rhs, (contracting, batch), **{"preferred_element_type": problem.out_dtype} | keywords)


def reduce(problem: Problem, out: jax.Array) -> jax.Array:
    """Sums `out` over the devices by XLA. Returns this device's part; `out` itself if the operation sums nothing."""
    if not (problem.communicates and problem.scattered):
        return out
    if problem.replicates:
        return lax.psum(out, AXIS)
    dimension = out.ndim - (2 if problem.scattered == "m" else 1)
    return lax.psum_scatter(out, AXIS, scatter_dimension=dimension, tiled=True)


def unfused(problem: Problem, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """Runs XLA's collective and XLA's product one after the other. Fused kernels are compared with this."""
    return reduce(problem, product(problem, *gather(problem, lhs, rhs)))
