"""What the frame asks of the kernel of an operation: whether it serves a call, how it is launched, and its derivatives.

A kernel's module has a class of this kind, which `OperationSpec.kernel` names. The defaults here are those of a kernel
that communicates nothing and whose backward pass XLA computes.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import jax
from jax.typing import DTypeLike

from overlap.choice import dispatch
from overlap.choice.problem import Problem
from overlap.frame import by_xla
from overlap.frame.operands import Operands, Results
from overlap.kernels.config import Config
from overlap.kernels.operations import OperandLayouts
from overlap.kernels.target import Target
from overlap.primitives import PeerGroup

if TYPE_CHECKING:
    from overlap.frame.form import Form
    from overlap.frame.operation import Call, LaunchPlan, Operation


@functools.cache
def kernel_class(name: str) -> type[Kernel]:
    """Returns the class with this name: its module within `overlap`, a colon, and its name there."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(f"overlap.{module}"), attribute)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The kernel of an operation.

    Attributes:
      operation: the operation, with the static data of a call.
      why_usual: why data travels by the usual transport, where the caller may choose another one.
      takes_block_scales: whether the kernel takes scales of blocks.
      batched_together: names of fields of `Operands`. In the kernel all of them have a batch dimension if one has.
    """

    operation: Operation

    why_usual = ""
    takes_block_scales = False
    batched_together = frozenset()

    @property
    def group(self) -> PeerGroup:
        """The devices of an operation that communicates."""
        return self.operation.peers

    # --- Whether it serves a call ---

    def problem(self, form: Form) -> Problem:
        """Returns what a configuration is chosen from."""
        raise NotImplementedError

    def check(self, call: Call, config: Config, target: Target) -> None:
        """Raises, as `limits.check` does, if the kernel cannot serve the call."""
        raise NotImplementedError

    def circumstances(self, call: Call) -> dispatch.Circumstances:
        """Returns what the choice depends on beside the problem, and what the kernel would need."""
        return dispatch.Circumstances()

    # --- How it is launched ---

    def launch(self, operands: Operands, plan: LaunchPlan) -> Results:
        """Runs the kernel on checked operands."""
        raise NotImplementedError

    def typed(self, operands: Operands) -> Operands:
        """Returns the operands, typed as varying along the axes of the kernel's peers (`kernels/varying.py`)."""
        return self.operation.move.typed(operands)

    def why_not_batched(self, is_batched: Operands, axis_size: int, plan: LaunchPlan) -> str | None:
        """Returns why the kernel cannot compute a `jax.vmap` (see `batch`) as its own batch; None if it can."""
        return None

    # --- Derivatives ---

    def before_activation(self, plan: LaunchPlan) -> LaunchPlan:
        """Returns the plan of what goes into the activation, which the derivative of the activation needs.

        Where no kernel has f32 results, as in gathers, or the activation takes several products, it has the results'
        dtype.
        """
        return plan.in_f32 or dataclasses.replace(plan, operation=self.operation.apart, activation=None)

    def of_tangents(self, plan: LaunchPlan) -> Callable[[Operands], Results]:
        """Returns the operation as forward mode differentiates it: a function of operations with derivatives."""
        return plan.by_xla

    def lhs_cotangent(
        self,
        gs: Sequence[jax.Array],
        whole: Operands,
        passenger: jax.Array | None,
        dtype: DTypeLike,
        plan: LaunchPlan,
    ) -> tuple[jax.Array, jax.Array | None] | None:
        """Returns the cotangent Σ g rhsᵀ of the left operand, multiplied, added and scattered by one kernel.

        Also returns the passenger, gathered meanwhile, or None if it does not travel with this kernel. Returns None if
        there is no such kernel: then `times` and the moves do the same. `whole` are the operands, gathered.
        """
        return None

    def lhs_and_product_cotangents(
        self, cotangent: jax.Array, rights: Sequence[jax.Array], dtype: DTypeLike, plan: LaunchPlan
    ) -> tuple[Sequence[jax.Array], jax.Array] | None:
        """Returns g rhsᵀ for the right operand of each pair, and g, the cotangent of the product.

        It is one kernel; None if there is none. Then `times` and the moves do the same.
        """
        return None

    def rhs_cotangent(self, pair: Operands, g: jax.Array, dtype: DTypeLike, plan: LaunchPlan) -> jax.Array | None:
        """Returns the cotangent lhsᵀ g of the right operand of a pair; None if `times` computes it."""
        return None

    def times(self, pair: Operands, layouts: OperandLayouts, dtype: DTypeLike, plan: LaunchPlan) -> jax.Array:
        """Returns a product of the backward pass."""
        return by_xla.times(pair.lhs, pair.rhs_list[0], layouts, dtype)
