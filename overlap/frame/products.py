"""What XLA computes around products: their epilogues, and what a gradient sums, for matrices and for groups of rows.

A value of `Dense` or `Groups` says how vectors lie along the rows and columns of a product.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad
from jax.typing import DTypeLike

from overlap.frame.activation import BoundActivation
from overlap.frame.linear import Wanted, linear_map
from overlap.frame.operands import Operands, to_rank
from overlap.frame.signatures import Leaf
from overlap.kernels import groups


def of(operands: Operands) -> Dense | Groups:
    """Returns which kind of product these operands are of."""
    return DENSE if operands.group_sizes is None else Groups(operands.group_sizes)


class Dense:
    """Products of matrices. Vectors of rows are [(batch,) m], vectors of columns [n]."""

    def of_rows(self, scale: jax.Array, z: jax.Array) -> jax.Array:
        """A vector of rows, to be multiplied by a product z."""
        return to_rank(scale[..., None], z.ndim)

    def of_columns(self, vector: jax.Array, z: jax.Array) -> jax.Array:
        """A vector of columns, to be multiplied by a product z, or added to it."""
        return to_rank(vector, z.ndim)

    def sum_of_rows(self, x: jax.Array, dtype: DTypeLike) -> jax.Array:
        """The cotangent of a vector of columns, given that of `of_columns`; added in `dtype`."""
        return x.astype(dtype).sum(axis=tuple(range(x.ndim - 1)))

    def cleared(self, x: jax.Array) -> jax.Array:
        """Values without those of rows that do not count."""
        return x

    def guarded(self, activation: BoundActivation) -> BoundActivation:
        """An activation that is not applied to rows that do not count."""
        return activation


DENSE = Dense()


@dataclasses.dataclass(frozen=True)
class Groups:
    """Products of groups of rows: each group has a right operand of its own. Vectors of columns are [groups, n].

    Rows behind all groups do not count: their results are zero, whatever the operands hold there.

    Attributes:
      sizes: int32 [groups].
    """

    sizes: jax.Array

    def of_rows(self, scale: jax.Array, z: jax.Array) -> jax.Array:
        """A vector of rows, to be multiplied by a product z. It may hold anything for rows behind all groups."""
        return jnp.where(self._counts(z.shape[0]), scale[:, None], 1)

    def of_columns(self, vector: jax.Array, z: jax.Array) -> jax.Array:
        """For each row of a product z the vector of its group: [groups, n] to [m, n].

        jax would transpose it to a scatter, which adds in an order that changes. So it has a transpose of its own.
        """
        group = self._group_of_rows(z.shape[0])

        def forward(residuals: Sequence[jax.Array], operands: Sequence[jax.Array]) -> list[jax.Array]:
            return [operands[0][residuals[0]]]

        def transpose(
            residuals: Sequence[jax.Array], wanted: Sequence[Wanted], cotangents: Sequence[Leaf]
        ) -> list[jax.Array]:
            rows = ad.instantiate_zeros(cotangents[0])
            return [_sums(residuals[0], rows, vector.shape[0], rows.dtype)]

        (out,) = linear_map(forward, transpose, [group], [vector])
        return out

    def sum_of_rows(self, x: jax.Array, dtype: DTypeLike) -> jax.Array:
        """The sum of the rows of each group, [groups, n], in `dtype`. It always adds in the same order."""
        return _sums(self._group_of_rows(x.shape[0]), self.cleared(x), self.sizes.shape[0], dtype)

    def cleared(self, x: jax.Array) -> jax.Array:
        """Sets the rows behind all groups to zero."""
        return jnp.where(self._counts(x.shape[0]), x, jnp.zeros_like(x))

    def guarded(self, activation: BoundActivation) -> BoundActivation:
        """An activation that sees values of the first row in the place of rows behind all groups.

        At zero, an activation may have no finite derivative, which times a cotangent of zero is no number.
        """
        if activation is None:
            return None

        def of_all(values: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
            filled = [jnp.where(self._counts(z.shape[0]), z, lax.stop_gradient(z[:1])) for z in values]
            return tuple(map(self.cleared, activation(filled)))

        return of_all

    def _counts(self, m: int) -> jax.Array:
        """Which rows belong to a group, [m, 1]."""
        return (jnp.arange(m, dtype=jnp.int32) < self.sizes.sum(dtype=jnp.int32))[:, None]

    def _group_of_rows(self, m: int) -> jax.Array:
        """The group of each row, [m]; the last one for rows behind all groups."""
        _, ends = groups.bounds(self.sizes, m)
        return jnp.minimum((jnp.arange(m)[:, None] >= ends[None, :]).sum(1, dtype=jnp.int32), self.sizes.shape[0] - 1)


def _sums(group: jax.Array, rows: jax.Array, count: int, dtype: DTypeLike) -> jax.Array:
    """The sums of the rows of each of `count` groups, by one product, which always adds in the same order.

    The rows are read in their own dtype, and added in `dtype`.
    """
    is_of = (group[None, :] == jnp.arange(count)[:, None]).astype(rows.dtype)
    # What is no number in one group must not reach the others, as zero times it would.
    is_number = jnp.isfinite(rows)
    total, others = (
        lax.dot(is_of, part, precision=lax.Precision.HIGHEST, preferred_element_type=dtype)
        for part in (jnp.where(is_number, rows, 0), jnp.where(is_number, 0, 1).astype(rows.dtype))
    )
    return jnp.where(others > 0, jnp.nan, total)
