"""Routers against NumPy, and `ExpertMLP` with each: gates, losses, state, refusals."""

from __future__ import annotations

import dataclasses
import functools
import secrets
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from overlap import layers
from tests.layers.layer_cases import AUTO, EXPLICIT, assert_near, draw, numbers, put
from tests.layers.router_cases import (
    CASES,
    CHOSEN,
    EXPERTS,
    built,
    by_id,
    deepseek,
    gpt_oss,
    mesh_of,
    mixtral,
    mlp,
    right_of,
    run,
    sigmoid_router,
    softmax,
)

pytestmark = pytest.mark.one_jax


def test_routers_are_the_models_formulas() -> None:
    seed = secrets.randbits(32)
    logits = np.random.default_rng(seed).standard_normal((5, 40, 32)) * 2
    given = jnp.asarray(logits, jnp.float32)
    grouped, bias = sigmoid_router(32, seed, groups=8, top_groups=3, scale=2.5)
    flat, flat_bias = sigmoid_router(32, seed + 1)
    loose, loose_bias = sigmoid_router(32, seed + 2, normalize=False, scale=2.5)
    low, low_bias = sigmoid_router(32, seed, groups=8, top_groups=3)
    low_bias = low_bias - 2  # No score plus its bias is positive: those of closed groups are still less.
    low.e_score_correction_bias[...] = jnp.asarray(low_bias, jnp.float32)
    sigmoids = 1 / (1 + np.exp(-logits))
    shares = sigmoids / sigmoids.sum(-1, keepdims=True)
    cases: list[tuple[Any, Any, np.ndarray]] = [
        (layers.SoftmaxTopK(), mixtral(logits, 4), softmax(logits)),
        (layers.TopKSoftmax(), gpt_oss(logits, 4), softmax(logits)),
        (grouped, deepseek(logits, 4, bias, 8, 3, 2.5), shares),
        (flat, deepseek(logits, 4, flat_bias, 1, 1, 1.0), shares),
        (loose, deepseek(logits, 4, loose_bias, 1, 1, 2.5, normalize=False), shares),
        (low, deepseek(logits, 4, low_bias, 8, 3, 1.0), shares),
    ]
    for router, expected, probabilities in cases:
        found = jax.jit(lambda x, router=router: router(x, 4))(given)
        np.testing.assert_allclose(
            by_id(found.experts, found.gates, 32),
            by_id(expected[0], expected[1], 32),
            rtol=2e-5,
            atol=1e-6,
            err_msg=f"seed {seed}",
        )
        # They have no bias, and are of all experts, not only of those chosen.
        np.testing.assert_allclose(found.probabilities, probabilities, rtol=2e-5, err_msg=f"seed {seed}")
    # The sum of these sigmoids is 0.
    assert not np.asarray(grouped(jnp.full((2, 32), -200.0), 4).gates).any()
    # Negative controls: the bias and the groups decide about choices.
    plain = deepseek(logits, 4, 0 * bias, 8, 3, 2.5)[0]
    assert (np.sort(plain) != np.sort(cases[2][1][0])).any()
    assert (np.sort(deepseek(logits, 4, bias, 1, 1, 2.5)[0]) != np.sort(cases[2][1][0])).any()
    # Without normalization gates are the probabilities.
    plain = layers.SoftmaxTopK(normalize=False)(given, 4)
    np.testing.assert_allclose(
        plain.gates, np.take_along_axis(softmax(logits), np.asarray(plain.experts), -1), rtol=1e-5
    )


# --- The layer ---


def test_what_optimizers_and_checkpoints_see() -> None:
    """The bias of the choice is no nnx.Param, and has no gradient; that of the logits is one."""
    with jax.set_mesh(mesh_of(CASES["data axis"])):
        made = built(CASES["data axis"])
    whole, trained = (dict(nnx.to_flat_state(state)) for state in (nnx.state(made), nnx.state(made, nnx.Param)))
    assert {path for path in whole if path not in trained} == {("choose", "e_score_correction_bias")}
    choose: Any = made.choose
    assert isinstance(choose.e_score_correction_bias, layers.SelectionBias)
    loaded = np.linspace(-1, 1, EXPERTS).astype(np.float32)
    nnx.update(made, nnx.State({"choose": {"e_score_correction_bias": layers.SelectionBias(jnp.asarray(loaded))}}))
    np.testing.assert_array_equal(choose.e_score_correction_bias[...], loaded)
    with jax.set_mesh(mesh_of(CASES["data and tensor, shared"])):
        of_logits = built(CASES["data and tensor, shared"])
    assert isinstance(of_logits.router.bias, nnx.Param)


class Scaled(nnx.Module):
    """A router with a parameter that is trained."""

    def __init__(self) -> None:
        self.scale = nnx.Param(jnp.full((), 0.5))

    def __call__(self, logits: jax.Array, k: int) -> layers.Routes:
        return layers.SoftmaxTopK()(logits * self.scale[...], k)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_parameters_of_a_router_have_gradients(kind: Any) -> None:
    """As the same factor of the kernel of the logits."""
    case = dataclasses.replace(CASES["data and tensor, shared"], kind=kind, router="softmax")
    mesh, x = mesh_of(case), draw(9, (4, 8, 8))
    with jax.set_mesh(mesh):
        made = nnx.jit(lambda: layers.ExpertMLP(8, 12, EXPERTS, CHOSEN, rngs=nnx.Rngs(0), router=Scaled(),
                                                **case.options))()  # fmt: skip
        (_, (out, _)), (grads, _) = run(made, put(x, mesh, case.between))
    p = numbers(made)
    scaled = p | {"router": {"kernel": p["router"]["kernel"] * 0.5}}
    right, (expected_grads, _) = right_of(case, scaled, x)
    assert_near(out, right, 1e-5)
    of_scale = (expected_grads["router"]["kernel"] * p["router"]["kernel"]).sum()
    np.testing.assert_allclose(nnx.to_pure_dict(grads)["choose"]["scale"], of_scale, rtol=1e-3)


def test_a_router_of_ones_own() -> None:
    """Without probabilities the load balance loss is 0."""

    def first(logits: jax.Array, k: int) -> tuple[jax.Array, jax.Array, None]:
        return jnp.broadcast_to(jnp.arange(k), (*logits.shape[:-1], k)), jnp.ones((*logits.shape[:-1], k)), None

    with jax.set_mesh(mesh_of(CASES["data axis"])):
        made = nnx.jit(lambda: layers.ExpertMLP(
            8, 12, EXPERTS, 2, axis="data", router=first, rngs=nnx.Rngs(0)))()  # pyright: ignore[reportArgumentType]  # fmt: skip
        out, report = nnx.jit(lambda layer, x: layer(x))(made, x := draw(7, (1, 8, 8)))
    p = numbers(made)
    silu = lambda gate, up: jax.nn.silu(gate) * up  # noqa: E731
    assert_near(out, mlp(p, jnp.asarray(x), silu, 0) + mlp(p, jnp.asarray(x), silu, 1), 1e-5)
    assert report.load_balance_loss == 0 and report.z_loss > 0


# The mesh has two devices along "data" and two along "tensor".
MLP = functools.partial(layers.ExpertMLP, 8, 12, 8, 2)
BOTH: dict[str, Any] = {"axis": ("data", "tensor"), "batch_axis": "data"}
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"router": lambda logits: logits}, TypeError, "router must be a function of logits and k, got .*too many posit"),
    ({"activation": lambda a, b, c: a}, TypeError, "activation must be a function of one array, or gate and up, .* 3"),
    ({"rows_factor": 0}, ValueError, "^ExpertMLP: rows_factor must be positive and finite, got 0: give 1.25"),
    ({"rows_factor": "a"}, TypeError, "^ExpertMLP: rows_factor must be a number, got 'a'"),
    ({"router": "softmax"}, TypeError, "^ExpertMLP: router must be a function of logits and k, got 'softmax': give"),
    ({"router": layers.TopKSoftmax}, TypeError, "^ExpertMLP: router must be a function"),
    ({"router": layers.TopKSoftmax(), "normalize_gates": False}, ValueError, "normalize_gates=False belongs to"),
    ({"router_bias": 1}, TypeError, "^ExpertMLP: router_bias must be True or False, got 1"),
    ({"axis": ("tensor", "tensor")}, ValueError, "^ExpertMLP: axis must be a mesh axis, or a tuple of several, none"),
    ({"axis": "data", "fsdp_axis": "data"}, ValueError, "fsdp_axis='data': name each axis in one of the two"),
    ({"axis": 3}, ValueError, "^ExpertMLP: axis must be a mesh axis, .*, got axis=3"),
    (BOTH | {"sequence_parallel": False}, ValueError, "^ExpertMLP: axis=.* must be in batch_axis='data' or outside"),
    ({"axis": "data", "batch_axis": "data", "shared_features": 8}, ValueError,
     "^ExpertMLP: shared_features=8 needs one axis that cuts rows between layers, got None of axis='data'"),
    ({"axis": ("data", "tensor"), "shared_features": 8}, ValueError, r"needs one axis .*, got \('data', 'tensor'\)"),
]  # fmt: skip


def test_refusals() -> None:
    mesh = mesh_of(CASES["data and tensor, shared"])
    with jax.set_mesh(mesh):
        for options, kind, message in REFUSED:
            with pytest.raises(kind, match=message):
                MLP(rngs=nnx.Rngs(0), **options)
                pytest.fail(f"{options} is not refused")
        # At a call.
        bad = {
            "the input must be .batch, rows, features": (BOTH, (8, 8)),
            r"router must return experts of integer \(2, 4, 2\), got": (
                {"router": lambda x, k: (x, x, x), "batch_axis": "data"}, (4, 8, 8)),
            "router must return experts, gates and probabilities or None, got list": (
                {"router": lambda x, k: [x]}, (4, 8, 8)),
            r"router must return gates of floating .*, got NoneType": (
                {"router": lambda x, k: (jnp.zeros((*x.shape[:-1], k), int), None, None)}, (4, 8, 8)),
            r"router must return probabilities of floating \(2, 4, 8\), got float32 \(2, 4, 2\)": (
                {"router": lambda x, k: (*layers.TopKSoftmax()(x, k)[:2], x[..., :k]), "batch_axis": "data"},
                (4, 8, 8)),
            "SigmoidTopK: num_experts=4 must be that of the layer, got 8": (
                {"router": layers.SigmoidTopK(4)}, (4, 8, 8)),
            "SigmoidTopK: top_groups=1 groups of 1 must have as many": (
                {"router": layers.SigmoidTopK(8, groups=8)}, (4, 8, 8)),
        }  # fmt: skip
        for message, (options, shape) in bad.items():
            call = lambda options=options, shape=shape: MLP(rngs=nnx.Rngs(0), **options)(jnp.zeros(shape))  # noqa: E731
            with pytest.raises(ValueError, match=message):
                nnx.eval_shape(call)
    wrong: list[tuple[Any, Any, str]] = [
        ({"groups": 3}, ValueError, "groups=3 must divide num_experts=8"),
        ({"groups": 2, "top_groups": 3}, ValueError, "top_groups=3 must be at most groups=2"),
        ({"scale": "a"}, TypeError, "scale must be a number, got 'a'"),
        ({"scale": True}, TypeError, "scale must be a number, got True"),
        ({"normalize": 1}, TypeError, "normalize must be True or False"),
        ({"groups": 0}, ValueError, "groups must be at least 1"),
    ]
    for given, kind, message in wrong:
        with pytest.raises(kind, match=message):
            layers.SigmoidTopK(8, **given)


@pytest.mark.parametrize("factors", [{}, {"capacity_factor": 1.0}, {"rows_factor": 1.0}], ids=str)
def test_no_tokens_at_all(factors: dict[str, float]) -> None:
    """An empty input has an empty result, and a report of zeros."""
    with jax.set_mesh(mesh_of(CASES["data and tensor, shared"])):
        layer = MLP(rngs=nnx.Rngs(0), batch_axis="data", **factors)
        out, report = jax.jit(lambda x: layer(x))(jnp.ones((2, 0, 8)))
    assert out.shape == (2, 0, 8) and not any(np.asarray(x).any() for x in report)


def test_flags_of_the_default_router() -> None:
    with pytest.raises(TypeError, match="SoftmaxTopK: normalize must be True or False, got 'yes'"):
        layers.SoftmaxTopK(normalize="yes")  # pyright: ignore[reportArgumentType]


def test_the_load_evens_the_experts() -> None:
    """A bias that is lowered where the load is high, as DeepSeek-V3 does, makes all experts alike."""
    mesh = mesh_of(CASES["data and tensor, shared"])
    with jax.set_mesh(mesh):
        layer = MLP(rngs=nnx.Rngs(0), batch_axis="data", router=layers.SigmoidTopK(EXPERTS))
        # Half of the experts have far larger logits.
        layer.router.kernel[...] += jnp.where(jnp.arange(EXPERTS) % 2 == 0, 0.2, 0)
        x = 1 + draw(3, (2, 64, 8))
        load_of = nnx.jit(lambda layer: layer(x)[1].load)
        before = np.asarray(load_of(layer))
        for step in range(60):
            bias = layer.choose.e_score_correction_bias
            bias[...] += 0.04 * (1 - step / 60) * jnp.sign(1 / EXPERTS - load_of(layer))
        after = np.asarray(load_of(layer))
    np.testing.assert_allclose([before.sum(), after.sum()], 1, rtol=1e-6)
    assert np.ptp(before) > 0.2 and np.ptp(after) < 0.06


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_an_activation_that_captures_scalars(kind: Any) -> None:
    """Numbers made on the mesh, and one that is learned: the result and its gradient, as by the dense formula."""
    x = draw(5, (2, 4, 8))
    with jax.set_mesh(jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(kind,) * 2, devices=jax.devices()[:4])):
        # More than ten, so that their order differs from the order of their names.
        fixed = [jnp.float32(i) for i in range(12)]

        def loss(learned: jax.Array, activation: Any) -> jax.Array:
            layer = MLP(rngs=nnx.Rngs(0), batch_axis="data", activation=activation(learned))
            return (layer(x)[0] ** 2).sum()

        def scaled(learned: jax.Array) -> Any:
            return lambda gate: gate * jax.nn.sigmoid(sum(i * x * gate for i, x in enumerate(fixed)) / 500) * learned

        value, slope = jax.jit(jax.value_and_grad(lambda learned: loss(learned, scaled)))(jnp.float32(2))
        plain = jax.jit(lambda: loss(jnp.float32(1), lambda _: lambda gate: gate * jax.nn.sigmoid(1.012 * gate)))()
    np.testing.assert_allclose([value, slope], [4 * plain, 4 * plain], rtol=1e-5)
