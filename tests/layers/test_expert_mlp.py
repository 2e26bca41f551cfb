"""`layers.ExpertMLP` against a loop over its experts on one device: values, losses, gradients, placement, refusals."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from overlap import layers
from overlap.experts import operations
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


def reference(p: Any, x: jax.Array, capacity: int | None, groups: int, normalize: bool) -> Any:
    """The layer, expert by expert. Each of `groups` parts of the batch has the capacity for itself."""
    out = x + mlp(p["shared"], x) if "shared" in p else x
    logits = x @ p["router"]["kernel"]
    probability = jax.nn.softmax(logits)
    least = jnp.sort(probability)[..., -CHOSEN, None]
    is_chosen = probability >= least
    gates = jnp.where(is_chosen, probability, 0)
    gates = gates / gates.sum(-1, keepdims=True) if normalize else gates
    counts = is_chosen
    if capacity is not None:
        # In the order of the two devices, which have parts of the rows, then of batch and rows.
        padded = jnp.pad(is_chosen, ((0, 0), (0, x.shape[1] % 2), (0, 0)))
        taken = padded.reshape(groups, x.shape[0] // groups, 2, -1, EXPERTS).swapaxes(1, 2)
        before = jnp.cumsum(taken.reshape(groups, -1, EXPERTS), 1).reshape(taken.shape).swapaxes(1, 2)
        counts = is_chosen & (before.reshape(padded.shape)[:, : x.shape[1]] <= capacity)
    for expert in range(EXPERTS):
        out += jnp.where(counts, gates, 0)[..., expert, None] * mlp(p, x, expert)
    share, tokens = is_chosen.mean((0, 1)) / CHOSEN, x.shape[0] * x.shape[1]
    balance = EXPERTS * (share * probability.mean((0, 1))).sum()
    dropped = 1 - counts.sum() / (tokens * CHOSEN)
    return out, layers.RouterReport(balance, (jax.nn.logsumexp(logits, -1) ** 2).mean(), dropped)


def loss_of(outs: Any) -> Any:
    out, report = outs
    weights = np.cos(np.arange(out.size) * 2).reshape(out.shape)
    return (out * weights).sum() + report.load_balance_loss + report.z_loss, outs


# Data and tensor devices, the kind of mesh, rows, capacity in rows, and keywords.
CASES: dict[str, Any] = {
    "auto, a shared expert": (2, 2, AUTO, 8, None, {"shared_features": 16}),
    "explicit, dropped": (2, 2, EXPLICIT, 8, 5, {"use_bias": True, "capacity_factor": 0.6, "normalize_gates": False}),
    "explicit, rows whole": (
        1,
        2,
        EXPLICIT,
        6,
        8,
        {"sequence_parallel": False, "fsdp_axis": None, "capacity_factor": 0.6},
    ),
    "auto, rows whole": (2, 2, AUTO, 6, None, {"sequence_parallel": False}),
    "one device": (1, 1, AUTO, 8, None, {}),
}


@pytest.mark.parametrize("case", [name if i < 3 else pytest.param(name, marks=pytest.mark.slow)
                                  for i, name in enumerate(CASES)])  # fmt: skip
def test_the_layer(case: str) -> None:
    data, tensor, kind, rows, capacity, options = CASES[case]
    mesh, x = make_mesh(data, tensor, kind), draw(1, (4, rows, 8))
    between = WHOLE if "sequence_parallel" in options else BETWEEN
    if between == WHOLE:  # The devices do not divide the rows.
        x = x[:, :-1]
    with jax.set_mesh(mesh):
        made = nnx.jit(lambda: layers.ExpertMLP(8, 12, EXPERTS, CHOSEN, rngs=nnx.Rngs(0), **AXES | options))()
        spread(made)
        run = nnx.jit(nnx.value_and_grad(lambda layer, x: loss_of(nnx.remat(layers.ExpertMLP.__call__)(layer, x, x)),
                                         argnums=(0, 1), has_aux=True))  # fmt: skip
        (_, (out, report)), (of_layer, of_x) = run(made, put(x, mesh, between))
    normalize = options.get("normalize_gates", True)

    def expected(p: Any, x: jax.Array) -> Any:
        return loss_of(reference(p, x, capacity, data, normalize))

    with jax.default_matmul_precision("highest"):
        (_, right), grads = jax.jit(jax.value_and_grad(expected, argnums=(0, 1), has_aux=True))(numbers(made), x)
    assert_near((out, report), right, 1e-5)
    assert (report.dropped > 0) == (capacity is not None)
    assert_near((nnx.to_pure_dict(of_layer), of_x), grads, 1e-5)
    fsdp = options.get("fsdp_axis", "data")
    assert same(out, between)
    for module in (made.gate, made.down):
        assert same(module.kernel[...], P("tensor", fsdp, None)) and same(made.router.kernel[...], P(None, None))
    # A negative control.
    assert np.linalg.norm(out - reference(numbers(made), x[::-1], capacity, data, normalize)[0]) > 1


def test_each_expert_begins_as_a_linear_layer() -> None:
    with jax.set_mesh(make_mesh(1, 2)):
        made = nnx.jit(lambda: layers.ExpertMLP(64, 128, 4, 1, rngs=nnx.Rngs(0)))()
    for name, features in (("gate", 64), ("up", 64), ("down", 128)):
        kernel = np.asarray(getattr(made, name).kernel[...])
        np.testing.assert_allclose(kernel.std((1, 2)), features**-0.5, rtol=0.05)
        assert len(np.unique(kernel[:, 0, 0])) == 4
    assert not np.array_equal(made.gate.kernel[...], made.up.kernel[...])


def test_dtypes_and_the_implementation_reach_the_products(monkeypatch: pytest.MonkeyPatch) -> None:
    given, product = [], operations.multiplied

    def noted(lhs: jax.Array, rhs: Any, *args: Any, **options: Any) -> jax.Array:
        given.append((options["implementation"], *(x.dtype.name for x in jax.tree.leaves((lhs, rhs)))))
        return product(lhs, rhs, *args, **options)

    monkeypatch.setattr(operations, "multiplied", noted)
    with jax.set_mesh(make_mesh(1, 2)):
        build = lambda: layers.ExpertMLP(8, 12, 4, 2, dtype=jnp.bfloat16, implementation="xla", rngs=nnx.Rngs(0))  # noqa: E731
        out, report = nnx.eval_shape(lambda: build()(jnp.zeros((4, 8))))
    assert out.dtype == jnp.bfloat16 and {x.dtype.name for x in report} == {"float32"}
    assert {found[0] for found in given} == {"xla"} and {name for found in given for name in found[1:]} == {"bfloat16"}


MLP = functools.partial(layers.ExpertMLP, 32, 64)
# The layers have 4 devices along "tensor" and 2 along "data".
REFUSED: list[tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
    ((6, 2), {}, ValueError, r"^ExpertMLP: num_experts=6 must be a multiple of the 4 devices.*: use more experts"),
    ((8, 9), {}, ValueError, "^ExpertMLP: experts_per_token=9 must be at most num_experts=8: a token chooses"),
    ((8, 0), {}, ValueError, "^ExpertMLP: experts_per_token must be at least 1, got 0"),
    (
        (8, 2),
        {"capacity_factor": 0},
        ValueError,
        "^ExpertMLP: capacity_factor must be positive and finite, got 0: give 1",
    ),
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
            for shape, residual, message in (
                ((2, 8, 31), None, "^ExpertMLP: the input .*in_features=32, got"),
                ((2, 6, 32), None, "^ExpertMLP: rows .*=6 must be a multiple of the 4"),
                ((2, 8, 32), jnp.zeros(32), "^ExpertMLP: residual must have the shape of the result"),
            ):
                with pytest.raises(ValueError, match=message):
                    made(jnp.zeros(shape), residual)

        nnx.eval_shape(call_all)
