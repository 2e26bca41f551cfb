"""The kernels of grouped products, emulated: rows by group, and contractions over the rows of a group."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from overlap import Config
from overlap.emulation import emulate
from overlap.frame.operands import F32, Operands
from overlap.kernels.target import emulating
from overlap.single_gpu import grouped_product
from tests.ops.grouped_plans import plan_of

SIZES = [(100, 0, 37, 130, 1), (0, 0, 300), (300, 0), (1,) * 9, (0,), (64, 128)]
CONFIGS: list[tuple[Any, Config]] = [
    ("hopper", Config(tile_m=128, tile_n=128, stages=2)),
    ("hopper", Config(tile_m=128, tile_n=128, stages=3, schedule="pingpong")),
    ("blackwell", Config(tile_m=128, tile_n=128, stages=3)),
    ("hopper", Config(tile_m=40, tile_n=128, stages=3, swap_operands=True)),
    ("blackwell", Config(tile_m=128, tile_n=64, stages=2)),
]


def some(*others: list) -> list:
    """All combinations with `SIZES`; a few of them, with each value, in `make test`."""
    cases = list(itertools.product(SIZES, *others))
    few = {(sizes, *(other[i % len(other)] for other in others)) for i, sizes in enumerate(SIZES)}
    return [pytest.param(*case, marks=() if case in few else pytest.mark.slow) for case in cases]


def operands(seed: int, *shapes: tuple[int, ...]) -> list[jax.Array]:
    chance = np.random.default_rng(seed)
    return [jnp.asarray(chance.integers(-4, 5, shape), jnp.bfloat16) for shape in shapes]


def spans(sizes: tuple[int, ...], m: int) -> list[slice]:
    ends = np.minimum(np.cumsum(sizes), m)
    return [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]


@contextlib.contextmanager
def emulated(gpu: Any) -> Iterator[None]:
    """Few cores, so that each computes several tiles."""
    with emulating(gpu), emulate(cores=3) as run:
        yield
        run.check()


@pytest.mark.parametrize(
    ("sizes", "on", "transpose_rhs", "ks"), some(CONFIGS, [False, True], [(136,), (72, 136), (8, 64, 200)]), ids=str
)
def test_rows(sizes: tuple[int, ...], on: tuple[Any, Config], transpose_rhs: bool, ks: tuple[int, ...]) -> None:
    """With several `ks` the products of as many pairs are added, in f32: the sum is rounded once."""
    gpu, config = on
    m, n = sum(sizes) + 20, 192
    lefts = operands(sum(sizes), *((m, k) for k in ks))
    rights = operands(sum(sizes) + 1, *((len(sizes), *((n, k) if transpose_rhs else (k, n))) for k in ks))
    lefts = [lhs.at[sum(sizes) :].set(jnp.nan) for lhs in lefts]  # Rows of no group do not count, whatever they hold.

    def run(lefts: list[jax.Array], rights: list[jax.Array], sizes: jax.Array) -> jax.Array:
        (lhs, *more), (rhs, *others) = lefts, rights
        given = Operands(lhs, (rhs,), group_sizes=sizes, more_lefts=tuple(more), more_rights=tuple(others))
        return grouped_product.rows(given, plan_of(given, config, jnp.bfloat16, transpose_rhs), clears=True)

    with emulated(gpu):
        out = np.asarray(jax.jit(run)(lefts, rights, jnp.asarray(sizes)), np.float32)
    for group, span in enumerate(spans(sizes, m)):
        pairs = [(np.asarray(a, np.float32)[span], np.asarray(b[group], np.float32)) for a, b in zip(lefts, rights)]
        expected = np.sum([a @ (b.T if transpose_rhs else b) for a, b in pairs], axis=0)
        np.testing.assert_array_equal(out[span], expected.astype(jnp.bfloat16).astype(np.float32))
    assert not out[sum(sizes) :].any()


@pytest.mark.parametrize(("sizes", "on"), some([on for on in CONFIGS if not on[1].swap_operands]), ids=str)
def test_contractions(sizes: tuple[int, ...], on: tuple[Any, Config]) -> None:
    gpu, config = on
    m, k, n = sum(sizes) + 20, 136, 192
    lhs, rhs = operands(sum(sizes), (m, k), (m, n))
    lhs = lhs.at[sum(sizes) :].set(jnp.nan)  # Rows of no group do not count, whatever they hold.

    def run(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
        given = Operands(lhs, (rhs,), group_sizes=sizes)
        return grouped_product.contraction(given, plan_of(given, config, F32))

    with emulated(gpu):
        out = np.asarray(jax.jit(run)(lhs, rhs, jnp.asarray(sizes)))
    left, right = np.asarray(lhs, np.float32), np.asarray(rhs, np.float32)
    for group, span in enumerate(spans(sizes, m)):
        np.testing.assert_array_equal(out[group], left[span].T @ right[span])
