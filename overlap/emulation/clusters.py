"""Clusters: CTAs that are launched together and reach each other's shared memory and barriers.

An allocation of a CTA has a *twin* in each CTA of its cluster, at the same place of its shared memory: a multicast
copy writes all twins, an arrival on a cluster barrier counts on several. Twins are made together when the first CTA
enters the scope, as shared memory is there from the start of a kernel.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from . import report
from .clocks import covers
from .errors import ProtocolError
from .memory import Buffer, Cells, View

if TYPE_CHECKING:
    from .machine import Cta, Machine, Thread


class Cluster:
    """The CTAs of one cluster, in row-major order of the cluster's axes."""

    def __init__(self, axes: dict[str, int], ctas: list[Cta]):
        self.axes, self.ctas = axes, ctas
        self.places = list(itertools.product(*(range(size) for size in axes.values())))
        self._scopes: dict[Any, list[Any]] = {}  # (scope, visit) -> what its CTAs have not taken yet
        self._shadows: dict[Any, Any] = {}  # of each scope's buffers: the next visit has the same bytes
        for rank, cta in enumerate(ctas):
            cta.cluster, cta.rank = self, rank

    def along(self, cta: Cta, axes: Sequence[Any]) -> list[Cta]:
        """The CTAs whose places differ from that of `cta` along `axes` at most, row-major in the order of `axes`."""
        names = list(self.axes)
        for axis in axes:
            if axis not in names:
                raise ProtocolError(f"{axis!r} is no axis of the cluster: it has {names}")
        found = []
        for index in itertools.product(*(range(self.axes[axis]) for axis in axes)):
            place = list(self.places[cta.rank])
            for axis, i in zip(axes, index):
                place[names.index(axis)] = i
            found.append(self.ctas[self.places.index(tuple(place))])
        return found

    def at(self, cta: Cta, place: dict[Any, int]) -> Cta:
        """The CTA at the place of `cta`, but for the axes in `place`."""
        for axis, index in place.items():
            if not 0 <= index < self.axes.get(axis, 0):
                raise ProtocolError(f"{axis!r} = {index} is no place in a cluster of {self.axes}")
        own = dict(zip(self.axes, self.places[cta.rank]))
        return self.ctas[self.places.index(tuple({**own, **place}.values()))]

    def enter(self, cta: Cta, key: Any, visit: int, allocate: Callable[[Cta], list[Any]]) -> list[Any]:
        """The allocations of `cta` for one visit of a scope, made for the whole cluster by whoever comes first."""
        made = self._scopes.get((key, visit))
        if made is None:
            made = self._scopes[(key, visit)] = [allocate(each) for each in self.ctas]
            for position, twins in enumerate(zip(*made)):
                self._pair(twins)
                for rank, twin in enumerate(twins):
                    if isinstance(twin, Buffer) and twin.space in ("smem", "tmem"):
                        # The same bytes as in the visit before, which a CTA may not have left yet.
                        twin.shadow = self._shadows.setdefault((key, position, rank), twin.shadow)
        mine, made[cta.rank] = made[cta.rank], None
        if all(each is None for each in made):
            del self._scopes[(key, visit)]
        return mine

    def _pair(self, twins: Sequence[Any]) -> None:
        for twin in twins:
            if isinstance(twin, (Buffer, Cells)):
                twin.twins = twins
            if not isinstance(twin, Cells):
                continue
            for place in range(twin.places.size):
                barrier: Any = twin.at(place)
                if not getattr(barrier, "collective", ()):
                    continue
                last = 1 if barrier.leader_tracked else None
                # Everyone whose place differs along one group of axes at most, each once.
                reached = {each.rank for axes in barrier.collective for each in self.along(barrier.cta, axes)[:last]}
                barrier.reached = [twins[rank].at(place) for rank in sorted(reached)]


def twin(base: Any, cta: Cta) -> Any:
    """The allocation of `cta` at the place of `base`."""
    if base.twins is None:
        raise ProtocolError(
            f"{base.name} is no allocation that a cluster shares: take it from scratch_types, or from a run_scoped "
            "over all threads"
        )
    return base.twins[cta.rank]


def cluster_arrivals(axes: dict[str, int], groups: Sequence[Any]) -> int:
    """From how many CTAs a cluster barrier gets arrivals: those that differ along one group of axes at most."""
    sizes = [math.prod(axes[axis] for axis in group) for group in groups]
    return sum(sizes) - len(sizes) + 1


def note_use(thread: Thread, cta: Cta, what: str, component: int, time: int) -> None:
    """Remembers that `thread` reaches into `cta`, which must not have ended and must not end before."""
    what = f"{what} by {thread} at {thread.instruction.source}"
    if cta.ended:
        raise ProtocolError(report.left_cluster(cta, what))
    if thread.machine.detector is not None:
        cta.peer_uses[component] = (time, what, thread.instruction.index)


def check_left(machine: Machine, cta: Cta, thread: Thread) -> None:
    """Called when `cta` ends: all that its peers do with its barriers and memory must be over."""
    for component, (time, what, instruction) in cta.peer_uses.items():
        if not covers(cta.final.seen, component, time):
            machine.fault(("cluster", instruction), ProtocolError(report.left_cluster(cta, what)), thread)


def share(view: View, shape: tuple[int, ...], parts: int, index: int) -> tuple[slice, ...]:
    """The part of a multicast copy that CTA `index` of `parts` issues, as slices of the logical shape.

    As Mosaic cuts it: along the first dimension of the (tiled) shape in memory that is divisible.
    """
    slices = [slice(0, size) for size in shape]
    inner = [math.prod(view.array.shape[sum(view.groups[:d]) :][1:n]) for d, n in enumerate(view.groups)]
    # Outer dimensions first, then those within a tile: (dimension, size, elements of the dimension per step).
    order = [(d, view.array.shape[sum(view.groups[:d])], inner[d]) for d in range(len(shape))]
    order += [(d, inner[d], 1) for d, n in enumerate(view.groups) if n > 1]
    for d, size, step in order:
        first = slices[d].start
        if size % parts == 0:
            length = size // parts * step
            slices[d] = slice(first + index * length, first + (index + 1) * length)
            return tuple(slices)
        if parts % size:
            break
        if size > 1:
            first += index % size * step
            slices[d] = slice(first, first + step)
            index, parts = index // size, parts // size
    raise ProtocolError(f"a multicast copy to {view} of shape {shape} cannot be cut into {parts} equal parts")


def slab(view: View, axis: int, parts: int, index: int) -> View:
    """One of `parts` equal slabs along a dimension of a part of global memory, which may go over the edge of it."""
    asked = view.requested or view.shape
    if asked[axis] % parts:
        raise ProtocolError(f"{view} of shape {asked} cannot be cut into {parts} equal parts along dimension {axis}")
    size = asked[axis] // parts
    first = index * size
    there = slice(0, asked[axis]) if view.window is None else view.window[axis]  # the part that is in bounds
    low = min(max(there.start, first), there.stop)
    high = max(min(there.stop, first + size), low)
    key = [slice(None)] * view.array.ndim
    key[axis] = slice(low - there.start, high - there.start)
    part = View(view.buffer, view.array[tuple(key)], view.groups, f"{view.text}[part {index} of {parts}]")
    if view.requested is not None and view.window is not None:
        part.requested = (*asked[:axis], size, *asked[axis + 1 :])
        inside = slice(low - first, high - first) if high > low else slice(0, 0)
        part.window = (*view.window[:axis], inside, *view.window[axis + 1 :])
    return part


def part_of(view: View, part: tuple[slice, ...]) -> View:
    """The part of a view that `slices` of its logical shape select."""
    key: list[Any] = []
    at = 0
    for cut, n in zip(part, view.groups):
        sizes = view.array.shape[at : at + n]
        at += n
        inner = math.prod(sizes[1:])
        whole = cut.start % inner == 0 and cut.stop % inner == 0
        outer = slice(cut.start // inner, cut.stop // inner if whole else cut.start // inner + 1)
        key.append(outer)
        if n > 1:
            key.append(slice(None) if whole else slice(cut.start % inner, (cut.stop - 1) % inner + 1))
            key += [slice(None)] * (n - 2)
    text = view.text + "[" + ", ".join(f"{cut.start}:{cut.stop}" for cut in part) + "]"
    return View(view.buffer, view.array[tuple(key)], view.groups, text)
