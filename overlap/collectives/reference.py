"""The same operations by XLA: NCCL, then cuBLAS."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax


def all_gather_lhs_matmul(
    lhs: jax.Array, rhs: jax.Array, axis_name: str | tuple[str, ...], out_dtype: Any
) -> jax.Array:
    """[m_shard, k] gathered along `axis_name`, times [k, n_shard]."""
    gathered = lax.all_gather(lhs, axis_name, axis=0, tiled=True)
    return lax.dot(gathered, rhs, preferred_element_type=out_dtype)


def all_gather_lhs_matmul_backward(
    lhs: jax.Array, rhs: jax.Array, axis_name: str | tuple[str, ...], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Cotangents of both operands: a matmul + reduce-scatter, and a matmul with the left operand gathered anew."""
    d_gathered = lax.dot_general(cotangent, rhs, (((1,), (1,)), ((), ())), preferred_element_type=lhs.dtype)
    d_lhs = lax.psum_scatter(d_gathered, axis_name, scatter_dimension=0, tiled=True)
    gathered = lax.all_gather(lhs, axis_name, axis=0, tiled=True)
    d_rhs = lax.dot_general(gathered, cotangent, (((0,), (0,)), ((), ())), preferred_element_type=rhs.dtype)
    return d_lhs, d_rhs
