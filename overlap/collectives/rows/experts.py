"""The two operations of an expert layer: gather tokens and multiply by expert; multiply by expert and scatter sums.

    all_gather_lhs_grouped_matmul   lhs [T, H] → tokens of all devices → rows by expert → grouped product [C, N]
    grouped_matmul_reduce_scatter   lhs [C, I] → grouped product → sums of each token's rows → this device's part [T, H]

Per token and direction, an all-gather moves D - 1 rows, and an exchange of the routes k (D - 1) / D. So for D ≤ k the
gather moves no more, and it needs neither counts on the wire nor shapes that depend on the data.

Each operation is the other's backward pass, since the maps of `rows.py` and jax's collectives are each other's
transposes. The products are `grouped_matmul`'s.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from overlap import emulation
from overlap.choice import dispatch
from overlap.choice.dispatch import Implementation
from overlap.collectives.rows.chunks import RowsPlan
from overlap.collectives.rows.copies_product import product_of_copies
from overlap.collectives.rows.routing import Routing, axis_of
from overlap.collectives.rows.rows import Movement, added
from overlap.frame import arguments, call, mesh_axes
from overlap.frame.arguments import shown
from overlap.frame.by_xla import in_device_memory
from overlap.frame.explain import record
from overlap.frame.peers import require_peers, untried
from overlap.frame.primitive import require_same_devices
from overlap.frame.signatures import AnyArray, Arguments, AxisName, Given, Leaf
from overlap.kernels.config import FLOAT8, Config
from overlap.kernels.operations import GATHER_TOKENS, GROUPED, SCATTER_TOKENS, OperationSpec


def all_gather_lhs_grouped_matmul(
    lhs: AnyArray,
    rhs: AnyArray | Sequence[AnyArray],
    routing: Routing,
    axis_name: AxisName | None,
    *,
    activation: Callable[..., jax.Array] | None = None,
    bias: AnyArray | Sequence[AnyArray] | None = None,
    preferred_element_type: DTypeLike | None = None,
    transpose_rhs: bool = False,
    config: Config | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Gathers the tokens of all devices, and multiplies for each expert of this device the tokens that chose it.

    Row r of the result is activation(lhs[routing.tokens[r]] @ rhs[e] + bias[e]), where lhs are the tokens of all
    devices and e is the expert of row r. Call it inside `jax.shard_map`.

    Args:
      lhs: the tokens of this device, [T, H]; global [D · T, H], sharded by rows.
      rhs: the weights of this device's experts, [E / D, H, N], or [E / D, N, H] with `transpose_rhs`; global
        [E, …], sharded along the experts. Same dtype as `lhs`. Or a list of two such arrays, if `activation` takes two
        arrays: `lambda gate, up: jax.nn.silu(gate) * up`.
      routing: what `overlap.route` returned for the same axis.
      axis_name: the mesh axis, or a tuple of axes, as for `overlap.route`; None on one device.
      activation: see `overlap.grouped_matmul`.
      bias: [E / D, N], added to each row of an expert; a list if `rhs` is one.
      preferred_element_type, config, implementation: see `overlap.grouped_matmul`.
      transpose_rhs: whether `rhs` is stored transposed.

    Returns:
      [C, N]: the rows of this device, sorted by expert, as `routing` says. Rows that are not in use are zero.
      Deterministic.

    Raises:
      ValueError: shapes do not fit each other or the routing; or for the reasons of `overlap.grouped_matmul`.
      NotImplementedError: `implementation="fused"`, and the kernel cannot serve this call.

    Differentiable to any order in `lhs`, `rhs` and `bias`. The gradient of `lhs` is that of
    `grouped_matmul_reduce_scatter`: each token's rows are added in float32 in the order of its slots, and the sums are
    scattered in the dtype of `lhs`.

    Examples:
      >>> def layer(x, experts, gates, w_gate, w_up, w_down):  # Inside jax.shard_map over axis "x".
      ...     routing = overlap.route(experts, 8, "x")
      ...     gated = lambda gate, up: jax.nn.silu(gate) * up
      ...     h = overlap.all_gather_lhs_grouped_matmul(x, [w_gate, w_up], routing, "x", activation=gated)
      ...     return overlap.grouped_matmul_reduce_scatter(h, w_down, gates, routing, "x")

    Source: Shazeer et al., "Outrageously Large Neural Networks" (2017) for experts; the all-gather in place of an
    all-to-all is sequence parallelism's (Korthikanti et al., 2022).
    """
    given = Arguments(
        lhs,
        rhs,
        bias=bias,
        activation=activation,
        preferred_element_type=preferred_element_type,
        transpose_rhs=transpose_rhs,
        config=config,
        implementation=implementation,
        clears=(True, False),
    )
    return gathered_product(given, routing, axis_name)


def gathered_product(given: Arguments, routing: Routing, axis_name: AxisName | None) -> jax.Array:
    """`all_gather_lhs_grouped_matmul`, given its arguments, and the scalars of an activation that was traced before.

    `given.clears` is that of `Operation`; the gradient of the rows need not be cleared.
    """
    given, tokens, movement = gathering(given, routing, axis_name)

    def run(arrays: tuple[jax.Array, Leaf, Leaf]) -> jax.Array:
        tokens, rhs, bias = arrays
        return product_of_copies(tokens, dataclasses.replace(given, rhs=rhs, bias=bias), routing, movement)

    return in_device_memory(run, (tokens, given.rhs, given.bias))


def grouped_matmul_reduce_scatter(
    lhs: AnyArray,
    rhs: AnyArray,
    gates: AnyArray | None,
    routing: Routing,
    axis_name: AxisName | None,
    *,
    bias: AnyArray | None = None,
    preferred_element_type: DTypeLike | None = None,
    transpose_rhs: bool = False,
    config: Config | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Multiplies each row by its expert's weights, and adds the rows of each token, times their gates.

    For token t of this device the result is the sum over its slots j of gates[t, j] · (row @ rhs[e] + bias[e]), where
    row is the row of slot j on the device of its expert e. Routes that were dropped, or that name no expert, add
    nothing. Call it inside `jax.shard_map`.

    Args:
      lhs: the rows of this device, [C, I], as `all_gather_lhs_grouped_matmul` returns them. Rows that are not in use
        may hold anything.
      rhs: the weights of this device's experts, [E / D, I, H], or [E / D, H, I] with `transpose_rhs`; global
        [E, …], sharded along the experts. Same dtype as `lhs`.
      gates: the weight of each route in its token's sum, [T, k] per device; global [D · T, k], sharded by rows.
        Floating-point of any dtype; float32 is best. None: those that `route` got, which need no collective here.
      routing: what `overlap.route` returned for the same axis.
      axis_name: the mesh axis, or a tuple of axes, as for `overlap.route`; None on one device.
      bias: [E / D, H], added to each row of an expert, before the gate.
      preferred_element_type: dtype of the result, of the product's rows and of the sums that travel; see
        `overlap.grouped_matmul`.
      transpose_rhs: whether `rhs` is stored transposed.
      config, implementation: see `overlap.grouped_matmul`.

    Returns:
      [T, H]: the tokens of this device; global [D · T, H], sharded by rows. Deterministic: each device adds a token's
      rows in float32 in the order of the slots and rounds the sum; then the sums of all devices are added.

    Raises:
      ValueError: shapes do not fit each other or the routing; or for the reasons of `overlap.grouped_matmul`.
      NotImplementedError: `implementation="fused"`, and the kernel cannot serve this call.

    Differentiable to any order in `lhs`, `rhs`, `gates` and `bias`. The backward pass gathers the cotangents, as
    `all_gather_lhs_grouped_matmul` gathers tokens. It keeps the product's rows for the gradient of the gates.

    Examples:
      >>> def combine(h, w_down, gates, routing):  # Inside jax.shard_map over axis "x".
      ...     return overlap.grouped_matmul_reduce_scatter(h, w_down, gates, routing, "x")

    Source: as for `all_gather_lhs_grouped_matmul`.
    """
    op = SCATTER_TOKENS.name
    given = Arguments(
        lhs,
        rhs,
        bias=bias,
        preferred_element_type=preferred_element_type,
        transpose_rhs=transpose_rhs,
        config=config,
        implementation=implementation,
    )
    given, products = _checked(SCATTER_TOKENS, routing, given, axis_name)
    arguments.require_values(gates=gates)
    factors = None if gates is None else arguments.array("gates", gates)
    why_not = _why_not_fused(op, routing, given, gates=factors)
    if factors is None:
        axis_name, _ = _require_axis(routing, op, axis_name)
        if routing.gates is None:
            raise ValueError("`gates` must be an array, got None, and `route` got none: pass gates to one of the two")
    else:
        axis_name = _require_tokens("gates", factors, routing, op, axis_name)
    rows = routing.tokens.shape[0]
    k = routing.positions.shape[1]
    if products.shape[0] != rows:
        raise ValueError(
            f"`lhs` must have a row for each of the {rows} rows of `routing`, got {products.shape[0]}: pass the "
            "result of all_gather_lhs_grouped_matmul with this routing"
        )

    if factors is not None and factors.shape[1] != k:
        raise ValueError(
            f"`gates` must have an entry for each of the {k} experts that a token chose, got {factors.shape[1]}: pass "
            "[T, k], as the ids that `route` got"
        )

    def run(arrays: tuple[jax.Array, Leaf, Leaf, Leaf]) -> jax.Array:
        lhs, factors, rhs, bias = arrays
        rows = call.run(GROUPED, dataclasses.replace(given, lhs=lhs, rhs=rhs, bias=bias, clears=(False, True)))
        return added(rows, factors, routing, movement_of(op, rows, routing, axis_name, implementation, why_not))

    return in_device_memory(run, (products, factors, given.rhs, bias))


def gathering(given: Arguments, routing: Routing, axis_name: AxisName | None) -> tuple[Arguments, jax.Array, Movement]:
    """Checks a call of `all_gather_lhs_grouped_matmul`.

    Returns the arguments of its product, but for the rows; the tokens that it copies to rows; and how they move.
    """
    op = GATHER_TOKENS.name
    given, tokens = _checked(GATHER_TOKENS, routing, given, axis_name)
    why_not = _why_not_fused(op, routing, given)
    if tokens.dtype in FLOAT8:
        raise ValueError(
            f"`lhs` must have at least 16 bits, got {tokens.dtype}: cast it; overlap.grouped_matmul takes 8 bits"
        )
    axis_name = _require_tokens("lhs", tokens, routing, op, axis_name)
    return given, tokens, movement_of(op, tokens, routing, axis_name, given.implementation, why_not)


def _checked(
    spec: OperationSpec, routing: Given, given: Arguments, axis_name: AxisName | None
) -> tuple[Arguments, jax.Array]:
    """Checks what both operations have. Returns the arguments of their grouped product, and its left operand.

    Raises:
      ValueError: `routing` is none, or of another axis, the weights are not those of its experts, or the operands do
        not fit each other.
    """
    if not isinstance(routing, Routing):
        raise ValueError(f"`routing` must be what `overlap.route` returns, got {shown(routing)}: pass that")
    _require_axis(routing, spec.name, axis_name)  # Before sizes, which another axis explains.
    given = dataclasses.replace(given, group_sizes=routing.group_sizes)
    arguments.require_values(**given.arrays)
    call.check_choice(given)
    # Only the types are checked: nothing is computed.
    jax.eval_shape(lambda: call.prepare(spec, given)[1].operands)
    lhs = arguments.array("lhs", given.lhs)
    rhs = jax.tree.map(jnp.asarray, given.rhs)
    return dataclasses.replace(given, lhs=lhs, rhs=rhs), lhs


def _why_not_fused(op: str, routing: Routing, given: Arguments, **more: Leaf) -> str:
    """Says why no kernel can be built for these operands, whatever the device; empty if one might be.

    Raises:
      ValueError: the operands are on different devices or in different memories.
      NotImplementedError: the operands are on a mesh with Explicit axes.
    """
    arrays = {name: value for name, value in given.arrays.items() if name != "group_sizes"}
    named = [(name, x) for name, value in (arrays | more).items() for x in jax.tree.leaves(value)]
    with_routes = [*named, *(("routing", x) for x in jax.tree.leaves(routing))]
    mesh_axes.require_one_device(op, [x for _, x in with_routes], given.implementation)
    if not arguments.is_in_jit():
        require_same_devices(with_routes)
    return arguments.why_not_fused(named)


def movement_of(
    op: str, moved: jax.Array, routing: Routing, axis_name: AxisName | None, implementation: Implementation | None,
    why_not: str,
) -> Movement:  # fmt: skip
    """Chooses what moves tokens and rows: the kernels wherever they can on a measured GPU, else XLA.

    `why_not` says why no kernel can be built, whatever the device; empty if one might be.

    Raises:
      NotImplementedError: the caller asked for the kernels, and they cannot serve the call.
    """
    movement = Movement(axis_name, dispatch.target(), implementation == "fused")
    plan = movement.plan(moved.shape[1], moved.dtype, routing)
    by_default = None if plan.group is None else untried(plan.group)
    cannot = why_not or _why_not_moved(plan)
    choice = dispatch.decide_unmodeled(op, implementation, plan.target, cannot, by_default)
    shapes = f"{routing.tokens.shape[0]} rows of {moved.shape[1]} {moved.dtype}"
    choice = dataclasses.replace(choice, shapes=shapes)
    record(choice)
    if choice.implementation == "xla":
        return Movement(axis_name)
    if choice.target.platform == "cpu":
        emulation.enable()
    return movement


def _why_not_moved(plan: RowsPlan) -> str:
    """Says why the kernels cannot move the rows of a plan; empty if they can."""
    try:
        mesh_axes.require_no_partitioner_axes()
        if plan.group is not None:
            require_peers(plan.group, plan.target)
    except NotImplementedError as cannot:
        return str(cannot)
    return plan.why_not() or ""


def _require_axis(routing: Routing, op: str, axis_name: AxisName | None) -> tuple[AxisName | None, int]:
    """Checks that the axis is the routing's. Returns it, and its number of devices."""
    axis_name, devices = axis_of(op, axis_name)
    if axis_name != routing.axis_name:
        raise ValueError(
            f"`axis_name` must be that of `routing`, got {axis_name!r}, and `route` got {routing.axis_name!r}: pass "
            "the same axes in the same order"
        )
    return axis_name, devices


def _require_tokens(
    name: str, value: jax.Array, routing: Routing, op: str, axis_name: AxisName | None
) -> AxisName | None:
    """Checks that `value` has a row for each token of the routing. Returns the axis."""
    axis_name, devices = _require_axis(routing, op, axis_name)
    tokens = routing.positions.shape[0]
    if value.ndim != 2 or value.shape[0] * devices != tokens:
        raise ValueError(
            f"`{name}` must be a matrix with a row for each of this device's {tokens // devices} tokens, as `routing` "
            f"says (devices: {devices}), got shape {value.shape}: pass what belongs to the tokens that `route` got"
        )
    return axis_name
