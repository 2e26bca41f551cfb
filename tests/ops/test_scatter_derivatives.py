"""Products summed over devices: both modes of derivatives and `vmap`, against plain JAX; kernels are emulated.

The plain form of `matmul_all_reduce` is `lax.psum` of a product.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from overlap.choice import crossover, dispatch
from overlap.choice.problem import Problem
from overlap.emulation import emulate
from overlap.kernels.target import Target
from tests.ops.product_cases import normal
from tests.ops.scatter_cases import (
    BF16,
    EVERY,
    EVERYWHERE,
    F16,
    F32,
    SMALL,
    WAYS,
    Layer,
    alternating,
    assert_close,
    assert_exact,
    struct,
)
from tests.oracle import make_mesh

H200 = Target("gpu", "NVIDIA H200", 132)


# --- Derivatives ------------------------------------------------------------------------------------------------------


def loss(f):
    return lambda *x: jnp.sin(f(*x).astype(F32)).sum()


def squares(tree):
    return sum((x.astype(F32) ** 2).sum() for x in jax.tree.leaves(tree))


def direction(arrays):
    return jax.tree.map(lambda x: jnp.cos(3 * x), arrays)


TRANSFORMED = {
    "vjp": lambda f, x: jax.grad(loss(f))(x),
    "jvp": lambda f, x: jax.jvp(f, (x,), (direction(x),)),
    "jvp of grad": lambda f, x: jax.jvp(jax.grad(loss(f)), (x,), (direction(x),)),
    "grad of grad": lambda f, x: jax.grad(lambda x: squares(jax.grad(loss(f))(x)))(x),
}
GELU = (jax.nn.gelu, EVERY)
DERIVATIVES = [  # how, along, activation and keywords, check_vma
    *((how, along, GELU, index < 2) for index, (how, along) in enumerate(alternating(TRANSFORMED))),
    ("jvp of grad", "n", GELU, True),
    ("vjp", "m", (None, ()), True),
    ("vjp", "n", (None, EVERY), True),
    *(
        (how, EVERYWHERE, GELU, check_vma)
        for how, check_vma in zip(TRANSFORMED, (False, True, True, False), strict=True)
    ),
    ("vjp", EVERYWHERE, GELU, True),
]


def of_both(layer, arrays, transformed, check_vma, implementation="fused", around=lambda f: f, config=SMALL):
    """Applies `transformed` to the layer and to the same in plain JAX, both under `shard_map`."""
    results = []
    lead = (None,) * (arrays["lhs"].ndim - 2)
    for call in (lambda arrays: layer(arrays, implementation, config), layer.plain):
        mapped = layer.mapped(make_mesh(x=2), arrays, around(call), P(*lead, *layer.out_spec), check_vma)
        with emulate(cores=2, detect_races=False) as run:
            results.append(jax.block_until_ready(jax.jit(lambda x, f=mapped: transformed(f, x))(arrays)))
        assert (run.counts["launches"] > 0) == (implementation == "fused" and call != layer.plain)
    return results


def operands(layer, extras=(), dtype=F16, lead=()):
    arrays = layer.integers(2, 16, 16, 8, extras=extras, dtype=dtype, lead=lead)
    return {name: (x * 0.25).astype(x.dtype) for name, x in arrays.items()}


@pytest.mark.parametrize(("how", "along", "given", "check_vma"), DERIVATIVES)
def test_derivatives(how, along, given, check_vma):
    activation, extras = given
    layer = Layer(along, activation=activation)
    # Sums that all devices receive: in blocks and in one shot.
    config = SMALL.replace(one_shot=check_vma)
    assert_close(*of_both(layer, operands(layer, extras), TRANSFORMED[how], check_vma, config=config))


@pytest.mark.parametrize("how", ["vjp", "jvp of grad"])
@pytest.mark.parametrize("check_vma", [True, False])
def test_derivatives_by_xla_with_an_addend(check_vma, how):
    layer = Layer("n" if check_vma else "m", activation=jnp.tanh)
    arrays = operands(layer, (*EVERY, "addend"))
    assert_close(*of_both(layer, arrays, TRANSFORMED[how], check_vma, implementation="xla"))


def test_derivatives_with_leading_dimensions_of_transposed_operands():
    layer = Layer("m", transpose_lhs=True, transpose_rhs=True, activation=jnp.tanh)
    assert_close(*of_both(layer, operands(layer, EVERY, lead=(2,)), TRANSFORMED["vjp"], True))


@pytest.mark.parametrize(("along", "extras"), [("n", ()), ("m", ("rhs_scale",))])
def test_gradients_of_a_result_of_16_bits(along, extras):
    layer = Layer(along, dtype=BF16)
    ours, theirs = of_both(layer, operands(layer, extras, dtype=BF16), TRANSFORMED["vjp"], True)
    assert all(gradient.dtype == BF16 for name, gradient in ours.items() if name not in extras)
    assert_close(ours, theirs, 2e-2)


@pytest.mark.parametrize(("along", "check_vma"), [("m", False), (EVERYWHERE, False), (EVERYWHERE, True)])
def test_gradients_taken_inside_shard_map(along, check_vma):
    layer = Layer(along, activation=jax.nn.gelu)
    arrays = operands(layer, EVERY)
    # The bias is the same on all devices. Without types that say so, each device has only its own part of the gradient.
    specs = layer.specs(arrays) | ({} if check_vma else {"bias": P("x")})
    results = []
    for call in (layer, layer.plain):
        gradients = jax.grad(loss(call))

        def each(arrays, gradients=gradients):
            return {n: x[None] if n == "bias" and not check_vma else x for n, x in gradients(arrays).items()}

        with emulate(cores=2, detect_races=False):
            results.append(layer.mapped(make_mesh(x=2), arrays, each, specs, check_vma)(arrays))
    assert_close(*results)


@pytest.mark.parametrize("along", ["n", pytest.param(EVERYWHERE, marks=pytest.mark.slow)])
def test_the_gradient_of_a_scalar_that_the_activation_captures(along):
    layer = Layer(along)
    arrays = operands(layer, EVERY)

    def body(call):
        def of_slope(slope, arrays):
            slope = slope if along == EVERYWHERE else slope + lax.axis_index("x")  # Each device has a different one.
            activated = Layer(along, activation=lambda y: jax.nn.silu(y * slope))
            return getattr(activated, call)(arrays)

        specs = P(), layer.specs(arrays)
        mapped = jax.shard_map(of_slope, mesh=make_mesh(x=2), in_specs=specs, out_specs=layer.out_spec)
        with emulate(cores=2, detect_races=False):
            return jax.block_until_ready(jax.jit(jax.grad(loss(mapped)))(jnp.float32(0.75), arrays))

    assert_close(body("__call__"), body("plain"))


def scanned(call):
    """The test scans over two left operands."""

    def run(arrays):
        def step(_, shift):
            return None, call(arrays | {"lhs": arrays["lhs"] + shift.astype(arrays["lhs"].dtype)})

        return lax.scan(step, None, jnp.arange(2, dtype=F32))[1].sum(0)

    return run


@pytest.mark.parametrize(
    ("around", "along", "check_vma"),
    [
        (scanned, "n", True),
        (jax.checkpoint, "n", False),
        (scanned, EVERYWHERE, False),
        (jax.checkpoint, EVERYWHERE, True),
    ],
)
def test_gradients_inside_other_transformations(around, along, check_vma):
    layer = Layer(along, activation=jnp.tanh)
    arrays = operands(layer, EVERY)
    assert_close(*of_both(layer, arrays, TRANSFORMED["vjp"], check_vma, around=around))


@pytest.mark.parametrize(
    ("same", "along"),
    [
        (("lhs", "rhs"), "m"),
        (("lhs", "rhs"), "n"),
        (("lhs",), "m"),
        (("rhs",), "n"),
        (("lhs", "rhs"), EVERYWHERE),
    ],
)
def test_operands_that_are_the_same_on_all_devices(same, along):
    """Types say which arrays vary: the result varies if it is scattered, and gradients are summed."""
    layer = Layer(along, activation=jnp.tanh)
    arrays = {"lhs": normal(0, 16, 8, dtype=F16), "rhs": normal(1, 8, 16, dtype=F16)}
    times = {"lhs": (1, 2), "rhs": (2, 1)}
    arrays = {name: x if name in same else jnp.tile(x, times[name]) for name, x in arrays.items()}
    specs = layer.specs(arrays) | dict.fromkeys(same, P())
    results = []
    for call in (layer, layer.plain):
        mapped = jax.shard_map(call, mesh=make_mesh(x=2), in_specs=(specs,), out_specs=layer.out_spec)
        both = jax.jit(jax.value_and_grad(lambda arrays, f=mapped: squares(f(arrays))))
        with emulate(cores=2, detect_races=False):
            results.append(jax.block_until_ready(both(arrays)))
    assert_close(*results)


@pytest.mark.parametrize("check_vma", [True, False])
def test_the_backward_pass_of_a_sum_for_all_communicates_only_without_types(check_vma):
    """With types, the sum's cotangent is known to be the same on all devices: it is also the cotangent of each part."""
    layer = Layer(EVERYWHERE, activation=jnp.tanh)
    arrays = operands(layer)
    gradients = jax.grad(loss(layer.mapped(make_mesh(x=2), arrays, check_vma=check_vma)))
    assert ("psum" in str(jax.make_jaxpr(gradients)(arrays))) != check_vma


# --- vmap -------------------------------------------------------------------------------------------------------------


def over(name, layer, arrays, implementation="fused"):
    """A batch of three by `vmap` over one of the arrays: with the kernel, and in plain JAX."""
    out, results = P(None, *layer.out_spec), []
    for call in (lambda arrays: layer(arrays, implementation), layer.plain):

        def batch(arrays, call=call):
            x = arrays[name]
            return jax.vmap(lambda x: call(arrays | {name: x}))(jnp.stack([x, 2 * x, -x]))

        with emulate(cores=2, detect_races=False):
            results.append(layer.mapped(make_mesh(x=2), arrays, batch, out)(arrays))
    return results


@pytest.mark.parametrize(("name", "along"), [*alternating(["lhs", "lhs_scale"]), ("lhs", EVERYWHERE)])
def test_vmap_becomes_a_leading_dimension(name, along):
    layer = Layer(along, activation=jax.nn.relu)
    assert_exact(*over(name, layer, layer.integers(2, 48, 48, 24, extras=EVERY)))


@pytest.mark.parametrize(
    ("along", "extras"),
    [
        ("m", ()),
        *((along, ("lhs_scale", "rhs_scale")) for along in WAYS),
    ],
)
def test_vmap_over_a_bias(along, extras):
    """XLA adds the bias after the kernel, which still scales each device's product before the sum."""
    layer = Layer(along)
    assert_exact(*over("bias", layer, layer.integers(2, 48, 48, 32, extras=("bias", *extras))))


@pytest.mark.parametrize(("name", "along"), [("rhs", "m"), ("rhs_scale", "m"), ("rhs", EVERYWHERE)])
def test_vmap_over_anything_else_is_refused_or_left_to_xla(name, along):
    layer = Layer(along)
    arrays = layer.integers(2, 48, 48, 24, extras=("rhs_scale",))
    with pytest.raises(NotImplementedError, match=r"vmap.*xla"):
        over(name, layer, arrays)
    assert_exact(*over(name, layer, arrays, None))


def test_vmap_over_anything_else_where_the_chooser_takes_the_kernel(monkeypatch):
    layer = Layer("m", dtype=BF16)
    arrays = {"lhs": struct(8192, 8192), "rhs": struct(8192, 8192)}
    problem = Problem("matmul_reduce_scatter", 8192, 8192, 4096, "bfloat16", "bfloat16", devices=2)
    monkeypatch.setattr(dispatch, "target", lambda mesh=None: H200)
    monkeypatch.setattr(crossover, "measurements", lambda: (crossover.Measured(problem, 90.0, 100.0),))
    for name, has_kernel in (("lhs", True), ("rhs", False)):

        def batch(arrays, name=name):
            x = arrays[name]
            return jax.vmap(lambda x: layer(arrays | {name: x}, None, None))(jnp.stack([x, -x]))

        traced = layer.mapped(make_mesh(x=2), arrays, batch, P(None, "x", None)).trace(arrays)
        assert ("mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()) == has_kernel


def test_vmap_of_gradients():
    layer = Layer("n", activation=jnp.tanh)
    arrays = operands(layer, EVERY)

    def gradients(f, arrays):
        many = jnp.stack([arrays["lhs"], -arrays["lhs"]])
        return jax.vmap(lambda lhs: jax.grad(loss(f))(arrays | {"lhs": lhs}))(many)

    assert_close(*of_both(layer, arrays, gradients, True))


@pytest.mark.parametrize("along", ["m", EVERYWHERE])
@pytest.mark.parametrize("check_vma", [True, False])
def test_linear_transpose(check_vma, along):
    layer = Layer(along)
    arrays = layer.integers(2, 48, 48, 24)

    def transposed(call):
        mapped = layer.mapped(make_mesh(x=2), arrays, call, check_vma=check_vma)
        by_lhs = lambda lhs: mapped(arrays | {"lhs": lhs})  # noqa: E731
        return jax.linear_transpose(by_lhs, arrays["lhs"])(jnp.ones((48, 48), F32))[0]

    with emulate():
        ours = np.asarray(transposed(layer), np.float32)
    np.testing.assert_array_equal(ours, np.asarray(transposed(layer.plain), np.float32))
