"""Derivatives in both modes, and captured scalars, with types that say along which mesh axes values vary."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import overlap
from overlap.emulation import emulate
from tests.product_cases import normal

F16, F32 = jnp.float16, jnp.float32
CONFIG = overlap.Config(tile_n=64, stages=2)
LHS, RHS = 0.25 * normal(0, 32, 64, dtype=F16), 0.25 * normal(1, 64, 32, dtype=F16)
SLOPE = jnp.asarray(0.75, F32)


def close(actual, expected, limit=1e-2):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, b = (np.asarray(x).astype(np.float64) for x in (a, b))
        assert a.shape == b.shape and np.linalg.norm(a - b) <= limit * np.linalg.norm(b)


def product(lhs, rhs, slope, **keywords):
    """Each device has its own slope. The other scalar is exact in bfloat16, and XLA adds in that dtype."""
    narrow = slope.astype(jnp.bfloat16 if keywords["implementation"] == "fused" else F32)
    slope = slope + lax.axis_index("x")
    return overlap.matmul(
        lhs, rhs, activation=lambda y: jax.nn.silu(y * slope) + jnp.where(y > 0, narrow, 2), **keywords
    )


def gather(lhs, rhs, slope, **keywords):
    rows = jnp.abs(lhs[:, :1].astype(F32)) + slope
    keywords = dict(lhs_scale=rows, rhs_scale=0.5, return_gathered=True) | keywords
    out, gathered = overlap.all_gather_lhs_matmul(lhs, rhs, "x", **keywords)
    return out + gathered.mean()


def weights(lhs, rhs, slope, **keywords):
    return overlap.all_gather_rhs_matmul((lhs * slope).astype(lhs.dtype), rhs, "x", dimension=0, **keywords)


# Name -> (the layer, the spec of its right operand, the spec of its result). The right operand is replicated along
# "data".
ROWS = P(("data", "x"))
LAYERS = {
    "matmul": (product, P(), ROWS),
    "gathered rows": (gather, P(None, "x"), P("data", "x")),
    "gathered weights": (weights, P("x"), ROWS),
}
TRANSFORMED = {
    "jvp": lambda f, x: jax.jvp(f, x, x),
    "jvp of grad": lambda f, x: jax.jvp(jax.grad(_loss(f), (0, 1, 2)), x, x),
    "grad of grad": lambda f, x: jax.grad(lambda *x: _squares(jax.grad(_loss(f), (0, 1, 2))(*x)), (0, 1, 2))(*x),
}


def _loss(f):
    return lambda *x: jnp.sin(f(*x).astype(F32)).sum()


def _squares(tree):
    return sum((x.astype(F32) ** 2).sum() for x in jax.tree.leaves(tree))


@pytest.mark.parametrize("how", TRANSFORMED)
@pytest.mark.parametrize("name", LAYERS)
def test_both_modes_and_twice(name, how):
    layer, of_rhs, out = LAYERS[name]

    def transformed(**keywords):
        mesh = jax.make_mesh((2, 2), ("data", "x"))
        run = functools.partial(layer, **keywords)
        specs = ROWS, of_rhs, P()
        operands = tuple(
            jax.device_put(x, jax.NamedSharding(mesh, spec)) for x, spec in zip((LHS, RHS, SLOPE), specs, strict=True)
        )
        mapped = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=out)
        with jax.set_mesh(mesh):
            return jax.block_until_ready(jax.jit(lambda *x: TRANSFORMED[how](mapped, x))(*operands))

    with emulate(cores=2, detect_races=False) as run:
        actual = transformed(implementation="fused", config=CONFIG)
    assert run.counts["launches"] > 0
    close(actual, transformed(implementation="xla"))


@pytest.mark.parametrize("around", [jax.jit, lambda f: f], ids=["jit", "eager"])
@pytest.mark.parametrize("dtype", [F32, jnp.int32], ids=["float", "integer"])
def test_scalars_that_an_activation_captures_on_an_explicit_mesh(around, dtype):
    mesh = jax.make_mesh((2, 2), ("data", "x"))
    lhs = jax.device_put(LHS, jax.NamedSharding(mesh, P("data")))
    rhs = jax.device_put(RHS, jax.NamedSharding(mesh, P(None, "x")))

    def results(**keywords):
        def loss(lhs, rhs, slope):
            factor = slope.astype(dtype)
            out = overlap.matmul(lhs, rhs, activation=lambda y: jax.nn.gelu(y * factor + y), **keywords)
            return _squares(out), out

        with jax.set_mesh(mesh):
            return around(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(lhs, rhs, SLOPE + 1)

    with emulate(cores=2, detect_races=False) as run:
        (_, out), gradients = results(implementation="fused", config=CONFIG)
    assert run.counts["launches"] > 0 and jax.typeof(out).sharding.spec == P("data", "x")
    exact = lambda a, b, s: _squares(jax.nn.gelu((a.astype(F32) @ b.astype(F32)) * (s.astype(dtype) + 1)))  # noqa: E731
    close(
        gradients, jax.grad(exact, (0, 1, 2))(LHS, RHS, SLOPE + 1) if dtype == F32 else results(implementation="xla")[1]
    )


@pytest.mark.parametrize("check_vma", [True, False])
def test_scalars_that_an_activation_captures_where_some_axes_are_manual(check_vma):
    """A nested `shard_map` covers the remaining axes; its gradient keeps only operands."""
    mesh = jax.make_mesh((2, 2), ("data", "x"))

    def results(**keywords):
        def layer(lhs, rhs, slope):
            count = slope.astype(jnp.int32)
            return overlap.matmul(lhs, rhs, activation=lambda y: jnp.tanh(y * slope) * count, **keywords)

        mapped = jax.shard_map(
            layer, mesh=mesh, in_specs=(P("data"), P(), P()), out_specs=P("data"), axis_names={"data"},
            check_vma=check_vma,
        )  # fmt: skip
        with jax.set_mesh(mesh):
            lhs = jax.reshard(LHS, P("data"))
            return jax.jit(jax.grad(lambda *x: _squares(mapped(*x)), (0, 1, 2)))(lhs, RHS, SLOPE + 1)

    with emulate(cores=2, detect_races=False) as run:
        actual = results(implementation="fused", config=CONFIG)
    assert run.counts["launches"] > 0
    close(actual, results(implementation="xla"))
