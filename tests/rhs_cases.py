"""Helpers of the tests of `all_gather_rhs_matmul`: calls under `shard_map`, operands, and comparisons of results."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import overlap
from tests.oracle import on_mesh
from tests.product_cases import integers, oracle_of

ROWS = P("x", None)
ALONG = ["n", "k"]
SMALL = overlap.Config(tile_n=128, stages=2)


def weights(along: str, axis: Any = "x") -> P:
    """Returns the partition spec of the weights."""
    return P(axis, None) if along == "k" else P(None, axis)


def call(along: str, axis: Any = "x", **kwargs: Any) -> Any:
    dimension = 0 if along == "k" else 1
    return lambda a, b: overlap.all_gather_rhs_matmul(a, b, axis, dimension=dimension, **kwargs)


def fused(along: str, config: Any = SMALL, **kwargs: Any) -> Any:
    return call(along, config=config, implementation="fused", **kwargs)


def mapped(mesh: Any, along: str, function: Any, out_specs: Any = ROWS) -> Any:
    return on_mesh(mesh, function, in_specs=(ROWS, weights(along)), out_specs=out_specs)


def gathered(rhs: Any, along: str) -> Any:
    return lax.all_gather(rhs, "x", axis=0 if along == "k" else 1, tiled=True)


def product(devices: int, along: str, m: int, shard: tuple[int, int], seed: int = 0) -> Any:
    """Draws operands: `m` rows per device, and weights whose shards have the shape `shard`."""
    k, n = (devices * shard[0], shard[1]) if along == "k" else (shard[0], devices * shard[1])
    return integers(2 * seed, devices * m, k), integers(2 * seed + 1, k, n)


def assert_exact(function: Any, lhs: Any, rhs: Any) -> None:
    expected = oracle_of(lhs, rhs).astype(jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(function(lhs, rhs), np.float32), expected.astype(np.float32))
