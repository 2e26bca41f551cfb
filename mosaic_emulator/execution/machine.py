"""One launch of one kernel: its CTAs on the devices of a mesh, and their threads."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping

import numpy as np

from ..foundations.clocks import EMPTY, ComponentPool, Knowledge, covers
from ..foundations.equations import AxisName, Environment
from ..foundations.errors import ProtocolError, RaceError
from ..foundations.source_lines import Instruction
from ..state import report
from ..state.clusters import Cluster, Cta
from ..state.devices import Device, Flags
from ..state.memory import Buffer, Cells, View, poison
from ..state.mesh import Mesh
from ..state.orders import Orders
from ..state.races import Access
from ..state.sync import MBarrier, Meeting, Semaphore, Waitable
from .engines import Engine
from .operations import Issued, Product, Store
from .program import Launch
from .tensor_queue import TensorThread


class Thread:
    """A warpgroup, or one warp inside `plgpu.warp_map`, with its environment and its place in the program."""

    def __init__(
        self,
        machine: Machine,
        cta: Cta,
        place: tuple[int, int | None],
        env: Environment,
        pc: int,
        before: Thread | None = None,
    ):
        self.machine, self.cta, self.device = machine, cta, cta.device
        self.simulation, self.mesh = machine.simulation, machine.mesh
        self.warpgroup, self.warp = place
        self.env, self.pc = env, pc
        self.knowledge = Knowledge()
        self.orders = Orders()
        # A warp runs after the same warp of an earlier map (`before`), so it continues with that thread's component.
        self.component = machine.simulation.components.new() if before is None else before.component
        self.time = 1 if before is None else before.time + 1
        self.pool = ComponentPool(machine.simulation.components) if before is None else before.pool
        self.open_stores: list[Store] = []  # TMA stores not yet committed
        self.groups: list[list[Store]] = []  # committed groups of stores, oldest first
        self.wgmmas: list[Product] = []  # wgmma operations in flight, oldest first
        # mbarrier -> number of its phases waited for; a tuple if the warps differ
        self.waits: dict[MBarrier, int | tuple] = {}
        self.arrivals: dict[Meeting, int] = {}  # meeting -> the generation whose end the thread waits for
        self.axes: dict[AxisName, int] = {}
        self.visits: dict[int, int] = {}  # instruction of a `run_scoped` -> how often it has run
        self.children: list[Thread] = []  # the warps of the last map
        self.tensor = TensorThread(machine.simulation.components) if before is None else before.tensor
        self.done = False
        self.blocked: tuple[Waitable, Callable[[], str]] | None = None
        self.blocked_at = 0
        self.priority = 0.0
        self.polled = False
        self.knowledge.note(self.component, self.time)

    def tick(self) -> None:
        """Begins a new time of the thread's component: clocks taken before do not cover what the thread does now."""
        if self.machine.detector is not None:
            self.time += 1
            self.knowledge.note(self.component, self.time)

    def block(self, on: Waitable, why: Callable[[], str]) -> bool:
        """Suspends the thread at the current instruction until `on` changes; `why` describes the wait.

        Returns True, which an instruction returns to stop its thread there.
        """
        if self.blocked is None:
            self.blocked_at = self.simulation.now
        self.blocked = (on, why)
        on.waiters.append(self)
        return True

    def wake(self) -> None:
        """Makes the thread runnable, if it is blocked."""
        if self.blocked is not None and not self.done:
            self.simulation.scheduler.ready(self)

    def access(self, view: View, what: str, *, write: bool, atomic: bool = False, by_rows: bool = False) -> None:
        """Checks an access that this thread itself makes (through the generic proxy), and records it."""
        if view.buffer.space != "regs":
            own = Issued(self, self.instruction, self.knowledge, self.component, self.time)
            engine = self.machine.engine
            engine.record(own, view, what, write=write, atomic=atomic, by_rows=by_rows)

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

    def note_remote(self, access: Access) -> None:
        """Remembers an access to memory of another device or CTA, which must not end before the access is complete."""
        buffer = access.view.buffer
        if buffer.space in ("smem", "tmem") and buffer.cta is not None and buffer.cta is not self.cta:
            buffer.cta.note_use(self, f"{access.what} of {access.view}", access.component, access.time)
        if buffer.space == "gmem" and buffer.device != self.device:
            what = f"uses {buffer.name}{access.view.text}"
            self.machine.check_present(self, buffer.device, what, asynchronous=access.asynchronous)
            self.machine.remote_uses[buffer.device][access.component] = access

    @property
    def instruction(self) -> Instruction:
        return self.machine.program.instructions[self.pc - 1]

    @property
    def in_launch(self) -> str:
        """The thread's name, and its launch if there are several."""
        launches = self.simulation.launches
        if launches == 1:
            return str(self)
        return f"{self}, in launch {self.machine.number} of {launches} ({self.machine.name})"

    @property
    def where(self) -> str:
        return f"{self.in_launch}, at {self.instruction.source}"

    def __str__(self) -> str:
        if not self.machine.program.num_threads and self.warp is None:
            return str(self.cta)
        warp = "" if self.warp is None else f", warp {self.warp}"
        return f"{self.cta}, warpgroup {self.warpgroup}{warp}"


class Machine:
    """One launch of one program on the devices of a mesh.

    Attributes:
        mesh: the devices, by their numbers in the sequence of launches.
        number: the launch's number in the sequence, from 1.
        ordinals: for each device, this launch's number among the launches of that device, from 1.
        arrived: the devices that have come to this launch, in the order in which they came.
        buffers: for each device, the buffers (or plain values) of the kernel's parameters.
        values: for each device, the contents of its buffers when the launch begins; None for undefined contents.
        threads: the threads that have started, in order.
        private: semaphores that belong to single CTAs.
        results: the outputs of each device on which the launch has ended and its memory is free for other launches.
    """

    def __init__(
        self,
        engine: Engine,
        devices: Mapping[int, Device],
        launch: Launch,
        *,
        flags_at: int,
        is_real: bool,
        on_end: Callable[[Machine, int], None],
    ):
        self.simulation, self.engine, self.program, self.name = engine.simulation, engine, launch.program, launch.name
        self.mesh = mesh = Mesh(launch.mesh_shape, launch.devices)
        self._devices, self._on_end = devices, on_end
        # Shorter names for objects that most instructions use.
        simulation = self.simulation
        self.run, self.detector, self.fault = simulation.run, simulation.detector, simulation.fault
        simulation.launches += 1
        self.number = simulation.launches
        self.flags = Flags(flags_at, self.program.words, self.number)
        self.ordinals = {device: devices[device].launches for device in mesh.devices}
        self.arrived: list[int] = []
        self.threads: list[Thread] = []
        # what pl.get_global and scopes have made: (key of the allocation) -> device -> the allocation there
        self.globals: dict[Hashable, dict[int, Buffer]] = {}
        self.flag_arrays: dict[Hashable, dict[int, Cells]] = {}
        self.private: list[Semaphore] = []
        self.remote_uses: dict[int, dict[int, Access]] = {device: {} for device in mesh.devices}  # by component
        self.buffers = {device: self._bind(device, values) for device, values in zip(mesh.devices, launch.inputs)}
        self.values = {
            device: [
                # Integers may say how much work there is. A kernel need not end if they have other values.
                b.data if isinstance(b, Buffer) and b.is_operand and (is_real or b.data.dtype.kind in "iu") else None
                for b in row
            ]
            for device, row in self.buffers.items()
        }
        for row in zip(*self.buffers.values()):
            for buffer in row:
                if isinstance(buffer, Buffer):
                    buffer.peers = dict(zip(mesh.devices, row))
        self.results: dict[int, list[np.ndarray]] = {}
        self.ctas: dict[int, list[Cta]] = {device: [] for device in mesh.devices}
        self.queued: dict[int, list[Cta]] = {device: [] for device in mesh.devices}
        self._start: dict[int, Knowledge] = {}
        self.exit_seen = {device: Knowledge() for device in mesh.devices}

    def word(self, device: int, first: int, place: int) -> Semaphore:
        """Returns a semaphore that all CTAs of `device` share: number `place` of the array that begins at `first`."""
        return self._devices[device].word(self.flags.first + first + place)

    def semaphores(self, devices: Collection[int]) -> Iterator[Semaphore]:
        """Yields the launch's semaphores on these devices. Of shared semaphores, only those that have been used."""
        yield from (semaphore for semaphore in self.private if semaphore.device in devices)
        for device in devices:
            yield from (word for _, word in self._devices[device].words(self.flags))

    # ---- memory ------------------------------------------------------------------------------------------------------

    def _bind(self, device: int, values: list[np.ndarray]) -> Environment:
        """Makes the buffers (or plain values) that the kernel's parameters stand for on `device`."""
        out: Environment = []
        aliases = {o: i for i, o in self.program.aliases.items()}
        for i, (value, is_ref) in enumerate(zip(values, self.program.input_is_ref)):
            if not is_ref:
                out.append(value.item() if value.ndim == 0 and value.dtype.kind in "iub" else value)
                continue
            aliased = i in self.program.aliases
            data = np.array(value) if aliased or not value.flags.c_contiguous else value
            out.append(Buffer(f"input {i}", "gmem", data, device, read_only=not aliased))
            out[-1].is_operand = out[-1].written = True
        for o, aval in enumerate(self.program.out_avals):
            if o in aliases:
                out.append(out[aliases[o]])
            else:
                out.append(Buffer(f"output {o}", "gmem", poison(aval.shape, aval.dtype), device))
        return out

    # ---- running -----------------------------------------------------------------------------------------------------

    def start(self, thread: Thread) -> None:
        self.threads.append(thread)
        self.simulation.scheduler.admit(thread)

    def begin(self, device: int, known: Knowledge) -> None:
        """Starts the launch on a device; its threads begin with the knowledge `known`."""
        self._start[device] = known
        self.queue(device)
        self.launch(device)

    def queue(self, device: int) -> None:
        """Makes the CTAs of the launch on a device, and puts them into the queue. None of them runs yet."""
        grid = itertools.product(*(range(n) for n in self.program.grid))
        threads = self.program.num_threads or 1
        self.ctas[device] = [Cta(self.simulation, threads, device, i, place) for i, place in enumerate(grid)]
        if self.program.cluster:
            size = math.prod(self.program.cluster.values())
            for first in range(0, len(self.ctas[device]), size):
                Cluster(self.program.cluster, self.ctas[device][first : first + size])
        self.queued[device] = list(self.ctas[device])

    @property
    def resident(self) -> int | None:
        """How many CTAs fit on a device at a time (None: all). By default, one per core with cluster launch control."""
        if self.simulation.settings.resident is None and self.program.cancels_clusters:
            together = math.prod(self.program.cluster.values())
            return max(self.simulation.settings.cores // together, 1) * together
        return self.simulation.settings.resident

    def cancel(self, device: int) -> tuple[int, ...] | None:
        """Takes the next cluster off the queue. Returns the coordinates of its first CTA, or None if none is left."""
        if not self.queued[device]:
            return None
        together = math.prod(self.program.cluster.values())
        cancelled, self.queued[device] = self.queued[device][:together], self.queued[device][together:]
        for cta in cancelled:
            cta.ended = True
        return cancelled[0].coordinates

    def launch(self, device: int) -> None:
        """Starts the CTAs at the head of a device's queue, as many as fit."""
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
            for entry, buffer in zip(self.program.parameters, self.buffers[device]):
                env[entry] = buffer
            thread = Thread(self, cta, (warpgroup, None), env, 0)
            thread.knowledge.join(self._start[device])
            if self.program.uses_tensor_memory and thread.knowledge.tensor is None:
                thread.knowledge.tensor = EMPTY
            thread.axes = dict(zip(self.mesh.shape, self.mesh.place(device)))
            thread.axes.update(zip(self.program.axis_names, (*cta.coordinates, warpgroup)))
            cta.running += 1
            self.start(thread)

    def leave(self, thread: Thread) -> None:
        """Ends a thread. With its last thread, its CTA (or cluster) ends, and queued CTAs start."""
        thread.done = True
        if thread.warp is None:
            self.exit_seen[thread.device].join(thread.knowledge)
            cta = thread.cta
            cta.final.join(thread.knowledge)
            cta.running -= 1
            # Mosaic ends a kernel whose CTAs share tensor memory with a barrier of the whole cluster.
            leaving = cta.cluster.ctas if self.program.ends_by_cluster and cta.cluster else [cta]
            if all(each.running == 0 for each in leaving):
                for each in leaving:
                    cta.final.join(each.final)
                    each.ended = True
                for each in leaving:
                    each.final.join(cta.final)
                    each.check_left(thread)
                    each.reuse(each.final, thread)
                self.launch(thread.device)
                if all(cta.ended for cta in self.ctas[thread.device]):
                    self.engine.finish(self, thread.device)
                    self._on_end(self, thread.device)

    def take_results(self, device: int) -> None:
        """Copies the results on a device where the launch has ended. Its memory then holds undefined values."""
        first = len(self.program.input_is_ref)
        self.results[device] = [buffer.data.copy() for buffer in self.buffers[device][first:]]
        for buffer in self.buffers[device]:
            if isinstance(buffer, Buffer):
                buffer.data[...] = poison(buffer.data.shape, buffer.data.dtype)

    def outputs(self, *, ended: bool) -> list[list[np.ndarray]]:
        """Returns the results for each position of the mesh: undefined values unless the launch has `ended`."""
        first = len(self.program.input_is_ref)
        if not ended:
            return [[poison(a.shape, a.dtype) for a in self.program.out_avals] for _ in self.mesh.devices]
        return [
            self.results[d] if d in self.results else [b.data for b in self.buffers[d][first:]]
            for d in self.mesh.devices
        ]

    # ---- faults ------------------------------------------------------------------------------------------------------

    def check_present(self, thread: Thread, device: int, what: str, *, asynchronous: bool) -> None:
        """Checks that `thread` may use the memory of `device`: this launch must have begun there, and not have ended.

        The thread must know that the launch has begun there. For an `asynchronous` access (TMA), the thread also needs
        a proxy fence after the wait by which it knows.
        """
        if device == thread.device or self.detector is None:
            return
        owner, knowledge = self._devices[device], thread.knowledge
        begun = (owner.component, self.ordinals[device])
        if not covers(knowledge.gmem if asynchronous else knowledge.seen, *begun):
            key = ("begun", thread.instruction.index)
            lacks_fence = covers(knowledge.seen, *begun)
            self.fault(key, ProtocolError(report.not_begun(thread, device, what, lacks_fence)), thread)
        elif owner.ended >= self.ordinals[device]:
            self.fault(("left", thread.instruction.index), ProtocolError(report.has_left(thread, device, what)), thread)

    def check_remote_uses(self) -> None:
        """Checks that no device can end the launch while a peer still uses its memory."""
        for device, uses in self.remote_uses.items():
            for access in uses.values():
                if not covers(self.exit_seen[device].seen, access.component, access.time):
                    key = ("exit", device == access.thread.device, access.instruction.index)
                    self.fault(key, RaceError(report.left_early(device, access), "exit"))

    def check_signals(self, device: int) -> None:
        """Checks that no signal of a peer can arrive after the launch has ended on a device."""
        if self.detector is None:
            return
        for semaphore in self.semaphores([device]):
            for thread, component, time, instruction in semaphore.unseen:
                if not covers(self.exit_seen[device].seen, component, time):
                    key = ("late", instruction.index)
                    self.fault(key, ProtocolError(report.late_signal(semaphore, thread, instruction)))
