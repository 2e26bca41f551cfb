"""Checks of the arguments and inputs of layers, before anything is traced. Every message names the layer."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from overlap.frame.activation import arrays_of


def check_sizes(layer: str, **sizes: Any) -> None:
    """Raises TypeError if a size is no whole number, and ValueError if it is less than 1."""
    for name, size in sizes.items():
        try:
            if isinstance(size, bool):
                raise TypeError
            is_positive = operator.index(size) > 0
        except TypeError:
            way_out = f": give {int(size)}" if isinstance(size, float) and size.is_integer() else ""
            raise TypeError(f"{layer}: {name} must be a whole number, got {size!r}{way_out}") from None
        if not is_positive:
            raise ValueError(f"{layer}: {name} must be at least 1, got {size!r}: give a positive size")


def check_flags(layer: str, **flags: Any) -> None:
    """Raises TypeError if a value is neither True nor False."""
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise TypeError(f"{layer}: {name} must be True or False, got {flag!r}: name one of these")


def check_factors(layer: str, **factors: Any) -> None:
    """Raises TypeError if a factor is no number, and ValueError if it is not positive and finite. None passes."""
    for name, factor in factors.items():
        way_out = f"got {factor!r}: give 1.25, say, or leave it out to drop nothing"
        if factor is not None and (isinstance(factor, bool) or not isinstance(factor, (int, float, np.number))):
            raise TypeError(f"{layer}: {name} must be a number, {way_out}")
        if factor is not None and not 0 < factor < math.inf:
            raise ValueError(f"{layer}: {name} must be positive and finite, {way_out}")


def check_dtypes(layer: str, **dtypes: Any) -> None:
    """Raises TypeError if a value is no dtype, and ValueError if the dtype is not floating-point. None passes."""
    for name, dtype in dtypes.items():
        if dtype is None:
            continue
        way_out = "give jnp.bfloat16 or jnp.float32, say"
        try:
            found = jnp.dtype(dtype)
        except TypeError:
            raise TypeError(f"{layer}: {name} must be a dtype, got {dtype!r}: {way_out}") from None
        if not jnp.issubdtype(found, jnp.floating):
            raise ValueError(f"{layer}: {name} must be a floating-point dtype, got {found.name}: {way_out}")


def check_keywords(layer: str, given: dict[str, Any]) -> None:
    """Raises TypeError if a name is no string, an initializer no function, or `rngs` no nnx.Rngs. None passes."""
    for keyword, value in given.items():
        if keyword == "rngs":
            is_right, wanted = isinstance(value, nnx.Rngs), "an nnx.Rngs, got {}: give nnx.Rngs(0), say"
        elif keyword.endswith("_init"):
            is_right, wanted = callable(value), "a function, got {}: give jax.nn.initializers.normal(0.02), say"
        elif keyword in ("name", "part_of"):
            is_right, wanted = value is None or isinstance(value, str), "a string, got {}: give a name, or leave it out"
        else:
            continue
        if not is_right:
            raise TypeError(f"{layer}: {keyword} must be {wanted.format(repr(value))}")


def check_activation(layer: str, activation: Any, most: int = 1) -> None:
    """Raises TypeError if the activation is no function, or takes more than `most` arrays."""
    if not callable(activation):
        known = isinstance(activation, str) and callable(getattr(jax.nn, activation, None))
        raise TypeError(
            f"{layer}: activation must be an elementwise function, got {activation!r}: give "
            f"jax.nn.{activation if known else 'silu'}{'' if known else ', say'}"
        )
    least, _ = arrays_of(activation)
    if least > most:
        wanted = "one array" if most == 1 else "one array, or gate and up"
        raise TypeError(f"{layer}: activation must be a function of {wanted}, got {activation!r}, which takes {least}")


def check_implementation(layer: str, implementation: object) -> None:
    """Raises ValueError if there is no such implementation."""
    if implementation not in ("fused", "xla", None):
        raise ValueError(
            f'{layer}: implementation must be "fused", "xla" or None, got {implementation!r}: leave it out, or name one'
        )


def check_rows(layer: str, shape: Sequence[int]) -> None:
    """Raises ValueError if activations of this shape have no rows."""
    if len(shape) < 2:
        raise ValueError(
            f"{layer}: activations must be [..., rows, features], got shape {tuple(shape)}: give a single row as "
            "x[None]"
        )


def check_array(layer: str, what: str, x: Any) -> None:
    """Raises TypeError if `x` is no array; `what` is its name in the message."""
    if not isinstance(x, (jax.Array, np.ndarray, nnx.Variable)):
        raise TypeError(f"{layer}: {what} must be an array, got {type(x).__name__}: make it one by jnp.asarray")


def check_features(layer: str, x: Any, name: str, features: int) -> None:
    """Raises TypeError if the input is no array, and ValueError if it is not [..., rows, features].

    `name` is the layer's argument that `features` comes from.
    """
    check_array(layer, "the input", x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(
            f"{layer}: the input must be floating-point, got {x.dtype}: embed token ids first, e.g. with nnx.Embed"
        )
    check_rows(layer, x.shape)
    if x.shape[-1] != features:
        raise ValueError(
            f"{layer}: the input must be [..., rows, {name}] with {name}={features}, got shape {tuple(x.shape)}: "
            f"build the layer with {name}={x.shape[-1]}, or bring the features last"
        )


def check_residual(layer: str, residual: Any, shape: tuple[int, ...]) -> None:
    """Raises TypeError if the residual is no array, and ValueError if its shape is not the result's. None passes."""
    if residual is None:
        return
    check_array(layer, "residual", residual)
    if tuple(residual.shape) != shape:
        raise ValueError(
            f"{layer}: residual must have the shape of the result, {shape}, got {tuple(residual.shape)}: "
            "jnp.broadcast_to or reshape it first"
        )


def check_mask(layer: str, mask: Any, shape: tuple[int, ...]) -> None:
    """Raises TypeError if the mask is no array, and ValueError if it is no booleans of this shape. None passes."""
    if mask is None:
        return
    check_array(layer, "mask", mask)
    if tuple(mask.shape) != shape or mask.dtype != bool:
        raise ValueError(
            f"{layer}: mask must be booleans of shape {shape}, one for each row of the input, got {mask.dtype} of "
            f"shape {tuple(mask.shape)}: compare (ids != padding), or jnp.broadcast_to it first"
        )
