"""The common base of the operations that gather an operand along a mesh axis."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from overlap.choice import dispatch
from overlap.choice.problem import Problem
from overlap.collectives.backward import Transpose, backward
from overlap.collectives.collective import XLA, Collective
from overlap.collectives.gather import joined_kernel, lhs_kernel
from overlap.collectives.gather.pull import PullTransport
from overlap.collectives.gather.ring import RingTransport
from overlap.collectives.gather.transport import Transport
from overlap.frame.form import Form
from overlap.frame.operands import Operands, Results, folded, summed_as
from overlap.frame.operation import NOTHING_GATHERED, Call, LaunchPlan, Operation
from overlap.frame.signatures import Arguments, Leaf
from overlap.kernels import limits, operations
from overlap.kernels.operations import GATHER_LHS, Dimension, OperandLayouts
from overlap.kernels.varying import axes_of, part_of, same_along, varying
from overlap.single_gpu.matmul import Matmul


@dataclasses.dataclass(frozen=True)
class AllGather(Collective):
    """A product with one operand gathered: the left one along its rows (m), or the right one along n or k.

    Attributes:
      transport: how the shards travel in the fused kernel.
      has_batch: whether the fused kernel takes leading dimensions as a batch; else they are folded into the rows.
    """

    transport: Literal["pull", "ring"] = dataclasses.field(default="pull", kw_only=True)

    has_batch = False
    batched_together = frozenset({"lhs"})

    @property
    def takes_lists(self) -> bool:
        return self.along == "m"

    @property
    def along(self) -> Dimension:
        """The dimension of the product along which the shards are gathered."""
        return self.spec.gathers

    @property
    def gather_factors(self) -> dict[str, int]:
        return {**NOTHING_GATHERED, self.along: self.group.size}

    # --- The choice ---

    def problem(self, form: Form) -> Problem:
        batch = 1 if form.batch is None else form.batch
        return Problem(
            op=self.spec.name,
            m=form.m if self.has_batch else batch * form.m,
            n=form.n,  # Several right operands count as one of their total width.
            k=form.k // self.gather_factors["k"],
            dtype=form.dtype.name,
            out_dtype=form.out_dtype.name,
            devices=self.group.size,
            layout=form.layouts.name,
            batch=max(batch, 1) if self.has_batch else 1,
            block_scaled=form.is_block_scaled,
            sides=len(form.widths) if self.combines else 1,
        )

    def circumstances(self, call: Call) -> dispatch.Circumstances:
        return dispatch.Circumstances(why_not_by_default=self.untried())

    def products(self, call: Call) -> list[tuple[str, Problem, operations.Transport]]:
        self._check_operands(call)
        problem, transport = self.problem(call.form), self.transport
        widths = zip(call.names, call.form.widths, strict=True)
        of_one = [(name, dataclasses.replace(problem, n=n * problem.sides)) for name, n in widths]
        return [(name, each, transport if self.group.size > 1 else "") for name, each in of_one]

    def _check_operands(self, call: Call) -> None:
        """Raises NotImplementedError for forms of operands that no configuration takes."""
        if call.operands.lhs.dtype.itemsize == 1 and "nt" not in self.spec.layouts:
            # The tensor cores need both 8-bit operands with k contiguous in memory, so `rhs` must be transposed.
            raise NotImplementedError(
                f"the fused kernel of `{self.name}` takes no 8-bit operands yet, got {call.operands.lhs.dtype.name}: "
                f"cast them, or {XLA}"
            )
        layouts = call.form.layouts
        lhs, rhs = layouts.name
        for operand, alone in (("lhs", f"{lhs}n"), ("rhs", f"n{rhs}")):
            if alone not in self.spec.layouts:
                raise NotImplementedError(
                    f"the fused kernel of `{self.name}` takes no `transpose_{operand}` yet: transpose it, or {XLA}"
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

    # --- The same by XLA, and derivatives ---

    def typed(self, operands: Operands) -> Operands:
        if self.along == "m":
            return dataclasses.replace(operands, lhs=varying(operands.lhs, self.group.names))
        rhs_list = tuple(varying(rhs, self.group.names) for rhs in operands.rhs_list)
        return dataclasses.replace(operands, rhs_list=rhs_list)

    def gathered(self, operands: Operands, layouts: OperandLayouts) -> Operands:
        return self._move_shards(operands, layouts, self._gather)

    def scattered(
        self,
        cotangents: Operands,
        d_kept: jax.Array | None,
        operands: Operands,
        wanted: Operands,
        layouts: OperandLayouts,
    ) -> Operands:
        if d_kept is not None and wanted.lhs is not None:
            # The cotangent of the gathered operand may be typed as the same on all devices. Then each device takes its
            # share of that cotangent.
            axes = axes_of(operands.lhs, *operands.rhs_list, cotangents.lhs)
            d_lhs = cotangents.lhs + part_of(d_kept.astype(jnp.float32), axes)
            cotangents = dataclasses.replace(cotangents, lhs=d_lhs)

        def as_sent(x: jax.Array | None, dtype: Leaf) -> jax.Array | None:
            # Cotangents that are summed over devices are sent in the result's dtype, unless that has 8 bits: sums of
            # 8-bit values are too inexact. Those of float16 could overflow.
            return None if x is None else x.astype(summed_as(dtype) if dtype.itemsize > 1 else jnp.bfloat16)

        if self.along == "m":
            cotangents = dataclasses.replace(cotangents, lhs=as_sent(cotangents.lhs, wanted.lhs))
        else:
            rhs_list = tuple(map(as_sent, cotangents.rhs_list, wanted.rhs_list))
            cotangents = dataclasses.replace(cotangents, rhs_list=rhs_list)
        return self._move_shards(cotangents, layouts, self._scatter)

    def _move_shards(self, operands: Operands, layouts: OperandLayouts, move: Callable[[Leaf, int], Leaf]) -> Operands:
        """Applies `move(array, dimension)` to all sharded arrays; `dimension` is negative: -1 is the last one."""
        if self.along == "m":
            rows, own = -1 if layouts.transpose_lhs else -2, operands.row_scale
            return dataclasses.replace(operands, lhs=move(operands.lhs, rows), row_scale=move(own, -1))
        is_last = (self.along == "n") != layouts.transpose_rhs
        rhs_list = tuple(move(rhs, -1 if is_last else -2) for rhs in operands.rhs_list)
        scales = operands.column_scales
        if self.along == "n" and scales is not None:
            scales = tuple(move(x, -1) for x in scales)
        return dataclasses.replace(operands, rhs_list=rhs_list, column_scales=scales)

    def _gather(self, x: Leaf, dimension: int) -> Leaf:
        if x is None or x.shape[dimension] == 0:  # XLA rejects a gather of an empty dimension.
            return x
        return lax.all_gather(x, self.group.axis_name, axis=x.ndim + dimension, tiled=True)

    def _scatter(self, x: Leaf, dimension: int) -> Leaf:
        if x is None or x.shape[dimension] == 0:
            return x
        return lax.psum_scatter(x, self.group.axis_name, scatter_dimension=x.ndim + dimension, tiled=True)

    def why_not_batched(self, is_batched: Operands, axis_size: int, plan: LaunchPlan) -> str | None:
        if axis_size < 1:
            return f"the fused kernel takes `jax.vmap` over at least one element, got {axis_size}: {XLA}"
        if plan.layouts.transpose_lhs and not self.has_batch and is_batched.lhs:
            return (
                "the fused kernel takes one matrix as a transposed `lhs`, and `jax.vmap` maps over several: transpose "
                f"it, or {XLA}"
            )
        if any((*is_batched.rhs_list, *(is_batched.column_scales or ()), *(is_batched.rhs_block_scales or ()))):
            if not self.takes_lists:
                return f"the fused kernel takes `jax.vmap` over `lhs` only, and here `rhs` is mapped: {XLA}"
            return (
                "the fused kernel takes `jax.vmap` over `lhs` and an `lhs_scale` with one value per row only, and here "
                "`rhs`, `rhs_scale` or a scalar `lhs_scale` is mapped: pass right operands of one `lhs` as a "
                f"list, one value per row, or {XLA}"
            )
        return None


TRANSPORTS: dict[str, Transport] = {"pull": PullTransport(), "ring": RingTransport()}


@dataclasses.dataclass(frozen=True)
class AllGatherLhs(AllGather):
    """A product whose left operand is gathered. See `AllGather`.

    Attributes:
      transport_reason: why the transport is used.
      returns_gathered: whether the gathered left operand is a result as well.
      combines: as in `Operation`.
      transpose: makes the operation that computes the cotangent of `lhs`; None: XLA does.
    """

    transport_reason: str = ""
    returns_gathered: bool = False
    combines: bool = False
    transpose: Transpose | None = None

    spec = GATHER_LHS
    has_batch = True

    @property
    def apart(self) -> Operation:
        return dataclasses.replace(self, combines=False)

    @property
    def takes_block_scales(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        # Scales of blocks must travel with the rows, which the transport "ring" does not do.
        return TRANSPORTS[self.transport].brings_scales

    def circumstances(self, call: Call) -> dispatch.Circumstances:
        others = super().circumstances(call)
        if self.group.size == 1:
            return others
        needs = TRANSPORTS[self.transport].needs_all_ctas
        return dispatch.Circumstances(self.transport, self.transport_reason, needs, others.why_not_by_default)

    def launch(self, operands: Operands, plan: LaunchPlan) -> Results:
        if self.group.size == 1:
            outs, gathered = self._on_one_device(operands, plan)
        elif plan.config.joined and self.transport == "pull" and not operands.is_block_scaled:
            outs, gathered = joined_kernel.launch(operands, plan, self.group, returns_gathered=self.returns_gathered)
        else:
            outs, gathered = lhs_kernel.launch(
                folded(operands, keep=True),
                plan,
                self.group,
                TRANSPORTS[self.transport],
                keeps_own=self.returns_gathered,
            )
        return outs, None if gathered is None else self.kept(gathered, operands.lhs)

    def _on_one_device(self, operands: Operands, plan: LaunchPlan) -> Results:
        """Computes the products on a single device, which gathers nothing. Leading dimensions are folded into rows."""
        of_one = Matmul(combines=self.combines)
        of_rows = folded(operands, keep=False)
        plan = dataclasses.replace(plan, operation=of_one)
        each = [of_rows] if self.combines else [of_rows.for_rhs(index) for index in range(len(of_rows.rhs_list))]
        outs = [out for given in each for out in of_one.launch(given, plan.of(given))[0]]
        lhs = operands.lhs
        return tuple(out.reshape(*lhs.shape[:-1], -1) for out in outs), lhs if self.returns_gathered else None

    def kept(self, gathered_lhs: jax.Array, lhs: jax.Array) -> jax.Array | None:
        """Returns the gathered left operand, typed as the same on all devices of the group; None if it is no result.

        Along other mesh axes its type varies as the type of `lhs` does.
        """
        if not self.returns_gathered:
            return None
        return same_along(gathered_lhs, {*self.group.names, *(axes_of(gathered_lhs) - axes_of(lhs))})

    def lhs_cotangent(
        self,
        gs: Sequence[jax.Array],
        whole: Operands,
        passenger: jax.Array | None,
        dtype: DTypeLike,
        plan: LaunchPlan,
    ) -> tuple[jax.Array, jax.Array | None] | None:
        # The cotangent of `lhs` is a sum of products and a reduce-scatter.
        if self.transpose is None or plan.layouts.transpose_lhs:
            return None
        rhs_list = whole.rhs_list
        if any(g.dtype != rhs.dtype or rhs.ndim > 2 for g, rhs in zip(gs, rhs_list, strict=True)):
            return None
        # Chunks of a passenger are whole rows, or parts of 16 bytes, and pass through buffers of the result's dtype. On
        # the ring, devices read nothing of their peers. Else XLA gathers.
        if passenger is not None:
            row_bytes = passenger.shape[-1] * passenger.dtype.itemsize
            by_xla = self.transport == "ring" or passenger.dtype != dtype
            if by_xla or row_bytes % limits.TMA_ROW_BYTES or not passenger.size:
                passenger = None
        given = Arguments(
            list(gs), list(rhs_list), transpose_rhs=not plan.layouts.transpose_rhs, preferred_element_type=dtype
        )
        purpose = f"backward pass, cotangent of `lhs`{'' if passenger is None else ', `lhs` gathered beside it'}"
        found = backward(self.transpose(self), given, plan, purpose, passenger)
        return found if found is None or passenger is not None else (found, None)
