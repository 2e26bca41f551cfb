"""Activations of several right operands, which make one result of them: emulated and differentiated."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import overlap
from overlap import layers
from overlap.choice.problem import Problem
from overlap.choice.space import heuristic
from overlap.emulation import emulate
from overlap.kernels.target import emulating
from tests import oracle
from tests.ops.contract import E4M3, F32, Call, assert_close, running
from tests.ops.derivative_cases import TRANSFORMED, given, loss, of_both, squares
from tests.ops.explained import answer
from tests.ops.product_cases import B200, H200, normal

Config = overlap.Config
slow = pytest.mark.slow


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up


def combined(op: str, m: int, n: int, k: int, config: Config | None, **fields: Any) -> Call:
    more = dict(extras=("rhs_scale", "bias"), activation=swiglu, container=tuple)
    return Call(op, m, 0, k, widths=(n, n), config=config, **more | fields)


MATMUL, GATHER = "matmul", "all_gather_lhs_matmul"
PRODUCTS = [
    combined(MATMUL, 200, 264, 136, Config(tile_n=256, stages=2)),
    combined(MATMUL, 130, 136, 72, Config(tile_m=64, tile_n=128, stages=3, schedule="pingpong"), layout="nt"),
    combined(MATMUL, 200, 264, 72, Config(tile_m=72, tile_n=256, stages=2, swap_operands=True)),
    combined(MATMUL, 136, 200, 144, Config(tile_n=128, stages=2), layout="nt", dtype=E4M3, out=F32, lead=(2,)),
]


@pytest.mark.parametrize(
    ("implementation", "call"), [*(("fused", call) for call in PRODUCTS), ("xla", PRODUCTS[-1])], ids=str
)
def test_matmul(implementation, call):
    arrays = given(call, 1, 1.0)
    assert_close(*of_both(call, arrays, lambda f, x: f(x), devices=1, implementation=implementation), 6e-3)


@pytest.mark.parametrize(("layout", "dtype", "cluster"), [("nn", jnp.bfloat16, 2), ("nt", E4M3, 2), ("nt", E4M3, 1)])
def test_on_blackwell(layout, dtype, cluster):
    config = Config(tile_n=256, stages=2, cluster=cluster)
    call = combined(MATMUL, 300, 272, 144, config, layout=layout, dtype=dtype, out=F32)
    with emulating("blackwell"):
        assert_close(*of_both(call, given(call, 1, 1.0), lambda f, x: f(x), devices=1), 6e-3)
        if dtype == E4M3:
            call = call.but(layout="nn")
            with pytest.raises(NotImplementedError, match="8-bit operands with an `activation` of 2 arrays only"):
                of_both(call, given(call, 1, 1.0), lambda f, x: f(x), devices=1)


GATHERS = [  # Whether XLA runs, call
    ("fused", combined(GATHER, 72, 144, 72, Config(tile_n=256, stages=2), layout="nt",
                       keywords=(("return_gathered", True),))),
    ("xla", combined(GATHER, 72, 144, 72, None)),
    pytest.param("fused", combined(GATHER, 72, 144, 72, Config(tile_n=128, stages=2),
                                   keywords=(("transport", "ring"),)), marks=slow),
    pytest.param("fused", combined(GATHER, 72, 144, 72, Config(tile_m=64, tile_n=256, stages=2, joined=True)),
                 marks=slow),
]  # fmt: skip


@pytest.mark.parametrize(("implementation", "call"), GATHERS, ids=str)
def test_gathered_with_gradients(implementation, call):
    """The gradient's forward pass runs other kernels than a call that is not differentiated."""
    both = lambda f, x: (f(x), jax.grad(loss(f))(x))  # noqa: E731
    assert_close(*of_both(call, given(call), both, implementation=implementation), 1e-2)


@pytest.mark.one_jax
def test_one_argument_and_a_missing_bias_in_a_gather():
    mesh, specs = oracle.make_mesh(x=2), (P("x", None), [P(None, "x")] * 2, P("x"))
    x, sides, bias = normal(0, 144, 72), [normal(seed, 72, 144) for seed in (1, 2)], normal(3, 144, dtype=F32)

    def of_shards(x, sides, bias, implementation):
        body = functools.partial(overlap.all_gather_lhs_matmul, axis_name="x", activation=jax.nn.gelu)
        call = lambda x: body(x, sides, bias=[bias, None], implementation=implementation)  # noqa: E731
        outs, pull = jax.vjp(call, x)
        return outs, pull([1 + y for y in outs])[0]

    results = []
    for how in ("fused", "xla"):
        mapped = oracle.on_mesh(
            mesh, functools.partial(of_shards, implementation=how), specs, ([P(None, "x")] * 2, P("x"))
        )
        with emulate(cores=3):
            results.append(mapped(x, sides, bias))
    assert_close(*results, 6e-3)


def test_second_derivatives_and_the_gradient_of_a_captured_scalar():
    call = combined(MATMUL, 64, 64, 64, Config(tile_n=128, stages=2), dtype=jnp.float16)
    arrays, results = given(call, 1), []
    assert_close(*of_both(call, arrays, TRANSFORMED["jvp of grad"], devices=1))
    for body in ("__call__", "plain"):

        def of_factor(factor, body=body):
            scaled = call.but(activation=lambda gate, up: swiglu(gate, factor * up))
            return squares(getattr(scaled, body)(arrays))

        with running():
            results.append(jax.jit(jax.vmap(jax.value_and_grad(of_factor)))(jnp.asarray([0.5, 1.5], F32)))
    assert_close(*results)


# --- Layers, the choice, errors ---------------------------------------------------------------------------------------


@pytest.mark.one_jax
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
        for gpu in (H200, B200):
            chosen = heuristic(problem, gpu)
            assert chosen is not None and chosen.stream_k == chosen.split_k == chosen.ctas_per_tile == 1
            assert problem.accepts(chosen, gpu)


X, W, V = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((128, 64), (64, 128), (64, 136)))
FUSED = {"implementation": "fused"}
WRONG = [  # rhs, keywords, error, what the message must contain
    ((W, V), {}, ValueError, ["`activation` takes 2 arrays", "128 and 136"]),
    ((W, W, W), {}, ValueError, ["must be one array", "as many arrays"]),
    (W, {}, ValueError, ["`activation`", "as many as there are right operands", "which takes 2"]),
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
