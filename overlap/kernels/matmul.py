"""`matmul`: the mainloop alone, on one GPU: its checks, and the choice of the implementation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from overlap.kernels import differentiable, dispatch, product
from overlap.kernels.activation import traced
from overlap.kernels.config import FLOAT8, Config
from overlap.kernels.dispatch import Explanation
from overlap.kernels.hopper import PLAIN, Forms
from overlap.kernels.product import Operands, Plan


def check_operands(lhs: Any, rhs: Any, preferred_element_type: Any, forms: Forms = PLAIN) -> jnp.dtype:
    """The checks that every product shares, on its last two dimensions; returns the output's dtype.

    Raises:
      ValueError: wrong ranks, dtypes or sizes.
    """
    for name, array in (("lhs", lhs), ("rhs", rhs)):
        if not hasattr(array, "shape") or not hasattr(array, "dtype"):
            raise ValueError(f"`{name}` must be an array, got {type(array).__name__}")
        if len(array.shape) < 2:
            raise ValueError(
                f"`{name}` must have 2 dimensions or more, got {len(array.shape)} (shape {tuple(array.shape)})"
            )
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"`lhs` and `rhs` must be floating-point, got {array.dtype}")
    if lhs.dtype != rhs.dtype and not (lhs.dtype in FLOAT8 and rhs.dtype in FLOAT8):
        raise ValueError(f"`lhs` and `rhs` must have the same dtype, got {lhs.dtype} and {rhs.dtype}: cast one of them")
    lhs_k = lhs.shape[-2 if forms.transpose_lhs else -1]
    rhs_k = rhs.shape[-1 if forms.transpose_rhs else -2]
    if lhs_k != rhs_k:
        raise ValueError(
            f"`lhs` and `rhs` must agree in the contraction dimension, got k={lhs_k} in lhs {tuple(lhs.shape)} and "
            f"k={rhs_k} in rhs {tuple(rhs.shape)}"
        )
    if preferred_element_type is not None:
        return jnp.dtype(preferred_element_type)
    return jnp.dtype(jnp.bfloat16) if lhs.dtype in FLOAT8 else jnp.dtype(lhs.dtype)


def require_unchecked_vma(*operands: Any) -> None:
    """Raises NotImplementedError if an operand's type says along which mesh axes it varies (`check_vma=True`).

    Mosaic GPU's split of a warpgroup into warps rejects such references.
    """
    for operand in operands:
        manual = getattr(jax.typeof(operand), "manual_axis_type", None) if isinstance(operand, jax.Array) else None
        if manual is not None and manual.varying:
            raise NotImplementedError(
                "the fused kernel needs `check_vma=False` in the enclosing jax.shard_map (default: True): set it, "
                'or use implementation="xla"'
            )


@dataclasses.dataclass(frozen=True)
class _Call:
    """A checked call: operands with at most one batch dimension, and what leads back to the caller's shape."""

    operands: Operands
    forms: Forms
    out_dtype: Any
    activation: Any
    batch: tuple[int, ...]

    def restore(self, out: jax.Array) -> jax.Array:
        return out.reshape(*self.batch, *out.shape[-2:])


def _normalize(
    lhs: Any,
    rhs: Any,
    *,
    c: Any = None,
    bias: Any = None,
    activation: Any = None,
    scale: Any = None,
    preferred_element_type: Any = None,
    transpose_lhs: bool = False,
    transpose_rhs: bool = False,
) -> _Call:
    """Checks shapes and brings the operands into the kernel's form; arrays may be `jax.ShapeDtypeStruct`s."""
    lhs, rhs, c, bias = map(_on_device, (lhs, rhs, c, bias))
    forms = Forms(transpose_lhs, transpose_rhs)
    out_dtype = check_operands(lhs, rhs, preferred_element_type, forms)
    for name, array in (("c", c), ("bias", bias)):
        if array is not None and not hasattr(array, "shape"):
            raise ValueError(f"`{name}` must be an array, got {type(array).__name__}")
    batches = [tuple(x.shape[:-2]) for x in (lhs, rhs) if len(x.shape) > 2]
    if len(set(batches)) > 1:
        raise ValueError(
            "`lhs` and `rhs` must have the same leading dimensions, or one of them none, got "
            f"{batches[0]} and {batches[1]}: broadcast one of them"
        )
    batch = batches[0] if batches else ()
    _, m, n, _ = product.sizes(Operands(_flat(lhs), _flat(rhs)), forms)
    if c is not None and tuple(c.shape) not in {(m, n), (*batch, m, n)}:
        raise ValueError(f"`c` must have the shape of the result, {(*batch, m, n)}, or {(m, n)}, got {tuple(c.shape)}")
    if bias is not None and tuple(bias.shape) != (n,):
        raise ValueError(f"`bias` must have shape ({n},), one value per column, got {tuple(bias.shape)}")
    if not (activation is None or callable(activation)):
        raise ValueError(f"`activation` must be a function of an array, got {activation!r}")
    row_scale, column_scale = _scales(scale, m, n)
    vector = lambda x: None if x is None else x.astype(jnp.float32) if isinstance(x, jax.Array) else x  # noqa: E731
    addend = None if c is None else _flat(c.astype(out_dtype) if isinstance(c, jax.Array) else c)
    operands = Operands(_flat(lhs), _flat(rhs), addend, vector(bias), row_scale, column_scale)
    return _Call(operands, forms, out_dtype, activation, batch)


def _on_device(x: Any) -> Any:
    return jnp.asarray(x) if isinstance(x, np.ndarray) else x


def _flat(x: Any) -> Any:
    """With at most one batch dimension."""
    if len(x.shape) <= 3:
        return x
    shape = (-1, *x.shape[-2:])
    return x.reshape(shape) if isinstance(x, jax.Array) else jax.eval_shape(lambda y: y.reshape(shape), x)


def _scales(scale: Any, m: int, n: int) -> tuple[Any, Any]:
    """Row scale [m] and column scale [n] in f32 of what the caller gave: one array, or a pair to be multiplied."""
    row, column = None, None
    for part in scale if isinstance(scale, tuple) else () if scale is None else (scale,):
        part = jnp.asarray(part, jnp.float32)
        if part.shape == (m, 1):
            row = part[:, 0] if row is None else row * part[:, 0]
        elif part.shape in {(), (1,), (1, 1), (n,), (1, n)}:
            part = jnp.broadcast_to(part.reshape(-1), (n,))
            column = part if column is None else column * part
        else:
            raise ValueError(
                f"`scale` must be a scalar, ({m}, 1) per row, ({n},) or (1, {n}) per column, or a pair of these, got "
                f"shape {part.shape}"
            )
    return row, column


def _decide(call: _Call, config: Config | None, implementation: str | None) -> Explanation:
    def check(config: Config, target: Any) -> None:
        product.check(call.operands, call.forms, call.out_dtype, config, target)
        require_unchecked_vma(call.operands.lhs, call.operands.rhs)

    problem = product.problem(call.operands, call.forms, call.out_dtype)
    return dispatch.decide("matmul", implementation, dispatch.target(), config, check, problem)


def decide(
    lhs: Any, rhs: Any, *, config: Config | None = None, implementation: str | None = None, **keywords: Any
) -> Explanation:
    """Checks a call of `matmul` and says what would run. Same arguments and errors."""
    return _decide(_normalize(lhs, rhs, **keywords), config, implementation)


def matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    c: jax.Array | None = None,
    bias: jax.Array | None = None,
    activation: Callable[[jax.Array], jax.Array] | None = None,
    scale: Any = None,
    preferred_element_type: Any = None,
    transpose_lhs: bool = False,
    transpose_rhs: bool = False,
    config: Config | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """activation(scale · (lhs @ rhs) + bias + c) on one GPU, by the mainloop that all fused operations share.

    Args:
      lhs: [..., m, k], or [..., k, m] with `transpose_lhs`. float16, bfloat16, or float8 (e4m3fn, e5m2).
      rhs: [..., k, n], or [..., n, k] with `transpose_rhs`. Same dtype (float8 kinds may be mixed). Leading dimensions
        as in `lhs`, or none in one of the two.
      c: [..., m, n] or [m, n], added before the activation; taken in the dtype of the result.
      bias: [n], added to each row.
      activation: an elementwise function of float32 values, e.g. `jax.nn.gelu`, fused into the epilogue.
      scale: a factor of the product, in float32: a scalar, (m, 1) per row, (n,) or (1, n) per column, or a pair of
        these (e.g. the two operands' scales).
      preferred_element_type: float16, bfloat16 or float32; the operands' dtype by default, bfloat16 for float8.
        Accumulation is in float32.
      transpose_lhs: `lhs` lies transposed in memory. It is read as it is.
      transpose_rhs: `rhs` lies transposed in memory.
      config: tile sizes of the kernel; by default from a table of measurements, else by a model.
      implementation: "fused" (this library's kernel; emulated on a CPU), "xla", or None to choose.

    Returns:
      [..., m, n]. Deterministic.

    Raises:
      ValueError: ranks, dtypes, sizes or the config are wrong.
      NotImplementedError: `implementation="fused"` and the kernel cannot serve this call; the message says why.

    Works under `jax.jit`, `jax.grad` (the backward pass uses the same kernel), `jax.vmap` and `lax.scan`.

    Example:
      >>> x, w = jnp.ones((128, 64), jnp.bfloat16), jnp.ones((64, 256), jnp.bfloat16)
      >>> overlap.matmul(x, w, bias=jnp.ones(256), activation=jax.nn.relu).shape
      (128, 256)

    Source: "Software pipelining with Mosaic GPU" in the JAX documentation.
    """
    call = _normalize(
        lhs,
        rhs,
        c=c,
        bias=bias,
        activation=activation,
        scale=scale,
        preferred_element_type=preferred_element_type,
        transpose_lhs=transpose_lhs,
        transpose_rhs=transpose_rhs,
    )
    choice = _decide(call, config, implementation)
    if choice.config is None:
        return call.restore(differentiable.by_xla(call.operands, call.forms, call.out_dtype, activation))
    act, sc = traced(activation) if activation is not None else (None, ())
    plan = Plan(choice.config, choice.target, call.forms, call.out_dtype, act)
    call = dataclasses.replace(call, operands=dataclasses.replace(call.operands, scalars=sc))
    return call.restore(differentiable.fused(call.operands, plan))
