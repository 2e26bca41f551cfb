"""Derivatives of every operation, in both modes and twice, against plain JAX; with every keyword of the kernel."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import overlap
from tests import oracle
from tests.ops.contract import BF16, E4M3, F16, F32, FORMS, SCALES, SMALL, Call, assert_close, running, struct
from tests.ops.derivative_cases import TRANSFORMED, given, in_f64, loss, of_both, small
from tests.ops.product_cases import normal

slow = pytest.mark.slow
# "jvp of grad" has the gradient among its results. Types (`check_vma`) are tested with every second form.
CASES = [
    ("grad of jvp", "matmul", True), ("jvp of grad", "weights n", False), ("jvp of grad", "weights k", True),
    ("jvp of grad", "scatter m", False), ("grad of grad", "scatter n", True), ("jvp of grad", "one shot", False),
    ("vjp", "joined", False), ("vjp", "ring", True), ("vjp", "all, rows", False),
    ("jvp of grad", "groups", True), ("jvp of grad", "tokens to rows", False), ("jvp of grad", "rows to tokens", True),
]  # fmt: skip
OTHERS = [
    *((how, name, check_vma) for how in list(TRANSFORMED)[:4] for name in FORMS for check_vma in (True, False)),
    *((how, "matmul", True) for how in ("linearize", "vmap of jvp")),
]


@pytest.mark.parametrize(
    ("how", "name", "check_vma"), [*CASES, *(pytest.param(*case, marks=slow) for case in OTHERS if case not in CASES)]
)
def test_derivatives(how, name, check_vma):
    call = small(name)
    assert_close(*of_both(call, given(call), TRANSFORMED[how], check_vma=check_vma))


Config = overlap.Config
TWO = Config(tile_m=64, tile_n=128, stages=2, cluster=2, cluster_along="k")
KEPT = {"activation": None, "keywords": (("return_gathered", True),)}
GATED = {"config": None, "activation": lambda gate, up: jax.nn.silu(gate) * up}
MORE = {  # More forms of a call: leading dimensions, transposed and several operands, results of 16 and 8 bits.
    "by xla": (Call("matmul_reduce_scatter_n", 16, 16, 8, dtype=F16, extras=(*SCALES, "bias", "addend")), 1e-2),
    "16 bits": (small("scatter n", out=BF16, dtype=BF16, extras=("rhs_scale",), activation=None), 2e-2),
    "pairs, leading, transposed": (small("scatter m", k=16, pairs=(8, 8), layout="tt", lead=(2,)), 1e-2),
    "pairs for all": (small("all, rows", k=16, pairs=(8, 8), extras=()), 1e-2),
    "several": (small("pull", m=40, k=72, widths=(72, 64, 8), lead=(2,), container=tuple, **KEPT), 1e-2),
    "8 bits": (small("pull", m=40, k=80, widths=(16, 72), dtype=E4M3, layout="nt", extras=SCALES, **KEPT), 8e-2),
    "matmul, transposed": (small("matmul", m=136, n=72, k=264, layout="nt", config=Config(tile_n=128, stages=2)), 1e-2),
    "matmul, along k": (small("matmul", m=136, n=72, k=264, layout="tt", extras=(), config=TWO), 1e-2),
    "transposed weights": (small("ring", m=40, n=72, k=72, layout="nt"), 1e-2),
    "transposed rows": (small("weights k", layout="tn"), 1e-2),
    "groups, gated": (small("groups", m=40, k=72, extras=("bias",), widths=(64, 64), **GATED), 1e-2),
    "groups, by xla": (small("groups", extras=("bias",), widths=(16, 16), **GATED), 1e-2),
    "tokens to rows, by xla": (small("tokens to rows", config=None, k=8, capacity=9, groups=2), 1e-2),
    "rows to tokens, by xla": (small("rows to tokens", config=None, n=8, capacity=9, slots=3), 1e-2),
}
# The transpose of the transpose of a sum of products is the products.
TWICE = {"groups, gated": "grad of grad", "rows to tokens, by xla": "jvp of grad"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=slow if n in ("by xla", "pairs for all", "transposed weights") else []) for n in MORE],
)
def test_gradients_of_more_forms(name):
    call, limit = MORE[name]
    implementation = "xla" if name.endswith("by xla") else "fused"
    ours, theirs = of_both(
        call,
        given(call),
        TRANSFORMED[TWICE.get(name, "vjp")],
        check_vma=name != "8 bits",
        implementation=implementation,
    )
    assert_close(ours, theirs, limit)
    if name not in TWICE or TWICE[name] != "jvp of grad":
        assert jax.tree.map(lambda x: x.dtype, ours) == jax.tree.map(lambda x: x.dtype, given(call))


@pytest.mark.parametrize("name", ["one shot", pytest.param("scatter m", marks=slow)])
def test_gradients_taken_inside_shard_map(name):
    """Without types, each device has only its own part of the gradient of a bias."""
    call = small(name, activation=jax.nn.gelu)
    arrays, results = given(call), []
    specs = call.specs(arrays) | {"bias": P("x")}
    for body in (call, call.plain):

        def each(arrays, body=body):
            return {n: x[None] if n == "bias" else x for n, x in jax.grad(loss(body))(arrays).items()}

        with running(detect_races=False):
            results.append(call.program(oracle.make_mesh(x=2), arrays, each, specs)(arrays))
    assert_close(*results)


def test_the_gradient_of_scalars_that_the_activation_captures():
    """Each device has a slope of its own; the other scalar is an integer."""
    call = small("scatter n", activation=None)
    arrays, results = given(call), []
    for body in ("__call__", "plain"):

        def of_slope(slope, arrays, body=body):
            count, slope = slope.astype(jnp.int32) + 1, slope + lax.axis_index("x")
            return getattr(call.but(activation=lambda y: jax.nn.silu(y * slope) * count), body)(arrays)

        specs = P(), call.specs(arrays)
        mapped = jax.shard_map(of_slope, mesh=oracle.make_mesh(x=2), in_specs=specs, out_specs=call.out_specs)
        with running(detect_races=False):
            results.append(jax.block_until_ready(jax.jit(jax.grad(loss(mapped)))(jnp.float32(0.75), arrays)))
    assert_close(*results)


def scanned(call):
    def run(arrays):
        def step(_, shift):
            return None, call(arrays | {"lhs": arrays["lhs"] + shift.astype(arrays["lhs"].dtype)})

        return lax.scan(step, None, jnp.arange(2, dtype=F32))[1].sum(0)

    return run


# An operation, and what is done to it.
SCANNED = [("matmul", "jvp of grad")]
SCANNED += [pytest.param(n, "jvp of grad", marks=slow) for n in ("pull", "scatter n", "groups")]
SCANNED += [pytest.param(n, "vjp", marks=slow) for n in ("rows to tokens", "tokens to rows")]
SCANNED += [pytest.param(n, "jvp of grad", marks=slow) for n in ("rows to tokens", "tokens to rows")]


@pytest.mark.parametrize(("name", "how"), SCANNED)
def test_derivatives_of_a_checkpoint_in_a_scan(name, how):
    """JAX keeps a traced loop body without the rules of `jax.custom_jvp`."""
    call = small(name)
    around = lambda f: scanned(jax.checkpoint(f))  # noqa: E731
    assert_close(*of_both(call, given(call), TRANSFORMED[how], check_vma=True, around=around))


def test_vmap_of_gradients():
    """Also of operands that are not mapped: each element then has its own gradient."""
    call = small("scatter n")

    def gradients(f, arrays):
        many = jnp.stack([arrays["lhs"], -arrays["lhs"]])
        return jax.vmap(lambda lhs: jax.grad(loss(f))(arrays | {"lhs": lhs}))(many)

    assert_close(*of_both(call, given(call), gradients, check_vma=True))


def test_linear_transpose():
    call = small("scatter m", activation=None, extras=())

    def transposed(f, arrays):
        by_lhs = lambda lhs: f(arrays | {"lhs": lhs})  # noqa: E731
        out = jax.eval_shape(f, arrays)
        return jax.linear_transpose(by_lhs, arrays["lhs"])(jnp.ones(out.shape, out.dtype))

    # (XLA transposes.)
    assert_close(*of_both(call, given(call), transposed, check_vma=True, launches=False), 1e-3)


def test_the_backward_pass_of_a_sum_for_all_communicates_only_without_types():
    """With types, the sum's cotangent is known to be the same on all devices: it is also the cotangent of each part."""
    call = small("all, rows", extras=())
    arrays = given(call)
    for check_vma in (True, False):
        mapped = call.program(oracle.make_mesh(x=2), arrays, call, P(), check_vma=check_vma)
        assert ("psum" in str(jax.make_jaxpr(jax.grad(loss(mapped)))(arrays))) != check_vma


# --- The ends of the dtypes' ranges -----------------------------------------------------------------------------------

M, K, N = 64, 128, 136
RANGES = {  # The arguments of `matmul`, and the factor on the sum of its result.
    "cotangents too large": (dict(lhs_scale=1e5, preferred_element_type=F32), 1e-5),
    "cotangents too small": (dict(rhs_scale=1e-6, preferred_element_type=F32), 1.0),
    "an activation with small slopes": (
        dict(bias=jnp.full(N, -20.0), activation=lambda y: jnp.exp(y / 10), preferred_element_type=F32), 1.0
    ),
    "32 bits of results": (dict(preferred_element_type=F32), 1e-4),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, F16) for name in list(RANGES)[:3]), ("32 bits of results", BF16),
                        ("cotangents too large", E4M3)],
)  # fmt: skip
def test_what_does_not_fit_the_operands_is_not_rounded_to_them(name, dtype):
    (keywords, times), transposed = RANGES[name], dtype == E4M3
    batch = (2,) if name == "cotangents too large" else ()
    keywords = keywords | dict(transpose_rhs=transposed)
    lhs, rhs = normal(0, *batch, M, K, dtype=dtype), normal(1, *((N, K) if transposed else (K, N)), dtype=dtype)

    def total(lhs, rhs):
        return times * overlap.matmul(lhs, rhs, implementation="fused", **keywords).sum()

    with running():
        ours = jax.block_until_ready(jax.jit(jax.grad(total, (0, 1)))(lhs, rhs))
    for actual, exact in zip(ours, in_f64(lhs, rhs, times=times, **keywords), strict=True):
        exact = np.asarray(exact)
        rounding = np.linalg.norm(exact.astype(dtype).astype(np.float64) - exact)
        error = np.linalg.norm(np.asarray(actual).astype(np.float64) - exact)
        assert error <= 2 * rounding + 1e-3 * np.linalg.norm(exact)


def test_the_gradient_of_a_scale_takes_the_product_before_it_is_rounded():
    """In the dtype of the result, 256 + 1 is 256."""
    lhs, rhs = jnp.zeros((8, K), BF16).at[0, :2].set(jnp.array([256, 1], BF16)), jnp.ones((K, N), BF16)

    def corner(scale):
        return overlap.matmul(lhs, rhs, lhs_scale=scale, implementation="fused", config=SMALL)[0, 0]

    with running():
        found = jax.jit(jax.grad(corner))(jnp.ones((8, 1)))
    assert found.tolist() == [[257.0], *[[0.0]] * 7]


@pytest.mark.parametrize("op", ["lhs", "n", pytest.param("k", marks=slow)])
def test_gradients_of_gathers_at_the_ends_of_the_range(op):
    """Large rows of one operand, small columns of the other: what overflows also overflows in plain JAX.

    (There the sum over the devices is in float16, so that more overflows.)
    """
    name = "pull" if op == "lhs" else f"weights {op}"
    call = FORMS[name].but(m=16, n=24, k=64, dtype=F16, keywords=(("lhs_scale", 300.0),) if op == "lhs" else ())
    arrays = call.normal(2)
    of = lambda f, factor: jax.grad(lambda a: (f(a).astype(F32) * 2e3 * factor).sum())  # noqa: E731
    results = []
    for f, factor in ((call, 1.0), (lambda a: call.plain(a, F32), 300.0 if op == "lhs" else 1.0)):
        with running():
            program = call.program(oracle.make_mesh(x=2), arrays, of(f, factor), call.specs(arrays))
            results.append(jax.tree.map(lambda x: np.asarray(x).astype(np.float64), program(arrays)))
    for name, theirs in results[1].items():
        fits = np.isfinite(theirs)
        ours = np.isfinite(results[0][name])
        assert ours[fits].all() and ours.all() == fits.all()
        assert_close(results[0][name][fits], theirs[fits])


# --- What all elements of a batch share -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "shared"), [("leading dimension", "rhs"), ("vmap", "lhs"), ("vmap of jvp", "rhs"),
                        pytest.param("leading dimension", "lhs", marks=slow), pytest.param("vmap", "rhs", marks=slow)],
)  # fmt: skip
def test_what_a_batch_shares_has_the_sum_of_unrounded_cotangents(how, shared):
    """The elements' cotangents nearly cancel: rounded to bfloat16 before the sum, the result would be useless."""
    lhs, rhs = normal(2, *(() if shared == "lhs" else (2,)), M, K), normal(3, *(() if shared == "rhs" else (2,)), K, N)
    g = normal(4, 2, M, N)
    g = g.at[1].set(-g[0])
    if shared == "lhs":
        rhs = rhs.at[1].set(rhs[0] + (jnp.abs(rhs[0]) / 64).astype(BF16))
    else:
        lhs = lhs.at[1].set(lhs[0] + (jnp.abs(lhs[0]) / 64).astype(BF16))
    matmul = lambda a, b, **keywords: overlap.matmul(a, b, implementation="fused", config=SMALL, **keywords)  # noqa: E731

    def product(lhs, rhs):
        # The tangent of the shared operand is the same product.
        return matmul(lhs, rhs) if how != "vmap of jvp" else jax.jvp(lambda x: matmul(lhs, x), (0 * rhs,), (rhs,))[1]

    def total(lhs, rhs):
        axes = tuple(0 if x.ndim == 3 else None for x in (lhs, rhs))
        y = product(lhs, rhs) if how == "leading dimension" else jax.vmap(product, axes)(lhs, rhs)
        return (y * g).astype(F32).sum()

    with running():
        d = jax.block_until_ready(jax.jit(jax.grad(total, 0 if shared == "lhs" else 1))(lhs, rhs))
    lhs, rhs, g = (np.asarray(x).astype(np.float64) for x in (lhs, rhs, g))
    exact = np.einsum("bmn,bkn->mk", g, rhs) if shared == "lhs" else np.einsum("bmk,bmn->kn", lhs, g)
    assert_close(d, exact, 4e-3)


def test_the_cotangents_of_all_that_a_batch_shares():
    given = {
        "lhs": normal(0, 3, 24, 64), "rhs": normal(1, 64, 128), "addend": normal(2, 24, 128),
        "bias": normal(3, 128, dtype=F32), "lhs_scale": normal(4, 24, 1, dtype=F32),
        "rhs_scale": normal(5, 128, dtype=F32),
    }  # fmt: skip
    weights = normal(6, 3, 24, 128, dtype=F32)

    def total(given, **how):
        return (overlap.matmul(**given, preferred_element_type=F32, **how) * weights).sum()

    def exact(g):
        return ((g["lhs"] @ g["rhs"] * g["lhs_scale"] * g["rhs_scale"] + g["bias"] + g["addend"]) * weights).sum()

    with running():
        found = jax.jit(jax.grad(lambda given: total(given, implementation="fused", config=SMALL)))(given)
    for name, d in jax.jit(jax.grad(exact))({name: x.astype(F32) for name, x in given.items()}).items():
        assert found[name].dtype == given[name].dtype
        assert_close(found[name], d, 8e-3)


@pytest.mark.parametrize("which", [0, 1])
def test_cotangents_of_8_bits_are_summed_over_devices_in_more(which):
    """The two devices' cotangents nearly cancel, so summing them in 8 bits would lose the result."""
    lhs, rhs, g = normal(0, 32, 128, dtype=E4M3), normal(1, 128, 128, dtype=E4M3), normal(2, 32, 128, dtype=F32)
    factor = jnp.asarray([1.0, -33 / 32])

    def total(lhs, rhs, factor):
        out = overlap.all_gather_lhs_matmul(lhs, rhs, "x", transpose_rhs=True, implementation="fused", config=SMALL)
        return (out.astype(F32) * g * factor[0]).sum()

    specs = P("x"), P(), P("x")
    mapped = jax.shard_map(jax.grad(total, which), mesh=oracle.make_mesh(x=2), in_specs=specs, out_specs=specs[which])
    with running():
        d = jax.jit(mapped)(lhs, rhs, factor)
        # XLA may keep more bits than this program says.
        sums = re.findall(r":(\w+)\[\S* = (?:psum|reduce_scatter)", str(jax.make_jaxpr(mapped)(lhs, rhs, factor)))
    assert sums and not [dtype for dtype in sums if "8" in dtype], sums
    a, b, c = (np.asarray(x).astype(np.float64) for x in (lhs, rhs, g))
    assert_close(d, (c @ b if which == 0 else c.T @ a) * (1 - 33 / 32), 0.15)


def test_of_no_element():
    lhs, rhs, bias = struct(0, 2, M, K), jnp.zeros((K, N), BF16), struct(0, N)
    one = lambda a, c: overlap.matmul(a, rhs, bias=c, implementation="fused")  # noqa: E731
    assert jax.eval_shape(jax.vmap(one), lhs, bias).shape == (0, 2, M, N)
    of_lhs = jax.vmap(jax.grad(lambda a, c: one(a, c).astype(F32).sum()))
    assert jax.eval_shape(of_lhs, lhs, bias).shape == lhs.shape
