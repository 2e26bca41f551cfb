"""The emulated machine: devices with CTAs with threads, and the launch of one kernel on it."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np

from . import report
from .clocks import ComponentPool, Components, Knowledge, covers
from .clusters import Cluster, check_left, note_use
from .engines import Engine
from .errors import DeadlockError, EmulationError, ProtocolError, RaceError, StepLimitError
from .laps import Laps
from .memory import Buffer, poison
from .orders import Orders
from .races import Access, RaceDetector
from .references import Slot
from .scheduler import make_scheduler
from .sync import Meeting, Semaphore, Waitable


class Thread:
    """A warpgroup, or one warp of it inside `plgpu.warp_map`: an environment and a place in the program."""

    def __init__(
        self,
        machine: Machine,
        cta: Cta,
        warpgroup: int,
        warp: int | None,
        env: list,
        pc: int,
        before: Thread | None = None,
    ):
        self.machine, self.cta, self.device, self.lap = machine, cta, cta.device, machine.laps.current[cta.device]
        self.warpgroup, self.warp = warpgroup, warp
        self.env, self.pc = env, pc
        self.knowledge = Knowledge()
        self.orders = Orders()
        # A warp of a later map comes after the same warp of the one before, and so takes over its component.
        self.component = machine.components.new() if before is None else before.component
        self.time = 1 if before is None else before.time + 1
        self.pool = ComponentPool(machine.components) if before is None else before.pool
        self.open_stores: list[Any] = []  # not yet committed
        self.groups: list[list[Any]] = []  # committed, oldest first
        self.wgmmas: list[Any] = []  # in flight, oldest first
        self.waits: dict[Any, Any] = {}  # mbarrier -> phases waited for; a tuple where the warps differ
        self.arrivals: dict[Any, int] = {}  # meeting -> generation to see the end of
        self.axes: dict[Any, int] = {}
        self.visits: dict[int, int] = {}  # instruction -> times, for allocations in loops
        self.children: list[Thread] = []  # the warps of the last map
        self.done = False
        self.blocked: tuple[Waitable, Callable[[], str]] | None = None
        self.blocked_at = 0
        self.priority = 0.0
        self.polled = False
        self.knowledge.note(self.component, self.time)

    def tick(self) -> None:
        """Ends an interval: what comes after is not covered by snapshots taken before."""
        if self.machine.detector is not None:
            self.time += 1
            self.knowledge.note(self.component, self.time)

    def block(self, on: Waitable, why: Callable[[], str]) -> bool:
        """Suspends the thread at the current instruction until `on` changes; `why` describes the wait."""
        if self.blocked is None:
            self.blocked_at = self.machine.now
        self.blocked = (on, why)
        on.waiters.append(self)
        return True

    def access(self, view: Any, what: str, *, write: bool, atomic: bool = False) -> None:
        """Checks and records an access of this thread itself (generic proxy)."""
        if write and view.buffer.read_only:
            raise ProtocolError(f"{view} is an input that is not aliased to an output: it must not be written")
        detector = self.machine.detector
        if detector is not None and view.buffer.space != "regs":
            access = Access(self, view, what, self.instruction, self.component, self.time, write=write, atomic=atomic)
            detector.access(access, self.knowledge)
            self.machine.note_remote(self, access)

    @property
    def instruction(self) -> Any:
        return self.machine.program.instructions[self.pc - 1]

    def __str__(self) -> str:
        if not self.machine.program.num_threads and self.warp is None:
            return str(self.cta)
        warp = "" if self.warp is None else f", warp {self.warp}"
        return f"{self.cta}, warpgroup {self.warpgroup}{warp}"


class Cta:
    """One block of the grid on one device."""

    def __init__(self, machine: Machine, device: int, index: int, coordinates: tuple[int, ...]):
        self.machine, self.device, self.index, self.coordinates = machine, device, index, coordinates
        self.scopes: dict[Any, Any] = {}  # live collective allocations
        self.meeting = Meeting(machine.program.num_threads or 1)
        self.running = 0
        self.ended = False
        self.cluster: Cluster | None = None
        self.rank = 0  # in the cluster
        self.peer_uses: dict[int, tuple[int, str, int]] = {}  # component -> what another CTA of the cluster does here
        self.final = Knowledge()  # of the threads that have ended
        self.freed: list[Buffer] = []  # shared memory whose scope has ended and that nobody has got since

    def reuse(self, knowledge: Knowledge, thread: Thread) -> None:
        """The freed memory may be given out now: whoever does that must know that all copies are done with it."""
        freed, self.freed = self.freed, []
        if self.machine.detector is None:
            return
        for buffer in freed:
            for access in buffer.async_uses.values():
                if not covers(knowledge.seen, access.component, access.time):
                    key = ("freed", access.instruction.index)
                    self.machine.fault(key, ProtocolError(report.freed_early(self, access)), thread)

    def __str__(self) -> str:
        where = self.coordinates[0] if len(self.coordinates) == 1 else self.coordinates or 0
        return f"device {self.device}, CTA {where}"


@dataclasses.dataclass
class Outcome:
    """What a launch produced: outputs per device, faults, warnings."""

    outputs: list[list[np.ndarray]]
    errors: list[EmulationError]
    warnings: list[str]


class Machine:
    """Runs one launch of one program on all devices."""

    def __init__(
        self,
        program: Any,
        settings: Any,
        mesh_shape: dict[str, int],
        inputs: list[list[np.ndarray]],
        run: Any,
        name: str,
        repetition: int = 0,
    ):
        self.program, self.settings, self.run, self.name = program, settings, run, name
        self.mesh_shape = mesh_shape
        self.coordinates = list(itertools.product(*(range(n) for n in mesh_shape.values())))
        self.random = random.Random(f"{settings.seed}:{name}:{repetition}")
        self.components = Components()
        self.errors: list[EmulationError] = []
        self.warnings: list[str] = []
        self._reported: set[Any] = set()
        self.detector = RaceDetector(self._race) if settings.detect_races else None
        self.engine = Engine(self)
        self.scheduler = make_scheduler(settings, self.random)
        self.now = 0
        self.semaphores: list[Semaphore] = []
        self.globals: dict[Any, Any] = {}
        self.remote_uses: list[dict[Any, Access]] = [{} for _ in self.coordinates]  # by component and launch
        self.buffers = [self._bind(device, values) for device, values in enumerate(inputs)]
        for position in range(len(self.buffers[0])):
            row = [b[position] for b in self.buffers]
            for buffer in row:
                if isinstance(buffer, Buffer):
                    buffer.peers = row
        self.ctas: list[list[Cta]] = [[] for _ in self.coordinates]
        self.queued: list[list[Cta]] = [[] for _ in self.coordinates]
        self.threads: list[Thread] = []
        self.exit_seen = [Knowledge() for _ in self.coordinates]
        self.laps = Laps(self, settings.laps)

    # ---- memory ------------------------------------------------------------------------------------------------------

    def _bind(self, device: int, values: list[np.ndarray]) -> list[Any]:
        """The buffers (or plain values) that the kernel's parameters denote on `device`."""
        out: list[Any] = []
        aliases = {o: i for i, o in self.program.aliases.items()}
        for i, (value, is_ref) in enumerate(zip(values, self.program.input_is_ref)):
            if not is_ref:
                out.append(value.item() if value.ndim == 0 and value.dtype.kind in "iub" else value)
                continue
            aliased = i in self.program.aliases
            data = np.array(value) if aliased or not value.flags.c_contiguous else value
            out.append(Buffer(f"input {i}", "gmem", data, device, read_only=not aliased, written=True))
        for o, aval in enumerate(self.program.out_avals):
            if o in aliases:
                out.append(out[aliases[o]])
            else:
                out.append(Buffer(f"output {o}", "gmem", poison(aval.shape, aval.dtype), device))
        return out

    def note_remote(self, thread: Thread, access: Access) -> None:
        """Remembers that `thread` touches memory of another device or CTA: that one must not leave before."""
        buffer = access.view.buffer
        if buffer.space == "smem" and buffer.cta is not thread.cta:
            note_use(thread, buffer.cta, f"{access.what} of {access.view}", access.component, access.time)
        if buffer.space == "gmem" and buffer.device != thread.device:
            self.laps.check_begun(thread, buffer.device, f"uses {access.view}", asynchronous=access.asynchronous)
            self.remote_uses[buffer.device][access.component, thread.lap] = access

    def logical_device(self, thread: Thread, device_id: Any, id_type: Any, env: list) -> int:
        """The position in the mesh (row-major) that a device id means to `thread`."""

        def value(x: Any) -> int:
            return int(env[x.index]) if type(x) is Slot else int(x)

        sizes = self.mesh_shape
        if device_id is None:
            return thread.device
        if isinstance(device_id, dict):
            own = dict(zip(sizes, self.coordinates[thread.device]))
            for names, x in device_id.items():
                index = value(x)
                for axis in reversed(names if isinstance(names, tuple) else (names,)):
                    if axis not in sizes:
                        raise ProtocolError(
                            f"the device id {device_id} names {axis!r}, which is no axis of the mesh {sizes}"
                        )
                    index, own[axis] = divmod(index, sizes[axis]) if isinstance(names, tuple) else (0, index)
            parts = list(own.values())
        elif getattr(id_type, "name", "MESH") == "LOGICAL":
            logical = value(device_id)
            if not 0 <= logical < len(self.coordinates):
                raise ProtocolError(f"device id {logical} is out of range for {len(self.coordinates)} devices")
            return logical
        else:
            parts = [value(x) for x in (device_id if isinstance(device_id, (tuple, list)) else (device_id,))]
            if len(parts) != len(sizes):
                raise ProtocolError(
                    f"{len(parts)} device coordinates for a mesh of {len(sizes)} axes {sizes}: give one per axis, a "
                    "dict, or device_id_type=LOGICAL"
                )
        logical = 0
        for part, (axis, size) in zip(parts, sizes.items()):
            if not 0 <= part < size:
                raise ProtocolError(
                    f"device coordinate {part} is out of range for the mesh axis {axis!r} of size {size}"
                )
            logical = logical * size + part
        return logical

    # ---- running -----------------------------------------------------------------------------------------------------

    def start(self, thread: Thread) -> None:
        self.threads.append(thread)
        self.scheduler.admit(thread)

    def make_runnable(self, thread: Thread) -> None:
        if thread.blocked is not None and not thread.done:
            self.scheduler.ready(thread)

    def queue(self, device: int) -> None:
        """Makes the CTAs of a launch on a device."""
        grid = itertools.product(*(range(n) for n in self.program.grid))
        self.ctas[device] = [Cta(self, device, i, c) for i, c in enumerate(grid)]
        if self.program.cluster:
            size = math.prod(self.program.cluster.values())
            for first in range(0, len(self.ctas[device]), size):
                Cluster(self.program.cluster, self.ctas[device][first : first + size])
        self.queued[device] = list(self.ctas[device])

    def launch(self, device: int) -> None:
        """Starts as many of the queued CTAs of a device as fit."""
        limit = self.settings.resident
        running = sum(cta.running > 0 for cta in self.ctas[device])
        together = math.prod(self.program.cluster.values())  # the CTAs of a cluster are launched together
        if limit is not None and limit < together:
            raise ProtocolError(f"a cluster of {together} CTAs cannot be launched where {limit} fit at a time")
        while self.queued[device] and (limit is None or running + together <= limit):
            for _ in range(together):
                self._launch_cta(device, self.queued[device].pop(0))
            running += together

    def _launch_cta(self, device: int, cta: Cta) -> None:
        for warpgroup in range(self.program.num_threads or 1):
            env = list(self.program.template)
            for slot, buffer in zip(self.program.parameters, self.buffers[device]):
                env[slot] = buffer
            thread = Thread(self, cta, warpgroup, None, env, 0)
            thread.knowledge.join(self.laps.start_of(device))
            thread.axes = dict(zip(self.mesh_shape, self.coordinates[device]))
            thread.axes.update(zip(self.program.axis_names, (*cta.coordinates, warpgroup)))
            cta.running += 1
            self.start(thread)

    def leave(self, thread: Thread) -> None:
        """A thread ends: its CTA may end with it, and another start in its place."""
        thread.done = True
        if thread.warp is None:
            self.exit_seen[thread.device].join(thread.knowledge)
            cta = thread.cta
            cta.final.join(thread.knowledge)
            cta.running -= 1
            if cta.running == 0:
                cta.ended = True
                check_left(self, cta, thread)
                cta.reuse(cta.final, thread)
                self.launch(thread.device)
                if all(cta.ended for cta in self.ctas[thread.device]):
                    self.laps.end(thread.device)

    def execute(self) -> Outcome:
        """Runs the launch to its end or its first fatal fault."""
        self.program.forget_views()
        aborted = False
        thread: Thread | None = None
        try:
            self.laps.begin()
            scheduler, engine, turn = self.scheduler, self.engine, self._turn
            limit = self.settings.step_limit
            while True:
                thread = None
                engine.maybe_complete()
                thread = scheduler.pick()
                if thread is None:
                    if engine.complete_awaited():
                        continue
                    break
                self.now += 1
                if limit is not None and self.now > limit:
                    raise StepLimitError(f"no end after {limit} steps; a loop polls for ever, or step_limit is too low")
                if turn(thread):
                    scheduler.ready(thread)
            if any(not t.done for t in self.threads) or any(self.queued):
                raise DeadlockError(report.deadlock(self))
            self._check_end()
        except EmulationError as error:
            aborted = True
            self._fail(error, thread)
        if aborted:
            outputs = [[poison(a.shape, a.dtype) for a in self.program.out_avals] for _ in self.coordinates]
        else:
            first = len(self.program.input_is_ref)
            outputs = [[b.data for b in row[first:]] for row in self.buffers]
        return Outcome(outputs, self.errors, self.warnings)

    def _turn(self, thread: Thread) -> bool:
        """Runs `thread` up to its next visible instruction; returns whether it can go on."""
        functions, visible = self.program.functions, self.program.visible
        pc, acted = thread.pc, False
        while True:
            if visible[pc]:
                if acted:
                    thread.pc = pc
                    return True
                acted = True
            thread.pc = pc + 1
            if functions[pc](thread):
                if not thread.done:
                    thread.pc = pc
                return False
            thread.blocked = None
            pc = thread.pc

    # ---- faults ------------------------------------------------------------------------------------------------------

    def _fail(self, error: EmulationError, thread: Thread | None) -> None:
        where = f"{thread}, at {thread.instruction.source}: " if thread is not None else ""
        args = (error.kind,) if isinstance(error, RaceError) else ()
        self.errors.append(type(error)(f"{where}{error}\n{report.how_to_repeat(self)}", *args))

    def fault(self, key: Any, error: EmulationError, thread: Thread | None = None) -> None:
        """Records a fault that does not end the run, once per `key`."""
        if key not in self._reported and len(self.errors) < 16:
            self._reported.add(key)
            self._fail(error, thread)

    def _race(self, kind: str, prior: Access, access: Access) -> None:
        key = (kind, prior.instruction.index, access.instruction.index)
        self.fault(key, RaceError(report.race(kind, prior, access), kind))

    def _check_end(self) -> None:
        """What must hold when the kernel ends: nobody touches a device's memory that may have left."""
        for semaphore in self.semaphores:
            if semaphore.total and not semaphore.waited:
                self.warnings.append(
                    f"{semaphore.name} of device {semaphore.device} was signalled but never waited for"
                )
        if self.detector is None:
            return
        for device, uses in enumerate(self.remote_uses):
            for (_, lap), access in uses.items():
                if not covers(self.laps.seen[device][lap - 1].seen, access.component, access.time):
                    key = ("exit", device == access.thread.device, access.instruction.index)
                    self.fault(key, RaceError(report.left_early(device, access), "exit"))
        for access, wholly in self.detector.unwritten.values() if not self.errors else ():
            self.fault(("unwritten", access.instruction.index), ProtocolError(report.unwritten(access, wholly)))
        for semaphore in self.semaphores:
            for thread, component, time, instruction, lap in semaphore.unseen:
                if not covers(self.laps.seen[semaphore.device][lap - 1].seen, component, time):
                    key = ("late", instruction.index)
                    self.fault(key, ProtocolError(report.late_signal(semaphore, thread, instruction)))
