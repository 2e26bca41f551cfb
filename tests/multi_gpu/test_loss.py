"""The loss without logits on GPUs: right to rounding with its gradients, the same bits, no wrong label passes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import overlap
from tests.oracle import make_mesh

TOKENS, FEATURES, COLUMNS = 200, 520, 1032  # Of a device, no multiples of tiles.
IGNORED = -100
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "all": {"transpose_w": True, "soft_cap": 5.0, "z_loss": 1e-2, "bias": True, "chunk": 320},
}


def drawn(devices: int, name: str) -> dict[str, np.ndarray]:
    """Arrays of all devices, the same in each process."""
    chance = np.random.default_rng(len(name))
    tokens, columns = devices * TOKENS, devices * COLUMNS
    given = {
        "x": 0.3 * chance.standard_normal((tokens, FEATURES)), "w": 0.3 * chance.standard_normal((FEATURES, columns)),
        "labels": chance.integers(0, columns, tokens).astype(np.int32), "d": chance.random(tokens, np.float32),
    }  # fmt: skip
    given["labels"][::7] = IGNORED
    if CASES[name].get("bias"):
        given["bias"] = chance.standard_normal(columns).astype(np.float32)
    if CASES[name].get("transpose_w"):
        given["w"] = given["w"].T
    return {key: value.astype(jnp.bfloat16) if key in ("x", "w") else value for key, value in given.items()}


def program(devices: int, name: str, implementation: str) -> Any:
    """From the arrays of `drawn` to the losses, and the gradients of x, w and the bias; whole on all devices."""
    options = {key: value for key, value in CASES[name].items() if key != "bias"}
    mesh = make_mesh(x=devices)
    of_w = P("x") if options.get("transpose_w") else P(None, "x")
    specs = {"x": P("x"), "w": of_w, "labels": P("x"), "d": P("x"), "bias": P("x")}

    def losses(given: dict[str, jax.Array], labels: jax.Array) -> jax.Array:
        return overlap.linear_cross_entropy(
            given["x"], given["w"], labels, "x", bias=given.get("bias"), ignored_label=IGNORED,
            implementation=implementation, **options,
        )  # fmt: skip

    def run(given: dict[str, jax.Array]) -> dict[str, jax.Array]:
        labels, d = given["labels"], given["d"]
        loss, pull = jax.vjp(
            lambda given: losses(given, labels), {key: given[key] for key in ("x", "w", "bias") if key in given}
        )
        return {"loss": loss, **pull(d)[0]}

    def call(given: dict[str, jax.Array]) -> dict[str, jax.Array]:
        own = {key: specs[key] for key in given}
        out = {"loss": P("x"), **{key: own[key] for key in ("x", "w", "bias") if key in own}}
        return jax.shard_map(run, mesh=mesh, in_specs=(own,), out_specs=out, check_vma=False)(given)

    return jax.jit(call, out_shardings=jax.NamedSharding(mesh, P()))


def formulas(given: dict[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    """The same in float64."""
    options, wide = CASES[name], {key: value.astype(np.float32).astype(np.float64) for key, value in given.items()}
    x, w = wide["x"], wide["w"].T if options.get("transpose_w") else wide["w"]
    z = x @ w + wide.get("bias", 0)
    cap = options.get("soft_cap")
    capped = z if cap is None else cap * np.tanh(z / cap)
    lse = np.log(np.exp(capped).sum(1))
    counts = given["labels"] != IGNORED
    rows, labels = np.arange(len(x))[counts], given["labels"][counts]
    squares = options.get("z_loss", 0.0)
    loss = np.zeros(len(x))
    loss[counts] = (lse + squares * lse**2)[counts] - capped[rows, labels]
    slopes = np.exp(capped - lse[:, None]) * (1 + 2 * squares * lse)[:, None]
    slopes[rows, labels] -= 1
    slopes *= (wide["d"] * counts)[:, None] * (1 if cap is None else 1 - (capped / cap) ** 2)
    of_w = x.T @ slopes
    found = {"loss": loss, "x": slopes @ w.T, "w": of_w.T if options.get("transpose_w") else of_w}
    return found | ({"bias": slopes.sum(0)} if "bias" in given else {})


def distances(found: dict[str, np.ndarray], exact: dict[str, np.ndarray]) -> dict[str, float]:
    assert found.keys() == exact.keys()
    assert all(np.isfinite(value).all() for value in found.values())  # `norm` of NaN compares as False only.
    return {key: float(np.linalg.norm(found[key] - exact[key]) / np.linalg.norm(exact[key])) for key in exact}


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients(devices, name):
    """At most twice as far from float64 as XLA's form, and the same bits in five launches."""
    given = drawn(devices, name)
    fused = program(devices, name, "fused")
    results = [{key: np.asarray(value, np.float32) for key, value in fused(given).items()} for _ in range(5)]
    for again in results[1:]:
        for key, value in again.items():
            np.testing.assert_array_equal(value, results[0][key], key)
    by_xla = {key: np.asarray(value, np.float32) for key, value in program(devices, name, "xla")(given).items()}
    exact = formulas(given, name)
    ours, theirs = distances(results[0], exact), distances(by_xla, exact)
    for key, distance in ours.items():
        assert distance <= 2 * max(theirs[key], 1e-3), (key, distance, theirs[key])
    if name == "plain":  # A wrong label spoils its token alone.
        given["labels"][5] = devices * COLUMNS
        found = {key: np.asarray(value, np.float32) for key, value in fused(given).items()}
        assert np.flatnonzero(np.isnan(found["loss"])).tolist() == [5]
        assert np.flatnonzero(np.isnan(found["x"]).any(1)).tolist() == [5] and np.isnan(found["w"]).any()
