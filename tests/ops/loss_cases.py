"""Cases of the loss without logits: operands, formulas in float64, and the same as a user writes it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import overlap
from tests.oracle import make_mesh

IGNORED = -100


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes in all, and what is asked for. Columns from `vocabulary` on are padding."""

    tokens: int = 72
    features: int = 136
    columns: int = 328
    devices: int = 1
    dtype: Any = jnp.bfloat16
    transpose_w: bool = False
    gather: bool = True
    vocabulary: int | None = None
    soft_cap: float | None = None
    z_loss: float = 0.0
    with_bias: bool = False
    weighted: bool = False
    ignores: bool = False
    chunk: int | None = 128  # None: something is kept for the backward pass.
    size: float = 0.3  # Of the elements of w.
    gpu: Any = "hopper"
    check_vma: bool = True

    @property
    def words(self) -> dict[str, Any]:
        return {
            "transpose_w": self.transpose_w, "gather": self.gather, "vocabulary_size": self.vocabulary,
            "soft_cap": self.soft_cap, "z_loss": self.z_loss, "chunk": self.chunk,
            "ignored_label": IGNORED if self.ignores else None,
        }  # fmt: skip


def drawn(case: Case, seed: int | None = None) -> dict[str, Any]:
    chance = np.random.default_rng(seed)  # By default fresh in each run.
    shape = (case.columns, case.features) if case.transpose_w else (case.features, case.columns)
    x = chance.standard_normal((case.tokens, case.features))
    given = {"x": jnp.asarray(x, case.dtype), "w": jnp.asarray(case.size * chance.standard_normal(shape), case.dtype)}
    labels = chance.integers(0, case.vocabulary or case.columns, case.tokens).astype(np.int32)
    labels[[0, -1]] = 0, (case.vocabulary or case.columns) - 1
    if case.ignores:
        labels[2::7] = IGNORED
    if case.with_bias:
        given["bias"] = jnp.asarray(chance.standard_normal(case.columns), case.dtype)
    if case.weighted:
        given["weights"] = jnp.asarray(chance.random(case.tokens), jnp.float32)
    return given | {"labels": jnp.asarray(labels), "d": jnp.asarray(chance.standard_normal(case.tokens), jnp.float32)}


def formulas(case: Case, given: dict[str, Any]) -> dict[str, np.ndarray]:
    """The loss of each token, and the gradients of Σ d · loss, in float64."""
    of = {name: np.asarray(value, np.float64) for name, value in given.items() if name != "labels"}
    w = of["w"].T if case.transpose_w else of["w"]
    labels = np.asarray(given["labels"])
    rows = np.arange(case.tokens)
    z = of["x"] @ w + of.get("bias", 0)
    slope = np.ones_like(z)
    if case.soft_cap:
        t = np.tanh(z / case.soft_cap)
        z, slope = case.soft_cap * t, 1 - t * t
    z[:, case.vocabulary or case.columns :] = -np.inf
    largest = z.max(axis=1)
    lse = largest + np.log(np.exp(z - largest[:, None]).sum(axis=1))
    counted = labels >= 0
    bare = np.where(counted, lse - z[rows, np.where(counted, labels, 0)] + case.z_loss * lse**2, 0)
    weights = of.get("weights", np.ones(case.tokens))
    scale = np.where(counted, of["d"] * weights, 0)
    dz = np.exp(z - lse[:, None]) * (1 + 2 * case.z_loss * lse)[:, None]
    dz[rows, np.where(counted, labels, 0)] -= 1
    dz *= slope * scale[:, None]
    dw = of["x"].T @ dz
    found = {"loss": bare * weights, "x": dz @ w.T, "w": dw.T if case.transpose_w else dw,
             "bias": dz.sum(axis=0), "weights": of["d"] * bare}  # fmt: skip
    return {name: value for name, value in found.items() if name in ("loss", "x", "w") or name in given}


def program(case: Case, implementation: Any, **more: Any) -> Any:
    """From the arrays of `drawn` to the loss and the gradients."""
    axis = None if case.devices == 1 else "x"

    def run(given: dict[str, jax.Array]) -> dict[str, jax.Array]:
        labels = given["labels"]
        d = given["d"]
        moved = {name: value for name, value in given.items() if name not in ("labels", "d")}

        def of(moved: dict[str, jax.Array]) -> jax.Array:
            optional = {name: moved.get(name) for name in ("bias", "weights")}
            words = {**case.words, **optional, **more, "implementation": implementation}
            return overlap.linear_cross_entropy(moved["x"], moved["w"], labels, axis, **words)

        loss, pull = jax.vjp(of, moved)
        return {"loss": loss, **pull(d)[0]}

    if axis is None:
        return jax.jit(run)
    rows = P("x") if case.gather else P()
    columns = P("x") if case.transpose_w else P(None, "x")
    specs = {"x": rows, "w": columns, "labels": rows, "d": rows, "bias": P("x"), "weights": rows, "loss": rows}
    names = ["x", "w", "labels", "d", *["bias"] * case.with_bias, *["weights"] * case.weighted]
    results = ["loss", *(name for name in names if name not in ("labels", "d"))]
    return jax.jit(jax.shard_map(
        run, mesh=make_mesh(x=case.devices), in_specs=({name: specs[name] for name in names},),
        out_specs={name: specs[name] for name in results}, check_vma=case.check_vma,
    ))  # fmt: skip


def distances(found: dict[str, Any], expected: dict[str, np.ndarray]) -> dict[str, float]:
    assert found.keys() == expected.keys()
    parts = {name: np.asarray(x, np.float64) for name, x in found.items()}
    assert all(np.isfinite(x).all() for x in parts.values())  # `max` does not see NaN.
    return {name: np.linalg.norm(x - expected[name]) / np.linalg.norm(expected[name]) for name, x in parts.items()}


def plain(case: Case, given: dict[str, Any]) -> dict[str, jax.Array]:
    """The unfused loss, as a user writes it, with logits in the dtype of the operands."""

    def of(moved: dict[str, jax.Array]) -> jax.Array:
        z = moved["x"] @ (moved["w"].T if case.transpose_w else moved["w"]) + moved.get("bias", 0)
        z = z.astype(jnp.float32)
        z = z if case.soft_cap is None else case.soft_cap * jnp.tanh(z / case.soft_cap)
        z = jnp.where(jnp.arange(case.columns) < (case.vocabulary or case.columns), z, -1e30)
        lse = jax.nn.logsumexp(z, axis=1)
        safe = jnp.maximum(given["labels"], 0)
        loss = lse - jnp.take_along_axis(z, safe[:, None], 1)[:, 0] + case.z_loss * lse**2
        return jnp.where(given["labels"] >= 0, loss * moved.get("weights", 1), 0)

    loss, pull = jax.vjp(of, {name: value for name, value in given.items() if name not in ("labels", "d")})
    return {"loss": loss, **pull(given["d"])[0]}


UNCAPPED: dict[str, Any] = dict(z_loss=1e-2, with_bias=True, weighted=True, ignores=True)
EVERYTHING: dict[str, Any] = dict(soft_cap=5.0, **UNCAPPED)
