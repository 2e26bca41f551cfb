"""Grouped products with several addends and results, emulated: an activation's arguments, and its derivative."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from overlap import Config
from overlap.frame.activation import traced
from overlap.frame.operands import Operands
from overlap.kernels import epilogue
from overlap.single_gpu.grouped_product import Through, rows_through
from tests.ops.grouped_plans import plan_of
from tests.ops.test_grouped_kernels import emulated, operands, spans

PAIRS = [((100, 0, 37, 130, 1), 1), ((0, 0, 300), 2), ((64, 128), 0), ((0,), 3), ((1,) * 9, 4)]
CONFIGS: list[tuple[Any, Config]] = [
    ("hopper", Config(tile_m=128, tile_n=128, stages=2)),
    ("hopper", Config(tile_m=64, tile_n=128, stages=3, schedule="pingpong")),
    ("blackwell", Config(tile_m=128, tile_n=128, stages=2)),
    ("hopper", Config(tile_m=64, tile_n=256, stages=2)),
    ("blackwell", Config(tile_m=128, tile_n=128, stages=4)),
]
CASES = [pytest.param(sizes, CONFIGS[i], marks=() if number < 3 else pytest.mark.slow)
         for number, (sizes, i) in enumerate([*PAIRS, *((sizes, (i + 1) % 5) for sizes, i in PAIRS)])]  # fmt: skip


def activation(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Exact for small integers, and so is its derivative."""
    return jnp.maximum(gate, 0) * up + gate


PROVEN, _ = traced(activation, arrays=2)


def read(*values: jax.Array) -> list[np.ndarray]:
    return [np.asarray(x.astype(jnp.float32), np.float64) for x in values]


@pytest.mark.parametrize(("sizes", "on"), CASES, ids=str)
def test_values_and_result(sizes: tuple[int, ...], on: tuple[Any, Config]) -> None:
    """One product stores gate, up and what the activation makes of both, once they are rounded."""
    gpu, config = on
    m, k, n = sum(sizes) + 20, 72, 192
    lhs, w_gate, w_up, *biases = operands(7, (m, k), *[(len(sizes), k, n)] * 2, *[(len(sizes), n)] * 2)
    lhs = lhs.at[sum(sizes) :].set(jnp.nan)
    how = Through(epilogue.Through(PROVEN.with_values(jnp.bfloat16), 3))

    def run(sizes: jax.Array) -> tuple[jax.Array, ...]:
        given = Operands(lhs, (w_gate, w_up), biases=tuple(b.astype(jnp.float32) for b in biases), group_sizes=sizes)
        return rows_through(given, plan_of(given, config, jnp.bfloat16, gated=PROVEN), how)

    with emulated(gpu):
        found = read(*jax.jit(run)(jnp.asarray(sizes)))
    left, *weights = read(lhs, w_gate, w_up)
    for group, span in enumerate(spans(sizes, m)):
        z = [left[span] @ w[group] + bias[group] for w, bias in zip(weights, read(*biases), strict=True)]
        gate, up = read(*(jnp.asarray(x).astype(jnp.bfloat16) for x in z))
        expected = [gate, up, np.maximum(gate, 0) * up + gate]
        for out, value in zip(found, expected, strict=True):
            np.testing.assert_array_equal(out[span], read(jnp.asarray(value).astype(jnp.bfloat16))[0])


@pytest.mark.parametrize(("sizes", "on"), CASES, ids=str)
def test_cotangents_and_sums(sizes: tuple[int, ...], on: tuple[Any, Config]) -> None:
    """Of d = lhs @ rhs: cotangents through the activation, the weighted result, and the sums of d · result by row.

    Rows of no group hold NaN everywhere, and no sum sees them. n is no multiple of a tile.
    """
    gpu, config = on
    m, k, n = sum(sizes) + 20, 72, 192
    lhs, rhs, gate, up = operands(11, (m, k), (len(sizes), n, k), (m, n), (m, n))
    weights = jnp.asarray(np.random.default_rng(5).integers(1, 4, m), jnp.float32)
    lhs, gate, up, weights = (x.at[sum(sizes) :].set(jnp.nan) for x in (lhs, gate, up, weights))
    how = Through(epilogue.Through(PROVEN.of_cotangent(), 3, sums=True), (gate, up))

    def run(sizes: jax.Array) -> tuple[jax.Array, ...]:
        given = Operands(lhs, (rhs,), row_scale=weights, group_sizes=sizes)
        return rows_through(given, plan_of(given, config, jnp.bfloat16, True), how)

    with emulated(gpu):
        found = read(*jax.jit(run)(jnp.asarray(sizes)))
    left, right, gates, ups, w = read(lhs, rhs, gate, up, weights[:, None])
    for group, span in enumerate(spans(sizes, m)):
        d, a, b = left[span] @ right[group].T, gates[span], ups[span]
        h = np.maximum(a, 0) * b + a
        # jax halves the derivative of a maximum where both are equal.
        slope = np.where(a > 0, 1, np.where(a == 0, 0.5, 0))
        expected = [w[span] * d * (slope * b + 1), w[span] * d * np.maximum(a, 0), w[span] * h]
        for out, value in zip(found, expected, strict=False):
            np.testing.assert_array_equal(out[span], read(jnp.asarray(value).astype(jnp.bfloat16))[0])
        np.testing.assert_array_equal(found[3][span], (d * h).sum(axis=1))
