"""Fused operations for the products of a backward pass."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from overlap.choice.dispatch import Asked
from overlap.frame import call
from overlap.frame.normalize import normalize
from overlap.frame.operation import LaunchPlan, Operation
from overlap.frame.signatures import Arguments
from overlap.kernels.config import FLOAT16

# Why an operation of the backward pass has its transport.
AS_FORWARD = "as in the forward pass"


def backward(
    operation: Operation, given: Arguments, plan: LaunchPlan, purpose: str, passenger: jax.Array | None = None
) -> Any:
    """Runs `operation` on cotangents and operands of the forward pass.

    The choice is made anew: the fused kernel runs if it should be faster, or if the caller asked for it in the forward
    pass and it can serve this call.

    Args:
      operation: the operation to run.
      given: its operands, a list of the left ones and one of the right ones, and the dtype of its result: float32, if
        `preferred_element_type` is neither float16 nor bfloat16.
      plan: of the forward pass.
      purpose: what is computed, for `overlap.explain`.
      passenger: see `Operands`.

    Returns:
      The result, or None if the kernel was asked for and cannot serve the call.
    """
    if any(jnp.dtype(x.dtype) not in FLOAT16 for x in given.lhs):
        return None
    dtype = given.preferred_element_type if given.preferred_element_type in FLOAT16 else jnp.float32
    given = dataclasses.replace(given, preferred_element_type=dtype)
    if not operation.after.takes_pairs:
        given = dataclasses.replace(given, lhs=given.lhs[0])
    transposed = normalize(operation, given)
    if passenger is not None:
        operands = dataclasses.replace(transposed.operands, passenger=passenger)
        transposed = dataclasses.replace(transposed, operands=operands)
    implementation = "fused" if plan.must_fuse else None
    try:
        return call.run_prepared(operation, transposed, Asked(implementation=implementation), purpose=purpose)
    except NotImplementedError:
        return None
