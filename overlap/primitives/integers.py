"""Arithmetic on indices: Python ints in a test, traced int32 scalars in a kernel, NumPy arrays of indices in the model.

All values are non-negative, so C's truncating division is correct. `//` on a traced value would add corrections for
negative values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# What Python's own operators and NumPy compute.
_KNOWN = (int, np.ndarray)


def in_32_bits[**P, R](launch: Callable[P, R]) -> Callable[P, R]:
    """Decorates a function that traces a kernel, so that it traces as if `jax_enable_x64` were off.

    With `jax_enable_x64`, a loop over Python ints would count in int64, while all other values here are int32. A 64-bit
    count also costs a kernel two registers and several instructions in place of one. No operand of a kernel has 64
    bits.
    """

    @functools.wraps(launch)
    def traced(*args: P.args, **kwargs: P.kwargs) -> R:
        with jax.enable_x64(False):
            return launch(*args, **kwargs)

    return traced


def quotient(a: Any, b: int) -> Any:
    """Returns ⌊a / b⌋ for a ≥ 0, b > 0."""
    return a // b if isinstance(a, _KNOWN) else lax.div(a, jnp.int32(b))


def remainder(a: Any, b: int) -> Any:
    """Returns the remainder of a / b for a ≥ 0, b > 0."""
    return a % b if isinstance(a, _KNOWN) else lax.rem(a, jnp.int32(b))


def following(index: Any, count: int) -> Any:
    """Returns the index after `index` when `count` of them are used in turn: after the last one, the first.

    A loop that carries an index with it needs no `remainder`. That takes about 40 cycles unless `count` is a power of
    two, and the code that waits for barriers hides none of them.
    """
    return choose(index == count - 1, 0, index + 1)


def choose(condition: Any, if_true: Any, if_false: Any) -> Any:
    """Returns `if_true` where the condition holds, else `if_false`."""
    if isinstance(condition, bool):
        return if_true if condition else if_false
    return (np if isinstance(condition, np.ndarray) else jnp).where(condition, if_true, if_false)


def smaller(a: Any, b: Any) -> Any:
    """Returns min(a, b)."""
    if isinstance(a, _KNOWN) and isinstance(b, _KNOWN):
        return min(a, b) if isinstance(a, int) and isinstance(b, int) else np.minimum(a, b)
    return jnp.minimum(a, b)


def larger(a: Any, b: Any) -> Any:
    """Returns max(a, b)."""
    if isinstance(a, _KNOWN) and isinstance(b, _KNOWN):
        return max(a, b) if isinstance(a, int) and isinstance(b, int) else np.maximum(a, b)
    return jnp.maximum(a, b)


def ceil_div(a: int, b: int) -> int:
    """Returns ⌈a / b⌉ of Python ints."""
    return -(-a // b)


def largest_divisor(number: int, limit: int) -> int:
    """Returns the largest divisor of `number` that is at most `limit`."""
    return next(d for d in range(min(number, limit), 0, -1) if number % d == 0)
