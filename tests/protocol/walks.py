"""Walks over the schedules of the kernels: pure integers, no kernel."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest

from overlap.kernels.stream_k import Piece, StreamK
from overlap.primitives import Chunking

# Other numbers of devices are "more of the same".
DEVICES = [pytest.param(d, marks=[] if d in (1, 2, 3, 6) else pytest.mark.slow) for d in range(1, 17)]


def size_of(plan: Chunking, row: int, column: int) -> tuple[int, int]:
    """Returns the rows and columns of the chunk that begins at (row, column). The last chunk may be short."""
    if plan.short is None or plan.lacks(row, column) <= 0:
        assert row + plan.rows <= plan.shard_rows and column + plan.cols <= plan.shard_cols
        return plan.rows, plan.cols
    assert plan.short == (min(plan.rows, plan.shard_rows - row), min(plan.cols, plan.shard_cols - column))
    return plan.short


def chunks_of(
    plan: Chunking, count: int, chunk: Callable[..., Any], flag: Callable[..., Any], shards: int
) -> tuple[list[tuple[int, int, int]], collections.Counter[Any]]:
    """Checks that chunks fill `shards` shards exactly once, and that each belongs to one flag.

    Returns the chunks in their order, and how often each flag is raised.
    """
    order, raised, elements = [], collections.Counter(), 0
    for index in range(count):
        step, row, column = chunk(index)
        rows, columns = size_of(plan, row, column)
        # Chunks begin at multiples of their sizes. So they do not overlap if no two begin at one place.
        assert row % plan.rows == 0 and column % plan.cols == 0
        assert flag(step, row, column) == flag(step, row + rows - 1, column + columns - 1)
        order.append((step, row, column))
        raised[flag(step, row, column)] += 1
        elements += rows * columns
    assert len(set(order)) == count and elements == shards * plan.shard_rows * plan.shard_cols
    return order, raised


def pieces_of(work: StreamK, cta: int) -> list[Piece]:
    return [work.piece(cta, ordinal) for ordinal in range(int(work.pieces(cta)))]


def check_traced(function: Callable[..., Any], *places: Any) -> None:
    """Checks that traced indices give what Python's integers give. A place is an index or a tuple of indices."""

    def plain(values: Any) -> Any:
        return tuple(map(plain, values)) if isinstance(values, tuple) else int(values)

    for place in places:
        indices = place if isinstance(place, tuple) else (place,)
        assert plain(function(*map(jnp.int32, indices))) == plain(function(*indices))
