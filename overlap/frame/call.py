"""Runs a call: normalize → choose a configuration → check → decide → plan → derivatives and `vmap` → launch.

A public function is a signature: it hands its arguments to `run`, with the `OperationSpec` of the operation. `explain`
stops after the decision between the fused kernel and XLA (`overlap.explain` traces `run`).

The fused kernel lies behind a primitive of jax (`primitive.py`), which has its own rules for derivatives
(`derivative.py`) and for `jax.vmap` (`batch.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from typing import Any

import jax

from overlap import _settings, emulation
from overlap.choice import dispatch
from overlap.frame import activation as activations
from overlap.frame import arguments, mesh_axes, products
from overlap.frame.by_xla import in_device_memory
from overlap.frame.explain import record
from overlap.frame.form import Form
from overlap.frame.kernel import kernel_class, kernel_of
from overlap.frame.normalize import normalize
from overlap.frame.operands import Operands, Results, accumulator
from overlap.frame.operation import Call, LaunchPlan, Operation
from overlap.frame.peers import peer_group_of
from overlap.frame.primitive import fused, require_same_devices
from overlap.frame.signatures import Arguments
from overlap.kernels import groups
from overlap.kernels.config import Config
from overlap.kernels.launch import checks_numbers
from overlap.kernels.operations import OperationSpec
from overlap.kernels.target import Target


def _operation(spec: OperationSpec, given: Arguments) -> Operation:
    """Returns the operation of a call that communicates nothing."""
    return Operation(spec, combines=spec.takes_activation_of_all and activations.takes_all(given.activation, given.rhs))


def prepare(spec: OperationSpec, given: Arguments) -> tuple[Operation, Call]:
    """Checks the arguments of a call. Returns the operation with what is static, and the checked call.

    Raises:
      ValueError: an argument is wrong, or arguments do not fit each other.
    """
    operation = _operation(spec, given)
    if spec.transports:
        # `dimension` has a default in all operations but those that gather the right operand.
        more = ", dimension=…" if spec.gathers_rhs else ""
        group = peer_group_of(spec.function, arguments.axis_name(given.axis_name), more=more)
        operation = dataclasses.replace(operation, group=group, transport=spec.transports[0])
    if "ring" in spec.transports:
        chosen = arguments.one_of("transport", given.transport, spec.transports)
        reason = "asked for" if chosen else kernel_class(spec).why_usual
        operation = dataclasses.replace(operation, transport=chosen or spec.transports[0], transport_reason=reason)
    operation = dataclasses.replace(
        operation,
        returns_gathered=given.return_gathered,
        clears=(True, True) if checks_numbers() else given.clears,
    )
    return operation, normalize(operation, given)


def check_choice(given: Arguments) -> None:
    """Raises ValueError if `config` is no configuration, or `implementation` no implementation."""
    arguments.one_of("implementation", given.implementation, dispatch.IMPLEMENTATIONS)
    arguments.config(given.config)


def decide(operation: Operation, call: Call, asked: dispatch.Asked) -> dispatch.Explanation:
    """Returns what would run, and why. Raises as the operation does."""
    kernel = kernel_of(operation)

    def check(config: Config, target: Target) -> None:
        kernel.check_keywords(call)
        kernel.check(call, config, target)

    _settings.require_valid()
    target = dispatch.target()
    if reason := arguments.why_not_fused(call.operands.named):
        choice = dispatch.leave_to_xla(operation.name, asked.implementation, target, reason)
    else:
        problem = kernel.problem(call.form)
        choice = dispatch.decide(operation.name, asked, target, check, problem, kernel.circumstances(call))
    return dataclasses.replace(choice, shapes=str(call.form))


def run(spec: OperationSpec, given: Arguments) -> Any:
    """Runs a public operation."""
    arguments.require_values(**given.arrays)
    check_choice(given)
    operation, call = prepare(spec, given)
    asked = dispatch.Asked(given.config, given.implementation)
    # The kernels' form of an activation is in float32.
    by_xla_alone = call.not_elementwise or call.form.dtype.itemsize > 4
    if spec.groups and call.by_xla is not None and by_xla_alone and given.implementation != "fused":
        return _activated_by_xla(operation, call, asked)
    return run_prepared(operation, call, asked)


def run_on_each_device(spec: OperationSpec, given: Arguments) -> Any:
    """As `run`, for an operation that communicates nothing: on each device's parts, if types say how these lie."""
    mesh = mesh_axes.mesh_of(*jax.tree.leaves(given.arrays))
    if mesh is None and spec.groups:  # XLA cannot shard these, nor run them on one device of such a mesh.
        context = jax.sharding.get_abstract_mesh()
        mesh = context if mesh_axes.explicit_axes(context) and not context.manual_axes else None
    if mesh is None:
        return run(spec, given)
    # Products of global arrays are on a floor above, since most of them communicate. So the module is found by name.
    explicit = importlib.import_module("overlap.sharded.explicit")
    return explicit.run(_operation(spec, given), given, mesh, functools.partial(run, spec))


def _activated_by_xla(operation: Operation, call: Call, asked: dispatch.Asked) -> jax.Array:
    """Computes products of groups, and applies by XLA an activation that no kernel can compute.

    XLA's own product takes long. So the kernel computes the values, in float32 (or float64, by XLA).
    """
    sizes = groups.clipped(call.operands.group_sizes, call.form.m)
    whole = dataclasses.replace(call.operands, group_sizes=sizes)
    wide = accumulator(call.form.dtype)
    of_products = dataclasses.replace(
        call,
        activation=None,
        by_xla=None,
        container=None,
        given=tuple(name for name in call.given if name != "activation"),
        combines=False,
        not_elementwise="",
    )
    values = []
    for index in range(len(whole.rhs_list)):
        operands = dataclasses.replace(whole.for_rhs(index), scalars=())
        form = Form.of(operands, call.form.layouts, wide)
        values.append(
            run_prepared(operation.apart, dataclasses.replace(of_products, operands=operands, form=form), asked)
        )
    applied = products.of(whole).guarded(call.by_xla)
    assert applied is not None
    return applied(values)[0].astype(call.form.out_dtype)


def explain(spec: OperationSpec, given: Arguments) -> dispatch.Explanation:
    """Checks a call of a public operation and says what would run. Same arguments and errors."""
    check_choice(given)
    operation, call = prepare(spec, given)
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
    if choice.config is None and not operation.spec.groups:
        if not arguments.is_in_jit():
            require_same_devices(call.operands.named)
        return call.restore(operation.by_xla(call.operands, call.form, call.by_xla))
    if choice.config is not None and choice.target.platform == "cpu":
        emulation.enable()
    must_fuse = not purpose and asked.implementation == "fused"
    plan = LaunchPlan(operation, call.form, choice.target, choice.config, call.activation, must_fuse)

    def run(operands: Operands) -> Results:
        return mesh_axes.in_enterable_axes(functools.partial(fused, plan=plan), kernel_of(operation).typed(operands))

    return call.restore(in_device_memory(run, call.operands) if operation.spec.groups else run(call.operands))
