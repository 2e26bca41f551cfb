"""An operation as a primitive of JAX, with rules of its own for `vmap` and for derivatives.

`jax.custom_jvp` and `jax.custom_vmap` would suffice for a single transformation. But the gradient of a `lax.scan` or of
a `jax.checkpoint` makes JAX split a function into a known and an unknown part. JAX then keeps the functions behind
these decorators and drops their rules, so that a second derivative would reach the kernel itself. A primitive keeps its
rules.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from overlap.choice.model import predicted_us
from overlap.choice.session import explaining
from overlap.frame.activation import BoundActivation
from overlap.frame.batch import batched
from overlap.frame.derivative import derivative
from overlap.frame.kernel import kernel_of
from overlap.frame.linear import mapped_in_front
from overlap.frame.operands import Leaf, Operands, Results, Structure
from overlap.frame.operation import LaunchPlan
from overlap.kernels.varying import varying
from overlap.primitives import marks

_operation_p = core.Primitive("overlap_operation")
_operation_p.multiple_results = True


def fused(operands: Operands, plan: LaunchPlan) -> Results:
    """Runs the kernel on checked operands, with its rules for derivatives and `jax.vmap`.

    The plan is one for operands of these sizes (`LaunchPlan.of`).
    """
    if marks.current() is not None:
        # Do not bind the primitive: while marks are recorded, the kernel has further outputs, which leave it as a side
        # effect of tracing. A primitive would not let them through.
        return kernel_of(plan.operation).launch(operands, plan)
    leaves, structure = jax.tree.flatten(operands)
    traced, types = tracer_of(plan.without_function, structure)(*leaves)
    static = _Static(traced, plan, structure, jax.tree.structure(types))
    return jax.tree.unflatten(static.results, _operation_p.bind(*leaves, static=static))


@functools.lru_cache(maxsize=256)  # A jaxpr takes about 1 MB.
def tracer_of(plan: LaunchPlan, structure: Structure) -> Callable[..., tuple[core.ClosedJaxpr, Results]]:
    """Returns a function that traces an operation: from its operands' leaves to the jaxpr and the results' types.

    jax keeps a jaxpr for the function that it was traced from, keyed by the types of the operands and by all of jax's
    own state, such as the mesh. So equal calls get the same function here, and then the same jaxpr from jax.
    """

    def of_leaves(*leaves: jax.Array) -> Results:
        operands = jax.tree.unflatten(structure, leaves)
        if explaining.value is not None:  # Only types are wanted, and to trace a kernel takes longer.
            return plan.operation.by_xla(operands, plan.form, _stand_in(plan, operands))
        with _timed(plan):
            return kernel_of(plan.operation).launch(operands, plan)

    return jax.make_jaxpr(of_leaves, return_shape=True)


def _timed(plan: LaunchPlan) -> AbstractContextManager[object]:
    """Tells XLA's scheduler how long the kernel takes. It then starts collectives early enough beside the kernel.

    Else it counts a custom call as taking no time, and lets collectives run before the kernels instead of beside them.
    """
    if plan.chosen is None or plan.form.groups is not None:  # (Products of groups were measured without.)
        return contextlib.nullcontext()
    problem = kernel_of(plan.operation).problem(plan.form)
    ns = round(1e3 * predicted_us(plan.config, problem, plan.target))
    return set_xla_metadata(latency_metadata=str(ns))


def _stand_in(plan: LaunchPlan, operands: Operands) -> BoundActivation:
    """Returns a function with the types of the plan's activation. The activation's program is for kernels only."""
    if plan.activation is None:
        return None

    def of_all(values: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        captured = sum((scalar.astype(jnp.float32) for scalar in operands.scalars), jnp.float32(0))
        results = [sum(values[1:], values[0])] if plan.operation.combines else values
        return tuple(x + captured for x in results)

    return of_all


@dataclasses.dataclass(frozen=True)
class _Static:
    """The static data of one call: the traced operation, and the structures of operands and results.

    Calls with the same jaxpr are equal, so that jax lowers one of them for all.
    """

    traced: core.ClosedJaxpr
    plan: LaunchPlan = dataclasses.field(compare=False)
    operands: Structure = dataclasses.field(compare=False)
    results: Structure = dataclasses.field(compare=False)


@_operation_p.def_impl
def _run(*leaves: jax.Array, static: _Static) -> list[jax.Array]:
    require_same_devices(jax.tree.unflatten(static.operands, leaves).named)
    return _compiled(*leaves, traced=static.traced)


@functools.partial(jax.jit, static_argnames="traced")
def _compiled(*leaves: jax.Array, traced: core.ClosedJaxpr) -> list[jax.Array]:
    """Runs a call outside of `jax.jit`. Equal calls have the same jaxpr, so they are compiled once."""
    return core.jaxpr_as_fun(traced)(*leaves)


def require_same_devices(named: Sequence[tuple[str, Leaf]]) -> None:
    """Raises ValueError if two operands were put on different devices, since jax's own message names none.

    Each operand comes after its name. Call it where the operands are values: as constants of a program they may differ.
    """
    first: tuple[str, set[object]] | None = None
    for name, x in named:
        if isinstance(x, Tracer) or not getattr(x, "committed", False):
            continue
        devices = x.sharding.device_set
        first = first or (name, devices)
        if devices != first[1]:
            raise ValueError(
                f"`{name}` must be on the same devices as `{first[0]}` ({_names(first[1])}), got ({_names(devices)}): "
                "move one with jax.device_put"
            )


def _names(devices: set[object]) -> str:
    return ", ".join(sorted(map(str, devices)))


def _evaluate(*leaves: jax.Array, static: _Static) -> list[jax.Array]:
    return core.jaxpr_as_fun(static.traced)(*leaves)


@_operation_p.def_abstract_eval
def _types(*_: Leaf, static: _Static) -> list[Leaf]:
    return static.traced.out_avals


mlir.register_lowering(_operation_p, mlir.lower_fun(_evaluate, multiple_results=True), inline=False)


def _jvp(
    leaves: Sequence[jax.Array], tangents: Sequence[Leaf], *, static: _Static
) -> tuple[list[jax.Array], list[Leaf]]:
    def evaluate() -> Results:
        return jax.tree.unflatten(static.results, _operation_p.bind(*leaves, static=static))

    operands = jax.tree.unflatten(static.operands, leaves)
    directions = jax.tree.unflatten(static.operands, tangents)
    outs, of_outs = derivative(operands, directions, static.plan, evaluate, fused)
    return jax.tree.leaves(outs), jax.tree.leaves(of_outs)


def _transposed(cotangents: Sequence[Leaf], *leaves: Leaf, static: _Static) -> list[Leaf]:
    """For `jax.linear_transpose`, where the operation is linear in the operands to be transposed.

    The transpose is the gradient with respect to these operands. It does not depend on their values, so take zeros.
    """
    unknown = [index for index, x in enumerate(leaves) if ad.is_undefined_primal(x)]

    def of_unknown(*given: jax.Array) -> list[jax.Array]:
        changed = dict(zip(unknown, given, strict=True))
        return _operation_p.bind(*(changed.get(index, x) for index, x in enumerate(leaves)), static=static)

    avals = [leaves[index].aval for index in unknown]
    zeros = [varying(jnp.zeros(aval.shape, aval.dtype), aval.manual_axis_type.varying) for aval in avals]
    _, backward = jax.vjp(of_unknown, *zeros)
    found = dict(zip(unknown, backward([ad.instantiate_zeros(x) for x in cotangents]), strict=True))
    return [found.get(index) for index in range(len(leaves))]


def _batched(
    leaves: Sequence[jax.Array], dims: Sequence[int | None], *, static: _Static
) -> tuple[list[jax.Array], list[int]]:
    size, in_front = mapped_in_front(leaves, dims)
    operands = jax.tree.unflatten(static.operands, in_front)
    is_batched = jax.tree.unflatten(static.operands, [dim is not None for dim in dims])
    outs = jax.tree.leaves(batched(operands, is_batched, size, static.plan, fused))
    return outs, [0] * len(outs)


ad.primitive_jvps[_operation_p] = _jvp
ad.primitive_transposes[_operation_p] = _transposed
batching.primitive_batchers[_operation_p] = _batched
