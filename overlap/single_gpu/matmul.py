"""`matmul`: the mainloop alone, on one GPU: its checks, and the choice of the implementation."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from overlap.choice import dispatch
from overlap.choice.dispatch import Explanation
from overlap.frame import activation as activations
from overlap.frame import scales, sharded
from overlap.kernels import arguments, launch
from overlap.kernels.config import FLOAT8, Config
from overlap.kernels.hopper import PLAIN, Forms
from overlap.single_gpu import differentiable, product
from overlap.single_gpu.product import Operands, Plan

_SCALES = ("lhs_scale", "rhs_scale")


def check_operands(lhs: Any, rhs: Any, preferred_element_type: Any, forms: Forms = PLAIN) -> jnp.dtype:
    """The checks that every product shares, on its last two dimensions; returns the output's dtype.

    `lhs` and `rhs` have gone through `arguments.array`.

    Raises:
      ValueError: wrong ranks, dtypes or sizes.
    """
    for name, array in (("lhs", lhs), ("rhs", rhs)):
        if len(array.shape) < 2:
            raise ValueError(
                f"`{name}` must have 2 dimensions or more, got {len(array.shape)} (shape {tuple(array.shape)}): "
                "reshape it"
            )
    if lhs.dtype != rhs.dtype and not (lhs.dtype in FLOAT8 and rhs.dtype in FLOAT8):
        raise ValueError(f"`lhs` and `rhs` must have the same dtype, got {lhs.dtype} and {rhs.dtype}: cast one of them")
    lhs_k = lhs.shape[-2 if forms.transpose_lhs else -1]
    rhs_k = rhs.shape[-1 if forms.transpose_rhs else -2]
    if lhs_k != rhs_k:
        raise ValueError(
            f"`lhs` and `rhs` must agree in the contraction dimension, got k={lhs_k} in lhs {tuple(lhs.shape)} and "
            f"k={rhs_k} in rhs {tuple(rhs.shape)}: is one of them transposed?"
        )
    return arguments.result_dtype(preferred_element_type, lhs.dtype)


@dataclasses.dataclass(frozen=True)
class _Call:
    """A checked call: operands with at most one batch dimension, and what leads back to the caller's shape.

    `by_xla` is the activation where XLA runs: the caller's own function, if that may be called here.
    """

    operands: Operands
    forms: Forms
    out_dtype: Any
    activation: activations.Activation | None
    by_xla: Callable[[jax.Array], jax.Array] | None
    batch: tuple[int, ...]

    def restore(self, out: jax.Array) -> jax.Array:
        return out.reshape(*self.batch, *out.shape[-2:])


def _normalize(
    lhs: Any,
    rhs: Any,
    *,
    addend: Any = None,
    bias: Any = None,
    activation: Any = None,
    lhs_scale: Any = None,
    rhs_scale: Any = None,
    preferred_element_type: Any = None,
    transpose_lhs: bool = False,
    transpose_rhs: bool = False,
    scalars: tuple[Any, ...] | None = None,
) -> _Call:
    """Checks the arguments and brings them into the kernel's form; arrays may be `jax.ShapeDtypeStruct`s.

    `scalars`: what the activation captures, if it is an `Activation` already.
    """
    lhs, rhs = arguments.array("lhs", lhs), arguments.array("rhs", rhs)
    addend, bias = (None if x is None else arguments.array(name, x) for name, x in (("addend", addend), ("bias", bias)))
    forms = Forms(arguments.flag("transpose_lhs", transpose_lhs), arguments.flag("transpose_rhs", transpose_rhs))
    out_dtype = check_operands(lhs, rhs, preferred_element_type, forms)
    batches = [tuple(x.shape[:-2]) for x in (lhs, rhs) if len(x.shape) > 2]
    if len(set(batches)) > 1:
        raise ValueError(
            "`lhs` and `rhs` must have the same leading dimensions, or one of them none, got "
            f"{batches[0]} and {batches[1]}: broadcast one of them"
        )
    batch = batches[0] if batches else ()
    _, m, n, _ = product.sizes(Operands(_flat(lhs), _flat(rhs)), forms)
    if addend is not None and tuple(addend.shape) not in {(m, n), (*batch, m, n)}:
        for_all = f", or {(m, n)}" if batch else ""
        raise ValueError(
            f"`addend` must have the shape of the result, {(*batch, m, n)}{for_all}, got {tuple(addend.shape)}: "
            "reshape or broadcast it"
        )
    if bias is not None and tuple(bias.shape) != (n,):
        raise ValueError(f"`bias` must have shape ({n},), one value per column, got {tuple(bias.shape)}: reshape it")
    wide = product.accumulator(lhs.dtype)
    row_scale, column_scales = scales.normalize(lhs_scale, rhs_scale, (m,), n, wide)
    applied: Any = activation
    by_xla = activation
    if activation is not None and scalars is None:
        applied, scalars = activations.traced(activation, wide)
    elif activation is not None:
        by_xla = functools.partial(activation, scalars=scalars)
    operands = Operands(
        _flat(lhs), _flat(rhs),
        None if addend is None else _flat(arguments.each(lambda x: x.astype(out_dtype), addend)),
        None if bias is None else arguments.each(lambda x: x.astype(wide), bias), row_scale,
        None if column_scales is None else column_scales[0], scalars or (),
    )  # fmt: skip
    return _Call(operands, forms, out_dtype, applied, by_xla, batch)


def _flat(x: Any) -> Any:
    """With at most one batch dimension."""
    batch, matrix = math.prod(x.shape[:-2]), x.shape[-2:]  # (Not -1: a size may be 0.)
    return x if len(x.shape) <= 3 else arguments.each(lambda x: x.reshape(batch, *matrix), x)


def _cut(mesh: Any, arrays: dict[str, Any], keywords: dict[str, Any]) -> Callable[..., jax.Array]:
    """From `_on_one_device` to the result, each device's part computed by itself: see `sharded`.

    Raises:
      ValueError, NotImplementedError: as `_normalize` does for the whole call, and `sharded.layout_of`.
    """
    given = {name: x for name, x in arrays.items() if x is not None}
    operands = {name: arguments.array(name, x) for name, x in given.items() if name not in _SCALES}
    wide = product.accumulator(operands["lhs"].dtype)
    operands |= {name: arguments.factor(name, given[name], wide) for name in _SCALES if name in given}
    if keywords.get("activation") is not None:
        # What it captures belongs to the whole, and each device gets its part of that like of the rest.
        applied, scalars = activations.traced(keywords["activation"], wide)
        keywords = keywords | {"activation": applied}
        operands |= {f"scalars[{i}]": scalar for i, scalar in enumerate(scalars)}

    def of_call(parts: dict[str, Any]) -> dict[str, Any]:
        named = {name: x for name, x in parts.items() if "[" not in name}
        return named | {"scalars": tuple(x for name, x in parts.items() if "[" in name)} | keywords

    # On types that say nothing of any mesh.
    bare = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in operands.items()}
    jax.eval_shape(lambda parts: _normalize(**of_call(parts)).operands, bare)
    batch = tuple(range(max(operands["lhs"].ndim, operands["rhs"].ndim) - 2))
    matrices = {
        "lhs": ("k", "m") if keywords.get("transpose_lhs") else ("m", "k"),
        "rhs": ("n", "k") if keywords.get("transpose_rhs") else ("k", "n"),
        "addend": ("m", "n"),
    }

    def dimensions(name: str, x: jax.Array) -> tuple[Any, ...]:
        if name in matrices:
            return (*batch[: x.ndim - 2], *matrices[name])
        # Along the rows or the columns; a factor of all is of size 1 everywhere.
        return tuple(None if size == 1 else "m" if name == "lhs_scale" else "n" for size in x.shape)

    layout = sharded.layout_of(mesh, operands, {name: dimensions(name, x) for name, x in operands.items()})
    return lambda run: layout.call(lambda **parts: run(**of_call(parts)), operands, (*batch, "m", "n"))


def _decide(call: _Call, config: Config | None, implementation: str | None, mesh: Any = None) -> Explanation:
    def check(config: Config, target: Any) -> None:
        product.check(call.operands, call.forms, call.out_dtype, config, target, call.activation)
        sharded.require_rest_of_one()

    problem = product.problem(call.operands, call.forms, call.out_dtype)
    return dispatch.decide("matmul", implementation, dispatch.target(mesh), config, check, problem)


def decide(
    lhs: Any, rhs: Any, *, config: Config | None = None, implementation: str | None = None, mesh: Any = None,
    **keywords: Any,
) -> Explanation:  # fmt: skip
    """Checks a call of `matmul` and says what would run. Same arguments and errors."""
    arrays = dict(lhs=lhs, rhs=rhs) | {name: keywords.pop(name, None) for name in ("addend", "bias", *_SCALES)}
    of_types = sharded.mesh_of(*jax.tree.leaves(arrays))
    if of_types is None:
        return _decide(_normalize(**arrays, **keywords), config, implementation, mesh)
    of_parts: list[Explanation] = []

    def of_part(**arguments_of_part: Any) -> jax.Array:
        call = _normalize(**arguments_of_part)
        of_parts.append(_decide(call, config, implementation, mesh))
        _, m, n, _ = product.sizes(call.operands, call.forms)
        return jnp.zeros((*call.batch, m, n))

    try:
        jax.eval_shape(lambda arrays: _cut(of_types, arrays, keywords)(of_part), arrays)
    except NotImplementedError as cannot:
        if implementation == "fused":
            raise
        return Explanation("matmul", "xla", None, str(cannot), dispatch.target(mesh))
    return of_parts[0]


def _on_one_device(config: Config | None, implementation: str | None, **call_arguments: Any) -> jax.Array:
    """The product of what each device holds; arguments as of `_normalize`."""
    call = _normalize(**call_arguments)
    choice = _decide(call, config, implementation)
    if choice.config is None:
        return call.restore(differentiable.by_xla(call.operands, call.forms, call.out_dtype, call.by_xla))
    plan = Plan(
        choice.config, choice.target, call.forms, call.out_dtype, call.activation, insists=implementation == "fused"
    )
    out = sharded.on_the_rest(lambda operands: differentiable.fused(operands, plan), call.operands)
    return call.restore(out)


def matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    addend: jax.Array | None = None,
    bias: jax.Array | None = None,
    activation: Callable[[jax.Array], jax.Array] | None = None,
    lhs_scale: Any = None,
    rhs_scale: Any = None,
    preferred_element_type: Any = None,
    transpose_lhs: bool = False,
    transpose_rhs: bool = False,
    config: Config | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """activation(lhs_scale · (lhs @ rhs) · rhs_scale + bias + addend) on each GPU, by the mainloop of all operations.

    Args:
      lhs: [..., m, k], or [..., k, m] with `transpose_lhs`. float16, bfloat16, or float8 (e4m3fn, e5m2); by XLA any
        floating-point dtype.
      rhs: [..., k, n], or [..., n, k] with `transpose_rhs`. Same dtype (float8 kinds may be mixed). Leading dimensions
        as in `lhs`, or none in one of the two.
      addend: [..., m, n] or [m, n], added before the activation; taken in the dtype of the result.
      bias: [n], added to each row.
      activation: an elementwise function of float32 values, e.g. `jax.nn.gelu`, fused into the epilogue. It is traced
        once, at the call. What is not provably elementwise is refused. Scalars that it captures become operands of the
        call, so `jax.grad`, `jax.jit` and `jax.vmap` work through them. Loops of a known length are unrolled.
        What the kernel cannot compute (e.g. `erf`, as in the exact gelu, or `y**1.5`) is left to XLA.
      lhs_scale: a factor of the product, in float32: a scalar, or [m, 1], one value per row; the same for all leading
        indices.
      rhs_scale: a factor of the product, in float32: a scalar, or [n] or [1, n], one value per column; likewise.
      preferred_element_type: float16, bfloat16 or float32; the operands' dtype by default, bfloat16 for float8.
        Accumulation is in float32.
      transpose_lhs: `lhs` lies transposed in memory. It is read as it is.
      transpose_rhs: `rhs` lies transposed in memory.
      config: tile sizes of the kernel; by default from a table of measurements, else by a model.
      implementation: "fused" (this library's kernel; emulated on a CPU), "xla", or None to choose.

    Returns:
      [..., m, n]. Deterministic.

    Raises:
      ValueError: ranks, dtypes, sizes, the activation or the config are wrong, or the types do not say how the result
        is sharded.
      NotImplementedError: `implementation="fused"` and the kernel cannot serve this call; the message says why.

    Works under `jax.jit`, `jax.vmap` and `lax.scan`, and has derivatives of any order. The backward pass uses the same
    kernel where its operands have the dtype that the kernel needs; behind a scale or an activation, and for results
    of another dtype, cotangents are in float32, and XLA multiplies them. Forward mode (`jax.jvp`) runs by XLA.

    On several devices: inside `jax.shard_map` each device computes the product of what it holds. Outside, operands that
    are sharded along Explicit mesh axes (as of `jax.make_mesh`) in leading dimensions, m or n are multiplied part by
    part, and the result is sharded as they are; a sharded k goes to XLA, or is a ValueError where both operands have
    it. Along Auto axes XLA's partitioner decides, and it cannot split a kernel: XLA runs, or `implementation="fused"`
    raises NotImplementedError.

    Example:
      >>> x, w = jnp.ones((128, 64), jnp.bfloat16), jnp.ones((64, 256), jnp.bfloat16)
      >>> overlap.matmul(x, w, bias=jnp.ones(256), activation=jax.nn.relu).shape
      (128, 256)

    Source: "Software pipelining with Mosaic GPU" in the JAX documentation.
    """
    arrays = dict(lhs=lhs, rhs=rhs, addend=addend, bias=bias, lhs_scale=lhs_scale, rhs_scale=rhs_scale)
    arguments.require_values(**arrays)
    keywords: dict[str, Any] = dict(
        activation=activation, preferred_element_type=preferred_element_type, transpose_lhs=transpose_lhs,
        transpose_rhs=transpose_rhs,
    )  # fmt: skip
    if (mesh := sharded.mesh_of(*jax.tree.leaves(arrays))) is not None:
        try:
            return _cut(mesh, arrays, keywords)(functools.partial(_on_one_device, config, implementation))
        except NotImplementedError as cannot:
            if implementation is None:
                if dispatch.target().platform != "cpu":
                    launch.leave_to_xla("matmul", str(cannot), insists=False)
                implementation = "xla"
            if implementation != "xla":
                raise
    return _on_one_device(config, implementation, **arrays, **keywords)
