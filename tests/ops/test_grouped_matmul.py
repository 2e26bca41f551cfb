"""`grouped_matmul`: numbers, derivatives and transformations by both implementations, and what it refuses."""

from __future__ import annotations

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import PartitionSpec as P

import overlap
from overlap import Config
from overlap.choice import dispatch
from overlap.frame import call
from overlap.frame.signatures import Arguments
from overlap.kernels.operations import GROUPED
from overlap.kernels.target import Target, emulating
from tests import oracle
from tests.ops.contract import BF16, E4M3, F32, assert_close

SIZES, M, K, N = (70, 0, 37, 1), 120, 80, 136
GROUPS = len(SIZES)
HOPPER = Config(tile_m=64, tile_n=128, stages=2)
GPUS = [("fused", "hopper"), ("fused", "blackwell"), ("xla", "hopper")]
EVERYWHERE = pytest.mark.parametrize(("implementation", "gpu"), GPUS)


def drawn(seed, dtype=BF16, transpose_rhs=False, sides=1):
    chance = np.random.default_rng(seed)
    integers = lambda *shape: jnp.asarray(chance.integers(-3, 4, shape))  # noqa: E731
    shape = (GROUPS, N, K) if transpose_rhs else (GROUPS, K, N)
    rhs = [integers(*shape).astype(dtype) for _ in range(sides)]
    biases = [integers(GROUPS, N).astype(F32) for _ in range(sides)]
    return {
        "lhs": integers(M, K).astype(dtype), "rhs": rhs if sides > 1 else rhs[0], "sizes": jnp.asarray(SIZES),
        "bias": biases if sides > 1 else biases[0],
        "rows": 2.0 ** chance.integers(-1, 2, (M, 1)), "columns": 2.0 ** chance.integers(-1, 2, (GROUPS, N)),
    }  # fmt: skip


def plain(lhs, rhs, sizes, transpose_rhs=False):
    """One product for each group, in f32; differentiable."""
    ends = np.cumsum(SIZES)
    parts = [
        lhs[end - size : end].astype(F32) @ (matrix.T if transpose_rhs else matrix).astype(F32)
        for matrix, end, size in zip(rhs, ends, SIZES, strict=True)
    ]
    return jnp.concatenate([*parts, jnp.zeros((M - ends[-1], parts[0].shape[1]))])


def rows_of(vector):
    """The vector of each row's group; zeros behind all groups."""
    given = np.zeros((M, N), np.float32)
    given[: sum(SIZES)] = np.repeat(np.asarray(vector), SIZES, axis=0)
    return given


@EVERYWHERE
@pytest.mark.parametrize(("dtype", "transpose_rhs"), [(BF16, False), (BF16, True), (E4M3, True)])
def test_every_bit(dtype, transpose_rhs, implementation, gpu):
    """Rows behind all groups hold NaN, and sizes change without a new program."""
    given = drawn(0, dtype, transpose_rhs)
    given["lhs"] = given["lhs"].at[sum(SIZES) :].set(jnp.nan)

    @jax.jit
    def run(given):
        return overlap.grouped_matmul(
            given["lhs"], given["rhs"], given["sizes"], bias=given["bias"], lhs_scale=given["rows"],
            rhs_scale=given["columns"], preferred_element_type=F32, transpose_rhs=transpose_rhs,
            activation=jax.nn.relu, implementation=implementation,
        )  # fmt: skip

    with emulating(gpu):
        out = run(given)
        run({**given, "sizes": jnp.asarray((0, 100, 0, 3))})
    exact = (
        np.asarray(plain(given["lhs"], given["rhs"], SIZES, transpose_rhs)) * given["rows"] * rows_of(given["columns"])
    )
    exact = np.maximum(np.nan_to_num(exact) + rows_of(given["bias"]), 0)
    np.testing.assert_array_equal(out, exact.astype(np.float32))
    assert run._cache_size() == 1


@EVERYWHERE
@pytest.mark.parametrize(
    ("m", "k", "sizes"), [(40, 8, (40,)), (65, 64, (0, 65)), (70, 64, (13, 0, 20)), (9, 200, (9,))]
)
def test_few_features_and_rows_of_no_group(m, k, sizes, implementation, gpu):
    """With k ≤ 64 one warpgroup has all rows of the weights' gradient. Without an epilogue nothing else clears rows."""
    lhs, rhs = jnp.ones((m, k), BF16), jnp.ones((len(sizes), k, 64), BF16)
    call = functools.partial(overlap.grouped_matmul, group_sizes=jnp.asarray(sizes), implementation=implementation)
    with emulating(gpu):
        out, pull = jax.vjp(call, lhs, rhs)
        d_lhs, d_rhs = pull(jnp.ones_like(out))
    counted = (np.arange(m) < sum(sizes))[:, None]
    np.testing.assert_array_equal(out, np.where(counted, k, 0) + np.zeros((m, 64)))
    np.testing.assert_array_equal(d_lhs, np.where(counted, 64, 0) + np.zeros((m, k)))
    np.testing.assert_array_equal(d_rhs, np.asarray(sizes)[:, None, None] + np.zeros((len(sizes), k, 64)))


def test_gradients_that_no_kernel_can_serve_are_xlas():
    """Rows of 12 elements are a multiple of 16 bytes in f32, as which they are stored, but not in bf16."""
    lhs, rhs = jnp.ones((40, 64), BF16), jnp.ones((2, 12, 64), BF16)

    def loss(lhs, rhs):
        keywords = {"transpose_rhs": True, "preferred_element_type": F32, "implementation": "fused"}
        return overlap.grouped_matmul(lhs, rhs, jnp.array([10, 25]), **keywords).sum()

    d_lhs, d_rhs = jax.grad(loss, (0, 1))(lhs, rhs)
    np.testing.assert_array_equal(d_lhs, np.where(np.arange(40) < 35, 12, 0)[:, None] + np.zeros((40, 64)))
    np.testing.assert_array_equal(d_rhs, np.array([10, 25])[:, None, None] + np.zeros((2, 12, 64)))


@pytest.mark.parametrize("sizes", [(2**31 - 1, 1), (2**30,) * 3, (5, 2**31 - 1, 5), (-5, 10)], ids=str)
def test_sizes_that_no_group_can_have(sizes):
    """They end at the last row, and negative ones count as zero."""
    lhs, rhs = jnp.ones((30, 64), BF16), jnp.ones((len(sizes), 64, 64), BF16)
    for implementation in ("fused", "xla"):
        out = overlap.grouped_matmul(lhs, rhs, jnp.asarray(sizes), implementation=implementation)
        assert (np.asarray(out)[:, 0] != 0).sum() == (10 if sizes[0] < 0 else 30)


@pytest.mark.parametrize("implementation", ["fused", "xla"])
def test_what_is_no_number_stays_in_its_group(implementation):
    """Also in gradients: of a bias, of scales, of a scalar that an activation without a derivative at zero captures."""
    lhs, rhs = jnp.ones((6, 64), BF16).at[0, 0].set(jnp.nan), jnp.ones((2, 64, 64), BF16)

    def loss(bias, lhs, rows, columns, scalar):
        out = overlap.grouped_matmul(
            lhs, rhs, jnp.array([2, 3]), bias=bias, lhs_scale=rows, rhs_scale=columns, implementation=implementation,
            activation=lambda y: jnp.sqrt(y * scalar),
        )  # fmt: skip
        return jnp.where(jnp.arange(6)[:, None] > 0, out.astype(F32), 0).sum()

    given = jnp.zeros((2, 64)), lhs, jnp.ones((6, 1)).at[5].set(jnp.nan), jnp.ones((2, 64))
    d_bias, d_lhs, d_rows, d_columns = jax.grad(loss, (0, 1, 2, 3))(*given, 1.0)
    assert jnp.isnan(d_bias).any(1).tolist() == jnp.isnan(d_columns).any(1).tolist() == [True, False]
    assert not jnp.isnan(d_lhs[1:]).any() and not jnp.isnan(d_rows[1:]).any()
    clean = lhs.at[0, 0].set(1)
    assert jnp.isfinite(jax.grad(loss, 4)(given[0], clean, jnp.ones((6, 1)), given[3], 1.0))


@pytest.mark.parametrize("implementation", ["fused", "xla"])
def test_the_product_under_a_derivative_is_not_rounded_before_its_epilogue(implementation):
    """257 - 256 is 1, and 257 in bfloat16 is 256."""
    lhs, rhs = jnp.zeros((8, 64), BF16).at[:, :2].set(jnp.array([256, 1], BF16)), jnp.ones((1, 64, 64), BF16)

    def f(lhs):
        keywords = {"bias": jnp.full((1, 64), -256.0), "implementation": implementation}
        return overlap.grouped_matmul(lhs, rhs, jnp.array([8]), **keywords)

    for out in (f(lhs), jax.vjp(f, lhs)[0]):
        np.testing.assert_array_equal(out, np.ones((8, 64)))


@pytest.mark.parametrize("operand", ["bias", "columns"])
def test_gradients_of_vectors_of_groups_are_summed_in_all_bits(operand):
    """A product sums them, which tensor cores otherwise round to TF32."""
    given = drawn(8)

    def loss(vector):
        call = functools.partial(overlap.grouped_matmul, given["lhs"], given["rhs"], given["sizes"],
                                 preferred_element_type=F32)  # fmt: skip
        return call(**{"bias" if operand == "bias" else "rhs_scale": vector}, implementation="xla").sum()

    program = jax.make_jaxpr(jax.grad(loss))(jnp.ones((GROUPS, N)))
    found = list(precisions_in(program.jaxpr))
    assert found and set(found) == {(jax.lax.Precision.HIGHEST,) * 2}


def precisions_in(program):
    """Yields the precision of each product of float32 matrices."""
    for equation in program.eqns:
        if equation.primitive.name == "dot_general" and equation.invars[0].aval.dtype == F32:
            yield equation.params["precision"]
        for part in jaxprs_in_params(equation.params):
            yield from precisions_in(part)


@pytest.mark.parametrize("looks", [jax.debug_nans, jax.debug_infs])
def test_where_jax_looks_for_nan_or_infinity_no_row_is_undefined(looks):
    """Neither in the result nor in the gradient, though the caller clears them."""
    given = drawn(9)

    def f(lhs):
        of_call = Arguments(lhs, given["rhs"], group_sizes=given["sizes"], implementation="fused")
        return call.run(GROUPED, dataclasses.replace(of_call, clears=(False, False)))

    with looks(True), overlap.emulation.emulate():
        out, pull = jax.vjp(f, given["lhs"])
        (d_lhs,) = pull(jnp.ones_like(out))
    for found in (out, d_lhs):
        found = np.asarray(found, np.float32)
        assert found[: sum(SIZES)].any() and not found[sum(SIZES) :].any()


def gated(gate, up):
    return jax.nn.silu(gate) * up


def two(given, implementation, **more):
    keywords = {"bias": given["bias"], "activation": gated, "implementation": implementation} | more
    return overlap.grouped_matmul(given["lhs"], given["rhs"], given["sizes"], **keywords)


@pytest.mark.parametrize("implementation", ["fused", "xla"])
def test_derivatives(implementation):
    """Of a gated product with biases: in reverse, forward and twice in reverse, under checkpoint and scan."""
    given = jax.tree.map(lambda x: x * 0.25 if x.dtype == BF16 else x, drawn(1, sides=2))
    moved = ("lhs", "rhs", "bias")

    def by_hand(parts):
        values = [plain(parts["lhs"], rhs, SIZES) for rhs in parts["rhs"]]
        out = gated(*(z + jnp.asarray(rows_of(np.ones((GROUPS, N)))) * jnp.repeat(  # Only rows of groups have a bias.
            jnp.concatenate([bias, jnp.zeros((1, N))]), jnp.asarray((*SIZES, M - sum(SIZES))), axis=0,
            total_repeat_length=M) for z, bias in zip(values, parts["bias"], strict=True)))  # fmt: skip
        return out.astype(F32)

    def ours(parts):
        def layer(carry, _):
            return carry, two({**given, **parts}, implementation, preferred_element_type=F32)

        return jax.lax.scan(jax.checkpoint(layer), 0, None, length=1)[1][0]

    parts = {name: given[name] for name in moved}

    def both(f):
        def loss(parts):
            return (f(parts) ** 2).mean()

        def twice(parts):
            return sum((x.astype(F32) ** 2).sum() for x in jax.tree.leaves(jax.grad(loss)(parts)))

        return f(parts), jax.grad(loss)(parts), jax.grad(twice)(parts), jax.jvp(f, (parts,), (parts,))[1]

    assert_close(jax.jit(lambda: both(ours))(), jax.jit(lambda: both(by_hand))(), 2e-2)


def products_in(program):
    """Yields the result's type and the number of pairs of each bare product, and the type of each addition."""
    for equation in program.eqns:
        result = equation.outvars[0].aval.str_short(short_dtypes=True)
        if equation.primitive.name == "overlap_operation":
            static = equation.params["static"]
            pairs = len(jax.tree.unflatten(static.operands, equation.invars).lefts)
            yield static.plan.operation.spec.name, result, pairs
        elif equation.primitive.name.startswith("add"):
            yield "addition", result, 0
        for part in jaxprs_in_params(equation.params):
            yield from products_in(part)


@EVERYWHERE
@pytest.mark.parametrize("transpose_rhs", [False, True])
def test_the_gradient_of_a_left_operand_of_several_products_is_one_product(transpose_rhs, implementation, gpu):
    """It is the sum of all pairs in float32, rounded once. Its rows behind all groups are zeros where the caller wants
    zeros there, though not in the result.
    """
    given = drawn(4, transpose_rhs=transpose_rhs, sides=2)
    how = {"transpose_rhs": transpose_rhs, "implementation": implementation}

    def loss(lhs, rhs, weights):
        of_call = Arguments(lhs, rhs, group_sizes=given["sizes"], activation=jnp.add, **how)
        out = call.run(GROUPED, dataclasses.replace(of_call, clears=(False, True)))
        return (jnp.where((jnp.arange(M) < sum(SIZES))[:, None], out, 0) * weights).sum()

    weights = jnp.asarray(np.random.default_rng(5).integers(-99, 100, (M, N)), BF16)
    gradient = jax.grad(loss, (0, 1))
    with emulating(gpu):
        d_lhs, _ = jax.jit(gradient)(given["lhs"], given["rhs"], weights)
        program = jax.make_jaxpr(gradient)(given["lhs"], given["rhs"], weights).jaxpr
    found = collections.Counter(products_in(program))
    counted = np.where((np.arange(M) < sum(SIZES))[:, None], np.asarray(weights, np.float32), 0)
    exact = sum(plain(counted, rhs, SIZES, not transpose_rhs) for rhs in given["rhs"])
    np.testing.assert_array_equal(d_lhs, exact.astype(BF16))
    ours = {key: count for key, count in found.items() if f"[{M},{K}]" in key[1]}
    assert ours == {("grouped_matmul", f"bf16[{M},{K}]", 2): 1}, found


@pytest.mark.parametrize("implementation", ["fused", "xla"])
def test_the_transpose_of_a_sum_of_products(implementation):
    """The sum is linear in each of its operands: its transpose with respect to them is the products again."""
    given = drawn(7, sides=2)
    call = functools.partial(overlap.grouped_matmul, implementation=implementation, activation=jnp.add)
    _, pull = jax.vjp(lambda lhs: call(lhs, given["rhs"], given["sizes"]), given["lhs"])
    (back,) = jax.linear_transpose(lambda g: pull(g)[0], jnp.zeros((M, N), BF16))(given["lhs"])
    exact = sum(plain(given["lhs"], rhs, SIZES) for rhs in given["rhs"])
    np.testing.assert_array_equal(back, exact.astype(BF16))


@pytest.mark.one_jax
def test_the_backward_pass_is_explained():
    given = drawn(6, sides=2)
    f = lambda lhs, rhs: two({**given, "lhs": lhs, "rhs": rhs}, "fused").astype(F32).sum()  # noqa: E731
    forward, *backward = overlap.explain(jax.grad(f, (0, 1)), given["lhs"], given["rhs"])
    assert forward.shapes.startswith(f"{GROUPS} groups")
    shapes = [f"to {M}x{K} of 2 pairs bfloat16", *[f"to {GROUPS}x{K}x{N} bfloat16"] * 2]
    assert sorted(x.shapes for x in backward) == sorted(shapes)


def test_in_shard_map_and_vmap():
    """Each device has groups of its own; weights that are the same on all devices get a summed gradient."""
    mesh, given = oracle.make_mesh(x=2), drawn(2)
    lhs = jnp.concatenate([given["lhs"], given["lhs"] * 2])
    sizes = jnp.concatenate([given["sizes"], given["sizes"]])

    def loss(implementation, lhs, rhs, sizes):
        out = overlap.grouped_matmul(lhs, rhs, sizes, implementation=implementation)
        return (out.astype(F32) ** 2).mean()[None]

    specs = dict(in_specs=(P("x"), P(), P("x")), out_specs=P("x"))
    results = {
        name: jax.jit(jax.grad(lambda *args, name=name: jax.shard_map(
            functools.partial(loss, name), mesh=mesh, **specs)(*args).sum(), (0, 1)))(lhs, given["rhs"], sizes)
        for name in ("fused", "xla")
    }  # fmt: skip
    assert_close(results["fused"], results["xla"])
    pairs = lhs.reshape(2, M, K), sizes.reshape(2, -1)
    mapped = jax.vmap(lambda x, s: overlap.grouped_matmul(x, given["rhs"], s, implementation="fused"))(*pairs)
    for out, x in zip(mapped, pairs[0], strict=True):
        np.testing.assert_array_equal(out, plain(x, given["rhs"], SIZES).astype(BF16))


def test_a_function_that_no_kernel_computes():
    given = drawn(3)
    softmax = lambda x: jax.nn.softmax(x, axis=-1)  # noqa: E731
    out = overlap.grouped_matmul(given["lhs"], given["rhs"], given["sizes"], activation=softmax)
    exact = np.array(jax.nn.softmax(plain(given["lhs"], given["rhs"], SIZES), axis=-1), np.float32)
    exact[sum(SIZES) :] = 0
    np.testing.assert_allclose(np.asarray(out, np.float32), exact, atol=4e-3)
    with pytest.raises(NotImplementedError, match="cannot take this `activation`"):
        overlap.grouped_matmul(given["lhs"], given["rhs"], given["sizes"], activation=softmax, implementation="fused")


@pytest.mark.one_jax
def test_scalars_of_float64_activations():
    """By XLA they may have any dtype, as in `matmul`, and have gradients."""
    with jax.enable_x64(True):
        given = (
            np.random.default_rng(9).standard_normal((M, K)),
            np.random.default_rng(10).standard_normal((GROUPS, K, N)),
        )

        def f(scalar, lhs, rhs):
            sizes = jnp.asarray(SIZES)
            return overlap.grouped_matmul(lhs, rhs, sizes, bias=jnp.ones((GROUPS, N)), activation=lambda y: y * scalar)

        exact = np.zeros((M, N))
        for end, size, matrix in zip(np.cumsum(SIZES), SIZES, given[1], strict=True):
            exact[end - size : end] = given[0][end - size : end] @ matrix + 1
        for scalar in (np.float32(0.5), np.int32(2), np.float64(0.3)):
            np.testing.assert_allclose(f(jnp.asarray(scalar), *given), exact * scalar, rtol=1e-12, atol=1e-12)
        gradient = jax.grad(lambda scalar: f(scalar, *given).sum())(jnp.float32(0.5))
        np.testing.assert_allclose(gradient, exact.sum(), rtol=1e-6)


@pytest.mark.one_jax
@pytest.mark.parametrize(
    ("error", "changed", "words"),
    [
        (ValueError, {"lhs": jnp.ones((2, M, K), BF16)}, "`lhs` must have 2 dimensions, got 3"),
        (ValueError, {"rhs": jnp.ones((K, N), BF16)}, "`rhs` must have 3 dimensions"),
        (ValueError, {"rhs": jnp.ones((GROUPS, N, K), BF16)}, r"got k=80 .* and k=136 .*transpose_rhs"),
        (ValueError, {"rhs": jnp.ones((3, K, N), BF16)}, "each of the 4 groups, got 3"),
        (ValueError, {"rhs": jnp.ones((GROUPS, K, N), jnp.float16)}, "got bfloat16 and float16"),
        (ValueError, {"rhs": [jnp.ones((GROUPS, K, N), BF16)] * 2}, "must be one array, got a list of 2: make"),
        (ValueError, {"rhs": []}, "empty list"),
        (ValueError, {"group_sizes": jnp.ones(GROUPS)}, r"`group_sizes` must be integers of shape \(groups,\)"),
        (ValueError, {"activation": lambda gate, up: gate * up},
         r"`activation` .* takes 2: split right operands .*jnp\.split\(weights, 2, axis=-1\), and pass the list"),
        (ValueError, {"bias": jnp.ones(N)}, r"`bias` must have shape \(4, 136\).* got \(136,\)"),
        (ValueError, {"lhs_scale": jnp.ones(M)}, r"`lhs_scale` must be a scalar or \(120, 1\), one value per row"),
        (ValueError, {"rhs_scale": jnp.ones((GROUPS, 1))}, r"`rhs_scale` must be a scalar or of shape \(4, 136\)"),
        (ValueError, {"config": Config(stream_k=2), "implementation": "fused"}, "got 1, 2 and 1"),
        (ValueError, {"config": HOPPER.replace(stages=40), "implementation": "fused"}, "bytes of shared memory"),
        # Beside the mainloop's shared memory lies a box of zeros.
        (ValueError, {"config": Config(stages=7, tile_n=128), "implementation": "fused", "preferred_element_type": F32},
         "needs 264312 bytes of shared memory"),
        (NotImplementedError, {"rhs": jnp.ones((GROUPS, K, 130), BF16), "implementation": "fused"}, "multiples of 16"),
        (NotImplementedError, {"lhs": jnp.ones((M, K)), "rhs": jnp.ones((GROUPS, K, N)), "implementation": "fused"},
         "float32 operands"),
        (NotImplementedError, {"lhs": jnp.ones((M, K), jnp.float8_e5m2), "implementation": "fused",
                               "rhs": jnp.ones((GROUPS, K, N), jnp.float8_e5m2)}, r"as \[groups, n, k\] only.*pass"),
    ],
)  # fmt: skip
def test_refusals(error, changed, words):
    given = {"lhs": jnp.ones((M, K), BF16), "rhs": jnp.ones((GROUPS, K, N), BF16), "group_sizes": jnp.asarray(SIZES)}
    given |= changed
    with pytest.raises(error, match=words):
        overlap.grouped_matmul(given.pop("lhs"), given.pop("rhs"), given.pop("group_sizes"), **given)


# ---- Global arrays on a mesh with Explicit axes ----------------------------------------------------------------------


def put(mesh, x, *spec):
    return jax.device_put(x, jax.NamedSharding(mesh, P(*spec)))


def explicit_mesh(devices):
    return jax.make_mesh((devices,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))


@pytest.mark.parametrize("implementation", ["fused", "xla"])
@pytest.mark.parametrize(("devices", "around"), [(1, jax.jit), (2, jax.jit), (2, lambda f: f)], ids=["1", "2", "eager"])
def test_explicit_axes(devices, around, implementation):
    """Columns may be sharded: the result's then are, too. Numbers and gradients are those of NumPy in float32."""
    mesh, width, end, chance = explicit_mesh(devices), 128, sum(SIZES), np.random.default_rng(0)
    draw = lambda *shape: chance.integers(-1, 2, shape).astype(np.float32)  # noqa: E731
    lhs, rhs, bias, g = draw(M, K), draw(GROUPS, K, width), draw(GROUPS, width), draw(M, width)
    columns = 2.0 ** draw(GROUPS, width)
    each = lambda vector: np.repeat(vector, SIZES, axis=0)  # noqa: E731  (the vector of each row's group)
    group = np.repeat(np.arange(GROUPS), SIZES)
    plain, d_product = np.einsum("mk,mkn->mn", lhs[:end], rhs[group]), g[:end] * each(columns)
    behind = ((0, M - end), (0, 0))
    exact = np.pad(plain * each(columns) + each(bias), behind)
    of_groups = lambda rows: np.stack([rows[group == e].sum(0) for e in range(GROUPS)])  # noqa: E731
    gradients = {
        "lhs": np.pad(np.einsum("mn,mkn->mk", d_product, rhs[group]), behind),
        "rhs": of_groups(lhs[:end, :, None] * d_product[:, None]),
        "bias": of_groups(g[:end]), "columns": of_groups(g[:end] * plain),
    }  # fmt: skip

    def loss(given, g):
        out = overlap.grouped_matmul(
            given["lhs"], given["rhs"], jnp.asarray(SIZES), bias=given["bias"], rhs_scale=given["columns"],
            preferred_element_type=F32, implementation=implementation,
        )  # fmt: skip
        return (out * g).sum(), out

    lies = {"lhs": (), "rhs": (None, None, "x"), "bias": (None, "x"), "columns": ()}
    cases = ({}, "x"), ({"rhs": ()}, "x"), ({"rhs": (), "bias": ()}, None)
    for changed, of_out in cases if around is jax.jit else cases[:1]:
        specs = lies | changed
        given = {"lhs": lhs.astype(BF16), "rhs": rhs.astype(BF16), "bias": bias, "columns": columns}
        given = {name: put(mesh, x, *specs[name]) for name, x in given.items()}
        with jax.set_mesh(mesh):
            (_, out), found = around(jax.value_and_grad(loss, has_aux=True))(given, put(mesh, g, None, of_out))
        np.testing.assert_array_equal(out, exact)
        assert jax.typeof(out).sharding.spec == P(None, of_out)
        for name, x in found.items():
            np.testing.assert_array_equal(x.astype(F32), gradients[name], err_msg=name)
            assert jax.typeof(x).sharding == jax.typeof(given[name]).sharding


@pytest.mark.parametrize("implementation", ["fused", "xla"])
def test_several_right_operands_along_explicit_axes(implementation):
    """Also where another axis is manual; and `explain` shows a device's part."""
    mesh, ones = jax.make_mesh((2, 2), ("x", "y")), jnp.ones((GROUPS, K, 128), BF16)
    lhs, rhs = put(mesh, jnp.ones((M, K), BF16), None), put(mesh, ones, None, None, "y")
    sizes, biases = put(mesh, jnp.asarray(SIZES)), [put(mesh, jnp.ones((GROUPS, 128)), None, "y"), None]
    gated = functools.partial(
        overlap.grouped_matmul, bias=biases, activation=lambda gate, up: gate - 2 * up, implementation=implementation
    )
    expected = np.where(np.arange(M) < sum(SIZES), 1 - K, 0)[:, None] + np.zeros((M, 128))
    np.testing.assert_array_equal(gated(lhs, [rhs, rhs], sizes).astype(F32), expected)
    assert [x.shapes for x in overlap.explain(gated, lhs, [rhs, rhs], sizes)] == ["4 groups, 120x64+64x80 bfloat16"]

    layer = functools.partial(overlap.grouped_matmul, implementation=implementation)
    # Each device along "x" has rows of its own, here the same.
    both = jax.shard_map(layer, mesh=mesh, in_specs=(P("x"), P(), P()), out_specs=P("x"), axis_names={"x"})
    with jax.set_mesh(mesh):
        out, pull = jax.vjp(jax.jit(both), put(mesh, jnp.ones((2 * M, K), BF16), "x"), rhs, sizes)
        d_lhs, *_ = pull(jnp.ones_like(out))
    assert jax.typeof(out).sharding.spec == P("x", "y")
    counted = np.tile(np.arange(M) < sum(SIZES), 2)[:, None]
    np.testing.assert_array_equal(out.astype(F32), counted * np.full((1, 128), K))
    np.testing.assert_array_equal(d_lhs.astype(F32), counted * np.full((1, K), 128))


@pytest.mark.one_jax
def test_what_would_communicate_along_explicit_axes():
    """XLA cannot shard the product. Inside `shard_map` it runs."""
    mesh = explicit_mesh(2)
    lhs, rhs, sizes = jnp.ones((16, 64), BF16), jnp.ones((2, 64, 64), BF16), jnp.array([3, 5])
    refused = pytest.raises(NotImplementedError, match=r"inside jax\.shard_map, .* on \{'x': 2\} outside of it: wrap")
    whole = put(mesh, lhs)
    for implementation in ("fused", "xla", None):
        call = functools.partial(overlap.grouped_matmul, implementation=implementation)
        for operands in (
            (put(mesh, lhs, "x"), rhs, sizes), (put(mesh, lhs, None, "x"), rhs, sizes),
            (lhs, put(mesh, rhs, "x"), sizes), (lhs, put(mesh, rhs, None, "x"), sizes),
            (lhs, rhs, put(mesh, sizes, "x")),
        ):  # fmt: skip
            with refused:
                jax.eval_shape(call, *operands)
        with refused:
            call(whole, rhs, sizes, activation=jax.nn.softmax)  # It is not known to be that of each part.
        with refused:
            jax.jit(jax.vmap(call, (0, None, None)))(put(mesh, lhs[None].repeat(2, 0), "x"), rhs, sizes)
    routing = jax.device_put(overlap.route(jnp.zeros((16, 1), jnp.int32), 2, None), jax.NamedSharding(mesh, P()))
    with pytest.raises(NotImplementedError, match=r"^`all_gather_lhs_grouped_matmul` on a mesh with Explicit axes"):
        overlap.all_gather_lhs_grouped_matmul(lhs, rhs, routing, None)
    with jax.set_mesh(mesh):
        inside = jax.shard_map(
            lambda x: overlap.grouped_matmul(x, rhs, sizes), in_specs=jax.P("x"), out_specs=jax.P("x")
        )
        assert np.asarray(inside(put(mesh, lhs, "x")))[:3].tolist() == [[64] * 64] * 3


@pytest.mark.one_jax
@pytest.mark.parametrize("implementation", ["fused", "xla"])
def test_explicit_axes_of_one_device_cut_nothing(implementation):
    """Whatever they name. Without operands on a mesh, that of `jax.set_mesh` counts."""
    mesh = explicit_mesh(1)
    lhs, rhs, sizes = jnp.ones((16, 64), BF16), jnp.ones((2, 64, 64), BF16), jnp.array([3, 5])
    call = functools.partial(overlap.grouped_matmul, implementation=implementation)
    for x, w in ((("x",), ()), ((None, "x"), (None, "x")), ((), ("x",))):
        out = call(put(mesh, lhs, *x), put(mesh, rhs, *w), sizes)
        assert out[0, 0] == 64 and jax.typeof(out).sharding.spec == P("x" if x == ("x",) else None, None)
    with jax.set_mesh(mesh):
        assert call(lhs, rhs, sizes)[0, 0] == 64


@pytest.mark.one_jax
def test_the_choice(monkeypatch):
    """On Hopper the kernel, elsewhere XLA, with the reason; on Blackwell the kernel if the caller asks for it."""
    types = jax.ShapeDtypeStruct((4096, 2048), BF16), jax.ShapeDtypeStruct((16, 2048, 1536), BF16)
    sizes = jax.ShapeDtypeStruct((16,), jnp.int32)
    answers = {}
    for kind in ("NVIDIA H200", "NVIDIA B200", "NVIDIA A100"):
        monkeypatch.setattr(dispatch, "target", lambda mesh=None, kind=kind: Target("gpu", kind, 132))
        (answers[kind],) = overlap.explain(overlap.grouped_matmul, *types, sizes)
    assert answers["NVIDIA H200"].implementation == "fused"
    assert answers["NVIDIA H200"].config.tile_m * answers["NVIDIA H200"].config.tile_n >= 128 * 128
    assert {answers[kind].implementation for kind in ("NVIDIA B200", "NVIDIA A100")} == {"xla"}
    assert "not measured" in answers["NVIDIA B200"].reason and "Hopper" in answers["NVIDIA A100"].reason
    monkeypatch.setattr(dispatch, "target", lambda mesh=None: Target("gpu", "NVIDIA B200", 148))
    (asked,) = overlap.explain(functools.partial(overlap.grouped_matmul, implementation="fused"), *types, sizes)
    assert asked.implementation == "fused" and asked.config.tile_m == 128 and asked.config.cluster == 1
    # A caller who gives a config wants the kernel.
    (given,) = overlap.explain(functools.partial(overlap.grouped_matmul, config=asked.config), *types, sizes)
    assert (given.implementation, given.source) == ("fused", "given")


def test_more_than_two_right_operands_are_left_to_xla():
    given = jnp.ones((M, K), BF16), [jnp.ones((GROUPS, K, N), BF16)] * 3, jnp.asarray(SIZES)
    combined = functools.partial(overlap.grouped_matmul, activation=lambda a, b, c: a * b + c)
    with pytest.raises(NotImplementedError, match="at most two right operands, got 3: make several calls"):
        combined(*given, implementation="fused")
    with overlap.emulation.emulate():
        assert combined(*given)[0, 0] == K * K + K
