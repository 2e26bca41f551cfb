"""Synchronisation objects: semaphores in global memory, mbarriers and thread barriers in a CTA."""

from __future__ import annotations

from typing import Any

import numpy as np

from .clocks import EMPTY, Knowledge, join
from .errors import ProtocolError


class Waitable:
    """Something that threads block on."""

    __slots__ = ("waiters",)

    def __init__(self):
        self.waiters: list[Any] = []

    def wake(self) -> None:
        if self.waiters:
            waiters, self.waiters = self.waiters, []
            for thread in waiters:
                thread.machine.make_runnable(thread)


class Semaphore(Waitable):
    """A counter with a log of its signals.

    A wait acquires only the first prefix of the log that satisfies it: it may have returned as soon as that had
    arrived, whatever else has come since.
    """

    __slots__ = ("base", "beacon", "device", "log", "name", "taken", "total", "unseen", "waited")

    def __init__(self, name: str, device: int):
        super().__init__()
        self.name, self.device = name, device
        self.unseen: list[Any] = []  # signals from other devices
        self.waited = False
        self.zero()

    def zero(self) -> None:
        """What the framework does before each launch."""
        self.total = 0  # of all signals
        self.taken = 0  # by waits that decrement
        self.base = 0  # the total before the first entry of the log
        # (total after this signal, clock of all signals so far, clock of those from this device alone)
        self.log: list[tuple[int, np.ndarray, np.ndarray]] = []
        self.beacon: np.ndarray | None = None  # while it is raised: the clock of whoever has raised it

    def raise_beacon(self, seen: np.ndarray) -> None:
        self.beacon = seen
        self.wake()

    @property
    def value(self) -> int:
        return self.total - self.taken

    def signal(self, count: int, seen: np.ndarray, from_device: int) -> None:
        self.total += count
        everyone, local = (self.log[-1][1], self.log[-1][2]) if self.log else (EMPTY, EMPTY)
        everyone = join(everyone, seen)
        local = join(local, seen) if from_device == self.device else local
        self.log.append((self.total, everyone, local))
        self.wake()

    def acquire(self, value: int, knowledge: Knowledge, *, decrement: bool, scope: str) -> bool:
        """Whether the wait for `value` is over; if so, `knowledge` gains what the wait may rely on."""
        self.waited = True
        if self.value < value:
            return False
        need = self.taken + value
        if need > 0:
            low, high = 0, len(self.log) - 1
            while low < high:  # totals rise, as counts are not negative
                middle = (low + high) // 2
                if self.log[middle][0] >= need:
                    high = middle
                else:
                    low = middle + 1
            if self.log:
                _, everyone, local = self.log[low]
                knowledge.learn(local if scope == "gpu" else everyone)
        if decrement:
            self.taken += value
        return True


class MBarrier(Waitable):
    """An mbarrier: a phase completes when all arrivals have come and no bytes are outstanding.

    Attributes:
        collective: of a cluster barrier, the groups of axes along which an arrival reaches other CTAs; else empty.
        leader_tracked: of a cluster barrier, whether an arrival counts on the leader's barrier alone.
        reached: the barriers that an arrival counts on.
    """

    __slots__ = (
        "arrivals",
        "arrived",
        "bytes",
        "collective",
        "cta",
        "leader_tracked",
        "name",
        "pending",
        "phase",
        "phases",
        "reached",
    )

    def __init__(self, name: str, arrivals: int, cta: Any):
        super().__init__()
        self.name, self.arrivals, self.cta = name, arrivals, cta
        self.collective: tuple[tuple[Any, ...], ...] = ()
        self.leader_tracked = False
        self.reached = [self]
        self.arrived = 0
        self.bytes = 0  # below 0 while a peer's part of a multicast copy is here before the wait for it is announced
        self.phase = 0  # phases completed
        self.pending = Knowledge()
        self.phases: dict[int, Knowledge] = {}

    def arrive(self, knowledge: Knowledge | None, count: int = 1) -> None:
        self.arrived += count
        if knowledge is not None:
            self.pending.join(knowledge)
        self._settle()

    def expect(self, nbytes: int) -> None:
        self.bytes += nbytes

    def landed(self, nbytes: int, knowledge: Knowledge) -> None:
        self.bytes -= nbytes
        self.pending.join(knowledge)
        self._settle()

    def _settle(self) -> None:
        if self.arrived > self.arrivals:
            raise ProtocolError(
                f"{self.name} of {self.cta}: {self.arrived} arrivals in phase {self.phase}, expected "
                f"{self.arrivals}; someone arrives twice in one phase"
            )
        # As in hardware, an arrival beyond the expected ones of a phase whose bytes are outstanding has no place to go.
        if self.arrived == self.arrivals and self.bytes == 0:
            self.phases[self.phase] = self.pending
            self.phases.pop(self.phase - 2, None)
            self.pending = Knowledge()
            self.phase += 1
            self.arrived = 0
            self.wake()

    def passed(self, waits: int) -> bool:
        """Whether a thread that has waited `waits` times may pass its next wait."""
        if self.phase <= waits:
            return False
        if self.phase > waits + 1:
            raise ProtocolError(
                f"{self.name} of {self.cta}: missed phase. This wait is for phase {waits}, but phases up to "
                f"{self.phase - 1} have completed already: the parity that the hardware tests is ambiguous. "
                "Somebody arrives without waiting for the other side, or this thread left out a wait"
            )
        return True


class Meeting(Waitable):
    """A point where all threads of a CTA (or all warps of a warpgroup) meet."""

    __slots__ = ("arrived", "expected", "generation", "knowledge", "latest")

    def __init__(self, expected: int):
        super().__init__()
        self.expected = expected
        self.arrived = 0
        self.generation = 0
        self.knowledge = Knowledge()
        self.latest = Knowledge()

    def arrive(self, knowledge: Knowledge) -> int:
        """Records an arrival; returns the generation whose end this party has to see."""
        self.arrived += 1
        self.knowledge.join(knowledge)
        mine = self.generation
        if self.arrived == self.expected:
            self.arrived = 0
            self.generation += 1
            self.latest, self.knowledge = self.knowledge, Knowledge()
            self.wake()
        return mine
