"""Products that are summed over the devices of a mesh axis and scattered: each device keeps a block of the sum."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
from jax import lax

from overlap.collectives.backward import AS_BEFORE, backward
from overlap.collectives.summed import Summed
from overlap.frame.operands import LaunchPlan
from overlap.kernels.layouts import OperandLayouts
from overlap.kernels.varying import varying


@dataclasses.dataclass(frozen=True)
class ReduceScatter(Summed):
    """A product whose sum over devices is scattered. See `Summed`.

    Attributes:
      dimension: the dimension of the product along which the sum is scattered.
      transport: how the parts travel in the fused kernel.
      transport_reason: why the transport is used; empty if there is no choice.
    """

    dimension: Literal["m", "n"]
    transport: Literal["push", "ring"] = dataclasses.field(default="push", kw_only=True)
    transport_reason: str = dataclasses.field(default="", kw_only=True)

    @property
    def takes_more_rows(self) -> bool:
        return self.dimension == "n"

    @property
    def op(self) -> str:
        return self.name if self.dimension == "m" else f"{self.name}_{self.dimension}"

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

    def lhs_and_product_cotangents(
        self, cotangent: jax.Array, rhs: jax.Array, dtype: Any, plan: LaunchPlan
    ) -> tuple[jax.Array, jax.Array] | None:
        # The cotangent of `lhs` is an all-gather and a product. The import is here because the modules need each other.
        from overlap.collectives import all_gather_matmul

        if self.dimension != "m" or plan.layouts.transpose_lhs or cotangent.dtype != rhs.dtype or rhs.ndim > 2:
            return None
        transport = "ring" if self.transport == "ring" else "pull"
        gather = all_gather_matmul.AllGatherLhs(self.group, "m", AS_BEFORE, returns_gathered=True, transport=transport)
        return backward(gather, cotangent, rhs, dtype, OperandLayouts(False, not plan.layouts.transpose_rhs))

    def product_cotangent(self, cotangent: jax.Array) -> jax.Array:
        if self.group.size == 1:
            return cotangent
        dimension = cotangent.ndim - (2 if self.dimension == "m" else 1)
        return lax.all_gather(cotangent, self.group.axis_name, axis=dimension, tiled=True)
