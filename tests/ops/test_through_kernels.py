"""Grouped products with several addends and results, emulated: an activation's arguments, and its derivative."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from overlap import Config
from overlap.choice import dispatch
from overlap.frame.activation import traced
from overlap.frame.form import Form
from overlap.frame.operands import Operands
from overlap.frame.operation import Operation
from overlap.kernels import epilogue
from overlap.kernels.hopper import limits as hopper_limits
from overlap.kernels.operations import GROUPED, OperandLayouts
from overlap.kernels.target import emulating
from overlap.single_gpu.grouped_kernels import RowsOfGroups
from overlap.single_gpu.grouped_product import EpilogueOperands, rows_through
from tests.ops.grouped_plans import plan_of
from tests.ops.test_grouped_kernels import emulated, operands, spans

# In the third, a warpgroup has none of a tile's rows.
PAIRS = [((100, 0, 37, 130, 1), 1), ((0, 0, 300), 2), ((64, 1, 128), 0), ((0,), 3), ((1,) * 9, 4)]
CONFIGS: list[tuple[Any, Config]] = [
    ("hopper", Config(tile_m=128, tile_n=128, stages=2)),
    ("hopper", Config(tile_m=64, tile_n=128, stages=3, schedule="pingpong")),
    ("blackwell", Config(tile_m=128, tile_n=128, stages=2)),
    ("hopper", Config(tile_m=64, tile_n=256, stages=2)),
    ("blackwell", Config(tile_m=128, tile_n=128, stages=4)),
]
# A warpgroup of this one has two blocks of rows. It has no room for columns of two sides.
TWO_BLOCKS: tuple[Any, Config] = ("hopper", Config(tile_m=128, tile_n=64, stages=3, schedule="pingpong"))


def cases(configs: list[tuple[Any, Config]]) -> list[Any]:
    pairs = [*PAIRS, *((sizes, (i + 1) % len(configs)) for sizes, i in PAIRS)]
    return [pytest.param(sizes, configs[i], marks=() if number < 3 else pytest.mark.slow)
            for number, (sizes, i) in enumerate(pairs)]  # fmt: skip


def activation(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Exact for small integers, and so is its derivative."""
    return jnp.maximum(gate, 0) * up + gate


PROVEN, _ = traced(activation, arrays=2)


def read(*values: jax.Array) -> list[np.ndarray]:
    return [np.asarray(x.astype(jnp.float32), np.float64) for x in values]


@pytest.mark.parametrize(("sizes", "on"), cases(CONFIGS), ids=str)
def test_values_and_result(sizes: tuple[int, ...], on: tuple[Any, Config]) -> None:
    """One product stores gate, up and what the activation makes of both, once they are rounded."""
    gpu, config = on
    m, k, n = sum(sizes) + 20, 72, 192
    lhs, w_gate, w_up, *biases = operands(7, (m, k), *[(len(sizes), k, n)] * 2, *[(len(sizes), n)] * 2)
    lhs = lhs.at[sum(sizes) :].set(jnp.nan)
    how = EpilogueOperands(epilogue.ProgramResults(PROVEN.with_values(jnp.bfloat16), 3))

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


@pytest.mark.parametrize(("sizes", "on"), cases([CONFIGS[0], TWO_BLOCKS, *CONFIGS[2:], CONFIGS[1]]), ids=str)
def test_cotangents_and_sums(sizes: tuple[int, ...], on: tuple[Any, Config]) -> None:
    """Of d = lhs @ rhs: cotangents through the activation, the weighted result, and the sums of d · result by row.

    Rows of no group hold NaN everywhere, and no sum sees them. n is no multiple of a tile.
    """
    gpu, config = on
    m, k, n = sum(sizes) + 20, 72, 192
    lhs, rhs, gate, up = operands(11, (m, k), (len(sizes), n, k), (m, n), (m, n))
    weights = jnp.asarray(np.random.default_rng(5).integers(1, 4, m), jnp.float32)
    lhs, gate, up, weights = (x.at[sum(sizes) :].set(jnp.nan) for x in (lhs, gate, up, weights))
    how = EpilogueOperands(epilogue.ProgramResults(PROVEN.of_cotangent(), 3, sums=True), (gate, up))

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


def test_sums_leave_out_columns_that_there_are_not() -> None:
    """Behind column n a tile computes with zeros, of which this activation makes no number."""
    proven, _ = traced(lambda gate, up: jnp.log(gate) * up, arrays=2)
    m, k, n = 40, 72, 64
    chance = np.random.default_rng()
    gate = jnp.asarray(chance.choice([2.0, 4.0, 8.0], (m, n)), jnp.bfloat16)
    lhs, rhs, up = (jnp.asarray(chance.integers(-4, 5, shape), jnp.bfloat16) for shape in ((m, k), (1, n, k), (m, n)))
    how = EpilogueOperands(epilogue.ProgramResults(proven.of_cotangent(), 3, sums=True), (gate, up))

    def run(sizes: jax.Array) -> tuple[jax.Array, ...]:
        given = Operands(lhs, (rhs,), row_scale=jnp.ones(m), group_sizes=sizes)
        return rows_through(given, plan_of(given, CONFIGS[0][1], jnp.bfloat16, True), how)

    with emulated("hopper"):
        *_, sums = jax.jit(run)(jnp.asarray([m]))
    left, right, gates, ups = read(lhs, rhs[0], gate, up)
    np.testing.assert_allclose(sums, (left @ right.T * np.log(gates) * ups).sum(axis=1), rtol=1e-4, atol=1e-2)


NEEDS = "registers per thread for its accumulator, and 64 is the most where the epilogue has several results"
SWAPS = "`swap_operands` must be False where the epilogue has several results"
MEMORY = "shared memory"
# The GPU, a configuration, and what it says with 3 results; with and without addends.
REFUSED: list[tuple[Any, Config, str | None, str | None]] = [
    ("hopper", Config(tile_m=128, tile_n=128, stages=3), None, None),
    ("hopper", Config(tile_m=128, tile_n=256, stages=2), NEEDS,
     NEEDS if hopper_limits.MOST_ACCUMULATED_WITH_RESULTS < 128 else None),
    ("hopper", Config(tile_m=40, tile_n=128, stages=3, swap_operands=True), SWAPS, SWAPS),
    ("hopper", Config(tile_m=128, tile_n=128, stages=6), MEMORY, MEMORY),
    ("blackwell", Config(tile_m=128, tile_n=128, stages=3), None, None),
    ("blackwell", Config(tile_m=128, tile_n=256, stages=2), "`tile_n` must be at most 128 where the epilogue", None),
    ("blackwell", Config(tile_m=128, tile_n=128, stages=6), MEMORY, MEMORY),
]  # fmt: skip


@pytest.mark.parametrize(("gpu", "config", "with_addends", "without"), REFUSED, ids=str)
def test_what_configurations_leave_room_for(gpu: Any, config: Config, with_addends: Any, without: Any) -> None:
    """All serve a product with one result."""
    of = jax.ShapeDtypeStruct
    types = Operands(of((512, 256), jnp.bfloat16), (of((2, 256, 256), jnp.bfloat16),), group_sizes=of((2,), jnp.int32))
    form = Form.of(types, OperandLayouts(), jnp.dtype(jnp.bfloat16))
    with emulating(gpu):
        check = functools.partial(
            RowsOfGroups(Operation(GROUPED)).check_form, form, jnp.bfloat16, config, dispatch.target()
        )
        check()
        for addend, message in ((True, with_addends), (False, without)):
            refused = contextlib.nullcontext() if message is None else pytest.raises(ValueError, match=message)
            with refused:
                check(boxes=3, addend=addend)
