"""`lhs_scale` and `rhs_scale`, checked and brought into the form that kernels take."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax.typing import DTypeLike

from overlap.frame import arguments
from overlap.frame.operands import Leaf

_SCALARS = {(), (1,), (1, 1)}


@dataclasses.dataclass(frozen=True)
class Scaled:
    """The sizes of the operands that are scaled.

    Attributes:
      batch: leading dimensions.
      rows: rows of `lhs`.
      widths: columns of each right operand.
      several: whether the caller gave a list of right operands.
      groups: how many groups the rows are divided into, which have scales of columns of their own; None: no groups.
      gathered: whether the rows of several devices are gathered. An `lhs_scale` of shape (1, 1) is then the scale of a
        device's only row. Else it is a scalar.
    """

    batch: tuple[int, ...]
    rows: int
    widths: list[int]
    several: bool = False
    groups: int | None = None
    gathered: bool = False

    def of_columns(self, width: int) -> tuple[int, ...]:
        """The shape of a vector of columns of a right operand with so many."""
        return (width,) if self.groups is None else (self.groups, width)


def normalize(
    lhs_scale: Leaf, rhs_scale: Leaf, scaled: Scaled, dtype: DTypeLike
) -> tuple[Leaf, tuple[Leaf, ...] | None]:
    """Checks both scales, and returns them as a scale of rows and scales of columns.

    Args:
      lhs_scale: a scalar, [m, 1] (the same for all leading indices), [*batch, m, 1] or None.
      rhs_scale: a scalar, [n], [1, n] or None; for several right operands a scalar, or a list or tuple with a scalar,
        [n] or [1, n] for each.
      scaled: the sizes of the operands.
      dtype: the dtype of the returned scales.

    Returns:
      The row scale, [(*batch,) m], and the column scales, one [n] per right operand. Each is None if there is nothing
      to multiply by. A scalar becomes a factor of the columns, also if it is given as `lhs_scale`.

    Raises:
      ValueError: a scale is neither a real number nor an array of real numbers, or has a wrong shape or length.
    """
    row: Leaf = None
    factors: list[list[Leaf]] = []
    if lhs_scale is not None:
        lhs_scale = arguments.factor("lhs_scale", lhs_scale, dtype)
        shape = tuple(lhs_scale.shape)
        per_row = (*scaled.batch, scaled.rows, 1)
        if shape in (per_row, (scaled.rows, 1)) and (scaled.gathered or shape != (1, 1)):
            row = arguments.each(lambda x: x[..., 0], lhs_scale)
        elif shape in _SCALARS:
            factors.append([_as_columns(lhs_scale, scaled.of_columns(width)) for width in scaled.widths])
        else:
            raise ValueError(
                f"`lhs_scale` must be a scalar or {per_row}, one value per row of `lhs`, got shape {shape}: reshape "
                "it, or pass factors of columns as `rhs_scale`"
            )
    if rhs_scale is not None:
        factors.append(_column_scales(rhs_scale, scaled, dtype))
    if not factors:
        return row, None
    first, *others = factors
    if others:
        first = [arguments.each(jnp.multiply, a, b) for a, b in zip(first, *others, strict=True)]
    return row, tuple(first)


def _column_scales(rhs_scale: Leaf, scaled: Scaled, dtype: DTypeLike) -> list[Leaf]:
    """Returns `rhs_scale` as one [n], or [groups, n], per right operand."""
    widths = scaled.widths
    several = scaled.several
    if not isinstance(rhs_scale, (list, tuple)):
        scale = arguments.factor("rhs_scale", rhs_scale, dtype)
        if several and tuple(scale.shape) not in _SCALARS:
            raise ValueError(
                "`rhs_scale` must be a scalar, or a list with one entry per matrix of `rhs`, got shape "
                f"{tuple(scale.shape)}: give {len(widths)} entries"
            )
        return [_per_column("rhs_scale", scale, scaled.of_columns(width)) for width in widths]
    kind = type(rhs_scale).__name__
    if not several:
        raise ValueError(
            f"`rhs_scale` must be a list only if `rhs` is one, got a {kind} of {len(rhs_scale)}: give one array"
        )
    if len(rhs_scale) != len(widths):
        raise ValueError(
            f"`rhs_scale` must have {len(widths)} entries, one per matrix of `rhs`, got a {kind} of {len(rhs_scale)}: "
            "give one scale for all, or one per matrix"
        )
    names = [f"rhs_scale[{index}]" for index in range(len(widths))]
    scales = [arguments.factor(name, scale, dtype) for name, scale in zip(names, rhs_scale, strict=True)]
    return [
        _per_column(name, scale, scaled.of_columns(width))
        for name, scale, width in zip(names, scales, widths, strict=True)
    ]


def _per_column(name: str, scale: Leaf, shape: tuple[int, ...]) -> Leaf:
    if tuple(scale.shape) not in _SCALARS | {shape, (1, *shape) if len(shape) == 1 else shape}:
        taken = f"{shape}, one value per group and column" if len(shape) > 1 else (
            f"{shape} or {(1, *shape)}, one value per column of the result"
        )  # fmt: skip
        raise ValueError(
            f"`{name}` must be a scalar or of shape {taken}, got shape {tuple(scale.shape)}: reshape it, or pass "
            "factors of rows as `lhs_scale`"
        )
    return _as_columns(scale, shape)


def _as_columns(scale: Leaf, shape: tuple[int, ...]) -> Leaf:
    """Returns a scalar, or one value per column, in a shape: [n], or [groups, n]."""
    return arguments.each(lambda x: jnp.broadcast_to(x if x.shape == shape else x.reshape(-1), shape), scale)
