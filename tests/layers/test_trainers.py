"""The adapters for trainers, without the trainers: partitions, refusals, and experts against a formula in NumPy.

tests/tools/test_trainers.py runs MaxText and levanter themselves.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import overlap
from overlap.trainers import maxtext
from overlap.trainers.levanter import moe_mlp

pytestmark = pytest.mark.one_jax

# --- MaxText ----------------------------------------------------------------------------------------------------------

BETWEEN = P(("data", "fsdp"), "tensor", None)
BATCH = ("data", "fsdp")
# The kernel of each product of a layer, how many dimensions are contracted, and the partitions of input and result.
PRODUCTS: dict[str, tuple[P, int, Any]] = {
    "query": (P("fsdp", "tensor", None), 1, (P(BATCH, "tensor", None), P(BATCH, None, "tensor", None))),
    "output": (P("tensor", None, "fsdp"), 2, (P(BATCH, None, "tensor", None), P(BATCH, "tensor", None))),
    "up": (P("fsdp", "tensor"), 1, (P(BATCH, "tensor", None), P(BATCH, None, "tensor"))),
    "down": (P("tensor", "fsdp"), 1, (P(BATCH, None, "tensor"), P(BATCH, "tensor", None))),
    "fused_mlp": (P("fsdp", None, "tensor"), 1, (P(BATCH, "tensor", None), P(BATCH, None, None, "tensor"))),
    "router": (P("fsdp", None), 1, None),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_partitions_of_maxtext(name: str) -> None:
    kernel, contracted, wanted = PRODUCTS[name]
    found = maxtext.shardings_of(kernel, contracted, BETWEEN)
    assert found == (None if wanted is None else (wanted[0], kernel, wanted[1]))


def test_gate_and_up_in_one_kernel() -> None:
    """They share one gather; their order stays."""
    mesh = jax.make_mesh((2, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((2, 8, 16), np.float32), rng.standard_normal((16, 2, 32), np.float32)
    shardings = maxtext.shardings_of(P("fsdp", None, "tensor"), 1, P("fsdp", "tensor", None))
    assert shardings is not None

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return maxtext._product(shardings, "xla", x, w, (((2,), (0,)), ((), ())), precision=None, mutable=["aqt"])

    with jax.set_mesh(mesh):
        out = jax.jit(product)(x, w)
        (choice,) = overlap.explain(product, jnp.asarray(x), jnp.asarray(w))
    assert choice.op == "all_gather_lhs_matmul"
    wanted = np.tensordot(x.astype(np.float64), w, 1)
    np.testing.assert_allclose(out, wanted, rtol=1e-4, atol=1e-4, equal_nan=False)


def configuration(**changed: Any) -> Any:
    """The fields of MaxText's configuration that are checked, with values that are served."""
    axes = ["data", "stage", "fsdp", "context", "tensor", "tensor_sequence", "expert"]
    fields = maxtext._FIELDS | maxtext._FIELDS_OF_EXPERTS
    sizes = {"ici_parallelism": [1, 1, 2, 1, 2, 1, 1], "dcn_parallelism": [1] * 7}
    others = {"num_experts": 4, "weight_dtype": "float32", "decoder_block": SimpleNamespace(value="mixtral")}
    return SimpleNamespace(**fields, mesh_axes=axes, **(sizes | others | changed))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"decoder_block": "llama4"}, "decoder_block must be none of llama4, .*, got 'llama4': train it by MaxText"),
        (
            {"ici_parallelism": [1, 2, 1, 1, 1, 1, 1]},
            r"dcn_pipeline_parallelism must be 1, got \(2, 1\): share devices",
        ),
        ({"dcn_parallelism": [1, 1, 1, 2, 1, 1, 1]}, r"dcn_context_parallelism must be 1, got \(1, 2\): share devices"),
        ({"num_experts": 3}, "num_experts must be a multiple of the 2 devices along expert, .*, got 3: share devices"),
        ({"weight_dtype": jnp.dtype("float8_e4m3fn")}, "weight_dtype must be .*, got 'float8_e4m3fn': leave it out"),
    ],
)
def test_configurations_that_are_refused(changed: dict[str, Any], message: str) -> None:
    maxtext.check(configuration())
    with pytest.raises(maxtext.NotServed, match=f"^overlap.trainers.maxtext: .*{message}"):
        maxtext.check(configuration(**changed))


def test_what_the_command_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing MaxText or another version, by name, before it is imported."""
    for version in ("0.2.4", None):

        def found(name: str, version: str | None = version) -> str:
            if version is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return version

        monkeypatch.setattr(importlib.metadata, "version", found)
        with pytest.raises(
            SystemExit, match=rf"MaxText must be 0\.2\.5, got '?{version}'?: pip install maxtext==0\.2\.5"
        ):
            maxtext.main(["base.yml", "overlap_explain=true"])
    with pytest.raises(
        SystemExit, match=r"there are overlap_implementation= and overlap_explain=, and no .*overlap_fused"
    ):
        maxtext.main(["base.yml", "overlap_fused=true"])


# --- levanter ---------------------------------------------------------------------------------------------------------

TOKENS, HIDDEN, FEATURES, EXPERTS, K = 32, 16, 24, 4, 2
ALONG = P(("data", "expert"))
SPECS = {"x": ALONG, "selected_experts": ALONG, "combine_weights": ALONG, "w_up_gate": P("expert", "data", None),
         "w_down": P("expert", "model", "data"), "token_valid": ALONG}  # fmt: skip


def operands() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "x": rng.standard_normal((TOKENS, HIDDEN), np.float32),
        "selected_experts": np.argsort(rng.random((TOKENS, EXPERTS)), -1)[:, :K].astype(np.int32),
        "combine_weights": rng.random((TOKENS, K), np.float32),
        "w_up_gate": rng.standard_normal((EXPERTS, HIDDEN, 2 * FEATURES), np.float32) / 4,
        "w_down": rng.standard_normal((EXPERTS, FEATURES, HIDDEN), np.float32) / 4,
        "token_valid": rng.random(TOKENS) < 0.8,
    }


def formula(given: dict[str, np.ndarray]) -> tuple[np.ndarray, ...]:
    """The result, and the gradients of its sum in w_down and in the combine weights, in float64."""
    out, of_weights = np.zeros((TOKENS, HIDDEN)), np.zeros((TOKENS, K))
    of_down = np.zeros((EXPERTS, FEATURES, HIDDEN))
    for token in np.flatnonzero(given["token_valid"]):
        for slot, expert in enumerate(given["selected_experts"][token]):
            z = given["x"][token].astype(np.float64) @ given["w_up_gate"][expert]
            gate, up = z[:FEATURES], z[FEATURES:]
            inside = gate / (1 + np.exp(-gate)) * up
            row = inside @ given["w_down"][expert]
            out[token] += given["combine_weights"][token, slot] * row
            of_weights[token, slot] = row.sum()
            of_down[expert] += given["combine_weights"][token, slot] * inside[:, None]
    return out, of_down, of_weights


@pytest.mark.parametrize("sizes", [(2, 2, 2), pytest.param((4, 1, 1), marks=pytest.mark.slow)])
def test_experts_of_levanter(sizes: tuple[int, int, int]) -> None:
    """Weights are cut along an axis of the tokens, too, and along one that does not cut tokens."""
    mesh = jax.make_mesh(sizes, ("data", "expert", "model"))
    given = operands()
    with jax.set_mesh(mesh):
        placed: dict[str, Any] = {name: jax.device_put(value, SPECS[name]) for name, value in given.items()}

        def total(down: jax.Array, weights: jax.Array, others: dict[str, Any]) -> Any:
            out = moe_mlp(**others, combine_weights=weights, w_down=down)
            return out.sum(), out

        arrays = placed.pop("w_down"), placed.pop("combine_weights"), placed
        (_, out), grads = jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))(*arrays)
        found = overlap.explain(lambda *given: total(*given)[1], *arrays)
    for ours, wanted in zip((out, *grads), formula(given), strict=True):
        np.testing.assert_allclose(ours, wanted, rtol=1e-4, atol=1e-4, equal_nan=False)
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, ALONG), 2)
    assert [choice.op for choice in found].count("grouped_matmul") == 2


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"implementation": "ring"}, 'implementation must be "fused", "xla" or None, got \'ring\': leave it out'),
        ({"w_down": jnp.zeros((4, 16, 24))}, r"w_down must have shape \(4, 24, 16\), got \(4, 16, 24\): transpose"),
        ({"w_up_gate": jnp.zeros((4, 24, 48))}, r"w_up_gate must have shape \(4, 16, 48\), got \(4, 24, 48\)"),
        ({"combine_weights": jnp.zeros((32, 1))}, r"combine_weights must have shape \(32, 2\), got \(32, 1\)"),
        ({"selected_experts": jnp.zeros((16, 2), int)}, r"selected_experts must have shape \(32, 2\), got \(16, 2\)"),
        ({"selected_experts": jnp.zeros((32, 2))}, "selected_experts must be integers, got float32: cast"),
        ({"combine_weights": jnp.zeros((32, 2), int)}, "combine_weights must be floating-point numbers, got int32"),
        ({"w_down": jnp.zeros((4, 24, 16), jnp.bfloat16)}, "w_down must have the dtype of x, float32, got bfloat16"),
        (
            {"token_valid": jnp.zeros(16, bool)},
            r"token_valid must be booleans of shape \(32,\), got bool of shape \(16,\)",
        ),
        ({"token_valid": jnp.zeros(32)}, "token_valid must be booleans"),
        ({"activation": "silu"}, "activation must be a function or a member"),
        (
            {"w_up_gate": jnp.zeros((3, 16, 48)), "w_down": jnp.zeros((3, 24, 16))},
            'w_up_gate must have a multiple of the 2 devices along "expert", got 3 experts: use more',
        ),
        (
            {"x": jnp.zeros((32, 16))},
            r'x must be on a mesh of Explicit axes, .* along "expert", got .*: jax.reshard it',
        ),
    ],
)
def test_what_the_experts_refuse(changed: dict[str, Any], message: str) -> None:
    with jax.set_mesh(jax.make_mesh((2, 2, 2), ("data", "expert", "model"))):
        placed = {name: jax.device_put(value, SPECS[name]) for name, value in operands().items()}
        with pytest.raises(ValueError, match=f"^moe_mlp: {message}"):
            jax.eval_shape(lambda given: moe_mlp(**given | changed), placed)


def test_experts_need_an_explicit_mesh() -> None:
    mesh = jax.make_mesh((2, 2), ("data", "expert"), axis_types=(AxisType.Auto,) * 2)
    given: dict[str, Any] = {name: jnp.asarray(value) for name, value in operands().items()}
    for context in (contextlib.nullcontext(), jax.set_mesh(mesh)):
        with context, pytest.raises(ValueError, match="moe_mlp: x must be on a mesh of Explicit axes"):
            moe_mlp(**given)
