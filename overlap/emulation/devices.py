"""A device in a sequence of launches: its memory, and how many of its launches have begun and ended."""

from __future__ import annotations

import operator
from typing import NamedTuple

import numpy as np

from .clocks import Knowledge
from .sync import Semaphore, next_serial, next_serials


class Flags(NamedTuple):
    """The semaphores that all CTAs of a launch share.

    Attributes:
        first: the address of the first one.
        names: of all of them, as they lie in memory.
        launch: the launch's number in the sequence.
    """

    first: int
    names: list[str]
    launch: int

    @property
    def end(self) -> int:
        return self.first + len(self.names)


class Device:
    """One device. To the scheduler it is a thread: its turn starts the device's next launch.

    Attributes:
        component: of the vector clocks; its time is the number of launches that have begun here.
        launches, begun, ended: how many launches the device has, and how many of them have begun and ended.
        seen: what has happened before the end of its last launch.
        memory: the bytes of its global memory, which launches use one after the other.
    """

    def __init__(self, index: int, component: int):
        self.index, self.component = index, component
        self.launches = self.begun = self.ended = 0
        self.seen = Knowledge()
        self.memory = np.zeros(0, np.uint8)
        self._words: dict[int, Semaphore] = {}  # by address; made when somebody asks for them
        self._serial = next_serial()  # of all words before the first launch
        # (flags of a launch, serial of the first of them, event): how the framework has zeroed words so far.
        self._zeroings: list[tuple[Flags, int, tuple[int, int] | None]] = []
        self.priority, self.polled, self.done = 0.0, False, False

    def word(self, address: int) -> Semaphore:
        """A word of the memory in which semaphores lie."""
        word = self._words.get(address)
        if word is None:
            word = self._words[address] = Semaphore(f"word {address}", self.index, self._serial)
            for flags, serial, by in reversed(self._zeroings):
                if flags.first <= address < flags.end:
                    self._zero(word, address, flags, serial, by)
                    break
        return word

    def words(self, flags: Flags) -> list[tuple[int, Semaphore]]:
        """(address, word) of a launch's semaphores that somebody has asked for, in order."""
        found = (item for item in self._words.items() if flags.first <= item[0] < flags.end)
        return sorted(found, key=operator.itemgetter(0))

    def zero_flags(self, flags: Flags) -> None:
        """Zeroes the semaphores of a launch, as the framework does before the launch begins."""
        serial, by = next_serials(len(flags.names)), (self.component, self.begun) if self.begun > 1 else None
        for address, word in self.words(flags):
            self._zero(word, address, flags, serial, by)
        self._zeroings.append((flags, serial, by))

    @staticmethod
    def _zero(word: Semaphore, address: int, flags: Flags, serial: int, by: tuple[int, int] | None) -> None:
        place = address - flags.first
        word.name, word.launch = flags.names[place], flags.launch
        word.zero(by, serial + place)
