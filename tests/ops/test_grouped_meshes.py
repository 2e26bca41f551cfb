"""`grouped_matmul` of global arrays on a mesh with Explicit axes: numbers, where results lie, and refusals."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import overlap
from tests.ops.contract import BF16, F32, GroupedCall

SIZES, M, K, N = (70, 0, 37, 1), 120, 80, 128
EITHER = pytest.mark.parametrize("implementation", ["fused", "xla"])


def put(mesh, x, *spec):
    return jax.device_put(x, jax.NamedSharding(mesh, P(*spec)))


def explicit_mesh(devices):
    return jax.make_mesh((devices,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))


@EITHER
@pytest.mark.parametrize(("devices", "around"), [(1, jax.jit), (2, jax.jit), (2, lambda f: f)], ids=["1", "2", "eager"])
def test_explicit_axes(devices, around, implementation):
    """Columns may be sharded: the result's then are, too. Numbers and gradients are those of plain JAX in float32."""
    call = GroupedCall("grouped_matmul", M, N, K, None, extras=("bias", "rhs_scale"), out=F32, groups=len(SIZES))
    drawn = call.arrays(1, 0, lambda chance, *shape: chance.integers(-1, 2, shape)) | {"sizes": np.float32(SIZES)}
    sizes, g = {"sizes": drawn.pop("sizes")}, np.random.default_rng(1).integers(-1, 2, (M, N)).astype(np.float32)
    exact, pull = jax.vjp(lambda given: call.plain(given | sizes, F32), jax.tree.map(jnp.asarray, drawn))
    (gradients,), mesh = pull(jnp.asarray(g)), explicit_mesh(devices)

    def loss(given, g):
        out = call(given | sizes, implementation)
        return (out * g).sum(), out

    lies = {"lhs": (), "rhs": (None, None, "x"), "bias": (None, "x"), "rhs_scale": ()}
    cases = ({}, "x"), ({"rhs": ()}, "x"), ({"rhs": (), "bias": ()}, None)
    for changed, of_out in cases if devices > 1 and around is jax.jit else cases[:1]:
        specs = lies | changed
        given = {name: put(mesh, x, *specs[name]) for name, x in drawn.items()}
        with jax.set_mesh(mesh):
            (_, out), found = around(jax.value_and_grad(loss, has_aux=True))(given, put(mesh, g, None, of_out))
        np.testing.assert_array_equal(out, exact)
        assert jax.typeof(out).sharding.spec == P(None, of_out)
        for name, x in found.items():
            np.testing.assert_array_equal(x.astype(F32), gradients[name].astype(F32), err_msg=name)
            assert jax.typeof(x).sharding == jax.typeof(given[name]).sharding


@EITHER
def test_several_right_operands_along_explicit_axes(implementation):
    """Also where another axis is manual; and `explain` shows a device's part."""
    mesh, ones = jax.make_mesh((2, 2), ("x", "y")), jnp.ones((4, K, N), BF16)
    lhs, rhs = put(mesh, jnp.ones((M, K), BF16), None), put(mesh, ones, None, None, "y")
    sizes, biases = put(mesh, jnp.asarray(SIZES)), [put(mesh, jnp.ones((4, N)), None, "y"), None]
    gated = functools.partial(
        overlap.grouped_matmul, bias=biases, activation=lambda gate, up: gate - 2 * up, implementation=implementation
    )
    counted = (np.arange(M) < sum(SIZES))[:, None]
    np.testing.assert_array_equal(gated(lhs, [rhs, rhs], sizes).astype(F32), counted * np.full((1, N), 1 - K))
    assert [x.shapes for x in overlap.explain(gated, lhs, [rhs, rhs], sizes)] == ["4 groups, 120x64+64x80 bfloat16"]

    layer = functools.partial(overlap.grouped_matmul, implementation=implementation)
    # Each device along "x" has rows of its own, here the same.
    both = jax.shard_map(layer, mesh=mesh, in_specs=(P("x"), P(), P()), out_specs=P("x"), axis_names={"x"})
    with jax.set_mesh(mesh):
        out, pull = jax.vjp(jax.jit(both), put(mesh, jnp.ones((2 * M, K), BF16), "x"), rhs, sizes)
        d_lhs, *_ = pull(jnp.ones_like(out))
    assert jax.typeof(out).sharding.spec == P("x", "y")
    for found, exact in ((out, np.full((1, N), K)), (d_lhs, np.full((1, K), N))):
        np.testing.assert_array_equal(found.astype(F32), np.tile(counted, (2, 1)) * exact)


LHS, RHS, FEW = jnp.ones((16, 64), BF16), jnp.ones((2, 64, 64), BF16), jnp.array([3, 5])


@pytest.mark.one_jax
def test_what_would_communicate_along_explicit_axes():
    """XLA cannot shard the product. Inside `shard_map` it runs."""
    mesh = explicit_mesh(2)
    refused = pytest.raises(NotImplementedError, match=r"inside jax\.shard_map, .* on \{'x': 2\} outside of it: wrap")
    for implementation in ("fused", "xla", None):
        call = functools.partial(overlap.grouped_matmul, implementation=implementation)
        for lhs, rhs, sizes in ((("x",), (), ()), ((None, "x"), (), ()), ((), ("x",), ()), ((), (None, "x"), ()),
                                ((), (), ("x",))):  # fmt: skip
            operands = ((LHS, lhs), (RHS, rhs), (FEW, sizes))
            with refused:
                jax.eval_shape(call, *(put(mesh, x, *spec) if spec else x for x, spec in operands))
        with refused:  # It is not known to be that of each part.
            call(put(mesh, LHS), RHS, FEW, activation=jax.nn.softmax)
        with refused:
            jax.jit(jax.vmap(call, (0, None, None)))(put(mesh, LHS[None].repeat(2, 0), "x"), RHS, FEW)
    routing = put(mesh, overlap.route(jnp.zeros((16, 1), jnp.int32), 2, None))
    with pytest.raises(NotImplementedError, match=r"^`all_gather_lhs_grouped_matmul` on a mesh with Explicit axes"):
        overlap.all_gather_lhs_grouped_matmul(LHS, RHS, routing, None)
    with jax.set_mesh(mesh):
        inside = jax.shard_map(lambda x: overlap.grouped_matmul(x, RHS, FEW), in_specs=P("x"), out_specs=P("x"))
        assert np.asarray(inside(put(mesh, LHS, "x")))[:3].tolist() == [[64] * 64] * 3


@pytest.mark.one_jax
@EITHER
def test_explicit_axes_of_one_device_cut_nothing(implementation):
    """Whatever they name. Without operands on a mesh, that of `jax.set_mesh` counts."""
    mesh, call = explicit_mesh(1), functools.partial(overlap.grouped_matmul, implementation=implementation)
    for x, w in ((("x",), ()), ((None, "x"), (None, "x")), ((), ("x",))):
        out = call(put(mesh, LHS, *x), put(mesh, RHS, *w), FEW)
        assert out[0, 0] == 64 and jax.typeof(out).sharding.spec == P("x" if x == ("x",) else None, None)
    with jax.set_mesh(mesh):
        assert call(LHS, RHS, FEW)[0, 0] == 64
