"""Clears the rows of a k step that do not belong to the contraction of its tile (`Hooks.last_k_at`).

TMA loads whole k steps. In the last k step of a group of rows, the rows of the next group follow. They must count as
zeros, whatever they hold. So they are set to zero in shared memory before the tensor cores read the stage.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from overlap.kernels.tma.staging import Buffers
from overlap.primitives.integers import quotient
from overlap.primitives.types import Index, SmemRef

# This many rows of a box, of 128 bytes each, fill one store of 16 bytes by each thread of a warpgroup.
_BLOCK_ROWS = 16


def operand_boxes(buffers: Buffers, stage: Index) -> tuple[SmemRef, SmemRef]:
    """Returns the boxes of both operands in a stage, [boxes, k, width] without swizzling; of `lhs` those loaded."""
    boxes_smem = buffers.lhs[2]
    loaded = buffers.plan.rows // boxes_smem.shape[-1]
    return boxes_smem.at[stage, pl.ds(0, loaded)], buffers.rhs[2].at[stage]


def clear_rows(boxes_smem: SmemRef, first: Index) -> None:
    """Sets the rows from `first` on to zero. The caller must `commit_smem` before the tensor cores read them."""
    boxes, rows, width = boxes_smem.shape

    # A loop: unrolled, these stores are half of the equations of a kernel.
    @pl.loop(quotient(first, _BLOCK_ROWS), rows // _BLOCK_ROWS)
    def _block(index: Index) -> None:
        begin = index * _BLOCK_ROWS
        for box in range(boxes):
            block_smem = boxes_smem.at[box, pl.ds(begin, _BLOCK_ROWS)]
            layout = plgpu.Layout.WG_STRIDED((_BLOCK_ROWS, width), vec_size=8)
            values = plgpu.load(block_smem, layout=layout, optimized=False)
            row = begin + lax.broadcasted_iota(jnp.int32, values.shape, 0)
            block_smem[...] = jnp.where(row < first, values, jnp.zeros_like(values))
