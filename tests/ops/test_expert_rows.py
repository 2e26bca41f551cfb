"""Rows of experts that kernels move: where XLA runs instead, roundings, and the order of chunks. FORMS has the rest."""

from __future__ import annotations

import dataclasses
import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import overlap
from overlap.choice import dispatch
from overlap.collectives.rows import chunks as chunks_of_rows
from overlap.collectives.rows import copies_product, row_kernels, rows
from overlap.collectives.rows.routing import Routing
from tests.oracle import make_mesh

pytestmark = pytest.mark.one_jax


@pytest.mark.parametrize(("of", "by"), [
    (lambda run: run, jax.jit), *(pytest.param(of, by, marks=pytest.mark.slow) for of, by in (
        (lambda run: run, lambda run: run), (jax.value_and_grad, jax.jit), (jax.value_and_grad, lambda run: run)))
])  # fmt: skip
def test_jax_looks_for_nan(of: Any, by: Any) -> None:
    """Rows that are not in use hold none then, and a NaN of another operation is reported for that operation."""
    ids = jnp.array([[0, 2], [-1, 1], [2, 3], [1, 0]])
    given = tuple(
        jnp.ones(shape, jnp.bfloat16) for shape in ((4, 128), (3, 128, 40), (3, 128, 40), (3, 40, 128), (4, 2))
    )

    def run(given: Any, shift: Any) -> jax.Array:
        (x, *sides, down, gates), routing = given, overlap.route(ids, 3, None)
        gated = lambda gate, up: jax.nn.silu(gate) * up  # noqa: E731
        hidden = gather(x, sides, ids, activation=gated, implementation="fused")
        out = overlap.grouped_matmul_reduce_scatter(hidden, down, gates, routing, None, implementation="fused")
        return jnp.log(jnp.abs(out.astype(jnp.float32)).sum() + shift)

    called = by(of(run))
    with jax.debug_nans(True):
        for found in jax.tree.leaves(called(given, 1.0)):
            assert np.isfinite(np.asarray(found, np.float32)).all()
        with pytest.raises(FloatingPointError, match=r"\(nan\) encountered in log"):
            called(given, -1e9)


def one_device(tokens: int, k: int, experts: int, features: int, dtype: Any) -> tuple[Any, ...]:
    """Types of a layer's operands on one device."""
    of = jax.ShapeDtypeStruct
    return of((tokens, features), dtype), of((experts, features, features), dtype), of((tokens, k), jnp.int32)


def gather(x: jax.Array, w: Any, ids: jax.Array, **options: Any) -> jax.Array:
    routing = overlap.route(ids, len(jax.tree.leaves(w)[0]), None)
    return overlap.all_gather_lhs_grouped_matmul(x, w, routing, None, **options)


REFUSED = {
    (100, jnp.bfloat16): (NotImplementedError, "a multiple of 64 features of bfloat16, from 128 on, and there are 100"),
    (64, jnp.float16): (NotImplementedError, "a multiple of 64 features of float16, from 128 on, and there are 64"),
    (144, jnp.float32): (NotImplementedError, "a multiple of 32 features of float32, from 128 on, and there are 144"),
    (128, jnp.float64): (NotImplementedError, "rows of bfloat16, float16 or float32, not of float64"),
    (128, jnp.float8_e5m2): (ValueError, "`lhs` must have at least 16 bits, got float8_e5m2"),
    (16512, jnp.float16): (NotImplementedError, "rows of at most 16384 features of float16, and there are 16512"),
    (8320, jnp.float32): (NotImplementedError, "rows of at most 8192 features of float32, and there are 8320"),
}


@pytest.mark.parametrize(("features", "dtype"), REFUSED, ids=str)
def test_what_the_kernels_cannot_move(features: int, dtype: Any) -> None:
    error, message = REFUSED[features, dtype]
    with jax.enable_x64(dtype == jnp.float64):
        types = one_device(4, 2, 3, features, dtype)
        with pytest.raises(error, match=message):
            jax.eval_shape(functools.partial(gather, implementation="fused"), *types)
        if error is NotImplementedError:  # By XLA it is right.
            assert jax.eval_shape(gather, *types).shape == (8, features)


def test_where_xla_splits_the_program_no_kernel_runs() -> None:
    types = one_device(4, 2, 3, 128, jnp.bfloat16)
    mapped = jax.shard_map(functools.partial(gather, implementation="fused"), mesh=make_mesh(x=1, y=2),
                           in_specs=P(), out_specs=P("x"), axis_names={"x"}, check_vma=False)  # fmt: skip
    with pytest.raises(NotImplementedError, match="y"):
        jax.eval_shape(jax.jit(mapped), *types)


def test_no_tokens() -> None:
    x, w, ids = (jnp.zeros(of.shape, of.dtype) for of in one_device(0, 2, 3, 128, jnp.bfloat16))
    with pytest.raises(NotImplementedError, match='at least 1, got m=0: use implementation="xla"'):
        gather(x, w, ids, implementation="fused")
    movement, routing = rows.Movement(None, dispatch.target(), True), overlap.route(ids, 3, None)
    move = jax.jit(lambda x, gates: (rows.copied(x, routing, movement), rows.added(x, gates, routing, movement)))
    assert [found.shape for found in move(x, jnp.zeros((0, 2)))] == [(0, 128)] * 2


def test_explain_names_the_rows() -> None:
    def both(x: jax.Array, w: jax.Array, ids: jax.Array) -> jax.Array:
        routing = overlap.route(ids, 3, None)
        h = overlap.all_gather_lhs_grouped_matmul(x, w, routing, None, implementation="fused")
        return overlap.grouped_matmul_reduce_scatter(
            h, w, jnp.ones(ids.shape), routing, None, implementation="fused", preferred_element_type=jnp.float32
        )

    found = overlap.explain(both, *one_device(4, 2, 3, 128, jnp.bfloat16))
    of_rows = [(x.op, x.shapes, x.implementation) for x in found if x.op != "grouped_matmul"]
    assert of_rows == [
        ("all_gather_lhs_grouped_matmul", "8 rows of 128 bfloat16", "fused"),
        ("grouped_matmul_reduce_scatter", "8 rows of 128 float32", "fused"),
    ]
    by_xla = overlap.explain(gather, *one_device(4, 2, 3, 128, jnp.bfloat16))[0]
    assert (by_xla.op, by_xla.implementation) == ("all_gather_lhs_grouped_matmul", "xla")
    assert by_xla.shapes == "8 rows of 128 bfloat16"
    loss = lambda x, w, ids: gather(x, w, ids, implementation="fused").astype(jnp.float32).sum()  # noqa: E731
    backward = [x.op for x in overlap.explain(jax.grad(loss), *one_device(4, 2, 3, 128, jnp.bfloat16))
                if x.plan == "backward pass" and x.op != "grouped_matmul"]  # fmt: skip
    assert backward == ["rows added to tokens"]


def test_only_a_caller_who_asks_for_the_kernels_must_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they are chosen, XLA may still run in their place."""
    found: list[tuple[bool, bool]] = []
    monkeypatch.setattr(dispatch, "is_collecting", lambda: True)  # As if this were a measured GPU.
    monkeypatch.setattr(
        copies_product,
        "copied",
        lambda x, r, how: found.append((how.target is not None, how.must_fuse)) or rows.copied(x, r, how),
    )
    for implementation in (None, "fused"):
        jax.eval_shape(functools.partial(gather, implementation=implementation),
                       *one_device(4, 2, 3, 128, jnp.bfloat16))  # fmt: skip
    assert found == [(True, False), (True, True)]


# Row 2 belongs to nobody, and nothing may depend on it.
POSITIONS = np.array([[3, 4], [1, 0], [4, 4]], np.int32)
ROUTING = Routing(np.array([1, 1, 0, 0]), np.array([1, 0, 0, 0]), POSITIONS, np.array([4]), np.int32(2))  # pyright: ignore[reportArgumentType]


def of_all_maps(movement: rows.Movement) -> Any:
    """Returns the three maps, with gates that are not finite on routes that are not computed."""

    def call(tokens: jax.Array, of_rows: jax.Array, gates: jax.Array) -> Any:
        routing = jax.tree.map(jnp.asarray, ROUTING)
        added, pull = jax.vjp(lambda of_rows, gates: rows.added(of_rows, gates, routing, movement), of_rows, gates)
        of_added, of_gates = pull(tokens)
        is_row = (jnp.arange(4) != 2)[:, None]
        zeroed = (jnp.where(is_row, x, 0) for x in (rows.copied(tokens, routing, movement), of_added))
        return added, of_gates, *zeroed

    return call


# With the last two, the parts of a row in which a kernel computes have features in common.
@pytest.mark.parametrize(
    ("devices", "features", "dtype"),
    [(1, 256, jnp.bfloat16), (2, 256, jnp.bfloat16), (1, 160, jnp.float32), (1, 416, jnp.float32)],
)
def test_where_xla_splits_the_program(devices: int, features: int, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under jit without `shard_map` XLA runs in place of kernels of one device, if there are several."""
    ran = []
    monkeypatch.setattr(rows, "_on_one_device", lambda *args, f=rows._on_one_device: ran.append(args[0]) or f(*args))
    movement = rows.Movement(None, dispatch.target())
    chance = np.random.default_rng(0)
    tokens, of_rows = (chance.integers(-3, 4, (n, features)).astype(dtype) for n in (3, 4))
    of_rows[2], gates = np.nan, np.float32([[2, np.nan], [3, -1], [np.inf, -np.inf]])
    mesh = make_mesh(x=devices)
    given = jax.device_put((tokens, of_rows, gates), NamedSharding(mesh, P(None, "x")))
    given = (*given[:2], jax.device_put(gates, NamedSharding(mesh, P())))
    with overlap.emulation.emulate() as run:
        added, of_gates, copied, of_added = jax.jit(of_all_maps(movement))(*given)
    assert run.counts["launches"] == (4 if devices == 1 else 0) and set(ran) == {0, 1, 2}
    wide, of_rows, row_of = tokens.astype(np.float32), of_rows.astype(np.float32), POSITIONS
    np.testing.assert_array_equal(added, [2 * of_rows[3], 3 * of_rows[1] - of_rows[0], 0 * of_rows[0]])
    np.testing.assert_array_equal(copied, [wide[1], wide[1], 0 * wide[0], wide[0]])
    np.testing.assert_array_equal(of_added, [-wide[1], 3 * wide[1], 0 * wide[0], 2 * wide[0]])
    products = [[wide[t] @ of_rows[row] if row < 4 else 0 for row in row_of[t]] for t in range(3)]
    np.testing.assert_array_equal(of_gates, products)


def add_with(positions: Any, count: int, movement: rows.Movement) -> Any:
    """Returns `rows.added` for `count` rows at these positions."""
    none = jnp.zeros(count, jnp.int32)
    routing = Routing(none, none, jnp.asarray(positions, jnp.int32), jnp.array([count]), jnp.int32(0))
    return lambda of_rows, gates: rows.added(of_rows, gates, routing, movement)


@pytest.mark.parametrize("target", [None, dispatch.target()], ids=["xla", "fused"])
def test_rows_are_added_in_float32_in_the_order_of_the_slots(target: Any) -> None:
    add = add_with([[1, 2, 0]], 3, rows.Movement(None, target, True))
    # By slot: 2^24 + 1 rounds to 2^24. In the order of rows, or of slots from the last one on, the sum is 1. In
    # bfloat16 256 + 1 is 256.
    for dtype, of_rows, total in ((jnp.float32, [-(2**24), 2**24, 1], 0), (jnp.bfloat16, [1, 256, 1], 258)):
        given = np.repeat(np.float32(of_rows)[:, None], 128, 1).astype(dtype)
        with overlap.emulation.emulate():
            found = jax.jit(add)(given, np.ones((1, 3), np.float32))
        assert found.dtype == dtype and (np.asarray(found, np.float32) == total).all()


def test_gates_are_not_rounded() -> None:
    """In bfloat16 3 times 1 + 2^-8, which bfloat16 does not have, is 3.015625. The axis has one device."""
    movement = rows.Movement("x", dispatch.target(), True)

    def both(x: jax.Array) -> Any:
        add = lambda x: add_with([[0]], 1, movement)(x, jnp.float32([[1 + 2**-8]]))  # noqa: E731
        return add(x), jax.vjp(add, x)[1](x)[0]

    with overlap.emulation.emulate() as run:
        mapped = jax.shard_map(both, mesh=make_mesh(x=1), in_specs=P("x"), out_specs=P("x"), check_vma=False)
        out, of_rows = jax.jit(mapped)(jnp.full((1, 128), 3, jnp.bfloat16))
    assert (out == 3.015625).all() and (of_rows == 3.015625).all() and run.counts["launches"] == 2


def test_equal_layers_share_their_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    names, launch = [], row_kernels.launch
    monkeypatch.setattr(row_kernels, "launch", lambda plan, name, *args, **options: (
        names.append(name), launch(plan, name, *args, **options))[1])  # fmt: skip
    _, _, ids = one_device(5, 2, 3, 128, jnp.bfloat16)

    def layers(x: jax.Array, gates: jax.Array, ids: jax.Array) -> jax.Array:
        movement = rows.Movement(None, dispatch.target(), True)
        for _ in range(3):
            routing = overlap.route(ids, 3, None)
            x = rows.added(rows.copied(x, routing, movement), gates, routing, movement)
        return x.astype(jnp.float32).sum()

    of = jax.ShapeDtypeStruct((5, 128), jnp.bfloat16), jax.ShapeDtypeStruct(ids.shape, jnp.float32), ids
    jax.jit(jax.grad(layers, (0, 1))).trace(*of)
    # With gates and without.
    assert sorted(name.removeprefix("overlap_") for name in names) == [
        "added_rows", "added_rows", "copied_rows", "copied_rows", "products_of_rows"]  # fmt: skip


def test_kernels_that_copy_take_turns_and_sums_begin_with_those_of_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Own tokens need no transfer: they are copied while those of the peers arrive. Peers wait for their sums."""
    launched: dict[str, chunks_of_rows.Refs] = {}

    def watched(plan: Any, name: str, body: Any, *args: Any, **options: Any) -> Any:
        return launch(plan, name, lambda refs: (launched.update({name: refs}), body(refs))[1], *args, **options)

    launch = row_kernels.launch
    monkeypatch.setattr(row_kernels, "launch", watched)
    movement, mesh = rows.Movement("x", dispatch.target(), True), make_mesh(x=2)

    def both(tokens: jax.Array, gates: jax.Array, ids: jax.Array) -> jax.Array:
        routing = overlap.route(ids, 4, "x")
        return rows.added(rows.copied(tokens, routing, movement), gates, routing, movement)

    mapped = jax.shard_map(both, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    given = jnp.ones((32, 128), jnp.bfloat16), jnp.ones((32, 2)), jnp.zeros((32, 2), jnp.int32)
    with overlap.emulation.emulate(cores=1):
        jax.jit(jax.grad(lambda *x: mapped(*x).astype(jnp.float32).sum(), (0, 1))).lower(*given)
    first = {}
    for name, refs in launched.items():
        group: Any = types.SimpleNamespace(size=2, peer=lambda distance: distance)
        refs = dataclasses.replace(refs, plan=dataclasses.replace(refs.plan, group=group))
        order = [int(refs.at(number, 0).distance) for number in range(2 * refs.plan.chunks)]
        assert sorted(order) == [0] * refs.plan.chunks + [1] * refs.plan.chunks
        first[name] = order[:2]
    assert first == {"overlap_copied_rows": [0, 1], "overlap_products_of_rows": [0, 1], "overlap_added_rows": [1, 1]}


@pytest.mark.parametrize(("chunks", "devices", "ctas"), [(5, 2, 2), (7, 3, 3), (4, 2, 9), (6, 4, 1), (1, 2, 4)])
def test_own_chunks_come_after_those_of_the_peers(chunks: int, devices: int, ctas: int) -> None:
    index, distance = chunks_of_rows._own_later(np.arange(chunks * devices), chunks, devices, ctas)
    order = list(zip(np.asarray(index).tolist(), np.asarray(distance).tolist(), strict=True))
    assert sorted(order) == [(chunk, distance) for chunk in range(chunks) for distance in range(devices)]
    place = {item: number for number, item in enumerate(order)}
    waits = [place[chunk, 0] - place[chunk, peer] for chunk in range(chunks) for peer in range(1, devices)]
    # At least as many chunks are between them as CTAs may be at work on.
    assert min(waits) >= min(ctas, (devices - 1) * chunks) - devices + 2


def test_tokens_and_rows_of_two_dtypes_are_multiplied_by_xla() -> None:
    tokens, of_rows = jnp.full((3, 128), 2, jnp.bfloat16), jnp.full((4, 128), 1 + 2**-12, jnp.float32)
    movement, routing = rows.Movement(None, dispatch.target(), True), jax.tree.map(jnp.asarray, ROUTING)
    found = rows._derivative(rows.GATES, jnp.dtype(jnp.float32), movement, (tokens, of_rows, None), routing)
    np.testing.assert_array_equal(found, 256 * (1 + 2**-12) * (POSITIONS < 4))


def test_gates_of_64_bits() -> None:
    with jax.enable_x64(True), overlap.emulation.emulate():
        routing = jax.jit(lambda: overlap.route(jnp.array([[0, 2], [2, 1], [1, -1]]), 3, None, capacity=2))()
        tokens, gates = jnp.ones((3, 128), jnp.bfloat16), jnp.arange(6.0).reshape(3, 2)

        def both(movement: rows.Movement) -> Any:
            summed = lambda gates: rows.added(rows.copied(tokens, routing, movement), gates, routing, movement)  # noqa: E731
            out, pull = jax.vjp(summed, gates)
            return out, pull(out)

        assert gates.dtype == jnp.float64
        kernel = jax.jit(both, static_argnums=0)(rows.Movement(None, dispatch.target(), True))
        jax.tree.map(np.testing.assert_array_equal, kernel, both(rows.Movement(None)))
