"""`overlap.route` against a loop over the sorted routes: its lists, dropped routes, symbols, and refusals."""

from __future__ import annotations

import collections
import math
import secrets
from collections.abc import Callable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import overlap
from tests.oracle import make_mesh

pytestmark = pytest.mark.one_jax
CASES = [  # The mesh, over whose axes in reverse the tokens lie; tokens of a device, slots, experts, capacity.
    ({"x": 2}, 6, 3, 8, None), ({"x": 2}, 6, 3, 8, 4), ({}, 5, 2, 3, None), ({"x": 2}, 1, 4, 4, None),
    ({"y": 2, "x": 2}, 3, 1, 8, None),
    # They are counted in blocks of 128 tokens. A capacity for more rows than there are routes adds no rows.
    ({"x": 2}, 150, 2, 6, 70), ({"x": 2}, 200, 3, 4, None), ({"x": 2}, 12, 1, 8, 20),
    ({}, 5, 2, 3, 10), ({}, 5, 2, 3, 10**12),
]  # fmt: skip
KINDS = ("drawn", "to one", "an expert without tokens", "ids out of range", "no expert at all")


def drawn(kind: str, tokens: int, k: int, experts: int, seed: int) -> np.ndarray:
    """Ids, [tokens of all devices, k]; those of a token differ."""
    chance = np.random.default_rng(seed)
    few = max(experts - 1, k) if kind == "an expert without tokens" else experts
    ids = np.array([chance.permutation(few)[:k] for _ in range(tokens)], np.int32)
    if kind == "to one":
        ids[:] = np.arange(experts - k, experts)
    if kind in KINDS[3:]:
        strange = chance.choice([-1, -7, experts, experts + 1, -(2**31), 2**31 - 1], ids.shape)
        ids = np.where(chance.random(ids.shape) < (0.4 if kind == KINDS[3] else 1), strange, ids).astype(np.int32)
    return ids


def check(routing: Any, ids: np.ndarray, devices: int, experts: int, capacity: int | None) -> None:
    """Each device's lists are those of the first routes to each expert, up to the capacity, sorted by expert."""
    (tokens, k), owned = ids.shape, experts // devices
    rows = min(tokens * min(k, owned), owned * (capacity or tokens))
    taken, kept = collections.Counter(), np.zeros(ids.shape, bool)
    for at, expert in np.ndenumerate(ids):
        taken[expert] += 1
        kept[at] = 0 <= expert < experts and (capacity is None or taken[expert] <= capacity)
    for device in range(devices):
        mine = range(device * owned, (device + 1) * owned)
        routes = sorted((ids[at], *at) for at in np.ndindex(ids.shape) if ids[at] in mine and kept[at])
        positions = np.full(ids.shape, rows)
        for row, (_, token, slot) in enumerate(routes):
            positions[token, slot] = row
        found = jax.tree.map(lambda x, device=device: np.asarray(x)[device], routing)
        np.testing.assert_array_equal(found.positions, positions)
        assert [*zip(found.tokens, found.slots)][: len(routes)] == [route[1:] for route in routes]
        assert found.group_sizes.tolist() == [sum(r[0] == expert for r in routes) for expert in mine]
        assert found.dropped == sum(ids[at] in mine and not kept[at] for at in np.ndindex(ids.shape))
        assert len(found.tokens) == rows and {x.dtype.name for x in jax.tree.leaves(found)} == {"int32"}
        for indices, size in ((found.tokens, tokens), (found.slots, k)):
            assert ((indices >= 0) & (indices < size)).all()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_lists(case: Any) -> None:
    """Also of ids of 64 bits."""
    axes, tokens, k, experts, capacity = case
    names, devices, seed = tuple(reversed(axes)), math.prod(axes.values()), secrets.randbits(32)
    axis = names or None

    def lists(ids: jax.Array) -> Any:
        return jax.tree.map(lambda x: x[None], overlap.route(ids, experts, axis, capacity=capacity))

    run = jax.shard_map(lists, mesh=make_mesh(**axes), in_specs=P(axis), out_specs=P(axis)) if axes else lists
    kinds = KINDS if tokens < 100 else KINDS[3:4]
    for kind, wide in [*((kind, False) for kind in kinds), *[("drawn", True)] * (case is CASES[1])]:
        ids = drawn(kind, devices * tokens, k, experts, seed)
        print(kind, wide, seed)
        with jax.enable_x64(wide):
            check(jax.jit(run)(ids.astype(np.int64) if wide else ids), ids, devices, experts, capacity)
    ids, wrong = (drawn("drawn", devices * tokens, k, experts, seed) for _ in range(2))
    wrong[0, 0] = -1
    with pytest.raises(AssertionError):  # A negative control.
        check(jax.jit(run)(ids), wrong, devices, experts, capacity)


@pytest.mark.parametrize("capacity", [70, pytest.param(None, marks=pytest.mark.slow)])
def test_a_number_of_tokens_that_is_a_symbol(capacity: int | None) -> None:
    ids = drawn("ids out of range", 150, 2, 6, secrets.randbits(32))
    types = jax.ShapeDtypeStruct((*jax.export.symbolic_shape("2*b"), 2), jnp.int32)
    exported = jax.export.export(jax.jit(lambda ids: overlap.route(ids, 6, None, capacity=capacity)))(types)
    found, rows = (
        jax.tree.map(np.asarray, x) for x in (exported.call(ids), overlap.route(ids, 6, None, capacity=capacity))
    )
    used, nowhere = int(found.group_sizes.sum()), len(found.tokens)
    assert found.group_sizes.tolist() == rows.group_sizes.tolist() and found.dropped == rows.dropped
    assert found.tokens[:used].tolist() == rows.tokens[:used].tolist()
    # With a capacity, there may be more rows than without a symbol.
    np.testing.assert_array_equal(
        found.positions, np.where(rows.positions == len(rows.tokens), nowhere, rows.positions)
    )


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


IDS, X = np.zeros((4, 2), np.int32), np.zeros((4, 6), np.float32)
EXPLICIT = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
MANY = jax.ShapeDtypeStruct((2**16, 2**15), np.int32)
route: Callable[..., Any] = overlap.route
REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: route(X, 3, None), r"`experts` must be integers \[tokens, k\].*float32: pass the indices"),
    (lambda: route(IDS[0], 3, None), r"`experts` must be integers .* shape \(2,\)"),
    (lambda: route([[0, 1]], 8, None), r"got list \[\[0, 1\]\]: pass .*asarray"),
    (lambda: jax.eval_shape(lambda x: route(x, 8, None), X), r"got an array of shape \(4, 6\) and dtype f"),
    (lambda: route(IDS[:, :0], 3, None), r"`experts` must be integers .* shape \(4, 0\)"),
    (lambda: route(IDS, 1, None), "at most num_experts=1 experts for a token, got k=2: the experts of"),
    (lambda: route(IDS, 0, None), "`num_experts` must be an integer of at least 1, got 0: pass the number"),
    (lambda: route(IDS, None, None), "`num_experts` must be an integer of at least 1, got None: pass the"),
    (lambda: route(IDS, 3, 3), "`axis_name` must be the name of a mesh axis.*, got 3: name the axis"),
    (lambda: route(IDS, 3, 1.5j * X), "`axis_name` must be the name of a mesh axis"),
    (lambda: route(IDS, 3, ("x", "x")), r"`axis_name` must name .* each once, got \('x', 'x'\)"),
    (lambda: route(IDS, 3, ()), r"`axis_name` must name at least one axis"),
    (lambda: route(IDS, 3, "z"), "`route` must be called inside `jax.shard_map` over axis 'z'.*None on one"),
    (lambda: route(IDS, 3, None, capacity=0), "`capacity` must be None or an integer of at least 1, got 0"),
    (lambda: jax.shard_map(lambda i: route(i, 3, "x").tokens, mesh=make_mesh(x=2), in_specs=P("x"),
                           out_specs=P("x"))(IDS),
     "`num_experts` must be a multiple of the 2 devices along the axis, got 3: use 4 experts"),
    (lambda: jax.shard_map(lambda i: route(i, 2, "x").tokens, mesh=make_mesh(x=2), in_specs=P("x"),
                           out_specs=P("x"))(np.zeros((4, 3), np.int32)),
     "`experts` must choose at most num_experts=2 experts for a token, got k=3"),
    (lambda: jax.export.export(jax.jit(jax.shard_map(
        lambda i: route(i, 4, "x").tokens, mesh=make_mesh(x=2), in_specs=P("x"), out_specs=P("x"))))(
            jax.ShapeDtypeStruct((*jax.export.symbolic_shape("2*b"), 2), jax.numpy.int32)),
     r"`experts` must have a known number of tokens where 2 devices share the experts, got shape \(b, 2\): export"),
    (lambda: route(jax.device_put(IDS, jax.NamedSharding(EXPLICIT, P("x"))), 3, None),
     r"`experts` must be one device's, got .* sharded P\('x', None\) along Explicit axes: call `route` inside"),
    (lambda: route(MANY, 2**20, None), "`experts` must be an array, got a jax.Shape"),
    (lambda: jax.eval_shape(lambda i: route(i, 2**20, None), MANY),
     r"`experts` must have fewer than 2\^31 routes on all devices, got 2147483648: split"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_refusals(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
