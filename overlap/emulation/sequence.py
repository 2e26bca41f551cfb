"""Launches of kernels one after the other, each device at its own pace, on memory that they share.

A launch begins on each device for itself: the framework zeroes the device's semaphores, and starts its CTAs. If it runs
a barrier before the kernel (as it does unless told not to), the first CTA of any device starts after all devices have
come that far; else a kernel that touches a peer's memory has to see for itself that the peer has begun. To prove that
it does, launches follow each other here: of one kernel or of several, along different axes, on different meshes of the
same devices. Each device goes on to its next launch as soon as it is done with the last, or much later: when, is up to
the scheduler.

Global memory is used again, as a framework does: each launch gets its operands, results and semaphores at addresses
that launches before it had. What a device's memory holds before it has begun a launch is what another launch has left
there; afterwards it is worth nothing.
"""

from __future__ import annotations

import dataclasses
import operator
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from . import report
from .clocks import Components, Knowledge, covers
from .engines import Engine
from .errors import DeadlockError, EmulationError, ProtocolError, RaceError, StepLimitError, cannot_run
from .memory import Buffer, poison
from .races import RaceDetector, Shadow
from .scheduler import make_scheduler
from .sync import Semaphore, next_serial, next_serials

if TYPE_CHECKING:
    from .machine import Machine, Thread

_ALIGNMENT = 256  # of what a launch has in global memory


@dataclasses.dataclass(frozen=True)
class Launch:
    """One launch of one kernel, to be run (again) in a sequence.

    Attributes:
        program: the decoded kernel.
        name: of the kernel.
        mesh_shape: sizes of the mesh's axes.
        devices: for each position of the mesh, row-major, which device of the sequence it is.
        inputs: for each position, the operands' values.
        outputs: for each position, the results' values as first computed.
    """

    program: Any
    name: str
    mesh_shape: dict[str, int]
    devices: tuple[int, ...]
    inputs: list[list[np.ndarray]]
    outputs: list[list[np.ndarray]]


class Device:
    """One device: its memory, and the launches that it runs in their order.

    To the scheduler it is a thread whose turn starts the next launch.
    """

    def __init__(self, world: World, index: int):
        self.world, self.index = world, index
        self.component = world.components.new()
        self.launches: list[Machine] = []
        self.begun = self.ended = 0  # how many of them
        self.seen = Knowledge()  # what has happened before the end of the last one
        self.memory = np.zeros(0, np.uint8)
        self._words: dict[int, Semaphore] = {}  # by address; made when somebody asks for them
        self._serial = next_serial()  # of all words before the first launch
        # (launch, serial of the first of its words, by whom): how the framework has zeroed words so far.
        self._zeroings: list[tuple[Machine, int, tuple[int, int] | None]] = []
        self.priority, self.polled, self.done = 0.0, False, False

    def word(self, address: int) -> Semaphore:
        """A word of the memory in which semaphores lie."""
        word = self._words.get(address)
        if word is None:
            word = self._words[address] = Semaphore(f"word {address}", self.index, self._serial)
            for machine, serial, by in reversed(self._zeroings):
                if 0 <= address - machine.flags_at < len(machine.program.words):
                    self._zero(word, address, machine, serial, by)
                    break
        return word

    def words(self, machine: Machine) -> list[tuple[int, Semaphore]]:
        """(address, word) of those in the place of a launch's semaphores that somebody has asked for, in order."""
        first, end = machine.flags_at, machine.flags_at + len(machine.program.words)
        return sorted((item for item in self._words.items() if first <= item[0] < end), key=operator.itemgetter(0))

    @staticmethod
    def _zero(word: Semaphore, address: int, machine: Machine, serial: int, by: tuple[int, int] | None) -> None:
        place = address - machine.flags_at
        word.name, word.launch = machine.program.words[place], machine.number
        word.zero(by, serial + place)

    def start_next(self) -> None:
        """The framework gets to the next launch."""
        machine = self.launches[self.begun]
        self.begun += 1
        self._prepare(machine)
        machine.arrived.append(self.index)
        if not machine.program.has_barrier:
            self._start(machine, [self.index])
        elif len(machine.arrived) == len(machine.devices):
            for index in machine.devices:
                self.world.devices[index]._start(machine, machine.devices)

    def _prepare(self, machine: Machine) -> None:
        """What the framework does before a launch: semaphores are zero, and operands are computed."""
        serial, by = next_serials(len(machine.program.words)), (self.component, self.begun) if self.begun > 1 else None
        for address, word in self.words(machine):
            self._zero(word, address, machine, serial, by)
        self._zeroings.append((machine, serial, by))
        for semaphore in machine.private:
            if semaphore.device == self.index:
                semaphore.zero()
        if not self.world.reuses_memory:
            return
        for buffer, values in zip(machine.buffers[self.index], machine.values[self.index]):
            if isinstance(buffer, Buffer):
                buffer.data[...] = poison(buffer.data.shape, buffer.data.dtype) if values is None else values
                buffer.shadow, buffer.written = Shadow(max(buffer.data.nbytes, 1)), buffer.is_operand

    def _start(self, machine: Machine, others: Sequence[int]) -> None:
        known = Knowledge()
        for device in (self.world.devices[index] for index in others):
            known.join(device.seen)
            known.note(device.component, machine.ordinals[device.index])
        known.fence_all()
        machine.begin(self.index, known)

    def end(self, machine: Machine) -> None:
        """The last CTA of the present launch has ended."""
        self.ended += 1
        self.seen = self.seen.copy()
        self.seen.join(machine.exit_seen[self.index])
        machine.check_signals(self.index)
        if self.world.reuses_memory:
            machine.take_results(self.index)
        if self.begun < len(self.launches):
            self.world.scheduler.ready(self)


class World:
    """Runs a sequence of launches: its devices, its clock, and what all launches have in common."""

    def __init__(self, settings: Any, run: Any, name: str, repetition: int = 0, *, is_replay: bool = False):
        self.settings, self.run, self.name, self.is_replay = settings, run, name, is_replay
        self.random = random.Random(f"{settings.seed}:{name}:{repetition}")
        self.components = Components()
        self.errors: list[EmulationError] = []
        self.warnings: list[str] = []
        self._reported: set[Any] = set()
        self.detector = RaceDetector(self._race) if settings.detect_races else None
        self.engine = Engine(self)
        self.scheduler = make_scheduler(settings, self.random)
        self.now = 0
        self.threads: list[Thread] = []
        self.machines: list[Machine] = []
        self.devices: dict[int, Device] = {}
        self.fences: dict[Any, np.ndarray] = {}  # the clocks of sequentially consistent fences

    @property
    def reuses_memory(self) -> bool:
        return len(self.machines) > 1

    def add(self, machine: Machine) -> None:
        """Appends a launch to the sequence."""
        self.machines.append(machine)
        machine.number = len(self.machines)
        for index in machine.devices:
            device = self.devices.setdefault(index, Device(self, index))
            device.launches.append(machine)
            machine.ordinals[index] = len(device.launches)

    def _lay_out(self) -> None:
        """Gives each launch its place in global memory: at the beginning, as all others."""
        for device in self.devices.values():
            placed: list[tuple[Buffer, int]] = []
            size = 0
            for machine in device.launches:
                at = 0
                for buffer in machine.buffers[device.index]:
                    if isinstance(buffer, Buffer) and not any(buffer is b for b, _ in placed):
                        placed.append((buffer, at))
                        at += -(-buffer.data.nbytes // _ALIGNMENT) * _ALIGNMENT
                size = max(size, at)
            device.memory = np.frombuffer(self.random.randbytes(size), np.uint8).copy()
            for buffer, at in placed:
                old = buffer.data
                buffer.data = device.memory[at : at + old.nbytes].view(old.dtype).reshape(old.shape)

    def execute(self, stopped: Callable[[], bool] = lambda: False) -> bool:
        """Runs all launches to their ends or to the first fatal fault; returns whether they came to their ends.

        Raises:
            KeyboardInterrupt: soon after `stopped()`, which is asked now and then.
        """
        thread: Thread | None = None
        try:
            if self.reuses_memory:
                self._lay_out()
                for device in self.devices.values():
                    self.scheduler.admit(device)
            else:
                for device in self.devices.values():
                    device.start_next()
            scheduler, engine = self.scheduler, self.engine
            limit = self.settings.step_limit
            while True:
                thread = None
                engine.maybe_complete()
                picked = scheduler.pick()
                if picked is None:
                    if engine.complete_awaited():
                        continue
                    break
                self.now += 1
                if self.now & 63 == 1 and stopped():
                    raise KeyboardInterrupt
                if limit is not None and self.now > limit:
                    raise StepLimitError(f"no end after {limit} steps; a loop polls for ever, or step_limit is too low")
                if isinstance(picked, Device):
                    picked.start_next()
                    continue
                thread = picked
                if picked.turn():
                    scheduler.ready(picked)
            if any(device.ended < len(device.launches) for device in self.devices.values()):
                raise DeadlockError(report.deadlock(self))
            self._check_end()
        except EmulationError as error:
            self.fail(error, thread)
            return False
        except Exception as reason:  # what the emulator lacks, or a mistake of its own
            self.fail(cannot_run(reason), thread)
            self.errors[-1].__cause__ = reason
            return False
        finally:
            self._let_go()
        return True

    def _let_go(self) -> None:
        """Gives up what only a running launch needs.

        Its arrays of semaphores and barriers lead back to it, and the garbage collector does not look into NumPy's
        arrays of objects: it would stay in memory for ever.
        """
        for thread in self.threads:
            thread.env.clear()
        for machine in self.machines:
            machine.program.forget_views()
            machine.globals.clear()
            for cta in (cta for ctas in machine.ctas.values() for cta in ctas):
                cta.scopes.clear()
                cta.cluster = None

    # ---- faults ------------------------------------------------------------------------------------------------------

    def fail(self, error: EmulationError, thread: Thread | None) -> None:
        where = f"{report.who(thread)}, at {thread.instruction.source}: " if thread is not None else ""
        args = (error.kind,) if isinstance(error, RaceError) else ()
        self.errors.append(type(error)(f"{where}{error}\n{report.how_to_repeat(self)}", *args))

    def fault(self, key: Any, error: EmulationError, thread: Thread | None = None) -> None:
        """Records a fault that does not end the run, once per `key`."""
        if key not in self._reported and len(self.errors) < 16:
            self._reported.add(key)
            self.fail(error, thread)

    def _race(self, kind: str, prior: Any, access: Any) -> None:
        key = (kind, prior.instruction.index, access.instruction.index)
        self.fault(key, RaceError(report.race(kind, prior, access), kind))

    def check_present(self, thread: Thread, device: int, what: str, *, asynchronous: bool) -> None:
        """That `thread` may touch the memory of `device`: it knows that its launch has begun there, and not ended.

        `asynchronous`: by the copy engine, for which that knowledge needs a proxy fence behind it.
        """
        if device == thread.device or self.detector is None:
            return
        machine, owner, knowledge = thread.machine, self.devices[device], thread.knowledge
        begun = (owner.component, machine.ordinals[device])
        if not covers(knowledge.gmem if asynchronous else knowledge.seen, *begun):
            key = ("begun", thread.instruction.index)
            lacks_fence = covers(knowledge.seen, *begun)
            self.fault(key, ProtocolError(report.not_begun(thread, device, what, lacks_fence)), thread)
        elif owner.ended >= machine.ordinals[device]:
            self.fault(("left", thread.instruction.index), ProtocolError(report.has_left(thread, device, what)), thread)

    def _check_end(self) -> None:
        """What must hold when all has ended: nobody touches a device's memory that may have left."""
        # A word that launches share counts once, for the last of them.
        for semaphore in {id(each): each for m in self.machines for each in m.semaphores(m.devices)}.values():
            if semaphore.total and not semaphore.waited:
                where = f"{semaphore.name} of device {semaphore.device}"
                self.warnings.append(f"{where} was signalled but never waited for")
        if self.detector is None:
            return
        for machine in self.machines:
            machine.check_remote_uses()
        for access, wholly in self.detector.unwritten.values() if not self.errors else ():
            self.fault(("unwritten", access.instruction.index), ProtocolError(report.unwritten(access, wholly)))
