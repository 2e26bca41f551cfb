"""Tests what the frame does for every operation: `vmap`, rounding, types, and the problem it gives to the chooser."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import overlap
from overlap.choice import dispatch
from overlap.emulation import emulate
from overlap.kernels.target import Target
from tests import oracle
from tests.explained import answer

BF16, F16, F32, E4M3 = jnp.bfloat16, jnp.float16, jnp.float32, jnp.float8_e4m3fn
SMALL = overlap.Config(tile_m=64, tile_n=128, stages=2)
M, K, N = 24, 64, 128


def normal(seed, *shape, dtype=F32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def struct(*shape):
    return jax.ShapeDtypeStruct(shape, BF16)


@functools.cache
def mesh(devices=2):
    return oracle.make_mesh(x=devices)


# --- vmap -------------------------------------------------------------------------------------------------------------

MAPPED = [  # The arrays that `vmap` maps, and shapes beside [M, K] and [K, N].
    ("addend", {"addend": (3, M, N)}),
    ("lhs_scale", {"lhs_scale": (3, M, 1)}),
    ("rhs_scale", {"rhs_scale": (3, N)}),
    ("bias", {"bias": (3, N)}),
    ("lhs", {"lhs": (3, M, K), "rhs": (2, K, N)}),
    ("lhs", {"lhs": (3, 2, M, K), "lhs_scale": (2, M, 1)}),
    ("lhs_scale", {"lhs": (2, M, K), "lhs_scale": (3, 2, M, 1), "addend": (2, M, N)}),
]


@pytest.mark.parametrize(("over", "shapes"), MAPPED, ids=str)
def test_vmap_over_anything_is_what_xla_has(over, shapes):
    shapes = {"lhs": (M, K), "rhs": (K, N)} | shapes
    dtypes = {"lhs": BF16, "rhs": BF16, "addend": BF16}
    given = {name: normal(i, *shape, dtype=dtypes.get(name, F32)) for i, (name, shape) in enumerate(shapes.items())}

    def mapped(implementation, config=None):
        call = lambda given: overlap.matmul(**given, implementation=implementation, config=config)  # noqa: E731
        return np.asarray(jax.vmap(call, ({name: 0 if name == over else None for name in given},))(given), np.float32)

    with emulate(cores=2):
        np.testing.assert_allclose(mapped("fused", SMALL), mapped("xla"), rtol=2e-2, atol=2e-2)


# --- What is rounded, and when ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["fused", "xla", "vmap"])
def test_products_are_not_rounded_before_their_epilogue(how):
    """If the product were rounded to float16 before the epilogue, it would be infinite."""
    lhs, rhs, bias = jnp.full((64, 128), 100, F16), jnp.full((128, 128), 100, F16), jnp.full(128, 128.0)
    product = functools.partial(overlap.matmul, lhs, rhs, rhs_scale=1e-4)
    with emulate(cores=2):
        if how == "vmap":
            out = jax.vmap(lambda bias: product(bias=bias, implementation="fused", config=SMALL))(bias[None])
        else:
            out = product(bias=bias, implementation=how, config=None if how == "xla" else SMALL)
    np.testing.assert_allclose(np.asarray(out, np.float32), 256, rtol=2e-3)


@pytest.mark.parametrize("implementation", ["fused", "xla"])
def test_a_bias_keeps_its_bits(implementation):
    lhs, rhs = jnp.ones((64, 64), BF16), jnp.full((64, 128), -4, BF16)
    with emulate(cores=2):
        out = overlap.matmul(lhs, rhs, bias=jnp.full(128, 256.5), implementation=implementation)
    assert float(out[0, 0]) == 0.5


@pytest.mark.parametrize("op", ["all_gather_lhs_matmul", "matmul"])
def test_cotangents_of_8_bits_are_summed_over_devices_in_more(op):
    """The two devices' cotangents nearly cancel, so summing them in 8 bits would lose the result."""
    lhs, rhs = normal(0, 32, 128, dtype=E4M3), normal(1, 128, 128, dtype=E4M3)
    g = normal(2, 32, 128)
    factor = jnp.asarray([1.0, -33 / 32])
    keywords = dict(transpose_rhs=True, implementation="fused", config=SMALL)

    def loss(lhs, rhs, factor):
        axis = () if op == "matmul" else ("x",)
        out = getattr(overlap, op)(lhs, rhs, *axis, **keywords).astype(F32)
        return (out * g[: out.shape[0]] * factor[0]).sum()

    which, specs = (0, (P("x"), P(), P("x"))) if op != "matmul" else (1, (P(), P(), P("x")))
    with emulate(cores=2):
        d = jax.shard_map(jax.grad(loss, which), mesh=mesh(), in_specs=specs, out_specs=specs[which])(lhs, rhs, factor)
    a, b, c = (np.asarray(x).astype(np.float64) for x in (lhs, rhs, g))
    exact = (c @ b if which == 0 else c.T @ a) * (1 - 33 / 32)
    assert np.linalg.norm(np.asarray(d, np.float64) - exact) < 0.15 * np.linalg.norm(exact)


def test_the_cotangents_of_what_all_batch_elements_share():
    """For every keyword with a leading dimension, cotangents are summed over the elements, equally in both modes."""
    given = {
        "lhs": normal(0, 3, M, K, dtype=BF16), "rhs": normal(1, K, N, dtype=BF16),
        "addend": normal(2, M, N, dtype=BF16), "bias": normal(3, N), "lhs_scale": normal(4, M, 1),
        "rhs_scale": normal(5, N),
    }  # fmt: skip
    weights = normal(6, 3, M, N)

    def loss(given, **how):
        return (overlap.matmul(**given, preferred_element_type=F32, **how) * weights).sum()

    wide = {name: x.astype(F32) for name, x in given.items()}
    exact = jax.grad(lambda g: (((g["lhs"] @ g["rhs"]) * g["lhs_scale"] * g["rhs_scale"] + g["bias"] + g["addend"])
                                * weights).sum())(wide)  # fmt: skip
    with emulate(cores=2):
        found = jax.grad(functools.partial(loss, implementation="fused", config=SMALL))(given)
    for name, d in found.items():
        error = np.linalg.norm(np.asarray(d, np.float64) - np.asarray(exact[name], np.float64))
        assert error < 8e-3 * np.linalg.norm(exact[name]), name


# --- Types ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dimension", [None, 0, 1])
def test_operands_that_are_the_same_everywhere(dimension):
    """The kernel reads peers' operands, so they are typed as varying. Results and gradients must equal XLA's."""
    lhs, rhs = normal(0, 16, 64 if dimension != 0 else 128, dtype=BF16), normal(1, 64, 128, dtype=BF16)

    def call(lhs, rhs, implementation):
        keywords = {"implementation": implementation, "config": SMALL if implementation == "fused" else None}
        if dimension is None:
            return overlap.all_gather_lhs_matmul(lhs, rhs, "x", **keywords)
        return overlap.all_gather_rhs_matmul(lhs, rhs, "x", dimension=dimension, **keywords)

    def both(implementation):
        def value_and_grads(lhs, rhs):
            out, pull_back = jax.vjp(functools.partial(call, implementation=implementation), lhs, rhs)
            return out, pull_back(out)

        mapped = jax.shard_map(value_and_grads, mesh=mesh(), in_specs=P(), out_specs=(P("x"), P()))
        return jax.tree.map(lambda x: np.asarray(x, np.float32), mapped(lhs, rhs))

    with emulate(cores=2):
        fused = both("fused")
    for a, b in zip(jax.tree.leaves(fused), jax.tree.leaves(both("xla")), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-2, atol=2e-2 * np.abs(b).max())


# --- What the chooser is told -----------------------------------------------------------------------------------------


@pytest.fixture
def h200(monkeypatch):
    monkeypatch.setattr(dispatch, "target", lambda mesh=None: Target("gpu", "NVIDIA H200", 132))


@pytest.mark.parametrize("m", [16, 256, 2048])
def test_several_right_sides_are_chosen_for_as_one_of_their_total_width(m, h200):
    def config(rhs):
        given = overlap.all_gather_lhs_matmul, struct(m, 4096), rhs, "x"
        return answer(*given, mesh=mesh(), implementation="fused").config

    assert config([struct(4096, 128), struct(4096, 3968)]) == config(struct(4096, 4096))


def test_leading_dimensions_are_chosen_for_as_more_rows(h200):
    def config(lhs):
        given = overlap.all_gather_rhs_matmul, lhs, struct(4096, 2048), "x"
        return answer(*given, dimension=1, mesh=mesh(), implementation="fused").config

    assert config(struct(16, 128, 4096)) == config(struct(2048, 4096)) != config(struct(128, 4096))


def test_both_ways_to_split_k_at_once(h200):
    with pytest.raises(ValueError, match="`split_k` must be 1 with stream_k=2"):
        answer(overlap.matmul, struct(256, 4096), struct(4096, 4096),
                        config=overlap.Config(split_k=2, stream_k=2))  # fmt: skip


def test_the_usual_configuration():
    """The configuration that measurements found best when nothing is known; tables and tests rely on it."""
    assert dataclasses.asdict(overlap.Config()) == {
        "tile_m": 128, "tile_n": 256, "stages": 4, "schedule": "cooperative", "swap_operands": False,
        "order_minor": "m", "order_width": 8, "stream_k": 1, "split_k": 1, "cluster": 1, "cluster_along": "m",
        "joined": False, "one_shot": False,
        "chunk_bytes": 8192, "chunk_buffers": 2,
    }  # fmt: skip
