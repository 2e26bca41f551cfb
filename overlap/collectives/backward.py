"""Fused operations for the products of a backward pass."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from overlap.frame import call
from overlap.frame.normalize import normalize
from overlap.frame.operation import Operation
from overlap.kernels.config import FLOAT16
from overlap.kernels.layouts import OperandLayouts

# The reason given for the transport in a backward pass.
AS_BEFORE = "as in the forward pass"


def backward(operation: Operation, g: jax.Array, other: jax.Array, dtype: DTypeLike, layouts: OperandLayouts) -> Any:
    """Runs `operation` on the cotangent `g` and an operand of the forward pass.

    Where the forward pass runs the fused kernel, the backward pass runs it wherever it can serve the call, also where
    XLA was measured to be faster.

    Args:
      operation: the operation to run.
      g: the cotangent, the left operand.
      other: the operand of the forward pass, the right operand.
      dtype: dtype of the result, if float16 or bfloat16; float32 otherwise.
      layouts: which of the two operands lie transposed in memory.

    Returns:
      The result, or None if the kernel cannot serve the call.
    """
    if jnp.dtype(g.dtype) not in FLOAT16:
        return None
    transposed = normalize(
        operation,
        g,
        other,
        transpose_lhs=layouts.transpose_lhs,
        transpose_rhs=layouts.transpose_rhs,
        preferred_element_type=dtype if dtype in FLOAT16 else jnp.float32,
    )
    try:
        return call.run_prepared(operation, transposed, implementation="fused", by_user=False)
    except NotImplementedError:
        return None
