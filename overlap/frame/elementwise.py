"""Proves that a traced function is elementwise, and makes of it a program that can be applied to any block of values.

`program_of` walks a jaxpr that was traced on f32 arrays. It opens calls, and allows nothing but constants, broadcasts
of scalars, and the primitives that kernels have (`_IN_KERNEL`, `FORMULAS`). Loops, branches, and everything that moves
or combines the entries of an array are refused.

A value is *varying* if it has an entry for each entry of the input. Otherwise it is *uniform*: one number, in whatever
shape. Programs are compared by what they compute, so a program can be part of the cache key of a compiled kernel.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Primitive, Var
from jax.typing import ArrayLike

from overlap.frame.formulas import FORMULAS
from overlap.kernels.varying import axes_of, varying

# Primitives that call a jaxpr, and those that return their operand.
_CALLS = {"jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call"}
_SAME = {"copy", "copy_p", "name"}
# Primitives that rearrange the elements of a value, which changes nothing if the value is uniform.
_SHAPES = {"broadcast_in_dim", "reshape", "squeeze", "expand_dims"}
# Primitives whose operands may be scalars beside arrays. For all others, scalars are broadcast to the input's shape.
_BROADCASTING = {
    "add", "sub", "mul", "div", "max", "min", "and", "or", "xor", "eq", "ne", "lt", "le", "gt", "ge",
}  # fmt: skip
# Primitives that Mosaic GPU lowers for a block in registers, with the same results as XLA's.
_IN_KERNEL = _BROADCASTING | {
    "abs", "clamp", "convert_element_type", "cos", "exp", "exp2", "integer_pow", "log", "log2", "logistic", "neg",
    "round", "rsqrt", "select_n", "sin", "sqrt", "square", "tanh",
}  # fmt: skip
_DTYPES = {"float32", "float16", "bfloat16", "int32", "bool"}
# The longest program that a kernel takes. Each operation becomes code for each of the values that a thread holds.
_MAX_OPS = 256


class NotElementwise(NotImplementedError):
    """A function cannot be proven to be an elementwise function that kernels can compute; the message says why."""


@dataclasses.dataclass(frozen=True)
class Constant:
    """A number of a dtype. It is kept as bytes, so that equal constants compare equal, NaNs too."""

    dtype: str
    data: bytes

    @property
    def value(self) -> ArrayLike:
        """The number as a NumPy scalar."""
        return np.frombuffer(self.data, jnp.dtype(self.dtype))[0]


class ElementwiseOp(NamedTuple):
    """One operation of a program.

    Attributes:
      primitive: the primitive of jax. None: the operation broadcasts a uniform value to the shape of the input.
      params: the primitive's parameters.
      operands: constants, or indices of the program's values.
    """

    primitive: Primitive | None
    params: tuple[tuple[str, Hashable], ...]
    operands: tuple[Constant | int, ...]


@dataclasses.dataclass(frozen=True)
class Program:
    """An elementwise function of arrays of one shape (mostly a single one) and some scalars.

    Its values are numbered: first the arrays, then the scalars, then the result of each operation.

    Attributes:
      arrays: how many arrays it takes.
      scalars: names of the scalars' dtypes.
      ops: the operations, in order.
      outputs: indices of the values that are the results; they are varying.
    """

    arrays: int
    scalars: tuple[str, ...]
    ops: tuple[ElementwiseOp, ...]
    outputs: tuple[int, ...]

    def __call__(self, values: Sequence[jax.Array], scalars: Sequence[jax.Array]) -> jax.Array:
        """Applies a program with one result to arrays of any shape, inside a kernel or outside."""
        (result,) = self.all_results(values, scalars)
        return result

    def all_results(self, values: Sequence[jax.Array], scalars: Sequence[jax.Array] = ()) -> list[jax.Array]:
        """As a call, for a program with any number of results."""
        known = [*values, *scalars]
        axes = axes_of(*values)  # In `jax.shard_map` the types of constants must name the same axes.
        for op in self.ops:
            operands: list[ArrayLike] = [
                known[x] if isinstance(x, int) else varying(x.value, axes) for x in op.operands
            ]
            if op.primitive is None:
                known.append(lax.broadcast_in_dim(operands[0], values[0].shape, ()))
            else:
                known.append(op.primitive.bind(*operands, **dict(op.params)))
        return [known[index] for index in self.outputs]


def program_of(closed: Jaxpr, shape: tuple[int, ...], results: int = 1) -> Program:
    """Makes the program of a function that was traced on f32 arrays of `shape`. Its constants become the scalars.

    `results`: how many results the function must have, each of that shape.

    Raises:
      NotElementwise: the function is not one that is allowed.
    """
    if closed.effects:
        raise NotElementwise(f"it has an effect, {next(iter(closed.effects))}")
    if (shapes := [_type(var).shape for var in closed.outvars]) != [shape] * results:
        raise NotElementwise(f"from shape {shape} it makes {shapes}")
    arrays = len(closed.in_avals)
    scalars = tuple(_scalar_dtype(np.shape(x), x.dtype) for x in closed.consts)
    walk = _Walk(shape, arrays + len(scalars))
    consts = [_Value(arrays + index, False, dtype) for index, dtype in enumerate(scalars)]
    outs = walk.run(closed, [_Value(index, True, "float32") for index in range(arrays)], consts)
    sources = [walk.varying(out).source for out in outs]
    if len(walk.ops) > _MAX_OPS:
        raise NotElementwise(f"it has {len(walk.ops)} operations, and {_MAX_OPS} is the most")
    return Program(arrays, scalars, tuple(walk.ops), tuple(x for x in sources if isinstance(x, int)))


@dataclasses.dataclass(frozen=True)
class _Value:
    """A value of the jaxpr during the walk: a constant or the index of a value of the program, and its type."""

    source: Constant | int
    is_varying: bool
    dtype: str


class _Walk:
    """Walks a jaxpr and collects the operations of its program.

    Args:
      shape: the shape of the input.
      given: how many values there are before the operations.
    """

    def __init__(self, shape: tuple[int, ...], given: int) -> None:
        self.shape = shape
        self.given = given
        self.ops: list[ElementwiseOp] = []

    def run(self, jaxpr: Jaxpr, arguments: Sequence[_Value], consts: Sequence[_Value] | None = None) -> list[_Value]:
        """Returns the values of a jaxpr's results. `consts`: those of its constants, if they are not constants here."""
        consts = [_constant(x, x.dtype) for x in jaxpr.consts] if consts is None else consts
        values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *arguments), strict=True))

        def read(atom: Var | Literal) -> _Value:
            return _constant(atom.val, _type(atom).dtype) if isinstance(atom, Literal) else values[atom]

        for equation in jaxpr.eqns:
            results = self._results(equation, [read(atom) for atom in equation.invars])
            values.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def varying(self, value: _Value) -> _Value:
        """Returns a value with an entry for each entry of the input."""
        return value if value.is_varying else self._add(None, {}, [value], True, value.dtype)

    def _add(
        self, primitive: Primitive | None, params: dict[str, Hashable], operands: list[_Value], varies: bool, dtype: str
    ) -> _Value:
        self.ops.append(ElementwiseOp(primitive, tuple(sorted(params.items())), tuple(x.source for x in operands)))
        return _Value(self.given + len(self.ops) - 1, varies, dtype)

    def _results(self, equation: JaxprEqn, operands: list[_Value]) -> list[_Value]:
        name = equation.primitive.name
        params = dict(equation.params)
        if name in _CALLS:
            return self.run(params["call_jaxpr"] if "call_jaxpr" in params else params["jaxpr"], operands)
        varies = any(x.is_varying for x in operands)
        if name in _SAME or (name in _SHAPES and (not varies or math.prod(self.shape) == 1)):
            return operands[:1]
        if name == "add_any":  # Sums of cotangents.
            return [self._add(lax.add_p, {}, operands, varies, operands[0].dtype)]
        if name not in _IN_KERNEL and name not in FORMULAS:
            raise NotElementwise(f"it uses `{name}`, which kernels lack")
        # `y`: the exponent of `integer_pow`. Kernels select between two values, by a boolean.
        selects = name == "select_n" and (len(operands) > 3 or operands[0].dtype != "bool")
        if params.get("accuracy") is not None or params.get("y", 1) < 0 or selects:
            raise NotElementwise(f"it uses `{name}` with parameters or operands that kernels lack")
        (var,) = equation.outvars
        dtype = _known(_type(var).dtype)
        if name in FORMULAS:
            return self.run(_traced_formula(name, self.shape if varies else (), dtype), operands)
        if name == "convert_element_type":
            if dtype == operands[0].dtype:
                return operands
            # Mosaic GPU converts numbers to booleans by their last bit.
            if dtype == "bool" or ("float" in operands[0].dtype and "float" not in dtype):
                raise NotElementwise(f"the kernel converts no {operands[0].dtype} to {dtype}")
            params = {"new_dtype": jnp.dtype(dtype), "weak_type": False, "sharding": None}
        if varies and name not in _BROADCASTING:
            operands = [self.varying(x) for x in operands]
        return [self._add(equation.primitive, params, operands, varies, dtype)]


def _type(atom: Var | Literal) -> ShapedArray:
    return cast(ShapedArray, atom.aval)


def _traced_formula(name: str, shape: tuple[int, ...], dtype: str) -> Jaxpr:
    """Traces the formula for a primitive of a value of this shape and dtype. It is computed in f32."""
    formula = FORMULAS[name]
    return jax.make_jaxpr(lambda x: formula(x.astype(jnp.float32)).astype(dtype))(jax.ShapeDtypeStruct(shape, dtype))


def _constant(value: ArrayLike, dtype: np.dtype) -> _Value:
    """Returns the value for a literal, or for a constant of an inner jaxpr."""
    name = _scalar_dtype(np.shape(value), dtype)
    return _Value(Constant(name, np.asarray(value).astype(dtype).tobytes()), False, name)


def _scalar_dtype(shape: tuple[int, ...], dtype: np.dtype) -> str:
    """Returns the name of the dtype of a constant of this shape."""
    if shape != ():
        raise NotElementwise(f"it captures an array of shape {shape}")
    return _known(dtype)


def _known(dtype: np.dtype) -> str:
    """Returns the name of a dtype that kernels compute in."""
    if str(dtype) not in _DTYPES:
        raise NotElementwise(f"it computes in {dtype}")
    return str(dtype)
