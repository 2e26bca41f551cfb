"""`sharded_matmul` on meshes of CPU devices: right products with the requested sharding, for all supported cases."""

import functools
import warnings

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import overlap
from overlap.choice import dispatch
from overlap.emulation import emulate
from overlap.kernels import target
from overlap.sharded import matmul as module
from overlap.sharded.plan import plan_of
from tests.explained import answer
from tests.sharded_cases import (
    AUTO,
    COLUMNS,
    EXPLICIT,
    MESHES,
    SIZES,
    B,
    K,
    M,
    N,
    assert_same,
    make_mesh,
    put,
    reference,
    whole,
)  # fmt: skip
from tests.sharded_plans import every

ROWS = P("x", None, "y"), P("y"), P("x", "y")
FSDP = P("x", "y"), P("x", "y"), P("x", None, "y")


def on(mesh, specs, out, **more):
    """Calls `sharded_matmul` as users do on this mesh, with the operands put there."""
    named = {} if AxisType.Auto not in mesh.axis_types else {"lhs_sharding": specs[0], "rhs_sharding": specs[1]}
    return functools.partial(overlap.sharded_matmul, out_sharding=out, mesh=mesh, **named, **more)


def gradients(f, weights, *operands):
    return jax.grad(lambda *operands: (f(*operands) * weights).sum(), tuple(range(len(operands))))(*operands)


# ---- All supported cases ---------------------------------------------------------------------------------------------


@functools.cache
def served():
    found = []
    for case in every(tuple(SIZES)):
        try:
            found.append((case, plan_of(*case, SIZES)))
        except ValueError:
            continue
    return found


OPERATIONS = (
    "matmul", "all_gather_lhs_matmul", "all_gather_rhs_matmul", "matmul_reduce_scatter", "matmul_all_reduce",
)  # fmt: skip


def check(case, mesh, transposed, full_addend, around):
    """Compares the result with all keywords, its sharding, and all gradients with float32 products of whole arrays."""
    if mesh is MESHES["mixed"] and any(axes == ("y", "x") for parts in case for axes in parts):
        mesh = AUTO  # If types know one of two axes, it must be the first.
    lhs_spec, rhs_spec, out_spec = (P(*(axes or None for axes in parts)) for parts in case)
    rhs_spec = P(*rhs_spec[::-1]) if transposed else rhs_spec
    rhs = whole(2, N, K) if transposed else whole(2, K, N)
    addend = whole(4, B, M, N) if full_addend else whole(4, M, N)
    operands = [put(mesh, x, s) for x, s in ((whole(1, B, M, K), lhs_spec), (rhs, rhs_spec), (whole(3, N), P()))]
    operands.append(put(mesh, addend, P()))
    f = on(mesh, (lhs_spec, rhs_spec), out_spec, transpose_rhs=transposed, activation=jax.nn.relu)

    def layer(lhs, rhs, bias, addend):
        return f(lhs, rhs, bias=bias, addend=addend)

    def plain(lhs, rhs, bias, addend):
        return reference(lhs, rhs.T if transposed else rhs, bias, addend, jax.nn.relu)

    weights = whole(5, B, M, N)
    with jax.set_mesh(mesh):
        out, found = around(lambda *given: (layer(*given), gradients(layer, weights, *given)))(*operands)
    assert out.sharding.is_equivalent_to(jax.NamedSharding(mesh, out_spec), 3)
    bare = [jnp.asarray(np.asarray(x)) for x in operands]
    assert_same(out, plain(*bare))
    assert_same(found, gradients(plain, weights, *bare))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_is_served_is_the_product(operation):
    cases = [case for case, plan in served() if plan.operation == operation]

    @hypothesis.settings(max_examples=2, deadline=None, derandomize=True, database=None, phases=["generate"])
    @hypothesis.given(
        st.sampled_from(cases), st.sampled_from(list(MESHES)), st.booleans(), st.booleans(), st.just(jax.jit)
    )
    def every_case(case, mesh, transposed, full_addend, around):
        check(case, MESHES[mesh], transposed, full_addend, around)

    every_case()


@pytest.mark.slow
@pytest.mark.parametrize("number", range(60))
def test_more_of_what_is_served(number):
    cases = served()
    case, _ = cases[number * 37 % len(cases)]
    around = (jax.jit, lambda f: f)[number % 2]
    check(case, list(MESHES.values())[number % 3], number % 4 < 2, number % 8 < 4, around)


def test_outside_of_jit():
    """NumPy arrays work too, and a second call compiles nothing."""
    lhs, rhs = whole(1, B, M, K), whole(2, K, N)
    for mesh in (AUTO, EXPLICIT):
        operands = (put(mesh, lhs, COLUMNS[0]), put(mesh, rhs, COLUMNS[1]))
        f = on(mesh, COLUMNS[:2], COLUMNS[2])
        assert_same(f(*operands), reference(lhs, rhs))
    f = on(AUTO, COLUMNS[:2], COLUMNS[2])
    assert_same(f(lhs, rhs), reference(lhs, rhs))
    compiled = module._run_eagerly._cache_size()
    assert_same(f(lhs + 1, rhs), reference(lhs + 1, rhs))
    assert module._run_eagerly._cache_size() == compiled


@pytest.mark.parametrize(("container", "keep"), [(list, False), (tuple, True)])
def test_several_right_sides_share_one_gather(container, keep):
    lhs, weights = whole(1, B, M, K), container(whole(i, K, n) for i, n in enumerate((N, 8)))
    biases, addends = [None, whole(3, 8)], [whole(4, M, N), None]
    f = on(AUTO, COLUMNS[:2], COLUMNS[2], keep_gathered=keep)
    layer = jax.jit(lambda lhs, weights: f(lhs, weights, bias=biases, addend=addends, activation=jax.nn.relu))
    outs = layer(lhs, weights)
    assert type(outs) is container
    plain = [
        reference(lhs, weights[0], addend=addends[0], activation=jax.nn.relu),
        reference(lhs, weights[1], bias=biases[1], activation=jax.nn.relu),
    ]
    assert_same(list(outs), plain)
    assert layer.lower(lhs, weights).as_text().count("stablehlo.all_gather") == 1


def test_all_arrays_are_converted_alike():
    """NumPy's float64 becomes float32 as in `jnp.asarray`, without a warning (pytest turns warnings into errors)."""
    lhs, rhs, bias, addend = (whole(i, *s, dtype=np.float64) for i, s in enumerate(((M, K), (K, N), (N,), (M, N))))
    expected = lhs @ rhs + bias + addend
    f = functools.partial(overlap.sharded_matmul, out_sharding=P(None, "y"), mesh=EXPLICIT)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = f(lhs, rhs, bias=bias, addend=addend)
        (also,) = f(lhs, [rhs], bias=[bias], addend=[addend])
    assert out.dtype == also.dtype == np.float32
    assert_same((out, also), (expected, expected))


def test_one_device_and_axes_of_one_device():
    lhs, rhs = whole(1, B, M, K), whole(2, K, N)
    for kind in (AxisType.Auto, AxisType.Explicit):
        for sizes in ({"x": 1, "y": 4}, {"x": 1, "y": 1}):
            mesh = make_mesh(kind, **sizes)
            f = jax.jit(on(mesh, FSDP[:2], FSDP[2]))
            out = f(put(mesh, lhs, FSDP[0]), put(mesh, rhs, FSDP[1]))
            assert_same(out, reference(lhs, rhs))
            if kind == AxisType.Explicit:
                assert jax.typeof(out).sharding.spec == FSDP[2]


def test_the_mesh_is_found():
    """The mesh comes from `jax.set_mesh`, from a NamedSharding, or from an operand's type."""
    lhs, rhs = whole(1, B, M, K), whole(2, K, N)
    specs = dict(zip(("lhs_sharding", "rhs_sharding", "out_sharding"), COLUMNS, strict=True))
    with jax.set_mesh(AUTO):
        outs = [jax.jit(lambda x, w: overlap.sharded_matmul(x, w, **specs))(lhs, rhs)]
    of_mesh = specs | {"out_sharding": jax.NamedSharding(AUTO, COLUMNS[2])}
    outs.append(jax.jit(lambda x, w: overlap.sharded_matmul(x, w, **of_mesh))(lhs, rhs))
    outs.append(jax.jit(lambda x, w: overlap.sharded_matmul(x, w, **specs))(put(AUTO, lhs, COLUMNS[0]), rhs))
    for out in outs:
        assert_same(out, reference(lhs, rhs))


@pytest.mark.parametrize(
    ("shape", "specs"),
    [
        ((M, K), (P("y"), P(None, "y"), P(None, "y"))),
        ((2, 4, M, K), (P(None, "y", "x"), P(None, "y"), P(None, None, "x", "y"))),  # A leading dimension gathered
        ((8, 2, M, K), (P("x", None, None, "y"), P("y"), P(("x", "y")))),  # one scattered, behind another axis
    ],
    ids=["two dimensions", "four, gathered", "four, scattered"],
)
def test_other_ranks(shape, specs):
    """An addend without leading dimensions applies to every index."""
    lhs, rhs, addend = whole(1, *shape), whole(2, K, N), whole(3, M, N)
    out = jax.jit(on(AUTO, specs[:2], specs[2]))(lhs, rhs, addend=addend)
    assert_same(out, np.matmul(lhs, rhs) + addend)


# Weights with several dimensions of k or n: the shapes of rows, k and n, the specs, and whether `rhs` is [*n, *k].
ATTENTION = {
    "query": ((B, M), (K,), (4, 6), (FSDP[0], P("x", "y", None), P("x", None, "y", None)), False),
    "one head": ((M,), (K,), (1, 8), (P("y"), P(None, None, "y"), P(None, None, "y")), False),
    "heads scattered": ((M,), (K,), (4, 6), (P(None, "y"), P("y"), P(None, "y", None)), False),
    "heads gathered": ((B, M), (K,), (2, 6), (P("x"), P(None, "x"), P("x", None, None, None)), False),
    "output": ((B, M), (4, 2), (K,), (P("x", None, "y"), P("y", None, "x"), P("x", "y", None)), False),
    "both, [n, k]": ((M,), (4, 2), (2, 3), (P(None, "y"), P("x", None, "y"), P(None, "x", None)), True),
}  # fmt: skip


@pytest.mark.parametrize("mesh", ["explicit", *(pytest.param(x, marks=pytest.mark.slow) for x in ("auto", "mixed"))])
def test_several_dimensions_of_k_or_n(mesh):
    """All cases in one program: results, cotangents and shardings."""
    mesh, operands = MESHES[mesh], {}
    for name, (m, k, n, specs, transposed) in ATTENTION.items():
        shapes = (*m, *k), (n + k if transposed else k + n), n, (m[-1], *n), (*m, *n)
        of_each = *specs[:2], P(), P(), specs[2]
        operands[name] = [
            put(mesh, whole(i, *s), spec) for i, (s, spec) in enumerate(zip(shapes, of_each, strict=True))
        ]

    def layer(name, lhs, rhs, bias, addend):
        *_, specs, transposed = ATTENTION[name]
        f = on(mesh, specs, specs[2], transpose_rhs=transposed, activation=jax.nn.relu)
        return f(lhs, rhs, bias=bias, addend=addend)

    def plain(name, lhs, rhs, bias, addend):
        _, k, n, _, transposed = ATTENTION[name]
        if transposed:
            rhs = rhs.transpose(*range(len(n), rhs.ndim), *range(len(n)))
        return jax.nn.relu(jnp.tensordot(lhs, rhs, len(k), precision="highest") + bias + addend)

    def results(f, operands):
        found = {}
        for name, (*of_product, cotangent) in operands.items():
            out, back = jax.vjp(functools.partial(f, name), *of_product)
            found[name] = out, back(cotangent)
        return found

    with jax.set_mesh(mesh):
        found = jax.jit(functools.partial(results, layer))(operands)
    for name, (out, _) in found.items():
        assert out.sharding.is_equivalent_to(operands[name][-1].sharding, out.ndim)
    assert_same(found, jax.jit(functools.partial(results, plain))(jax.tree.map(np.asarray, operands)))


def test_what_arrives_otherwise_is_moved():
    """Along Auto axes the caller says how an operand is to be sharded, however it arrives."""
    lhs, rhs = put(AUTO, whole(1, B, M, K), P(None, None, "x")), put(AUTO, whole(2, K, N), P("y"))
    out = jax.jit(on(AUTO, COLUMNS[:2], COLUMNS[2]))(lhs, rhs)
    assert_same(out, reference(np.asarray(lhs), np.asarray(rhs)))


# ---- The kernels, emulated -------------------------------------------------------------------------------------------

CONFIG = overlap.Config(tile_n=64, stages=2)
SMALL = make_mesh(AxisType.Auto, x=2, y=2)
FUSED = {
    "all_gather_lhs_matmul": FSDP,
    "matmul_reduce_scatter": ROWS,
    "matmul_all_reduce": (P("x", None, "y"), P("y"), P("x")),
    "all_gather_rhs_matmul": (P("x"), P("x"), P("x")),
    "matmul": (P("x"), P(None, "y"), P("x", None, "y")),
}


@pytest.mark.parametrize("name", FUSED)
def test_fused(name):
    """Includes keywords that the kernel itself lacks; at most twice the error of XLA's product of whole bf16 arrays."""
    lhs_spec, rhs_spec, out_spec = FUSED[name]
    chance = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(chance.standard_normal(shape), jnp.bfloat16)  # noqa: E731
    lhs, rhs, bias, addend = draw(2, 256, 128), draw(128, 128), draw(128), draw(2, 256, 128)
    f = on(SMALL, (lhs_spec, rhs_spec), out_spec, implementation="fused", config=CONFIG, activation=jax.nn.relu)
    with emulate(cores=2, detect_races=False) as run:
        out = jax.jit(f)(lhs, rhs, bias=bias, addend=addend)
    assert run.counts["launches"] == 1
    assert out.sharding.is_equivalent_to(jax.NamedSharding(SMALL, out_spec), 3)
    exact = reference(*(x.astype(jnp.float32) for x in (lhs, rhs, bias, addend)), jax.nn.relu)
    unfused = jax.nn.relu(lhs @ rhs + bias + addend)
    error, allowed = (np.linalg.norm(np.asarray(x, np.float32) - exact) for x in (out, unfused))
    assert 0 < error <= 2 * allowed
    # The negative control: without the addend, the error is far above the limit.
    assert np.linalg.norm(np.asarray(out, np.float32) - reference(lhs, rhs, bias)) > 10 * allowed


@pytest.mark.one_jax
def test_the_backward_pass_is_fused():
    """Column-parallel with weights sharded twice: a kernel computes the forward product and the cotangent of `lhs`."""
    lhs_spec, rhs_spec, out_spec = FSDP
    chance = np.random.default_rng(0)
    lhs, rhs = (jnp.asarray(chance.standard_normal(s), jnp.bfloat16) for s in ((2, 256, 128), (128, 128)))

    def results(**more):
        f = on(SMALL, (lhs_spec, rhs_spec), out_spec, **more)
        return jax.jit(jax.grad(lambda x, w: (f(x, w).astype(jnp.float32) ** 2).sum(), (0, 1)))(lhs, rhs)

    with emulate(cores=2, detect_races=False) as run:
        fused = results(implementation="fused", config=CONFIG)
    assert run.counts["launches"] >= 2
    x, w = jnp.asarray(lhs, jnp.float32), jnp.asarray(rhs, jnp.float32)
    exact = jax.grad(lambda x, w: (reference(x, w) ** 2).sum(), (0, 1))(x, w)
    for a, b, c in zip(fused, results(implementation="xla"), exact, strict=True):
        error, allowed = (np.linalg.norm(np.asarray(y, np.float32) - c) for y in (a, b))
        assert 0 < error <= 2 * allowed


# ---- explain ---------------------------------------------------------------------------------------------------------


@pytest.mark.one_jax
def test_explain(monkeypatch):
    """Called on types, for a GPU. Each device's part decides; the text says what happens along each axis."""
    monkeypatch.setattr(dispatch, "target", lambda mesh=None: target.Target("gpu", "NVIDIA H200", 132))
    mesh = make_mesh(x=2, y=4)

    def types(dtype=jnp.bfloat16):
        shapes = ((2, 8192, 8192), P("x", "y")), ((8192, 28672), P("x", "y"))
        return [jax.ShapeDtypeStruct(s, dtype, sharding=jax.NamedSharding(mesh, spec)) for s, spec in shapes]

    bias = jax.ShapeDtypeStruct((28672,), jnp.float32)
    fused, unfused = (
        answer(overlap.sharded_matmul, *types(dtype), bias=bias, out_sharding=FSDP[2])
        for dtype in (jnp.bfloat16, jnp.float32)
    )
    plan = "`rhs` is gathered along 'x', then all_gather_lhs_matmul along 'y'"
    assert fused.implementation == "fused" and fused.plan == plan and str(fused).startswith(plan)
    assert unfused.implementation == "xla" and unfused.plan == plan and "float32" in unfused.reason
    # The operation's own explanation for such parts.
    parts = jax.ShapeDtypeStruct((1, 2048, 8192), jnp.bfloat16), jax.ShapeDtypeStruct((8192, 7168), jnp.bfloat16)
    own = answer(overlap.all_gather_lhs_matmul, *parts, "y", mesh=mesh)
    assert (own.config, own.reason) == (fused.config, fused.reason)
    # Heads that are kept together are the columns of a matrix.
    lhs, rhs = types()
    heads = rhs.update(shape=(8192, 224, 128))
    split = answer(overlap.sharded_matmul, lhs, heads, out_sharding=P("x", None, "y", None))
    assert split == answer(overlap.sharded_matmul, lhs, rhs, out_sharding=FSDP[2])


def test_kernels_say_what_they_lack():
    with pytest.raises(NotImplementedError, match=r"float32.*\"xla\""):
        jax.eval_shape(on(AUTO, COLUMNS[:2], COLUMNS[2], implementation="fused"), whole(1, B, M, K), whole(2, K, N))
