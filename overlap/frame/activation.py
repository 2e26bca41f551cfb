"""A user's activation: traced at the call, proven to be elementwise, and usable inside a kernel and for derivatives.

The call traces the function several times, since it compares the programs for two shapes. Scalars that the activation
captures become operands of the call. So the fused kernel does not call the function again later, when the variables of
its closure may have changed, and `jax.grad`, `jax.jit` and `jax.vmap` see these scalars. Where XLA runs, the call
applies the function itself, and jax differentiates that.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.typing import DTypeLike

from overlap.frame.arguments import shown
from overlap.frame.elementwise import NotElementwise, Program, program_of
from overlap.frame.entries import elementwise_map, typeless

# The name by which policies of `jax.checkpoint` know the values before an activation of several right operands.
BEFORE_ACTIVATION = "before_activation"
# An activation with its captured scalars bound: from the values of all right operands to those of the results; None for
# none.
type BoundActivation = Callable[[Sequence[jax.Array]], tuple[jax.Array, ...]] | None

# An activation is traced on both shapes, and both programs must be equal: a function that computes with the sizes of
# its argument gives two different programs. No tile has the large shape, and no tile is as large.
_LARGE, _ONE = (2003, 3001), (1, 1)
_WAY_OUT = (
    "use functions of single values, such as jax.nn.gelu, and scalars (vectors have `bias`, `lhs_scale` and "
    "`rhs_scale`, matrices `addend`), or apply it to the result of the call"
)


@dataclasses.dataclass(frozen=True)
class Activation:
    """An elementwise function of f32 values and of the scalars that it captures. Equal activations compute the same.

    It takes one array and is applied to each result; or it takes as many arrays as there are right operands, and makes
    one result of theirs.

    Attributes:
      program: the function as the kernel computes it.
      entry_jaxpr: the function of the scalars and of one value, [], per array, as a closed jaxpr. It keeps the
        derivative rules of the user's function (`jax.custom_jvp` and the like), which the program does not have.
    """

    program: Program
    entry_jaxpr: Any = dataclasses.field(compare=False, repr=False)

    @property
    def without_function(self) -> Activation:
        """The program alone. A cache may keep it, since it holds nothing that belongs to the caller."""
        return Activation(self.program, None)

    def __call__(self, *values: jax.Array, scalars: Sequence[Any]) -> jax.Array:
        """Applies the function by XLA to arrays of any shape. It has derivatives of any order."""
        wide = [jnp.broadcast_to(_wide(x), values[0].shape) for x in scalars]
        return elementwise_map(self.entry_jaxpr, *wide, *values)


def takes_all(function: Any, rhs: Any) -> bool:
    """Whether an activation makes one result of those of all right operands, as its number of parameters says.

    It then has as many parameters without a default as there are right operands, two or more. An activation that was
    traced already knows how many arrays it takes.
    """
    count = len(rhs) if type(rhs) in (list, tuple) else 1
    return count > 1 and callable(function) and _arrays_of(function)[0] == count


def _arrays_of(function: Callable[..., Any]) -> tuple[int, float]:
    """Returns the least and the most arrays that a function takes; (0, inf) if it does not tell."""
    if isinstance(function, Activation):
        return function.program.arrays, function.program.arrays
    if isinstance(count := getattr(function, "nin", None), int):  # jnp.multiply and its like
        return count, count
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # Some functions that are not written in Python do not tell.
        return 0, math.inf
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [x for x in parameters if x.kind in kinds]
    takes_any = any(x.kind is inspect.Parameter.VAR_POSITIONAL for x in parameters)
    return sum(x.default is x.empty for x in positional), math.inf if takes_any else len(positional)


def on_all(
    function: Callable[..., jax.Array], combines: bool
) -> Callable[[Sequence[jax.Array]], tuple[jax.Array, ...]]:
    """Returns a function from the values of all right operands to those of the results.

    `combines`: whether `function` makes one result of them; else it is applied to each.
    """
    return lambda values: (function(*values),) if combines else tuple(map(function, values))


def _wide(scalar: Any) -> jax.Array:
    """Returns a scalar in at least 32 bits, since its cotangents, one for each entry, are added in its dtype."""
    is_narrow = jnp.issubdtype(scalar.dtype, jnp.floating) and scalar.dtype.itemsize < 4
    return scalar.astype(jnp.float32) if is_narrow else jnp.asarray(scalar)


def traced(
    function: Callable[..., jax.Array], dtype: DTypeLike = jnp.float32, arrays: int = 1
) -> tuple[Activation, tuple[Any, ...]]:
    """Traces an activation of values of `dtype`; returns it and the values of the scalars that it captures now.

    Raises:
      ValueError: it is no function of `arrays` arrays, or cannot be proven to be elementwise.
    """
    if not callable(function):
        raise ValueError(
            f"`activation` must be a function of an array, got {shown(function)}: pass a function, e.g. jax.nn.relu"
        )
    least, most = _arrays_of(function)
    if not least <= arrays <= most:
        wanted = f"{arrays} arrays" if arrays > 1 else "one array, or of as many as `rhs` has right operands,"
        count = least if arrays < least else most
        raise ValueError(f"`activation` must be a function of {wanted} got {_name(function)}, which takes {count}")
    # The traced function is used inside kernels, and outside on values that may vary along any mesh axes. So its own
    # types must say nothing of a mesh.
    with typeless():
        large, single = (_trace(function, [shape] * arrays, jnp.float32) for shape in (_LARGE, _ONE))
        try:
            program = program_of(large, _LARGE)
            if program_of(single, _ONE) != program:
                raise NotElementwise("what it computes depends on the shape of its argument")
        except NotElementwise as why:
            raise ValueError(f"`activation` must be elementwise, got {_name(function)}: {why}; {_WAY_OUT}") from None
        if dtype != jnp.float32:
            single = _trace(function, [_ONE] * arrays, dtype)
        scalars = tuple(large.consts[index] for index in program.captured)
        types = [jax.ShapeDtypeStruct((), _wide(x).dtype) for x in scalars]
        entry_jaxpr = jax.make_jaxpr(_of_entry(single, program))(*types, *[jax.ShapeDtypeStruct((), dtype)] * arrays)
    return Activation(program, entry_jaxpr), scalars


def _of_entry(single: ClosedJaxpr, program: Program) -> Callable[..., jax.Array]:
    """Makes a function of the scalars and of one value, [], per array, from the jaxpr on arrays of shape `_ONE`.

    The function keeps none of the jaxpr's constants, which may be tracers.
    """
    types = [(np.shape(const), const.dtype) for const in single.consts]

    def of_entry(*operands: jax.Array) -> jax.Array:
        scalars, values = operands[: len(program.captured)], operands[len(program.captured) :]
        # The result does not depend on constants that are not among the scalars, so zeros stand for them.
        consts: list[Any] = [np.zeros(*shape_and_dtype) for shape_and_dtype in types]
        for index, scalar in zip(program.captured, scalars, strict=True):
            consts[index] = scalar.astype(types[index][1])
        return jaxpr_as_fun(ClosedJaxpr(single.jaxpr, consts))(*(x.reshape(_ONE) for x in values))[0].reshape(())

    return of_entry


def _trace(function: Callable[..., jax.Array], shapes: list[tuple[int, ...]], dtype: DTypeLike) -> ClosedJaxpr:
    try:
        # Wrap it in a new lambda: JAX caches traces by function object, and its closure may have changed since.
        closed, types = jax.make_jaxpr(lambda *values: function(*values), return_shape=True)(
            *(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)
        )
    except jax.errors.TracerArrayConversionError as wrong:
        raise ValueError(
            f"`activation` must be a function that JAX can trace, got {_name(function)}, which asks for its argument's "
            "values: use jax.numpy instead of NumPy in it"
        ) from wrong
    except Exception as wrong:
        single = "one array of any shape (or of as many arrays as there are right operands)"
        wanted = single if len(shapes) == 1 else f"{len(shapes)} arrays of any one shape"
        first_line = next(iter(str(wrong).splitlines()), "")
        raise ValueError(
            f"`activation` must be elementwise, a function of {wanted}, got {_name(function)}, which "
            f"fails on trial, for shape {shapes[0]}: {type(wrong).__name__}: {first_line.rstrip('.')}; {_WAY_OUT}"
        ) from wrong
    if not isinstance(types, jax.ShapeDtypeStruct):
        raise ValueError(
            f"`activation` must return one array, got {_name(function)}, which returns {shown(types)}: return the "
            "array alone"
        )
    return closed


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", None) or repr(function)
