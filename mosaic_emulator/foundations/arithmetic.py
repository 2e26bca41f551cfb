"""Computes primitives without side effects, in NumPy. Scalar integers and booleans are plain Python values.

A primitive that is not listed here runs as a compiled `jax.jit` of its equation.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from .equations import ArrayType, Equation

# Computes a value from the operands' values and the equation's parameters, as keywords.
Compute = Callable[..., Any]

# ---- scalars ---------------------------------------------------------------------------------------------------------


def _div(a: int, b: int) -> int:
    if a >= 0 < b:  # the usual case
        return a // b
    if b == 0:
        return -1
    q = abs(a) // abs(b)
    return q if (a >= 0) == (b >= 0) else -q


def _rem(a: int, b: int) -> int:
    if a >= 0 < b:
        return a % b
    return a if b == 0 else a - _div(a, b) * b


_SCALAR: dict[str, Compute] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": _div, "rem": _rem, "max": max, "min": min,
    "and": operator.and_, "or": operator.or_, "xor": operator.xor, "neg": operator.neg, "abs": abs,
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
    "sign": lambda x: (x > 0) - (x < 0), "clamp": lambda low, x, high: min(max(x, low), high),
    "shift_left": lambda a, b: a << b if 0 <= b < 64 else 0, "shift_right_arithmetic": lambda a, b: a >> min(b, 63),
    "select_n": lambda which, *cases: cases[int(which)], "add_any": operator.add, "square": lambda x: x * x,
    "population_count": lambda x: (x & 0xFFFFFFFF).bit_count(),
}  # fmt: skip

_IDENTITY = {
    "convert_element_type", "copy", "copy_p", "stop_gradient", "broadcast_in_dim", "reshape",
    "squeeze", "multiple_of", "optimization_barrier", "pbroadcast", "pvary", "reduce_sum", "reduce_max", "reduce_min",
    "transpose",
}  # fmt: skip


def is_plain(aval: ArrayType) -> bool:
    """Whether the emulator keeps values of this type as Python ints and bools."""
    return getattr(aval, "shape", None) == () and getattr(aval, "dtype", None) is not None and _kind(aval) in "iub"


def _kind(aval: ArrayType) -> str:
    try:
        dtype = np.dtype(aval.dtype)
    except TypeError:
        return "?"
    return dtype.kind if dtype.name not in ("int4", "uint4", "int2", "uint2") else "?"


def _wrapper(dtype: npt.DTypeLike) -> Callable[[int], int]:
    dtype = np.dtype(dtype)
    if dtype.kind == "b":
        return bool
    info = np.iinfo(dtype)
    low, high, bits = int(info.min), int(info.max), info.bits

    def wrap(x: int) -> int:
        x = int(x)
        return x if low <= x <= high else (x - low) % (1 << bits) + low

    return wrap


def _scalar(eqn: Equation) -> Compute | None:
    name = eqn.primitive.name
    if len(eqn.outvars) != 1 or not all(is_plain(v.aval) for v in (*eqn.invars, *eqn.outvars)):
        return None
    wrap = _wrapper(eqn.outvars[0].aval.dtype)
    if name in _IDENTITY and len(eqn.invars) == 1:
        return wrap
    if name == "not":
        return operator.not_ if eqn.outvars[0].aval.dtype == np.bool_ else lambda x: wrap(~x)
    if name == "integer_pow":
        power = eqn.params["y"]
        return lambda x: wrap(x**power)
    if name == "shift_right_logical":
        mask = (1 << np.dtype(eqn.outvars[0].aval.dtype).itemsize * 8) - 1
        return lambda a, b: wrap((a & mask) >> min(b, 63))
    function = _SCALAR.get(name)
    if function is None:
        return None
    if name in ("eq", "ne", "lt", "le", "gt", "ge", "max", "min", "clamp", "select_n", "rem"):
        return function  # The result cannot leave the range of the operands.
    if len(eqn.invars) == 2:  # A call with a list of arguments takes twice the time.
        return lambda a, b: wrap(function(a, b))
    return lambda *args: wrap(function(*args))


# ---- arrays ----------------------------------------------------------------------------------------------------------


def _broadcast_in_dim(x: npt.ArrayLike, shape: Sequence[int], broadcast_dimensions: Sequence[int]) -> np.ndarray:
    expanded = [1] * len(shape)
    for axis, size in zip(broadcast_dimensions, np.shape(x)):
        expanded[axis] = size
    return np.broadcast_to(np.reshape(x, expanded), shape)


def _iota(dtype: npt.DTypeLike, shape: Sequence[int], dimension: int) -> np.ndarray:
    return _broadcast_in_dim(np.arange(shape[dimension], dtype=dtype), shape, (dimension,))


def _select(which: npt.ArrayLike, *cases: np.ndarray) -> np.ndarray:
    if len(cases) == 2:
        return np.where(which, cases[1], cases[0])
    return np.choose(np.broadcast_to(which, np.shape(cases[0])), cases)


def _reduce(function: Compute) -> Compute:
    return lambda x, axes, **_: function(x, axis=tuple(axes))


def _no_params(function: Compute) -> Compute:
    return lambda *args, **_: function(*args)


def _in_f64(function: Compute) -> Compute:
    return lambda x: function(np.asarray(x, np.float64)).astype(x.dtype)


_SAME_NAME = ["add", "log1p", "expm1", "tanh", "sqrt", "square", "sin", "cos", "floor", "ceil", "sign", "abs"]
_ELEMENTWISE: dict[str, Compute] = {
    **{name: getattr(np, name) for name in _SAME_NAME},
    # NumPy's own for f32 are off by up to 4 ulp, CUDA's by 1; and CUDA's `exp2` of an integer is exact.
    **{name: _in_f64(getattr(np, name)) for name in ("exp", "exp2", "log")},
    "sub": np.subtract, "mul": np.multiply, "neg": np.negative, "max": np.maximum, "min": np.minimum, "pow": np.power,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert,
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "add_any": np.add, "is_finite": np.isfinite, "rsqrt": lambda x: 1 / np.sqrt(x),
    "logistic": lambda x: 1 / (1 + np.exp(-x)), "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "copy": lambda x: x, "copy_p": lambda x: x, "stop_gradient": lambda x: x, "multiple_of": lambda x: x,
    "pvary": lambda x: x,
}  # fmt: skip
_ARRAY: dict[str, Compute] = {
    **{name: _no_params(function) for name, function in _ELEMENTWISE.items()},
    "convert_element_type": lambda x, new_dtype, **_: np.asarray(x).astype(new_dtype),
    "integer_pow": lambda x, y: np.asarray(x) ** y,
    "broadcast_in_dim": lambda x, shape, broadcast_dimensions, **_: _broadcast_in_dim(x, shape, broadcast_dimensions),
    "reshape": lambda x, new_sizes, **_: np.reshape(x, new_sizes),
    "squeeze": lambda x, dimensions: np.squeeze(x, tuple(dimensions)),
    "expand_dims": lambda x, dimensions: np.expand_dims(x, tuple(dimensions)),
    "transpose": lambda x, permutation: np.transpose(x, permutation),
    "concatenate": lambda *xs, dimension: np.concatenate(xs, dimension),
    "iota": lambda dtype, shape, dimension, **_: _iota(dtype, shape, dimension),
    "select_n": _select,
    "slice": lambda x, start_indices, limit_indices, strides: x[
        tuple(slice(a, b, s) for a, b, s in zip(start_indices, limit_indices, strides or [1] * x.ndim))
    ],
    "reduce_sum": _reduce(np.sum), "reduce_max": _reduce(np.max), "reduce_min": _reduce(np.min),
    "reduce_prod": _reduce(np.prod), "reduce_and": _reduce(np.all), "reduce_or": _reduce(np.any),
    "mosaic_gpu_reduce_sum": _reduce(np.sum), "mosaic_gpu_reduce_max": _reduce(np.max),
    "mosaic_gpu_reduce_min": _reduce(np.min), "mosaic_gpu_reduce_prod": _reduce(np.prod),
    "mma": lambda acc, a, b: acc + a.astype(acc.dtype) @ b.astype(acc.dtype),
}  # fmt: skip
_ARRAY["broadcasted_iota"] = _ARRAY["iota"]


# ---- products --------------------------------------------------------------------------------------------------------

# OpenBLAS starts threads above this many multiplications. They spin while they wait, which on a machine with few, busy
# cores makes a product of 20 us take milliseconds.
_SINGLE_THREADED = 1 << 18


def matmul(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns a @ b in the dtype of `a`, computed by blocks of rows that are small enough for BLAS to use one thread.

    Floating-point products are summed in f64. In f32, BLAS on some CPUs rounds a row differently at different places of
    a block. A tensor core does not do that, and users compare results bit by bit.
    """
    dtype, (rows, k) = a.dtype, a.shape
    if dtype.kind == "f":
        a, b = a.astype(np.float64), b.astype(np.float64)
    block = max(_SINGLE_THREADED // max(k * b.shape[1], 1), 1)
    while rows % block:
        block -= 1
    with np.errstate(all="ignore"):
        return (a.reshape(rows // block, block, k) @ b).reshape(rows, b.shape[1]).astype(dtype)


# ---- equations -------------------------------------------------------------------------------------------------------


def is_known(eqn: Equation) -> bool:
    """Whether an equation computes a value only, although jax may give it an effect, such as the use of a mesh axis."""
    return eqn.primitive.name in _ARRAY or eqn.primitive.name in _IDENTITY


def _through_jax(eqn: Equation) -> Compute:
    primitive, params = eqn.primitive, eqn.params
    compiled = jax.jit(lambda *args: primitive.bind(*args, **params))

    def run(*args: npt.ArrayLike) -> np.ndarray | list[np.ndarray]:
        try:
            out = compiled(*args)
        except NotImplementedError as reason:  # jax has no rule for the primitive on the CPU.
            raise NotImplementedError(f"the primitive {primitive.name} is not emulated") from reason
        return [np.asarray(x) for x in out] if primitive.multiple_results else np.asarray(out)

    return run


def implementation(eqn: Equation) -> tuple[Compute, bool]:
    """Returns (a function that computes an equation without side effects, whether it returns a list)."""
    scalar = _scalar(eqn)
    if scalar is not None:
        return scalar, False
    multiple = eqn.primitive.multiple_results
    in_dtypes = [v.aval.dtype for v in eqn.invars]
    outs = [(v.aval, is_plain(v.aval)) for v in eqn.outvars]
    function = _ARRAY.get(eqn.primitive.name)
    params = eqn.params
    name = eqn.primitive.name
    if name == "optimization_barrier":
        return lambda *args: list(args), True
    if name == "div" and np.dtype(in_dtypes[0]).kind not in "iub":
        function = _no_params(np.divide)
    slow = _through_jax(eqn)

    def finish(value: npt.ArrayLike, aval: ArrayType, plain: bool) -> object:
        if plain:
            return np.asarray(value).item()
        return np.asarray(value, aval.dtype)

    def run(*args: npt.ArrayLike) -> object:
        args = tuple(np.asarray(a, d) if type(a) in (int, bool) else a for a, d in zip(args, in_dtypes))
        if function is not None:
            try:
                with np.errstate(all="ignore"):
                    return finish(function(*args, **params), *outs[0])
            except NotImplementedError:
                pass
        out = slow(*args)
        if multiple:
            return [finish(v, *o) for v, o in zip(out, outs)]
        return finish(out, *outs[0])

    return run, multiple and function is None
