"""What the frame asks of the kernel of an operation: whether it serves a call, how it is launched, and its derivatives.

A kernel's module has a class of this kind, which `OperationSpec.kernel` names. The defaults here are those of a kernel
that communicates nothing and whose backward pass XLA computes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
from collections.abc import Callable, Sequence

import jax
from jax.typing import DTypeLike

from overlap.choice import dispatch
from overlap.choice.choose import choose_config
from overlap.choice.problem import Problem
from overlap.frame import by_xla
from overlap.frame.form import Form
from overlap.frame.operands import F32, Operands, Results
from overlap.frame.operation import Call, LaunchPlan, Operation
from overlap.kernels import launch
from overlap.kernels.config import Config
from overlap.kernels.operations import OperandLayouts, OperationSpec
from overlap.kernels.target import Target
from overlap.primitives import PeerGroup, marks

_WAYS_AROUND = {
    "bias": "add it to the result",
    "addend": "add it to the result",
    "activation": "apply it to the result",
    "lhs_scale": "multiply the result by it",
    "rhs_scale": "multiply the result by it",
}


@functools.cache
def kernel_class(spec: OperationSpec) -> type[Kernel]:
    """Returns the class of an operation's kernel, which is found by its name."""
    module, _, name = spec.kernel.partition(":")
    return getattr(importlib.import_module(f"overlap.{module}"), name)


def kernel_of(operation: Operation) -> Kernel:
    """Returns what checks, launches and differentiates the kernel of an operation."""
    return kernel_class(operation.spec)(operation)


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

    def problem_of_sizes(self, form: Form, m: int, n: int, k: int, *, batch: int = 1, sides: int = 1) -> Problem:
        """Returns a problem of these sizes, whose other properties are those of `form`."""
        return Problem(
            op=self.operation.spec.name,
            m=m,
            n=n,
            k=k,
            dtype=form.dtype.name,
            out_dtype=form.out_dtype.name,
            devices=1 if self.operation.group is None else self.group.size,
            layout=form.layouts.name,
            batch=batch,
            block_scaled=form.is_block_scaled,
            sides=sides,
        )

    def check(self, call: Call, config: Config, target: Target) -> None:
        """Raises, as `limits.check` does, if the kernel cannot serve the call."""
        raise NotImplementedError

    def check_keywords(self, call: Call) -> None:
        """Raises NotImplementedError if the fused kernel does not take the call's epilogue or its scales of blocks."""
        if call.form.is_block_scaled and not self.takes_block_scales:
            raise NotImplementedError(
                f"the fused kernel of `{self.operation.name}` takes no `lhs_scale` and `rhs_scale` of blocks yet: "
                'use implementation="xla", which runs by default'
            )
        for name in call.given:
            if name not in self.operation.spec.epilogue:
                raise NotImplementedError(
                    f"the fused kernel of `{self.operation.name}` takes no `{name}` yet: {_WAYS_AROUND[name]}, or use "
                    'implementation="xla"'
                )
        if self.operation.combines and ("addend" in call.given or call.form.is_block_scaled):
            what = "`addend`" if "addend" in call.given else "scales of blocks"
            raise NotImplementedError(
                f"the fused kernel takes no {what} with an `activation` of {len(call.operands.rhs_list)} arrays yet: "
                'use implementation="xla", which runs by default'
            )
        if call.not_elementwise:
            raise NotImplementedError(call.not_elementwise)

    def require_config(self, call: Call, config: Config) -> None:
        """Raises ValueError if a configuration contradicts itself, the call (but for its activation) or the device."""
        with contextlib.suppress(NotImplementedError):
            self.check_keywords(call)
            self.check(call, config, dispatch.target())

    def circumstances(self, call: Call) -> dispatch.Circumstances:
        """Returns what the choice depends on beside the problem, and what the kernel would need."""
        return dispatch.Circumstances()

    # --- How it is launched ---

    def launch(self, operands: Operands, plan: LaunchPlan) -> Results:
        """Runs the kernel on checked operands."""
        raise NotImplementedError

    def sealed(
        self, run: Callable[[Operands], jax.Array], name: str, operands: Operands, plan: LaunchPlan
    ) -> jax.Array:
        """Runs a kernel without peers, `run(operands)`, as one opaque operation. `name`: for messages.

        If XLA's partitioner might have to split that operation, XLA's own product is computed instead, unless the
        caller asked for the kernel.
        """
        # While a recording runs, tracing the kernel also adds the kernel's entries to the recording. This side effect
        # would be lost in a function that is sealed.
        if marks.current() is not None:
            return run(operands)

        def otherwise(operands: Operands) -> jax.Array:
            return by_xla.products(operands, plan.layouts, plan.out_dtype, plan.kernel_activation(operands))[0]

        return launch.sealed(run, name, None if plan.must_fuse else otherwise)(operands)

    def typed(self, operands: Operands) -> Operands:
        """Returns the operands, typed as varying along the axes of the kernel's peers (`kernels/varying.py`)."""
        return self.operation.move.typed(operands)

    def why_not_batched(self, is_batched: Operands, axis_size: int, plan: LaunchPlan) -> str | None:
        """Returns why the kernel cannot compute a `jax.vmap` (see `batch`) as its own batch; None if it can."""
        return None

    # --- Derivatives ---

    def in_f32(self, plan: LaunchPlan) -> LaunchPlan | None:
        """Returns the plan for f32 results, without the activation; None if no kernel has such results.

        f32 results take more shared memory and registers. So where the plan's configuration does not fit any more,
        another one is chosen.
        """
        if self.operation.combines:  # The activation takes several products, which are stored in the results' dtype.
            return None
        form = dataclasses.replace(plan.form, out_dtype=F32)
        problem = self.problem(form)
        config = plan.config
        if not problem.accepts(config, plan.target):
            config, _ = choose_config(problem, plan.target)
        if not problem.accepts(config, plan.target):
            return None
        return dataclasses.replace(plan, activation=None, form=form, chosen=config)

    def before_activation(self, plan: LaunchPlan) -> LaunchPlan:
        """Returns the plan of what goes into the activation, which the derivative of the activation needs.

        Where no kernel has f32 results, as in gathers, or the activation takes several products, it has the results'
        dtype.
        """
        return self.in_f32(plan) or dataclasses.replace(plan, operation=self.operation.apart, activation=None)

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
