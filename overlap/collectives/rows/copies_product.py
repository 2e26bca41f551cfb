"""The product of rows that are copies of tokens: `all_gather_lhs_grouped_matmul`, once its arguments are checked.

Tokens arrive while their rows are multiplied (`arriving.py`), or are copied to their rows before, by a kernel or by
XLA. In the backward pass the rows of the forward pass are there.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.interpreters import ad

from overlap.choice import dispatch
from overlap.collectives.rows.arriving import ARRIVE, COPIED_BEFORE, NO_ROOM, Arriving, why_not_faster
from overlap.collectives.rows.routing import Routing
from overlap.collectives.rows.rows import Movement, copied
from overlap.frame import call
from overlap.frame.derivative import derivative
from overlap.frame.explain import record, recorded
from overlap.frame.kernel import kernel_of
from overlap.frame.operands import Operands, Results
from overlap.frame.operation import LaunchPlan
from overlap.frame.primitive import fused
from overlap.frame.rules import with_rule
from overlap.frame.signatures import Arguments, Leaf
from overlap.kernels import groups
from overlap.kernels.launch import checks_numbers
from overlap.kernels.operations import GROUPED
from overlap.kernels.varying import alike
from overlap.single_gpu.grouped_kernels import RowsOfGroups, Through


def product_of_copies(tokens: jax.Array, given: Arguments, routing: Routing, movement: Movement) -> jax.Array:
    """Multiplies the rows of this device, which are copies of `tokens`. `given`: the other arguments of the product."""
    after_copies = functools.partial(_after_copies, tokens, given, routing, movement)
    if movement.target is None or not routing.tokens.size or not tokens.size:
        return after_copies("")
    rows: Leaf = jax.ShapeDtypeStruct((routing.tokens.shape[0], tokens.shape[1]), tokens.dtype)
    operation, checked = call.prepare(GROUPED, dataclasses.replace(given, lhs=rows))
    why_not = _why_not_arriving(given, checked) or why_not_faster(
        tokens.shape[0], routing.group_sizes.shape[0], routing
    )
    if why_not:
        return after_copies(why_not)
    choice = call.decide(operation, checked, dispatch.Asked(None, given.implementation))
    if choice.config is None:
        return after_copies("")
    must_fuse = given.implementation == "fused"
    plan = LaunchPlan(operation, checked.form, choice.target, choice.config, checked.activation, must_fuse)
    operands = dataclasses.replace(checked.operands, lhs=tokens)
    kernel = _kernel(plan, operands)
    if kernel is None:
        return after_copies(NO_ROOM)
    record(dataclasses.replace(choice, config=kernel.plan.config, plan=ARRIVE))
    sizes = groups.clipped(operands.group_sizes, plan.form.m)
    out, _ = _arriving(plan, movement, *alike((dataclasses.replace(operands, group_sizes=sizes), routing)))
    return checked.restore(((out,), None))


def _why_not_arriving(given: Arguments, checked: call.Call) -> str:
    """Says why tokens cannot arrive while their rows are multiplied, whatever the sizes; empty if they can."""
    if given.config is not None:
        return "`config` is given"
    if checked.not_elementwise:
        return "XLA applies the activation"
    return "jax looks for NaN, which rows that are not in use may hold" if checks_numbers() else ""


def _after_copies(tokens: jax.Array, given: Arguments, routing: Routing, movement: Movement, why: str) -> jax.Array:
    """Copies tokens to rows, and multiplies these. `why`: why tokens do not arrive meanwhile; empty: do not say."""
    rows = copied(tokens, routing, movement)
    with recorded() as found:
        out = call.run(GROUPED, dataclasses.replace(given, lhs=rows))
    for index, choice in enumerate(found):
        says = why and not index and choice.config is not None
        record(dataclasses.replace(choice, plan=COPIED_BEFORE.format(why)) if says else choice)
    return out


def _kernel(plan: LaunchPlan, operands: Operands) -> Through | None:
    """The kernel of rows that arrive, given tokens or their type as the left operand; None if there is none."""
    kernel = kernel_of(plan.operation)
    assert isinstance(kernel, RowsOfGroups)
    return kernel.through(operands, plan.layouts, plan, None, plan.form.m)


def _arriving(
    plan: LaunchPlan, movement: Movement, operands: Operands, routing: Routing
) -> tuple[jax.Array, jax.Array]:
    """Returns the product and the rows. The left operand are the tokens; `plan` is that of the product of the rows."""
    run = functools.partial(_evaluated, plan, movement)
    rule = functools.partial(_tangent, plan, movement)

    def rows_alone(operands: Operands, routing: Routing) -> jax.Array:
        return copied(operands.lhs, routing, movement)

    return with_rule(run, rule, operands, routing, last=rows_alone)


def _evaluated(
    plan: LaunchPlan, movement: Movement, operands: Operands, routing: Routing
) -> tuple[jax.Array, jax.Array]:
    kernel = _kernel(plan, operands)
    if kernel is None:
        rows = copied(operands.lhs, routing, movement)
        (out,), _ = fused(dataclasses.replace(operands, lhs=rows), plan)
        return out, rows
    tokens = operands.lhs
    out, rows = kernel(operands, None, Arriving.of(movement.plan(tokens.shape[1], tokens.dtype, routing), routing))
    return out, rows


def _tangent(
    plan: LaunchPlan,
    movement: Movement,
    primals: tuple[Operands, Routing],
    tangents: tuple[Operands, Leaf],
) -> tuple[tuple[jax.Array, jax.Array], tuple[Leaf, Leaf]]:
    """The rule: rows are copies, which are differentiated as such, and multiplied.

    Where an activation follows, its derivative needs the products that it takes. Tokens arrive with the first of them.
    """
    operands, routing = primals
    directions, _ = tangents
    first = operands
    of_first = plan
    if plan.activation is not None:
        first = dataclasses.replace(operands, scalars=()).for_rhs(0)
        rows_type = jax.ShapeDtypeStruct((plan.form.m, plan.form.k), plan.form.dtype)
        bare = kernel_of(plan.operation).before_activation(plan)
        of_first = bare.of(dataclasses.replace(first, lhs=rows_type))
    product, rows = _arriving(of_first, movement, first, routing)
    rows = checkpoint_name(rows, "rows")

    known = [product]

    def multiplied(given: Operands, of_product: LaunchPlan) -> Results:
        """The products in their order, of which the first is known."""
        return ((known.pop(),), None) if known else fused(given, of_product)

    d_rows = ad.Zero(jax.typeof(rows).to_tangent_aval())
    if not isinstance(directions.lhs, ad.Zero):  # (jax removes the copies, which nobody uses.)
        _, d_rows = jax.jvp(lambda x: copied(x, routing, movement), (operands.lhs,), (directions.lhs,))
    (outs, _), (of_outs, _) = derivative(
        dataclasses.replace(operands, lhs=rows),
        dataclasses.replace(directions, lhs=d_rows),
        plan,
        lambda: ((product,), None),
        multiplied,
    )
    return (outs[0], rows), (of_outs[0], d_rows)
