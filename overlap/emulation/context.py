"""Settings, runs, and the context manager that a user sees."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Iterator
from typing import Any, Literal

import jax
import numpy as np

from . import interrupt
from .core_counts import core_count_of_devices
from .cores import DEFAULT_CORES
from .cores import cores as in_cores
from .errors import EmulationError
from .scheduler import SCHEDULERS

Completion = Literal["late", "random", "eager"]
Scheduler = Literal["pct", "random", "round_robin"]

_COMPLETIONS = ("late", "random", "eager")


@dataclasses.dataclass(frozen=True)
class Settings:
    """How kernels run; see `emulate`."""

    cores: int = DEFAULT_CORES
    completion: Completion = "late"
    scheduler: Scheduler = "pct"
    seed: int = 0
    detect_races: bool = True
    resident: int | None = None
    step_limit: int | None = 20_000_000
    record: bool = False
    laps: int = 1
    keep: bool = False

    def __post_init__(self):
        if not isinstance(self.cores, int) or self.cores < 1:
            raise ValueError(f"`cores` must be an integer of at least 1, got {self.cores!r}")
        if self.completion not in _COMPLETIONS:
            raise ValueError(f"`completion` must be one of {_COMPLETIONS}, got {self.completion!r}")
        if self.scheduler not in SCHEDULERS:
            raise ValueError(f"`scheduler` must be one of {tuple(SCHEDULERS)}, got {self.scheduler!r}")
        if self.laps < 1:
            raise ValueError(f"`laps` must be at least 1, got {self.laps}")
        if self.resident is not None and self.resident < 1:
            raise ValueError(f"`resident` must be at least 1 or None, got {self.resident}")


@dataclasses.dataclass
class Event:
    """Something a thread did, for a timeline.

    Attributes:
        device, cta, thread: who; `thread` is ``"wg2"`` or ``"wg2.warp1"``.
        kind: ``"copy"``, ``"remote_copy"``, ``"wgmma"``, ``"mma"``, ``"signal"`` or ``"wait"``.
        source, target: what was read and written, with slices; for signals and waits the flag.
        peer: the other device of a remote copy or signal, else None.
        start, end: scheduler steps (logical time); a copy ends when it completes, a wait when it is over.
        launch: the number of the launch in this run, from 0.
        scope: the `jax.named_scope`s around it in the kernel, joined by ``/``.
    """

    device: int
    cta: int
    thread: str
    kind: str
    source: str
    target: str
    peer: int | None
    start: int
    end: int
    launch: int
    scope: str


class Run:
    """What happened inside one `emulate` context.

    Attributes:
        errors: all faults, in the order found.
        warnings: what looks odd and is no fault.
        counts: launches, copies, bytes (copied), wgmmas, mmas (tcgen05), signals.
        steps: scheduler steps in all.
        events: a list of `Event` if ``record=True``.
        launches: a list of `Launch` if ``keep=True``, to be run in a sequence (`run_sequence`).
    """

    def __init__(self, settings: Settings):
        self.settings = settings
        self.errors: list[EmulationError] = []
        self.warnings: list[str] = []
        self.counts: collections.Counter[str] = collections.Counter()
        self.events: list[Event] = []
        self.launches: list[Any] = []
        self.steps = 0
        self.interrupts = interrupt.count()
        self._now = lambda: 0
        self._repetitions: collections.Counter[Any] = collections.Counter()

    def check(self) -> None:
        """Waits for all computations under way and raises the first error found so far, if any."""
        drain()
        if self.errors:
            raise self.errors[0]

    # ---- called by the machine ---------------------------------------------------------------------------------------

    def repetition(self, launcher: Any) -> int:
        """How often this kernel has run before in this run: each repetition gets a schedule of its own."""
        self._repetitions[launcher] += 1
        return self._repetitions[launcher] - 1

    def begin(self, world: Any) -> None:
        self._now = lambda: world.now
        self.counts["launches"] += 1

    def count(self, what: str, nbytes: int = 0) -> None:
        self.counts[what] += 1
        if nbytes:
            self.counts["bytes"] += nbytes

    def event(self, thread: Any, kind: str, source: Any, target: Any, peer: int | None) -> Event | None:
        if not self.settings.record:
            return None
        now = self._now()
        name = f"wg{thread.warpgroup}" + ("" if thread.warp is None else f".warp{thread.warp}")
        peer = None if peer == thread.device else peer
        launch, scope = self.counts["launches"] - 1, thread.instruction.scope
        source, target = str(source), str(target)
        event = Event(thread.device, thread.cta.index, name, kind, source, target, peer, now, now, launch, scope)
        self.events.append(event)
        return event

    def event_end(self, event: Event | None) -> None:
        if event is not None:
            event.end = self._now()

    def signal_event(self, thread: Any, semaphore: Any) -> None:
        if self.settings.record:
            self.event(thread, "signal", semaphore.name, semaphore.name, semaphore.device)

    def wait_event(self, thread: Any, name: str) -> None:
        if self.settings.record:
            event = self.event(thread, "wait", name, name, None)
            if event is not None and thread.blocked is not None:
                event.start = thread.blocked_at


_lock = threading.Lock()
_active: list[Run] = []
_background = Run(Settings())  # of kernels that run outside any context


@functools.cache
def _fence(devices: tuple[Any, ...]) -> tuple[Any, Any]:
    """A computation on all devices, and its argument."""
    sharding = jax.NamedSharding(jax.make_mesh((len(devices),), ("all",), devices=devices), jax.P("all"))
    return jax.jit(lambda x: x + 1, out_shardings=sharding), jax.device_put(np.zeros(len(devices), np.int32), sharding)


def _run_fence() -> None:
    function, argument = _fence(tuple(jax.local_devices(backend="cpu")))
    jax.block_until_ready(function(argument))


def drain() -> None:
    """Waits for all computations under way on the CPU devices of this process."""
    # The runtime runs computations that span devices one after the other, so the last one waits for all others.
    # `jax.effects_barrier` alone does not: calls after the first one of a jitted function leave no token behind. It
    # also fails after a fault outside any context (see `lowering`): once on jax 0.12, for ever on 0.11.
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        jax.effects_barrier()
    # In a thread of its own, which has neither the caller's mesh nor its other contexts.
    fence = threading.Thread(target=_run_fence)
    fence.start()
    fence.join()
    for array in jax.live_arrays("cpu"):
        with contextlib.suppress(RuntimeError):  # deleted (donated), or the result of a fault
            array.block_until_ready()


def current_run() -> tuple[Run, bool]:
    """(the run that a launch belongs to, whether a context is active). Read when a kernel runs."""
    with _lock:
        if _active:
            return _active[-1], True
    return _background, False


def _raise_if_interrupted(run: Run) -> None:
    """After Ctrl-C the launches of a run have no results, whatever the code inside the context has made of them."""
    while interrupt.pending():
        time.sleep(0.001)  # KeyboardInterrupt comes here.
    if interrupt.stopped(run.interrupts):
        raise KeyboardInterrupt


@contextlib.contextmanager
def emulate(
    cores: int = DEFAULT_CORES,
    completion: Completion = "late",
    scheduler: Scheduler = "pct",
    seed: int = 0,
    *,
    detect_races: bool = True,
    resident: int | None = None,
    step_limit: int | None = 20_000_000,
    record: bool = False,
    laps: int = 1,
    keep: bool = False,
) -> Iterator[Run]:
    """Runs Mosaic GPU kernels on CPU devices, concurrently and with faults found, while the context is active.

    Only `cores` takes part in tracing; all else is read when a kernel runs, so a jitted function is not traced again
    for another seed.

    Args:
        cores: what `core_count()` returns, and `device.core_count` of CPU devices.
        completion: when asynchronous copies and wgmma complete: as ``"late"`` as the rules allow, at ``"random"``
            moments or at once (``"eager"``).
        scheduler: ``"pct"`` (random priorities with rare changes), ``"random"`` or ``"round_robin"``.
        seed: of all random choices; the same seed gives the same run.
        detect_races: whether to keep vector clocks. Deadlocks and broken protocols are found without.
        resident: how many CTAs fit on a device at a time; the others start when one leaves. None: all.
        step_limit: an error after this many scheduler steps in one launch. None: no limit.
        record: whether to keep a list of events in `run.events`.
        laps: how often in a row each launch is run, on the same memory and, if the kernel skips the framework's
            barrier, by each device on its own once it is done with the one before. All but the last have inputs of NaN.
        keep: whether to keep all launches in `run.launches`, with their operands and results.

    Yields:
        A `Run`. On exit all computations under way are waited for and the first error is raised; `run.check()` does the
        same earlier.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed. The launches under way stop; the next emulation works as ever.

    Example:
        >>> from overlap import emulation
        >>> with emulation.emulate(cores=2, completion="random", seed=3) as run:
        ...     y = f(x)  # any function that calls plgpu.kernel, usually under jax.shard_map
        >>> run.counts["copies"]
    """
    from .lowering import enable

    enable()
    run = Run(Settings(cores, completion, scheduler, seed, detect_races, resident, step_limit, record, laps, keep))
    with _lock:
        _active.append(run)
    try:
        with in_cores(cores), core_count_of_devices():
            yield run
    except Exception as consequence:
        drain()
        # A wrong number is most likely the consequence of a fault that was found: that is what to report.
        _raise_if_interrupted(run)
        if run.errors:
            raise run.errors[0] from consequence
        raise
    except KeyboardInterrupt:
        if not interrupt.stopped(run.interrupts):  # It came from another handler than ours.
            interrupt.note()
        drain()
        raise
    else:
        drain()  # what was started inside the context has to end inside it
        _raise_if_interrupted(run)
    finally:
        with _lock:
            _active.remove(run)
    if run.errors:
        raise run.errors[0]
