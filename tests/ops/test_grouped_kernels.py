"""The kernels of grouped products, emulated: rows by group, and contractions over the rows of a group."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from overlap import Config, emulation
from overlap.choice import dispatch
from overlap.single_gpu import grouped_product

SIZES = [(100, 0, 37, 130, 1), (0, 0, 300), (300, 0), (1,) * 9, (0,), (64, 128)]
CONFIGS = [
    Config(tile_m=128, tile_n=128, stages=2),
    Config(tile_m=128, tile_n=128, stages=3, schedule="pingpong"),
    Config(tile_m=40, tile_n=128, stages=3, swap_operands=True),
]


def operands(seed: int, *shapes: tuple[int, ...]) -> list[jax.Array]:
    chance = np.random.default_rng(seed)
    return [jnp.asarray(chance.integers(-4, 5, shape), jnp.bfloat16) for shape in shapes]


def spans(sizes: tuple[int, ...], m: int) -> list[slice]:
    ends = np.minimum(np.cumsum(sizes), m)
    return [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]


@pytest.mark.parametrize("transpose_rhs", [False, True])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.tile_m}-{config.schedule}")
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_rows(sizes: tuple[int, ...], config: Config, transpose_rhs: bool) -> None:
    emulation.enable()
    m, k, n = sum(sizes) + 20, 136, 192
    lhs, rhs = operands(sum(sizes), (m, k), (len(sizes), *((n, k) if transpose_rhs else (k, n))))

    def run(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
        how = dict(out_dtype=jnp.bfloat16, config=config, target=dispatch.target())
        return grouped_product.launch(lhs, rhs, sizes, transpose_rhs=transpose_rhs, **how)

    out = np.asarray(jax.jit(run)(lhs, rhs, jnp.asarray(sizes)), np.float32)
    for group, span in enumerate(spans(sizes, m)):
        right = np.asarray(rhs[group], np.float32)
        expected = np.asarray(lhs, np.float32)[span] @ (right.T if transpose_rhs else right)
        np.testing.assert_array_equal(out[span], expected.astype(jnp.bfloat16).astype(np.float32))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_contractions(sizes: tuple[int, ...]) -> None:
    emulation.enable()
    m, k, n = sum(sizes) + 20, 136, 192
    lhs, rhs = operands(sum(sizes), (m, k), (m, n))
    lhs = lhs.at[sum(sizes) :].set(jnp.nan)  # Rows of no group do not count, whatever they hold.

    def run(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
        config = Config(tile_m=128, tile_n=128, stages=3, schedule="pingpong")
        return grouped_product.contract(lhs, rhs, sizes, out_dtype=jnp.float32, config=config, target=dispatch.target())

    out = np.asarray(jax.jit(run)(lhs, rhs, jnp.asarray(sizes)))
    left, right = np.asarray(lhs, np.float32), np.asarray(rhs, np.float32)
    for group, span in enumerate(spans(sizes, m)):
        np.testing.assert_array_equal(out[group], left[span].T @ right[span])
