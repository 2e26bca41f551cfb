"""A user's activation: traced at the call, proven to be elementwise, and usable inside a kernel and for derivatives.

The call traces the function several times, since it compares the programs for two shapes. Scalars that the activation
captures become operands of the call. So the fused kernel does not call the function again later, when the variables of
its closure may have changed, and `jax.grad`, `jax.jit` and `jax.vmap` see these scalars. Where XLA runs, as it does for
every function that is not proven to be elementwise, the call applies the function itself, and jax differentiates that.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
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

# An activation is traced on both shapes, and both programs must be equal: a function that computes with the sizes or
# the number of the dimensions of its argument gives two different programs.
_LARGE, _ONE = (2006, 3004), (1, 1, 1)
_WAY_OUT = (
    "use functions of single values, such as jax.nn.gelu, and scalars (vectors have `bias`, `lhs_scale` and "
    '`rhs_scale`, matrices `addend`), apply it to the result of the call, or use implementation="xla"'
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
    entry_jaxpr: ClosedJaxpr | None = dataclasses.field(compare=False, repr=False)

    @property
    def without_function(self) -> Activation:
        """The program alone. A cache may keep it, since it holds nothing that belongs to the caller."""
        return Activation(self.program, None)

    def __call__(self, *values: jax.Array, scalars: Sequence[jax.Array]) -> jax.Array:
        """Applies the function by XLA to arrays of any shape. It has derivatives of any order."""
        assert self.entry_jaxpr is not None
        wide = [jnp.broadcast_to(_wide(x), values[0].shape) for x in scalars]
        return elementwise_map(self.entry_jaxpr, *wide, *values)

    def with_values(self, dtype: DTypeLike) -> Program:
        """The program that also returns its arguments: first these, then the result for them, rounded to `dtype`.

        As `of_cotangent`, for an activation that captures no scalars.
        """

        def values_and_result(*values: jax.Array) -> tuple[jax.Array, ...]:
            return *values, self._of_entry(*(x.astype(dtype).astype(jnp.float32) for x in values))

        return self._program(values_and_result, self.program.arrays, self.program.arrays + 1)

    def of_cotangent(self) -> Program:
        """The program of a derivative: (d, *values, weight) to the cotangents of the values, and two further results.

        With the result h of the activation for these values, the cotangent of h is weight · d. The further results are
        weight · h, and d · h, whose sum is the cotangent of the weight.

        Raises:
          NotElementwise: kernels cannot compute the derivative.
        """

        def derivative(d: jax.Array, *values_and_weight: jax.Array) -> tuple[jax.Array, ...]:
            *values, weight = values_and_weight
            result, pull = jax.vjp(self._of_entry, *values)
            return *pull(weight * d), weight * result, d * result

        return self._program(derivative, self.program.arrays + 2, self.program.arrays + 2)

    def _of_entry(self, *values: jax.Array) -> jax.Array:
        assert self.entry_jaxpr is not None and not self.program.scalars
        return jaxpr_as_fun(self.entry_jaxpr)(*values)[0]

    def _program(self, function: Callable[..., tuple[jax.Array, ...]], arrays: int, results: int) -> Program:
        with typeless():
            return program_of(_trace(function, [()] * arrays, jnp.float32), (), results)


def takes_all(function: object, rhs: object) -> bool:
    """Whether an activation makes one result of those of all right operands, as its number of parameters says.

    It then has as many parameters without a default as there are right operands, two or more. An activation that was
    traced already knows how many arrays it takes.
    """
    count = len(rhs) if isinstance(rhs, (list, tuple)) else 1
    return count > 1 and callable(function) and arrays_of(function)[0] == count


def arrays_of(function: Callable[..., object]) -> tuple[int, float]:
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


def _wide(scalar: jax.Array) -> jax.Array:
    """Returns a scalar in at least 32 bits, since its cotangents, one for each entry, are added in its dtype."""
    is_narrow = jnp.issubdtype(scalar.dtype, jnp.floating) and scalar.dtype.itemsize < 4
    return scalar.astype(jnp.float32) if is_narrow else jnp.asarray(scalar)


def traced(
    function: Callable[..., jax.Array], dtype: DTypeLike = jnp.float32, arrays: int = 1
) -> tuple[Activation, tuple[jax.Array, ...]]:
    """Traces an activation of values of `dtype`; returns it and the values of the scalars that it captures now.

    Raises:
      NotElementwise: it cannot be proven to be elementwise, or cannot be traced on arrays of any shape.
      ValueError: it is no function of `arrays` arrays.
    """
    if not callable(function):
        raise ValueError(
            f"`activation` must be a function of an array, got {shown(function)}: pass a function, e.g. jax.nn.relu"
        )
    least, most = arrays_of(function)
    if not least <= arrays <= most:
        wanted = f"{arrays} arrays" if arrays > 1 else "one array, or of as many as there are right operands,"
        count = least if arrays < least else most
        way_out = "give one that does"
        if arrays == 1 < least:
            way_out = f"split right operands that are joined, jnp.split(weights, {least}, axis=-1), and pass the list"
        raise ValueError(
            f"`activation` must be a function of {wanted} got {_name(function)}, which takes {count}: {way_out}"
        )
    # The traced function is used inside kernels, and outside on values that may vary along any mesh axes. So its own
    # types must say nothing of a mesh.
    with typeless():
        try:
            large, single = (_trace(function, [shape] * arrays, jnp.float32) for shape in (_LARGE, _ONE))
            program = program_of(large, _LARGE)
            if program_of(single, _ONE) != program:
                raise NotElementwise("what it computes depends on the shape of its argument")
        except NotElementwise as why:
            raise NotElementwise(
                f"the fused kernel cannot take this `activation`, {_name(function)}: {why}; {_WAY_OUT}"
            ) from None
        if dtype != jnp.float32:
            single = _trace(function, [_ONE] * arrays, dtype)
        scalars = tuple(large.consts)
        types = [jax.ShapeDtypeStruct((), _wide(x).dtype) for x in scalars]
        entry_jaxpr = jax.make_jaxpr(_of_entry(single))(*types, *[jax.ShapeDtypeStruct((), dtype)] * arrays)
    return Activation(program, entry_jaxpr), scalars


def by_itself(function: Callable[..., jax.Array], batch: tuple[int, ...] = ()) -> Callable[..., jax.Array]:
    """Returns a function that applies one that is not proven to be elementwise, by XLA, to whole results.

    `batch`: the leading dimensions of the results. The values may have them as a single one.
    """

    def apply(*values: jax.Array) -> jax.Array:
        given = [x.reshape(*batch, *x.shape[-2:]) if batch and x.ndim > 2 else x for x in values]
        try:
            result = function(*given)
        except (IndexError, TypeError, ValueError) as wrong:
            if arrays_of(function) != (0, math.inf):
                raise
            raise ValueError(
                f"`activation` must say by its parameters how many arrays it takes, got {_name(function)}, which takes "
                f"any number, and fails for {len(given)} ({type(wrong).__name__}: {wrong}): name them, as in "
                "lambda gate, up: …"
            ) from wrong
        if getattr(result, "shape", None) != given[0].shape or jnp.iscomplexobj(result):
            raise ValueError(
                f"`activation` must return one real array of its argument's shape {given[0].shape}, got "
                f"{_name(function)}, which returns {shown(result)}: apply it to the result of the call"
            )
        return result.reshape(values[0].shape)

    return apply


def _of_entry(single: ClosedJaxpr) -> Callable[..., jax.Array]:
    """Makes a function of the scalars and of one value, [], per array, from the jaxpr on arrays of shape `_ONE`.

    The function keeps none of the jaxpr's constants, which may be tracers.
    """
    jaxpr = single.jaxpr
    dtypes = [const.dtype for const in single.consts]

    def of_entry(*operands: jax.Array) -> jax.Array:
        scalars = [x.astype(dtype) for x, dtype in zip(operands, dtypes, strict=False)]
        values = [x.reshape(_ONE) for x in operands[len(dtypes) :]]
        return jaxpr_as_fun(ClosedJaxpr(jaxpr, scalars))(*values)[0].reshape(())

    return of_entry


def _trace(function: Callable[..., object], shapes: list[tuple[int, ...]], dtype: DTypeLike) -> ClosedJaxpr:
    try:
        # Wrap it in a new lambda: JAX caches traces by function object, and its closure may have changed since.
        return jax.make_jaxpr(lambda *values: function(*values))(*(jax.ShapeDtypeStruct(x, dtype) for x in shapes))
    except Exception as wrong:  # Whatever a user's function may raise for an array of this shape.
        first_line = next(iter(str(wrong).splitlines()), "")
        raise NotElementwise(
            f"it fails on trial, for shape {shapes[0]}: {type(wrong).__name__}: {first_line.rstrip('.')}"
        ) from wrong


def _name(function: Callable[..., jax.Array]) -> str:
    return getattr(function, "__name__", None) or repr(function)
