"""Reshapes the operands of a product whose sum is scattered, so that blocks have a dimension of their own.

TMA then stores nothing beyond the edge of a block, and loads zeros there.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from overlap.collectives.reduce.blocks_schedule import ReduceScatterSchedule
from overlap.frame.operands import Operands
from overlap.frame.operation import LaunchPlan
from overlap.kernels import epilogue
from overlap.kernels.config import tile_k
from overlap.primitives.integers import ceil_div


def shape_in_blocks(shape: tuple[int, int, int], schedule: ReduceScatterSchedule) -> tuple[int, int, int, int]:
    """Returns the shape [batch, m, n] with a dimension for the blocks, in front of the dimension that is scattered."""
    batch, m, n = shape
    devices = schedule.devices
    return (batch, devices, m // devices, n) if schedule.along == "m" else (batch, m, devices, n // devices)


def in_blocks(
    operands: Operands, plan: LaunchPlan, schedule: ReduceScatterSchedule
) -> tuple[list[jax.Array], list[jax.Array], epilogue.Vectors]:
    """Returns the left operands, the right ones, and the vectors of the epilogue, with a dimension for the blocks.

    Returns:
      lefts: [batch, blocks, m, k] or, transposed, [batch, k, blocks, m]. There is 1 block if n is scattered.
      rights: [k, blocks, n] or, transposed, [blocks, n, k]. There is 1 block if m is scattered.
      vectors: scales of rows [batch, blocks, m], and scales of columns [blocks, n]. The bias is [n], or [blocks, n] if
        columns are scattered and every device needs the whole result. Rows and columns are padded to whole tiles.
    """
    config = plan.config
    layouts = plan.layouts
    (m, _), (_, n) = layouts.m_k(operands.lhs.shape), layouts.k_n(operands.rhs_list[0].shape)
    m_blocks, n_blocks = (schedule.devices, 1) if schedule.along == "m" else (1, schedule.devices)
    lefts, rights = [], []
    for lhs, rhs in zip(operands.lefts, operands.rights, strict=True):
        k, _ = layouts.k_n(rhs.shape)
        rows = (k, m_blocks, m // m_blocks) if layouts.transpose_lhs else (m_blocks, m // m_blocks, k)
        lefts.append(lhs.reshape(-1, *rows))
        columns = (n_blocks, n // n_blocks, k) if layouts.transpose_rhs else (k, n_blocks, n // n_blocks)
        rights.append(rhs.reshape(columns))
    rows, columns = operands.row_scale, operands.column_scales
    has_bias_of_all = plan.operation.spec.replicates and schedule.along == "n"
    biases = None if has_bias_of_all else operands.biases
    vectors = plan.vectors(dataclasses.replace(operands, row_scale=None, column_scales=None, biases=biases))
    if has_bias_of_all and operands.biases is not None:
        bias = padded(operands.biases[0].reshape(n_blocks, n // n_blocks), config.tile_n)
        vectors = dataclasses.replace(vectors, bias=bias)
    if rows is not None:
        rows = padded(rows.reshape(-1, m_blocks, m // m_blocks), config.tile_m)
    if columns is not None:
        columns = padded(columns[0].reshape(n_blocks, n // n_blocks), config.tile_n)
    return lefts, rights, dataclasses.replace(vectors, row_scale=rows, column_scale=columns)


def k_steps(plan: LaunchPlan) -> list[int]:
    """Returns the k steps of each pair, which a tile goes through one after the other."""
    return [ceil_div(k, tile_k(plan.form.dtype)) for k in plan.form.depths]


def addends_in_blocks(operands: Operands, plan: LaunchPlan, schedule: ReduceScatterSchedule) -> list[jax.Array]:
    """Returns the addend, in a list; [] if there is none.

    The addend is [batch or 1, m, n] of this device's block. If every device needs the whole result, the addend has all
    blocks, in the shape `shape_in_blocks`. It has the result's dtype, since it passes through the result's epilogue
    buffers.
    """
    given = [x.reshape(-1, *x.shape[-2:]).astype(plan.out_dtype) for x in operands.addends or ()]
    return [x.reshape(shape_in_blocks(x.shape, schedule)) for x in given] if plan.operation.spec.replicates else given


def padded(vectors: jax.Array, unit: int) -> jax.Array:
    """Returns vectors, padded with zeros along the last dimension to a multiple of `unit` entries."""
    return jnp.pad(vectors, ((0, 0),) * (vectors.ndim - 1) + ((0, -vectors.shape[-1] % unit),))
