"""Helpers of the tests of `matmul` and of its mainloop: operands, and comparisons of results."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from overlap.kernels.stream_k import Piece, StreamK
from overlap.kernels.target import Target

# Operands and oracles use NumPy: jax would compile a program for each new shape.

B200, H200 = Target("gpu", "NVIDIA B200", 148), Target("gpu", "NVIDIA H200", 132)


def normal(seed: int, *shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32).astype(dtype))


def integers(seed: int, *shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    """Draws small integers. Their products are exact in f32, in any order of summation."""
    return jnp.asarray(np.random.default_rng(seed).integers(-3, 4, shape).astype(dtype))


def in_f32(x: Any, transposed: bool = False) -> np.ndarray:
    x = np.asarray(x).astype(np.float32)
    return np.swapaxes(x, -1, -2) if transposed else x


def oracle_of(lhs: Any, rhs: Any, *, transpose_lhs: bool = False, transpose_rhs: bool = False, lhs_scale: Any = 1.0,
              rhs_scale: Any = 1.0, bias: Any = 0.0, addend: Any = 0.0, activation: Any = None,
              **_: Any) -> Any:  # fmt: skip
    """Computes the result of `matmul` in f32 with NumPy."""
    exact = in_f32(lhs, transpose_lhs) @ in_f32(rhs, transpose_rhs) * in_f32(lhs_scale) * in_f32(rhs_scale)
    exact = exact + in_f32(bias) + in_f32(addend)
    return exact if activation is None else np.asarray(activation(exact))


def pieces_of(work: StreamK, cta: int) -> list[Piece]:
    return [work.piece(cta, ordinal) for ordinal in range(work.pieces(cta))]


def handed_over(work: StreamK) -> int:
    """Returns the number of pieces that share their tile. For these, CTAs hand over sums that other CTAs finish."""
    return sum(piece.pieces_per_tile > 1 for cta in range(work.num_ctas) for piece in pieces_of(work, cta))
