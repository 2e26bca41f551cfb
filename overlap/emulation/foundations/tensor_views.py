"""Resolves references to parts of tensor memory, which has 128 lanes of 512 columns, with 32 bits in each.

The emulator keeps an allocation as an array of its logical shape. The columns matter only where allocations alias
(`plgpu.RefUnion`). There the array consists of 32-bit cells, and a reference is a view of some columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

LANES, COLUMNS = 128, 512
_ALIGNMENT = 4  # An allocation begins at a multiple of this number of columns.


def _bits(dtype: Any) -> int:
    return (jnp.finfo if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo)(dtype).bits


def columns_of(aval: Any) -> int:
    """How many columns an allocation takes; 0 if it is not in tensor memory."""
    if str(getattr(aval.memory_space, "value", aval.memory_space)) != "tmem":
        return 0
    *batch, rows, minor = aval.shape
    count = aval.layout.cols_in_shape((rows, math.prod(batch) * minor), _bits(aval.dtype))
    return -(-count // _ALIGNMENT) * _ALIGNMENT


def extract(transform: Any) -> Callable[[Any, list, bool], None]:
    """Makes the step that resolves one reference of a union.

    The transform gives its shape, dtype and layout, and `offset`, the column at which it begins.
    """
    dtype, (rows, minor), first = np.dtype(transform.dtype), transform.shape, int(transform.offset)
    bits, layout = _bits(transform.dtype), transform.layout
    count = layout.cols_in_shape((rows, minor), bits)
    # Without packing, each element has a column of its own, and the rest of that column's 32 bits is unused.
    unused = 1 if layout.vector_length > 1 else max(32 // (8 * dtype.itemsize), 1)

    def step(b: Any, env: list, clip: bool) -> None:
        if bits < 8:
            raise NotImplementedError(f"{b.name}: {dtype} in a union of tensor memory is not emulated")
        cells = b.array[:, first : first + count].view(dtype)[:, ::unused]
        if rows == LANES:
            b.array, b.groups = cells[:, :minor], [1, 1]
        elif rows > LANES:  # Tiles of 128 rows lie side by side in the columns.
            tiles = rows // LANES
            b.array = cells[:, : tiles * minor].reshape(LANES, tiles, minor).transpose(1, 0, 2)
            b.groups = [2, 1]
        else:  # 64 rows: of every 32 lanes, the first 16 hold the left half of the columns, the others the right half.
            parts = cells[:, : minor // 2].reshape(4, 2, LANES // 8, minor // 2)
            b.array, b.groups = parts.transpose(0, 2, 1, 3), [2, 2]
        b.text += f"{{union group {transform.alias_group_idx}, {dtype}{[rows, minor]}}}"

    return step


def expand(transform: Any) -> Callable[[Any, list, bool], None]:
    """Returns a function that adds leading dimensions to a view of tensor memory while a reference is resolved.

    The elements of these dimensions lie side by side along the columns.
    """
    batch = tuple(transform.batch_shape)

    def step(b: Any, env: list, clip: bool) -> None:
        if b.groups != [1, 1]:
            raise NotImplementedError(f"{b.name}: leading dimensions of such a part of tensor memory are not emulated")
        rows, minor = b.array.shape
        b.array = b.array.reshape(rows, *batch, minor // math.prod(batch)).transpose(
            *range(1, len(batch) + 1), 0, len(batch) + 1
        )
        b.groups = [1] * (len(batch) + 2)

    return step
