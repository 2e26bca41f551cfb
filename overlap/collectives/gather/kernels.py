"""The kernels of the operations that gather an operand along a mesh axis: what they take, and what they launch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
from jax.typing import DTypeLike

from overlap.choice import dispatch
from overlap.choice.problem import Problem
from overlap.collectives.backward import AS_FORWARD, backward
from overlap.collectives.gather import joined_kernel, lhs_kernel, rhs_kernel
from overlap.collectives.gather.pull import PullTransport
from overlap.collectives.gather.ring import RingTransport
from overlap.collectives.gather.transport import Transport
from overlap.collectives.kernel import XLA, CollectiveKernel
from overlap.frame.form import Form
from overlap.frame.kernel import kernel_of
from overlap.frame.operands import Operands, Results, folded, with_scales_of_all_rows
from overlap.frame.operation import Call, LaunchPlan, Operation
from overlap.frame.peers import untried
from overlap.frame.signatures import Arguments
from overlap.kernels import limits, operations
from overlap.kernels.operations import MATMUL, SCATTER_M

TRANSPORTS: dict[str, Transport] = {"pull": PullTransport(), "ring": RingTransport()}


class GatherKernel(CollectiveKernel):
    """A product with one operand gathered: the left one along its rows (m), or the right one along n or k.

    Attributes:
      has_batch: whether the kernel takes leading dimensions as a batch; else they are folded into the rows.
    """

    has_batch = False
    batched_together = frozenset({"lhs"})

    def problem(self, form: Form) -> Problem:
        batch = 1 if form.batch is None else form.batch
        k = form.k // self.operation.before.factors["k"]
        sides = len(form.widths) if self.operation.combines else 1
        # Several right operands count as one of their total width.
        if self.has_batch:
            return self.problem_of_sizes(form, form.m, form.n, k, batch=max(batch, 1), sides=sides)
        return self.problem_of_sizes(form, batch * form.m, form.n, k, sides=sides)

    def circumstances(self, call: Call) -> dispatch.Circumstances:
        return dispatch.Circumstances(why_not_by_default=untried(self.group))

    def products(self, call: Call) -> list[tuple[str, Problem, operations.Transport]]:
        self._check_operands(call)
        problem = self.problem(call.form)
        transport = self.operation.transport
        widths = zip(call.names, call.form.widths, strict=True)
        of_one = [(name, dataclasses.replace(problem, n=n * problem.sides)) for name, n in widths]
        return [(name, each, transport if self.group.size > 1 else "") for name, each in of_one]

    def _check_operands(self, call: Call) -> None:
        """Raises NotImplementedError for forms of operands that no configuration takes."""
        if call.operands.lhs.dtype.itemsize == 1 and "nt" not in self.operation.spec.layouts:
            # The tensor cores need both 8-bit operands with k contiguous in memory, so `rhs` must be transposed.
            raise NotImplementedError(
                f"the fused kernel of `{self.operation.name}` takes no 8-bit operands yet, got "
                f"{call.operands.lhs.dtype.name}: cast them, or {XLA}"
            )
        layouts = call.form.layouts
        lhs, rhs = layouts.name
        for operand, alone in (("lhs", f"{lhs}n"), ("rhs", f"n{rhs}")):
            if alone not in self.operation.spec.layouts:
                raise NotImplementedError(
                    f"the fused kernel of `{self.operation.name}` takes no `transpose_{operand}` yet: transpose it, or "
                    f"{XLA}"
                )
        if layouts.transpose_lhs and not self.has_batch and (call.form.batch or 1) > 1:
            raise NotImplementedError(
                f"the fused kernel takes one matrix as a transposed `lhs`, got leading dimensions {call.batch}: "
                f"transpose it, or {XLA}"
            )
        rhs_list = call.operands.rhs_list
        if len({rhs.dtype for rhs in rhs_list}) > 1:
            raise NotImplementedError(
                "the fused kernel needs all matrices of `rhs` to have the same dtype, got "
                f"{', '.join(rhs.dtype.name for rhs in rhs_list)}: cast them, or {XLA}"
            )

    def why_not_batched(self, is_batched: Operands, axis_size: int, plan: LaunchPlan) -> str | None:
        if axis_size < 1:
            return f"the fused kernel takes `jax.vmap` over at least one element, got {axis_size}: {XLA}"
        if plan.layouts.transpose_lhs and not self.has_batch and is_batched.lhs:
            return (
                "the fused kernel takes one matrix as a transposed `lhs`, and `jax.vmap` maps over several: transpose "
                f"it, or {XLA}"
            )
        if any((*is_batched.rhs_list, *(is_batched.column_scales or ()), *(is_batched.rhs_block_scales or ()))):
            if not self.operation.takes_lists:
                return f"the fused kernel takes `jax.vmap` over `lhs` only, and here `rhs` is mapped: {XLA}"
            return (
                "the fused kernel takes `jax.vmap` over `lhs` and an `lhs_scale` with one value per row only, and here "
                "`rhs`, `rhs_scale` or a scalar `lhs_scale` is mapped: pass right operands of one `lhs` as a "
                f"list, one value per row, or {XLA}"
            )
        return None


class GatherLhs(GatherKernel):
    """A product whose left operand is gathered, along its rows."""

    why_usual = TRANSPORTS["pull"].why
    has_batch = True

    @property
    def takes_block_scales(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        # Scales of blocks must travel with the rows, which the transport "ring" does not do.
        return TRANSPORTS[self.operation.transport].brings_scales

    def circumstances(self, call: Call) -> dispatch.Circumstances:
        others = super().circumstances(call)
        if self.group.size == 1:
            return others
        needs = TRANSPORTS[self.operation.transport].needs_all_ctas
        return dispatch.Circumstances(
            self.operation.transport, self.operation.transport_reason, needs, others.why_not_by_default
        )

    def launch(self, operands: Operands, plan: LaunchPlan) -> Results:
        if self.group.size == 1:
            outs, gathered = self._on_one_device(operands, plan)
        elif plan.config.joined and self.operation.transport == "pull" and not operands.is_block_scaled:
            outs, gathered = joined_kernel.launch(
                operands, plan, self.group, returns_gathered=self.operation.returns_gathered
            )
        else:
            outs, gathered = lhs_kernel.launch(
                with_scales_of_all_rows(operands),
                plan,
                self.group,
                TRANSPORTS[self.operation.transport],
                keeps_own=self.operation.returns_gathered,
            )
        return outs, None if gathered is None else self.operation.before.kept(gathered, operands.lhs)

    def _on_one_device(self, operands: Operands, plan: LaunchPlan) -> Results:
        """Computes the products on a single device, which gathers nothing. Leading dimensions are folded into rows."""
        alone = Operation(MATMUL, combines=self.operation.combines)
        plan = dataclasses.replace(plan, operation=alone)
        rows = folded(operands)
        calls = [rows] if alone.combines else [rows.for_rhs(index) for index in range(len(rows.rhs_list))]
        outs = [out for given in calls for out in kernel_of(alone).launch(given, plan.of(given))[0]]
        lhs = operands.lhs
        unfolded = tuple(out.reshape(*lhs.shape[:-1], -1) for out in outs)
        return unfolded, lhs if self.operation.returns_gathered else None

    def lhs_cotangent(
        self,
        gs: Sequence[jax.Array],
        whole: Operands,
        passenger: jax.Array | None,
        dtype: DTypeLike,
        plan: LaunchPlan,
    ) -> tuple[jax.Array, jax.Array | None] | None:
        # The cotangent of `lhs` is a sum of products and a reduce-scatter.
        if plan.layouts.transpose_lhs:
            return None
        rhs_list = whole.rhs_list
        if any(g.dtype != rhs.dtype or rhs.ndim > 2 for g, rhs in zip(gs, rhs_list, strict=True)):
            return None
        # Chunks of a passenger are whole rows, or parts of 16 bytes, and pass through buffers of the result's dtype. On
        # the ring, devices read nothing of their peers. Else XLA gathers.
        if passenger is not None:
            row_bytes = passenger.shape[-1] * passenger.dtype.itemsize
            by_xla = self.operation.transport == "ring" or passenger.dtype != dtype
            if by_xla or row_bytes % limits.TMA_ROW_BYTES or not passenger.size:
                passenger = None
        given = Arguments(
            list(gs), list(rhs_list), transpose_rhs=not plan.layouts.transpose_rhs, preferred_element_type=dtype
        )
        purpose = f"backward pass, cotangent of `lhs`{'' if passenger is None else ', `lhs` gathered beside it'}"
        transport = "ring" if self.operation.transport == "ring" else "push"
        transposed = Operation(SCATTER_M, self.group, transport=transport, transport_reason=AS_FORWARD)
        found = backward(transposed, given, plan, purpose, passenger)
        return found if found is None or passenger is not None else (found, None)


class GatherRhs(GatherKernel):
    """A product whose right operand is gathered, along n or k."""

    def launch(self, operands: Operands, plan: LaunchPlan) -> Results:
        # Leading dimensions are folded into the rows. That is possible for a transposed `lhs` as well, because it has
        # at most one batch element.
        rows = folded(operands)
        plan = plan.of(rows)
        if self.group.size == 1:
            alone = Operation(MATMUL)
            (out,), _ = kernel_of(alone).launch(rows, dataclasses.replace(plan, operation=alone))
        else:
            out = rhs_kernel.launch(rows, plan, self.group, self.operation.spec.gathers)
        leading = operands.lhs.shape[:-2]
        return (out.reshape(*leading, out.shape[0] // math.prod(leading), out.shape[1]),), None
