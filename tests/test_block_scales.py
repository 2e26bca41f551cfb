"""Calls with block scales (mxfp8): exact with XLA in all operations, and through all of the frame.

tests/test_block_scales_kernel.py tests what the emulated kernel does with block scales.
"""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import overlap
from overlap.emulation import emulate
from overlap.kernels.target import emulating
from tests import oracle
from tests.block_scale_cases import BLOCK, E4M3, E5M2, E8M0, F32, Product
from tests.explained import answer

# --- By XLA --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("left", "right"), list(itertools.product(["mk", "km"], ["nk", "kn"])))
@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
def test_by_xla(left, right, batch):
    product = Product(5, 32, 48, 96, left=left, right=right, batch=batch, both=len(batch) == 2)
    np.testing.assert_array_equal(product(), product.exact)
    assert product(preferred_element_type=None).dtype == jnp.bfloat16
    types = jax.tree.map(jax.typeof, (product.lhs, product.rhs, product.scales))
    lhs, rhs, scales = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), types)
    with emulating("blackwell"):
        explained = answer(overlap.matmul, lhs, rhs, implementation="fused", **product.transposes, **scales)
    assert explained.implementation == "fused" and explained.config.tile_n <= 128


@functools.cache
def mesh(devices):
    return oracle.make_mesh(x=devices)


COLLECTIVES = [  # The operation, its keywords, specs of both operands (k is the second dimension), the result's spec.
    (overlap.all_gather_lhs_matmul, {}, P("x", None), P("x", None), P(None, "x")),
    (overlap.all_gather_rhs_matmul, dict(dimension=0), P("x", None), P("x", None), P("x", None)),
    (overlap.all_gather_rhs_matmul, dict(dimension=1), P("x", None), P(None, "x"), P("x", None)),
    (overlap.matmul_reduce_scatter, dict(dimension=0), P(None, "x"), P(None, "x"), P("x", None)),
    (overlap.matmul_reduce_scatter, dict(dimension=1), P(None, "x"), P(None, "x"), P(None, "x")),
    (overlap.matmul_all_reduce, {}, P(None, "x"), P(None, "x"), P()),
]


@pytest.mark.parametrize(("devices", "check_vma"), [(2, True), (4, False)])
@pytest.mark.parametrize(("operation", "keywords", "lhs", "rhs", "out"), COLLECTIVES)
def test_collectives_by_xla(operation, keywords, lhs, rhs, out, devices, check_vma):
    product = Product(6, 32, 64, 256)
    specs = dict(lhs=lhs, rhs=rhs, lhs_scale=lhs, rhs_scale=rhs)

    def call(arrays, **more):
        arrays = dict(arrays)
        left, right = arrays.pop("lhs"), arrays.pop("rhs")
        return operation(left, right, "x", transpose_rhs=True, **arrays, **F32, **keywords, **more)

    def mapped(**more):
        one = functools.partial(call, **more)
        return jax.jit(jax.shard_map(one, mesh=mesh(devices), in_specs=(specs,), out_specs=out, check_vma=check_vma))

    arrays = dict(lhs=product.lhs, rhs=product.rhs, **product.scales)
    np.testing.assert_array_equal(mapped()(arrays), product.exact)
    # The 8-bit values and their scales travel, not the numbers that they represent.
    text = mapped().lower(arrays).as_text()
    gathers = re.findall(r'"stablehlo.all_gather"[^\n]*: \(tensor<[^>]*x(\w+)>', text)
    assert set(gathers) <= {"ui8", "f8E4M3FN", "f8E5M2"} and len(gathers) in (0, 2)
    if operation is not overlap.all_gather_lhs_matmul:
        refused = f"`{operation.__name__}` takes no `lhs_scale` and .* of blocks yet"
        with pytest.raises(NotImplementedError, match=refused):
            mapped(implementation="fused")(arrays)


def test_several_right_operands_and_the_gathered_one():
    products = [Product(7, 32, n, 64) for n in (32, 48)]
    first = products[0]  # The same left operand, since it is drawn first.

    def call(lhs, rhs, lhs_scale, rhs_scale):
        return overlap.all_gather_lhs_matmul(
            lhs, rhs, "x", lhs_scale=lhs_scale, rhs_scale=rhs_scale, transpose_rhs=True, return_gathered=True, **F32
        )

    mapped = jax.shard_map(call, mesh=mesh(2), in_specs=P("x", None), out_specs=(P(None, "x"), P()), check_vma=False)
    rhs, rhs_scale = [x.rhs for x in products], [x.rhs_scale for x in products]
    outs, gathered = jax.jit(mapped)(first.lhs, rhs, first.lhs_scale, rhs_scale)
    for out, product in zip(outs, products, strict=True):
        np.testing.assert_array_equal(out, product.exact)
    assert gathered.dtype == E4M3 and (gathered == first.lhs).all()


def by_either(function):
    """Calls `function(implementation)` with XLA and with the emulated kernel, and compares the results."""
    expected = function("xla")
    with emulating("blackwell"), emulate(cores=2):
        jax.tree.map(np.testing.assert_array_equal, function("fused"), expected)
    return expected


@pytest.mark.parametrize(
    "mapped", ["lhs lhs_scale", "lhs", "lhs_scale", "rhs rhs_scale", "lhs lhs_scale rhs_scale bias"]
)
def test_vmap(mapped):
    elements = [Product(seed, 40, 64, 96) for seed in (8, 9)]
    arrays = {name: getattr(elements[0], name) for name in ("lhs", "rhs", "lhs_scale", "rhs_scale")}
    arrays |= {"bias": jnp.arange(64.0)}
    for name in mapped.split():
        arrays[name] = jnp.stack([getattr(x, name, i * jnp.arange(64.0)) for i, x in enumerate(elements)])
    axes = {name: 0 if name in mapped.split() else None for name in arrays}

    def of_one(arrays, implementation):
        keywords = dict(implementation=implementation, transpose_rhs=True, **F32)
        return overlap.matmul(**arrays, **keywords)

    out = by_either(lambda how: jax.vmap(functools.partial(of_one, implementation=how), in_axes=(axes,))(arrays))
    ones = [{name: x if axes[name] is None else x[i] for name, x in arrays.items()} for i in range(2)]
    np.testing.assert_array_equal(out, jnp.stack([of_one(one, "xla") for one in ones]))


def test_gradients():
    product = Product(10, 24, 48, 96)
    weights = jnp.asarray(np.random.default_rng(11).integers(-1, 2, (24, 48)), jnp.float32).at[:, 4:].set(0)

    def loss(lhs, rhs, lhs_scale, how):
        out = overlap.matmul(
            lhs, rhs, lhs_scale=lhs_scale, rhs_scale=product.rhs_scale, implementation=how, **product.transposes, **F32
        )
        return (out * weights).sum()

    operands = product.lhs, product.rhs, product.lhs_scale
    d_lhs, d_rhs = by_either(lambda how: jax.grad(loss, (0, 1))(*operands, how))
    assert (d_lhs.dtype, d_rhs.dtype) == (E4M3, E5M2)
    wide = lambda x, scale: x.astype(np.float32) * np.repeat(np.asarray(scale, np.float32), BLOCK, -1)  # noqa: E731
    right, of_left = wide(np.asarray(product.rhs), product.rhs_scale), wide(np.ones((24, 96)), product.lhs_scale)
    exact = (np.asarray(weights) @ right * of_left).astype(E4M3)
    np.testing.assert_array_equal(np.asarray(d_lhs, np.float32), exact.astype(np.float32))
    by_either(lambda how: jax.jvp(lambda x: loss(x, *operands[1:], how), operands[:1], operands[:1]))
    for how in ("xla", "fused"):
        with emulating("blackwell"), emulate(), pytest.raises(TypeError, match="have no derivative: apply"):
            jax.grad(loss, 2)(*operands, how)


@pytest.mark.parametrize(("lhs", "rhs", "out"), [(P("x"), P(), P("x", None)), (P(), P("y"), P(None, "y"))])
def test_sharded_operands(lhs, rhs, out):
    explicit = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    product = Product(12, 48, 96, 64)
    put = lambda x, spec: jax.device_put(x, jax.NamedSharding(explicit, spec))  # noqa: E731
    product.lhs, product.lhs_scale = put(product.lhs, lhs), put(product.lhs_scale, lhs)
    product.rhs, product.rhs_scale = put(product.rhs, rhs), put(product.rhs_scale, rhs)

    def run(how):
        with jax.set_mesh(explicit):
            result = product(how)
        assert result.sharding.spec == out or how == "xla"
        return result

    np.testing.assert_array_equal(by_either(run), product.exact)


# --- Wrong calls --------------------------------------------------------------------------------------


def wrong(**changes):
    """Returns a call of a product of 24 x 40 x 96 with some arguments changed."""
    product = Product(13, 24, 40, changes.pop("k", 96) // 32 * 32)
    arrays = dict(lhs=product.lhs, rhs=product.rhs, **product.scales) | changes
    return lambda: overlap.matmul(**arrays, transpose_rhs=True)


def ones(*shape, dtype=E8M0):
    return jnp.ones(shape, dtype)


WRONG = [
    (wrong(lhs_scale=ones(24, 2)), r"`lhs_scale` of .* must have shape \(24, 3\), .* got \(24, 2\): reshape it"),
    (wrong(rhs_scale=ones(3, 40)), r"`rhs_scale` of .* must have shape \(40, 3\), .* got \(3, 40\)"),
    (wrong(lhs_scale=ones()), r"must have shape \(24, 3\), .* got \(\): .* cast it to float32 if it scales rows"),
    (
        wrong(lhs_scale=ones(24, 3, dtype=jnp.float32)),
        r"`lhs_scale` of shape \(24, 3\) .* must have dtype float8_e8m0fnu",
    ),
    (wrong(rhs_scale=ones(40, 3, dtype=jnp.float32)), r"`rhs_scale` of shape \(40, 3\) .* got float32: cast it"),
    (wrong(rhs_scale=None), r"must both be of blocks or neither, got nothing as `rhs_scale`: .* shape \(40, 3\), ones"),
    (wrong(lhs_scale=2.0), r"must both be of blocks or neither, got 2.0 as `lhs_scale`"),
    (
        wrong(lhs_scale=ones(24, 1, dtype=jnp.float32)),
        r"got ArrayImpl of shape \(24, 1\) and dtype float32 as `lhs_scale`",
    ),
    (
        wrong(lhs=ones(24, 100, dtype=E4M3), rhs=ones(40, 100, dtype=E4M3)),
        r"k must be a multiple of 32, got k=100 in `lhs` \(24, 100\): pad both operands with zeros to k=128",
    ),
    (
        wrong(lhs=ones(24, 96, dtype=jnp.bfloat16), rhs=ones(40, 96, dtype=jnp.bfloat16)),
        "scales blocks of float8_e4m3fn or float8_e5m2, got `lhs` of dtype bfloat16: cast one of them",
    ),
    (wrong(rhs_scale=[ones(40, 3)]), "`rhs_scale`"),
    (
        wrong(lhs_scale=ones(24, 6, dtype=E4M3)),
        r"\(24, 6\) scales blocks of 16 .* \(nvfp4\), and only blocks of 32 with",
    ),
    (
        wrong(lhs=ones(24, 96, dtype=jnp.float4_e2m1fn), rhs=ones(40, 96, dtype=jnp.float4_e2m1fn)),
        "scales blocks of float8_e4m3fn or float8_e5m2, got `lhs` of dtype float4_e2m1fn: cast one of them",
    ),
]


@pytest.mark.parametrize(("call", "message"), WRONG, ids=[message[:40] for _, message in WRONG])
def test_wrong_calls(call, message):
    with pytest.raises(ValueError, match=message):
        call()
