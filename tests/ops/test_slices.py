"""Operands that are slices of an array: XLA copies those that a kernel could not read where they lie."""

import jax
import jax.numpy as jnp
import pytest

import overlap
from tests.ops.contract import SMALL, struct


@pytest.mark.parametrize(
    ("shape", "rows", "kept_apart"),
    [
        ((400, 256), slice(72, 200), False),  # 256 elements are 512 bytes. Addresses must be multiples of 256.
        ((400, 264), slice(72, 200), True),
        ((400, 192), slice(72, 200), True),
        ((3, 128, 264), 1, True),  # The kernel gets it without the dimension.
        ((3, 128, 256), 1, False),
    ],
)
def test_only_rows_that_may_begin_anywhere_are_kept_apart(shape, rows, kept_apart):
    def run(lhs, weights):
        return overlap.matmul(lhs, weights[rows], config=SMALL, implementation="fused")

    text = jax.jit(run).trace(struct(128, 128), struct(*shape)).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text and ("optimization_barrier" in text) == kept_apart


def test_a_part_of_a_vector_is_kept_apart():
    def run(lhs, rhs, scales):
        return overlap.matmul(lhs, rhs, lhs_scale=scales[3:131], config=SMALL, implementation="fused")

    types = struct(128, 128), struct(128, 256), struct(200, 1, dtype=jnp.float32)
    assert "optimization_barrier" in jax.jit(run).trace(*types).lower(lowering_platforms=("cuda",)).as_text()
