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

from overlap.kernels.arguments import said
from overlap.kernels.elementwise import NotElementwise, Program, program_of

# No tile has this shape, and none is as large: what a function makes of sizes shows in a comparison with one entry.
_LARGE, _ONE = (2003, 3001), (1, 1)
_WAY_OUT = (
    "use functions of single values, such as jax.nn.gelu, and scalars (vectors have `bias` and `scale`, matrices `c`), "
    "or apply it to the result of the call"
)


@dataclasses.dataclass(frozen=True)
class Activation:
    """An elementwise function of f32 values and of the scalars that it captures. Equal ones compute the same.

    Attributes:
      program: what the kernel computes.
      of_one: the jaxpr of the function of its constants and of one entry, [1, 1], with its own rules of derivatives.
      consts: types of the constants.
    """

    program: Program
    of_one: Any = dataclasses.field(compare=False, repr=False)
    consts: tuple[Any, ...] = dataclasses.field(compare=False, repr=False)

    @property
    def alone(self) -> Activation:
        """The program without the function: what a cache may keep, since it holds nothing of the caller's."""
        return Activation(self.program, None, ())

    def __call__(self, values: Any, scalars: Sequence[Any]) -> Any:
        """The function as JAX sees it: of an array of any shape, with its own derivatives of any order."""
        # The result does not depend on those that are not among the scalars.
        consts: list[Any] = [np.zeros(const.shape, const.dtype) for const in self.consts]
        for index, scalar in zip(self.program.captured, scalars, strict=True):
            consts[index] = scalar
        evaluate = jaxpr_as_fun(self.of_one)

        def of_entry(value: jax.Array) -> jax.Array:
            return evaluate(*consts, value.reshape(_ONE))[0].reshape(())

        for _ in range(values.ndim):
            of_entry = jax.vmap(of_entry)
        return of_entry(values)


def traced(function: Callable[[jax.Array], jax.Array]) -> tuple[Activation, tuple[Any, ...]]:
    """An activation as it is now, and the scalars that it captures.

    Raises:
      ValueError: it is no function of one array, or cannot be proven to be elementwise.
    """
    if not callable(function):
        raise ValueError(
            f"`activation` must be a function of an array, got {said(function)}: pass a function, e.g. jax.nn.relu"
        )
    large, of_one = (_trace(function, shape) for shape in (_LARGE, _ONE))
    try:
        program = program_of(large, _LARGE)
        if program_of(of_one, _ONE) != program:
            raise NotElementwise("what it computes depends on the shape of its argument")
    except NotElementwise as why:
        raise ValueError(f"`activation` must be elementwise, got {_name(function)}: {why}; {_WAY_OUT}") from None
    types = tuple(jax.ShapeDtypeStruct(np.shape(const), const.dtype) for const in of_one.consts)
    # The constants, which may be tracers, must not be kept.
    without = jax.make_jaxpr(lambda consts, x: jaxpr_as_fun(ClosedJaxpr(of_one.jaxpr, consts))(x))(
        list(types), jax.ShapeDtypeStruct(_ONE, jnp.float32)
    )
    return Activation(program, without, types), tuple(large.consts[index] for index in program.captured)


def _trace(function: Callable[[jax.Array], jax.Array], shape: tuple[int, ...]) -> Any:
    try:
        # A function of its own: JAX keeps what it has traced of one that it has seen, whose closure may have changed.
        closed, types = jax.make_jaxpr(lambda values: function(values), return_shape=True)(
            jax.ShapeDtypeStruct(shape, jnp.float32)
        )
    except Exception as wrong:
        raise ValueError(
            f"`activation` must be elementwise, a function of one array, got {_name(function)}, which fails for shape "
            f"{shape}: {type(wrong).__name__}: {wrong}"
        ) from wrong
    if not isinstance(types, jax.ShapeDtypeStruct):
        raise ValueError(
            f"`activation` must return one array, got {_name(function)}, which returns {said(types)}: return the array "
            "alone"
        )
    return closed


def _name(function: Any) -> str:
    return getattr(function, "__name__", None) or repr(function)
