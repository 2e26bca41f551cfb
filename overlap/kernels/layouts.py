"""Describes how the operands of a product lie in global memory: transposed or not."""

from __future__ import annotations

import dataclasses

from overlap.kernels.operations import LAYOUTS, Layout


@dataclasses.dataclass(frozen=True)
class OperandLayouts:
    """Which operands are stored transposed.

    Attributes:
      transpose_lhs: the left operand is [k, m] instead of [m, k].
      transpose_rhs: the right operand is [n, k] instead of [k, n].
    """

    transpose_lhs: bool = False
    transpose_rhs: bool = False

    @property
    def k_major(self) -> bool:
        """Whether the rows of both operands run along k."""
        return self.transpose_rhs and not self.transpose_lhs

    @property
    def name(self) -> Layout:
        """Two letters, for `lhs` and `rhs`: "t" for a transposed operand, else "n"."""
        return LAYOUTS[2 * self.transpose_lhs + self.transpose_rhs]

    def m_k(self, lhs_shape: tuple[int, ...]) -> tuple[int, int]:
        """Returns m and k of a left operand of this shape."""
        *_, first, second = lhs_shape
        return (second, first) if self.transpose_lhs else (first, second)

    def k_n(self, rhs_shape: tuple[int, ...]) -> tuple[int, int]:
        """Returns k and n of a right operand of this shape."""
        *_, first, second = rhs_shape
        return (second, first) if self.transpose_rhs else (first, second)


PLAIN = OperandLayouts()
