"""Checks of arguments, the same for all operations. Each function checks one argument and returns it in one form.

All raise ValueError before anything is traced or sent. The message has the argument's name, what it must be, what was
given, and what to do about it.
"""

from __future__ import annotations

import difflib
import inspect
import operator
from collections.abc import Callable, Hashable, Iterable

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import DTypeLike

from overlap.frame.signatures import AnyMesh, Given, Leaf
from overlap.kernels.config import Config

_MOST_CHARACTERS = 80


def is_in_jit() -> bool:
    """Whether `jax.jit` or the like traces this code. `jax.grad` alone evaluates it, though operands are tracers."""
    return isinstance(jnp.zeros(()), Tracer)


def shown(value: Given) -> str:
    """A value as messages show it: at most 80 characters; for an array its shape and dtype instead of its entries."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        kind = "an array" if isinstance(value, jax.Array) else type(value).__name__
        return f"{kind} of shape {tuple(np.shape(value))} and dtype {value.dtype}"
    text = repr(value)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}…"


def array(name: str, value: Given) -> Leaf:
    """A floating-point array of JAX or NumPy, or the type of one (`jax.ShapeDtypeStruct`). NumPy's become JAX's."""
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "biufcV":
            raise ValueError(f"`{name}` must be an array of numbers, got {shown(value)}: convert it")
        value = jnp.asarray(value)
    elif not isinstance(value, (jax.Array, jax.ShapeDtypeStruct)):
        raise ValueError(
            f"`{name}` must be an array of JAX or NumPy, got {type(value).__name__} ({shown(value)}): convert it, e.g. "
            "with jnp.asarray"
        )
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise ValueError(
            f"`{name}` must be floating-point, got {value.dtype}: cast it, e.g. with .astype(jnp.bfloat16)"
        )
    return value


def flag(name: str, value: Given) -> bool:
    """True or False."""
    if not isinstance(value, (bool, np.bool_)):
        raise ValueError(f"`{name}` must be True or False, got {shown(value)}: name one of these")
    return bool(value)


def function(name: str, value: Given) -> Callable[..., Leaf]:
    """Something that can be called."""
    if not callable(value):
        raise ValueError(f"`{name}` must be a function, got {shown(value)}: pass one")
    return value


def count(name: str, value: Given) -> int | None:
    """A number of things, at least 1; or None."""
    if value is None:
        return None
    is_number = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not is_number or value < 1:
        raise ValueError(f"`{name}` must be None or an integer of at least 1, got {shown(value)}: leave it out")
    return int(value)


def config(value: Given) -> Config | None:
    """Returns `value` if it is an `overlap.Config` or None. Raises ValueError if not."""
    if value is not None and not isinstance(value, Config):
        raise ValueError(
            f"`config` must be None or an overlap.Config, got {shown(value)}: leave it out, or pass "
            "overlap.Config(tile_m=…, …)"
        )
    return value


def one_of(name: str, value: Given, names: tuple[str, ...]) -> str | None:
    """One of the strings in `names`, or None."""
    if value is not None and not (isinstance(value, str) and value in names):
        raise ValueError(f"`{name}` must be None or one of {names}, got {shown(value)}: leave it out, or name one")
    return value


def index(name: str, value: Given, values: tuple[int, ...], meaning: str) -> int:
    """One of the integers in `values`; `meaning` says in the message which these are."""
    try:
        number = None if isinstance(value, (bool, np.bool_)) else operator.index(value)
    except TypeError:
        number = None
    if number not in values:
        raise ValueError(f"`{name}` must be {meaning}, got {shown(value)}: name one of these")
    return number


def axis_name(value: Given) -> Given:
    """Checks that `value` is the name of a mesh axis or a tuple of names, and returns it.

    Whether the mesh has these axes is checked later.
    """
    names = value if isinstance(value, (tuple, list)) else (value,)
    for name in names:
        # jax takes an integer for a dimension of an array.
        if name is None or isinstance(name, (int, jax.Array, np.ndarray)) or not isinstance(name, Hashable):
            raise ValueError(
                f"`axis_name` must be the name of a mesh axis or a tuple of such, got {shown(value)}: name the axis, "
                "e.g. 'x'"
            )
    return value


def mesh(value: Given) -> AnyMesh | None:
    """A mesh, or None."""
    if value is not None and not isinstance(value, (jax.sharding.Mesh, jax.sharding.AbstractMesh)):
        raise ValueError(
            f"`mesh` must be a jax.sharding.Mesh, got {shown(value)}: pass the mesh that the operands are on"
        )
    return value


def result_dtype(value: Given, operands: DTypeLike) -> jnp.dtype:
    """The dtype of a result: `preferred_element_type` if given, else that of the operands (bfloat16 for 8 bits).

    Args:
      value: `preferred_element_type` as the caller gave it, or None.
      operands: the dtype of the operands.
    """
    if value is None:
        return jnp.dtype(jnp.bfloat16) if jnp.dtype(operands).itemsize < 2 else jnp.dtype(operands)
    way_out = "leave it out, or name one, e.g. jnp.float32"
    try:
        dtype = jnp.dtype(value)
    except (TypeError, ValueError):
        raise ValueError(
            f"`preferred_element_type` must be a floating-point dtype, got {shown(value)}: {way_out}"
        ) from None
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"`preferred_element_type` must be a floating-point dtype, got {dtype.name}: {way_out}")
    if dtype.itemsize > 4 and not jax.config.jax_enable_x64:
        raise ValueError(
            f"`preferred_element_type` must have at most 32 bits without `jax_enable_x64`, got {dtype.name}: {way_out}"
        )
    return dtype


def factor(name: str, value: Given, dtype: DTypeLike) -> Leaf:
    """Checks that `value` is a real number or an array of them, and returns it as an array of `dtype`.

    If `value` is only an array's type (`jax.ShapeDtypeStruct`), returns that type with `dtype`.
    """
    if isinstance(value, (int, float, np.number)) and not isinstance(value, (bool, np.complexfloating)):
        return jnp.asarray(value, dtype)
    kind: DTypeLike = value.dtype if isinstance(value, (jax.Array, jax.ShapeDtypeStruct, np.ndarray)) else bool
    if not (jnp.issubdtype(kind, jnp.floating) or jnp.issubdtype(kind, jnp.integer)):
        raise ValueError(
            f"`{name}` must be a real number or an array of such, got {shown(value)}: convert it, e.g. with jnp.float32"
        )
    return each(lambda x: jnp.asarray(x, dtype), value)


def each(take: Callable[..., Leaf], *values: Leaf) -> Leaf:
    """`take(*values)`; if one of `values` is the type of an array (`jax.ShapeDtypeStruct`), the type of the result."""
    of_types = any(isinstance(value, jax.ShapeDtypeStruct) for value in values)
    return jax.eval_shape(take, *values) if of_types else take(*values)


def without_mesh(value: Given) -> Leaf:
    """The type of an array of JAX, or of numbers in one of NumPy, without its sharding; anything else as it is."""
    is_numbers = isinstance(value, np.ndarray) and value.dtype.kind in "biufcV"  # V: dtypes of ml_dtypes, as bfloat16
    if not is_numbers and not isinstance(value, (jax.Array, jax.ShapeDtypeStruct)):
        return value
    return jax.ShapeDtypeStruct(value.shape, jax.dtypes.canonicalize_dtype(value.dtype, allow_extended_dtype=True))


def require_values(**given: Given) -> None:
    """Raises ValueError if one of the arguments is the type of an array: only `overlap.explain` takes types."""
    for name, value in given.items():
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(value)):
            raise ValueError(
                f"`{name}` must be an array, got a jax.ShapeDtypeStruct: pass values; overlap.explain takes types"
            )


def memory(value: Given) -> str:
    """The memory that an array lies in: "device", "host", or jax's name for another kind, which only an array knows."""
    if jax.typeof(value).memory_space == jax.memory.Space.Host:
        return "host"
    kind = None if isinstance(value, Tracer) else getattr(getattr(value, "sharding", None), "memory_kind", None)
    return kind or "device"


def one_memory(named: Iterable[tuple[str, Leaf]]) -> str:
    """The memory that all of these arrays lie in. Each comes after its name.

    Raises:
      ValueError: they are in different memories. XLA does not multiply such arrays either.
    """
    (first, found), *others = [(name, memory(x)) for name, x in named]
    for name, other in others:
        if other != found:
            host = name if found == "device" else first
            raise ValueError(
                f"`{first}` and `{name}` must be in the same memory, got {found} and {other}: move one of them first, "
                f"e.g. jax.device_put({host}, jax.memory.Space.Device)"
            )
    return found


def why_symbolic(what: str, sizes: Iterable[Given]) -> str:
    """Says why no kernel can be built if one of the sizes is a symbol of `jax.export`; empty if all are numbers."""
    if not any(map(jax.export.is_symbolic_dim, sizes)):
        return ""
    return f"the fused kernel is built for sizes that are numbers, got {what}: export a program for each size"


def why_not_fused(named: Iterable[tuple[str, Leaf]]) -> str:
    """Says why no kernel can be built for operands of these types, whatever the device; empty if one might be.

    Each operand comes after its name. Sizes of groups may lie in any memory, since XLA computes with them first.
    """
    named = [(name, x) for name, x in named if name != "group_sizes"]
    if (memory := one_memory(named)) != "device":
        return f"the fused kernel reads device memory, got operands in {memory} memory: jax.device_put them first"
    shapes = [(f"`{name}` of shape {tuple(x.shape)}", x.shape) for name, x in named]
    return next(filter(None, (why_symbolic(*shape) for shape in shapes)), "")


def bound(
    name: str,
    signature: inspect.Signature,
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> None:
    """Checks that a call has all arguments that the called function needs, and none that it does not know.

    Args:
      name: the name of the function or class, for messages.
      signature: its parameters.
      args: the arguments by position.
      kwargs: the arguments by keyword.

    Raises:
      TypeError: an argument is missing, unknown or given twice. The message names public functions and arguments.
    """
    known = signature.parameters
    for keyword in kwargs:
        if keyword not in known:
            near = difflib.get_close_matches(keyword, known, 1)
            hint = f"did you mean `{near[0]}`?" if near else f"it takes `{'`, `'.join(known)}`"
            raise TypeError(f"{name} has no argument `{keyword}`: {hint}")
    positional = [p.name for p in signature.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    if len(args) > len(positional):
        raise TypeError(
            f"{name} takes {len(positional)} arguments by position (`{'`, `'.join(positional)}`), got {len(args)}: "
            "pass the others by keyword"
        )
    for given in positional[: len(args)]:
        if given in kwargs:
            raise TypeError(f"{name} got `{given}` twice, by position and by keyword: leave one out")
    taken = {*positional[: len(args)], *kwargs}
    missing = [p.name for p in signature.parameters.values() if p.default is p.empty and p.name not in taken]
    if missing:
        raise TypeError(f"{name} needs `{'`, `'.join(missing)}`: pass what is missing")
