"""A stand-in for `grouped_matmul`, by XLA alone, until the operation with a kernel replaces this file."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from overlap.choice.dispatch import Implementation
from overlap.frame import arguments
from overlap.frame.signatures import AnyArray, Given, PerRhs
from overlap.kernels.config import Config


def grouped_matmul(
    lhs: AnyArray,
    rhs: AnyArray | Sequence[AnyArray],
    group_sizes: AnyArray,
    *,
    bias: PerRhs | None = None,
    activation: Callable[..., jax.Array] | None = None,
    preferred_element_type: DTypeLike | None = None,
    transpose_rhs: bool = False,
    config: Config | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Multiplies the rows of each group by the group's matrix; rows behind all groups are zero.

    Example:
      >>> overlap.grouped_matmul(jnp.ones((4, 2)), jnp.ones((3, 2, 8)), jnp.array([1, 0, 2])).shape
      (4, 8)
    """
    arguments.one_of("implementation", implementation, ("fused", "xla"))
    dtype = arguments.result_dtype(preferred_element_type, lhs.dtype)
    ends = jnp.cumsum(group_sizes)
    row = jnp.arange(lhs.shape[0])
    group = (row[:, None] >= ends).sum(1)
    weights: Given = rhs if isinstance(rhs, (list, tuple)) else [rhs]
    biases: Given = bias if isinstance(bias, (list, tuple)) else [bias] * len(weights)
    mine = (group == jnp.arange(len(group_sizes))[:, None])[..., None]
    outs = []
    for weight, one in zip(weights, biases, strict=True):
        out = jnp.einsum(
            "emk,enk->emn" if transpose_rhs else "emk,ekn->emn",
            jnp.where(mine, lhs, 0), weight, preferred_element_type=jnp.float32,
        )  # fmt: skip
        outs.append(jnp.where(mine, out if one is None else out + one[:, None], 0).sum(0))
    result = activation(*outs) if activation is not None else outs[0]
    return jnp.where((row < ends[-1])[:, None], result, 0).astype(dtype)
