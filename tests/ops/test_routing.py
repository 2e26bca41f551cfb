"""`overlap.route` against a loop over the routes: rows, capacities, gates; and how a layer uses its gates."""

from __future__ import annotations

import collections
import dataclasses
import functools
import secrets
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import overlap
from overlap.choice.dispatch import Implementation
from overlap.collectives.rows import routing
from tests.oracle import make_mesh

pytestmark = pytest.mark.one_jax


@dataclasses.dataclass(frozen=True)
class Case:
    devices: int
    tokens: int  # Of each device.
    k: int
    experts: int
    capacity: int | None = None
    rows: int | None = None

    @property
    def most(self) -> int:
        """The rows of a device, C."""
        owned, tokens = self.experts // self.devices, self.devices * self.tokens
        limits = [tokens * min(self.k, owned)]
        limits += [] if self.capacity is None else [owned * self.capacity]
        return min(limits + ([] if self.rows is None else [self.rows]))


def oracle(case: Case, ids: np.ndarray, device: int) -> dict[str, Any]:
    """One route after the other, in the order of device, token and slot."""
    owned = case.experts // case.devices
    of_expert, accepted, lost = collections.Counter[int](), [], 0
    for (token, slot), expert in np.ndenumerate(ids):
        if expert // owned != device or not 0 <= expert < case.experts:
            continue
        is_full = case.capacity is not None and of_expert[expert] >= case.capacity
        if is_full or (case.rows is not None and len(accepted) >= case.rows):
            lost += 1
            continue
        of_expert[expert] += 1
        accepted.append((expert, token, slot))
    # A token that chooses an expert twice may need more rows than there are: the last rows are missing.
    rows = sorted(accepted)[: case.most]
    positions = np.full(ids.shape, case.most)
    for row, (_, token, slot) in enumerate(rows):
        positions[token, slot] = row
    sizes = collections.Counter(expert for expert, *_ in rows)
    return {
        "positions": positions,
        "group_sizes": [sizes[device * owned + i] for i in range(owned)],
        "dropped": lost + len(accepted) - len(rows),
        "tokens": [token for _, token, _ in rows],
        "slots": [slot for *_, slot in rows],
    }


def check(case: Case, ids: np.ndarray, found: overlap.Routing, context: Any) -> None:
    for device in range(case.devices):
        expected = oracle(case, ids, device)
        for name, value in expected.items():
            got = np.asarray(getattr(found, name)[device])
            assert got.dtype == np.int32
            if name in ("tokens", "slots"):
                assert len(got) == case.most and ((got >= 0) & (got < ids.shape[name == "slots"])).all()
                got = got[: len(value)]
            np.testing.assert_array_equal(got, value, f"{name} of device {device}, {context}")


@functools.cache
def program(case: Case) -> Any:
    def lists(ids: jax.Array) -> Any:
        axis = "x" if case.devices > 1 else None
        found = overlap.route(ids, case.experts, axis, capacity=case.capacity, rows=case.rows)
        return jax.tree.map(lambda x: x[None], found)

    if case.devices == 1:
        return jax.jit(lists)
    return jax.jit(jax.shard_map(lists, mesh=make_mesh(x=case.devices), in_specs=P("x"), out_specs=P("x")))


def drawn(case: Case, seed: int) -> dict[str, np.ndarray]:
    """Ids of each kind."""
    chance, shape = np.random.default_rng(seed), (case.devices * case.tokens, case.k)
    distinct = np.argsort(chance.random((shape[0], case.experts)), axis=1)[:, : case.k]
    uneven = np.minimum(chance.geometric(0.4, shape) - 1, case.experts - 1)
    strange = np.where(chance.random(shape) < 0.6, distinct, chance.choice([-1, -(2**31), 2**31 - 1, case.experts]))
    kinds = {"distinct": distinct, "uneven, with duplicates": uneven, "strange": strange, "one": np.full(shape, 1)}
    return {name: ids.astype(np.int32) for name, ids in kinds.items()}


CASES = [
    Case(2, 40, 3, 8), Case(1, 700, 4, 6), Case(4, 33, 2, 8, capacity=5), Case(1, 1, 1, 2),
    Case(2, 40, 3, 8, rows=50), Case(4, 70, 2, 16, capacity=20, rows=64), Case(1, 300, 3, 40, rows=1),
    Case(1, 90, 2, 3, capacity=10**12, rows=10**12), Case(2, 5000, 2, 4, rows=9000),
    # No route is dropped, and the last one fills its word of 32.
    Case(4, 8, 1, 8, rows=24),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_routes(case: Case) -> None:
    seed = secrets.randbits(32)
    for kind, ids in drawn(case, seed).items():
        check(case, ids, program(case)(ids), f"{kind}, seed {seed}")


def test_larger_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many routes to many experts lie in blocks of up to four times as many words; here of 8 words."""
    monkeypatch.setattr(routing, "_BLOCK", 2)
    monkeypatch.setattr(routing, "_MOST_COUNTS", 4)
    case = Case(1, 333, 3, 8, rows=500)
    assert routing._in_words(jnp.zeros(999, jnp.int32), 8).shape == (4, 8, 32)
    for kind, ids in drawn(case, 2).items():
        check(case, ids, program(case)(ids), kind)


def test_the_oracle_sees_another_order() -> None:
    """A negative control: with the tokens in another order, other routes are dropped."""
    case = Case(2, 40, 3, 8, rows=20)
    ids = drawn(case, 1)["distinct"]
    with pytest.raises(AssertionError):
        check(case, ids, program(case)(ids[::-1]), None)


@pytest.mark.parametrize(("capacity", "rows"), [(None, None), (9, None), (None, 30), (9, 30)])
def test_a_number_of_tokens_that_is_a_symbol(capacity: int | None, rows: int | None) -> None:
    def lists(ids: jax.Array) -> overlap.Routing:
        return overlap.route(ids, 6, None, capacity=capacity, rows=rows)

    (symbol,) = jax.export.symbolic_shape("2*b + 1")
    exported = jax.export.export(jax.jit(lists))(jax.ShapeDtypeStruct((symbol, 2), jnp.int32))
    for tokens in (3, 35, 1501):
        case = Case(1, tokens, 2, 6, capacity, rows)
        for kind, ids in drawn(case, tokens).items():
            found: Any = exported.call(ids)
            expected = lists(jnp.asarray(ids))
            assert found.group_sizes.tolist() == expected.group_sizes.tolist(), kind
            assert found.dropped == expected.dropped
            used = int(found.group_sizes.sum())
            # With a limit there may be more rows than without a symbol.
            nowhere = np.where(expected.positions == len(expected.tokens), len(found.tokens), expected.positions)
            np.testing.assert_array_equal(found.positions, nowhere)
            assert found.tokens[:used].tolist() == expected.tokens[:used].tolist()


# --- Gates ------------------------------------------------------------------------------------------------------------


def layer(x: Any, gates: Any, weights: Any, ids: Any, implementation: Implementation | None, travels: bool) -> Any:
    found = overlap.route(ids, 8, "x", gates=gates if travels else None, rows=40)
    h = overlap.all_gather_lhs_grouped_matmul(x, weights[0], found, "x", activation=jnp.tanh,
                                              implementation=implementation)  # fmt: skip
    given = None if travels else gates
    return overlap.grouped_matmul_reduce_scatter(h, weights[1], given, found, "x", implementation=implementation)


def operands(tokens: int, features: int, hidden: int, dtype: Any) -> tuple[Any, ...]:
    chance = np.random.default_rng(secrets.randbits(32))
    drawn = lambda *shape: jnp.asarray(chance.standard_normal(shape, np.float32) / 4, dtype)  # noqa: E731
    ids = np.argsort(chance.random((tokens, 8)), axis=1)[:, :3].astype(np.int32)
    gates = jnp.asarray(chance.random((tokens, 3), np.float32))
    return drawn(tokens, features), gates, (drawn(8, features, hidden), drawn(8, hidden, features)), ids


def of_devices(devices: int, implementation: Implementation | None, travels: bool) -> Any:
    run = functools.partial(layer, implementation=implementation, travels=travels)
    mesh = make_mesh(x=devices)
    return jax.shard_map(run, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=implementation != "fused")


def summed(run: Any, *given: Any) -> Any:
    out = run(*given)
    return (out.astype(jnp.float32) ** 2).sum(), out


@pytest.mark.parametrize("implementation", ["xla", "fused"])
def test_gates_that_travel_with_the_ids(implementation: Implementation) -> None:
    """Same bits as gates that travel later, in results and in gradients."""
    given = operands(16, 128, 128, jnp.bfloat16)
    found = []
    for travels in (True, False):
        pull = jax.value_and_grad(functools.partial(summed, of_devices(2, implementation, travels)), (0, 1, 2), True)
        with overlap.emulation.emulate(cores=2):
            found.append(jax.tree.map(np.asarray, jax.jit(pull)(*given)))
    jax.tree.map(np.testing.assert_array_equal, *found)
    assert all(np.abs(np.asarray(x, np.float32)).sum() > 0 for x in jax.tree.leaves(found[0]))
    assert found[0][1][1].dtype == np.float32


def test_derivatives_of_gates_that_travel() -> None:
    """Forward mode, second derivatives, vmap, bfloat16 gates: as of gates that travel later."""
    x, gates, weights, ids = operands(12, 6, 5, jnp.float32)

    def derivatives(travels: bool) -> Any:
        run = lambda gates: of_devices(4, "xla", travels)(x, gates, weights, ids)  # noqa: E731
        loss = lambda gates: (run(gates) ** 2).sum()  # noqa: E731
        both = jnp.stack([gates, 2 * gates])
        return (jax.jvp(run, (gates,), (jnp.ones_like(gates),)), jax.jvp(jax.grad(loss), (gates,), (gates,)),
                jax.vmap(jax.grad(loss))(both), jax.grad(loss)(gates.astype(jnp.bfloat16)))  # fmt: skip

    found, expected = jax.jit(lambda: (derivatives(True), derivatives(False)))()
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), found, expected)
    assert found[-1].dtype == jnp.bfloat16 and np.abs(np.asarray(found[0][1])).sum() > 0
    # They travel, and add their cotangents, in 32 bits.
    routing = jax.eval_shape(lambda gates: overlap.route(ids, 8, None, gates=gates), gates.astype(jnp.bfloat16))
    assert routing.gates.dtype == jnp.float32


def gathers_of(policy: Any) -> tuple[int, int]:
    """How often the program of a layer under `jax.checkpoint`, with gradients, gathers ids, and how often gates."""
    given = operands(16, 8, 8, jnp.float32)
    run = jax.checkpoint(of_devices(2, "xla", travels=True), policy=policy)
    pull = jax.grad(lambda *given: summed(run, *given)[0], (0, 1, 2))
    lines = [line for line in str(jax.make_jaxpr(pull)(*given)).splitlines() if "= all_gather" in line]
    return sum("i32[16,3]" in line for line in lines), sum("f32[16,3]" in line for line in lines)


def test_a_checkpoint_keeps_the_routing_by_name() -> None:
    assert gathers_of(None) == (2, 2)
    assert gathers_of(jax.checkpoint_policies.save_only_these_names("routing")) == (1, 1)
    plain = jax.grad(lambda *given: summed(of_devices(2, "xla", travels=True), *given)[0], (0, 1, 2))
    gathers = [line for line in str(jax.make_jaxpr(plain)(*operands(16, 8, 8, jnp.float32))).splitlines()
               if "= all_gather" in line]  # fmt: skip
    assert sum("i32[16,3]" in line for line in gathers) == sum("f32[16,3]" in line for line in gathers) == 1


def test_refusals() -> None:
    ids, gates = np.zeros((4, 2), np.int32), np.zeros((4, 2), np.float32)
    lhs, rhs = np.zeros((8, 5), np.float32), np.zeros((3, 5, 6), np.float32)
    refused: list[tuple[Any, str]] = [
        (lambda: overlap.route(ids, 3, None, rows=0), "`rows` must be None or an integer of at least 1, got 0"),
        (lambda: overlap.route(ids, 3, None, rows=True), "`rows` must be None or an integer of at least 1, got True"),
        (lambda: overlap.route(ids, 3, None, rows=1.5), "`rows` must be None or an integer .*, got 1.5: round it up"),  # pyright: ignore[reportArgumentType]
        (lambda: overlap.route(ids, 3, None, gates=gates[:3]), r"`gates` .* of `experts`, \(4, 2\), got \(3, 2\)"),
        (lambda: overlap.route(ids, 3, None, gates=ids), "`gates` must be floating-point, got int32"),
        (lambda: overlap.route(ids, 3, None, gates=[1.0]), "`gates` must be an array of JAX or NumPy"),  # pyright: ignore[reportArgumentType]
        (lambda: overlap.grouped_matmul_reduce_scatter(lhs, rhs, None, overlap.route(ids, 3, None), None),
         "`gates` must be an array, got None, and `route` got none: pass gates to one"),
        (lambda: overlap.grouped_matmul_reduce_scatter(lhs, rhs, None, overlap.route(ids, 3, None, gates=gates), "x"),
         "must be called inside"),
    ]  # fmt: skip
    for call, message in refused:
        with pytest.raises(ValueError, match=message):
            call()
