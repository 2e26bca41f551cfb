"""Vector clocks: which events each thread knows to have happened.

A *component* is a sequence of events in a fixed order; the *time* of an event is its number in the component. Each
thread has a component. Asynchronous operations share components of a pool. A clock is an array that holds, for each
component, the time of the last event known. Clock arrays are never changed in place: a change makes a new array, so a
reference to a clock is a snapshot.
"""

from __future__ import annotations

import numpy as np

EMPTY = np.zeros(0, np.int32)


def join(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns the pointwise maximum of two clocks of any lengths: the clock that knows what either of them knows."""
    if a is b or not b.size:
        return a
    if not a.size:
        return b
    if a.size < b.size:
        a, b = b, a
    if a.size == b.size:
        return np.maximum(a, b)
    out = a.copy()
    np.maximum(out[: b.size], b, out=out[: b.size])
    return out


def with_time(clock: np.ndarray, component: int, time: int) -> np.ndarray:
    """Returns a clock that knows all that `clock` knows, and the event (`component`, `time`)."""
    if component < clock.size:
        if clock[component] >= time:
            return clock
        out = clock.copy()
    else:
        out = np.zeros(max(component + 16, clock.size * 5 // 4), np.int32)
        out[: clock.size] = clock
    out[component] = time
    return out


def covers(clock: np.ndarray, component: int, time: int) -> bool:
    """Whether a thread with this `clock` knows that the event (`component`, `time`) has happened."""
    return component < clock.size and bool(clock[component] >= time)


class Knowledge:
    """The events that one thread, or one asynchronous operation, may rely on.

    Attributes:
        seen: everything that happened before, in the sense of happens-before.
        smem: the part of `seen` that a proxy fence has made visible to the asynchronous proxy in shared memory.
        gmem: the part of `seen` that a proxy fence has made visible to the asynchronous proxy in global memory.
        tensor: the part of `seen` after which accesses to tensor memory are ordered: the thread's own events, and the
            events known through barriers that order the tensor core. None in kernels without tensor memory.
    """

    __slots__ = ("gmem", "seen", "smem", "tensor")

    def __init__(
        self,
        seen: np.ndarray = EMPTY,
        smem: np.ndarray = EMPTY,
        gmem: np.ndarray = EMPTY,
        tensor: np.ndarray | None = None,
    ):
        self.seen, self.smem, self.gmem, self.tensor = seen, smem, gmem, tensor

    def copy(self) -> Knowledge:
        return Knowledge(self.seen, self.smem, self.gmem, self.tensor)

    def join(self, other: Knowledge, *, orders_tensor_core: bool = True) -> None:
        """Adds all that `other` knows, its proxy fences included, as a wait for a barrier inside one CTA does."""
        self.seen = join(self.seen, other.seen)
        self.smem = join(self.smem, other.smem)
        self.gmem = join(self.gmem, other.gmem)
        if other.tensor is not None and orders_tensor_core:
            self.tensor = other.tensor if self.tensor is None else join(self.tensor, other.tensor)

    def learn(self, seen: np.ndarray) -> None:
        """Adds the events of `seen`, as a wait for a semaphore does: the signaller's proxy fences do not count here."""
        self.seen = join(self.seen, seen)

    def note(self, component: int, time: int) -> None:
        """Adds one event."""
        self.seen = with_time(self.seen, component, time)
        if self.tensor is not None:
            self.tensor = with_time(self.tensor, component, time)

    def fence_smem(self) -> None:
        self.smem = self.seen

    def fence_gmem(self) -> None:
        self.gmem = self.seen

    def fence_all(self) -> None:
        self.smem = self.gmem = self.seen


class Components:
    """Gives each new component its number: 0, 1, 2, ..."""

    def __init__(self):
        self.count = 0

    def new(self) -> int:
        self.count += 1
        return self.count - 1


class ComponentPool:
    """The components of the asynchronous operations that one thread issues.

    An operation reuses a component if the component's last operation happened before it. So few components are needed.
    """

    def __init__(self, components: Components):
        self._components = components
        self._last: list[list[int]] = []  # [component, time of its last operation], oldest first

    def take(self, seen: np.ndarray) -> tuple[int, int]:
        """Returns the (component, time) of a new operation, whose issuer has the clock `seen`."""
        for position, entry in enumerate(self._last[:8]):
            if covers(seen, entry[0], entry[1]):
                self._last.append(self._last.pop(position))
                entry[1] += 1
                return entry[0], entry[1]
        entry = [self._components.new(), 1]
        self._last.append(entry)
        return entry[0], 1
