"""Checks of the arguments of primitives while a kernel is traced."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from overlap.primitives.types import Index, Tree

_INT32_END = 1 << 31


def _is_integer(value: object) -> bool:
    """Whether `value` is an integer of Python or numpy. A truth value is not."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _described(value: object) -> str:
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
    dtype = getattr(value, "dtype", None)
    shape = getattr(value, "shape", None)
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


def require_one(caller: str, name: str, ref: Tree) -> None:
    """Checks an argument that must be one semaphore, or one word of memory.

    Args:
      caller: the function whose argument is checked.
      name: the argument's name.
      ref: the argument.

    Raises:
      TypeError: the argument is no reference, or refers to an array of several.
    """
    require_semaphore(caller, name, ref)
    if ref.shape != ():
        raise TypeError(f"`{name}` of `{caller}` must be one semaphore, got shape {ref.shape}: take one with `.at[i]`")


def require_semaphore(caller: str, name: str, ref: Tree) -> None:
    """Checks that an argument is a reference, as a semaphore is. Arguments as for `require_one`.

    Raises:
      TypeError: the argument is no reference, for instance because the call is outside of a kernel.
    """
    wanted = "one semaphore of `shared_semaphores`"
    require_reference(caller, name, ref, wanted, f"call `{caller}` in the body of a kernel, with `flags.at[i]`")


def require_reference(caller: str, name: str, ref: Tree, wanted: str, way_out: str) -> None:
    """Checks an argument that must be a reference to memory.

    Args:
      caller: the function whose argument is checked.
      name: the argument's name.
      ref: the argument.
      wanted: what the argument stands for.
      way_out: what to do instead, for the message.

    Raises:
      TypeError: the argument is no reference.
    """
    # jax has no public type for a slice of a reference (`ref.at[…]`). So refuse only what is certainly no reference.
    is_array = isinstance(ref, (jax.Array, np.ndarray, np.generic)) and not isinstance(ref, jax.Ref)
    if is_array or not hasattr(ref, "shape") or isinstance(ref, jax.ShapeDtypeStruct):
        raise TypeError(f"`{name}` of `{caller}` must be {wanted}, got {_described(ref)}: {way_out}")


_SPACES: dict[plgpu.MemorySpace, str] = {
    plgpu.GMEM: "global memory",
    plgpu.SMEM: "shared memory",
    plgpu.TMEM: "tensor memory",
}


def require_memory(caller: str, name: str, ref: Tree, space: plgpu.MemorySpace, way_out: str) -> None:
    """Checks an argument that must be a reference to one kind of memory.

    Args:
      caller: the function whose argument is checked.
      name: the argument's name.
      ref: the argument.
      space: the memory space, as `plgpu.GMEM`.
      way_out: what to do instead, for the message.

    Raises:
      TypeError: the argument is no reference, or refers to another kind of memory.
    """
    wanted = f"a reference to {_SPACES[space]}"
    require_reference(caller, name, ref, wanted, way_out)
    found = getattr(jax.typeof(ref) if isinstance(ref, jax.Ref) else ref, "memory_space", None)
    if found in _SPACES and found != space:
        raise TypeError(
            f"`{name}` of `{caller}` must be {wanted}, got one to {_SPACES[found]} ({ref.dtype} of shape {ref.shape}): "
            f"{way_out}"
        )


def require_barrier(caller: str, name: str, ref: Tree) -> None:
    """Checks an argument that must be an mbarrier.

    Raises:
      TypeError: the argument is no reference, or refers to memory that holds numbers.
    """
    wanted = "an mbarrier"
    way_out = "take a `plgpu.Barrier` of the kernel's scratch, and one of several with `.at[i]`"
    require_reference(caller, name, ref, wanted, way_out)
    if isinstance(ref.dtype, np.dtype):
        raise TypeError(
            f"`{name}` of `{caller}` must be {wanted}, got {ref.dtype} of shape {ref.shape} in memory: {way_out}"
        )


@contextlib.contextmanager
def in_kernel(caller: str) -> Iterator[None]:
    """Opens a context for the operations of `caller`, which take no reference that shows where they are called.

    Raises:
      ValueError: outside of a kernel, and of any other function that jax traces.
    """
    try:
        yield
    except NotImplementedError as wrong:
        # jax evaluates operations that are not traced, and has no such rule for a kernel's own.
        raise ValueError(
            f"`{caller}` must be called in the body of a kernel, and is called outside of it: move the call into the "
            "function that `plgpu.kernel` gets"
        ) from wrong
