"""`grouped_matmul`: sizes, rows of no group, roundings, and the backward pass. FORMS has what all operations have."""

from __future__ import annotations

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

import overlap
from overlap.frame import call as calls
from overlap.frame.signatures import Arguments
from overlap.kernels.operations import GROUPED
from overlap.kernels.target import emulating
from tests.ops.contract import BF16, F32, GroupedCall

SIZES, M, K, N = (70, 0, 37, 1), 120, 80, 136
COUNTED = (np.arange(M) < sum(SIZES))[:, None]
ONE = GroupedCall("grouped_matmul", M, N, K, None, groups=len(SIZES))
TWO = ONE.but(widths=(N, N))
EVERYWHERE = pytest.mark.parametrize(
    ("implementation", "gpu"), [("fused", "hopper"), ("fused", "blackwell"), ("xla", "hopper")]
)
EITHER = pytest.mark.parametrize("implementation", ["fused", "xla"])


def drawn(call, seed):
    """Returns `lhs` and `rhs` of a call whose groups have `SIZES`."""
    arrays = jax.tree.map(jnp.asarray, call.arrays(1, seed))
    return arrays["lhs"], arrays["rhs"]


def of_sizes(lhs, rhs, **keywords):
    return overlap.grouped_matmul(lhs, rhs, jnp.asarray(SIZES), **keywords)


FEW = [(40, 8, 64, (40,), False), (65, 64, 64, (0, 65), False), (70, 64, 64, (13, 0, 20), False),
       (9, 200, 64, (9,), False), (40, 64, 12, (10, 25), True)]  # fmt: skip


@pytest.mark.parametrize(
    ("implementation", "gpu", "m", "k", "n", "sizes", "turned"),
    [pytest.param(*how, *case, marks=[] if how == ("fused", "hopper") or case in FEW[1:3] else pytest.mark.slow)
     for how in (("fused", "hopper"), ("fused", "blackwell"), ("xla", "hopper")) for case in FEW],
)  # fmt: skip
def test_gradients_of_few_features_and_rows_of_no_group(m, k, n, sizes, turned, implementation, gpu):
    """With k ≤ 64 one warpgroup has all rows of the weights' gradient. Without an epilogue nothing else clears rows.

    Rows of 12 elements are a multiple of 16 bytes in f32, as which they are stored, but not in bf16: XLA runs.
    """
    lhs, rhs = jnp.ones((m, k), BF16), jnp.ones((len(sizes), n, k) if turned else (len(sizes), k, n), BF16)
    how = {"transpose_rhs": True, "preferred_element_type": F32} if turned else {}
    call = functools.partial(overlap.grouped_matmul, group_sizes=jnp.asarray(sizes), **how)
    with emulating(gpu):
        out, pull = jax.vjp(functools.partial(call, implementation=implementation), lhs, rhs)
        d_lhs, d_rhs = pull(jnp.ones_like(out))
    counted = (np.arange(m) < sum(sizes))[:, None]
    np.testing.assert_array_equal(out, counted * np.full((m, n), k))
    np.testing.assert_array_equal(d_lhs, counted * np.full((m, k), n))
    np.testing.assert_array_equal(d_rhs, np.asarray(sizes)[:, None, None] + np.zeros(rhs.shape))


@pytest.mark.parametrize("sizes", [(2**31 - 1, 1), (2**30,) * 3, (5, 2**31 - 1, 5), (-5, 10)], ids=str)
def test_sizes_that_no_group_can_have(sizes):
    """They end at the last row, and negative ones count as zero."""
    lhs, rhs = jnp.ones((30, 64), BF16), jnp.ones((len(sizes), 64, 64), BF16)
    for implementation in ("fused", "xla"):
        out = overlap.grouped_matmul(lhs, rhs, jnp.asarray(sizes), implementation=implementation)
        assert (np.asarray(out)[:, 0] != 0).sum() == (10 if sizes[0] < 0 else 30)


@EITHER
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


@EITHER
def test_the_product_under_a_derivative_is_not_rounded_before_its_epilogue(implementation):
    """257 - 256 is 1, and 257 in bfloat16 is 256."""
    lhs, rhs = jnp.zeros((8, 64), BF16).at[:, :2].set(jnp.array([256, 1], BF16)), jnp.ones((1, 64, 64), BF16)
    keywords = {"bias": jnp.full((1, 64), -256.0), "implementation": implementation}
    f = lambda lhs: overlap.grouped_matmul(lhs, rhs, jnp.array([8]), **keywords)  # noqa: E731
    for out in (f(lhs), jax.vjp(f, lhs)[0]):
        np.testing.assert_array_equal(out, np.ones((8, 64)))


def equations_in(program):
    for equation in program.eqns:
        yield equation
        for part in jaxprs_in_params(equation.params):
            yield from equations_in(part)


@pytest.mark.parametrize("operand", ["bias", "rhs_scale"])
def test_gradients_of_vectors_of_groups_are_summed_in_all_bits(operand):
    """A product sums them, which tensor cores otherwise round to TF32."""
    call = functools.partial(of_sizes, *drawn(ONE, 8), preferred_element_type=F32, implementation="xla")
    program = jax.make_jaxpr(jax.grad(lambda vector: call(**{operand: vector}).sum()))(jnp.ones((len(SIZES), N)))
    products = [x for x in equations_in(program.jaxpr) if x.primitive.name == "dot_general"]
    found = {x.params["precision"] for x in products if x.invars[0].aval.dtype == F32}
    assert found == {(jax.lax.Precision.HIGHEST,) * 2}


@pytest.mark.parametrize("looks", [jax.debug_nans, jax.debug_infs])
def test_where_jax_looks_for_nan_or_infinity_no_row_is_undefined(looks):
    """Neither in the result nor in the gradient, though the caller clears them."""
    lhs, rhs = drawn(ONE, 9)

    def f(lhs):
        of_call = Arguments(lhs, rhs, group_sizes=jnp.asarray(SIZES), implementation="fused", clears=(False, False))
        return calls.run(GROUPED, of_call)

    with looks(True), overlap.emulation.emulate():
        out, pull = jax.vjp(f, lhs)
        (d_lhs,) = pull(jnp.ones_like(out))
    for found in (out, d_lhs):
        found = np.asarray(found, np.float32)
        assert found[: sum(SIZES)].any() and not found[sum(SIZES) :].any()


@EVERYWHERE
@pytest.mark.parametrize("layout", ["nn", "nt"])
def test_the_gradient_of_a_left_operand_of_several_products_is_one_product(layout, implementation, gpu):
    """It is the sum of all pairs in float32, rounded once. Its rows behind all groups are zeros where the caller wants
    zeros there, though not in the result.
    """
    lhs, rhs = drawn(TWO.but(layout=layout), 4)
    of_call = Arguments(
        lhs, rhs, group_sizes=jnp.asarray(SIZES), activation=jnp.add, clears=(False, True),
        transpose_rhs=layout == "nt", implementation=implementation,
    )  # fmt: skip

    def loss(lhs, rhs, weights):
        out = calls.run(GROUPED, dataclasses.replace(of_call, lhs=lhs, rhs=rhs))
        return (jnp.where(COUNTED, out, 0) * weights).sum()

    given = lhs, rhs, jnp.asarray(np.random.default_rng(5).integers(-99, 100, (M, N)), BF16)
    gradient = jax.grad(loss, (0, 1))
    with emulating(gpu):
        d_lhs, _ = jax.jit(gradient)(*given)
        program = jax.make_jaxpr(gradient)(*given).jaxpr
    turned = ONE.but(n=K, k=N, layout="nt" if layout == "nn" else "nn", out=F32)
    of_each = [turned.expected({"lhs": given[2], "rhs": side, "sizes": np.array(SIZES)}, 1)[0] for side in rhs]
    np.testing.assert_array_equal(d_lhs, sum(of_each).astype(BF16))
    found = collections.Counter()
    for equation in equations_in(program):
        name, result = equation.primitive.name, equation.outvars[0].aval
        if result.shape == (M, K) and (name.startswith("add") or name == "overlap_operation"):
            static = equation.params.get("static")
            pairs = static and len(jax.tree.unflatten(static.operands, equation.invars).lefts)
            found[name, result.dtype.name, pairs] += 1
    assert found == {("overlap_operation", "bfloat16", 2): 1}


@pytest.mark.one_jax
def test_the_backward_pass_is_explained():
    def loss(lhs, rhs):
        out = of_sizes(lhs, rhs, activation=lambda gate, up: jax.nn.silu(gate) * up, implementation="fused")
        return out.astype(F32).sum()

    groups = len(SIZES)
    forward, *backward = overlap.explain(jax.grad(loss, (0, 1)), *drawn(TWO, 6))
    assert forward.shapes.startswith(f"{groups} groups")
    shapes = [f"to {M}x{K} of 2 pairs bfloat16", *[f"to {groups}x{K}x{N} bfloat16"] * 2]
    assert sorted(x.shapes for x in backward) == sorted(shapes)


def test_a_function_that_no_kernel_computes():
    call, softmax = ONE.but(activation=jax.nn.softmax), functools.partial(jax.nn.softmax, axis=-1)
    arrays = call.arrays(1, 3) | {"sizes": np.float32(SIZES)}
    out = of_sizes(jnp.asarray(arrays["lhs"]), jnp.asarray(arrays["rhs"]), activation=softmax)
    np.testing.assert_allclose(np.asarray(out, np.float32), call.plain(arrays, F32), atol=4e-3)


@pytest.mark.one_jax
def test_scalars_of_float64_activations():
    """By XLA they may have any dtype, as in `matmul`, and have gradients."""
    with jax.enable_x64(True):
        chance = np.random.default_rng(9)
        lhs, rhs = chance.standard_normal((M, K)), chance.standard_normal((len(SIZES), K, N))
        bias = jnp.ones((len(SIZES), N))
        f = lambda scalar: of_sizes(lhs, rhs, bias=bias, activation=lambda y: y * scalar)  # noqa: E731
        exact = np.zeros((M, N))
        for end, size, matrix in zip(np.cumsum(SIZES), SIZES, rhs, strict=True):
            exact[end - size : end] = lhs[end - size : end] @ matrix + 1
        for scalar in (np.float32(0.5), np.int32(2), np.float64(0.3)):
            np.testing.assert_allclose(f(jnp.asarray(scalar)), exact * scalar, rtol=1e-12, atol=1e-12)
        gradient = jax.grad(lambda scalar: f(scalar).sum())(jnp.float32(0.5))
        np.testing.assert_allclose(gradient, exact.sum(), rtol=1e-6)
