"""Synchronisation objects: semaphores in global memory, mbarriers, and barriers of a CTA's threads."""

from __future__ import annotations

import bisect
import collections
import dataclasses
import itertools
from typing import NamedTuple, Protocol

import numpy as np

from ..foundations.actors import Actor, Block
from ..foundations.clocks import EMPTY, Knowledge, covers, join
from ..foundations.equations import AxisName
from ..foundations.errors import ProtocolError
from ..foundations.source_lines import Instruction

_HISTORY = 64  # how many values of earlier launches a word keeps; a peer that lags behind can read fewer than that
# A write by another device: (its thread, the component and time of the event, the instruction).
RemoteWrite = tuple[Actor, int, int, Instruction]


class Release(NamedTuple):
    """What a write releases.

    Attributes:
        system: the clock that it releases to all devices.
        local: the clock that it releases to its own device.
        scope: the scope of the write.
    """

    system: np.ndarray
    local: np.ndarray
    scope: str = "sys"


class Waiter(Protocol):
    """A thread that is blocked."""

    def wake(self) -> None:
        """Makes the thread runnable."""
        ...


class Waitable:
    """An object for which blocked threads wait."""

    __slots__ = ("waiters",)

    def __init__(self):
        self.waiters: list[Waiter] = []

    def wake(self) -> None:
        if self.waiters:
            waiters, self.waiters = self.waiters, []
            for thread in waiters:
                thread.wake()


@dataclasses.dataclass(slots=True, eq=False)
class Write:
    """A write to a word of memory: the value, and the knowledge that a reader of the value gains.

    Attributes:
        serial: the write's place in the order of all writes to all words.
        value: the word's value after the write.
        total: the sum of all additions since the last store to the word; waits that decrement do not lower it.
        system: the clock that a reader on any device gains, if it acquires at system scope.
        local: for each device that has contributed to the value, the clock that a reader there gains at GPU scope.
        by: the event of the write, (component, time); None if all threads know of the write.
        within: the writer's device, if the write has a scope inside that device; None at system scope.
        launch: the number of the launch to which the word belonged when it was written.
        is_zeroing: whether the framework made the write, to zero the word before a launch.
        readers: for each component that has read the write, the time of its first read.
    """

    value: int
    total: int
    system: np.ndarray
    local: dict[int, np.ndarray]
    by: tuple[int, int] | None
    serial: int = dataclasses.field(default_factory=lambda: next_serial())
    within: int | None = None
    launch: int | None = None
    is_zeroing: bool = False
    readers: dict[int, int] = dataclasses.field(default_factory=dict)

    def is_known(self, seen: np.ndarray) -> bool:
        """Whether a thread with the clock `seen` may read no older value: it knows of the write, or of a read of it."""
        if self.by is None or covers(seen, *self.by):
            return True
        return any(covers(seen, component, time) for component, time in self.readers.items())


_serials = itertools.count(1)


def next_serial() -> int:
    """Returns a new serial, higher than all before. Two words that are written at once share a serial."""
    return next(_serials)


def next_serials(count: int) -> int:
    """Takes `count` new serials in a row, higher than all before, and returns the first of them."""
    first = next(_serials)
    collections.deque(itertools.islice(_serials, count), maxlen=0)
    return first


def _serial_of(write: Write) -> int:
    return write.serial


class Semaphore(Waitable):
    """A word of 32 bits in a device's global memory, which kernels use as a counter, a flag or a key.

    The word keeps a log of its values. A wait ends at the first value in the log that satisfies it, and acquires what
    that value carries, but nothing from later values: on a GPU the wait may end as soon as that value is there. A load
    of inline code reads the oldest value that it may read; when it is repeated, it reads the next value
    (`orders.Orders.read`).

    Attributes:
        waited: whether any thread has waited for the word or read it.
        launch: the number of the launch to which the word belongs now; None if the word belongs to one launch only.
    """

    __slots__ = ("_first", "_unseen", "device", "launch", "log", "name", "taken", "waited")

    def __init__(self, name: str, device: int, serial: int | None = None):
        super().__init__()
        self.name, self.device = name, device
        self.launch: int | None = None
        self.waited = False
        self._unseen: dict[int, RemoteWrite] = {}  # serial -> a write by another device, not read by this device yet
        self.log: list[Write] = []
        self.zero(serial=serial)

    def zero(self, by: tuple[int, int] | None = None, serial: int | None = None) -> None:
        """Zeroes the word before a launch, as the framework does.

        Args:
            by: the event of the zeroing, (component, time). Threads that do not know of it may still read older values,
                so the log keeps the last `_HISTORY` of them. None: all threads know of it, and the log begins anew.
            serial: of the zeroing; None: the next one.
        """
        last = self.log[-1] if self.log else None
        if by is not None and last is not None and last.is_zeroing and not last.readers:
            # The word has not been used since the last zeroing, so the log needs no second one.
            last.by, last.serial = by, serial or next_serial()
            return
        del self.log[: len(self.log) if by is None else -_HISTORY]
        zeroing = Write(
            value=0, total=0, system=EMPTY, local={}, by=by, serial=serial or next_serial(), is_zeroing=True
        )
        self.log.append(zeroing)
        self.taken = 0  # what waits that decrement have subtracted
        self._first = len(self.log) - 1  # the index in the log of the first value that can end a wait
        self.wake()

    @property
    def value(self) -> int:
        return self.log[-1].value

    @property
    def total(self) -> int:
        return self.log[-1].total

    @property
    def stored_at(self) -> int:
        """The serial of the last store, or of the last atomic operation that lowered the value, if that is later.

        Earlier values are overwritten and cannot end a wait.
        """
        return self.log[self._first].serial

    @property
    def unseen(self) -> list[RemoteWrite]:
        """Writes by other devices that no thread of this device has read, as passed to `expect_seen`."""
        return list(self._unseen.values())

    def expect_seen(self, what: RemoteWrite) -> None:
        """Notes that the last write came from another device."""
        self._unseen[self.log[-1].serial] = what

    def note_read(self, write: Write, component: int, time: int, device: int) -> None:
        """Notes that a thread or operation of `device` has read `write`."""
        self.waited = True
        write.readers.setdefault(component, time)
        if device == self.device and self._unseen:
            self._unseen = {s: what for s, what in self._unseen.items() if s > write.serial}

    def after(self, serial: int) -> int | None:
        """Returns the serial of the first write after `serial`; None if there is none."""
        position = bisect.bisect_right(self.log, serial, key=_serial_of)
        return self.log[position].serial if position < len(self.log) else None

    def at(self, serial: int) -> Write:
        """Returns the last write up to `serial`: the word's value at that time."""
        return self.log[max(bisect.bisect_right(self.log, serial, key=_serial_of) - 1, 0)]

    def oldest(self, seen: np.ndarray) -> Write:
        """Returns the write with the oldest value that a thread with the clock `seen` may still read."""
        return next((write for write in reversed(self.log) if write.is_known(seen)), self.log[0])

    def write(
        self,
        value: int,
        device: int,
        release: Release,
        *,
        by: tuple[int, int] | None,
        continues: bool,
        serial: int | None = None,
    ) -> None:
        """Adds a write to the log: a store by a thread of `device`, or an atomic operation.

        Args:
            value: the new value.
            device: the writer's device.
            release: what the write releases.
            by: the event of the write.
            continues: whether the word still carries the clocks that it carried before, as after an atomic operation.
            serial: the serial of the write; None: the next serial.
        """
        (system, local, scope), last, value = release, self.log[-1], value & 0xFFFFFFFF
        parts = {device: local}
        if continues:
            system = join(last.system, system)
            parts = {**last.local, device: join(last.local.get(device, EMPTY), local)}
        adds = continues and value >= last.value
        total = last.total + value - last.value if adds else value + self.taken
        within = None if scope == "sys" else device
        self.log.append(Write(value, total, system, parts, by, serial or next_serial(), within, self.launch))
        if not adds:
            self._first = len(self.log) - 1
        if value != last.value:
            self.wake()

    def signal(
        self, count: int, seen: np.ndarray, from_device: int, by: tuple[int, int] | None = None, scope: str = "sys"
    ) -> None:
        """Adds `count` to the word atomically, with a release at `scope`."""
        release = Release(EMPTY if scope == "gpu" else seen, seen, scope)
        self.write(self.value + count, from_device, release, by=by, continues=True)

    def acquire(
        self, value: int, knowledge: Knowledge, *, decrement: bool, scope: str, by: tuple[int, int] | None = None
    ) -> Write | None:
        """Returns the write that ends a wait for `value` by a thread of this device; None if the wait does not end yet.

        `knowledge` is the thread's. It gains the clocks that the write carries at `scope`.
        """
        self.waited = True
        if self.value < value:
            return None
        need = self.taken + value
        # Totals never fall after the last store, so a binary search finds the first one that is high enough.
        found = self.log[bisect.bisect_left(self.log, need, lo=self._first, key=lambda write: write.total)]
        if need > 0:
            others = [device for device in found.local if device != self.device]
            if scope == "gpu" and others:
                raise ProtocolError(
                    f"the wait for {self.name} of device {self.device} has memory scope 'gpu', and what ends it are "
                    f"signals of device {others[0]} as well: expected scope 'sys' (and a signal of scope 'sys')"
                )
            local = found.local.get(self.device, EMPTY)
            knowledge.learn(local if scope == "gpu" else join(found.system, local))
        if decrement and value:
            self.taken += value
            last = self.log[-1]
            self.log.append(Write(last.value - value, last.total, last.system, last.local, by))
            self.wake()
        return found


class MBarrier(Waitable):
    """An mbarrier: a phase completes when all arrivals have come and no bytes are outstanding.

    Attributes:
        collective: for a cluster barrier, the groups of axes along which an arrival reaches other CTAs; else empty.
        leader_tracked: for a cluster barrier, whether an arrival counts on the leader's barrier alone.
        reached: the barriers (this one, or its twins) that count an arrival.
        orders_tensor_core: whether a wait also orders accesses to tensor memory.
    """

    def __init__(self, name: str, arrivals: int, cta: Block):
        super().__init__()
        self.name, self.arrivals, self.cta = name, arrivals, cta
        self.collective: tuple[tuple[AxisName, ...], ...] = ()
        self.leader_tracked = False
        self.orders_tensor_core = False
        self.reached = [self]
        self.arrived = 0
        self.bytes = 0  # bytes expected and not landed; negative if another CTA's part of a copy has landed before
        self.phase = 0  # how many phases have completed
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
        # As in hardware, the phase completes only without outstanding bytes. Until then no further arrival may come.
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
    """A reusable barrier at which all threads of a CTA, or all warps of a `warp_map`, arrive.

    Attributes:
        expected: how many threads arrive.
        arrived: how many have arrived in this generation.
        generation: how many times all have arrived.
        knowledge: what those know together that have arrived in this generation.
        latest: what all knew together at the end of the last generation.
    """

    __slots__ = ("arrived", "expected", "generation", "knowledge", "latest")

    def __init__(self, expected: int):
        super().__init__()
        self.expected = expected
        self.arrived = 0
        self.generation = 0
        self.knowledge = Knowledge()
        self.latest = Knowledge()

    def arrive(self, knowledge: Knowledge) -> int:
        """Records an arrival. Returns the generation; the caller may go on when that generation has ended."""
        self.arrived += 1
        self.knowledge.join(knowledge)
        mine = self.generation
        if self.arrived == self.expected:
            self.arrived = 0
            self.generation += 1
            self.latest, self.knowledge = self.knowledge, Knowledge()
            self.wake()
        return mine
