"""Activations of several right operands, which make one result of them: emulated and differentiated."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import overlap
from overlap import layers
from overlap.choice.problem import Problem
from overlap.choice.space import heuristic
from overlap.emulation import emulate
from tests import oracle
from tests.ops.explained import answer
from tests.ops.product_cases import B200, H200, in_f32, normal

Config, F8 = overlap.Config, jnp.float8_e4m3fn


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up


def operands(m: int, n: int, k: int, right: bool = False, batch: tuple[int, ...] = (), dtype: Any = jnp.bfloat16):
    """Draws x, (gate, up), and for both a bias and a scale of columns."""
    shape = (n, k) if right else (k, n)
    sides = tuple(normal(seed, *shape, dtype=dtype) for seed in (1, 2))
    vectors = [tuple(normal(seed + i, n, dtype=jnp.float32) for i in (0, 1)) for seed in (3, 5)]
    return normal(0, *batch, m, k, dtype=dtype), sides, *vectors


def written_out(x, sides, biases, scales, right=False, dtype=jnp.float32):
    """Returns what separate products give, with results in `dtype`, and the activation in f32."""
    x, sides = x.astype(jnp.float32), [side.astype(jnp.float32) for side in sides]
    products = [x @ (side.T if right else side) for side in sides]
    values = [z.astype(dtype) * scale + bias for z, bias, scale in zip(products, biases, scales, strict=True)]
    return swiglu(*(z.astype(dtype).astype(jnp.float32) for z in values)).astype(dtype)


def distance(actual, expected):
    actual, expected = in_f32(actual), in_f32(expected)
    assert actual.shape == expected.shape and np.isfinite(actual).all()
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


def assert_near(given, *results, right=False):
    """Asserts an error of at most twice that of separate products in bf16, and that the check tells gate from up."""

    @jax.jit
    def of(x, *pairs):
        kinds = (pairs, jnp.float32), (pairs, jnp.bfloat16), ([pair[::-1] for pair in pairs], jnp.float32)
        return [written_out(x, *pairs, right=right, dtype=dtype) for pairs, dtype in kinds]

    exact, unfused, swapped = of(*given)
    for actual in results:
        assert distance(actual, exact) <= oracle.ALLOWED * distance(unfused, exact)
        assert distance(actual, swapped) > 0.1


FORMS = [  # shape, config, further arguments
    ((200, 264, 136), Config(tile_n=256, stages=2), {}),
    ((130, 136, 72), Config(tile_m=64, tile_n=128, stages=3, schedule="pingpong"), {"right": True}),
    ((200, 264, 72), Config(tile_m=72, tile_n=256, stages=2, swap_operands=True), {}),
    ((136, 200, 144), Config(tile_n=128, stages=2), {"right": True, "dtype": F8, "batch": (2,)}),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "config", "more"), FORMS, ids=str)
def test_matmul(shape, config, more):
    given, right = operands(*shape, **more), more.get("right", False)
    x, sides, biases, scales = given
    wide = {"preferred_element_type": jnp.float32} if "dtype" in more else {}
    keywords: dict[str, Any] = dict(activation=swiglu, bias=biases, rhs_scale=scales, transpose_rhs=right, **wide)
    with emulate(cores=4) as run:
        actual = overlap.matmul(x, sides, config=config, implementation="fused", **keywords)
        run.check()
    assert actual.shape == (*x.shape[:-1], shape[1])
    assert_near(given, actual, overlap.matmul(x, sides, implementation="xla", **keywords), right=right)


# --- Gathered rows, and gradients -------------------------------------------------------------------------------------

SMALL, XLA = Config(tile_n=128, stages=2), {"implementation": "xla"}
GATHERS = [  # devices, config, further arguments
    (2, Config(tile_n=256, stages=2), {"transpose_rhs": True, "return_gathered": True}),
    pytest.param(2, SMALL, {"transport": "ring"}, marks=pytest.mark.slow),
    pytest.param(2, Config(tile_m=64, tile_n=256, stages=2, joined=True), {}, marks=pytest.mark.slow),
    (2, None, XLA),
]


@functools.cache
def gathered_operands() -> tuple[Any, ...]:
    x, sides, biases, scales = operands(144, 288, 72)
    return x, sides, biases, tuple(jnp.abs(scale) + 0.5 for scale in scales)


def loss_of(out: jax.Array, first: Any = 0) -> jax.Array:
    """Returns a sum in which each column of the result has a weight of its own; `first`: the first column's index."""
    return jnp.sum(out.astype(jnp.float32) * jnp.cos(first + jnp.arange(out.shape[1], dtype=jnp.float32)))


@functools.cache
def gradients(dtype: Any) -> list[jax.Array]:
    """Returns the gradients of `loss_of` the written-out computation, with separate products in `dtype`."""
    found = jax.jit(jax.grad(lambda given: loss_of(written_out(*given, dtype=dtype))))(gathered_operands())
    return [x.astype(jnp.float32) for x in jax.tree.leaves(found)]


@pytest.mark.parametrize(("devices", "config", "more"), GATHERS, ids=str)
def test_gathered_with_gradients(devices, config, more):
    mesh, given, right = oracle.make_mesh(x=devices), gathered_operands(), more.get("transpose_rhs", False)
    lhs, side, vector = P("x", None), P("x", None) if right else P(None, "x"), P("x")
    specs = (lhs, (side,) * 2, (vector,) * 2, (vector,) * 2)
    keywords = {"activation": swiglu, "config": config, "implementation": "fused", **more}

    def call(x, sides, biases, scales):
        out = overlap.all_gather_lhs_matmul(x, sides, "x", bias=biases, rhs_scale=scales, **keywords)
        return out[0] if "return_gathered" in more else out

    def of_shards(*given):
        # The gradient's forward pass runs other kernels than a call that is not differentiated.
        loss = lambda *given: loss_of(out := call(*given), lax.axis_index("x") * out.shape[1])  # noqa: E731
        return jax.grad(loss, argnums=(0, 1, 2, 3))(*given), call(*given)

    turned = (given[0], tuple(side.T for side in given[1]), *given[2:]) if right else given
    with emulate(cores=3, completion="random") as run:
        found, out = oracle.on_mesh(mesh, of_shards, specs, (specs, P(None, "x")))(*turned)
        run.check()
    assert_near(given, out)
    found = (found[0], tuple(side.T for side in found[1]), *found[2:]) if right else found
    for ours, exact, unfused in zip(
        jax.tree.leaves(found), gradients(jnp.float32), gradients(jnp.bfloat16), strict=True
    ):
        assert distance(ours, exact) <= oracle.ALLOWED * distance(unfused, exact)


def test_one_argument_and_a_missing_bias_in_a_gather():
    (x, sides, (bias, _), _), mesh = operands(144, 144, 72), oracle.make_mesh(x=2)
    body = functools.partial(overlap.all_gather_lhs_matmul, axis_name="x", activation=jax.nn.gelu)
    specs = (P("x", None), [P(None, "x")] * 2, P("x"))

    def of_shards(x, sides, bias, implementation="fused"):
        call = lambda x: body(x, sides, bias=[bias, None], implementation=implementation)  # noqa: E731
        outs, pull = jax.vjp(call, x)
        return outs, pull([1 + y for y in outs])[0]

    fused = oracle.on_mesh(mesh, of_shards, specs, ([P(None, "x")] * 2, P("x", None)))
    by_xla = oracle.on_mesh(
        mesh, functools.partial(of_shards, implementation="xla"), specs, ([P(None, "x")] * 2, P("x"))
    )
    with emulate(cores=3):
        ours = fused(x, list(sides), bias)
    for a, b in zip(*map(jax.tree.leaves, (ours, by_xla(x, list(sides), bias))), strict=True):
        assert distance(a, b.astype(jnp.float32)) < 6e-3


def test_second_derivatives_a_captured_scalar_and_vmap():
    x, sides, *_ = operands(64, 64, 64)
    x, sides, factor = x * 0.3, tuple(side * 0.3 for side in sides), jnp.float32(1.5)

    def ours(x, sides, factor):
        activation = lambda gate, up: swiglu(gate, factor * up)  # noqa: E731
        return overlap.matmul(x, sides, activation=activation, implementation="fused").astype(jnp.float32)

    def plain(x, sides, factor):
        gate, up = (x.astype(jnp.float32) @ side.astype(jnp.float32) for side in sides)
        return swiglu(gate, factor * up)

    def all_of(f):
        slope = lambda *given: jnp.sum(jax.grad(lambda x: jnp.sum(jnp.sin(f(x, *given[1:]))))(given[0]) ** 2)  # noqa: E731
        mapped = jax.vmap(f, (0, None, None))(jnp.stack([x, -x]), sides, factor)
        return mapped, *jax.tree.leaves(jax.grad(slope, argnums=(1, 2))(x, sides, factor))

    with emulate(cores=2):
        found = jax.jit(lambda: all_of(ours))()
    for a, b, limit in zip(found, jax.jit(lambda: all_of(plain))(), (6e-3, *[3e-2] * 3), strict=True):
        assert distance(a, b) < limit


# --- Layers, the choice, errors ---------------------------------------------------------------------------------------


def test_a_layer_is_two_kernels_without_an_activation_by_xla():
    mesh = jax.make_mesh((2,), ("tensor",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        options: Any = dict(axis="tensor", rngs=nnx.Rngs(0), dtype=jnp.bfloat16, implementation="fused")
        x = jax.device_put(normal(0, 2, 32, 64), NamedSharding(mesh, P(None, "tensor", None)))
        text = str(jax.make_jaxpr(layers.GatedMLP(64, 128, **options))(x))
    assert text.count("overlap_operation[") == 2 and "overlap_entries" not in text


@pytest.mark.parametrize("op", ["matmul", "all_gather_lhs_matmul"])
def test_the_chosen_configuration_has_both_columns_in_each_warpgroup(op):
    for m, n in ((8192, 28672), (16, 28672), (512, 512)):
        problem = Problem(op, m, n, 4096, "bfloat16", "bfloat16", devices=1 if op == "matmul" else 4, sides=2)
        chosen = heuristic(problem, H200)
        assert chosen is not None and chosen.stream_k == chosen.split_k == chosen.ctas_per_tile == 1
        assert problem.accepts(chosen, H200) and heuristic(problem, B200) is None


X, W, V = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((128, 64), (64, 128), (64, 136)))
FUSED = {"implementation": "fused"}
WRONG = [  # rhs, keywords, error, what the message must contain
    ((W, V), {}, ValueError, ["`activation` takes 2 arrays", "128 and 136"]),
    ((W, W, W), {}, ValueError, ["must be one array", "as many arrays"]),
    (W, {}, ValueError, ["`activation`", "as many as `rhs` has right operands", "which takes 2"]),
    (W, {"activation": None, "bias": [np.ones(128)]}, ValueError, ["`bias` must be one array, got 1 in a list"]),
    ((W, W), FUSED | {"activation": jnp.matmul}, NotImplementedError, ["`activation`", "fails on trial"]),
    ((W, W), {"activation": None}, ValueError, ["must be one array", "tuple of 2"]),
    ((W, W), {"config": Config(tile_n=64)}, ValueError, ["warpgroup tiles of a multiple of 128 columns", "tile_n=256"]),
    ((W, W), {"config": Config(split_k=2)}, ValueError, ["split_k", "2 arrays"]),
    ((W, W), FUSED | {"addend": [np.ones((128, 128)), None]}, NotImplementedError, ["`addend`", "2 arrays", "xla"]),
]  # fmt: skip


@pytest.mark.parametrize(("rhs", "keywords", "error", "fragments"), WRONG)
def test_wrong_calls(rhs, keywords, error, fragments):
    with pytest.raises(error) as caught:
        answer(overlap.matmul, X, rhs, **{"activation": swiglu, **keywords})
    for fragment in fragments:
        assert fragment in str(caught.value)
