"""Checks of the arguments of primitives while a kernel is traced."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from overlap.primitives.types import Index

_INT32_END = 1 << 31


def _is_integer(value: Any) -> bool:
    """Whether `value` is an integer of Python or numpy. A truth value is not."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _described(value: Any) -> str:
    if isinstance(value, (jax.Array, np.ndarray)):
        return f"an array of {value.dtype} and shape {value.shape}"
    return f"{value!r} ({type(value).__name__})"


def require_index(caller: str, name: str, value: Index, wanted: str, end: int | None = None) -> None:
    """Checks an argument that is a Python int or an integer scalar of the kernel.

    Args:
      caller: the function whose argument is checked.
      name: the argument's name.
      value: the argument.
      wanted: what the argument stands for.
      end: if given, a Python int must be less than this number.

    Raises:
      TypeError: the argument is not an integer scalar.
      ValueError: the argument is a Python int that is negative, or not less than `end` (2³¹ if that is None).
    """
    if _is_integer(value):
        limit = _INT32_END if end is None else end
        if not 0 <= value < limit:
            allowed = "at least 0 and less than 2³¹" if end is None else f"in 0 … {end - 1}"
            raise ValueError(f"`{name}` of `{caller}` must be {wanted}, {allowed}, got {value}")
        return
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    if dtype is None or shape != () or not jnp.issubdtype(dtype, jnp.integer):
        raise TypeError(
            f"`{name}` of `{caller}` must be {wanted}: a Python int or an int32 scalar of the kernel, got "
            f"{_described(value)}"
        )


def require_constant(caller: str, name: str, value: int, least: int, way_out: str) -> None:
    """Checks an argument that must be known while the kernel is traced.

    Args:
      caller: the function whose argument is checked.
      name: the argument's name.
      value: the argument.
      least: the smallest number allowed.
      way_out: what to do instead, for the message.

    Raises:
      TypeError: the argument is not a Python int.
      ValueError: the argument is less than `least`, or not less than 2³¹.
    """
    if not _is_integer(value):
        raise TypeError(f"`{name}` of `{caller}` must be a Python int, got {_described(value)}: {way_out}")
    if value < least:
        raise ValueError(f"`{name}` of `{caller}` must be at least {least}, got {value}: {way_out}")
    if value >= _INT32_END:
        raise ValueError(f"`{name}` of `{caller}` must be less than 2³¹, got {value}: kernels count with int32")


def require_one(caller: str, name: str, ref: Any) -> None:
    """Checks an argument that must be one semaphore, or one word of memory.

    Args:
      caller: the function whose argument is checked.
      name: the argument's name.
      ref: the argument.

    Raises:
      TypeError: the argument is no reference, or refers to an array of several.
    """
    shape = getattr(ref, "shape", None)
    if shape is None:
        raise TypeError(f"`{name}` of `{caller}` must be one semaphore of `shared_semaphores`, got {_described(ref)}")
    if shape != ():
        raise TypeError(f"`{name}` of `{caller}` must be one semaphore, got shape {shape}: take one with `.at[i]`")
