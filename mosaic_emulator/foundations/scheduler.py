"""Schedulers choose which thread runs next. All choices come from one seeded generator, so a run repeats exactly."""

from __future__ import annotations

import heapq
import itertools
import random
from typing import Protocol


class Runnable(Protocol):
    """A thread, or a device whose turn starts its next launch.

    Attributes:
        priority: the priority that `PctScheduler` has given the thread.
        polled: whether the thread polled in its last turn, without success.
    """

    priority: float
    polled: bool


class Scheduler:
    """Chooses which runnable thread takes the next turn. It keeps each runnable thread once."""

    def __init__(self, rng: random.Random):
        self._rng = rng
        self._member: set[int] = set()

    def admit(self, thread: Runnable) -> None:
        """Adds a new thread, which can run."""
        self.ready(thread)

    def ready(self, thread: Runnable) -> None:
        """Adds a thread that can run again; does nothing if the scheduler has that thread already."""
        if id(thread) not in self._member:
            self._member.add(id(thread))
            self._put(thread)

    def pick(self) -> Runnable | None:
        """Takes out the thread that runs next; None if no thread can run."""
        if not self._member:
            return None
        thread = self._take()
        self._member.discard(id(thread))
        return thread

    def _put(self, thread: Runnable) -> None:
        raise NotImplementedError

    def _take(self) -> Runnable:
        raise NotImplementedError


class RoundRobinScheduler(Scheduler):
    """Lets threads run in the order in which they became runnable."""

    def __init__(self, rng: random.Random):
        super().__init__(rng)
        self._ready: list[Runnable] = []

    def _put(self, thread: Runnable) -> None:
        self._ready.append(thread)

    def _take(self) -> Runnable:
        return self._ready.pop(0)


class RandomScheduler(RoundRobinScheduler):
    """Chooses each runnable thread with the same probability at each step."""

    def _take(self) -> Runnable:
        ready = self._ready
        position = int(self._rng.random() * len(ready))
        thread, ready[position] = ready[position], ready[-1]
        ready.pop()
        return thread


class PctScheduler(Scheduler):
    """Probabilistic concurrency testing: the runnable thread with the highest random priority always runs.

    At rare, random change points, the running thread's priority drops below all others. This finds faults that need one
    thread to be very slow, which a uniform random choice hardly ever makes. (Burckhardt et al., ASPLOS 2010.)
    """

    _MEAN_STEPS = 400  # the mean number of steps between change points

    def __init__(self, rng: random.Random):
        super().__init__(rng)
        self._heap: list[tuple[float, int, Runnable]] = []
        self._order = itertools.count()
        self._lowest = 0.0
        self._countdown = self._draw()

    def _draw(self) -> int:
        return 1 + int(self._rng.expovariate(1 / self._MEAN_STEPS))

    def admit(self, thread: Runnable) -> None:
        thread.priority = 1.0 + self._rng.random()
        self.ready(thread)

    def _put(self, thread: Runnable) -> None:
        if thread.polled:  # The thread would poll again, so all others run first.
            thread.polled = False
            self._lower(thread)
        heapq.heappush(self._heap, (-thread.priority, next(self._order), thread))

    def _lower(self, thread: Runnable) -> None:
        self._lowest -= 1.0
        thread.priority = self._lowest

    def _take(self) -> Runnable:
        self._countdown -= 1
        if self._countdown <= 0 and len(self._heap) > 1:
            self._countdown = self._draw()
            _, _, thread = heapq.heappop(self._heap)
            self._lower(thread)
            heapq.heappush(self._heap, (-thread.priority, next(self._order), thread))
        return heapq.heappop(self._heap)[2]


SCHEDULERS = {"random": RandomScheduler, "pct": PctScheduler, "round_robin": RoundRobinScheduler}
