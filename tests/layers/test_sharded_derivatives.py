"""Plain products of global arrays: derivatives in both modes and of second order, narrow dtypes, abstract meshes."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import overlap
from tests.layers.sharded_cases import (
    AUTO,
    COLUMNS,
    MESHES,
    B,
    K,
    M,
    N,
    assert_near,
    assert_same,
    collectives,
    put,
    whole,
)

SPECS = {  # For each operation: the partitions of lhs, rhs and the result.
    "columns": COLUMNS,
    "rows": (P("x", None, "y"), P("y"), P("x", "y")),
    "sums for all": (P("x", None, "y"), P("y"), P("x")),
    "weights": (P("x"), P("x"), P("x")),
    "weights before": (P("x", "y"), P("x", "y"), P("x", None, "y")),
    "own parts": (P("x"), P(None, "y"), P("x", None, "y")),
}


def on(name, mesh=AUTO, **more):
    """The product of an operation. Operands are not on the mesh yet."""
    lhs, rhs, out = SPECS[name]
    of_lhs_and_rhs = {} if AxisType.Auto not in mesh.axis_types else {"lhs_sharding": lhs, "rhs_sharding": rhs}
    return functools.partial(overlap.sharded_matmul, mesh=mesh, out_sharding=out, **of_lhs_and_rhs, **more)


def flat(x):
    return x.reshape(-1, x.shape[-1])


@pytest.mark.parametrize("mesh", ["auto", "explicit", pytest.param("mixed", marks=pytest.mark.slow)])
def test_forward_mode_and_second_derivatives(mesh):
    """Of one operation each with gathers that are kept, repeated, or left to XLA; two sides share their `lhs`."""
    mesh = MESHES[mesh]
    x, w, v, bias, addend = (whole(i, *s) for i, s in enumerate(((B, M, K), (K, N), (K, N), (N,), (M, N))))
    moves = tuple(whole(5 + i, *a.shape) for i, a in enumerate((x, w, bias, addend)))

    def results(name, keep):
        product = on(name, mesh, keep_gathered=keep)

        def total(x, w, bias, addend):
            first, second = product(x, [w, put(mesh, v, SPECS[name][1])], bias=[bias, None], addend=[addend, None])
            return (first**3 + first * second).sum(), (first, second)

        placed = (
            put(mesh, x, SPECS[name][0]),
            put(mesh, w, SPECS[name][1]),
            put(mesh, bias, P()),
            put(mesh, addend, P()),
        )
        of_first = lambda *given: total(*given)[1]  # noqa: E731
        out, tangents = jax.jvp(of_first, placed, moves)
        linear = jax.linearize(of_first, *placed)[1](*moves)
        along = lambda x, w: jax.jvp(lambda x: total(x, w, *placed[2:])[0], (x,), moves[:1])[1]  # noqa: E731
        of_gradient = lambda x, w: (jax.grad(lambda x: total(x, w, *placed[2:])[0])(x) * moves[0]).sum()  # noqa: E731
        # Reverse over forward, and reverse over reverse.
        return out, tangents, linear, jax.grad(along, (0, 1))(*placed[:2]), jax.grad(of_gradient, (0, 1))(*placed[:2])

    z, second = x @ w + bias + addend, x @ v
    u, d_w, d_bias, d_addend = moves
    tangents = u @ w + x @ d_w + d_bias + d_addend, u @ v
    # With t = u @ w and s = u @ v, the derivative along u is sum((3 z² + second) t + z s).
    t, s = (given.astype(np.float64) for given in (u @ w, u @ v))
    z, second = z.astype(np.float64), second.astype(np.float64)
    of_z, of_t = 6 * z * t + s, 3 * z**2 + second
    of_x = of_z @ w.T + t @ v.T
    of_w = flat(x).T @ flat(of_z) + flat(u).T @ flat(of_t)
    with jax.set_mesh(mesh):
        given = dict(zip(SPECS, (True, False, None, False, True, None), strict=True))
        found = jax.jit(lambda: {name: results(name, keep) for name, keep in given.items()})()
    for out, *of_moves, by_forward, by_reverse in found.values():
        assert_same(out, (z, second))
        assert_same(of_moves, [tangents, tangents])
        for gradients in (by_forward, by_reverse):
            assert_near(gradients, (of_x, of_w), 1e-6)


def test_weights_or_activations_that_are_not_trained():
    """Each gradient alone, outside of jit, with a scan whose blocks are computed again."""
    x, w, d = whole(1, B, M, K), whole(2, K, K), whole(3, B, M, K)
    product = on("weights")

    def total(x, w):
        block = jax.checkpoint(lambda x, w: (product(x, w), None), policy=jax.checkpoint_policies.nothing_saveable)
        return (lax.scan(block, x, jnp.stack([w, w]))[0] * d).sum()

    assert_same(jax.grad(total)(x, w), d @ w.T @ w.T)
    assert_same(jax.grad(total, 1)(x, w), flat(x).T @ flat(d @ w.T) + flat(x @ w).T @ flat(d))


@pytest.mark.parametrize("mesh", ["auto", pytest.param("explicit", marks=pytest.mark.slow)])
def test_narrow_operands(mesh):
    """Float8 products, and bfloat16 products in float32: cotangents are summed in float32, and rounded once."""
    mesh, found, expected = MESHES[mesh], [], []
    for name in ("columns", "rows"):
        for dtype in (jnp.float8_e4m3fn, jnp.bfloat16):
            x, w, d = whole(1, B, M, K, dtype=dtype), whole(2, K, N, dtype=dtype), whole(3, B, M, N)
            product = on(name, mesh, preferred_element_type=jnp.float32, transpose_rhs=True)
            if AxisType.Auto in mesh.axis_types:
                product.keywords["rhs_sharding"] = P(*(*SPECS[name][1], None)[1::-1])
            placed = put(mesh, x, SPECS[name][0]), put(mesh, w.T, P(*(*SPECS[name][1], None)[1::-1]))

            def both(x, w, d, product=product):
                out, back = jax.vjp(product, x, w)
                return out, back(d)

            out, gradients = jax.jit(both)(*placed, put(mesh, d, SPECS[name][2]))
            assert out.dtype == jnp.float32 and {y.dtype for y in gradients} == {jnp.dtype(dtype)}
            wide = x.astype(np.float32), w.astype(np.float32)
            found.append((out, gradients))
            expected.append(
                (wide[0] @ wide[1], ((d @ wide[1].T).astype(dtype), (flat(wide[0]).T @ flat(d)).T.astype(dtype)))
            )
    assert_same(found, expected)


def test_float16_is_summed_over_devices_in_float32():
    """60000 + 60000 − 60000 − 60000 is 0 on four devices. In float16 the first sum would be infinite."""
    terms = np.repeat(np.array([60000, 60000, -60000, -60000], np.float16), 2)
    ones = np.ones((4, 8, 8), np.float16)
    columns = np.broadcast_to(terms[:, None], (8, 8))
    for name, keep in (("rows", None), ("sums for all", None)):
        assert_same(jax.jit(on(name, keep_gathered=keep))(ones, columns), np.zeros((4, 8, 8)))
    back = jax.jit(lambda x, w, d, f: jax.vjp(f, x, w)[1](d), static_argnums=3)
    # The cotangent of a gathered `lhs` is a sum over its devices' columns.
    of_lhs, _ = back(ones, columns.T, ones, on("columns"))
    assert_same(of_lhs, np.zeros((4, 8, 8)))
    # That of weights is a sum over the devices that hold the rows: here those along "y".
    rows = functools.partial(
        overlap.sharded_matmul, mesh=AUTO, lhs_sharding=P(None, "y"), rhs_sharding=P(), out_sharding=P(None, "y")
    )
    _, of_rhs = back(ones[:1], ones[0], np.broadcast_to(terms[:, None], (1, 8, 8)), rows)
    assert_same(of_rhs, np.zeros((8, 8)))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_abstract_meshes(kind):
    """Programs are lowered without devices. The mesh comes from types, from the context, or is given."""
    mesh = AbstractMesh((2, 4), ("x", "y"), axis_types=(kind,) * 2)
    operands = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=jax.NamedSharding(mesh, spec))
        for shape, spec in (((B, M, K), COLUMNS[0]), ((K, N), COLUMNS[1]))
    ]
    texts = []
    for given in (None, mesh):
        named = dict(lhs_sharding=COLUMNS[0], rhs_sharding=COLUMNS[1]) if kind == AxisType.Auto else {}
        product = functools.partial(overlap.sharded_matmul, out_sharding=COLUMNS[2], mesh=given, **named)
        loss = jax.jit(jax.grad(lambda x, w, product=product: (product(x, w) ** 2).sum(), (0, 1)))
        texts.append(loss.trace(*operands).lower(lowering_platforms=("cuda",)).as_text())
        with jax.sharding.use_abstract_mesh(mesh):
            texts.append(loss.trace(*operands).lower(lowering_platforms=("cuda",)).as_text())
    for text in texts:
        assert text.count("stablehlo.dot_general") == 3 and "manual_computation" not in text
        # The result, and both gradients, lie as they should.
        constraints = re.findall(r"sdy.sharding_constraint %\S+ <@\w+, (\[.*?\])>", text)
        assert {'[{"x"}, {}, {"y"}]', '[{"x"}, {"y"}, {}]', '[{}, {"y"}]'} <= {*constraints}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_several_terms_are_rounded_once(dtype):
    """256 + 1 + 1: in bfloat16 each of two sums would be rounded to 256."""
    x = np.ones((B, M, K), jnp.bfloat16)
    w = np.full((K, N), 256 / K, jnp.bfloat16)
    bias = np.ones(N, dtype)
    addend = np.ones((M, N), dtype)
    outs = on("columns")(x, w, bias=bias, addend=addend), on("columns")(x, w, bias=2 * bias)
    assert {y.dtype for y in outs} == {jnp.dtype(jnp.bfloat16)}
    assert_same(outs, (np.full((B, M, N), 258),) * 2)


def test_an_activation_captures_a_scalar():
    x, w = whole(1, B, M, K), whole(2, K, N)
    out = jax.jit(lambda x, w, s: on("columns", activation=lambda z: z * s)(x, w))(x, w, np.float32(3))
    assert_same(out, 3 * (x @ w))


def test_no_float32_is_kept_for_an_activation():
    x, w = (whole(i, *s, dtype=jnp.bfloat16) for i, s in enumerate(((B, M, K), (K, N))))
    product = on("columns", activation=jax.nn.silu, implementation="xla")
    pull = jax.eval_shape(lambda x, w: jax.vjp(product, x, w)[1], x, w)
    assert {y.dtype for y in jax.tree.leaves(pull) if y.size >= B * M * N} == {jnp.dtype(jnp.bfloat16)}


def test_operands_sums_and_results_are_constrained():
    x, w = whole(1, B, M, K), whole(2, K, N)
    for name in SPECS:
        text = jax.jit(on(name, implementation="xla")).lower(x, w).as_text()
        assert {*re.findall(r"sdy.sharding_constraint (%arg\d)", text)} == {"%arg0", "%arg1"}
    text = jax.jit(on("columns", implementation="xla", activation=jax.nn.silu)).lower(x, w).as_text()
    assert text.count('[{"x"}, {}, {"y"}]>') == 2  # The product, and the result.
    half = x.astype(jnp.float16), w.astype(jnp.float16)
    text = jax.jit(on("rows", implementation="xla")).lower(*half).as_text()
    assert re.search(r"sharding_constraint .*tensor<8x16x24xf32>", text)  # The sum travels in float32.


@pytest.mark.parametrize(("name", "barriers"), [("weights", 1), ("weights before", 1), ("columns", 0)])
def test_only_gathers_that_are_repeated_have_barriers(name, barriers, monkeypatch):
    # Without those that keep XLA for CPUs from seeing constants.
    monkeypatch.setattr("overlap.frame.by_xla.guarded", lambda rhs, mesh=None: rhs)
    x, w = whole(1, B, M, K), whole(2, K, N)
    for keep, count in ((False, barriers), (None, 0), (True, 0)):
        product = on(name, keep_gathered=keep, implementation="xla")
        text = jax.jit(jax.grad(lambda x, w, f=product: f(x, w).sum(), (0, 1))).lower(x, w).as_text()
        assert text.count("optimization_barrier") == count, keep


@pytest.mark.parametrize(("name", "gathers"), [("columns", 1), ("weights", 1), ("weights before", 2)])
def test_what_lies_between_two_programs(name, gathers):
    """True alone keeps what was gathered, and then the backward pass gathers nothing again."""
    placed = put(AUTO, whole(1, B, M, K), SPECS[name][0]), put(AUTO, whole(2, K, N), SPECS[name][1])
    d = put(AUTO, whole(3, B, M, N), SPECS[name][2])
    found = {}
    nbytes = lambda tree: sum(y.addressable_shards[0].data.nbytes for y in jax.tree.leaves(tree))  # noqa: E731
    for keep in (False, None, True):
        product = on(name, keep_gathered=keep, implementation="xla")
        pull = jax.jit(lambda x, w, f=product: jax.vjp(f, x, w)[1])(*placed)
        backward = jax.jit(lambda pull, d: pull(d)).lower(pull, d).compile()
        found[keep] = nbytes(pull), collectives(backward)["f32", "all-gather"]
    assert found[False] == found[None] == (nbytes(placed), gathers)
    assert found[True][0] > nbytes(placed) and found[True][1] == 0
