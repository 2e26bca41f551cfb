"""Runs sequences of launches that share global memory; each device runs them at its own pace.

A launch begins on each device separately: the framework zeroes the device's semaphores and starts its CTAs. By default
the framework runs a barrier before the kernel, so that no CTA starts before all devices have come to the launch.
Without that barrier, a kernel that uses a peer's memory must check that the peer has begun the launch. A sequence of
launches tests these checks. The launches may be of one kernel or of several, along different axes, on different meshes
of the same devices. Each device begins its next launch at once after the last one or much later; the scheduler chooses.

As in a framework, global memory is reused: each launch has its operands, results and semaphores at addresses that
earlier launches have used. Before a device begins a launch, its memory holds what another launch has left there. When a
launch has ended, its memory holds undefined values.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np

from ..cores import DEFAULT_CORES
from ..execution.engines import Engine
from ..execution.machine import Machine, Thread
from ..execution.program import Launch
from ..foundations.clocks import Knowledge
from ..foundations.errors import DeadlockError, EmulationError, ProtocolError, StepLimitError, cannot_run
from ..foundations.settings import Completion, Scheduler, Settings
from ..foundations.shadow import Shadow
from ..state import report
from ..state.devices import Device
from ..state.memory import Buffer, poison
from ..state.runs import Run
from ..state.simulation import Simulation
from ..state.sync import Meeting

_ALIGNMENT = 256  # the alignment in bytes of a launch's buffers in global memory
_FLAG_SHIFTS = (0,) * 7 + (1, 4, 7)  # the addresses from which that of a launch's first semaphore is drawn
_MOST = 64  # threads that the message of a deadlock lists


class World:
    """Runs a sequence of launches on emulated devices: `add` appends a launch, `execute` runs all of them."""

    def __init__(self, settings: Settings, run: Run, name: str, repetition: int = 0, *, is_replay: bool = False):
        self.simulation = Simulation(settings, run, name, repetition, is_replay=is_replay)
        self._engine = Engine(self.simulation)
        self.machines: list[Machine] = []
        self._devices: dict[int, Device] = {}
        self._launches: dict[int, list[Machine]] = {}  # device -> its launches, in order

    @property
    def _reuses_memory(self) -> bool:
        return len(self.machines) > 1

    def add(self, launch: Launch, *, flags_at: int = 0, is_real: bool = True) -> Machine:
        """Appends a launch to the sequence.

        Args:
            launch: the kernel, its mesh and its operands' values.
            flags_at: the address of the launch's first semaphore.
            is_real: whether the launch gets the operands' values; if not, its operands are undefined (NaN).
        """
        for index in launch.devices:
            if index not in self._devices:
                self._devices[index] = Device(index, self.simulation.components.new())
            self._devices[index].launches += 1
        machine = Machine(self._engine, self._devices, launch, flags_at=flags_at, is_real=is_real, on_end=self._end)
        self.machines.append(machine)
        for index in launch.devices:
            self._launches.setdefault(index, []).append(machine)
        return machine

    def _lay_out(self) -> None:
        """Gives the buffers of each launch their addresses. On a device, all launches begin at the same address."""
        for device in self._devices.values():
            placed: list[tuple[Buffer, int]] = []
            size = 0
            for machine in self._launches[device.index]:
                at = 0
                for buffer in machine.buffers[device.index]:
                    if isinstance(buffer, Buffer) and not any(buffer is b for b, _ in placed):
                        placed.append((buffer, at))
                        at += -(-buffer.data.nbytes // _ALIGNMENT) * _ALIGNMENT
                size = max(size, at)
            device.memory = np.frombuffer(self.simulation.random.randbytes(size), np.uint8).copy()
            for buffer, at in placed:
                old = buffer.data
                buffer.data = device.memory[at : at + old.nbytes].view(old.dtype).reshape(old.shape)

    # ---- launches on a device ----------------------------------------------------------------------------------------

    def _start_next(self, device: Device) -> None:
        """Brings a device to its next launch. With a barrier, the last device to come starts the launch on all."""
        machine = self._launches[device.index][device.begun]
        device.begun += 1
        self._prepare(machine, device)
        machine.arrived.append(device.index)
        if not machine.program.has_barrier:
            self._start(machine, device, [device.index])
        elif len(machine.arrived) == len(machine.mesh.devices):
            for index in machine.mesh.devices:
                self._start(machine, self._devices[index], machine.mesh.devices)

    def _prepare(self, machine: Machine, device: Device) -> None:
        """Prepares a launch on a device, as the framework does: zeroes the semaphores, and fills in the operands."""
        device.zero_flags(machine.flags)
        for semaphore in machine.private:
            if semaphore.device == device.index:
                semaphore.zero()
        if not self._reuses_memory:
            return
        for buffer, values in zip(machine.buffers[device.index], machine.values[device.index]):
            if isinstance(buffer, Buffer):
                buffer.data[...] = poison(buffer.data.shape, buffer.data.dtype) if values is None else values
                buffer.shadow, buffer.written = Shadow(max(buffer.data.nbytes, 1)), buffer.is_operand

    def _start(self, machine: Machine, device: Device, others: Sequence[int]) -> None:
        """Starts a launch on a device. Its threads know all that happened before `others` came to the launch."""
        known = Knowledge()
        for other in (self._devices[index] for index in others):
            known.join(other.seen)
            known.note(other.component, machine.ordinals[other.index])
        known.fence_all()
        machine.begin(device.index, known)

    def _end(self, machine: Machine, index: int) -> None:
        """Ends a launch on a device, after its last CTA there. The scheduler may then begin the device's next one."""
        device = self._devices[index]
        device.ended += 1
        device.seen = device.seen.copy()
        device.seen.join(machine.exit_seen[index])
        machine.check_signals(index)
        if self._reuses_memory:
            machine.take_results(index)
        if device.begun < device.launches:
            self.simulation.scheduler.ready(device)

    # ---- running -----------------------------------------------------------------------------------------------------

    def execute(self, stopped: Callable[[], bool] = lambda: False) -> bool:
        """Runs all launches until they end, or until the first fatal fault. Returns whether they have ended.

        Raises:
            KeyboardInterrupt: `stopped()`, which is called now and then, has returned True.
        """
        simulation, engine, devices = self.simulation, self._engine, self._devices.values()
        scheduler, limit = simulation.scheduler, simulation.settings.step_limit
        thread: Thread | None = None
        try:
            if self._reuses_memory:
                self._lay_out()
                for device in devices:
                    scheduler.admit(device)
            else:
                for device in devices:
                    self._start_next(device)
            while True:
                thread = None
                engine.maybe_complete()
                picked = scheduler.pick()
                if picked is None:
                    if engine.complete_awaited():
                        continue
                    break
                simulation.now += 1
                if simulation.now & 63 == 1 and stopped():
                    raise KeyboardInterrupt
                if limit is not None and simulation.now > limit:
                    raise StepLimitError(f"no end after {limit} steps; a loop polls for ever, or step_limit is too low")
                if isinstance(picked, Device):
                    self._start_next(picked)
                    continue
                assert isinstance(picked, Thread)
                thread = picked
                if picked.turn():
                    scheduler.ready(picked)
            if any(device.ended < device.launches for device in devices):
                raise DeadlockError(_deadlock(self.machines))
            self._check_end()
        except EmulationError as error:
            simulation.fail(error, thread)
            return False
        except Exception as reason:  # The kernel uses something that is not emulated, or the emulator has a mistake.
            simulation.fail(cannot_run(reason), thread)
            simulation.errors[-1].__cause__ = reason
            return False
        finally:
            self._let_go()
        return True

    def _let_go(self) -> None:
        """Drops references that only a running launch needs, so that the launches can be freed.

        The values of threads, and the views that a program caches, refer back to the launches.
        """
        for machine in self.machines:
            for thread in machine.threads:
                thread.env.clear()
            machine.program.forget_views()
            machine.globals.clear()
            machine.flag_arrays.clear()
            for cta in (cta for ctas in machine.ctas.values() for cta in ctas):
                cta.scopes.clear()
                cta.cluster = None

    def _check_end(self) -> None:
        """Checks that no device could end a launch while a peer used its memory, and that no read was undefined."""
        simulation = self.simulation
        detector = simulation.detector
        # Launches may share a word. There is one warning for such a word, in the name of its last launch.
        for semaphore in {id(each): each for m in self.machines for each in m.semaphores(m.mesh.devices)}.values():
            if semaphore.total and not semaphore.waited:
                where = f"{semaphore.name} of device {semaphore.device}"
                simulation.warnings.append(f"{where} was signalled but never waited for")
        if detector is None:
            return
        for machine in self.machines:
            machine.check_remote_uses()
        for access, wholly in detector.unwritten.values() if not simulation.errors else ():
            simulation.fault(("unwritten", access.instruction.index), ProtocolError(report.unwritten(access, wholly)))


def _deadlock(machines: Sequence[Machine]) -> str:
    """Returns the message: each waiting thread, the devices that a barrier waits for, the CTAs that never started.

    Threads that wait for semaphores and mbarriers come first: one of them is the cause. Threads that wait for other
    threads of their CTA, such as a warpgroup for the warps of a `warp_map`, come after them.
    """
    waiting = sorted((t for m in machines for t in m.threads if not t.done), key=_waits_for_own_cta)
    lines = [f"deadlock: {len(waiting)} threads wait and nothing is in flight that could wake one"]
    for thread in waiting[:_MOST]:
        why = thread.blocked[1]() if thread.blocked else "is not blocked"
        source = thread.machine.program.instructions[thread.pc].source
        lines.append(f"  {thread.in_launch}: {why} (at {source}, since step {thread.blocked_at})")
    if len(waiting) > _MOST:
        lines.append(f"  ... and {len(waiting) - _MOST} more")
    for machine in machines:
        missing = [device for device in machine.mesh.devices if device not in machine.arrived]
        if machine.program.has_barrier and machine.arrived and missing:
            lines.append(
                f"  devices {machine.arrived} wait at the framework's barrier before launch {machine.number} "
                f"({machine.name}) for devices {missing}"
            )
        for device, queue in machine.queued.items():
            if not queue:
                continue
            names = ", ".join(str(cta).split(", ", 1)[1] for cta in queue[:8]) + (", ..." if len(queue) > 8 else "")
            fit = machine.resident
            of = f" of launch {machine.number} ({machine.name})" if len(machines) > 1 else ""
            lines.append(
                f"  device {device}: {len(queue)} CTAs{of} were never launched ({names}), as only {fit} fit at a time"
            )
    return "\n".join(lines)


def _waits_for_own_cta(thread: Thread) -> bool:
    return thread.blocked is not None and isinstance(thread.blocked[0], Meeting)


def run_sequence(
    launches: Sequence[Launch],
    completion: Completion = "late",
    scheduler: Scheduler = "pct",
    seed: int = 0,
    *,
    detect_races: bool = True,
    resident: int | None = None,
    step_limit: int | None = 20_000_000,
) -> list[list[list[np.ndarray]]]:
    """Runs launches one after the other, each device at its own pace, and returns the results of each.

    The launches may be of different kernels, along different axes, and on different meshes: with the devices in another
    order, or with only some of the devices. Each device runs its launches in the order given; the scheduler chooses the
    delays between them. All launches have their operands and results at the same addresses of a device's memory, and
    their semaphores at nearly the same addresses (shifted by a few words, by chance). So a launch finds there what
    earlier launches have left.

    Args:
        launches: from `Run.launches` (`emulate(keep=True)`).
        completion, scheduler, seed, detect_races, resident, step_limit: see `emulate`.

    Returns:
        The outputs: for each launch, for each position of the launch's mesh, a list of arrays.

    Raises:
        EmulationError: the first fault. The message names the launch of each thread, by its number from 1.
        NotImplementedError: a launch ran along only some axes of its mesh (a partly manual `shard_map`), so that its
            devices are not known.

    Examples:
        >>> with mosaic_emulator.emulate(cores=2, keep=True) as run:
        ...     along_x(a), along_y(b)
        >>> x, y = run.launches
        >>> for seed in range(100):
        ...     mosaic_emulator.run_sequence([y, y, x, x], seed=seed)
    """
    for number, launch in enumerate(launches, 1):
        if len(launch.devices) != len(launch.inputs):
            raise NotImplementedError(
                f"`launches`: launch {number} ({launch.name}) ran on {len(launch.inputs)} of the {len(launch.devices)} "
                "devices of a mesh whose other axes are not manual: expected a shard_map over all axes"
            )
    settings = Settings(
        DEFAULT_CORES, completion, scheduler, seed, detect_races=detect_races, resident=resident, step_limit=step_limit
    )
    world = World(settings, Run(settings), ", ".join(launch.name for launch in launches), is_replay=True)
    chance = random.Random(seed)
    machines = [world.add(launch, flags_at=chance.choice(_FLAG_SHIFTS)) for launch in launches]
    simulation = world.simulation
    simulation.run.begin(lambda: simulation.now)
    ended = world.execute()
    if simulation.errors:
        raise simulation.errors[0]
    return [machine.outputs(ended=ended) for machine in machines]
