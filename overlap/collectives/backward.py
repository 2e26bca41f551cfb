"""Products of a backward pass that are fused with their communication."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from overlap.frame import call
from overlap.frame.normalize import normalize
from overlap.frame.operands import LaunchPlan
from overlap.frame.operation import Operation
from overlap.kernels.config import FLOAT16
from overlap.kernels.layouts import OperandLayouts

# Why a transport is used.
AS_BEFORE = "as in the forward pass"


def backward(
    operation: Operation, g: jax.Array, other: jax.Array, dtype: Any, plan: LaunchPlan, layouts: OperandLayouts
) -> Any:
    """`operation` on the cotangent `g` and an operand of the forward pass; None: not by a kernel.

    It is chosen as any other call is; where the caller insisted on the fused kernel for the forward pass, it is used
    here wherever it can serve.
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
        return call.run_prepared(operation, transposed, implementation="fused" if plan.must_fuse else None)
    except NotImplementedError:
        return None
