"""Tests derivatives of the fused operations under the emulator: both modes, second derivatives, and rounding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import overlap
from overlap.emulation import emulate
from tests import oracle
from tests.oracle import make_mesh
from tests.product_cases import normal

F16, BF16, F32 = jnp.float16, jnp.bfloat16, jnp.float32
F8 = jnp.float8_e4m3fn
M, K, N = 64, 128, 136
SMALL = overlap.Config(tile_n=128, stages=2)


def close(actual, expected, limit):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, b = (np.asarray(x).astype(np.float64) for x in (a, b))
        assert a.shape == b.shape
        assert np.linalg.norm(a - b) <= limit * np.linalg.norm(b), np.linalg.norm(a - b) / np.linalg.norm(b)


# --- The ends of the dtypes' ranges -----------------------------------------------------------------------------------

RANGES = {  # The arguments of `matmul`, and the factor on the sum of its result.
    "cotangents too large": (dict(lhs_scale=1e5, preferred_element_type=F32), 1e-5),
    "cotangents too small": (dict(rhs_scale=1e-6, preferred_element_type=F32), 1.0),
    "an activation with small slopes": (
        dict(bias=jnp.full(N, -20.0), activation=lambda y: jnp.exp(y / 10), preferred_element_type=F32), 1.0
    ),
    "32 bits of results": (dict(preferred_element_type=F32), 1e-4),
}  # fmt: skip


def in_f64(lhs, rhs, *, lhs_scale=1.0, rhs_scale=1.0, bias=0.0, activation=lambda y: y, transpose_rhs=False, times=1.0,
           **_):  # fmt: skip
    """Computes the gradient of the sum of `matmul`'s result in f64."""
    lhs, rhs, scale, bias = (np.asarray(x).astype(np.float64) for x in (lhs, rhs, lhs_scale * rhs_scale, bias))
    with jax.enable_x64(True):

        def loss(lhs, rhs):
            return times * activation(lhs @ (rhs.T if transpose_rhs else rhs) * scale + bias).sum()

        return jax.grad(loss, (0, 1))(jnp.asarray(lhs), jnp.asarray(rhs))


IN_RANGES = [*((name, F16) for name in RANGES), ("32 bits of results", BF16), ("cotangents too large", F8)]


@pytest.mark.parametrize(("name", "dtype"), IN_RANGES)
def test_what_does_not_fit_the_operands_is_not_rounded_to_them(name, dtype):
    (keywords, times), transposed = RANGES[name], dtype == F8
    batch = (2,) if name == "cotangents too large" else ()
    keywords = keywords | dict(transpose_rhs=transposed)
    lhs, rhs = normal(0, *batch, M, K, dtype=dtype), normal(1, *((N, K) if transposed else (K, N)), dtype=dtype)

    def loss(lhs, rhs):
        return times * overlap.matmul(lhs, rhs, implementation="fused", config=None, **keywords).sum()

    with emulate(cores=2):
        ours = jax.block_until_ready(jax.grad(loss, (0, 1))(lhs, rhs))
    for actual, exact in zip(ours, in_f64(lhs, rhs, times=times, **keywords), strict=True):
        exact = np.asarray(exact)
        rounding = np.linalg.norm(exact.astype(dtype).astype(np.float64) - exact)
        error = np.linalg.norm(np.asarray(actual).astype(np.float64) - exact)
        assert error <= 2 * rounding + 1e-3 * np.linalg.norm(exact)


@pytest.mark.parametrize("how", ["leading dimension", "transposed", "vmap", "vmap of jvp"])
@pytest.mark.parametrize("shared", ["lhs", "rhs"])
def test_what_a_batch_shares_has_the_sum_of_unrounded_cotangents(shared, how):
    """The elements' cotangents nearly cancel: rounded to bfloat16 before the sum, the result would be useless."""
    lhs, rhs = normal(2, *(() if shared == "lhs" else (2,)), M, K), normal(3, *(() if shared == "rhs" else (2,)), K, N)
    g = normal(4, 2, M, N)
    g = g.at[1].set(-g[0])
    if shared == "lhs":
        rhs = rhs.at[1].set(rhs[0] + (jnp.abs(rhs[0]) / 64).astype(BF16))
    else:
        lhs = lhs.at[1].set(lhs[0] + (jnp.abs(lhs[0]) / 64).astype(BF16))

    def product(lhs, rhs):
        if how == "transposed":
            lhs = lhs.mT
        if how != "vmap of jvp":
            return overlap.matmul(lhs, rhs, transpose_lhs=how == "transposed", implementation="fused", config=SMALL)
        # Perturb the shared operand: the tangent is the same product.
        if shared == "lhs":
            return jax.jvp(lambda x: overlap.matmul(x, rhs, implementation="fused"), (0 * lhs,), (lhs,))[1]
        return jax.jvp(lambda x: overlap.matmul(lhs, x, implementation="fused"), (0 * rhs,), (rhs,))[1]

    def loss(lhs, rhs):
        axes = tuple(0 if x.ndim == 3 else None for x in (lhs, rhs))
        y = product(lhs, rhs) if how in ("leading dimension", "transposed") else jax.vmap(product, axes)(lhs, rhs)
        return (y * g).astype(F32).sum()

    with emulate(cores=2):
        d = jax.block_until_ready(jax.grad(loss, 0 if shared == "lhs" else 1)(lhs, rhs))
    lhs, rhs, g = (np.asarray(x).astype(np.float64) for x in (lhs, rhs, g))
    exact = np.einsum("bmn,bkn->mk", g, rhs) if shared == "lhs" else np.einsum("bmk,bmn->kn", lhs, g)
    close(d, exact, 4e-3)


def test_cotangents_of_what_a_batch_shares_beside_the_operands():
    lhs, rhs, shared = normal(2, 2, M, K), normal(3, K, N), (normal(4, N), normal(5, M, N), normal(6, M, 1, dtype=F32))

    def loss(bias, addend, scale):
        y = overlap.matmul(lhs, rhs, bias=bias, addend=addend, lhs_scale=scale, implementation="fused")
        return jnp.square(y.astype(F32)).sum()

    with emulate(cores=2):
        found = jax.eval_shape(jax.grad(loss, (0, 1, 2)), *shared)
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in shared]


def test_a_cotangent_of_the_operands_dtype_goes_through_the_kernel(monkeypatch):
    from overlap.frame import primitive
    from overlap.single_gpu import matmul

    lhs, rhs, run = normal(5, M, K), normal(6, K, N), []
    launch = matmul._sealed
    monkeypatch.setattr(matmul, "_sealed", lambda operands, plan: run.append(plan) or launch(operands, plan))
    with emulate(cores=2):
        jax.grad(lambda a, b: overlap.matmul(a, b, implementation="fused").astype(F32).sum(), (0, 1))(lhs, rhs)
        assert [plan.out_dtype for plan in run] == [BF16] * 3
        run.clear()
        primitive.tracer_of.cache_clear()
        jax.grad(lambda a: overlap.matmul(a, rhs, implementation="fused").astype(F32).sum())(lhs)
        assert len(run) == 2  # An operand without a gradient needs no product.


# --- Both modes, and twice --------------------------------------------------------------------------------------------


def gather(op):
    """Returns an operation with a gathered operand, as a function of its two operands and a scale."""

    def call(lhs, rhs, scale, implementation):
        if op == "lhs":
            return overlap.all_gather_lhs_matmul(
                lhs,
                rhs,
                "x",
                lhs_scale=scale,
                rhs_scale=0.5,
                implementation=implementation,
                preferred_element_type=None,
            )
        return overlap.all_gather_rhs_matmul(
            (lhs * scale).astype(lhs.dtype),
            rhs,
            "x",
            dimension=0 if op == "k" else 1,
            implementation=implementation,
        )

    return call


def single(lhs, rhs, scale, implementation):
    bias = jnp.sin(rhs[0].astype(F32))
    slope = scale[0, 0]
    activation = lambda y: jnp.tanh(y * slope)  # noqa: E731
    return overlap.matmul(lhs, rhs, lhs_scale=scale, bias=bias, activation=activation, implementation=implementation)


SHAPES = {
    "matmul": ((16, 64), (64, 24)),
    "lhs": ((16, 64), (64, 24)),
    "n": ((16, 64), (64, 8)),
    "k": ((16, 64), (32, 24)),
}
TRANSFORMED = {
    "jvp": lambda f, x, v: jax.jvp(f, x, v),
    "linearize": lambda f, x, v: jax.linearize(f, *x)[1](*v),
    "jacfwd": lambda f, x, v: jax.jacfwd(lambda t: f(x[0], x[1], x[2] + t * v[2]))(1.0),
    "grad of grad": lambda f, x, v: jax.grad(lambda *x: _dot(jax.grad(_loss(f), (0, 1, 2))(*x), v), (0, 1, 2))(*x),
    "jvp of grad": lambda f, x, v: jax.jvp(jax.grad(_loss(f), (0, 1, 2)), x, v),
    "grad of jvp": lambda f, x, v: jax.grad(lambda *x: jnp.sin(jax.jvp(f, x, v)[1].astype(F32)).sum(), (0, 1))(*x),
    "vmap of jvp": lambda f, x, v: jax.vmap(
        lambda t: jax.jvp(lambda a: f(a, *x[1:]), ((x[0] * t).astype(x[0].dtype),), (v[0],))
    )(jnp.arange(1, 3, dtype=F16)),
}


def _loss(f):
    return lambda *x: jnp.sin(f(*x).astype(F32)).sum()


def _dot(a, b):
    return sum(jnp.vdot(x.astype(F32), y.astype(F32)) for x, y in zip(a, b, strict=True))


ALL = [(name, "matmul") for name in TRANSFORMED]
OF_GATHERS = [(name, op) for op in ("lhs", "n", "k") for name in ("jvp", "grad of grad")]


@pytest.mark.parametrize(("name", "op"), [*ALL, *OF_GATHERS, ("vmap of jvp", "k"), ("jvp of grad", "lhs")])
def test_both_modes_and_twice(name, op):
    shapes = SHAPES[op]
    x = tuple(0.25 * normal(i, *shape, dtype=F16) for i, shape in enumerate(shapes))
    v = tuple(normal(9 + i, *shape, dtype=F16) for i, shape in enumerate(shapes))
    x, v = (*x, 1 + jnp.abs(normal(5, 16, 1, dtype=F32))), (*v, normal(6, 16, 1, dtype=F32))
    call = single if op == "matmul" else gather(op)

    def transformed(implementation):
        f = lambda *x: call(*x, implementation)  # noqa: E731
        g = lambda x, v: jax.tree.map(lambda y: y[None], TRANSFORMED[name](f, x, v))  # noqa: E731
        if op != "matmul":
            g = jax.shard_map(g, mesh=make_mesh(x=2), in_specs=P(), out_specs=P("x"), check_vma=False)
        with emulate(cores=2):
            return jax.block_until_ready(jax.jit(g)(x, v))

    close(transformed("fused"), transformed("xla"), 1e-2)


@pytest.mark.parametrize("wrapped", [lambda f: f, jax.checkpoint], ids=["scan", "scan and checkpoint"])
def test_a_second_derivative_through_a_loop(wrapped):
    """JAX keeps a traced loop body without the rules of `jax.custom_jvp`."""
    x, ws = 0.2 * normal(0, 16, 64), 0.2 * normal(1, 2, 64, 64)

    def gradient(implementation):
        def layer(x, w):
            return overlap.matmul(x, w, activation=jnp.tanh, implementation=implementation)

        def loss(x, ws):
            y, _ = lax.scan(lambda x, w: (wrapped(layer)(x, w), None), x, ws)
            return (y.astype(F32) ** 2).sum()

        return jax.jit(lambda x, ws: jax.jvp(jax.grad(loss, (0, 1)), (x, ws), (x, ws)))

    with emulate(cores=2):
        ours = jax.block_until_ready(gradient("fused")(x, ws))
    close(ours, gradient("xla")(x, ws), 1e-2)


def test_vmap_over_no_element():
    lhs, rhs, bias = (jnp.zeros(shape, BF16) for shape in ((0, 2, M, K), (K, N), (0, N)))
    one = lambda a, c: overlap.matmul(a, rhs, bias=c, implementation="fused")  # noqa: E731
    assert jax.vmap(one)(lhs, bias).shape == (0, 2, M, N)
    assert jax.vmap(jax.grad(lambda a, c: one(a, c).astype(F32).sum()))(lhs, bias).shape == lhs.shape


# --- Backward passes of the gathers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["lhs", "n", "k"])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=["float16", "bfloat16"])
def test_gathers_as_the_gradient_of_the_plain_operations(dtype, op):
    """The values are at the ends of the dtype's range: large rows of one operand, small columns of the other."""
    lhs_shape, rhs_shape = SHAPES[op]
    lhs, rhs = (
        normal(0, 2 * lhs_shape[0], lhs_shape[1], dtype=dtype),
        normal(1, 2 * rhs_shape[0], rhs_shape[1], dtype=dtype),
    )
    factor = 300.0 if op == "lhs" else 1.0

    def plain(lhs, rhs):
        dimension = {"lhs": 0, "n": 1, "k": 0}[op]
        if op == "lhs":
            lhs = lax.all_gather(lhs, "x", axis=0, tiled=True)
        else:
            rhs = lax.all_gather(rhs, "x", axis=dimension, tiled=True)
        return lax.dot(lhs, rhs, preferred_element_type=F32) * factor

    def fused(lhs, rhs):
        if op == "lhs":
            keywords = dict(lhs_scale=factor, preferred_element_type=F32 if dtype == F32 else None)
            y = overlap.all_gather_lhs_matmul(lhs, rhs, "x", implementation="fused", **keywords)
        else:
            y = overlap.all_gather_rhs_matmul(lhs, rhs, "x", dimension=0 if op == "k" else 1, implementation="fused")
        return y.astype(F32)

    def gradients(f):
        g = jax.grad(lambda a, b: (f(a, b) * 2e3).sum(), (0, 1))
        mapped = oracle.on_mesh(make_mesh(x=2), g, in_specs=(P("x"), P("x")), out_specs=P("x"))
        with emulate(cores=2):
            return jax.block_until_ready(mapped(lhs, rhs))

    ours, theirs = gradients(fused), gradients(plain)
    for a, b in zip(ours, theirs, strict=True):
        a, b = (np.asarray(x).astype(np.float64) for x in (a, b))
        fits = np.isfinite(b)
        assert (np.isfinite(a) == fits).all()
        close(a[fits], b[fits], 1e-2)
