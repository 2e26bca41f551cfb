"""The way of every call, written once: normalize → check → decide → plan → derivatives and `vmap` → launch.

A public operation is a function from its arguments to an `Operation` and a checked `Call` (its `prepare`); `run` does
the rest, and `explain` stops behind the decision. What a kernel computes lies behind a primitive of jax with rules of
its own for derivatives (`derivative.py`) and for `jax.vmap` (`batch.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from overlap.choice import dispatch
from overlap.frame import arguments, by_xla, sharded
from overlap.frame.batch import batched
from overlap.frame.derivative import derivative
from overlap.frame.normalize import ARRAYS, Call
from overlap.frame.operands import LaunchPlan, Operands, Results
from overlap.frame.operation import Operation
from overlap.frame.primitive import Primitive
from overlap.kernels.config import Config
from overlap.kernels.target import Target

Prepare = Callable[..., tuple[Operation, Call]]


def check_choice(config: Any, implementation: Any) -> None:
    """Refuses what can be neither: whoever decides by them before `decide` does checks them first."""
    arguments.one_of("implementation", implementation, dispatch.IMPLEMENTATIONS)
    arguments.config(config)


def decide(
    operation: Operation, call: Call, config: Config | None, implementation: str | None, mesh: Any = None
) -> dispatch.Explanation:
    """What would run, and why. Raises as the operation does."""

    def check(config: Config, target: Target) -> None:
        operation.check_keywords(call)
        operation.check(call, config, target, mesh)

    check_choice(config, implementation)
    problem = operation.problem(call.operands, call.layouts, call.out_dtype)
    circumstances, target = operation.circumstances(call, mesh), dispatch.target(mesh)
    return dispatch.decide(operation.name, implementation, target, config, check, problem, circumstances)


def run(prepare: Prepare, *, config: Config | None = None, implementation: str | None = None, **given: Any) -> Any:
    """Runs a public operation on its arguments, by name."""
    arguments.require_values(**{name: given[name] for name in ARRAYS if name in given})
    return run_prepared(*prepare(**given), config=config, implementation=implementation)


def run_prepared(
    operation: Operation, call: Call, *, config: Config | None = None, implementation: str | None = None
) -> Any:
    """The same for a call that has been checked."""
    choice = decide(operation, call, config, implementation)
    plan = LaunchPlan(
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


def fused(operands: Operands, plan: LaunchPlan) -> Results:
    """The kernel itself on checked operands, with its rules for derivatives and `jax.vmap`."""
    return _primitive(operands, plan)


_primitive = Primitive(
    run=lambda operands, plan: plan.operation.launch(operands, plan),
    batched=functools.partial(batched, fused=fused),
    derivative=functools.partial(derivative, fused=fused),
)
