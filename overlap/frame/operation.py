"""The interface of an operation: everything in which operations differ.

The defaults here are right for an operation that communicates nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

import jax
from jax.typing import DTypeLike

from overlap.choice import dispatch
from overlap.choice.problem import Problem
from overlap.frame import by_xla
from overlap.frame.operands import LaunchPlan, Operands, Results
from overlap.frame.signatures import AnyMesh
from overlap.kernels.config import Config
from overlap.kernels.layouts import OperandLayouts
from overlap.kernels.operations import OperationSpec
from overlap.kernels.target import Target

if TYPE_CHECKING:
    from overlap.frame.normalize import Call

NOTHING_GATHERED = MappingProxyType({"m": 1, "n": 1, "k": 1})
_WAYS_AROUND = {
    "bias": "add it to the result",
    "addend": "add it to the result",
    "activation": "apply it to the result",
    "lhs_scale": "multiply the result by it",
    "rhs_scale": "multiply the result by it",
}


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation, with the static data of one call, such as its devices. Hashable; equal operations run one kernel.

    Attributes:
      spec: what the operation does, whatever the call.
      takes_lists: whether `rhs` may be a list.
      combines: whether the activation takes the values of all right operands, side by side, and makes one result of
        them.
      sums_pairs: whether `lhs` and `rhs` may be lists of equal length. The products of their pairs are added.
      takes_parts: True: the arrays are a device's parts, as inside `jax.shard_map`. False: they are global.
      transport: how data travels between devices in the fused kernel; empty: no data travels.
      takes_block_scales: whether the fused kernel takes scales of blocks.
      batched_together: names of fields of `Operands`. In the kernel all of them have a batch dimension if one has.
    """

    spec: ClassVar[OperationSpec]
    takes_lists = False
    combines = False
    sums_pairs = False
    takes_parts = True
    transport = ""
    takes_block_scales = False
    batched_together = frozenset()

    @property
    def name(self) -> str:
        """The name of the public function."""
        return self.spec.function

    @property
    def reduces(self) -> bool:
        """Whether products are summed over devices (`reduced`), before bias, addend and activation."""
        return self.spec.sums

    @property
    def apart(self) -> Operation:
        """The operation whose results are one for each right operand, if it `combines` them; else the same."""
        return self

    @property
    def summed_over(self) -> int:
        """How many devices' products are summed, if `reduces`."""
        return 1

    @property
    def gather_factors(self) -> Mapping[str, int]:
        """How many times the size of a shard the product of one device has, in m, n and k.

        The shard is that of `lhs` for m, and that of `rhs` for n and k.
        """
        return NOTHING_GATHERED

    def result_shape(self, m: int, n: int) -> tuple[int, int]:
        """Rows and columns of a device's result.

        Args:
          m: rows of a device's `lhs`.
          n: columns of a device's `rhs`.

        Raises:
          ValueError: the devices cannot have equal blocks of the result.
        """
        return m * self.gather_factors["m"], n * self.gather_factors["n"]

    # --- The choice ---

    def problem(self, operands: Operands, layouts: OperandLayouts, out_dtype: DTypeLike) -> Problem:
        """Returns the call's sizes and dtypes, from which a configuration is chosen."""
        raise NotImplementedError

    def check(self, call: Call, config: Config, target: Target, mesh: AnyMesh | None) -> None:
        """Raises, as `limits.check` does, if the fused kernel cannot serve the call."""
        raise NotImplementedError

    def check_keywords(self, call: Call) -> None:
        """Raises NotImplementedError if the fused kernel does not take the call's epilogue or its scales of blocks."""
        if call.operands.is_block_scaled and not self.takes_block_scales:
            raise NotImplementedError(
                f"the fused kernel of `{self.name}` takes no `lhs_scale` and `rhs_scale` of blocks yet: "
                'use implementation="xla", which runs by default'
            )
        for name in call.given:
            if name not in self.spec.epilogue:
                raise NotImplementedError(
                    f"the fused kernel of `{self.name}` takes no `{name}` yet: {_WAYS_AROUND[name]}, or use "
                    'implementation="xla"'
                )
        if self.combines and ("addend" in call.given or call.operands.is_block_scaled):
            what = "`addend`" if "addend" in call.given else "scales of blocks"
            raise NotImplementedError(
                f"the fused kernel takes no {what} with an `activation` of {len(call.operands.rhs_list)} arrays yet: "
                'use implementation="xla", which runs by default'
            )
        if call.activation is not None and (cannot := call.activation.program.why_not_in_kernel):
            raise NotImplementedError(
                f"the fused kernel cannot take this `activation`: {cannot}; apply it to the result, or use "
                'implementation="xla"'
            )

    def circumstances(self, call: Call, mesh: AnyMesh | None) -> dispatch.Circumstances:
        """Returns what the choice depends on beside the problem, and what a fused kernel would need."""
        del call, mesh
        return dispatch.Circumstances()

    # --- The kernel ---

    def launch(self, operands: Operands, plan: LaunchPlan) -> Results:
        """Runs the kernel on checked operands."""
        raise NotImplementedError

    def typed(self, operands: Operands) -> Operands:
        """Returns the operands, typed as varying along the axes of the kernel's peers (`kernels/varying.py`)."""
        return operands

    def why_not_batched(self, is_batched: Operands, axis_size: int, plan: LaunchPlan) -> str | None:
        """Returns why the kernel cannot compute a `jax.vmap` as its own batch; None if it can.

        Arguments as for `batch.batched`.
        """
        del is_batched, axis_size, plan
        return None

    # --- The implementation by XLA, and the backward pass ---

    def gathered(self, operands: Operands, layouts: OperandLayouts) -> Operands:
        """By XLA: gathers what the operation gathers. Returns the operands of the product that one device computes."""
        del layouts
        return operands

    def reduced(self, product: jax.Array) -> jax.Array:
        """By XLA: sums a device's product over the devices. Returns this device's part of the result."""
        return product

    def product_cotangent(self, cotangent: jax.Array) -> jax.Array:
        """Returns the cotangent of a product from the cotangent of this device's part of the result.

        It is the transpose of `reduced`.
        """
        return cotangent

    def kept(self, gathered_lhs: jax.Array, lhs: jax.Array) -> jax.Array | None:
        """Returns the gathered left operand if it is a result of the operation; else None."""
        del gathered_lhs, lhs
        return None

    def scattered(
        self,
        cotangents: Operands,
        d_kept: jax.Array | None,
        operands: Operands,
        wanted: Operands,
        layouts: OperandLayouts,
    ) -> Operands:
        """Returns the operands' cotangents, given those of the gathered operands: the transpose of `gathered`.

        Args:
          cotangents: of the gathered operands.
          d_kept: the cotangent of `kept`; None if there is none.
          operands: the operands, before they are gathered.
          wanted: which cotangents are wanted, as for `linear.linear_map`.
          layouts: how the operands lie in memory.
        """
        del d_kept, operands, wanted, layouts
        return cotangents

    def gathered_passenger(self, operands: Operands) -> jax.Array | None:
        """By XLA: gathers `Operands.passenger`, if there is one."""
        del operands
        return None

    def lhs_cotangent(
        self,
        gs: Sequence[jax.Array],
        rhs_list: Sequence[jax.Array],
        passenger: jax.Array | None,
        dtype: DTypeLike,
        plan: LaunchPlan,
    ) -> tuple[jax.Array, jax.Array | None] | None:
        """Returns the cotangent Σ g rhsᵀ of the left operand, multiplied, added and scattered by one kernel.

        Also returns the passenger, gathered meanwhile, or None if it does not travel with this kernel.

        None if there is no such kernel. Then `times` and `scattered` do the same.
        """
        del gs, rhs_list, passenger, dtype, plan
        return None

    def lhs_and_product_cotangents(
        self, cotangent: jax.Array, rights: Sequence[jax.Array], dtype: DTypeLike, plan: LaunchPlan
    ) -> tuple[Sequence[jax.Array], jax.Array] | None:
        """Returns g rhsᵀ for the right operand of each pair, and g, which is `product_cotangent(cotangent)`.

        It is one kernel; None if there is none. Then `product_cotangent` and `times` do the same.
        """
        del cotangent, rights, dtype, plan
        return None

    def times(
        self, lhs: jax.Array, rhs: jax.Array, layouts: OperandLayouts, dtype: DTypeLike, plan: LaunchPlan
    ) -> jax.Array:
        """Returns a product of the backward pass."""
        del plan
        return by_xla.times(lhs, rhs, layouts, dtype)
