"""The form of a product on one device: sizes, layouts and dtypes. It is made once for a call, and once per kernel."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax.typing import DTypeLike

from overlap.frame.operands import Operands, can_fold
from overlap.kernels.operations import OperandLayouts


@dataclasses.dataclass(frozen=True)
class Form:
    """What is static in the product of one device, without its epilogue.

    Attributes:
      batch: the size of the leading dimension; None if no operand has one.
      m: rows of the left operand.
      widths: columns of each right operand.
      depths: the contraction size of each pair whose products are added; one, unless there are several pairs.
      layouts: how the operands lie in memory.
      dtype: of the left operand.
      out_dtype: of the results.
      is_block_scaled: whether the operands have scales of blocks.
      groups: how many groups the rows are divided into; None if they are no groups.
      folds: whether the leading dimension can be folded into the rows (`operands.as_rows`).
    """

    batch: int | None
    m: int
    widths: tuple[int, ...]
    depths: tuple[int, ...]
    layouts: OperandLayouts
    dtype: jnp.dtype
    out_dtype: jnp.dtype
    is_block_scaled: bool = False
    groups: int | None = None
    folds: bool = False

    @classmethod
    def of(cls, operands: Operands, layouts: OperandLayouts, out_dtype: DTypeLike) -> Form:
        """Returns the form of a product of these operands, which may be types."""
        matrices = [*operands.lefts, *operands.rhs_list, *(operands.addends or ())]
        matrices += [operands.lhs_block_scale, *(operands.rhs_block_scales or ())]
        leading = [x.shape[:-2] for x in matrices if x is not None]
        if operands.row_scale is not None:
            leading.append(operands.row_scale.shape[:-1])
        sizes = operands.group_sizes
        batches = [size for dimensions in leading for size in dimensions] if sizes is None else []
        return cls(
            batch=batches[0] if batches else None,
            m=layouts.m_k(operands.lhs.shape)[0],
            widths=tuple(layouts.k_n(rhs.shape)[1] for rhs in operands.rhs_list),
            depths=tuple(layouts.m_k(lhs.shape)[1] for lhs in operands.lefts),
            layouts=layouts,
            dtype=jnp.dtype(operands.lhs.dtype),
            out_dtype=jnp.dtype(out_dtype),
            is_block_scaled=operands.is_block_scaled,
            groups=None if sizes is None else sizes.shape[0],
            folds=can_fold(operands, layouts),
        )

    @property
    def n(self) -> int:
        """Columns of all right operands together."""
        return sum(self.widths)

    @property
    def k(self) -> int:
        """The contraction size of all pairs together."""
        return sum(self.depths)

    @property
    def folded(self) -> Form:
        """The form with the leading dimension folded into the rows, if that is possible; else the same."""
        if not self.folds or self.batch is None:
            return self
        return dataclasses.replace(self, batch=None, m=self.batch * self.m, folds=False)

    def __str__(self) -> str:
        groups = "" if self.groups is None else f"{self.groups} groups, "
        return f"{groups}{self.m}x{'+'.join(map(str, self.widths))}x{self.k} {self.dtype.name}"
