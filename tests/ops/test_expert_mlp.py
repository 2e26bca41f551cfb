"""The MLP of experts as one function: its own backward pass against formulas in float64, and when it has none."""

from __future__ import annotations

import collections
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import overlap
from overlap.collectives.rows.mlp import expert_mlp
from overlap.emulation import emulate
from overlap.frame.activation import traced
from tests.ops.test_grouped_matmul import equations_in
from tests.oracle import make_mesh

pytestmark = pytest.mark.one_jax
TOKENS, FEATURES, WIDTH, EXPERTS, SLOTS = 20, 128, 192, 4, 2


def gated(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up


def drawn(devices: int, with_bias: bool = True) -> dict[str, Any]:
    chance = np.random.default_rng()  # Fresh in each run.
    count = devices * TOKENS
    bf16 = lambda *shape, size=1.0: jnp.asarray(size * chance.standard_normal(shape), jnp.bfloat16)  # noqa: E731
    ids = np.stack([chance.permutation(EXPERTS)[:SLOTS] for _ in range(count)]).astype(np.int32)
    ids[0] = -1  # Padding.
    ids[1:12] = [1, 3]
    given = {
        "tokens": bf16(count, FEATURES), "gates": jnp.asarray(chance.random((count, SLOTS)), jnp.float32),
        "gate": bf16(EXPERTS, FEATURES, WIDTH, size=0.2), "up": bf16(EXPERTS, FEATURES, WIDTH, size=0.2),
        "down": bf16(EXPERTS, WIDTH, FEATURES, size=0.2), "ids": jnp.asarray(ids), "d": bf16(count, FEATURES),
    }  # fmt: skip
    if with_bias:
        given |= {f"{name}.bias": bf16(EXPERTS, FEATURES if name == "down" else WIDTH, size=0.3)
                  for name in ("gate", "up", "down")}  # fmt: skip
    return given


def formulas(given: dict[str, Any]) -> dict[str, np.ndarray]:
    """The result and all gradients in float64, one route after the other."""
    of = {name: np.asarray(x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x) for name, x in given.items()}
    of = {name: x.astype(np.float64) if x.dtype != np.int32 else x for name, x in of.items()}
    found = {name: np.zeros_like(of[name]) for name in of if name not in ("ids", "d")} | {"out": np.zeros_like(of["d"])}
    bias = lambda name, e: of[f"{name}.bias"][e] if f"{name}.bias" in of else 0  # noqa: E731
    for t, slots in enumerate(of["ids"]):
        for j, e in enumerate(slots):
            if e < 0:
                continue
            x, d, w = of["tokens"][t], of["d"][t], of["gates"][t, j]
            gate, up = (x @ of[name][e] + bias(name, e) for name in ("gate", "up"))
            sigmoid = 1 / (1 + np.exp(-gate))
            h = gate * sigmoid * up
            y = h @ of["down"][e] + bias("down", e)
            d_h = w * (of["down"][e] @ d)
            d_gate, d_up = d_h * up * sigmoid * (1 + gate * (1 - sigmoid)), d_h * gate * sigmoid
            found["out"][t] += w * y
            found["gates"][t, j] += d @ y
            found["tokens"][t] += of["gate"][e] @ d_gate + of["up"][e] @ d_up
            for name, left, right in (("gate", x, d_gate), ("up", x, d_up), ("down", h, w * d)):
                found[name][e] += np.outer(left, right)
                if f"{name}.bias" in found:
                    found[f"{name}.bias"][e] += right
    return found


def program(devices: int, implementation: Any, activation: Any = gated, **limits: int) -> Any:
    """From the arrays of `drawn` to the result and the gradients of all of them."""
    axis = None if devices == 1 else "x"

    def layer(given: dict[str, jax.Array], ids: jax.Array) -> jax.Array:
        routing = overlap.route(ids, EXPERTS, axis, gates=given["gates"], **limits)
        weights = {name: x for name, x in given.items() if name not in ("tokens", "gates")}
        return expert_mlp(given["tokens"], weights, routing, axis, activation=activation, implementation=implementation)

    def run(given: dict[str, jax.Array]) -> dict[str, jax.Array]:
        ids, d, given = given["ids"], given["d"], {k: x for k, x in given.items() if k not in ("ids", "d")}
        out, pull = jax.vjp(lambda given: layer(given, ids), given)
        return {"out": out, **pull(d)[0]}

    if devices == 1:
        return jax.jit(run)
    return jax.jit(jax.shard_map(run, mesh=make_mesh(x=devices), in_specs=P("x"), out_specs=P("x")))


def distances(found: dict[str, Any], expected: dict[str, np.ndarray]) -> dict[str, float]:
    assert found.keys() == expected.keys()
    parts = {name: np.asarray(x.astype(jnp.float32), np.float64) for name, x in found.items()}
    assert all(np.isfinite(x).all() for x in parts.values())  # `max` does not see NaN.
    return {name: np.linalg.norm(x - expected[name]) / np.linalg.norm(expected[name]) for name, x in parts.items()}


# From 3 devices on, tokens arrive while their rows are multiplied.
CASES = [(1, True), (2, False), (4, True), pytest.param(1, False, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("devices", "with_bias"), CASES)
def test_results_and_gradients(devices: int, with_bias: bool) -> None:
    """By its kernels, at most twice as far from the formulas as by XLA, and the same bits in several launches."""
    given = drawn(devices, with_bias)
    expected = formulas(given)
    with emulate(cores=2, detect_races=False):
        run = program(devices, "fused")
        found = run(given)
        again = run(given)
    for name, x in found.items():
        assert (np.asarray(x) == np.asarray(again[name])).all(), name
    of_kernels, of_xla = (distances(x, expected) for x in (found, program(devices, "xla")(given)))
    for name, distance in of_kernels.items():
        assert distance <= 2 * max(of_xla[name], 2e-3), (name, distance, of_xla[name])


def test_the_kernels_run() -> None:
    """Rows are copied and added twice, and the gradient of the gates has no product of tokens and rows."""
    explained = overlap.explain(program(1, "fused"), drawn(1, with_bias=False))
    assert {x.implementation for x in explained} == {"fused"}
    backward = [x for x in explained if x.plan == "backward pass"]
    through = [x for x in backward if x.shapes == "to 40x192 through the activation bfloat16"]
    names = [x.op for x in backward if x.op != "grouped_matmul"]
    assert len(through) == 1 and sorted(names) == ["rows added to tokens", "tokens copied to rows"]
    # Each product of the forward pass is named once, though it is traced for forward mode as well.
    assert [(x.op, x.shapes) for x in explained if x.plan != "backward pass"] == [
        ("all_gather_lhs_grouped_matmul", "40 rows of 128 bfloat16"),
        ("grouped_matmul", "4 groups, 40x192+192x128 bfloat16"),
        ("grouped_matmul", "4 groups, 40x128x192 bfloat16"),
        ("grouped_matmul_reduce_scatter", "40 rows of 128 bfloat16"),
    ]


def test_names_for_policies_of_checkpoints() -> None:
    """Those of a gated layer: gate and up, and what the activation makes of them."""
    jaxpr = str(jax.make_jaxpr(program(1, "fused"))(drawn(1)))
    names = collections.Counter(re.findall(r"\bname=(\w+)", jaxpr))
    assert names["before_activation"] == 2 and names["hidden"] == 1


@pytest.mark.parametrize("implementation", ["fused", None])
def test_forward_mode(implementation: Any) -> None:
    """Along its gradient, divided by the square of its norm, each operand changes <out, d> by 1.

    On a CPU no kernel runs by default, and the rule differentiates the operations.
    """
    given = drawn(1)
    expected = formulas(given)
    moved = [name for name in given if name not in ("ids", "d")]
    squares = {name: (expected[name] ** 2).sum() for name in moved}
    directions = {name: jnp.asarray(expected[name] / squares[name], given[name].dtype) for name in moved}

    def out(arrays: dict[str, jax.Array]) -> jax.Array:
        routing = overlap.route(given["ids"], EXPERTS, None, gates=arrays["gates"])
        weights = {name: x for name, x in arrays.items() if name not in ("tokens", "gates")}
        how: Any = {"activation": gated, "implementation": implementation}
        return expert_mlp(arrays["tokens"], weights, routing, None, **how)

    with emulate(cores=2, detect_races=False):
        _, tangent = jax.jit(lambda given, by: jax.jvp(out, (given,), (by,)))({n: given[n] for n in moved}, directions)
    wide = [np.asarray(x.astype(jnp.float32), np.float64) for x in (given["d"], tangent)]
    assert abs((wide[0] * wide[1]).sum() - len(moved)) < 0.2


@pytest.mark.parametrize("limits", [{"capacity": 6}, {"rows": 25}], ids=str)
def test_dropped_routes_have_no_gradient(limits: dict[str, int]) -> None:
    given = drawn(1, with_bias=False)
    routing = overlap.route(given["ids"], EXPERTS, None, **limits)
    kept = np.asarray(routing.positions) < routing.tokens.shape[0]
    assert routing.dropped > 0 and kept.any()
    expected = formulas(given | {"ids": jnp.where(kept, given["ids"], -1)})
    with emulate(cores=2, detect_races=False):
        found = program(1, "fused", **limits)(given)
    assert not np.asarray(found["gates"])[~kept].any()
    assert max(distances(found, expected).values()) < 0.02


@pytest.mark.slow
@pytest.mark.parametrize("with_bias", [False, True])
def test_second_derivatives_of_a_checkpoint_in_a_scan(with_bias: bool) -> None:
    """By the kernels and the operations behind them, as XLA has them."""
    given = drawn(1, with_bias)
    directions = {name: x for name, x in drawn(1, with_bias).items() if name not in ("ids", "d")}

    def of(implementation: str) -> Any:
        def loss(moved: dict[str, jax.Array]) -> jax.Array:
            weights = {name: x for name, x in moved.items() if name not in ("tokens", "gates")}

            def layer(x: jax.Array, _: None) -> tuple[jax.Array, None]:
                routing = overlap.route(given["ids"], EXPERTS, None, gates=moved["gates"])
                how = {"activation": gated, "implementation": implementation}
                return expert_mlp(x, weights, routing, None, **how), None

            out, _ = jax.lax.scan(jax.checkpoint(layer), moved["tokens"], None, length=2)
            return (out.astype(jnp.float32) ** 2).mean()

        point = {name: given[name] for name in directions}
        # The matrix of second derivatives, times the directions, by forward mode of a gradient or by a gradient of it.
        if with_bias:
            return jax.jit(lambda: jax.vjp(jax.grad(loss), point)[1](directions)[0])()
        return jax.jit(lambda: jax.jvp(jax.grad(loss), (point,), (directions,))[1])()

    with emulate(cores=2, detect_races=False):
        found = of("fused")
    expected = {name: np.asarray(x.astype(jnp.float32), np.float64) for name, x in of("xla").items()}
    assert max(distances(found, expected).values()) < 0.05


def test_vmap_of_gradients() -> None:
    """Each element has the bits that it has by itself."""
    both = [drawn(1, with_bias=False) for _ in range(2)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *both)
    with emulate(cores=2, detect_races=False):
        run = program(1, "fused")
        found = jax.vmap(run)(stacked)
        alone = [run(given) for given in both]
    for name, x in found.items():
        assert all((np.asarray(x[i]) == np.asarray(one[name])).all() for i, one in enumerate(alone)), name


def test_what_its_kernels_do_not_take() -> None:
    """Scalars of the activation have gradients; f32 operands, and rows that are no multiple of a box, go by XLA."""
    given = drawn(1, with_bias=False)

    def of_scale(scale: jax.Array, activation: Any) -> jax.Array:
        return program(1, None, activation=activation(scale))(given)["out"].astype(jnp.float32).sum()

    scaled = lambda scale: lambda gate, up: jax.nn.silu(gate) * up * scale  # noqa: E731
    slope = jax.grad(of_scale)(jnp.float32(1.0), scaled)
    np.testing.assert_allclose(slope, formulas(given)["out"].sum(), rtol=0.05, atol=2)
    softmax = program(1, None, activation=lambda gate, up: jax.nn.softmax(gate) * up)(given)
    assert np.isfinite(np.asarray(softmax["out"].astype(jnp.float32))).all()
    wide = {name: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for name, x in given.items()}
    assert max(distances(program(1, None)(wide), formulas(wide)).values()) < 1e-5
    narrow = {name: x[..., :40] if name in ("gate", "up") else x for name, x in given.items()}
    narrow["down"] = given["down"][:, :40]
    with emulate(cores=2, detect_races=False):
        assert max(distances(program(1, "fused")(narrow), formulas(narrow)).values()) < 0.02


def test_a_derivative_that_kernels_lack() -> None:
    """That of a quotient has a negative power."""
    given = drawn(1, with_bias=False)
    quotient = lambda gate, up: gate / (1 + up * up)  # noqa: E731
    with emulate(cores=2, detect_races=False):
        found = program(1, "fused", quotient)(given)
    wide = {name: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for name, x in given.items()}
    expected = {name: np.asarray(x, np.float64) for name, x in program(1, "xla", quotient)(wide).items()}
    assert max(distances(found, expected).values()) < 0.02


def test_where_jax_looks_for_nan_both_operations_run() -> None:
    """What the kernels with several results leave in rows that are not in use may be NaN."""
    with jax.debug_nans(True):
        explained = overlap.explain(program(1, "fused"), drawn(1))
    assert explained and not any("through the activation" in x.shapes for x in explained)


ARRIVE = "tokens arrive while their rows are multiplied"


WHY_NOT = {
    (4, 64): "", (4, 63): "an expert has 31.5 rows of each device, fewer than 32",
    (2, 64): "2 devices share the experts, fewer than 3",
}  # fmt: skip


@pytest.mark.parametrize(("devices", "tokens"), WHY_NOT)
def test_where_tokens_arrive_while_their_rows_are_multiplied(devices: int, tokens: int) -> None:
    """On 3 devices or more, with 32 rows of each expert and device. No kernel copies tokens then. `explain` says so."""
    why_not = WHY_NOT[devices, tokens]
    of = jax.ShapeDtypeStruct
    given = {name: of(x.shape, x.dtype) for name, x in drawn(devices, with_bias=False).items()}
    for name in ("tokens", "gates", "ids", "d"):
        given[name] = of((devices * tokens, *given[name].shape[1:]), given[name].dtype)
    plan = f"tokens are copied before, since {why_not}" if why_not else ARRIVE
    explained = overlap.explain(program(devices, "fused"), given)
    assert [x.plan for x in explained if x.plan not in ("", "backward pass")] == [plan]
    assert ("tokens copied to rows" in [x.op for x in explained]) == bool(why_not)
    # In the backward pass, of the rows that are added and of the product through the activation.
    assert [ARRIVE in x.why for x in explained if x.plan == "backward pass"].count(True) == (0 if why_not else 2)

    def alone(given: dict[str, Any]) -> jax.Array:
        return layer_of(given, "fused")

    mapped = jax.shard_map(alone, mesh=make_mesh(x=devices), in_specs=P("x"), out_specs=P("x"))
    explained = overlap.explain(mapped, given)
    assert [x.plan for x in explained if x.plan] == [plan]
    assert [x.op for x in explained][-1] == "grouped_matmul_reduce_scatter"


def routings(devices: int, tokens: int) -> dict[str, np.ndarray]:
    """Extreme choices of 2 of 4 experts, on up to 4 devices."""
    chance, shape = np.random.default_rng(), (devices * tokens, SLOTS)
    ids = {"one device": np.broadcast_to([0, -1], shape), "nobody": np.full(shape, -1), "twice": np.full(shape, 3)}
    ids["late devices' tokens alone"] = np.where(np.arange(len(ids["nobody"]))[:, None] < tokens, -1, [2, 1])
    ids["any"] = chance.integers(-1, EXPERTS, shape)
    return {name: x.astype(np.int32) for name, x in ids.items()}


@pytest.mark.parametrize(
    "limits", [{"rows": 70}, *(pytest.param(x, marks=pytest.mark.slow) for x in ({}, {"capacity": 50}))], ids=str
)
def test_extreme_routings_where_tokens_arrive(limits: dict[str, int]) -> None:
    """As by XLA, for which a test above has formulas. Some devices have no row at all."""
    devices = 4
    tokens = 64
    given = drawn(devices, with_bias=False)
    for name in ("tokens", "gates", "d"):
        given[name] = jnp.resize(given[name], (devices * tokens, *given[name].shape[1:]))
    by_xla, fused = (program(devices, how, **limits) for how in ("xla", "fused"))
    for ids in routings(devices, tokens).values():
        given["ids"] = jnp.asarray(ids)
        expected = {name: np.asarray(x.astype(jnp.float32), np.float64) for name, x in by_xla(given).items()}
        with emulate(cores=2, detect_races=False):
            found = fused(given)
        for name, exact in expected.items():
            off = np.asarray(found[name].astype(jnp.float32), np.float64) - exact
            assert np.isfinite(off).all() and np.linalg.norm(off) <= 0.02 * np.linalg.norm(exact) + 1e-6, name


@pytest.mark.parametrize(("devices", "with_bias"), [(4, True), pytest.param(4, False, marks=pytest.mark.slow)])
def test_a_layer_without_derivatives_where_tokens_arrive(devices: int, with_bias: bool) -> None:
    """Its first product has a kernel of its own, with one result beside the rows."""
    given = with_tokens(drawn(devices, with_bias), devices, 96)

    def run(implementation: str) -> Any:
        of = functools.partial(layer_of, implementation=implementation)
        return jax.jit(jax.shard_map(of, mesh=make_mesh(x=devices), in_specs=P("x"), out_specs=P("x")))

    assert [x.plan for x in overlap.explain(run("fused"), given) if ARRIVE in x.plan] == [ARRIVE]
    with emulate(cores=2, detect_races=False):
        found = run("fused")(given)
    exact = {"out": formulas(given)["out"]}
    off, allowed = (distances({"out": x}, exact)["out"] for x in (found, run("xla")(given)))
    assert off <= 2 * max(allowed, 2e-3), (off, allowed)


def with_tokens(given: dict[str, Any], devices: int, tokens: int) -> dict[str, Any]:
    """The operands, with so many tokens of each device."""
    of_tokens = {name: given[name] for name in ("tokens", "gates", "ids", "d")}
    return given | {name: jnp.resize(x, (devices * tokens, *x.shape[1:])) for name, x in of_tokens.items()}


def layer_of(given: dict[str, jax.Array], implementation: str) -> jax.Array:
    routing = overlap.route(given["ids"], EXPERTS, "x", gates=given["gates"])
    weights = {name: x for name, x in given.items() if name not in ("tokens", "gates", "ids", "d")}
    return expert_mlp(given["tokens"], weights, routing, "x", activation=gated, implementation=implementation)


def test_a_checkpoint_that_keeps_gate_and_up_copies_tokens_alone() -> None:
    """Not the product with them. A policy that keeps nothing runs the whole kernel again."""
    devices = 4
    given = with_tokens(drawn(devices, with_bias=False), devices, 64)
    policies = jax.checkpoint_policies

    def gradient(policy: Any) -> Any:
        layer = jax.checkpoint(functools.partial(layer_of, implementation="fused"), policy=policy)

        def of(given: dict[str, jax.Array]) -> jax.Array:
            return jax.grad(lambda up: layer(given | {"up": up}).astype(jnp.float32).sum())(given["up"])

        return jax.jit(jax.shard_map(of, mesh=make_mesh(x=devices), in_specs=P("x"), out_specs=P("x")))

    def results(policy: Any) -> list[int]:
        """How many results each function has that has a rule of its own."""
        found = equations_in(jax.make_jaxpr(gradient(policy))(given).jaxpr)
        return sorted(len(x.outvars) for x in found if x.primitive.name == "overlap_function")

    every = policies.everything_saveable
    kept = policies.save_only_these_names("routing", "before_activation")
    # The first product has four results, rows the last of them.
    assert results(every) == [1, 1, 4, 5]
    assert results(kept) == [1, 1, 1, 4, 5]
    assert results(policies.nothing_saveable) == [1, 1, 4, 4, 5]
    with emulate(cores=2, detect_races=False):
        np.testing.assert_array_equal(*(np.asarray(gradient(policy)(given)) for policy in (every, kept)))


ACTIVATIONS = {
    "silu": jax.nn.silu, "gelu by tanh": jax.nn.gelu, "gelu by erf": functools.partial(jax.nn.gelu, approximate=False),
    "mish": jax.nn.mish, "relu squared": lambda x: jax.nn.relu(x) ** 2,
    "quick gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
}  # fmt: skip


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_whose_derivatives_kernels_have(name: str) -> None:
    """Without them tokens would not arrive, and both operations would run. Against jax's derivative, in float32."""
    function = lambda gate, up: ACTIVATIONS[name](gate) * up  # noqa: E731
    made, captured = traced(function, arrays=2)
    assert not captured
    d, gate, up, weight = np.random.default_rng().standard_normal((4, 64, 128)).astype(np.float32)
    d_gate, d_up, weighted, product = made.of_cotangent().all_results([d, gate, up, weight])
    h, pull = jax.vjp(function, gate, up)
    expected = *pull(weight * d), weight * h, d * h
    for found, right in zip((d_gate, d_up, weighted, product), expected, strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-5, atol=2e-6)
