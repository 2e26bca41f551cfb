"""The operations that can be tuned: their operands on a mesh, and how each is called."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
from jax.sharding import PartitionSpec as P

from overlap.choice.problem import Problem
from overlap.collectives.all_gather_matmul import all_gather_lhs_matmul
from overlap.collectives.all_gather_rhs_matmul import all_gather_rhs_matmul
from overlap.kernels.config import Config
from overlap.single_gpu.matmul import matmul

AXIS = "x"


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation as the tuner runs it, on a mesh whose only axis is `AXIS`.

    Attributes:
      call: (problem, lhs, rhs, config, implementation) -> out, inside `jax.shard_map`.
      lhs_spec: how the left operand is sharded.
      rhs_spec: the right one.
      out_spec: the result.
    """

    call: Callable[[Problem, jax.Array, jax.Array, Config | None, str], jax.Array]
    lhs_spec: P
    rhs_spec: P
    out_spec: P


def _matmul(problem: Problem, lhs: jax.Array, rhs: jax.Array, config: Config | None, implementation: str) -> jax.Array:
    # Its own dtypes, since the oracle calls it with others than the problem's.
    out_dtype = problem.out_dtype if str(lhs.dtype) == problem.dtype else lhs.dtype
    return matmul(
        lhs, rhs, preferred_element_type=out_dtype, config=config, implementation=implementation,
        transpose_lhs=problem.transpose_lhs, transpose_rhs=problem.transpose_rhs,
    )  # fmt: skip


def _all_gather_lhs_matmul(
    problem: Problem, lhs: jax.Array, rhs: jax.Array, config: Config | None, implementation: str
) -> jax.Array:
    out_dtype = problem.out_dtype if str(lhs.dtype) == problem.dtype else lhs.dtype
    return all_gather_lhs_matmul(
        lhs, rhs, AXIS, preferred_element_type=out_dtype, config=config, implementation=implementation
    )


def _all_gather_rhs_matmul(
    problem: Problem, lhs: jax.Array, rhs: jax.Array, config: Config | None, implementation: str
) -> jax.Array:
    out_dtype = problem.out_dtype if str(lhs.dtype) == problem.dtype else lhs.dtype
    return all_gather_rhs_matmul(
        lhs, rhs, AXIS, gather_dimension=0 if problem.gathered == "k" else 1, preferred_element_type=out_dtype,
        config=config, implementation=implementation,
    )  # fmt: skip


OPERATIONS: dict[str, Operation] = {
    "matmul": Operation(_matmul, P(), P(), P()),
    "all_gather_lhs_matmul": Operation(_all_gather_lhs_matmul, P(AXIS, None), P(None, AXIS), P(None, AXIS)),
    "all_gather_rhs_matmul_n": Operation(_all_gather_rhs_matmul, P(AXIS, None), P(None, AXIS), P(AXIS, None)),
    "all_gather_rhs_matmul_k": Operation(_all_gather_rhs_matmul, P(AXIS, None), P(AXIS, None), P(AXIS, None)),
}


def shapes(problem: Problem) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of both operands, per shard."""
    lhs_k = problem.whole[2]
    lhs = (lhs_k, problem.m) if problem.transpose_lhs else (problem.m, lhs_k)
    rhs = (problem.n, problem.k) if problem.transpose_rhs else (problem.k, problem.n)
    batch = (problem.batch,) if problem.batch > 1 else ()
    return (*batch, *lhs), (*batch, *rhs)
