"""One launch of one kernel on the devices of its mesh: their CTAs, and the threads of these."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from . import report
from .clocks import EMPTY, ComponentPool, Knowledge, covers
from .clusters import Cluster, check_left, note_use
from .errors import ProtocolError, RaceError
from .memory import Buffer, poison
from .orders import Orders
from .races import Access
from .sync import Meeting, Semaphore, Waitable
from .tensor_core import TensorThread

if TYPE_CHECKING:
    from .sequence import World


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
        self.machine, self.cta, self.device = machine, cta, cta.device
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
        self.tensor = TensorThread() if before is None else before.tensor
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
            self.blocked_at = self.machine.world.now
        self.blocked = (on, why)
        on.waiters.append(self)
        return True

    def access(self, view: Any, what: str, *, write: bool, atomic: bool = False, by_rows: bool = False) -> None:
        """Checks and records an access of this thread itself (generic proxy)."""
        if write and view.buffer.read_only:
            raise ProtocolError(f"{view} is an input that is not aliased to an output: it must not be written")
        detector = self.machine.detector
        if detector is not None and view.buffer.space != "regs":
            access = Access(
                self, view, what, self.instruction, self.component, self.time, write=write, atomic=atomic,
                by_rows=by_rows,
            )  # fmt: skip
            detector.access(access, self.knowledge)
            self.machine.note_remote(self, access)

    def turn(self) -> bool:
        """Runs up to the next visible instruction; returns whether the thread can go on."""
        functions, visible = self.machine.program.functions, self.machine.program.visible
        pc, acted = self.pc, False
        while True:
            if visible[pc]:
                if acted:
                    self.pc = pc
                    return True
                acted = True
            self.pc = pc + 1
            if functions[pc](self):
                if not self.done:
                    self.pc = pc
                return False
            self.blocked = None
            pc = self.pc

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
        self.freed: list[Buffer] = []  # memory whose scope has ended and that nobody has got since
        self.tensor_columns = 0  # of tensor memory, in use

    def reuse(self, knowledge: Knowledge, thread: Thread) -> None:
        """The freed memory may be given out now: whoever does that must know that all copies are done with it."""
        freed, self.freed = self.freed, []
        if self.machine.detector is None:
            return
        for buffer in freed:
            for access in buffer.async_uses.values():
                # The CTA may end before it has waited for its last loads from tensor memory: their values are there.
                if self.ended and not (access.asynchronous or access.write):
                    continue
                if not covers(knowledge.seen, access.component, access.time):
                    key = ("freed", access.instruction.index)
                    self.machine.fault(key, ProtocolError(report.freed_early(self, access)), thread)

    def __str__(self) -> str:
        where = self.coordinates[0] if len(self.coordinates) == 1 else self.coordinates or 0
        return f"device {self.device}, CTA {where}"


class Machine:
    """One launch of one program on the devices of a mesh.

    Attributes:
        devices: for each position of the mesh, row-major, which of the world's devices it is. Everywhere else a device
            is known by that number, and positions are only what a kernel computes with.
        number: of the launch within the sequence, from 1.
        flags_at: where in the memory for semaphores its own begin.
        ordinals: for each device, the how manieth of its launches this is, from 1.
        arrived: the devices that have come to this launch.
        buffers: for each device, what the kernel's parameters denote.
        values: for each device, what they hold when it begins; None: nothing.
        private: semaphores that belong to single CTAs.
        results: for each position, the outputs; set when the launch has ended there.
    """

    def __init__(
        self,
        world: World,
        program: Any,
        mesh_shape: dict[str, int],
        devices: tuple[int, ...],
        inputs: list[list[np.ndarray]],
        name: str,
        *,
        flags_at: int = 0,
        is_real: bool = True,
    ):
        self.world, self.program, self.name = world, program, name
        self.mesh_shape, self.devices, self.flags_at = mesh_shape, devices, flags_at
        self._position = {device: position for position, device in enumerate(devices)}
        self.coordinates = list(itertools.product(*(range(n) for n in mesh_shape.values())))
        self.settings, self.run, self.random = world.settings, world.run, world.random
        self.components, self.detector = world.components, world.detector
        self.engine, self.scheduler, self.fault = world.engine, world.scheduler, world.fault
        self.number = 0  # set when the world has it
        self.ordinals: dict[int, int] = {}
        self.arrived: list[int] = []
        self.globals: dict[Any, dict[int, Any]] = {}
        self.private: list[Semaphore] = []
        self.remote_uses: dict[int, dict[int, Access]] = {device: {} for device in devices}  # by component
        self.buffers = {device: self._bind(device, values) for device, values in zip(devices, inputs)}
        self.values = {
            device: [b.data if isinstance(b, Buffer) and b.is_operand and is_real else None for b in row]
            for device, row in self.buffers.items()
        }
        for row in zip(*self.buffers.values()):
            for buffer in row:
                if isinstance(buffer, Buffer):
                    buffer.peers = dict(zip(devices, row))
        self.results: dict[int, list[np.ndarray]] = {}
        self.ctas: dict[int, list[Cta]] = {device: [] for device in devices}
        self.queued: dict[int, list[Cta]] = {device: [] for device in devices}
        self._start: dict[int, Knowledge] = {}
        self.exit_seen = {device: Knowledge() for device in devices}
        world.add(self)

    def word(self, device: int, first: int, place: int) -> Semaphore:
        """Of the semaphores of a device that all its CTAs share, the one at `place` behind the `first` of an array."""
        return self.world.devices[device].word(self.flags_at + first + place)

    def semaphores(self, devices: Collection[int]) -> Iterator[Semaphore]:
        """All of them on these devices that anybody has used."""
        yield from (semaphore for semaphore in self.private if semaphore.device in devices)
        for device in devices:
            yield from (word for _, word in self.world.devices[device].words(self))

    def place(self, device: int) -> tuple[int, ...]:
        """A device's coordinates in the mesh."""
        return self.coordinates[self._position[device]]

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
            out[-1].is_operand = True
        for o, aval in enumerate(self.program.out_avals):
            if o in aliases:
                out.append(out[aliases[o]])
            else:
                out.append(Buffer(f"output {o}", "gmem", poison(aval.shape, aval.dtype), device))
        return out

    def note_remote(self, thread: Thread, access: Access) -> None:
        """Remembers that `thread` touches memory of another device or CTA: that one must not leave before."""
        buffer = access.view.buffer
        if buffer.space in ("smem", "tmem") and buffer.cta is not thread.cta:
            note_use(thread, buffer.cta, f"{access.what} of {access.view}", access.component, access.time)
        if buffer.space == "gmem" and buffer.device != thread.device:
            what = f"uses {buffer.name}{access.view.text}"
            self.world.check_present(thread, buffer.device, what, asynchronous=access.asynchronous)
            self.remote_uses[buffer.device][access.component] = access

    # ---- running -----------------------------------------------------------------------------------------------------

    def start(self, thread: Thread) -> None:
        self.world.threads.append(thread)
        self.scheduler.admit(thread)

    def make_runnable(self, thread: Thread) -> None:
        if thread.blocked is not None and not thread.done:
            self.scheduler.ready(thread)

    def begin(self, device: int, known: Knowledge) -> None:
        """Starts the launch on a device, whose threads know so much then."""
        self._start[device] = known
        self.queue(device)
        self.launch(device)

    def queue(self, device: int) -> None:
        """Makes the CTAs of a launch on a device."""
        grid = itertools.product(*(range(n) for n in self.program.grid))
        self.ctas[device] = [Cta(self, device, i, c) for i, c in enumerate(grid)]
        if self.program.cluster:
            size = math.prod(self.program.cluster.values())
            for first in range(0, len(self.ctas[device]), size):
                Cluster(self.program.cluster, self.ctas[device][first : first + size])
        self.queued[device] = list(self.ctas[device])

    @property
    def resident(self) -> int | None:
        """How many CTAs fit on a device. A kernel that takes over waiting clusters has one CTA per core by default."""
        if self.settings.resident is None and self.program.cancels_clusters:
            together = math.prod(self.program.cluster.values())
            return max(self.settings.cores // together, 1) * together
        return self.settings.resident

    def cancel(self, device: int) -> tuple[int, ...] | None:
        """Takes the next cluster off the queue: the coordinates of its first CTA, None if all have been launched."""
        if not self.queued[device]:
            return None
        together = math.prod(self.program.cluster.values())
        cancelled, self.queued[device] = self.queued[device][:together], self.queued[device][together:]
        for cta in cancelled:
            cta.ended = True
        return cancelled[0].coordinates

    def launch(self, device: int) -> None:
        """Starts as many of the queued CTAs of a device as fit."""
        limit = self.resident
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
            thread.knowledge.join(self._start[device])
            if self.program.uses_tensor_memory and thread.knowledge.tensor is None:
                thread.knowledge.tensor = EMPTY
            thread.axes = dict(zip(self.mesh_shape, self.place(device)))
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
            # Mosaic has a barrier of the whole cluster at the end of a kernel whose CTAs share tensor memory.
            leaving = cta.cluster.ctas if self.program.ends_by_cluster and cta.cluster else [cta]
            if all(each.running == 0 for each in leaving):
                for each in leaving:
                    cta.final.join(each.final)
                    each.ended = True
                for each in leaving:
                    each.final.join(cta.final)
                    check_left(self, each, thread)
                    each.reuse(each.final, thread)
                self.launch(thread.device)
                if all(cta.ended for cta in self.ctas[thread.device]):
                    self.engine.finish(self, thread.device)
                    self.world.devices[thread.device].end(self)

    def take_results(self, device: int) -> None:
        """The launch has ended on a device, whose memory is another one's from now on."""
        first = len(self.program.input_is_ref)
        self.results[device] = [buffer.data.copy() for buffer in self.buffers[device][first:]]
        for buffer in self.buffers[device]:
            if isinstance(buffer, Buffer):
                buffer.data[...] = poison(buffer.data.shape, buffer.data.dtype)

    def outputs(self, *, ended: bool) -> list[list[np.ndarray]]:
        """For each position, the results; worthless ones unless it has `ended` well."""
        first = len(self.program.input_is_ref)
        if not ended:
            return [[poison(a.shape, a.dtype) for a in self.program.out_avals] for _ in self.devices]
        return [
            self.results[d] if d in self.results else [b.data for b in self.buffers[d][first:]] for d in self.devices
        ]

    # ---- faults ------------------------------------------------------------------------------------------------------

    def check_remote_uses(self) -> None:
        """That no device may have left while a peer still used its memory."""
        for device, uses in self.remote_uses.items():
            for access in uses.values():
                if not covers(self.exit_seen[device].seen, access.component, access.time):
                    key = ("exit", device == access.thread.device, access.instruction.index)
                    self.fault(key, RaceError(report.left_early(device, access), "exit"))

    def check_signals(self, device: int) -> None:
        """That no signal of a peer may come after the launch has ended on a device."""
        if self.detector is None:
            return
        for semaphore in self.semaphores([device]):
            for thread, component, time, instruction in semaphore.unseen:
                if not covers(self.exit_seen[device].seen, component, time):
                    key = ("late", instruction.index)
                    self.fault(key, ProtocolError(report.late_signal(semaphore, thread, instruction)))
