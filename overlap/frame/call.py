"""The way of every call, written once: normalize → check → decide → plan → derivatives and `vmap` → launch.

A public operation is a function from its arguments to an `Operation` and a checked `Call` (its `prepare`); `run` does
the rest, and `explain` stops behind the decision. What a kernel computes lies behind a primitive of jax with rules of
its own for derivatives (`derivative.py`) and for `jax.vmap` (`batch.py`).
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax

from overlap.choice import dispatch
from overlap.choice.problem import Problem
from overlap.frame import arguments, by_xla, sharded
from overlap.frame.batch import batched
from overlap.frame.derivative import derivative
from overlap.frame.normalize import ARRAYS, Call
from overlap.frame.operands import Operands, Plan
from overlap.frame.primitive import Primitive
from overlap.kernels.config import Config
from overlap.kernels.layouts import OperandLayouts
from overlap.kernels.target import Target

Results = tuple[tuple[jax.Array, ...], jax.Array | None]
NOT_GROWN = types.MappingProxyType({"m": 1, "n": 1, "k": 1})
_WAYS_AROUND = {
    "bias": "add it to the result", "addend": "add it to the result", "activation": "apply it to the result",
    "lhs_scale": "multiply the result by it", "rhs_scale": "multiply the result by it",
}  # fmt: skip


class Operation(Protocol):
    """What is special about an operation, and about one call of it: all that the frame asks for. Hashable.

    Attributes:
      name: the public function's.
      takes_lists: whether `rhs` may be a list.
      grows: by which factors the product of one device has more rows ("m"), columns ("n") or a longer contraction ("k")
        than `rhs` and `lhs` have per shard.
      gathers_rows: whether the rows of several devices are put together, so that a scale of one row is no scalar.
      epilogue: the keywords of the epilogue that the fused kernel takes.
      batch_together: the fields of `Operands` that have a batch in the kernel if one of them has.
    """

    @property
    def name(self) -> str: ...

    @property
    def takes_lists(self) -> bool: ...

    @property
    def grows(self) -> Mapping[str, int]: ...

    @property
    def gathers_rows(self) -> bool: ...

    @property
    def epilogue(self) -> frozenset[str]: ...

    @property
    def batch_together(self) -> frozenset[str]: ...

    def problem(self, call: Call) -> Problem:
        """The call's sizes, as the choice of a configuration sees them."""
        ...

    def check(self, call: Call, config: Config, target: Target, mesh: Any) -> None:
        """Whether the fused kernel can serve the call. Raises as `limits.check` does."""
        ...

    def circumstances(self, mesh: Any) -> dispatch.Circumstances:
        """What else the choice depends on."""
        ...

    def launch(self, operands: Operands, plan: Plan) -> Results:
        """Runs the kernel on checked operands."""
        ...

    def typed(self, operands: Operands) -> Operands:
        """The operands, typed as varying along the mesh axes along which the kernel communicates."""
        ...

    def gathered(self, operands: Operands, layouts: OperandLayouts) -> Operands:
        """By XLA: the operands of the product that one device computes."""
        ...

    def kept(self, gathered_lhs: jax.Array, lhs: jax.Array) -> jax.Array | None:
        """What of the gathered left operand is a result as well."""
        ...

    def scattered(
        self, cotangents: Operands, d_kept: Any, operands: Operands, wanted: Operands, layouts: OperandLayouts
    ) -> Operands:
        """The transpose of `gathered`: from cotangents of its results to those of the operands."""
        ...

    def times(self, lhs: Any, rhs: Any, layouts: OperandLayouts, dtype: Any, plan: Plan) -> jax.Array:
        """A product of the backward pass."""
        ...

    def why_not_folded(self, is_batched: Operands, axis_size: int) -> str | None:
        """Why the kernel has no batch for what `jax.vmap` is over; None if it has."""
        ...


Prepare = Callable[..., tuple[Operation, Call]]


def decide(
    operation: Operation, call: Call, config: Config | None, implementation: str | None, mesh: Any = None
) -> dispatch.Explanation:
    """What would run, and why. Raises as the operation does."""

    def check(config: Config, target: Target) -> None:
        for name in call.given:
            if name not in operation.epilogue:
                raise NotImplementedError(
                    f"the fused kernel of `{operation.name}` takes no `{name}` yet: {_WAYS_AROUND[name]}, or use "
                    'implementation="xla"'
                )
        if call.activation is not None and (cannot := call.activation.program.why_not_in_kernel):
            raise NotImplementedError(
                f"the fused kernel cannot take this `activation`: {cannot}; apply it to the result, or use "
                'implementation="xla"'
            )
        operation.check(call, config, target, mesh)

    arguments.one_of("implementation", implementation, dispatch.IMPLEMENTATIONS)
    arguments.config(config)
    return dispatch.decide(
        operation.name, implementation, dispatch.target(mesh), config, check, operation.problem(call),
        operation.circumstances(mesh),
    )  # fmt: skip


def run(
    prepare: Prepare, *, config: Config | None = None, implementation: str | None = None, **given: Any
) -> Any:  # fmt: skip
    """Runs a public operation on its arguments, by name."""
    arguments.require_values(**{name: given[name] for name in ARRAYS if name in given})
    operation, call = prepare(**given)
    choice = decide(operation, call, config, implementation)
    plan = Plan(
        operation, call.layouts, call.out_dtype, choice.target, choice.config, call.activation,
        insists=implementation == "fused",
    )  # fmt: skip
    if choice.config is None:
        return call.restore(by_xla.whole(call.operands, plan, call.by_xla))
    operands = operation.typed(call.operands)
    return call.restore(sharded.on_the_rest(lambda operands: fused(operands, plan), operands))


def explain(
    prepare: Prepare, *args: Any, config: Config | None = None, implementation: str | None = None, mesh: Any = None,
    **keywords: Any,
) -> dispatch.Explanation:  # fmt: skip
    """Checks a call of a public operation and says what would run. Same arguments and errors."""
    operation, call = prepare(*args, mesh=mesh, **keywords)
    return decide(operation, call, config, implementation, mesh)


def fused(operands: Operands, plan: Plan) -> Results:
    """The kernel itself on checked operands, with its rules for derivatives and `jax.vmap`."""
    return _primitive(operands, plan)


_primitive = Primitive(
    run=lambda operands, plan: plan.operation.launch(operands, plan),
    batched=functools.partial(batched, fused=fused),
    derivative=functools.partial(derivative, fused=fused),
)
