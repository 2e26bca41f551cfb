"""The plan of a product of sharded arrays: what is communicated along each mesh axis, from the arrays' partitions.

The partition of an array is a tuple with an entry for each dimension: the mesh axes that the dimension is sharded
along, in order. All dimensions of `lhs` [..., m, k] and of the result [..., m, n] but the last are *rows*. The
partition of `rhs` is that of [k, n]. Each axis occurs at most once in an array. Its places in the three arrays say what
happens along it:

    lhs    rhs    result    along this axis
    rows   –      rows      nothing: each device has rows of its own
    –      n      n         nothing: each device has columns of its own
    rows   n      n         `lhs` is gathered: all_gather_lhs_matmul
    k      k      rows      products are summed, rows scattered: matmul_reduce_scatter(dimension=0)
    k      k      n         products are summed, columns scattered: matmul_reduce_scatter(dimension=1)
    k      k      –         products are summed: matmul_all_reduce
    rows   n      rows      `rhs` is gathered: all_gather_rhs_matmul(dimension=1)
    rows   k      rows      `rhs` is gathered: all_gather_rhs_matmul(dimension=0)

In the last two lines the rows may also be whole, in `lhs` and in the result. If an axis occurs in the result alone,
`lhs` or `rhs` is cut along this axis first, which moves no data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NoReturn

from overlap.kernels.operations import (
    ALL_REDUCE,
    GATHER_LHS,
    GATHER_RHS_K,
    GATHER_RHS_N,
    MATMUL,
    SCATTER_M,
    SCATTER_N,
    OperationSpec,
)

Axes = tuple[str, ...]
Partition = tuple[Axes, ...]
# The dimensions of `rhs`.
K, N = 0, 1
_SINCE_MIXED = "since Auto axes cannot come before Explicit ones in a dimension; or make the mesh with axes of one type"
SEE_DOCS = "docs/sharded.md has the table of what can be served"


@dataclasses.dataclass(frozen=True)
class ShardingPlan:
    """The plan of a product: which operation runs, along which axes, and what is gathered before.

    Attributes:
      lhs: the partition with which `lhs` enters. Where it differs from the partition of the operand, the operand is cut
        further, which moves no data between devices.
      rhs: the partition with which `rhs` enters, as [k, n].
      out: the partition of the result.
      spec: the operation that runs on each device.
      axes: the mesh axes along which the operation communicates.
      dimension: the dimension that the operation gathers or scatters: of `lhs` (all_gather_lhs_matmul), of `rhs`
        (all_gather_rhs_matmul) or of the result (matmul_reduce_scatter).
      gathers: the dimensions of `rhs` that are gathered before the operation, with their axes.
    """

    lhs: Partition
    rhs: Partition
    out: Partition
    spec: OperationSpec = MATMUL
    axes: Axes = ()
    dimension: int = 0
    gathers: tuple[tuple[int, Axes], ...] = ()

    @property
    def operation(self) -> str:
        """The public function that runs on each device."""
        return self.spec.function

    def __str__(self) -> str:
        before = [f"`rhs` is gathered along {_shown(axes)}" for _, axes in self.gathers]
        along = f" along {_shown(self.axes)}" if self.axes else " of each device's part"
        return ", then ".join([*before, f"{self.operation}{along}"])


def plan_of(
    lhs: Partition, rhs: Partition, out: Partition, sizes: Mapping[str, int], explicit: Sequence[str] = ()
) -> ShardingPlan:
    """Makes the plan of a product.

    Args:
      lhs: the partition of `lhs`, [..., m, k].
      rhs: the partition of `rhs`, as [k, n].
      out: the partition of the result, [..., m, n].
      sizes: the number of devices along each axis of the mesh. Axes of one device are ignored.
      explicit: the Explicit axes. Within a dimension they must come before Auto axes. Where the plan needs another
        order, error messages suggest another way out.

    Raises:
      ValueError: no operation of this library serves these partitions. The message names the axis, and says what to
        change.
    """
    lhs, rhs, out = (_without_single(partition, sizes) for partition in (lhs, rhs, out))
    places = _Places(lhs, rhs, out)
    kinds = {
        axis: places.kind(axis) for axis in dict.fromkeys(axis for x in (lhs, rhs, out) for part in x for axis in part)
    }

    def only(axes: Axes, *wanted: str) -> Axes:
        return tuple(axis for axis in axes if kinds[axis] in wanted)

    # Within each dimension, axes that are gathered or scattered come last: their parts are then adjacent.
    rows = range(len(out) - 1)
    kept = [only(part, "local", "gather rhs") for part in out]
    scattered = [only(part, "sum") for part in out]
    gathered = [only(part, "gather lhs") for part in lhs]
    gathered[-1] = ()
    weights = [only(part, "gather rhs") for part in rhs]
    kept[-1] = only(out[-1], "local", "gather lhs")
    for i, part in enumerate(out):
        _require_last(part, kept[i], scattered[i], places.name("out", i), explicit)
    summed = lhs[-1]
    wanted_lhs = (*(kept[i] + gathered[i] for i in rows), summed)
    wanted_rhs = (summed + weights[K], kept[-1] + weights[N])
    for i in rows:
        _require_prefix(lhs[i], wanted_lhs[i], places.name("lhs", i), explicit)
    if rhs[K] != wanted_rhs[K]:
        late = _late(wanted_rhs[K], explicit)
        way_out = "shard it so"
        if late:
            way_out = f"jax.reshard `rhs` so that it is whole along {_shown(late)}, {_SINCE_MIXED}"
        raise ValueError(
            f"`lhs` and `rhs` must be sharded alike along k, apart from axes that `rhs` is gathered along, which come "
            f"last: with k of `lhs` over {_shown(summed)}, k of `rhs` must be sharded over {_shown(wanted_rhs[K])}, "
            f"got {_shown(rhs[K])}: {way_out}"
        )
    _require_prefix(rhs[N], wanted_rhs[N], places.name("rhs", N), explicit)
    plan = ShardingPlan(wanted_lhs, wanted_rhs, out, gathers=tuple((i, axes) for i, axes in enumerate(weights) if axes))
    if summed and any(gathered):
        raise ValueError(
            f"one activation can be communicated in a product, and {_shown(_flat(gathered))} gathers `lhs` while "
            f"{_shown(summed)} sums products: jax.reshard one of them first; {SEE_DOCS}"
        )
    if summed:
        return _summed(plan, scattered, places)
    if any(gathered):
        first, *others = [i for i, part in enumerate(gathered) if part]
        if others:
            raise ValueError(
                f"`lhs` can be gathered along one dimension, and it would be along {places.name('lhs', first)} (over "
                f"{_shown(gathered[first])}) and {places.name('lhs', others[0])} (over {_shown(gathered[others[0]])}): "
                "jax.reshard `lhs` so that one of them is whole"
            )
        return dataclasses.replace(plan, spec=GATHER_LHS, axes=gathered[first], dimension=first)
    # If each device has rows of its own, the operation gathers the weights. If several devices compute the same rows,
    # they must get the same bits; but each device's kernel begins its sums with its own shard of the weights. So XLA
    # then gathers the weights before the operation.
    has_own_rows = {axis for part in out[:-1] for axis in part}
    for i, axes in reversed(plan.gathers):
        if has_own_rows.issuperset(axes):
            others = tuple(gather for gather in plan.gathers if gather[0] != i)
            spec = GATHER_RHS_K if i == K else GATHER_RHS_N
            return dataclasses.replace(plan, spec=spec, axes=axes, dimension=i, gathers=others)
    return plan


def _summed(plan: ShardingPlan, scattered: list[Axes], places: _Places) -> ShardingPlan:
    """Completes `plan` for a product that is summed over devices.

    `scattered`: for each dimension of the result, the mesh axes over which it is scattered.
    """
    summed = plan.lhs[-1]
    to = [i for i, part in enumerate(scattered) if part]
    if not to:
        return dataclasses.replace(plan, spec=ALL_REDUCE, axes=summed)
    if len(to) > 1 or len(scattered[to[0]]) < len(summed):
        shown = [f"{places.name('out', i)} over {_shown(scattered[i])}" for i in to]
        raise ValueError(
            f"the sum over {_shown(summed)} can be scattered as a whole, along one dimension of the result, or not at "
            f"all, got {', '.join(shown)}: ask for {places.name('out', to[0])} over {_shown(summed)} in `out_sharding` "
            "and jax.reshard the result"
        )
    spec = SCATTER_N if to[0] == len(plan.out) - 1 else SCATTER_M
    return dataclasses.replace(plan, spec=spec, axes=scattered[to[0]], dimension=to[0])


@dataclasses.dataclass(frozen=True)
class _Places:
    """The partitions of the three arrays, which say where each mesh axis occurs."""

    lhs: Partition
    rhs: Partition
    out: Partition

    def name(self, array: str, dimension: int) -> str:
        """The name of a dimension for messages. `array`: "lhs", "rhs" or "out"."""
        if array == "rhs":
            return f"{'kn'[dimension]} of `rhs`"
        of, last = ("`lhs`", "k") if array == "lhs" else ("the result", "n")
        rank = len(self.lhs)
        names = {rank - 1: last, rank - 2: "the rows (m)"}
        return f"{names.get(dimension, f'leading dimension {dimension}')} of {of}"

    def kind(self, axis: str) -> str:
        """Says what happens along an axis: "local" (nothing), "sum", "gather lhs" or "gather rhs".

        It cuts k of both operands: sum. Rows of `lhs`, n of `rhs` and of the result: gather `lhs`. `rhs`, and rows of
        `lhs` and of the result, or neither: gather `rhs`. Rows, or n, of an operand and of the result: local.

        Raises:
          ValueError: no operation serves the places of the axis.
        """
        left, right, out = (_place(axis, partition) for partition in (self.lhs, self.rhs, self.out))
        last = len(self.lhs) - 1
        rows, result_rows = None if left == last else left, None if out == last else out
        of_k, of_n = left == last, out == last
        if of_k and right == K:
            return "sum"
        if of_k:
            self._refuse(axis, "shard k of `rhs` over it as well, or jax.reshard `lhs` so that its k is whole")
        if of_n:
            if right == K:
                self._refuse(axis, "shard n of `rhs` over it instead of k, or leave it out of n in `out_sharding`")
            if rows is None:
                return "local"
            if right == N:
                return "gather lhs"
            self._refuse(axis, "shard n of `rhs` over it as well: `lhs` is then gathered")
        if rows is not None and result_rows is None:
            self._refuse(
                axis,
                f"name it in `out_sharding`, for {self.name('out', rows)}, and jax.reshard the result: that gathers it",
            )
        if rows is not None and rows != result_rows:
            self._refuse(axis, "ask for the result sharded as `lhs` is, and jax.reshard the result")
        return "local" if right is None else "gather rhs"

    def _refuse(self, axis: str, way_out: str) -> NoReturn:
        found = [
            self.name(array, i)
            for array, partition in (("lhs", self.lhs), ("rhs", self.rhs), ("out", self.out))
            if (i := _place(axis, partition)) is not None
        ]
        *others, last = found
        where = f"{', '.join(others)} and {last}" if others else f"{last} alone"
        raise ValueError(f"no operation serves a product where mesh axis {axis!r} cuts {where}: {way_out}; {SEE_DOCS}")


def _place(axis: str, partition: Partition) -> int | None:
    return next((i for i, part in enumerate(partition) if axis in part), None)


def _without_single(partition: Partition, sizes: Mapping[str, int]) -> Partition:
    return tuple(tuple(axis for axis in part if sizes[axis] > 1) for part in partition)


def _late(wanted: Axes, explicit: Sequence[str]) -> Axes:
    """The Explicit axes that come after Auto axes in `wanted`. A sharding cannot have that order."""
    return tuple(
        axis for i, axis in enumerate(wanted) if axis in explicit and any(x not in explicit for x in wanted[:i])
    )


def _require_last(part: Axes, kept: Axes, scattered: Axes, name: str, explicit: Sequence[str]) -> None:
    if part != kept + scattered:
        way_out = f"ask for {_shown(kept + scattered)} in `out_sharding`"
        if _late(kept + scattered, explicit):
            way_out = f"leave {_shown(scattered)} out of `out_sharding` and jax.reshard the result, {_SINCE_MIXED}"
        raise ValueError(
            f"axes that sums are scattered along must come last, got {_shown(part)} for {name}, of which "
            f"{_shown(scattered)} {'is' if len(scattered) == 1 else 'are'} scattered: {way_out}"
        )


def _require_prefix(part: Axes, wanted: Axes, name: str, explicit: Sequence[str]) -> None:
    if part != wanted[: len(part)]:
        way_out = "jax.reshard it, or name the axes in this order"
        if late := _late(wanted, explicit):
            way_out = f"jax.reshard it so that it is whole along {_shown(late)}, {_SINCE_MIXED}"
        raise ValueError(
            f"with this `out_sharding`, {name} must be sharded over {_shown(wanted)} in this order (axes that are "
            f"gathered come last), got {_shown(part)}: {way_out}"
        )


def _flat(parts: Sequence[Axes]) -> Axes:
    return tuple(axis for part in parts for axis in part)


def _shown(axes: Axes) -> str:
    return repr(axes[0]) if len(axes) == 1 else f"({', '.join(map(repr, axes))})" if axes else "no axis"
