"""What is special about an operation: all that the frame asks for, with what is right where nothing is communicated."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import jax

from overlap.choice import dispatch
from overlap.choice.problem import Problem
from overlap.frame import by_xla
from overlap.frame.operands import LaunchPlan, Operands, Results
from overlap.kernels.config import Config
from overlap.kernels.layouts import OperandLayouts
from overlap.kernels.target import Target

if TYPE_CHECKING:
    from overlap.frame.normalize import Call

NOTHING_GATHERED = MappingProxyType({"m": 1, "n": 1, "k": 1})
_WAYS_AROUND = {
    "bias": "add it to the result", "addend": "add it to the result", "activation": "apply it to the result",
    "lhs_scale": "multiply the result by it", "rhs_scale": "multiply the result by it",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation, and what is special about one call of it. Hashable; equal ones run the same kernel.

    Attributes:
      name: the public function's.
      takes_lists: whether `rhs` may be a list.
      takes_parts: whether the arrays are a device's parts, as inside `jax.shard_map`, or global ones.
      gathers_rows: whether an `lhs_scale` of shape (1, 1) is the scale of a device's only row (True) or a scalar.
      reduces: whether products are summed over devices (`reduced`), before bias, addend and activation.
      spreads: whether all devices have the whole sum, if `reduces`; else each has a block.
      transport: how data travels between devices in the fused kernel; empty: nothing does.
      epilogue: the keywords of the epilogue that the fused kernel takes.
      takes_block_scales: whether it takes scales of blocks.
      batched_together: the fields of `Operands` that have a batch in the kernel if any has.
    """

    name = ""
    takes_lists = False
    takes_parts = True
    gathers_rows = False
    reduces = False
    replicates = False
    transport = ""
    epilogue = frozenset()
    takes_block_scales = False
    batched_together = frozenset()

    @property
    def summed_over(self) -> int:
        """How many devices' products are summed, if `reduces`."""
        return 1

    @property
    def gather_factors(self) -> Mapping[str, int]:
        """m, n and k of the product of one device, over those that `lhs` (m) and `rhs` (n, k) have per shard."""
        return NOTHING_GATHERED

    def result_shape(self, m: int, n: int) -> tuple[int, int]:
        """Rows and columns of a result, from those that `lhs` and `rhs` have per shard. ValueError: none fits."""
        return m * self.gather_factors["m"], n * self.gather_factors["n"]

    # --- The choice ---

    def problem(self, operands: Operands, layouts: OperandLayouts, out_dtype: Any) -> Problem:
        """The call's sizes, as the choice of a configuration sees them."""
        raise NotImplementedError

    def check(self, call: Call, config: Config, target: Target, mesh: Any) -> None:
        """Whether the fused kernel can serve the call. Raises as `limits.check` does."""
        raise NotImplementedError

    def check_keywords(self, call: Call) -> None:
        """Raises NotImplementedError if the fused kernel has no such epilogue, or takes no scales of blocks."""
        if call.operands.is_block_scaled and not self.takes_block_scales:
            raise NotImplementedError(
                f"the fused kernel of `{self.name}` takes no `lhs_scale` and `rhs_scale` of blocks yet: "
                'use implementation="xla", which runs by default'
            )
        for name in call.given:
            if name not in self.epilogue:
                raise NotImplementedError(
                    f"the fused kernel of `{self.name}` takes no `{name}` yet: {_WAYS_AROUND[name]}, or use "
                    'implementation="xla"'
                )
        if call.activation is not None and (cannot := call.activation.program.why_not_in_kernel):
            raise NotImplementedError(
                f"the fused kernel cannot take this `activation`: {cannot}; apply it to the result, or use "
                'implementation="xla"'
            )

    def circumstances(self, call: Call, mesh: Any) -> dispatch.Circumstances:
        """What else the choice depends on, and what it entails."""
        del call, mesh
        return dispatch.Circumstances()

    # --- The kernel ---

    def launch(self, operands: Operands, plan: LaunchPlan) -> Results:
        """Runs the kernel on checked operands."""
        raise NotImplementedError

    def typed(self, operands: Operands) -> Operands:
        """The operands, typed as varying along the mesh axes along which the kernel communicates."""
        return operands

    def why_not_folded(self, is_batched: Operands, axis_size: int, plan: LaunchPlan) -> str | None:
        """Why the kernel has no batch for what `jax.vmap` is over; None if it has."""
        del is_batched, axis_size, plan
        return None

    # --- The same by XLA, and the backward pass ---

    def gathered(self, operands: Operands, layouts: OperandLayouts) -> Operands:
        """By XLA: the operands of the product that one device computes."""
        del layouts
        return operands

    def reduced(self, product: jax.Array) -> jax.Array:
        """By XLA: this device's part of the result, from its product."""
        return product

    def spread(self, cotangent: jax.Array) -> jax.Array:
        """The transpose of `reduced`."""
        return cotangent

    def kept(self, gathered_lhs: jax.Array, lhs: jax.Array) -> jax.Array | None:
        """What of the gathered left operand is a result as well."""
        del gathered_lhs, lhs
        return None

    def scattered(
        self, cotangents: Operands, d_kept: Any, operands: Operands, wanted: Operands, layouts: OperandLayouts
    ) -> Operands:
        """The transpose of `gathered`: from cotangents of its results (and of `kept`) to those of the operands."""
        del d_kept, operands, wanted, layouts
        return cotangents

    def lhs_cotangent(self, g: jax.Array, rhs: jax.Array, dtype: Any, plan: LaunchPlan) -> jax.Array | None:
        """Of a single right operand: the cotangent g rhsᵀ of the left one as `scattered` gives it, by one kernel.

        None if there is no such kernel: then `times` and `scattered` do it.
        """
        del g, rhs, dtype, plan
        return None

    def rhs_cotangent(self, lhs: jax.Array, g: jax.Array, dtype: Any, plan: LaunchPlan) -> jax.Array | None:
        """The cotangent lhsᵀ g of a right operand, the operand `lhs` being gathered by the same kernel.

        None if there is no such kernel: then `gathered` and `times` do it.
        """
        del lhs, g, dtype, plan
        return None

    def spread_and_times(
        self, cotangent: jax.Array, rhs: jax.Array, dtype: Any, plan: LaunchPlan
    ) -> tuple[jax.Array, jax.Array] | None:
        """g rhsᵀ and g itself, which is what `spread` gives, by one kernel; None if there is no such kernel."""
        del cotangent, rhs, dtype, plan
        return None

    def times(self, lhs: Any, rhs: Any, layouts: OperandLayouts, dtype: Any, plan: LaunchPlan) -> jax.Array:
        """A product of the backward pass."""
        del plan
        return by_xla.times(lhs, rhs, layouts, dtype)
