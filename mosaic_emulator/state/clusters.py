"""CTAs, and clusters: CTAs that are launched together and reach each other's shared memory and barriers.

An allocation of a CTA has a *twin* in each CTA of its cluster, at the same place of that CTA's shared memory. A
multicast copy writes all twins. One arrival on a cluster barrier is counted by several twins of the barrier. When the
first CTA enters a `run_scoped`, the twins of all CTAs are made: on a GPU, shared memory exists from the start of the
kernel, so a CTA may write to the memory of another CTA that has not entered the scope yet.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

from ..foundations.actors import Actor
from ..foundations.clocks import Knowledge, covers
from ..foundations.equations import AxisName
from ..foundations.errors import ProtocolError
from ..foundations.shadow import Shadow
from . import report
from .memory import Allocation, Buffer, Cells
from .simulation import Simulation
from .sync import MBarrier, Meeting


class Cta:
    """One block of the grid on one device."""

    def __init__(self, simulation: Simulation, num_threads: int, device: int, index: int, coordinates: tuple[int, ...]):
        self.simulation, self.device, self.index, self.coordinates = simulation, device, index, coordinates
        # (scope, visit) -> the allocations that the CTA's threads share, and how many threads are still inside
        self.scopes: dict[tuple[int, int], tuple[list[Allocation], int]] = {}
        self.meeting = Meeting(num_threads)
        self.running = 0
        self.ended = False
        self.cluster: Cluster | None = None
        self.rank = 0  # in the cluster
        # component -> (time, what another CTA does here, instruction)
        self.peer_uses: dict[int, tuple[int, str, int]] = {}
        self.final = Knowledge()  # what the threads that have ended know together
        self.freed: list[Buffer] = []  # memory of ended scopes that no new scope has got yet
        self.tensor_columns = 0  # columns of tensor memory in use

    def note_use(self, thread: Actor, what: str, component: int, time: int) -> None:
        """Remembers a use of this CTA's memory by a thread of another CTA. This CTA must not end before the use ends.

        Raises:
            ProtocolError: this CTA has ended.
        """
        what = f"{what} by {thread} at {thread.instruction.source}"
        if self.ended:
            raise ProtocolError(report.left_cluster(self, what))
        if self.simulation.detector is not None:
            self.peer_uses[component] = (time, what, thread.instruction.index)

    def check_left(self, thread: Actor) -> None:
        """Checks, when this CTA ends, that the other CTAs of its cluster no longer use its barriers and memory."""
        for component, (time, what, instruction) in self.peer_uses.items():
            if not covers(self.final.seen, component, time):
                error = ProtocolError(report.left_cluster(self, what))
                self.simulation.fault(("cluster", instruction), error, thread)

    def reuse(self, knowledge: Knowledge, thread: Actor) -> None:
        """Checks that no copy or product still uses freed memory, before a new scope or another CTA may get it.

        Args:
            knowledge: what is known to the threads that enter the new scope or have ended; it must cover all uses.
            thread: the thread that the message of a fault names.
        """
        freed, self.freed = self.freed, []
        if self.simulation.detector is None:
            return
        for buffer in freed:
            for access in buffer.async_uses.values():
                # The CTA may end before it has waited for its last loads from tensor memory: their values are there.
                if self.ended and not (access.asynchronous or access.write):
                    continue
                if not covers(knowledge.seen, access.component, access.time):
                    key = ("freed", access.instruction.index)
                    self.simulation.fault(key, ProtocolError(report.freed_early(self, access)), thread)

    def __str__(self) -> str:
        where = self.coordinates[0] if len(self.coordinates) == 1 else self.coordinates or 0
        return f"device {self.device}, CTA {where}"


class Cluster:
    """The CTAs of one cluster, in row-major order of the cluster's axes."""

    def __init__(self, axes: dict[AxisName, int], ctas: list[Cta]):
        self.axes, self.ctas = axes, ctas
        self.places = list(itertools.product(*(range(size) for size in axes.values())))
        # (scope, visit) -> for each CTA, by its rank, its allocations, until the CTA takes them
        self._scopes: dict[tuple[int, int], dict[int, list[Allocation]]] = {}
        # (scope, place in the scope, rank) -> the shadow of the buffer there: the next visit uses the same bytes
        self._shadows: dict[tuple[int, int, int], Shadow] = {}
        for rank, cta in enumerate(ctas):
            cta.cluster, cta.rank = self, rank

    def along(self, cta: Cta, axes: Sequence[AxisName]) -> list[Cta]:
        """The CTAs whose indices along all axes but `axes` are those of `cta`, row-major in the order of `axes`."""
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

    def at(self, cta: Cta, place: dict[AxisName, int]) -> Cta:
        """The CTA with the indices `place` along the axes named there, and those of `cta` along the others."""
        for axis, index in place.items():
            if not 0 <= index < self.axes.get(axis, 0):
                raise ProtocolError(f"{axis!r} = {index} is no place in a cluster of {self.axes}")
        own = dict(zip(self.axes, self.places[cta.rank]))
        return self.ctas[self.places.index(tuple({**own, **place}.values()))]

    def enter(self, cta: Cta, key: int, visit: int, allocate: Callable[[Cta], list[Allocation]]) -> list[Allocation]:
        """Returns the allocations of `cta` for one visit of a scope. The first CTA that enters makes those of all CTAs.

        Args:
            cta: the CTA that enters.
            key: identifies the scope.
            visit: how many times `cta` has entered the scope, this time included.
            allocate: makes the allocations of a CTA.
        """
        made = self._scopes.get((key, visit))
        if made is None:
            made = self._scopes[(key, visit)] = {each.rank: allocate(each) for each in self.ctas}
            for position, twins in enumerate(zip(*made.values())):
                self._pair(twins)
                for rank, twin in enumerate(twins):
                    if isinstance(twin, Buffer) and twin.space in ("smem", "tmem"):
                        # The bytes are those of the visit before, which another CTA may not have left yet.
                        twin.shadow = self._shadows.setdefault((key, position, rank), twin.shadow)
        mine = made.pop(cta.rank)
        if not made:
            del self._scopes[(key, visit)]
        return mine

    def _pair(self, twins: Sequence[Allocation]) -> None:
        """Makes allocations, one of each CTA by rank, twins; sets which twins count a cluster barrier's arrivals.

        These are the twins in all CTAs along each group of the barrier's axes; in the first CTA, if the leader tracks.
        """
        for cta, twin in zip(self.ctas, twins):
            twin.twins = twins
            if not isinstance(twin, Cells):
                continue
            for place in range(twin.places.size):
                barrier = twin.at(place)
                if not isinstance(barrier, MBarrier) or not barrier.collective:
                    continue
                counting = 1 if barrier.leader_tracked else None  # None: all
                # A set: a CTA that several groups of axes reach counts the arrival once.
                reached = {each.rank for axes in barrier.collective for each in self.along(cta, axes)[:counting]}
                cells = [each for each in twins if isinstance(each, Cells)]
                barrier.reached = [cells[rank].at(place) for rank in sorted(reached)]


def twin(base: Allocation, cta: Cta) -> Allocation:
    """Returns the twin of the allocation `base` in `cta`."""
    if base.twins is None:
        raise ProtocolError(
            f"{base.name} is no allocation that a cluster shares: take it from scratch_types, or from a run_scoped "
            "over all threads"
        )
    return base.twins[cta.rank]


def cluster_arrivals(axes: dict[AxisName, int], groups: Sequence[Sequence[AxisName]]) -> int:
    """How many CTAs arrive on a cluster barrier: its own, and those that differ from it along one group of axes."""
    sizes = [math.prod(axes[axis] for axis in group) for group in groups]
    return sum(sizes) - len(sizes) + 1
