"""Arithmetic on indices that are Python ints in a test and traced int32 scalars in a kernel.

All are non-negative, so that C's truncating division is the right one: `//` on a traced value would add sign fix-ups.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax


def quotient(a: Any, b: int) -> Any:
    """⌊a / b⌋ for a ≥ 0, b > 0."""
    return a // b if isinstance(a, int) else lax.div(a, jnp.int32(b))


def remainder(a: Any, b: int) -> Any:
    """The rest of a / b for a ≥ 0, b > 0."""
    return a % b if isinstance(a, int) else lax.rem(a, jnp.int32(b))


def choose(condition: Any, if_true: Any, if_false: Any) -> Any:
    """`if_true` where the condition holds, else `if_false`."""
    return (
        (if_true if condition else if_false) if isinstance(condition, bool) else jnp.where(condition, if_true, if_false)
    )


def smaller(a: Any, b: Any) -> Any:
    """min(a, b)."""
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else jnp.minimum(a, b)


def larger(a: Any, b: Any) -> Any:
    """max(a, b)."""
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else jnp.maximum(a, b)


def ceil_div(a: int, b: int) -> int:
    """⌈a / b⌉ of Python ints."""
    return -(-a // b)
