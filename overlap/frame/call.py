"""Runs or explains a call: normalize → check → decide → plan → derivatives and `vmap` → launch.

A public operation has a function `prepare`, which turns its arguments into an `Operation` and a checked `Call`. `run`
does the rest. `explain` stops after the decision between the fused kernel and XLA.

The fused kernel lies behind a primitive of jax, which has its own rules for derivatives (`derivative.py`) and for
`jax.vmap` (`batch.py`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

from overlap import _settings
from overlap.choice import dispatch
from overlap.frame import arguments, by_xla, sharded
from overlap.frame.batch import batched
from overlap.frame.derivative import derivative
from overlap.frame.normalize import ARRAYS, Call
from overlap.frame.operands import LaunchPlan, Operands, Results
from overlap.frame.operation import Operation
from overlap.frame.primitive import Primitive
from overlap.frame.signatures import AnyMesh
from overlap.kernels.config import Config
from overlap.kernels.target import Target

Prepare = Callable[..., tuple[Operation, Call]]


def check_choice(config: Any, implementation: Any) -> None:
    """Raises ValueError if `config` is no configuration, or `implementation` no implementation.

    `decide` makes the same checks. Call this function in code that uses one of the two arguments before `decide`.
    """
    arguments.one_of("implementation", implementation, dispatch.IMPLEMENTATIONS)
    arguments.config(config)


def _check(operation: Operation, call: Call, config: Config, target: Target, mesh: AnyMesh | None) -> None:
    operation.check_keywords(call)
    operation.check(call, config, target, mesh)


def require_config(operation: Operation, call: Call, config: Config, mesh: AnyMesh | None = None) -> None:
    """Raises ValueError if a configuration contradicts itself, the call or the device. The activation is not needed."""
    with contextlib.suppress(NotImplementedError):
        _check(operation, call, config, dispatch.target(mesh), mesh)


def _prepared(
    prepare: Prepare, config: Any, implementation: Any, args: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[Operation, Call]:
    """Prepares a call. Raises ValueError for a wrong `config` or `implementation` before the activation is called."""
    check_choice(config, implementation)
    if config is not None and keywords.get("activation") is not None:
        check = functools.partial(require_config, config=config, mesh=keywords.get("mesh"))
        keywords = keywords | {"before_activation": check}
    return prepare(*args, **keywords)


def decide(
    operation: Operation, call: Call, config: Config | None, implementation: str | None, mesh: AnyMesh | None = None
) -> dispatch.Explanation:
    """Returns what would run, and why. Raises as the operation does."""

    def check(config: Config, target: Target) -> None:
        _check(operation, call, config, target, mesh)

    check_choice(config, implementation)
    _settings.require_valid()
    target = dispatch.target(mesh)
    if reason := _why_not_fused(call.operands):
        return dispatch.leave_to_xla(operation.name, implementation, target, reason)
    problem = operation.problem(call.operands, call.layouts, call.out_dtype)
    circumstances = operation.circumstances(call, mesh)
    return dispatch.decide(operation.name, implementation, target, config, check, problem, circumstances)


def _why_not_fused(operands: Operands) -> str:
    """Says why no kernel can be built for operands of these types, whatever the device; empty if one might be."""
    if (memory := arguments.one_memory(operands.named)) != "device":
        return f"the fused kernel reads device memory, got operands in {memory} memory: jax.device_put them first"
    shapes = [(f"`{name}` of shape {tuple(x.shape)}", x.shape) for name, x in operands.named]
    return next(filter(None, (arguments.why_symbolic(*shape) for shape in shapes)), "")


def run(prepare: Prepare, *, config: Config | None = None, implementation: str | None = None, **given: Any) -> Any:
    """Runs a public operation on the arguments `given`, all by keyword."""
    arguments.require_values(**{name: given[name] for name in ARRAYS if name in given})
    operation, call = _prepared(prepare, config, implementation, (), given)
    return run_prepared(operation, call, config=config, implementation=implementation)


def run_prepared(
    operation: Operation,
    call: Call,
    *,
    config: Config | None = None,
    implementation: str | None = None,
    by_user: bool = True,
) -> Any:
    """Runs an operation on a call that has been checked.

    A call of a backward pass is not `by_user`. If `jax.vmap` maps over it and the kernel cannot do that, XLA runs, even
    with `implementation="fused"`.
    """
    choice = decide(operation, call, config, implementation)
    plan = LaunchPlan(
        operation,
        call.layouts,
        call.out_dtype,
        choice.target,
        choice.config,
        call.activation,
        must_fuse=by_user and implementation == "fused",
    )
    if choice.config is None:
        return call.restore(by_xla.whole(call.operands, plan, call.by_xla))
    operands = operation.typed(call.operands)
    return call.restore(sharded.in_enterable_axes(lambda operands: fused(operands, plan), operands))


def explain(
    prepare: Prepare,
    *args: Any,
    config: Config | None = None,
    implementation: str | None = None,
    mesh: AnyMesh | None = None,
    **keywords: Any,
) -> dispatch.Explanation:
    """Checks a call of a public operation and says what would run. Same arguments and errors."""
    operation, call = _prepared(prepare, config, implementation, args, {"mesh": mesh, **keywords})
    return decide(operation, call, config, implementation, mesh)


def fused(operands: Operands, plan: LaunchPlan) -> Results:
    """Runs the kernel on checked operands, with its rules for derivatives and `jax.vmap`."""
    return _primitive(operands, plan)


_primitive = Primitive(
    run=lambda operands, plan: plan.operation.launch(operands, plan),
    batched=functools.partial(batched, fused=fused),
    derivative=functools.partial(derivative, fused=fused),
)
