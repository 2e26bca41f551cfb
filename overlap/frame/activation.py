"""A user's activation: traced once, proven to be elementwise, and fit for the inside of a kernel and for derivatives.

What an activation captures becomes operands of the call, if they are scalars: so the function is not called again
later, when its closure may have changed, and `jax.grad`, `jax.jit` and `jax.vmap` see them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from overlap.frame.arguments import said
from overlap.frame.elementwise import NotElementwise, Program, program_of
from overlap.frame.entries import elementwise_map, typeless

# No tile has this shape, and none is as large: what a function makes of sizes shows in a comparison with one entry.
_LARGE, _ONE = (2003, 3001), (1, 1)
_WAY_OUT = (
    "use functions of single values, such as jax.nn.gelu, and scalars (vectors have `bias`, `lhs_scale` and "
    "`rhs_scale`, matrices `addend`), or apply it to the result of the call"
)


@dataclasses.dataclass(frozen=True)
class Activation:
    """An elementwise function of f32 values and of the scalars that it captures. Equal ones compute the same.

    Attributes:
      program: what the kernel computes.
      of_one: the jaxpr of the function of the scalars and of one value, with its own rules of derivatives.
    """

    program: Program
    of_one: Any = dataclasses.field(compare=False, repr=False)

    @property
    def alone(self) -> Activation:
        """The program without the function: what a cache may keep, since it holds nothing of the caller's."""
        return Activation(self.program, None)

    def __call__(self, values: jax.Array, scalars: Sequence[Any]) -> jax.Array:
        """The function as JAX sees it: of an array of any shape, with derivatives of any order."""
        return elementwise_map(self.of_one, *(jnp.broadcast_to(_wide(x), values.shape) for x in scalars), values)


def _wide(scalar: Any) -> Any:
    """In 32 bits or more: the cotangents of all entries are added in that dtype."""
    is_narrow = jnp.issubdtype(scalar.dtype, jnp.floating) and scalar.dtype.itemsize < 4
    return scalar.astype(jnp.float32) if is_narrow else jnp.asarray(scalar)


def traced(function: Callable[[jax.Array], jax.Array], dtype: Any = jnp.float32) -> tuple[Activation, tuple[Any, ...]]:
    """An activation as it is now, of values of `dtype`, and the scalars that it captures.

    Raises:
      ValueError: it is no function of one array, or cannot be proven to be elementwise.
    """
    if not callable(function):
        raise ValueError(
            f"`activation` must be a function of an array, got {said(function)}: pass a function, e.g. jax.nn.relu"
        )
    # What is traced is used wherever the call's operands vary, and inside a kernel: it has no types of a mesh.
    with typeless():
        large, of_one = (_trace(function, shape, jnp.float32) for shape in (_LARGE, _ONE))
        try:
            program = program_of(large, _LARGE)
            if program_of(of_one, _ONE) != program:
                raise NotElementwise("what it computes depends on the shape of its argument")
        except NotElementwise as why:
            raise ValueError(f"`activation` must be elementwise, got {_name(function)}: {why}; {_WAY_OUT}") from None
        if dtype != jnp.float32:
            of_one = _trace(function, _ONE, dtype)
        scalars = tuple(large.consts[index] for index in program.captured)
        types = [jax.ShapeDtypeStruct((), _wide(x).dtype) for x in scalars]
        alone = jax.make_jaxpr(_of_entry(of_one, program))(*types, jax.ShapeDtypeStruct((), dtype))
    return Activation(program, alone), scalars


def _of_entry(of_one: Any, program: Program) -> Callable[..., jax.Array]:
    """A function of the scalars and of one value, [], which keeps none of the constants: they may be tracers."""
    types = [(np.shape(const), const.dtype) for const in of_one.consts]

    def of_entry(*operands: jax.Array) -> jax.Array:
        *scalars, value = operands
        # The result does not depend on those that are not among the scalars.
        consts: list[Any] = [np.zeros(*shape_and_dtype) for shape_and_dtype in types]
        for index, scalar in zip(program.captured, scalars, strict=True):
            consts[index] = scalar.astype(types[index][1])
        return jaxpr_as_fun(ClosedJaxpr(of_one.jaxpr, consts))(value.reshape(_ONE))[0].reshape(())

    return of_entry


def _trace(function: Callable[[jax.Array], jax.Array], shape: tuple[int, ...], dtype: Any) -> Any:
    try:
        # A function of its own: JAX keeps what it has traced of one that it has seen, whose closure may have changed.
        closed, types = jax.make_jaxpr(lambda values: function(values), return_shape=True)(
            jax.ShapeDtypeStruct(shape, dtype)
        )
    except jax.errors.TracerArrayConversionError as wrong:
        raise ValueError(
            f"`activation` must be a function that JAX can trace, got {_name(function)}, which asks for its argument's "
            "values: use jax.numpy instead of NumPy in it"
        ) from wrong
    except Exception as wrong:
        first_line = next(iter(str(wrong).splitlines()), "")
        raise ValueError(
            f"`activation` must be elementwise, a function of one array of any shape, got {_name(function)}, which "
            f"fails on trial, for shape {shape}: {type(wrong).__name__}: {first_line.rstrip('.')}; {_WAY_OUT}"
        ) from wrong
    if not isinstance(types, jax.ShapeDtypeStruct):
        raise ValueError(
            f"`activation` must return one array, got {_name(function)}, which returns {said(types)}: return the array "
            "alone"
        )
    return closed


def _name(function: Any) -> str:
    return getattr(function, "__name__", None) or repr(function)
