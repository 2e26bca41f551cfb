"""Expert layers against an oracle that computes every expert for every token: routes, results, gradients, refusals."""

from __future__ import annotations

import dataclasses
import functools
import re
import secrets
from collections.abc import Callable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import overlap
from overlap.collectives.rows import rows
from overlap.frame import call as calls
from tests.ops.expert_cases import (
    HIDDEN,
    IN,
    Case,
    exact,
    gated,
    kept,
    layer,
    on_devices,
    operands,
    oracle,
    program,
    routings,
)  # fmt: skip
from tests.oracle import make_mesh

pytestmark = pytest.mark.one_jax
CASES = {
    "two devices": Case(2, 6, 3, 8),
    "capacity": Case(2, 6, 3, 8, capacity=4),
    "no axis": Case(1, 5, 2, 3, axes=()),
    "one token, all experts": Case(2, 1, 4, 4),
    "four devices in two axes, one expert": Case(4, 3, 1, 8, axes=("x", "y")),
}


def near(found: Any, expected: Any) -> bool:
    found, expected = np.asarray(found), np.asarray(expected)
    return found.shape == expected.shape and bool(
        np.linalg.norm(found - expected) <= 1e-5 * (np.linalg.norm(expected) + 1e-6)
    )


def check_routing(case: Case, ids: np.ndarray, counts: np.ndarray, routing: Any, context: Any) -> None:
    """Each device's lists are those of a loop over the sorted routes."""
    owned = case.experts // case.devices
    for device in range(case.devices):
        mine = range(device * owned, (device + 1) * owned)
        routes = sorted((ids[at], *at) for at in np.ndindex(ids.shape) if ids[at] in mine and counts[at])
        of_device = jax.tree.map(lambda x, device=device: np.asarray(x)[device], routing)
        positions = np.full(ids.shape, case.rows)
        for row, (_, token, slot) in enumerate(routes):
            positions[token, slot] = row
        np.testing.assert_array_equal(of_device.positions, positions, context)
        assert [*zip(of_device.tokens, of_device.slots)][: len(routes)] == [route[1:] for route in routes], context
        assert of_device.group_sizes.tolist() == [sum(r[0] == expert for r in routes) for expert in mine], context
        lost = sum(ids[at] in mine and not counts[at] for at in np.ndindex(ids.shape))
        assert of_device.dropped == lost, context
        assert len(of_device.tokens) == case.rows and {x.dtype.name for x in jax.tree.leaves(of_device)} == {"int32"}
        for indices, size in ((of_device.tokens, len(ids)), (of_device.slots, case.k)):
            assert ((indices >= 0) & (indices < size)).all()


@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients(name: str) -> None:
    case, seed = CASES[name], secrets.randbits(32)
    given, ways = operands(case, seed), routings(case, seed)
    weights = np.random.default_rng(seed + 1).standard_normal(given["x"].shape, np.float32)
    for kind, ids in ways.items():
        context, counts = f"{name}, {kind}, seed {seed}", kept(case, ids)
        (_, (out, hidden, routing)), grads = program(case)(given, ids, weights)
        if case.axis is None:
            routing = jax.tree.map(np.asarray, routing)
        check_routing(case, ids, counts, routing, context)
        expected_grads, expected = (f(given, ids, counts, *more) for f, more in zip(exact(case), ((weights,), ())))
        assert near(out, expected), context
        for operand in given.keys() - {"shift"}:
            assert near(grads[operand], expected_grads[operand]), (operand, context)
        # Rows that are not in use are zero, and so are their cotangents.
        for device, places in enumerate(np.split(np.arange(len(hidden)), case.devices)):
            unused = places[routing.group_sizes[device].sum() :]
            assert not np.asarray(hidden)[unused].any() and not np.asarray(grads["shift"])[unused].any(), context
        again = program(case)(given, ids, weights)
        jax.tree.map(np.testing.assert_array_equal, again, ((_, (out, hidden, again[0][1][2])), grads))
    # Negative control: another choice of one token shows.
    other = np.where(np.arange(len(ids))[:, None] == 0, ways["drawn"], ids)
    assert not near(expected, exact(case)[1](given, other, kept(case, other))), seed


def test_routes_of_many_tokens() -> None:
    """They are counted in blocks of 128 tokens. A capacity for more rows than there are routes adds no rows."""
    for case in (Case(2, 150, 2, 6, capacity=70), Case(2, 200, 3, 4), Case(2, 12, 1, 8, capacity=20)):
        ids = routings(case, secrets.randbits(32))["ids out of range"]
        of_each = on_devices(case, functools.partial(lists, case))
        check_routing(case, ids, kept(case, ids), jax.jit(of_each)(ids), case)


def lists(case: Case, ids: jax.Array) -> Any:
    return jax.tree.map(lambda x: x[None], overlap.route(ids, case.experts, case.axis, capacity=case.capacity))


@pytest.mark.parametrize("capacity", [70, pytest.param(None, marks=pytest.mark.slow)])
def test_a_number_of_tokens_that_is_a_symbol(capacity: int | None) -> None:
    case = Case(1, 150, 2, 6, capacity, axes=())
    ids = routings(case, secrets.randbits(32))["ids out of range"]
    types = jax.ShapeDtypeStruct((*jax.export.symbolic_shape("2*b"), 2), jnp.int32)
    exported = jax.export.export(jax.jit(lambda ids: lists(case, ids)))(types)
    found = exported.call(ids)
    used = int(found.group_sizes.sum())
    rows = jax.tree.map(np.asarray, overlap.route(ids, 6, None, capacity=capacity))
    assert found.group_sizes.tolist() == [rows.group_sizes.tolist()] and found.dropped == rows.dropped
    assert found.tokens[0, :used].tolist() == rows.tokens[:used].tolist()
    nowhere = found.tokens.shape[1]  # With a capacity, there may be more rows than without a symbol.
    positions = np.where(rows.positions == len(rows.tokens), nowhere, rows.positions)
    np.testing.assert_array_equal(found.positions[0], positions)


def test_a_capacity_above_all_routes_drops_nothing() -> None:
    ids = np.array([[0, 0], [1, 0]], np.int32)
    unlimited = overlap.route(ids, 2, None)
    for capacity in (10**12, 4):
        jax.tree.map(np.testing.assert_array_equal, overlap.route(ids, 2, None, capacity=capacity), unlimited)
    assert overlap.route(ids, 2, None, capacity=2).dropped == 1


def test_a_token_may_choose_an_expert_twice() -> None:
    """If there are enough rows both count; else the last routes are dropped, and counted."""
    twice = jax.jit(lambda: overlap.route(np.array([[0, 0], [1, 0]]), 2, None))()
    assert twice.positions.tolist() == [[0, 1], [3, 2]] and twice.dropped == 0
    ids = np.array([[0, 0], [0, 0]], np.int32)
    run = jax.shard_map(lambda ids: jax.tree.map(lambda x: x[None], overlap.route(ids, 2, "x")),
                        mesh=make_mesh(x=2), in_specs=P("x"), out_specs=P("x"))  # fmt: skip
    found = jax.jit(run)(ids)
    assert found.positions[0].tolist() == [[0, 1], [2, 2]] and found.dropped.tolist() == [2, 0]
    assert found.group_sizes.tolist() == [[2], [0]] and found.tokens.shape == (2, 2)


def test_rows_are_added_in_float32_in_the_order_of_the_slots() -> None:
    ids = np.array([[2, 0, 1]], np.int32)
    identity, gates = np.ones((3, 1, 1), np.float32), np.ones((1, 3), np.float32)

    def add(rows: list[int], dtype: Any) -> jax.Array:
        h = np.asarray(rows, dtype)[:, None]
        one = lambda: overlap.grouped_matmul_reduce_scatter(  # noqa: E731
            h, identity.astype(dtype), gates, overlap.route(ids, 3, None), None)  # fmt: skip
        return jax.jit(one)()

    # By slot: 2^24 + 1 rounds to 2^24. In every other order the sum is 1.
    assert add([1, -(2**24), 2**24], jnp.float32) == 0
    # In bfloat16 256 + 1 is 256.
    found = add([1, 1, 256], jnp.bfloat16)
    assert found == 258 and found.dtype == jnp.bfloat16


def test_copies_and_sums_are_each_others_transposes() -> None:
    """In bfloat16, where the cotangent of a token is summed in float32. Rows not in use are zero, or unread."""
    ids, tokens = np.array([[1, 0, 2], [1, 2, 5]], np.int32), np.array([[3], [5]], jnp.bfloat16)
    by_xla = rows.Movement(None)

    def both(tokens: jax.Array, of_rows: jax.Array) -> Any:
        out, back = jax.vjp(lambda x: rows.copied(x, overlap.route(ids, 4, None), by_xla), tokens)
        return out, back(of_rows)[0]

    # The rows are of tokens 0; 0, 1; 0, 1. In bfloat16, 256 + 1 is 256.
    copies, sums = jax.jit(both)(tokens, np.array([[256], [1], [8], [1], [8], [np.nan]], jnp.bfloat16))
    assert copies[:, 0].tolist() == [3, 3, 5, 3, 5, 0] and sums[:, 0].tolist() == [258, 16]
    given = np.tile(np.array([256, 1], jnp.bfloat16), (6, 1))
    added = lambda gates: rows.added(given, gates, overlap.route(ids, 4, None), by_xla).sum()  # noqa: E731
    of_gates = jax.jit(jax.grad(added))
    assert of_gates(np.zeros((2, 3), np.float32)).tolist() == [[257, 257, 257], [257, 257, 0]]


def test_options_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    given, product = [], calls.run
    monkeypatch.setattr(calls, "run", lambda spec, found: given.append(vars(found)) or product(
        spec, dataclasses.replace(found, config=None)))  # fmt: skip
    options: Any = {"preferred_element_type": jnp.float16, "config": overlap.Config(), "implementation": "xla"}

    def both(ids: jax.Array) -> jax.Array:
        routing = overlap.route(ids, 3, None)
        return reduce(gather(X, W, routing, None, **options), W2.astype(np.float16), GATES, routing, None, **options)

    assert jax.eval_shape(both, IDS).dtype == jnp.float16
    assert len(given) == 2 and all(options.items() <= found.items() for found in given)


def test_gates_of_routes_that_are_not_computed_do_not_count() -> None:
    gates, w = np.array([[2, np.nan], [np.inf, 3]], np.float32), np.ones((2, 1, 1), np.float32)

    def run(gates: jax.Array) -> tuple[jax.Array, Any]:
        routing = overlap.route(np.array([[0, -1], [0, 1]]), 2, None, capacity=1)
        out = overlap.grouped_matmul_reduce_scatter(np.ones((2, 1), np.float32), w, gates, routing, None)
        return out.sum(), (out, routing.dropped)

    (_, (out, dropped)), grad = jax.jit(jax.value_and_grad(run, has_aux=True))(gates)
    assert out.tolist() == [[2], [3]] and dropped == 1 and grad.tolist() == [[1, 0], [0, 1]]


def test_forms_of_the_weights_and_dtypes() -> None:
    """Transposed weights, one matrix and an activation, operands in bf16 and results in float32."""
    case = CASES["two devices"]
    given, ids = operands(case, 1), routings(case, 2)["drawn"]
    half = {name: jnp.asarray(x, jnp.bfloat16) for name, x in given.items()}

    def both(given: Any, ids: Any, transpose_rhs: bool) -> Any:
        turn = lambda w: w.swapaxes(1, 2) if transpose_rhs else w  # noqa: E731
        options: Any = {"transpose_rhs": transpose_rhs, "preferred_element_type": jnp.float32, "implementation": "xla"}
        routing = overlap.route(ids, case.experts, "x")
        hidden = overlap.all_gather_lhs_grouped_matmul(
            given["x"], turn(given["w_up"]), routing, "x", activation=jnp.tanh, **options
        )
        lhs = hidden.astype(given["w_down"].dtype)
        out = overlap.grouped_matmul_reduce_scatter(lhs, turn(given["w_down"]), given["gates"], routing, "x", **options)
        return hidden, out

    f = lambda which, turned: on_devices(case, functools.partial(both, transpose_rhs=turned))(which, ids)  # noqa: E731
    (hidden, out), (hidden_half, out_half) = jax.jit(lambda: (f(given, False), f(half, True)))()
    assert hidden_half.dtype == out_half.dtype == jnp.float32 and hidden.shape == (2 * case.rows, HIDDEN)
    for found, expected in ((hidden_half, hidden), (out_half, out)):
        assert 1e-5 < np.linalg.norm(found - expected) / np.linalg.norm(expected) < 3e-2
    outs = np.einsum("tei,eih->teh", np.tanh(np.einsum("th,ehi->tei", given["x"], given["w_up"])), given["w_down"])
    assert near(out, np.einsum("tk,tkh->th", given["gates"], np.take_along_axis(outs, ids[..., None], 1)))


def test_transforms() -> None:
    """Forward mode, second derivatives, vmap over tokens and over routings, checkpoint in a scan; no scatter-add."""
    case = dataclasses.replace(CASES["two devices"], tokens=3, experts=4, k=2)
    given, ids = operands(case, 3), np.stack([routings(case, seed)["drawn"] for seed in (4, 5)])
    direction = operands(case, 6)
    del given["shift"], direction["shift"]
    given, direction = jax.tree.map(jnp.asarray, (given, direction))
    counts, run = np.ones(ids[0].shape, bool), on_devices(case, lambda given, ids: layer(case, given, ids)[0])
    right = lambda given, ids: oracle(given, ids, counts)  # noqa: E731

    def derivatives(f: Any) -> Any:
        # By an operand of each kind.
        some, along = ({name: x[name] for name in ("x", "gates", "w_down")} for x in (given, direction))
        of_some = lambda some: f(given | some, ids[0])  # noqa: E731
        slope = lambda some: jax.jvp(lambda some: (of_some(some) ** 2).sum(), (some,), (along,))[1]  # noqa: E731
        return jax.jvp(of_some, (some,), (along,)), jax.grad(slope)(some)

    def mapped(f: Any) -> Any:
        of_all = jax.vmap(f, in_axes=({name: 0 if name == "x" else None for name in given}, 0))
        return jax.value_and_grad(lambda given: (of_all(given, ids) ** 2).sum())(
            given | {"x": jnp.stack([given["x"], direction["x"]])})  # fmt: skip

    def scanned(f: Any) -> Any:
        def both(given: Any) -> Any:
            step = lambda x, ids: (x + jax.checkpoint(f)(given | {"x": x}, ids), None)  # noqa: E731
            return (lax.scan(step, given["x"], ids)[0] ** 2).sum()

        return jax.value_and_grad(both)(given)

    for kind in (derivatives, mapped, scanned):
        found, expected = jax.jit(lambda kind=kind: (kind(run), kind(right)))()
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert near(a, b), (kind.__name__, a, b)
    text = str(jax.make_jaxpr(jax.grad(lambda given: (run(given, ids[0]) ** 2).sum()))(given))
    assert re.search(r"\bgather\b", text) and "scatter-add" not in text and "scatter_add" not in text


# --- Refusals ---------------------------------------------------------------------------------------------------------

IDS = np.zeros((4, 2), np.int32)
X, W, W2, GATES, H = (np.zeros(x, np.float32) for x in ((4, IN), (3, IN, HIDDEN), (3, HIDDEN, IN), (4, 2), (8, HIDDEN)))
F8 = jnp.float8_e4m3fn
EXPLICIT = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
MANY = jax.ShapeDtypeStruct((2**16, 2**15), np.int32)
gather, reduce = overlap.all_gather_lhs_grouped_matmul, overlap.grouped_matmul_reduce_scatter
# A call, given a routing of `IDS`, and the message of its ValueError.
REFUSED: list[tuple[Callable[[Any], Any], str]] = [
    (lambda r: overlap.route(X, 3, None), r"`experts` must be integers \[tokens, k\].*float32: pass the indices"),
    (lambda r: overlap.route(IDS[0], 3, None), r"`experts` must be integers .* shape \(2,\)"),
    (lambda r: overlap.route([[0]], 3, None), "`experts` must be integers"),  # pyright: ignore[reportArgumentType]
    (lambda r: overlap.route([[0, 1]], 8, None), r"got list \[\[0, 1\]\]: pass .*asarray"),  # pyright: ignore[reportArgumentType]
    (lambda r: jax.eval_shape(lambda x: overlap.route(x, 8, None), X), r"got an array of shape \(4, 6\) and dtype f"),
    (lambda r: overlap.route(IDS[:, :0], 3, None), r"`experts` must be integers .* shape \(4, 0\)"),
    (lambda r: overlap.route(IDS, 1, None), "at most num_experts=1 experts for a token, got k=2: the experts of"),
    (lambda r: overlap.route(IDS, 0, None), "`num_experts` must be an integer of at least 1, got 0: pass the number"),
    (lambda r: overlap.route(IDS, None, None), "`num_experts` must be an integer of at least 1, got None: pass the"),  # pyright: ignore[reportArgumentType]
    (lambda r: overlap.route(IDS, 3, 3), "`axis_name` must be the name of a mesh axis.*, got 3: name the axis"),  # pyright: ignore[reportArgumentType]
    (lambda r: overlap.route(IDS, 3, None, capacity=0), "`capacity` must be None or an integer of at least 1, got 0"),
    (lambda r: overlap.route(IDS, 3, "z"), "`route` must be called inside `jax.shard_map` over axis 'z'.*None on one"),
    (lambda r: overlap.route(IDS, 3, 1.5j * X), "`axis_name` must be the name of a mesh axis"),  # pyright: ignore[reportArgumentType]
    (lambda r: overlap.route(IDS, 3, ("x", "x")), r"`axis_name` must name .* each once, got \('x', 'x'\)"),
    (lambda r: overlap.route(IDS, 3, ()), r"`axis_name` must name at least one axis"),
    (lambda r: on_two(lambda ids: gather(X[:2], W[:2], overlap.route(ids, 4, "x"), "y"), IDS),
     "`axis_name` must be that of `routing`, got 'y', and `route` got 'x': pass the same"),
    (lambda r: jax.shard_map(lambda i: overlap.route(i, 3, "x").tokens, mesh=make_mesh(x=2), in_specs=P("x"),
                             out_specs=P("x"))(IDS),
     "`num_experts` must be a multiple of the 2 devices along the axis, got 3: use 4 experts"),
    (lambda r: overlap.route(jax.device_put(IDS, jax.NamedSharding(EXPLICIT, P("x"))), 3, None),
     r"`experts` must be one device's, got .* sharded P\('x', None\) along Explicit axes: call `route` inside"),
    (lambda r: overlap.route(MANY, 2**20, None), "`experts` must be an array, got a jax.Shape"),  # pyright: ignore[reportArgumentType]
    (lambda r: jax.eval_shape(lambda i: overlap.route(i, 2**20, None), MANY),
     r"`experts` must have fewer than 2\^31 routes on all devices, got 2147483648: split"),
    (lambda r: gather(X, W, IDS, None), "`routing` must be what `overlap.route` returns, got ndarray"),  # pyright: ignore[reportArgumentType]
    (lambda r: gather(IDS, W, r, None), "`lhs` must be floating-point, got int32"),
    (lambda r: gather(X[None], W, r, None), r"`lhs` must have 2 dimensions, got 3 \(shape \(1, 4, 6\)\): reshape"),
    (lambda r: gather(X[:3], W, r, None), r"`lhs` .* a row for each of this device's 4 tokens.*devices: 1.*\(3, 6\)"),
    (lambda r: gather(X, W[:2], r, None), r"`rhs` must have a matrix for each of the 3 groups, got 2 .*\(2, 6, 5\)"),
    (lambda r: gather(X, [W, W2], r, None, activation=gated),
     r"the arrays of `rhs` must have one shape, got \(3, 6, 5\) and \(3, 5, 6\)"),
    (lambda r: gather(X, W, r, None, transpose_rhs=True), r"`lhs` and `rhs` .* k=6 .* k=5 .*`transpose_rhs`"),
    (lambda r: gather(X, W, r, None, transpose_rhs=1), "`transpose_rhs` must be True or False"),  # pyright: ignore[reportArgumentType]
    (lambda r: gather(X, W, r, "z"), "`all_gather_lhs_grouped_matmul` must be called inside"),
    (lambda r: gather(X, W, r, None, implementation="XLA"), "`implementation` must be"),  # pyright: ignore[reportArgumentType]
    (lambda r: gather(X, W.astype(jnp.bfloat16), r, None), "`lhs` and `rhs` .* same dtype, got float32 and bfloat16"),
    (lambda r: gather(X, [W, W[..., 1:]], r, None, activation=gated), "the arrays of `rhs` must have one shape"),
    (lambda r: gather(X, [W, W], r, None), "`rhs` .* must be one array, got a list of 2: make a"),
    (lambda r: gather(X, [], r, None), "`rhs` must hold at least one matrix"),
    (lambda r: gather(X, [W, W], r, None, activation=gated, bias=W[0]), "`bias` must be a list .*: give 2"),
    (lambda r: gather(X, W, r, None, bias=W[0]), r"`bias` must have shape \(3, 5\).*, got \(6, 5\): reshape"),
    (lambda r: gather(X.astype(F8), W.astype(F8), r, None), "`lhs` must have at least 16 bits, got float8_e4m3fn"),
    (lambda r: reduce(H, W2.astype(jnp.bfloat16), GATES, r, None), "`lhs` and `rhs` must have the same dtype"),
    (lambda r: reduce(H, [W2], GATES, r, None), "`rhs` .* must be one array"),  # pyright: ignore[reportArgumentType]
    (lambda r: reduce(X[:, :5], W2, GATES, r, None), "`lhs` must have a row for each of the 8 rows .*, got 4"),
    (lambda r: reduce(np.zeros((8, 6), np.float32), W2, GATES, r, None), "`lhs` and `rhs` .* k=6 .* k=5"),
    (lambda r: reduce(H, W2, GATES[:, :1], r, None), "`gates` .* 2 experts.*, got 1: pass"),
    (lambda r: reduce(H, W2, GATES[1:], r, None), r"`gates` .* 4 tokens.*\(3, 2\)"),
    (lambda r: reduce(H, W2, IDS, r, None), "`gates` must be floating-point"),
    (lambda r: reduce(at(0, H), W2, at(1, GATES), r, None), "`gates` must be on the same devices as `lhs`"),
    (lambda r: gather(at(0, X), W, at(1, r), None), "`routing` must be on the same devices as `lhs`"),
]  # fmt: skip


def at(device: int, given: Any) -> Any:
    return jax.device_put(given, jax.devices()[device])


def on_two(run: Callable[[Any], Any], given: Any) -> Any:
    """Runs on two devices along x, and one along y."""
    mesh = make_mesh(x=2, y=1)
    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False))(given)


def test_no_tokens_on_two_devices() -> None:
    """XLA gathers and scatters no empty arrays."""

    def run(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        routing = overlap.route(jnp.zeros((0, 2), jnp.int32), 4, ["x"])  # pyright: ignore[reportArgumentType]
        return gather(x, W[:2], routing, "x"), reduce(jnp.zeros((0, 5)), W2[:2], jnp.zeros((0, 2)), routing, "x")

    assert [out.shape for out in on_two(run, jnp.zeros((0, 6)))] == [(0, 5), (0, 6)]


def test_refusals() -> None:
    routing = jax.jit(lambda: overlap.route(IDS, 3, None))()
    for number, (call, message) in enumerate(REFUSED):
        with pytest.raises(ValueError, match=message):
            call(routing)
            pytest.fail(f"number {number} ({message}) is not refused")


def test_constants_of_a_program_may_lie_on_any_device() -> None:
    x, w, routing = at(0, X), at(1, W), at(2, jax.jit(lambda: overlap.route(IDS, 3, None))())
    assert jax.eval_shape(lambda: gather(x, w, routing, None)).shape == (8, HIDDEN)
