"""The operations that sum products over the devices of a mesh axis: their base, and the one that scatters the sum."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from overlap.choice import dispatch
from overlap.choice.problem import Problem
from overlap.collectives.backward import Transpose, backward
from overlap.collectives.collective import XLA, Collective
from overlap.collectives.reduce import blocks_kernel, one_shot_kernel
from overlap.frame.form import Form
from overlap.frame.operands import Operands, Results, as_rows
from overlap.frame.operation import Call, LaunchPlan
from overlap.frame.signatures import Arguments
from overlap.kernels.config import Config
from overlap.kernels.operations import SCATTER_M, Dimension, OperandLayouts, OperationSpec, Transport
from overlap.kernels.target import Target
from overlap.kernels.varying import varying
from overlap.single_gpu.matmul import MATMUL


@dataclasses.dataclass(frozen=True)
class Summed(Collective):
    """A product that is summed over devices.

    Each device computes one block of the sum, some rows (m) or columns (n), or (one shot) the whole sum.

    Attributes:
      takes_more_rows: whether leading dimensions of the left operand may be folded into its rows.
      transport: how the parts travel in the fused kernel, "push" or "ring".
      transport_reason: why the transport is used; empty if there is no choice.
    """

    batched_together = frozenset({"lhs", "more_lefts", "passenger"})
    takes_more_rows = False
    transport = "push"
    transport_reason = ""

    @property
    def summed_over(self) -> int:
        return self.group.size

    # --- The choice ---

    def problem(self, form: Form) -> Problem:
        form = self._folded(form)
        return Problem(
            op=self.spec.name,
            m=form.m,
            n=form.n,
            k=form.k,
            dtype=form.dtype.name,
            out_dtype=form.out_dtype.name,
            devices=self.group.size,
            layout=form.layouts.name,
            batch=max(form.batch or 1, 1),
        )

    def _folded(self, form: Form) -> Form:
        return form.folded if self.takes_more_rows else form

    def along(self, form: Form) -> Dimension:
        """Returns the dimension in which the sum is cut into blocks: "m" or "n"."""
        return self.problem(form).scattered

    def circumstances(self, call: Call) -> dispatch.Circumstances:
        def scratch_bytes(config: Config, target: Target) -> int:
            if self.group.size == 1:
                return 0
            plan = LaunchPlan(self, self._folded(call.form), target, config)
            operands = self._as_rows(call.operands, plan)
            if self.spec.replicates and config.one_shot:
                return one_shot_kernel.scratch_bytes(operands, plan, self.group.size)
            return blocks_kernel.scratch_bytes(operands, plan, self.group.size, self.along(plan.form))

        transport = self.transport if self.transport_reason and self.group.size > 1 else ""
        return dispatch.Circumstances(
            transport, self.transport_reason, why_not_by_default=self.untried(), scratch_bytes=scratch_bytes
        )

    def products(self, call: Call) -> list[tuple[str, Problem, Transport]]:
        problem = self.problem(call.form)
        return [("rhs", dataclasses.replace(problem, k=k), "") for k in call.form.depths]

    # --- The kernel ---

    def _as_rows(self, operands: Operands, plan: LaunchPlan) -> Operands:
        return as_rows(operands, plan.layouts) if self.takes_more_rows else operands

    def launch(self, operands: Operands, plan: LaunchPlan) -> Results:
        if self.group.size == 1:
            return self._on_one_device(operands, plan)
        rows = self._as_rows(operands, plan)
        plan = dataclasses.replace(plan, form=self._folded(plan.form))
        gathered = None
        if self.spec.replicates and plan.config.one_shot:
            out = one_shot_kernel.launch(rows, plan, self.group)
        else:
            out, gathered = blocks_kernel.launch(rows, plan, self.group, self.along(plan.form))
        if rows is not operands:
            return (out.reshape(*operands.lhs.shape[:-1], out.shape[-1]),), gathered
        return (out if operands.lhs.ndim > 2 else out[0],), gathered

    def _on_one_device(self, operands: Operands, plan: LaunchPlan) -> Results:
        """Computes the product on a single device. Several pairs are joined along k, which copies them."""
        k_of_lhs, k_of_rhs = (-2 if plan.layouts.transpose_lhs else -1), (-1 if plan.layouts.transpose_rhs else -2)
        rhs = jnp.concatenate(operands.rights, k_of_rhs)
        joined = dataclasses.replace(
            operands,
            lhs=jnp.concatenate(operands.lefts, k_of_lhs),
            rhs_list=(rhs,),
            more_lefts=(),
            more_rights=(),
            passenger=None,
        )
        plan = dataclasses.replace(plan, operation=MATMUL).of(joined)
        return MATMUL.launch(joined, plan)[0], operands.passenger

    def typed(self, operands: Operands) -> Operands:
        # All operands may be typed as the same on all devices. The parts differ all the same, so the kernel's results
        # must be typed as varying: they are if one operand is.
        return dataclasses.replace(operands, lhs=varying(operands.lhs, self.group.names))

    def why_not_batched(self, is_batched: Operands, axis_size: int, plan: LaunchPlan) -> str | None:
        if axis_size < 1:
            return f"the fused kernel takes `jax.vmap` over at least one element, got {axis_size}: {XLA}"
        if any((*is_batched.rights, *(is_batched.column_scales or ()))):
            return (
                "the fused kernel takes `jax.vmap` over `lhs`, an `lhs_scale` with one value per row and what follows "
                f"the sum, and here `rhs`, `rhs_scale` or a scalar `lhs_scale` is mapped: {XLA}"
            )
        return None


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
        self,
        cotangents: Operands,
        d_kept: jax.Array | None,
        operands: Operands,
        wanted: Operands,
        layouts: OperandLayouts,
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
        self, cotangent: jax.Array, rights: Sequence[jax.Array], dtype: DTypeLike, plan: LaunchPlan
    ) -> tuple[Sequence[jax.Array], jax.Array] | None:
        # The cotangent of `lhs` is an all-gather and a product.
        if self.transpose is None or self.dimension != "m" or plan.layouts.transpose_lhs:
            return None
        if any(cotangent.dtype != rhs.dtype or rhs.ndim > 2 for rhs in rights):
            return None
        given = Arguments(
            [cotangent], list(rights), transpose_rhs=not plan.layouts.transpose_rhs, preferred_element_type=dtype
        )
        purpose = "backward pass, cotangent of `lhs` and the gathered one of the result"
        return backward(self.transpose(self), given, plan, purpose)

    def product_cotangent(self, cotangent: jax.Array) -> jax.Array:
        if self.group.size == 1:
            return cotangent
        dimension = cotangent.ndim - (2 if self.dimension == "m" else 1)
        return lax.all_gather(cotangent, self.group.axis_name, axis=dimension, tiled=True)
