"""`sharded_matmul` on meshes of CPU devices: right products with the requested sharding, for all supported cases."""

import functools
import random
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import overlap
from overlap.choice import dispatch
from overlap.choice.crossover import Cause, Verdict
from overlap.emulation import emulate
from overlap.kernels import target
from overlap.sharded import matmul as module
from overlap.sharded.plan import plan_of
from tests.layers.sharded_cases import (
    AUTO,
    COLUMNS,
    EXPLICIT,
    MESHES,
    SIZES,
    B,
    K,
    M,
    N,
    answer,
    assert_near,
    assert_same,
    collectives,
    make_mesh,
    put,
    relu_product,
    whole,
)
from tests.layers.sharded_plans import every

ROWS = P("x", None, "y"), P("y"), P("x", "y")
FSDP = P("x", "y"), P("x", "y"), P("x", None, "y")


def on(mesh, specs, out, **more):
    """Calls `sharded_matmul` as users do on this mesh, with the operands put there."""
    named = {} if AxisType.Auto not in mesh.axis_types else {"lhs_sharding": specs[0], "rhs_sharding": specs[1]}
    return functools.partial(overlap.sharded_matmul, out_sharding=out, mesh=mesh, **named, **more)


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


def check(mesh, cases, around=jax.jit):
    """Compares results with all keywords, their sharding, and all cotangents with products of whole arrays in NumPy.

    `cases`: pairs of partitions and a number, whose bits say whether `rhs` is [n, k], and whether the addend is whole.
    """
    layers, operands, expected = [], [], []
    cotangent = whole(5, B, M, N)
    for case, number in cases:
        lhs_spec, rhs_spec, out_spec = (P(*(axes or None for axes in parts)) for parts in case)
        transposed, addend = number % 2 == 1, whole(4, B, M, N) if number % 4 > 1 else whole(4, M, N)
        lhs, rhs, bias = whole(1, B, M, K), whole(2, K, N), whole(3, N)
        out, (of_lhs, of_rhs, *others) = relu_product(lhs, rhs, bias, addend, cotangent)
        expected.append((out, (of_lhs, of_rhs.T if transposed else of_rhs, *others)))
        rhs, rhs_spec = (rhs.T, P(*rhs_spec[::-1])) if transposed else (rhs, rhs_spec)
        placed = (lhs, lhs_spec), (rhs, rhs_spec), (bias, P()), (addend, P()), (cotangent, out_spec)
        operands.append([put(mesh, x, spec) for x, spec in placed])
        layers.append(on(mesh, (lhs_spec, rhs_spec), out_spec, transpose_rhs=transposed, activation=jax.nn.relu))

    def results(operands):
        found = []
        for f, (*given, cotangent) in zip(layers, operands, strict=True):
            out, back = jax.vjp(lambda lhs, rhs, bias, addend, f=f: f(lhs, rhs, bias=bias, addend=addend), *given)
            found.append((out, back(cotangent)))
        return found

    with jax.set_mesh(mesh):
        found = around(results)(operands)
    for (out, _), given in zip(found, operands, strict=True):
        assert out.sharding.is_equivalent_to(given[-1].sharding, 3)
    assert_same(found, expected)


def fits(case, mesh):
    """Whether a mesh can have these partitions. If types know one of two axes, it must be the first."""
    return mesh is not MESHES["mixed"] or not any(axes == ("y", "x") for parts in case for axes in parts)


@pytest.mark.parametrize("mesh", ["auto", "explicit", pytest.param("mixed", marks=pytest.mark.slow)])
def test_what_is_served_is_the_product(mesh):
    """A case of each operation in one program."""
    chance, cases, mesh = random.Random(mesh), {}, MESHES[mesh]
    for case, plan in chance.sample(served(), len(served())):
        if fits(case, mesh):
            cases.setdefault(plan.operation, (case, chance.randrange(4)))
    assert len(cases) == 5
    check(mesh, list(cases.values()))


@pytest.mark.parametrize(
    "number", [1, 5, *(pytest.param(n, marks=pytest.mark.slow) for n in range(30) if n not in (1, 5))]
)
def test_more_of_what_is_served(number):
    """Odd numbers run outside of `jax.jit`."""
    case, _ = served()[number * 73 % len(served())]
    mesh = list(MESHES.values())[number % 3]
    check(mesh if fits(case, mesh) else AUTO, [(case, number)], (jax.jit, lambda f: f)[number % 2])


def test_outside_of_jit():
    """NumPy arrays work too, a second call compiles nothing, and operands that arrive otherwise are moved."""
    lhs, rhs = whole(1, B, M, K), whole(2, K, N)
    f = on(EXPLICIT, COLUMNS[:2], COLUMNS[2])
    assert_same(f(put(EXPLICIT, lhs, COLUMNS[0]), put(EXPLICIT, rhs, COLUMNS[1])), lhs @ rhs)
    f = on(AUTO, COLUMNS[:2], COLUMNS[2])
    assert_same(f(lhs, rhs), lhs @ rhs)
    compiled = module._run_eagerly._cache_size()
    assert_same(f(lhs + 1, rhs), (lhs + 1) @ rhs)
    assert module._run_eagerly._cache_size() == compiled
    assert_same(jax.jit(f)(put(AUTO, lhs, P(None, None, "x")), put(AUTO, rhs, P("y"))), lhs @ rhs)


@pytest.mark.parametrize(("container", "keep"), [(list, False), (tuple, True)])
def test_several_right_sides_share_one_gather(container, keep):
    lhs, weights = whole(1, B, M, K), container(whole(i, K, n) for i, n in enumerate((N, 8)))
    biases, addends = [None, whole(3, 8)], [whole(4, M, N), None]
    f = on(AUTO, COLUMNS[:2], COLUMNS[2], keep_gathered=keep)
    layer = jax.jit(lambda lhs, weights: f(lhs, weights, bias=biases, addend=addends, activation=jax.nn.relu))
    outs = layer(lhs, weights)
    assert type(outs) is container
    assert_same(list(outs), [np.maximum(lhs @ weights[0] + addends[0], 0), np.maximum(lhs @ weights[1] + biases[1], 0)])
    assert collectives(layer.lower(lhs, weights).compile()) == {("f32", "all-gather"): 1}


# Shapes and specs: two dimensions, axes of one device, a leading dimension gathered, one scattered behind another axis.
RANKS = [
    (AUTO, (M, K), (P("y"), P(None, "y"), P(None, "y"))),
    (make_mesh(x=1, y=4), (B, M, K), FSDP),
    (AUTO, (2, 4, M, K), (P(None, "y", "x"), P(None, "y"), P(None, None, "x", "y"))),
    (AUTO, (8, 2, M, K), (P("x", None, None, "y"), P("y"), P(("x", "y")))),
    # XLA's partitioner alone gets this wrong (findings/partitioner_columns.sh).
    (
        make_mesh(AxisType.Auto, x=2, y=2, z=2),
        (B, M, K),
        (P(("x", "y"), None, "z"), P("z", "y"), P(("x", "y"), None, "z")),
    ),
]


def test_other_ranks_and_axes_of_one_device():
    """An addend without leading dimensions applies to every index."""
    for mesh, shape, (of_lhs, of_rhs, of_out) in RANKS:
        lhs, rhs, addend = whole(1, *shape), whole(2, K, N), whole(3, M, N)
        layer = jax.jit(on(mesh, (of_lhs, of_rhs), of_out))
        out = layer(put(mesh, lhs, of_lhs), put(mesh, rhs, of_rhs), addend=addend)
        assert_same(out, np.matmul(lhs, rhs) + addend)
        assert AxisType.Auto in mesh.axis_types or jax.typeof(out).sharding.spec == of_out


def test_all_arrays_are_converted_alike():
    """NumPy's float64 becomes float32 as in `jnp.asarray`, without a warning."""
    lhs, rhs, bias, addend = (whole(i, *s, dtype=np.float64) for i, s in enumerate(((M, K), (K, N), (N,), (M, N))))
    f = functools.partial(overlap.sharded_matmul, out_sharding=P(None, "y"), mesh=EXPLICIT)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (out,) = f(lhs, [rhs], bias=[bias], addend=[addend])
    assert out.dtype == np.float32
    assert_same(out, lhs @ rhs + bias + addend)


def test_the_mesh_is_found():
    """The mesh comes from `jax.set_mesh`, from a NamedSharding, or from an operand's type."""
    x, w = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((B, M, K), (K, N)))
    specs = dict(zip(("lhs_sharding", "rhs_sharding", "out_sharding"), COLUMNS, strict=True))
    f = functools.partial(overlap.sharded_matmul, **specs)
    with jax.set_mesh(AUTO):
        plans = [answer(f, x, w).plan]
    of_mesh = functools.partial(f, out_sharding=jax.NamedSharding(AUTO, COLUMNS[2]))
    plans += [answer(of_mesh, x, w).plan, answer(f, x.update(sharding=jax.NamedSharding(AUTO, COLUMNS[0])), w).plan]
    assert plans == ["all_gather_lhs_matmul along 'y'"] * 3


# Weights with several dimensions of k or n: the shapes of rows, k and n, the specs, and whether `rhs` is [*n, *k].
ATTENTION = {
    "query": ((B, M), (K,), (4, 6), (FSDP[0], P("x", "y", None), P("x", None, "y", None)), False),
    "one head": ((M,), (K,), (1, 8), (P("y"), P(None, None, "y"), P(None, None, "y")), False),
    "heads scattered": ((M,), (K,), (4, 6), (P(None, "y"), P("y"), P(None, "y", None)), False),
    "heads gathered": ((B, M), (K,), (2, 6), (P("x"), P(None, "x"), P("x", None, None, None)), False),
    "output": ((B, M), (4, 2), (K,), (P("x", None, "y"), P("y", None, "x"), P("x", "y", None)), False),
    "heads and head_dim": ((M,), (K,), (2, 8), (P(), P(None, "x", "y"), P(None, "x", "y")), False),
    "both, [n, k]": ((M,), (4, 2), (2, 3), (P(None, "y"), P("x", None, "y"), P(None, "x", None)), True),
}


@pytest.mark.parametrize("mesh", ["explicit", *(pytest.param(x, marks=pytest.mark.slow) for x in ("auto", "mixed"))])
def test_several_dimensions_of_k_or_n(mesh):
    """All cases in one program: results, cotangents and shardings."""
    mesh, operands, expected = MESHES[mesh], {}, {}
    for name, (m, k, n, specs, transposed) in ATTENTION.items():
        shapes, of_each = ((*m, *k), (*k, *n), n, (m[-1], *n), (*m, *n)), (*specs[:2], P(), P(), specs[2])
        lhs, rhs, bias, addend, cotangent = (whole(i, *s) for i, s in enumerate(shapes))
        flat = [x.reshape(*s, -1) for x, s in ((lhs, m), (rhs, (np.prod(k),)), (bias, ()), (addend, m[-1:]))]
        out, found = relu_product(*flat, cotangent.reshape(*m, -1))
        found = [x.reshape(y) for x, y in zip(found, shapes, strict=False)]
        order = (*range(len(k), rhs.ndim), *range(len(k))) if transposed else range(rhs.ndim)
        found[1] = found[1].transpose(*order)
        expected[name] = out.reshape(cotangent.shape), tuple(found)
        arrays = lhs, rhs.transpose(*order), bias, addend, cotangent
        operands[name] = [put(mesh, x, spec) for x, spec in zip(arrays, of_each, strict=True)]

    def layer(name, lhs, rhs, bias, addend):
        *_, specs, transposed = ATTENTION[name]
        f = on(mesh, specs, specs[2], transpose_rhs=transposed, activation=jax.nn.relu)
        return f(lhs, rhs, bias=bias, addend=addend)

    def results(operands):
        found = {}
        for name, (*of_product, cotangent) in operands.items():
            out, back = jax.vjp(functools.partial(layer, name), *of_product)
            found[name] = out, back(cotangent)
        return found

    with jax.set_mesh(mesh):
        found = jax.jit(results)(operands)
    for name, (out, _) in found.items():
        assert out.sharding.is_equivalent_to(operands[name][-1].sharding, out.ndim)
    assert_same(found, expected)


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


def test_fused():
    """Each operation, with keywords that kernels lack: at most twice the error of XLA's product of whole arrays."""
    chance = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(chance.standard_normal(shape), jnp.bfloat16)  # noqa: E731
    operands = lhs, rhs, bias, addend = draw(2, 256, 128), draw(128, 128), draw(128), draw(2, 256, 128)
    layers = [
        on(SMALL, specs, out, implementation="fused", config=CONFIG, activation=jax.nn.relu)
        for *specs, out in FUSED.values()
    ]
    with emulate(cores=2, detect_races=False) as run:
        outs = jax.jit(lambda lhs, rhs, bias, addend: [f(lhs, rhs, bias=bias, addend=addend) for f in layers])(
            *operands
        )
    assert run.counts["launches"] == 5
    x, w, b, a = (np.asarray(y, np.float32) for y in operands)
    exact, without = np.maximum(x @ w + b + a, 0), np.maximum(x @ w + b, 0)
    allowed = 2 * np.linalg.norm(np.asarray(jax.nn.relu(lhs @ rhs + bias + addend), np.float32) - exact)
    for (*_, spec), out in zip(FUSED.values(), outs, strict=True):
        assert out.sharding.is_equivalent_to(jax.NamedSharding(SMALL, spec), 3)
        assert 0 < np.linalg.norm(np.asarray(out, np.float32) - exact) <= allowed
        # The negative control: without the addend, the error is far above the limit.
        assert np.linalg.norm(np.asarray(out, np.float32) - without) > 5 * allowed


@pytest.mark.one_jax
def test_the_backward_pass_is_fused():
    """Column-parallel with weights sharded twice: a kernel computes the forward product and the cotangent of `lhs`."""
    chance = np.random.default_rng(0)
    lhs, rhs = (jnp.asarray(chance.standard_normal(s), jnp.bfloat16) for s in ((2, 256, 64), (64, 128)))
    f = on(SMALL, FSDP[:2], FSDP[2], implementation="fused", config=CONFIG)
    with emulate(cores=2, detect_races=False) as run:
        found = jax.jit(jax.grad(lambda x, w: (f(x, w).astype(jnp.float32) ** 2).sum(), (0, 1)))(lhs, rhs)
    assert run.counts["launches"] >= 2
    x, w = np.asarray(lhs, np.float32), np.asarray(rhs, np.float32)
    cotangent = 2 * x @ w
    assert_near(found, (cotangent @ w.T, np.einsum("bmk,bmn->kn", x, cotangent)), 6e-3)


# ---- explain ---------------------------------------------------------------------------------------------------------


@pytest.mark.one_jax
def test_explain(monkeypatch):
    """Called on types, for a GPU. Each device's part decides; the text says what happens along each axis."""
    monkeypatch.setattr(dispatch, "target", lambda mesh=None: target.Target("gpu", "NVIDIA H200", 132))

    def types(dtype=jnp.bfloat16):
        shapes = ((2, 8192, 8192), P("x", "y")), ((8192, 28672), P("x", "y"))
        return [jax.ShapeDtypeStruct(s, dtype, sharding=jax.NamedSharding(EXPLICIT, spec)) for s, spec in shapes]

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
    own = answer(overlap.all_gather_lhs_matmul, *parts, "y", mesh=EXPLICIT)
    assert own.config == fused.config
    assert re.fullmatch(re.escape(own.reason) + r"; forward and backward together \d\.\d\d x", fused.reason)
    # Heads that are kept together are the columns of a matrix.
    lhs, rhs = types()
    heads = rhs.update(shape=(8192, 224, 128))
    split = answer(overlap.sharded_matmul, lhs, heads, out_sharding=P("x", None, "y", None))
    assert split == answer(overlap.sharded_matmul, lhs, rhs, out_sharding=FSDP[2])


@pytest.mark.one_jax
def test_other_decisions_compile_an_eager_call_again(monkeypatch):
    x, w = jnp.ones((64, 128), jnp.bfloat16), jnp.ones((128, 128), jnp.bfloat16)
    specs = {"lhs_sharding": P("x"), "rhs_sharding": P(None, "x"), "out_sharding": P(None, "x")}
    call = functools.partial(overlap.sharded_matmul, x, w, mesh=make_mesh(AxisType.Auto, x=4), **specs)
    call()
    call()
    before = module._run_eagerly._cache_size()
    monkeypatch.setattr(dispatch, "settled", lambda problem: "fused")
    monkeypatch.setattr(dispatch, "verdict", lambda *_: Verdict(False, "changed", Cause.MEASURED, 2.0))
    call()
    assert module._run_eagerly._cache_size() == before + 1
