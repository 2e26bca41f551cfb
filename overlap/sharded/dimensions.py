"""Which dimensions of the operands count as one: those that are contracted together, and those that are kept together.

A weight of attention is [features, heads, head_dim], or [heads, head_dim, features] in the output projection. Heads and
head_dim are adjacent in memory, so each device reshapes its parts to matrices without a copy, and its results back.
This needs parts that are blocks of the merged dimension: heads may be sharded, head_dim may not.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from overlap.frame import arguments
from overlap.frame.signatures import AnyMesh
from overlap.sharded import partitions
from overlap.sharded.plan import Partition


@dataclasses.dataclass(frozen=True)
class Dimensions:
    """How many dimensions count as one k and as one n.

    Attributes:
      k: the number of dimensions that are contracted: the last ones of `lhs`.
      n: the number of dimensions of `rhs` that are kept: the last ones of the result.
      transpose_rhs: whether the dimensions of `rhs` are [*n, *k], and not [*k, *n].
    """

    k: int
    n: int
    transpose_rhs: bool

    def groups[Entry](self, name: str, entries: Sequence[Entry]) -> list[tuple[Entry, ...]]:
        """Groups what belongs to the dimensions of an array, such as their sizes: those that count as one together.

        `name`: "lhs", "rhs", "bias", "addend", "out" or "scalars", with or without an index as in "rhs[0]".
        """
        kind = name.split("[")[0]
        rank = len(entries)
        if kind == "rhs":
            counts = (self.n, self.k) if self.transpose_rhs else (self.k, self.n)
        else:
            last = min(rank, self.k if kind == "lhs" else self.n)
            counts = (*(1,) * (rank - last), last)
        rest = iter(entries)
        return [group for count in counts if (group := tuple(itertools.islice(rest, count)))]

    def merged(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of an array with the dimensions merged that count as one."""
        return tuple(math.prod(group) for group in self.groups(name, shape))

    def k_n(self, shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The sizes of the dimensions of a `rhs` that are contracted, and of those that are kept."""
        k, n = self.groups("rhs", shape)[:: -1 if self.transpose_rhs else 1]
        return k, n

    def merge(self, name: str, shape: Sequence[int], parts: Partition, mesh: AnyMesh, title: str) -> Partition:
        """The partition of an array of `shape` with the dimensions merged that count as one. `title`: for messages.

        Raises:
          ValueError: a device's part would not be a block of a merged dimension, or the parts would not be equal.
        """
        partitions.require_divisible(title, shape, parts, mesh)
        merged = []
        for group in self.groups(name, list(zip(shape, parts, itertools.count()))):
            left = 1  # The size of a device's part of the dimensions before.
            for size, axes, dimension in group:
                devices = math.prod(mesh.shape[axis] for axis in axes)
                if devices > 1 and left > 1:
                    first = group[0][2]
                    raise ValueError(
                        f"dimensions {first} to {group[-1][2]} of {title} count as one, so the first must be sharded, "
                        f"got {axes} in dimension {dimension} of {tuple(shape)}: name these axes for dimension {first} "
                        "(heads instead of head_dim), and jax.reshard an operand that is sharded otherwise"
                    )
                left *= size // devices
            merged.append(tuple(axis for _, axes, _ in group for axis in axes))
        return tuple(merged)

    def split(self, name: str, shape: Sequence[int], merged: Partition, sizes: Mapping[str, int]) -> Partition:
        """The partition of an array of `shape`, from that of its merged dimensions: the outermost ones are cut."""
        parts = []
        for group, axes in zip(self.groups(name, shape), merged, strict=True):
            rest = list(axes)
            for i, size in enumerate(group):
                mine = []
                while rest and (i == len(group) - 1 or size > 1):
                    mine.append(rest.pop(0))
                    size //= sizes[mine[-1]]
                parts.append(tuple(mine))
        return tuple(parts)


def dimensions_of(lhs: Any, rhs: Any, entries: int, transpose_rhs: Any) -> Dimensions:
    """Says how many dimensions are contracted: one with a matrix, else what the entries of `out_sharding` leave.

    Sizes do not say it: in [64, 64] @ [64, 64, 64] either one or two dimensions may be meant.

    Args:
      lhs: the array.
      rhs: the array, or a list or tuple of arrays.
      entries: the number of entries of `out_sharding`.
      transpose_rhs: as the caller gave it.

    Raises:
      ValueError: the right operands differ in their number of dimensions; or they have more than 2, and no number of
        contracted dimensions leaves a result of as many dimensions as there are entries.
    """
    transpose_rhs = arguments.flag("transpose_rhs", transpose_rhs)
    ranks = [len(x.shape) for x in (rhs if type(rhs) in (list, tuple) else [rhs])]
    left = len(lhs.shape)
    rank = max(ranks, default=2)
    if rank <= 2 or left < 2:
        return Dimensions(1, max(rank - 1, 1), transpose_rhs)  # If one has too few, `normalize` says so.
    for i, other in enumerate(ranks):
        if other != ranks[0]:
            raise ValueError(
                f"all of `rhs` must have the same number of dimensions, got {ranks[0]} for `rhs[0]` and {other} for "
                f"`rhs[{i}]`: reshape one of them, or make a call for each"
            )
    ways = {left + rank - 2 * k: k for k in range(1, min(left, rank))}
    if entries not in ways:
        shown = " or ".join(f"{count} to contract {k}" for count, k in ways.items())
        raise ValueError(
            f"`out_sharding` must have an entry for each dimension of the result, None for a whole one, since they say "
            f"how many dimensions of `lhs` ({left}) and `rhs` ({rank}) are contracted: {shown}, got {entries}: name "
            "all of them; if `rhs` is a stack of matrices, jax.vmap over its first dimension"
        )
    return Dimensions(ways[entries], rank - ways[entries], transpose_rhs)
