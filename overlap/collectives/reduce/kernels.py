"""The kernels of the operations that sum products over the devices of a mesh axis: what they take, what they launch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from overlap.choice import dispatch
from overlap.choice.problem import Problem
from overlap.collectives import communicator
from overlap.collectives.backward import AS_FORWARD, backward
from overlap.collectives.kernel import XLA, CollectiveKernel
from overlap.collectives.reduce import blocks_kernel, one_shot_kernel
from overlap.frame.form import Form
from overlap.frame.kernel import kernel_of
from overlap.frame.operands import Operands, Results, as_rows
from overlap.frame.operation import Call, LaunchPlan, Operation
from overlap.frame.peers import untried
from overlap.frame.signatures import Arguments
from overlap.kernels.config import Config
from overlap.kernels.operations import GATHER_LHS, MATMUL, Dimension, Transport
from overlap.kernels.target import Target
from overlap.kernels.varying import axes_of, same_along


class SumKernel(CollectiveKernel):
    """A product that is summed over devices.

    Each device computes one block of the sum, some rows (m) or columns (n), or (one shot) the whole sum.
    """

    batched_together = frozenset({"lhs", "more_lefts", "passenger"})

    @property
    def takes_more_rows(self) -> bool:
        """Whether leading dimensions of the left operand may be folded into its rows."""
        return self.operation.spec.scatters != "m"

    def problem(self, form: Form) -> Problem:
        form = self._folded(form)
        return self.problem_of_sizes(form, form.m, form.n, form.k, batch=max(form.batch or 1, 1))

    def _folded(self, form: Form) -> Form:
        return form.folded if self.takes_more_rows else form

    def along(self, form: Form) -> Dimension:
        """Returns the dimension in which the sum is cut into blocks: "m" or "n"."""
        return self.problem(form).scattered

    def circumstances(self, call: Call) -> dispatch.Circumstances:
        def scratch_bytes(config: Config, target: Target) -> int:
            if self.group.size == 1:
                return 0
            plan = LaunchPlan(self.operation, self._folded(call.form), target, config)
            operands = self._as_rows(call.operands, plan)
            if self.operation.spec.replicates and config.one_shot:
                return one_shot_kernel.scratch_bytes(operands, plan, self.group.size)
            return blocks_kernel.scratch_bytes(operands, plan, self.group.size, self.along(plan.form))

        transport = self.operation.transport if self.operation.transport_reason and self.group.size > 1 else ""
        return dispatch.Circumstances(
            transport,
            self.operation.transport_reason,
            why_not_by_default=untried(self.group),
            scratch_bytes=scratch_bytes,
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
        if self.operation.spec.replicates and plan.config.one_shot:
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
        alone = Operation(MATMUL)
        return kernel_of(alone).launch(joined, dataclasses.replace(plan, operation=alone).of(joined))[
            0
        ], operands.passenger

    def why_not_batched(self, is_batched: Operands, axis_size: int, plan: LaunchPlan) -> str | None:
        if axis_size < 1:
            return f"the fused kernel takes `jax.vmap` over at least one element, got {axis_size}: {XLA}"
        if any((*is_batched.rights, *(is_batched.column_scales or ()))):
            return (
                "the fused kernel takes `jax.vmap` over `lhs`, an `lhs_scale` with one value per row and what follows "
                f"the sum, and here `rhs`, `rhs_scale` or a scalar `lhs_scale` is mapped: {XLA}"
            )
        return None


class ReduceScatter(SumKernel):
    """A product whose sum over devices is scattered, by rows or columns."""

    why_usual = communicator.WHY_DIRECT

    def lhs_and_product_cotangents(
        self, cotangent: jax.Array, rights: Sequence[jax.Array], dtype: DTypeLike, plan: LaunchPlan
    ) -> tuple[Sequence[jax.Array], jax.Array] | None:
        # The cotangent of `lhs` is an all-gather and a product.
        if self.operation.spec.scatters != "m" or plan.layouts.transpose_lhs:
            return None
        if any(cotangent.dtype != rhs.dtype or rhs.ndim > 2 for rhs in rights):
            return None
        given = Arguments(
            [cotangent], list(rights), transpose_rhs=not plan.layouts.transpose_rhs, preferred_element_type=dtype
        )
        purpose = "backward pass, cotangent of `lhs` and the gathered one of the result"
        transport = "ring" if self.operation.transport == "ring" else "pull"
        transposed = Operation(
            GATHER_LHS, self.group, returns_gathered=True, transport=transport, transport_reason=AS_FORWARD
        )
        return backward(transposed, given, plan, purpose)


class AllReduce(SumKernel):
    """A product that is summed over devices, where all get the whole sum."""

    def check(self, call: Call, config: Config, target: Target) -> None:
        operands = call.operands
        local = {"bias": operands.biases, "addend": operands.addends, "activation": operands.scalars}
        for name, arrays in local.items():
            if axes := axes_of(*jax.tree.leaves(arrays)) & set(self.group.names):
                what = "what `activation` captures" if name == "activation" else f"`{name}`"
                raise NotImplementedError(
                    f"the fused kernel takes {what} to be the same on all devices, and by its type it varies along "
                    f"{min(axes, key=str)!r}: apply it to the result, or {XLA}"
                )
        super().check(call, config, target)

    def launch(self, operands: Operands, plan: LaunchPlan) -> Results:
        (out,), _ = super().launch(operands, plan)
        return (same_along(out, self.group.names),), None
