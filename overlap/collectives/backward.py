"""Fused operations for the products of a backward pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from overlap.frame import call
from overlap.frame.normalize import normalize
from overlap.frame.operation import LaunchPlan, Operation
from overlap.frame.signatures import Arguments
from overlap.kernels.config import FLOAT16
from overlap.kernels.layouts import OperandLayouts

# Makes the operation that computes the cotangent of the left operand of another.
Transpose = Callable[[Any], Operation]


def backward(
    operation: Operation,
    lefts: Sequence[jax.Array],
    rights: Sequence[jax.Array],
    dtype: DTypeLike,
    layouts: OperandLayouts,
    plan: LaunchPlan,
    purpose: str,
    passenger: jax.Array | None = None,
) -> Any:
    """Runs `operation` on cotangents and operands of the forward pass.

    The choice is made anew: the fused kernel runs if it should be faster, or if the caller asked for it in the forward
    pass and it can serve this call.

    Args:
      operation: the operation to run.
      lefts: its left operands: one, or as many as `rights`.
      rights: its right operands.
      dtype: dtype of the result, if float16 or bfloat16; float32 otherwise.
      layouts: which of the operands lie transposed in memory.
      plan: of the forward pass.
      purpose: what is computed, for `overlap.explain`.
      passenger: see `Operands`.

    Returns:
      The result, or None if the kernel was asked for and cannot serve the call.
    """
    if any(jnp.dtype(x.dtype) not in FLOAT16 for x in lefts):
        return None
    transposed = normalize(
        operation,
        Arguments(
            lefts if operation.sums_pairs else lefts[0],
            rights if operation.sums_pairs or operation.takes_lists else rights[0],
            transpose_lhs=layouts.transpose_lhs,
            transpose_rhs=layouts.transpose_rhs,
            preferred_element_type=dtype if dtype in FLOAT16 else jnp.float32,
        ),
    )
    if passenger is not None:
        operands = dataclasses.replace(transposed.operands, passenger=passenger)
        transposed = dataclasses.replace(transposed, operands=operands)
    implementation = "fused" if plan.must_fuse else None
    try:
        return call.run_prepared(operation, transposed, implementation=implementation, by_user=False, purpose=purpose)
    except NotImplementedError:
        return None
