"""Activations of `matmul`: which are elementwise, what they capture, and that XLA and the emulated kernel are right."""

from __future__ import annotations

import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from scipy import special

import overlap
from overlap.choice import dispatch
from overlap.emulation import emulate
from overlap.frame.activation import traced
from overlap.single_gpu import matmul
from tests.ops import activation_cases
from tests.ops.explained import answer
from tests.ops.product_cases import H200, in_f32, normal
from tests.oracle import make_mesh

SMALL = overlap.Config(tile_n=128, stages=2)
LHS, RHS = normal(0, 72, 64), normal(1, 64, 136)
PRODUCT = in_f32(LHS) @ in_f32(RHS)
SCALAR, VECTOR = jnp.float32(1.5), jnp.ones(136)
SCALARS = SCALAR, jnp.bfloat16(0.5), jnp.int32(3), jnp.asarray(False)


def product(activation, implementation="fused", lhs=LHS, rhs=RHS, dtype=jnp.float32, **keywords):
    config = SMALL if implementation == "fused" else None
    return overlap.matmul(
        lhs, rhs, activation=activation, implementation=implementation, config=config, preferred_element_type=dtype,
        **keywords,
    )  # fmt: skip


def close(a, b, limit=2e-6):
    a, b = (np.asarray(x).astype(np.float64) for x in (a, b))
    assert a.shape == b.shape and np.linalg.norm(a - b) <= limit * np.linalg.norm(b)


@jax.custom_vjp
def doubled_backward(y):
    return jnp.tanh(y)


doubled_backward.defvjp(lambda y: (jnp.tanh(y), y), lambda y, g: (2 * g * jnp.cos(y),))


ELEMENTWISE = {  # The function, and whether its gradient is tested too.
    "every operation": (activation_cases.every_operation, False),
    "captured scalars": (activation_cases.capturing(*SCALARS), False),
    "custom_jvp": (jax.nn.relu, True),
    "custom_vjp": (doubled_backward, True),
    "booleans": (lambda y: y > 0, False),
    "another dtype": (lambda y: jax.nn.elu(y.astype(jnp.bfloat16)) * 3, True),
    "a function of a scalar": (lambda y: y * jax.nn.softplus(SCALAR), False),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_values_and_gradients(name):
    activation, has_gradient = ELEMENTWISE[name]
    exact, limit = jax.jit(activation)(PRODUCT), 5e-3 if name == "another dtype" else 2e-6
    with emulate(cores=2):
        close(product(activation), exact, limit)
        close(product(activation, "xla"), exact, limit)
        if has_gradient:
            ours = jax.jit(jax.grad(lambda a: jnp.square(product(activation, lhs=a)).sum()))(LHS)
            plain = lambda a: jnp.square(jnp.float32(activation(a @ RHS.astype(jnp.float32)))).sum()  # noqa: E731
            close(ours, jax.jit(jax.grad(plain))(LHS.astype(jnp.float32)), 1e-2)


def test_what_is_elementwise_too():
    ones, constant = lambda y: y + jnp.ones(y.shape), lambda y: jnp.full_like(y, 2)
    for activation in (jax.checkpoint(jnp.tanh), ones, constant):
        assert answer(overlap.matmul, LHS, RHS, activation=activation, implementation="fused").config


# What Mosaic GPU lacks, with the true function in f64. The kernel has formulas for these.
FORMULAS = {
    "erf": (lax.erf, special.erf), "erfc": (lax.erfc, special.erfc), "expm1": (jnp.expm1, np.expm1),
    "log1p": (jnp.log1p, np.log1p), "sign": (jnp.sign, np.sign),
    "softplus": (jax.nn.softplus, lambda y: np.logaddexp(y, 0)),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMULAS)
def test_formulas_are_within_2_ulp_of_the_truth(name):
    activation, true = FORMULAS[name]
    generator = np.random.default_rng(0)
    sizes = 10.0 ** np.concatenate([generator.uniform(-36.5, 38.5, 4096), generator.uniform(-3, 2, 4080)])
    edges = [np.inf, -np.inf, np.nan, 0, 1, -1, 0.5, -0.5, 88.8, 89.4, 89.5, -104, 9.2, 10, 12866, -12868]
    values = np.concatenate([sizes * generator.choice([-1, 1], 8176), edges]).astype(np.float32).reshape(64, 128)
    zeros = jnp.zeros((64, 64), jnp.bfloat16), jnp.zeros((64, 128), jnp.bfloat16)
    with emulate(cores=1):
        ours = np.asarray(product(activation, "fused", *zeros, addend=jnp.asarray(values)), np.float64)
    with np.errstate(all="ignore"):
        truth = true(values.astype(np.float64)).astype(np.float64)
        rounded = truth.astype(np.float32)
        # As emulated, products and sums are not fused, and erfc is a little further off than on GPUs. The emulator runs
        # in XLA's threads, which take subnormal numbers as zeros.
        allowed = np.where(abs(truth) < 2**-126, 2**-126, (2.5 if name == "erfc" else 2) * np.spacing(abs(rounded)))
        right = (ours == rounded) | (np.isnan(ours) & np.isnan(truth)) | (abs(ours - truth) <= allowed)
    assert right.all(), (values[~right], ours[~right], truth[~right])


# Functions that are not elementwise, or that kernels lack. The second entry: what the reason must contain.
LEFT_TO_XLA = {
    "softmax": (jax.nn.softmax, "reduce_max"),
    "less its mean": (lambda y: y - y.mean(), "reduce_sum"),
    "a vector of the result's width": (lambda y: y * VECTOR, "fails on trial"),
    "a captured array": (lambda y: y * np.ones((1, 1), np.float32), "captures an array of shape (1, 1)"),
    "a captured array in a call": (lambda y: jax.jit(lambda y: y + VECTOR[0])(y), "captures an array of shape (136,)"),
    "positions": (lambda y: y + lax.broadcasted_iota(jnp.float32, y.shape, y.ndim - 2), "iota"),
    "its size": (lambda y: y / y.shape[-1], "depends on the shape"),
    "even or odd": (lambda y: y if y.shape[-2] % 2 else 2 * y, "depends on the shape"),
    "its dimensions": (lambda y: y * y.ndim, "depends on the shape"),
    "rearranged": (lambda y: y.T.reshape(y.shape), "transpose"),
    "effects": (lambda y: (jax.debug.callback(lambda: None), y)[1], "effect"),
    "a loop": (lambda y: lax.fori_loop(0, 3, lambda i, x: x * 0.5 + i, y), "scan"),
    "a branch": (lambda y: lax.cond(SCALAR > 1, lambda x: x, lambda x: 2 * x, y), "cond"),
    "what is not used": (lambda y: (y - y.max(), 2 * y)[1], "reduce_max"),
    "integers of values": (lambda y: y.astype(jnp.int32), "converts no float32 to int32"),
    "booleans of values": (lambda y: y * y.astype(bool), "converts no float32 to bool"),
    "a negative power": (lambda y: (1 + jnp.abs(y)) ** -2, "integer_pow"),
    "a choice by a number": (lambda y: lax.select_n((y > 0).astype(jnp.int32), y, 2 * y), "select_n"),
    "64 bits": (lambda y: y.astype(jnp.complex64).real, "complex64"),
    "too long": (lambda y: functools.reduce(lambda x, _: x * 0.5 + 1, range(150), y), "300 operations"),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT_TO_XLA)
def test_what_is_not_proven_to_be_elementwise_is_refused_with_the_reason(name, monkeypatch):
    activation, fragment = LEFT_TO_XLA[name]
    with pytest.raises(NotImplementedError, match="`activation`") as caught:
        answer(overlap.matmul, LHS, RHS, activation=activation, implementation="fused")
    assert fragment in str(caught.value)
    monkeypatch.setattr(dispatch, "target", lambda mesh=None: H200)
    choice = answer(overlap.matmul, LHS, RHS, activation=activation)
    assert choice.implementation == "xla" and "`activation`" in choice.reason and fragment in choice.reason


@pytest.mark.parametrize("name", ["softmax", "less its mean", "even or odd", "its dimensions", "a loop"])
def test_what_is_left_to_xla_is_applied_to_the_whole_result(name):
    activation, _ = LEFT_TO_XLA[name]

    def plain(lhs):
        return activation(lhs.astype(jnp.float32) @ RHS.astype(jnp.float32))

    for given in (LHS, jnp.stack([LHS, 2 * LHS])[None]):
        ours, exact = jax.jit(lambda x: (product(activation, None, x), plain(x)))(given)
        close(ours, exact, 1e-3)
    if name in ("softmax", "a loop"):
        ours, exact = (
            lambda x, f=f: jax.grad(lambda x: jnp.sum(f(x) ** 2))(x)
            for f in (functools.partial(product, activation, "xla"), plain)
        )
        close(jax.jit(ours)(LHS), jax.jit(exact)(LHS), 1e-2)


def test_a_mean_is_that_of_the_global_result():
    less_mean = lambda y: y - y.mean()  # noqa: E731
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        lhs, rhs = (
            jax.device_put(x, jax.NamedSharding(mesh, spec)) for x, spec in ((LHS, P("x")), (RHS, P(None, "x")))
        )
        keywords = dict(out_sharding=P(None, "x"), activation=less_mean, preferred_element_type=jnp.float32)
        close(overlap.sharded_matmul(lhs, rhs, **keywords), less_mean(PRODUCT))
        assert "reduce_sum" in answer(overlap.sharded_matmul, lhs, rhs, **keywords).reason
        close(product(less_mean, None, lhs, RHS), less_mean(PRODUCT))


def test_explain_of_a_users_shard_map():
    """While calls are explained no kernel is traced, and the activation's program is for kernels only."""
    mesh, specs, operands = make_mesh(x=2), (P("x"), P(None, "x")), (LHS, RHS[:, :128])
    for activation in (jax.nn.gelu, lambda y: y * 2 + jnp.float32(0.5)):
        call = functools.partial(
            overlap.all_gather_lhs_matmul, axis_name="x", activation=activation, implementation="fused"
        )
        layer = jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=P(None, "x"))
        assert answer(layer, *operands).implementation == "fused"
        loss = lambda lhs, rhs, layer=layer: layer(lhs, rhs).astype(jnp.float32).sum()  # noqa: E731
        assert {choice.implementation for choice in overlap.explain(jax.grad(loss), *operands)} == {"fused"}


def test_explain_of_a_mapped_call_that_xla_runs():
    call = functools.partial(
        overlap.all_gather_lhs_matmul, axis_name="x", config=overlap.Config(tile_m=64, tile_n=128, stages=2)
    )
    device = AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu")
    layer = jax.shard_map(
        jax.vmap(jax.jit(lambda x, w: call(x, w) + call(x, w)), (None, 0)),
        mesh=AbstractMesh((2,), ("x",), (AxisType.Auto,), abstract_device=device),
        in_specs=(P("x"), P(None, None, "x")),
        out_specs=P(None, None, "x"),
    )
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((256, 64), (3, 64, 256)))
    choices = overlap.explain(layer, x, w)
    assert [(choice.implementation, "jax.vmap" in choice.reason) for choice in choices] == [("xla", True)] * 2


# --- Captured values --------------------------------------------------------------------------------------------------


def test_a_captured_tracer_under_jit_grad_and_vmap():
    def all_of(f):
        total = lambda slope: jnp.sum(f(slope) ** 2)  # noqa: E731
        return lambda s: (f(s), jax.vmap(f)(jnp.stack([s, 2 * s])), jax.grad(total)(s), jax.grad(jax.jit(total))(s))

    with emulate(cores=2):
        ours = jax.jit(all_of(lambda slope: product(lambda y: jnp.tanh(y * slope))))(SCALAR)
    exact = jax.jit(all_of(lambda slope: jnp.tanh(PRODUCT * slope)))(SCALAR)
    for found, wanted, limit in zip(ours, exact, (1e-5, 1e-5, 1e-4, 1e-4), strict=True):
        close(found, wanted, limit)


def test_a_closure_that_changes_between_calls(monkeypatch):
    factor, launched, launch = 2.0, [], matmul.product.launch
    monkeypatch.setattr(matmul.product, "launch", lambda x, plan: launched.append(plan) or launch(x, plan))
    activation = lambda y: y * factor  # noqa: E731
    with emulate(cores=2):
        first = product(activation)
        factor = 3.0
        close(product(activation), 1.5 * first)
        assert len(launched) == 2 and launched[0] != launched[1]
        # Equal activations share a kernel, even as different function objects. Scalars are not part of the kernel.
        close(product(lambda y: y * jnp.float32(3)), 1.5 * first)
        for value in (3, 4):
            scalar = jnp.asarray(value, jnp.float32)
            close(product(lambda y, scalar=scalar: y * scalar), value / 2 * first)
    assert len(launched) == 3


def test_nothing_of_the_caller_outlives_the_call():
    class Weights:
        """Holds arrays as a model might; an activation can capture it."""

        slope = 2.0

    def call(weights):
        jax.jit(lambda slope: product(lambda y: y * slope))(SCALAR)
        product(lambda y: y * weights.slope)

    weights = Weights()
    gone = weakref.ref(weights)
    with emulate(cores=2):
        # Trace the kernels before the check: jax reports the loops in any kernel of Pallas as leaks.
        call(Weights())
        with jax.checking_leaks():
            call(weights)
    del weights
    gc.collect()
    assert gone() is None


def test_the_backward_pass_does_not_call_it_again():
    calls = []

    def activation(y):
        calls.append(y)
        return jnp.tanh(y)

    with emulate(cores=2):
        y, pull = jax.vjp(lambda a: product(activation, lhs=a), LHS)
        called = len(calls)
        pull(y)
    assert len(calls) == called


def test_split_k_applies_it_to_the_sum():
    lhs, rhs, config = normal(2, 64, 256), normal(3, 256, 128), overlap.Config(tile_m=64, tile_n=128, split_k=2)
    activation = activation_cases.capturing(*SCALARS[:3], jnp.asarray(True))
    with emulate(cores=2):
        ours = overlap.matmul(lhs, rhs, activation=activation, config=config, implementation="fused")
    close(ours, activation(jnp.asarray(in_f32(lhs) @ in_f32(rhs))), 5e-3)


def test_it_lowers_for_cuda_with_either_jax(monkeypatch):
    monkeypatch.setattr(dispatch, "target", lambda mesh=None: H200)
    both = lambda y, scalars: activation_cases.capturing(*scalars)(activation_cases.every_operation(y))  # noqa: E731
    call = jax.jit(lambda a, b, *scalars: product(lambda y: both(y, scalars), lhs=a, rhs=b))
    assert "mosaic_gpu" in call.trace(LHS, RHS, *SCALARS).lower(lowering_platforms=("cuda",)).as_text()


def test_programs_are_compared_by_what_they_compute():
    assert traced(jax.nn.gelu)[0] == traced(lambda y: jax.nn.gelu(y))[0] != traced(jax.nn.relu)[0]
    assert traced(lambda y: y * 2)[0] != traced(lambda y: y * 3)[0]
    nan = float("nan")
    assert traced(lambda y: y * nan)[0] == traced(lambda y: y * nan)[0]
