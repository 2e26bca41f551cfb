"""The memory model of PTX on vector clocks: how loads, stores and fences on words of memory order threads.

A word carries knowledge of the threads that wrote to it. After a relaxed store, the word carries what the storing
thread knew at its last release fence. After a releasing store, the word carries all that the thread knows. An atomic
operation adds its thread's knowledge to what the word carries. A relaxed load puts aside what the word carries, and the
next acquire fence adds it to the thread's knowledge. An acquiring load adds it at once.

Each load, store and fence has a scope. Scope ``gpu`` orders threads of one device, scope ``sys`` all threads. Scope
``cta`` would order threads of one CTA, but in the emulator it orders nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..foundations.actors import Actor
from ..foundations.clocks import EMPTY, Knowledge, join
from .simulation import Simulation
from .sync import Release, Semaphore, Write


class Reader(Actor, Protocol):
    """A thread that reads words of memory, or runs a fence."""

    @property
    def simulation(self) -> Simulation: ...


class Poll:
    """Tracks whether a thread repeats a loop that only reads words of memory until one of them changes.

    Attributes:
        head: the loop's first instruction; None outside of a loop.
        found: for each word, the write that was read last.
        has_news: whether this iteration has read other values than the iteration before, or has done more than read.
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
        """Begins the first iteration of the loop with the first instruction `head`; with None, leaves the loop."""
        self.head, self.has_news, self.is_blocked = head, False, False
        self.found, self.tests = {}, []

    def looked_at(self, word: Semaphore, write: Write) -> None:
        """Notes that this iteration has read `write`."""
        before = self.found.get(word)
        self.has_news |= before is None or before.value != write.value
        self.found[word] = write

    def may_wait(self) -> bool:
        """Whether the next iteration would do the same as this one, unless one of the words is written meanwhile."""
        latest = all(write is word.log[-1] for word, write in self.found.items())
        return bool(self.found) and latest and not self.has_news


class Orders:
    """The state of one thread in the memory model.

    The state has the clocks at the thread's last release fences, the clocks that its loads have put aside for an
    acquire fence, and for each word the last value that the thread has seen.
    """

    __slots__ = ("_pending_gpu", "_pending_sys", "_positions", "_released_gpu", "_released_sys", "poll")

    def __init__(self):
        self._released_gpu = self._released_sys = EMPTY
        self._pending_gpu = self._pending_sys = EMPTY
        self._positions: dict[Semaphore, int] = {}  # word -> the serial of the last value seen
        self.poll = Poll()

    # ---- fences ------------------------------------------------------------------------------------------------------

    def acquire(self, knowledge: Knowledge, scope: str) -> None:
        """Runs an acquire fence: the thread learns what its earlier loads have put aside."""
        if scope != "cta":
            knowledge.learn(self._pending_gpu)
        if scope == "sys":
            knowledge.learn(self._pending_sys)

    def release(self, knowledge: Knowledge, scope: str) -> None:
        """Runs a release fence: later relaxed stores carry what the thread knows now."""
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

    def released(self, knowledge: Knowledge, scope: str, *, releases: bool) -> Release:
        """Returns what a store or an atomic operation releases."""
        local = knowledge.seen if releases else self._released_gpu
        system = knowledge.seen if releases else self._released_sys
        return Release(system if scope == "sys" else EMPTY, EMPTY if scope == "cta" else local, scope or "sys")

    def read(self, thread: Reader, words: Sequence[Semaphore], *, newest: bool) -> list[Write]:
        """Returns the values that one load of these adjacent words reads; an atomic operation reads the `newest` ones.

        A load reads the oldest values that are allowed: the thread must not know of a later write, and must not have
        read a later value. A repeated load reads the next values. So a single load sees a word as early as possible.
        And a thread that polls a counter stops at the first value that satisfies it, with only the knowledge that this
        value carries. Values that a store has overwritten may be skipped, by chance.
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
        """Notes that the thread has read this value of a word, at the serial `time` or at that of `write` if later."""
        self._positions[word] = max(self._positions.get(word, 0), write.serial, time)
        word.note_read(write, thread.component, thread.time, thread.device)


def fence_sc(thread: Reader, scope: str) -> None:
    """Runs a sequentially consistent fence.

    The fence is ordered after each earlier sequentially consistent fence with which it shares a scope: of the same
    device unless either fence has scope ``cta``; of any device if both have scope ``sys``.
    """
    clocks, knowledge = thread.simulation.fences, thread.knowledge
    scopes = {"cta": (), "gpu": (thread.device,), "sys": (thread.device, "sys")}[scope]
    for each in scopes:
        knowledge.learn(clocks.get(each, EMPTY))
    for each in scopes:
        clocks[each] = knowledge.seen
