"""A device in a sequence of launches: its memory, and how many of its launches have begun and ended."""

from __future__ import annotations

import operator
from typing import NamedTuple

import numpy as np

from ..foundations.clocks import Knowledge
from .sync import Semaphore, next_serial, next_serials


class Flags(NamedTuple):
    """The semaphores that all CTAs of a launch share.

    Attributes:
        first: the address of the first semaphore.
        names: the names of all semaphores, in the order of their addresses.
        launch: the launch's number in the sequence.
    """

    first: int
    names: list[str]
    launch: int

    @property
    def end(self) -> int:
        return self.first + len(self.names)


class Device:
    """One device. The scheduler treats a device like a thread: a turn of it starts the device's next launch.

    Attributes:
        component: the device's component of the vector clocks. Its time is the number of launches begun on the device.
        launches, begun, ended: how many launches the device has, and how many of them have begun and ended.
        seen: what has happened before the end of the device's last launch.
        memory: the bytes of the device's global memory, which launches use one after the other.
    """

    def __init__(self, index: int, component: int):
        self.index, self.component = index, component
        self.launches = self.begun = self.ended = 0
        self.seen = Knowledge()
        self.memory = np.zeros(0, np.uint8)
        self._words: dict[int, Semaphore] = {}  # address -> word; a word is made when it is first used
        self._serial = next_serial()  # the serial of the first value (zero) of all words
        # The framework's zeroings so far: (flags of a launch, serial of the first flag's zeroing, its event).
        self._zeroings: list[tuple[Flags, int, tuple[int, int] | None]] = []
        self.priority, self.polled, self.done = 0.0, False, False

    def word(self, address: int) -> Semaphore:
        """Returns the word at an address of the memory for semaphores."""
        word = self._words.get(address)
        if word is None:
            word = self._words[address] = Semaphore(f"word {address}", self.index, self._serial)
            for flags, serial, by in reversed(self._zeroings):
                if flags.first <= address < flags.end:
                    self._zero(word, address, flags, serial, by)
                    break
        return word

    def words(self, flags: Flags) -> list[tuple[int, Semaphore]]:
        """Returns (address, word) of each of a launch's semaphores that has been used, in order of address."""
        found = (item for item in self._words.items() if flags.first <= item[0] < flags.end)
        return sorted(found, key=operator.itemgetter(0))

    def zero_flags(self, flags: Flags) -> None:
        """Zeroes the semaphores of a launch, as the framework does before the launch begins on this device."""
        serial, by = next_serials(len(flags.names)), (self.component, self.begun) if self.begun > 1 else None
        for address, word in self.words(flags):
            self._zero(word, address, flags, serial, by)
        self._zeroings.append((flags, serial, by))

    @staticmethod
    def _zero(word: Semaphore, address: int, flags: Flags, serial: int, by: tuple[int, int] | None) -> None:
        place = address - flags.first
        word.name, word.launch = flags.names[place], flags.launch
        word.zero(by, serial + place)
