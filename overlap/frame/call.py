"""Runs a call: normalize → choose a configuration → check → decide → plan → derivatives and `vmap` → launch.

A public operation has a function `prepare`, which turns its arguments into an `Operation` and a checked `Call`. `run`
does the rest. `explain` stops after the decision between the fused kernel and XLA (`overlap.explain` traces `run`).

The fused kernel lies behind a primitive of jax (`primitive.py`), which has its own rules for derivatives
(`derivative.py`) and for `jax.vmap` (`batch.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from overlap import _settings, emulation
from overlap.choice import dispatch
from overlap.frame import arguments, mesh_axes
from overlap.frame.by_xla import in_device_memory
from overlap.frame.explain import record
from overlap.frame.operands import Leaf, Operands, Results
from overlap.frame.operation import Call, LaunchPlan, Operation
from overlap.frame.primitive import fused
from overlap.frame.signatures import Arguments
from overlap.kernels.config import Config
from overlap.kernels.target import Target

Prepare = Callable[[Arguments], tuple[Operation, Call]]


def check_choice(given: Arguments) -> None:
    """Raises ValueError if `config` is no configuration, or `implementation` no implementation."""
    arguments.one_of("implementation", given.implementation, dispatch.IMPLEMENTATIONS)
    arguments.config(given.config)


def decide(operation: Operation, call: Call, asked: dispatch.Asked) -> dispatch.Explanation:
    """Returns what would run, and why. Raises as the operation does."""

    def check(config: Config, target: Target) -> None:
        operation.check_keywords(call)
        operation.check(call, config, target)

    _settings.require_valid()
    target = dispatch.target()
    if reason := why_not_fused(call.operands.named):
        choice = dispatch.leave_to_xla(operation.name, asked.implementation, target, reason)
    else:
        problem = operation.problem(call.form)
        circumstances = operation.circumstances(call)
        choice = dispatch.decide(operation.name, asked, target, check, problem, circumstances)
    return dataclasses.replace(choice, shapes=str(call.form))


def why_not_fused(named: Sequence[tuple[str, Leaf]]) -> str:
    """Says why no kernel can be built for operands of these types, whatever the device; empty if one might be.

    Each operand comes after its name. Sizes of groups may lie in any memory, since XLA computes with them first.
    """
    named = [(name, x) for name, x in named if name != "group_sizes"]
    if (memory := arguments.one_memory(named)) != "device":
        return f"the fused kernel reads device memory, got operands in {memory} memory: jax.device_put them first"
    shapes = [(f"`{name}` of shape {tuple(x.shape)}", x.shape) for name, x in named]
    return next(filter(None, (arguments.why_symbolic(*shape) for shape in shapes)), "")


def run(prepare: Prepare, given: Arguments) -> Any:
    """Runs a public operation."""
    arguments.require_values(**given.arrays)
    check_choice(given)
    operation, call = prepare(given)
    return run_prepared(operation, call, dispatch.Asked(given.config, given.implementation))


def explain(prepare: Prepare, given: Arguments) -> dispatch.Explanation:
    """Checks a call of a public operation and says what would run. Same arguments and errors."""
    check_choice(given)
    operation, call = prepare(given)
    return decide(operation, call, dispatch.Asked(given.config, given.implementation))


def run_prepared(
    operation: Operation,
    call: Call,
    asked: dispatch.Asked,
    *,
    purpose: str = "",
) -> Any:
    """Runs an operation on a call that has been checked.

    `purpose` says what a call of a backward pass computes, and is empty for a call of the user. If `jax.vmap` maps over
    a call of a backward pass and the kernel cannot do that, XLA runs, even with `implementation="fused"`.
    """
    choice = decide(operation, call, asked)
    record(dataclasses.replace(choice, plan=purpose))
    if choice.config is None and not operation.has_own_derivatives:
        return call.restore(operation.by_xla(call.operands, call.form, call.by_xla))
    if choice.config is not None and choice.target.platform == "cpu":
        emulation.enable()
    must_fuse = not purpose and asked.implementation == "fused"
    plan = LaunchPlan(operation, call.form, choice.target, choice.config, call.activation, must_fuse)

    def run(operands: Operands) -> Results:
        return mesh_axes.in_enterable_axes(lambda operands: fused(operands, plan), operation.typed(operands))

    return call.restore(in_device_memory(run, call.operands))
