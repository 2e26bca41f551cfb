"""Products that are summed over the devices of a mesh axis and scattered: each device keeps a block of the sum."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax
from jax import lax

from overlap.collectives.backward import Transpose, backward
from overlap.collectives.summed import Summed
from overlap.frame.operands import Operands
from overlap.frame.operation import LaunchPlan
from overlap.kernels.layouts import OperandLayouts
from overlap.kernels.operations import SCATTER_M, Dimension, OperationSpec
from overlap.kernels.varying import varying


@dataclasses.dataclass(frozen=True)
class MatmulReduceScatter(Summed):
    """A product whose sum over devices is scattered. See `Summed`.

    Attributes:
      spec: which of the two: rows or columns scattered.
      transport: how the parts travel in the fused kernel.
      transport_reason: why the transport is used; empty if there is no choice.
      transpose: makes the operation that computes the cotangent of `lhs`; None: XLA does.
    """

    spec: OperationSpec = dataclasses.field(default=SCATTER_M, kw_only=True)  # pyright: ignore[reportIncompatibleVariableOverride]
    transport: Literal["push", "ring"] = dataclasses.field(default="push", kw_only=True)
    transport_reason: str = dataclasses.field(default="", kw_only=True)
    transpose: Transpose | None = dataclasses.field(default=None, kw_only=True)

    @property
    def takes_more_rows(self) -> bool:
        return self.dimension == "n"

    @property
    def dimension(self) -> Dimension:
        """The dimension of the product along which the sum is scattered."""
        return self.spec.scatters

    def result_shape(self, m: int, n: int) -> tuple[int, int]:
        size = self.group.size
        scattered_size = {"m": m, "n": n}[self.dimension]
        if scattered_size % size:
            what = "rows of `lhs`" if self.dimension == "m" else "columns of `rhs`"
            raise ValueError(
                f"`{self.name}` gives each of the {size} devices the same number of {what}, got {self.dimension}="
                f"{scattered_size}: pad it to a multiple of {size}"
            )
        return (m // size, n) if self.dimension == "m" else (m, n // size)

    # --- The same by XLA, and the backward pass ---

    def reduced(self, product: jax.Array) -> jax.Array:
        if self.group.size == 1:
            return product
        product = varying(product, self.group.names)
        dimension = product.ndim - (2 if self.dimension == "m" else 1)
        if product.shape[dimension] == 0:
            return product
        return lax.psum_scatter(product, self.group.axis_name, scatter_dimension=dimension, tiled=True)

    def gathered_passenger(self, operands: Operands) -> jax.Array | None:
        rows = operands.passenger
        return rows if rows is None else lax.all_gather(rows, self.group.axis_name, axis=rows.ndim - 2, tiled=True)

    def scattered(
        self, cotangents: Operands, d_kept: Any, operands: Operands, wanted: Operands, layouts: OperandLayouts
    ) -> Operands:
        rows = operands.passenger
        if rows is None:
            return cotangents
        d_rows = None
        if wanted.passenger is not None and d_kept is not None:
            dimension = rows.ndim - 2
            d_rows = lax.psum_scatter(d_kept, self.group.axis_name, scatter_dimension=dimension, tiled=True)
        return dataclasses.replace(cotangents, passenger=d_rows)

    def lhs_and_product_cotangents(
        self, cotangent: jax.Array, rights: Sequence[jax.Array], dtype: Any, plan: LaunchPlan
    ) -> tuple[Sequence[jax.Array], jax.Array] | None:
        # The cotangent of `lhs` is an all-gather and a product.
        if self.transpose is None or self.dimension != "m" or plan.layouts.transpose_lhs:
            return None
        if any(cotangent.dtype != rhs.dtype or rhs.ndim > 2 for rhs in rights):
            return None
        layouts = OperandLayouts(False, not plan.layouts.transpose_rhs)
        purpose = "backward pass, cotangent of `lhs` and the gathered one of the result"
        return backward(self.transpose(self), [cotangent], rights, dtype, layouts, plan, purpose)

    def product_cotangent(self, cotangent: jax.Array) -> jax.Array:
        if self.group.size == 1:
            return cotangent
        dimension = cotangent.ndim - (2 if self.dimension == "m" else 1)
        return lax.all_gather(cotangent, self.group.axis_name, axis=dimension, tiled=True)
