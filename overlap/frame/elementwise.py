"""Proves that a traced function is elementwise, and makes of it a program that can be applied to any block of values.

`program_of` walks a jaxpr that was traced on one abstract array of f32 values. It inlines calls, unrolls loops with a
known number of rounds, and turns branches into selections. The result is a `Program`: a list of primitives. Each of
them computes every entry of its result from the same entry of its operands, or from scalars.

A value is *varying* if it has an entry for each entry of the input. Otherwise it is *uniform*: one number, in whatever
shape. Only elementwise primitives may take varying values. The result of any other primitive with a varying operand
cannot be proven to be elementwise. It is marked as refused, and the function is refused if its result depends on it.

Programs are compared by what they compute, so a program can be part of the cache key of a compiled kernel. Numbers of
64 bits are computed in 32 bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal, Primitive

from overlap.frame.formulas import formula

# Primitives that call a jaxpr.
_CALLS = {"jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call"}
# Primitives that return their operand, and those that only rearrange or select its elements.
_SAME = {"copy", "copy_p", "stop_gradient", "optimization_barrier", "name", "pvary", "pbroadcast"}
_SHAPES = {"broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose", "slice", "rev"}
# Primitives whose operands may be scalars beside arrays. For all others, scalars are broadcast to the input's shape.
_BROADCASTING = {
    "add", "sub", "mul", "div", "rem", "pow", "max", "min", "and", "or", "xor", "eq", "ne", "lt", "le", "gt", "ge",
}  # fmt: skip
# Primitives that Mosaic GPU lowers for a block in registers, with the same results as XLA's. Others have a `formula`.
_IN_KERNEL = _BROADCASTING - {"pow", "rem"} | {
    "abs", "clamp", "convert_element_type", "cos", "exp", "exp2", "integer_pow", "log", "log2", "logistic", "neg",
    "round", "rsqrt", "select_n", "sin", "sqrt", "square", "tanh",
}  # fmt: skip
_ELEMENTWISE = _IN_KERNEL | {
    "acos", "acosh", "add_any", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i0e", "bessel_i1e",
    "bitcast_convert_type", "cbrt", "ceil", "clz", "complex", "conj", "cosh", "digamma", "erf", "erf_inv", "erfc",
    "expm1", "floor", "igamma", "igammac", "imag", "is_finite", "lgamma", "log1p", "nextafter", "not",
    "one_minus_square", "polygamma", "population_count", "pow", "real", "reduce_precision",
    "regularized_incomplete_beta", "rem", "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign",
    "sinh", "tan", "zeta",
}  # fmt: skip
_KERNEL_DTYPES = {"float32", "float16", "bfloat16", "int32", "bool"}
_NARROW = {"float64": "float32", "int64": "int32", "uint64": "uint32", "complex128": "complex64"}
# The longest program that a kernel takes. Each operation becomes code for each of the values that a thread holds.
MAX_OPS = 256


class NotElementwise(Exception):
    """A function cannot be proven to be elementwise; the message says why."""


@dataclasses.dataclass(frozen=True)
class Constant:
    """A number of a dtype. It is kept as bytes, so that equal constants compare equal, NaNs too."""

    dtype: str
    data: bytes

    @property
    def value(self) -> Any:
        """The number as a NumPy scalar."""
        return np.frombuffer(self.data, jnp.dtype(self.dtype))[0]


@dataclasses.dataclass(frozen=True)
class ElementwiseOp:
    """One operation of a program.

    Attributes:
      primitive: the primitive of jax. None: the operation broadcasts a uniform value to the shape of the input.
      params: the primitive's parameters.
      operands: constants, or indices of the program's values.
      dtype: name of the result's dtype.
    """

    primitive: Primitive | None
    params: tuple[tuple[str, Any], ...]
    operands: tuple[Constant | int, ...]
    dtype: str


@dataclasses.dataclass(frozen=True)
class Program:
    """An elementwise function of arrays of one shape (mostly a single one) and some scalars.

    Its values are numbered: first the arrays, then the scalars, then the result of each operation.

    Attributes:
      captured: for each scalar, its index among the constants of the traced function.
      scalars: names of the scalars' dtypes.
      ops: the operations, in order.
      output: index of the value that is the result; it is varying.
      dtype: name of the result's dtype.
      why_not_unrolled: why `ops` is not the whole function: a loop that is too long, or of unknown length. A kernel
        then cannot take the program.
      arrays: how many arrays it takes.
    """

    captured: tuple[int, ...]
    scalars: tuple[str, ...]
    ops: tuple[ElementwiseOp, ...]
    output: int
    dtype: str
    why_not_unrolled: str | None = None
    arrays: int = 1

    def __call__(self, values: Sequence[Any], scalars: Sequence[Any]) -> Any:
        """Applies the program to arrays of any shape, inside a kernel or outside."""
        known: list[Any] = [*values, *scalars]
        for op in self.ops:
            operands = [known[x] if isinstance(x, int) else x.value for x in op.operands]
            if op.primitive is None:
                known.append(lax.broadcast_in_dim(operands[0], values[0].shape, ()))
            else:
                known.append(op.primitive.bind(*operands, **dict(op.params)))
        return known[self.output]

    @property
    def why_not_in_kernel(self) -> str | None:
        """Why a kernel cannot take this program; None if it can."""
        if self.why_not_unrolled is not None:
            return self.why_not_unrolled
        if (count := sum(op.primitive is not None for op in self.ops)) > MAX_OPS:
            return f"it has {count} operations, and {MAX_OPS} is the most"
        for dtype in (*self.scalars, *(op.dtype for op in self.ops)):
            if dtype not in _KERNEL_DTYPES:
                return f"it computes in {dtype}"
        known = [*["float32"] * self.arrays, *self.scalars]
        for op in self.ops:
            name = "broadcast" if op.primitive is None else op.primitive.name
            operands = [known[x] if isinstance(x, int) else x.dtype for x in op.operands]
            if op.primitive is not None and (name not in _IN_KERNEL or dict(op.params).get("accuracy") is not None):
                return f"the kernel has no {name!r}"
            if name == "convert_element_type" and "float" in operands[0] and "float" not in op.dtype:
                return f"the kernel converts no {operands[0]} to {op.dtype}"
            known.append(op.dtype)
        return None


def program_of(closed: Any, shape: tuple[int, ...]) -> Program:
    """Makes the program of a function that was traced on f32 arrays of `shape`. Its constants become the scalars.

    Raises:
      NotElementwise: the function cannot be proven to be elementwise.
    """
    if closed.effects:
        raise NotElementwise(f"it has an effect, {next(iter(closed.effects))}")
    dtypes = [_narrow(getattr(const, "dtype", np.result_type(type(const)))) for const in closed.consts]
    walk = _Walk(shape, dtypes, len(closed.in_avals))
    consts = [_captured(walk.arrays + index, *x) for index, x in enumerate(zip(closed.consts, dtypes, strict=True))]
    arrays = [_Value(index, True, "float32") for index in range(walk.arrays)]
    outs = walk.run(getattr(closed, "jaxpr", closed), [*consts, *arrays])
    avals = closed.out_avals
    if len(outs) != 1 or tuple(avals[0].shape) != shape:
        raise NotElementwise(f"from shape {shape} it makes {[tuple(aval.shape) for aval in avals]}")
    (out,) = outs
    if out.refused:
        raise NotElementwise(out.refused)
    if "complex" in out.dtype:
        raise NotElementwise("its result is complex")
    if not out.varying:
        out = walk.add(None, {}, [out], True, out.dtype)
    assert isinstance(out.source, int)
    return walk.program(out.source)


def _captured(index: int, value: Any, dtype: str) -> _Value:
    """The value for a constant that the function captures; `index`: the number of the constant among the values."""
    if (shape := tuple(np.shape(value))) != ():
        return _Value(0, False, "", f"it captures an array of shape {shape}")
    if jnp.issubdtype(value.dtype, jax.dtypes.extended):
        return _Value(0, False, "", f"it captures a {dtype}")
    return _Value(index, False, dtype)


def _narrow(dtype: Any) -> str:
    """Returns the name of a dtype, with 32 bits instead of 64."""
    name = str(dtype)
    return _NARROW.get(name, name)


@dataclasses.dataclass(frozen=True)
class _Value:
    """A value of the jaxpr during the walk.

    Attributes:
      source: a constant, or the index of a value of the program.
      varying: whether it has an entry for each entry of the input.
      dtype: name of its dtype.
      refused: why the function's result must not depend on this value; None if it may.
    """

    source: Constant | int
    varying: bool
    dtype: str
    refused: str | None = None


class _Walk:
    """Walks a jaxpr and collects the operations of its program.

    Args:
      shape: the shape of the input.
      scalars: names of the dtypes of the captured constants.
      arrays: how many arrays the function takes.
    """

    def __init__(self, shape: tuple[int, ...], scalars: list[str], arrays: int) -> None:
        self.shape, self.scalars, self.arrays, self.ops = shape, scalars, arrays, []
        self.why_not_unrolled: str | None = None

    def program(self, output: int) -> Program:
        """The program whose result is the value `output`, without the scalars and operations that it does not need."""
        arrays = self.arrays
        first = arrays + len(self.scalars)
        needed = {*range(arrays), output}
        for index in range(len(self.ops) - 1, -1, -1):
            if first + index in needed:
                needed.update(x for x in self.ops[index].operands if isinstance(x, int))
        place = {old: new for new, old in enumerate(sorted(needed))}
        ops = tuple(
            dataclasses.replace(op, operands=tuple(place[x] if isinstance(x, int) else x for x in op.operands))
            for index, op in enumerate(self.ops, start=first)
            if index in needed
        )
        captured = tuple(x - arrays for x in sorted(needed) if arrays <= x < first)
        dtype = "float32" if output < arrays else self.ops[output - first].dtype
        scalars = tuple(self.scalars[x] for x in captured)
        return Program(captured, scalars, ops, place[output], dtype, self.why_not_unrolled, arrays)

    def add(
        self, primitive: Primitive | None, params: dict[str, Any], operands: list[_Value], varying: bool, dtype: str
    ) -> _Value:
        """Adds an operation, and returns its result."""
        name = primitive.name if primitive is not None else ""
        if varying and primitive is not None and name not in _BROADCASTING:
            operands = [x if x.varying else self.add(None, {}, [x], True, x.dtype) for x in operands]
        items = tuple(sorted((key, _hashable(value)) for key, value in params.items()))
        self.ops.append(ElementwiseOp(primitive, items, tuple(x.source for x in operands), dtype))
        return _Value(self.arrays + len(self.scalars) + len(self.ops) - 1, varying, dtype)

    def run(self, jaxpr: Any, arguments: list[_Value]) -> list[_Value]:
        """Returns the values of a jaxpr's results."""
        values = dict(zip((*jaxpr.constvars, *jaxpr.invars), arguments, strict=True))

        def read(atom: Any) -> _Value:
            aval: Any = atom.aval
            return _constant(atom.val, aval.dtype) if isinstance(atom, Literal) else values[atom]

        for equation in jaxpr.eqns:
            results = self._equation(equation, [read(atom) for atom in equation.invars])
            values.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _inner(self, jaxpr: Any, operands: list[_Value]) -> list[_Value]:
        consts = getattr(jaxpr, "consts", ())
        return self.run(getattr(jaxpr, "jaxpr", jaxpr), [*map(_constant, consts), *operands])

    def _equation(self, equation: Any, operands: list[_Value]) -> list[_Value]:
        name, params = equation.primitive.name, equation.params
        if name in _CALLS:
            return self._inner(params["call_jaxpr"] if "call_jaxpr" in params else params["jaxpr"], operands)
        if name in _SAME:
            return operands
        if name == "scan":
            return self._scan(equation, operands)
        if name == "while":
            return self._while(equation, operands)
        if name == "cond":
            return self._cond(equation, operands)
        avals: list[Any] = [var.aval for var in equation.outvars]
        aval, *others = avals
        refused = next((x.refused for x in operands if x.refused), None)
        varying = any(x.varying for x in operands)
        shape = tuple(getattr(aval, "shape", ()))
        if not refused and name in _SHAPES and not others:
            identity = "broadcast_dimensions" not in params or (
                tuple(params["broadcast_dimensions"]) == tuple(range(len(shape)))
            )
            same = shape == self.shape == equation.invars[0].aval.shape and name not in ("transpose", "rev")
            if not varying or (same and identity):
                return [operands[0]]
        if not refused and (others or name not in _ELEMENTWISE):
            refused = f"it uses {name!r}, which is not elementwise" if varying else f"it uses {name!r}"
        if not refused and varying and shape != self.shape:
            refused = f"{name!r} makes shape {shape} of {self.shape}"
        if refused:
            return [_Value(0, varying, "", refused) for _ in equation.outvars]
        return [self._elementwise(equation, operands, varying, _narrow(aval.dtype))]

    def _elementwise(self, equation: Any, operands: list[_Value], varying: bool, dtype: str) -> _Value:
        name, params = equation.primitive.name, dict(equation.params)
        types = [jax.ShapeDtypeStruct(self.shape if x.varying else (), x.dtype) for x in operands]
        if (rewritten := formula(name, params, types)) is not None:
            return self._inner(rewritten, operands)[0]
        if name == "convert_element_type":
            if operands[0].dtype == dtype:
                return operands[0]
            params |= {"new_dtype": jnp.dtype(dtype), "weak_type": False, "sharding": None}
        if name == "select_n":
            return self._select(operands[0], operands[1:], varying, dtype)
        return self.add(equation.primitive, params, operands, varying, dtype)

    def _select(self, which: _Value, cases: list[_Value], varying: bool, dtype: str) -> _Value:
        """The case with the index `which`, by selections between two values: a kernel has no other selection."""
        chosen = cases[0]
        for index, case in enumerate(cases[1:], start=1):
            varies = which.varying or case.varying or chosen.varying
            at_least = which
            if which.dtype != "bool":
                least = _constant(np.asarray(index, which.dtype))
                at_least = self.add(lax.ge_p, {}, [which, least], which.varying, "bool")
            chosen = self.add(lax.select_n_p, {}, [at_least, chosen, case], varies, dtype)
        if varying and not chosen.varying:
            chosen = self.add(None, {}, [chosen], True, dtype)
        return chosen

    def _cond(self, equation: Any, operands: list[_Value]) -> list[_Value]:
        """Computes all branches, and selects each result."""
        which, *given = operands
        if which.refused or which.varying:
            reason = which.refused or "it branches on an array"
            return [_Value(0, False, "", reason) for _ in equation.outvars]
        branches = [self._inner(branch, given) for branch in equation.params["branches"]]
        results = []
        for cases in zip(*branches, strict=True):
            refused = next((case for case in cases if case.refused), None)
            varying = any(case.varying for case in cases)
            results.append(refused or self._select(which, list(cases), varying, cases[0].dtype))
        return results

    def _scan(self, equation: Any, operands: list[_Value]) -> list[_Value]:
        """Unrolls the rounds. Values that the loop scans over or stacks are refused."""
        body, length = equation.params["jaxpr"], equation.params["length"]
        of_body, of_scan = [var.aval.shape for var in body.outvars], [var.aval.shape for var in equation.outvars]
        carried = sum(inner == outer for inner, outer in zip(of_body, of_scan, strict=True))
        slices = [
            inner.aval.shape != outer.aval.shape for inner, outer in zip(body.invars, equation.invars, strict=True)
        ]
        inputs = [
            _Value(0, False, "", "it scans over an array") if is_slice else x
            for x, is_slice in zip(operands, slices, strict=True)
        ]
        first = len(inputs) - sum(slices) - carried
        consts, carry, rest = inputs[:first], inputs[first : first + carried], inputs[first + carried :]
        for count in range(length):
            if len(self.ops) > MAX_OPS:
                # Stop here: the rounds so far have shown whether a round is elementwise.
                self.why_not_unrolled = f"its loop of {length} rounds is too long, after {count} of them"
                break
            outs = self._inner(body, [*consts, *carry, *rest])
            carry = self._carried(outs[:carried], carry)
        stacked = [_Value(0, False, "", "it collects the values of a loop")] * (len(of_scan) - carried)
        return [*carry, *stacked]

    def _while(self, equation: Any, operands: list[_Value]) -> list[_Value]:
        """Walks one round, which shows whether the loop is elementwise. The number of rounds is not known here."""
        params = equation.params
        of_condition, of_body = params["cond_nconsts"], params["body_nconsts"]
        carry = operands[of_condition + of_body :]
        self.why_not_unrolled = "it has a loop whose number of rounds is not known"
        carry = self._carried(
            self._inner(params["body_jaxpr"], [*operands[of_condition : of_condition + of_body], *carry]), carry
        )
        (goes_on,) = self._inner(params["cond_jaxpr"], [*operands[:of_condition], *carry])
        refused = goes_on.refused or ("its loop ends by an array" if goes_on.varying else None)
        return [dataclasses.replace(x, refused=refused) for x in carry] if refused else carry

    def _carried(self, outs: list[_Value], before: list[_Value]) -> list[_Value]:
        """The values that a round of a loop hands to the next. If one of them is refused, all are."""
        refused = next((x.refused for x in outs if x.refused), None)
        return [
            dataclasses.replace(x, varying=x.varying or old.varying, refused=refused) if refused else x
            for x, old in zip(outs, before, strict=True)
        ]


def _constant(value: Any, dtype: Any = None) -> _Value:
    """Returns the value for a literal, or for a constant of an inner jaxpr."""
    if (shape := tuple(np.shape(value))) != ():
        return _Value(0, False, "", f"it captures an array of shape {shape}")
    name = _narrow(np.asarray(value).dtype if dtype is None else dtype)
    return _Value(Constant(name, np.asarray(value).astype(name).tobytes()), False, name)


def _hashable(value: Any) -> Any:
    """Returns a parameter of a primitive in a form that can be compared and hashed."""
    if isinstance(value, (np.dtype, type(None), str, int, float, tuple)):
        return value
    return value if value.__hash__ is not None else repr(value)
