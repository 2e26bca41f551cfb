"""Rung 7: a templated epilogue. An activation is a Python function, and becomes a part of the kernel.

A kernel is a JAX program that is traced when it is called. So a function that is passed to it is inlined: no enum of
known activations, no string, no second kernel is needed. The function gets the f32 accumulator in registers, before it
is rounded.

    matmul(x, w, activation=jax.nn.silu)
    matmul(x, w, activation=lambda acc: jnp.maximum(acc, 0) ** 2)

Gains: the pass of a separate elementwise kernel over the output, one read and one write of [m, n]. It costs the time of
the function itself, in the compute warpgroups, between the products of two tiles.
Constraints: the function is elementwise, and made of operations that Mosaic GPU lowers.
Source: "Pallas design" in the JAX documentation.
"""

from __future__ import annotations

from collections.abc import Callable

import jax

from lessons.hopper.cluster_multicast import CLUSTER, clustered
from lessons.hopper.tiling import Tiling
from overlap.kernels.tile_order import TileOrder


def matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    activation: Callable[[jax.Array], jax.Array] | None = None,
    tile_n: int = 256,
    stages: int = 4,
) -> jax.Array:
    """activation(lhs[m, k] @ rhs[k, n]), float16 or bfloat16; m is a multiple of 256, n of `tile_n`, k of 64."""
    t = Tiling.of(lhs, rhs, tile_n=tile_n)
    return clustered(
        t,
        stages=stages,
        name="ladder_templated_epilogue",
        tile_at=TileOrder(t.m_tiles // CLUSTER, t.n_tiles),
        activation=activation,
    )(lhs, rhs)
