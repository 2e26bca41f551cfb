"""`layers.ExpertMLP` against a loop over its experts on one device: values, losses, gradients, placement, refusals."""

from __future__ import annotations

import functools
import inspect
import math
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from overlap import layers
from overlap.frame import call
from tests.layers.layer_cases import (
    AUTO,
    AXES,
    BETWEEN,
    EXPLICIT,
    WHOLE,
    assert_near,
    draw,
    make_mesh,
    numbers,
    put,
    same,
    spread,
)

pytestmark = pytest.mark.one_jax
EXPERTS, CHOSEN = 4, 2


def mlp(p: Any, x: jax.Array, *expert: int) -> jax.Array:
    """A gated MLP; of an expert, the one with this index."""

    def linear(name: str, x: jax.Array) -> jax.Array:
        kernel, bias = (p[name].get(key) for key in ("kernel", "bias"))
        return x @ kernel[expert] + (0 if bias is None else bias[expert])

    return linear("down", jax.nn.silu(linear("gate", x)) * linear("up", x))


def reference(
    p: Any, x: jax.Array, capacity: int | None, groups: int, normalize: bool = True, cut: int = 2, mask: Any = True
) -> Any:
    """The layer, expert by expert. Each of `groups` parts of the batch has the capacity for itself.

    Rows take it in the order of `cut` devices, which have parts of the rows, then of batch and rows.
    """
    out = x + mlp(p["shared"], x) if "shared" in p else x
    logits = x @ p["router"]["kernel"]
    mask = jnp.broadcast_to(mask, x.shape[:-1])[..., None]
    probability, tokens = jax.nn.softmax(logits), jnp.maximum(mask.sum(), 1)
    least = jnp.sort(probability)[..., -CHOSEN, None]
    is_chosen = (probability >= least) & mask
    gates = jnp.where(is_chosen, probability, 0)
    gates = gates / jnp.where(mask, gates.sum(-1, keepdims=True), 1) if normalize else gates
    counts = is_chosen
    if capacity is not None:
        taken = is_chosen.reshape(groups, x.shape[0] // groups, cut, -1, EXPERTS).swapaxes(1, 2)
        before = jnp.cumsum(taken.reshape(groups, -1, EXPERTS), 1).reshape(taken.shape).swapaxes(1, 2)
        counts = is_chosen & (before.reshape(is_chosen.shape) <= capacity)
    for expert in range(EXPERTS):
        out += jnp.where(counts, gates, 0)[..., expert, None] * mlp(p, x, expert)
    share, mean = is_chosen.sum((0, 1)) / (tokens * CHOSEN), jnp.where(mask, probability, 0).sum((0, 1)) / tokens
    dropped = (is_chosen.sum() - counts.sum()) / (tokens * CHOSEN)
    z = jnp.where(mask[..., 0], jax.nn.logsumexp(logits, -1) ** 2, 0).sum() / tokens
    return out, layers.RouterReport(EXPERTS * (share * mean).sum(), z, dropped, share)


def loss_of(outs: Any) -> Any:
    out, report = outs
    weights = np.cos(np.arange(out.size) * 2).reshape(out.shape)
    return (out * weights).sum() + report.load_balance_loss + report.z_loss, outs


# Data and tensor devices, the kind of mesh, rows, capacity in rows, and keywords.
SILU = lambda gate, up: jax.nn.silu(gate) * up  # noqa: E731
CASES: dict[str, Any] = {
    "auto, masked":
        (2, 2, AUTO, 8, 3, {"capacity_factor": 0.3, "masked": True, "shared_features": 16, "activation": SILU}),
    "explicit, dropped":
        (2, 2, EXPLICIT, 8, 5, {"use_bias": True, "capacity_factor": 0.6, "normalize_gates": False}),
    "explicit, rows whole":
        (1, 2, EXPLICIT, 6, 6, {"sequence_parallel": False, "fsdp_axis": None, "capacity_factor": 0.6}),
    "auto, a shared expert": (2, 2, AUTO, 8, None, {"shared_features": 16}),
    "auto, rows whole": (2, 2, AUTO, 6, None, {"sequence_parallel": False}),
    "explicit, rows whole, masked":
        (2, 2, EXPLICIT, 6, 2, {"sequence_parallel": False, "capacity_factor": 0.4, "masked": True}),
    "one device": (1, 1, AUTO, 8, None, {}),
}  # fmt: skip


@pytest.mark.parametrize("case", [name if i < 3 else pytest.param(name, marks=pytest.mark.slow)
                                  for i, name in enumerate(CASES)])  # fmt: skip
def test_the_layer(case: str) -> None:
    data, tensor, kind, rows, capacity, options = CASES[case]
    mesh, x, options = make_mesh(data, tensor, kind), draw(1, (4, rows, 8)), dict(options)
    between = WHOLE if "sequence_parallel" in options else BETWEEN
    if between == WHOLE:  # The devices do not divide the rows.
        x = x[:, :-1]
    mask = np.random.default_rng(2).random(x.shape[:2]) < 0.6 if options.pop("masked", False) else None
    with jax.set_mesh(mesh):
        made = nnx.jit(lambda: layers.ExpertMLP(8, 12, EXPERTS, CHOSEN, rngs=nnx.Rngs(0), **AXES | options))()
        spread(made)
        run = nnx.jit(nnx.value_and_grad(
            lambda layer, x, mask: loss_of(nnx.remat(layers.ExpertMLP.__call__)(layer, x, x, mask)),
            argnums=(0, 1), has_aux=True))  # fmt: skip
        (_, (out, report)), (of_layer, of_x) = run(made, put(x, mesh, between), mask)
    how = capacity, data, options.get("normalize_gates", True), 2 if between == BETWEEN and tensor > 1 else 1
    how = *how, True if mask is None else mask
    right, grads = expected(made, x, *how)
    assert_near((out, report), right, 1e-5)
    assert (report.dropped > 0) == (capacity is not None)
    assert_near((nnx.to_pure_dict(of_layer), of_x), grads, 1e-5)
    fsdp = options.get("fsdp_axis", "data")
    assert same(out, between)
    for module in (made.gate, made.down):
        assert same(module.kernel[...], P("tensor", fsdp, None)) and same(made.router.kernel[...], P(None, None))
    # A negative control.
    assert np.linalg.norm(out - reference(numbers(made), x[::-1], *how)[0]) > 1


def expected(made: layers.ExpertMLP, x: np.ndarray, *how: Any) -> Any:
    """The result and the report of the reference, and the gradients by the parameters and by `x`."""
    with jax.default_matmul_precision("highest"):
        both = jax.value_and_grad(lambda p, x: loss_of(reference(p, x, *how)), argnums=(0, 1), has_aux=True)
        (_, right), grads = jax.jit(both)(numbers(made), x)
    return right, grads


# All legal combinations of axes: the mesh, fsdp_axis, batch_axis; and whether the input has a batch.
ALONG = (None, "a", "b", ("a", "b"), ("b", "a"))
COMBINATIONS: list[Any] = [
    *(((2, 2, 2), fsdp, batch, batched) for fsdp in ALONG for batch in ALONG for batched in (True, False)),
    *((sizes, fsdp, batch, True) for sizes in ((2, 2), (2, 4)) for fsdp in ALONG[:2] for batch in ALONG[:2]),
]
FAST = [((2, 2, 2), ("b", "a"), "a", True), ((2, 2, 2), "a", "b", False)]


@pytest.mark.parametrize(("sizes", "fsdp", "batch", "batched"), [
    pytest.param(*row, id=str(row), marks=[] if row in FAST else [pytest.mark.slow]) for row in COMBINATIONS
])  # fmt: skip
def test_every_combination_of_axes(sizes: Any, fsdp: Any, batch: Any, batched: bool) -> None:
    """Along fsdp_axis the tokens may be the same on all devices, which need not divide the batch."""
    *names, axis = ("a", "b", "c")[: len(sizes)] if len(sizes) == 3 else ("a", "c")
    mesh = Mesh(
        np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes), (*names, axis), axis_types=(AUTO,) * len(sizes)
    )
    groups = math.prod(
        dict(mesh.shape)[name] for name in (batch if isinstance(batch, tuple) else [batch] if batch else [])
    )
    x = draw(1, (3 * groups, 4, 8) if batched else (12, 8))
    with jax.set_mesh(mesh):
        options: Any = {"axis": axis, "fsdp_axis": fsdp, "batch_axis": batch, "capacity_factor": 0.7}
        made = nnx.jit(lambda: layers.ExpertMLP(8, 12, EXPERTS, CHOSEN, rngs=nnx.Rngs(0), **options))()
        run = nnx.jit(nnx.value_and_grad(lambda layer, x: loss_of(layer(x, x)), argnums=(0, 1), has_aux=True))
        (_, outs), (of_layer, of_x) = run(made, x)
    capacity = math.ceil(0.7 * 12 * CHOSEN / EXPERTS)  # Each group has 12 rows.
    cut = dict(mesh.shape)[axis]
    right, grads = expected(made, x if batched else x[None], capacity, groups if batched else 1, True, cut)
    assert right[1].dropped > 0
    assert_near(outs[0].reshape(right[0].shape), right[0], 1e-5)
    assert_near(outs[1], right[1], 1e-5)
    assert_near((nnx.to_pure_dict(of_layer), of_x.reshape(grads[1].shape)), grads, 1e-5)


@pytest.mark.parametrize(("shape", "counts"), [
    ((1, 6, 8), (1, 4)),
    *(pytest.param(x, (1, 2, 4), marks=pytest.mark.slow) for x in ((16, 1, 8), (3, 5, 8), (1, 6, 8))),
], ids=str)  # fmt: skip
def test_results_do_not_depend_on_the_number_of_devices(shape: tuple[int, ...], counts: tuple[int, ...]) -> None:
    """The layer's own padding takes no capacity, and the first rows of the first sequences come first."""
    x, capacity = draw(3, shape), math.ceil(shape[0] * shape[1] * CHOSEN / EXPERTS)
    options: Any = {"capacity_factor": 1.0, "sequence_parallel": False}
    right: Any = None
    for devices in counts:
        with jax.set_mesh(make_mesh(1, devices)):
            made = nnx.jit(lambda: layers.ExpertMLP(8, 12, EXPERTS, CHOSEN, rngs=nnx.Rngs(0), **options))()
            found = nnx.jit(lambda layer, x: layer(x, x))(made, x)
        right = right or jax.jit(lambda p: reference(p, x, capacity, 1, cut=1))(numbers(made))
        assert_near(found, right, 1e-5)
    assert right[1].dropped > 0


def test_padding() -> None:
    """It may hold NaN. If there is nothing else, losses and gradients are zero."""
    x, mask = draw(4, (2, 4, 8)), np.arange(8).reshape(2, 4) % 4 < 3
    with jax.set_mesh(make_mesh(1, 2)):
        made = nnx.jit(lambda: layers.ExpertMLP(8, 12, EXPERTS, CHOSEN, capacity_factor=0.5, rngs=nnx.Rngs(0)))()

        @nnx.jit
        @functools.partial(nnx.value_and_grad, argnums=(0, 1), has_aux=True)
        def run(layer: Any, x: Any, mask: Any) -> Any:
            out, report = layer(x, mask=mask)
            return (out**2).sum() + report.load_balance_loss + report.z_loss, (out, report)

        clean = run(made, x, mask)
        assert_near(run(made, np.where(mask[..., None], x, np.nan), mask), clean, 0)
        (_, (out, _)), (_, of_x) = clean
        assert not np.asarray(out)[~mask].any() and not np.asarray(of_x)[~mask].any() and np.asarray(out)[mask].any()
        for leaf in jax.tree.leaves(run(made, x, np.zeros_like(mask))):
            assert not np.asarray(leaf).any()


def test_a_table() -> None:
    with jax.set_mesh(make_mesh(2, 2)):
        build = lambda: layers.ExpertMLP(8, 12, EXPERTS, CHOSEN, rngs=nnx.Rngs(0), **AXES)  # noqa: E731
        assert "ExpertMLP" in nnx.tabulate(nnx.jit(build)(), jnp.zeros((2, 4, 8)))
    for build in (layers.ExpertMLP, layers.GatedMLP):
        assert [*inspect.signature(build).parameters][:2] == ["in_features", "hidden_features"]


@pytest.mark.parametrize("build", [
    functools.partial(layers.RMSNorm, 8), functools.partial(layers.LayerNorm, 8),
    pytest.param(functools.partial(layers.ExpertMLP, 8, 12, EXPERTS, CHOSEN), marks=pytest.mark.slow),
])  # fmt: skip
def test_outside_jit(build: Any) -> None:
    """On an Auto mesh, with an array that was made before."""
    before = jnp.asarray(draw(0, (2, 4, 8)))
    with jax.set_mesh(make_mesh(2, 2)):
        made = build(rngs=nnx.Rngs(0), **AXES)
        found = made(before)
        assert_near(found, nnx.jit(lambda layer, x: layer(x))(made, draw(0, (2, 4, 8))), 1e-6)
        assert same(jax.tree.leaves(found)[0], BETWEEN)
        # Here the layer sees a tracer, though nothing is jitted.
        gradient = jax.grad(lambda x: (jax.tree.leaves(made(x))[0] ** 2).sum())(before)
        assert same(gradient, BETWEEN)


def test_each_expert_begins_as_a_linear_layer() -> None:
    with jax.set_mesh(make_mesh(1, 2)):
        made = nnx.jit(lambda: layers.ExpertMLP(64, 128, 4, 1, rngs=nnx.Rngs(0)))()
    for name, features in (("gate", 64), ("up", 64), ("down", 128)):
        kernel = np.asarray(getattr(made, name).kernel[...])
        np.testing.assert_allclose(kernel.std((1, 2)), features**-0.5, rtol=0.05)
        assert len(np.unique(kernel[:, 0, 0])) == 4
    assert not np.array_equal(made.gate.kernel[...], made.up.kernel[...])


def test_dtypes_and_the_implementation_reach_the_products(monkeypatch: pytest.MonkeyPatch) -> None:
    given, product = [], call.run

    def noted(spec: Any, found: Any) -> jax.Array:
        given.append((found.implementation, *(x.dtype.name for x in jax.tree.leaves((found.lhs, found.rhs)))))
        return product(spec, found)

    monkeypatch.setattr(call, "run", noted)
    logits = []

    def router(x: jax.Array, k: int) -> layers.Routes:
        logits.append(x.dtype.name)
        return layers.SoftmaxTopK()(x, k)

    with jax.set_mesh(make_mesh(1, 2)):
        build = functools.partial(
            layers.ExpertMLP, 8, 12, 4, 2, dtype=jnp.bfloat16, implementation="xla", router=router
        )
        out, report = nnx.eval_shape(lambda: build(rngs=nnx.Rngs(0))(jnp.zeros((4, 8))))
        wide, _ = nnx.eval_shape(lambda: build(rngs=nnx.Rngs(0), preferred_element_type=jnp.float32)(jnp.zeros((4, 8))))
    assert wide.dtype == jnp.float32 and {*logits} == {"float32"}
    assert out.dtype == jnp.bfloat16 and {x.dtype.name for x in report} == {"float32"}
    assert {found[0] for found in given} == {"xla"} and {name for found in given for name in found[1:]} == {"bfloat16"}


MLP = functools.partial(layers.ExpertMLP, 32, 64)
# The layers have 4 devices along "tensor" and 2 along "data".
REFUSED: list[tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
    ((6, 2), {}, ValueError, r"^ExpertMLP: num_experts=6 must be a multiple of the 4 devices.*: use more experts"),
    ((8, 9), {}, ValueError, "^ExpertMLP: experts_per_token=9 must be at most num_experts=8: a token chooses"),
    ((8, 0), {}, ValueError, "^ExpertMLP: experts_per_token must be at least 1, got 0"),
    ((8, 2), {"capacity_factor": 0}, ValueError, "^ExpertMLP: capacity_factor must be positive and finite, got 0: giv"),
    ((8, 2), {"capacity_factor": float("inf")}, ValueError, "^ExpertMLP: capacity_factor .* finite, got inf: give"),
    ((8, 2), {"capacity_factor": "a"}, TypeError, "^ExpertMLP: capacity_factor must be a number, got 'a': give 1.25"),
    ((8, 2), {"capacity_factor": True}, TypeError, "^ExpertMLP: capacity_factor must be a number, got True"),
    ((8, True), {}, TypeError, "^ExpertMLP: experts_per_token must be a whole number, got True"),
    ((8, 2), {"normalize_gates": "no"}, TypeError, "^ExpertMLP: normalize_gates must be True or False, got 'no': name"),
    ((8, 2), {"use_bias": 1}, TypeError, "^ExpertMLP: use_bias must be True or False, got 1: name"),
    ((8, 2), {"shared_features": 0}, ValueError, r"^ExpertMLP\.shared: hidden_features must be at least 1, got 0"),
    ((8, 2), {"activation": "silu"}, TypeError, r"^ExpertMLP: activation .*give jax\.nn\.silu$"),
    ((8, 2), {"dtype": "bf16"}, TypeError, "^ExpertMLP: dtype must be a dtype"),
    ((8, 2), {"shared_features": 62}, ValueError, r"^ExpertMLP\.shared\.gate: out_features=62 must be a multiple"),
    ((8, 2), {"fsdp_axis": "model"}, ValueError, "^ExpertMLP: fsdp_axis='model' is no axis"),
    ((8, 2), {"kernel_init": 0.02}, TypeError, "^ExpertMLP: kernel_init must be a function, got 0.02: give jax"),
    ((8, 2), {"name": 3}, TypeError, "^ExpertMLP: name must be a string, got 3: give a name"),
    ((8, 2), {"rngs": 0}, TypeError, r"^ExpertMLP: rngs must be an nnx\.Rngs, got 0: give nnx\.Rngs"),
    ((8, 2), {"experts": 4}, TypeError, "^ExpertMLP has no argument `experts`"),
]


def test_refusals() -> None:
    with jax.set_mesh(make_mesh()):
        for arguments, changed, kind, message in REFUSED:
            with pytest.raises(kind, match=message):
                MLP(*arguments, **{"rngs": nnx.Rngs(0), **AXES, **changed})
        with pytest.raises(ValueError, match=r"^ExpertMLP: in_features=33 must be a multiple of the 2 devices"):
            layers.ExpertMLP(33, 64, 8, 2, rngs=nnx.Rngs(0), **AXES)

        def call_all() -> None:
            made = MLP(8, 2, rngs=nnx.Rngs(0), **AXES)
            x = jnp.zeros((2, 8, 32))
            for given, message in (
                ((x[..., 1:],), "^ExpertMLP: the input .*in_features=32, got"),
                ((x[:, 2:],), "^ExpertMLP: rows .*=6 must be a multiple of the 4"),
                ((x, jnp.zeros(32)), "^ExpertMLP: residual must have the shape of the result"),
                ((jnp.zeros((2, 8), int),), "^ExpertMLP: the input must be floating-point, got int32: embed token ids"),
                ((x, None, jnp.ones(8, bool)), r"^ExpertMLP: mask .* \(2, 8\), .* got bool of shape \(8,\): compare"),
                ((x, None, jnp.ones((2, 8))), r"^ExpertMLP: mask .* \(2, 8\), .* got float32 of shape \(2, 8\)"),
            ):
                with pytest.raises(ValueError, match=message):
                    made(*given)
            with pytest.raises(TypeError, match=r"^ExpertMLP: mask must be an array, got list: make it one by jnp"):
                made(x, mask=[True])
            made.gate.kernel = nnx.Param(jnp.zeros((8, 64, 32)))
            with pytest.raises(ValueError, match=r"gate\.kernel .* = \[8, 32, 64\], got \[8, 64, 32\]: .*swapaxes"):
                made(x)

        nnx.eval_shape(call_all)
        rows = jax.ShapeDtypeStruct((2, *jax.export.symbolic_shape("4*b"), 32), jnp.float32)
        for factor in ("capacity_factor", "rows_factor"):
            build = functools.partial(MLP, 8, 2, **AXES, **{factor: 1.0})
            with pytest.raises(ValueError, match=f"^ExpertMLP: {factor} needs numbers of rows, got symbols"):
                jax.eval_shape(lambda x, build=build: build(rngs=nnx.Rngs(0))(x), rows)
