"""Launches of one kernel in a row, and who may rely on whose having begun.

A launch begins on each device for itself: the framework zeroes the device's semaphores, and starts its CTAs. If it runs
a barrier before the kernel (as it does unless told not to), the first CTA of any device starts after all devices have
come that far; else a kernel that touches a peer's memory has to see for itself that the peer has begun. To prove that
it does, launches follow each other here on the same memory, each device going on as soon as it is done with the last.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from . import report
from .clocks import Knowledge, covers
from .errors import ProtocolError
from .memory import Buffer, poison
from .races import Shadow

if TYPE_CHECKING:
    from .machine import Machine, Thread


class Laps:
    """The launches of a machine's kernel.

    Attributes:
      current: for each device, the number of the launch that it is in; 0 before the first.
      seen: for each device and each of its launches, what has happened before its end.
    """

    def __init__(self, machine: Machine, count: int):
        self._machine, self._count = machine, count
        devices = len(machine.coordinates)
        self._components = [machine.components.new() for _ in range(devices)]
        self.current = [0] * devices
        self.seen: list[list[Knowledge]] = [[] for _ in range(devices)]
        self._inputs: list[list[Any]] = [[] for _ in range(devices)]
        if count > 1:
            for device, buffers in enumerate(machine.buffers):
                for buffer in buffers:
                    if isinstance(buffer, Buffer):
                        buffer.data = buffer.data.copy()
                self._inputs[device] = [b.data.copy() if isinstance(b, Buffer) and b.written else None for b in buffers]

    def begin(self) -> None:
        """Starts the first launch on all devices."""
        self._go_on(range(len(self.current)))

    def start_of(self, device: int) -> Knowledge:
        """What the threads of a device know when its present launch starts."""
        lap = self.current[device]
        known = Knowledge()
        others = range(len(self.current)) if self._machine.program.has_barrier else [device]
        for other in others:
            if lap > 1:
                known.join(self.seen[other][lap - 2])
            known.note(self._components[other], lap)
        known.fence_all()
        return known

    def end(self, device: int) -> None:
        """The last CTA of a device has ended: it goes on to the next launch, or waits for the others to do so."""
        machine = self._machine
        machine.engine.finish(device)
        self.seen[device].append(machine.exit_seen[device].copy())
        if not machine.program.has_barrier:
            self._go_on([device])
        elif len({len(seen) for seen in self.seen}) == 1:
            self._go_on(range(len(self.current)))

    def _go_on(self, devices: Iterable[int]) -> None:
        """Starts the next launch of these devices, unless they have had their last."""
        going_on = [device for device in devices if self.current[device] < self._count]
        for device in going_on:
            self.current[device] += 1
            self._prepare(device)
            self._machine.queue(device)
        for device in going_on:
            self._machine.launch(device)

    def _prepare(self, device: int) -> None:
        """What the framework does before a launch; earlier inputs than the last are worth nothing."""
        machine, lap = self._machine, self.current[device]
        for semaphore in machine.semaphores:
            if semaphore.device == device:
                semaphore.zero()
        if self._count == 1:
            return
        for buffer, values in zip(machine.buffers[device], self._inputs[device]):
            if isinstance(buffer, Buffer):
                is_input = values is not None
                is_for_real = is_input and lap == self._count
                buffer.data[...] = values if is_for_real else poison(buffer.data.shape, buffer.data.dtype)
                buffer.shadow, buffer.written = Shadow(max(buffer.data.nbytes, 1)), is_input

    def check_begun(self, thread: Thread, device: int, what: str, *, asynchronous: bool) -> None:
        """That `thread` may touch the memory of `device`: it knows that the launch has begun there.

        `asynchronous`: by the copy engine, for which that knowledge needs a proxy fence behind it.
        """
        machine = self._machine
        if device == thread.device or machine.detector is None:
            return
        begun, knowledge = (self._components[device], thread.lap), thread.knowledge
        if not covers(knowledge.gmem if asynchronous else knowledge.seen, *begun):
            key = ("begun", thread.instruction.index)
            lacks_fence = covers(knowledge.seen, *begun)
            machine.fault(key, ProtocolError(report.not_begun(thread, device, what, lacks_fence)), thread)
