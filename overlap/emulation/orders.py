"""The memory model of PTX on vector clocks: how loads, stores and fences on words of memory order threads.

A word carries the knowledge of the threads that wrote it. A relaxed store carries what its thread knew at its last
release fence; a releasing store carries all that its thread knows. An atomic operation adds its thread's knowledge to
what the word carried. A relaxed load puts aside what the word carries, and an acquire fence adds that to the thread's
knowledge; an acquiring load adds it at once.

Each of these has a scope. Scope ``gpu`` orders threads of one device, scope ``sys`` all threads. Scope ``cta`` would
order threads of one CTA, but here it orders nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from .clocks import EMPTY, Knowledge, join
from .simulation import Simulation
from .sync import Semaphore, Write


class Reader(Protocol):
    """A thread that reads words of memory, or runs a fence."""

    knowledge: Knowledge
    component: int
    time: int

    @property
    def device(self) -> int: ...

    @property
    def simulation(self) -> Simulation: ...


class Poll:
    """The iterations of a loop that only reads words.

    Attributes:
        head: the loop's first instruction; None outside of one.
        found: the last write that was read of each word.
        has_news: whether this iteration has read another value than the one before, or has done something else.
        is_blocked: whether the thread waits for one of the words to change.
        tests: the comparisons of this iteration, as text.
    """

    __slots__ = ("found", "has_news", "head", "is_blocked", "tests")

    def __init__(self):
        self.head: int | None = None
        self.found: dict[Semaphore, Write] = {}
        self.has_news = self.is_blocked = False
        self.tests: list[str] = []

    def begin(self, head: int | None) -> None:
        """Begins the first iteration of a loop (None: leaves the loop)."""
        self.head, self.has_news, self.is_blocked = head, False, False
        self.found, self.tests = {}, []

    def looked_at(self, word: Semaphore, write: Write) -> None:
        """Notes that this iteration has read `write`."""
        before = self.found.get(word)
        self.has_news |= before is None or before.value != write.value
        self.found[word] = write

    def may_wait(self) -> bool:
        """Whether the next iterations would do the same until somebody writes one of the words."""
        latest = all(write is word.log[-1] for word, write in self.found.items())
        return bool(self.found) and latest and not self.has_news


class Orders:
    """What one thread has released and not yet acquired, and which values of which words it has seen."""

    __slots__ = ("_pending_gpu", "_pending_sys", "_positions", "_released_gpu", "_released_sys", "poll")

    def __init__(self):
        self._released_gpu = self._released_sys = EMPTY
        self._pending_gpu = self._pending_sys = EMPTY
        self._positions: dict[Semaphore, int] = {}  # for each word, the serial of the last value seen
        self.poll = Poll()

    # ---- fences ------------------------------------------------------------------------------------------------------

    def acquire(self, knowledge: Knowledge, scope: str) -> None:
        """An acquire fence: the thread learns what its earlier loads have put aside."""
        if scope != "cta":
            knowledge.learn(self._pending_gpu)
        if scope == "sys":
            knowledge.learn(self._pending_sys)

    def release(self, knowledge: Knowledge, scope: str) -> None:
        """A release fence: later relaxed stores carry what the thread knows now."""
        if scope != "cta":
            self._released_gpu = knowledge.seen
        if scope == "sys":
            self._released_sys = knowledge.seen

    # ---- words -------------------------------------------------------------------------------------------------------

    def gather(self, write: Write, device: int, scope: str) -> None:
        """Puts aside, for an acquire fence, what `write` carries to a thread of `device`."""
        if scope == "cta":
            return
        self._pending_gpu = join(self._pending_gpu, write.local.get(device, EMPTY))
        if scope == "sys":
            self._pending_sys = join(self._pending_sys, write.system)

    def released(self, knowledge: Knowledge, scope: str, *, releases: bool) -> dict[str, np.ndarray]:
        """The clocks that a store or an atomic operation carries, for `Semaphore.write`."""
        local = knowledge.seen if releases else self._released_gpu
        system = knowledge.seen if releases else self._released_sys
        return {"local": EMPTY if scope == "cta" else local, "system": system if scope == "sys" else EMPTY}

    def read(self, thread: Reader, words: Sequence[Semaphore], *, newest: bool) -> list[Write]:
        """The values that one load of these adjacent words reads. An atomic operation reads the `newest` ones.

        A load reads the oldest values that nothing forbids: the thread knows of no later write, and has read none. A
        repeated load reads the next values. So a thread that reads a word once sees it as early as possible. A thread
        that polls a counter stops at the first value that satisfies it, with the knowledge that this value alone
        carries. Values that a store has overwritten may be skipped, by chance.
        """
        time = max(word.log[-1].serial for word in words)
        if not newest and thread.simulation.detector is not None:
            oldest = max(word.oldest(thread.knowledge.seen).serial for word in words)
            last = max(self._positions.get(word, 0) for word in words)
            time = oldest
            if last >= oldest:
                later = [serial for word in words if (serial := word.after(last)) is not None]
                time = min(later, default=last)
            stored = max(word.stored_at for word in words)
            if stored > time and thread.simulation.random.random() < 0.5:
                time = stored
        writes = [word.at(time) for word in words]
        for word, write in zip(words, writes):
            self.saw(thread, word, write, time)
        return writes

    def saw(self, thread: Reader, word: Semaphore, write: Write, time: int = 0) -> None:
        """The thread has read this value of a word, at the time of `write` or later."""
        self._positions[word] = max(self._positions.get(word, 0), write.serial, time)
        word.note_read(write, thread.component, thread.time, thread.device)


def fence_sc(thread: Reader, scope: str) -> None:
    """A sequentially consistent fence: after each earlier one, if the scope of either includes the other's thread."""
    clocks, knowledge = thread.simulation.fences, thread.knowledge
    scopes = {"cta": (), "gpu": (thread.device,), "sys": (thread.device, "sys")}[scope]
    for each in scopes:
        knowledge.learn(clocks.get(each, EMPTY))
    for each in scopes:
        clocks[each] = knowledge.seen
