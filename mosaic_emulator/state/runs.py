"""Runs: records of what the launches inside one `emulate` context did, and the choice of the run for a launch."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import jax
import numpy as np

from ..foundations import interrupt
from ..foundations.actors import Actor
from ..foundations.equations import JaxObject
from ..foundations.errors import EmulationError
from ..foundations.settings import Settings


@dataclasses.dataclass
class Event:
    """An action of a thread, to be shown in a timeline.

    Attributes:
        device: the device that acted.
        cta: its CTA.
        thread: the thread in it, such as ``"wg2"`` or ``"wg2.warp1"``.
        kind: ``"copy"``, ``"remote_copy"``, ``"wgmma"``, ``"mma"``, ``"signal"`` or ``"wait"``.
        source: the memory read, with slices; for signals and waits, the name of the flag.
        target: the memory written.
        peer: the other device of a remote copy or signal, else None.
        start: when it began, in scheduler steps (logical time).
        end: when a copy was complete, or a wait was over.
        launch: the number of the launch in this run, from 0.
        scope: the kernel's `jax.named_scope`s around the instruction, joined by ``/``.
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
    """The record of what happened inside one `emulate` context.

    Attributes:
        errors: all faults, in the order in which they were found.
        warnings: messages about suspicious actions that are no faults, such as a signal for which nothing waits.
        counts: the numbers of ``"launches"``, ``"copies"`` (by TMA and by `async_store_smem`), ``"bytes"`` (copied),
            ``"wgmmas"``, ``"mmas"`` (tcgen05) and ``"signals"``.
        steps: the scheduler's steps in all launches together.
        events: a list of `Event` if ``record=True``, else empty.
        launches: a list of `Launch` if ``keep=True``, for `run_sequence`; else empty.
    """

    def __init__(self, settings: Settings):
        self.settings = settings
        self.errors: list[EmulationError] = []
        self.warnings: list[str] = []
        self.counts: collections.Counter[str] = collections.Counter()
        self.events: list[Event] = []
        self.launches: list[Any] = []  # of `entry.sequence.Launch`, which stands above this module
        self.steps = 0
        self.interrupts = interrupt.count()
        self._now: Callable[[], int] = lambda: 0
        self._repetitions: collections.Counter[Hashable] = collections.Counter()

    def check(self) -> None:
        """Waits for all computations under way and raises the first error found so far, if any."""
        drain()
        if self.errors:
            raise self.errors[0]

    # ---- called by the machine ---------------------------------------------------------------------------------------

    def repetition(self, launcher: Hashable) -> int:
        """Returns how often this kernel has been launched in this run before. Each launch gets its own schedule."""
        self._repetitions[launcher] += 1
        return self._repetitions[launcher] - 1

    def begin(self, clock: Callable[[], int]) -> None:
        self._now = clock
        self.counts["launches"] += 1

    def count(self, what: str, nbytes: int = 0) -> None:
        self.counts[what] += 1
        if nbytes:
            self.counts["bytes"] += nbytes

    def event(self, thread: Actor, kind: str, source: object, target: object, peer: int | None) -> Event | None:
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

    def wait_event(self, thread: Actor, name: str) -> None:
        if self.settings.record:
            event = self.event(thread, "wait", name, name, None)
            if event is not None and thread.blocked is not None:
                event.start = thread.blocked_at


_WATCH_EVERY_S = 2.0
_lock = threading.Lock()
_active: list[Run] = []
_background = Run(Settings())  # the run of launches outside any context


@functools.cache
def _fence(devices: tuple[JaxObject, ...]) -> tuple[Callable[[jax.Array], jax.Array], jax.Array]:
    """Returns a trivial jitted computation on all `devices`, and its argument; `drain` waits for its result."""
    sharding = jax.NamedSharding(jax.make_mesh((len(devices),), ("all",), devices=devices), jax.P("all"))
    return jax.jit(lambda x: x + 1, out_shardings=sharding), jax.device_put(np.zeros(len(devices), np.int32), sharding)


def drain() -> None:
    """Waits for all computations under way on the CPU devices of this process."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        jax.effects_barrier()
    # The fence runs in another thread, which has neither the caller's mesh nor the caller's other contexts.
    fence = threading.Thread(target=_run_fence)
    fence.start()
    fence.join()
    for array in jax.live_arrays("cpu"):
        with contextlib.suppress(RuntimeError):  # The array is deleted (donated), or is the result of a fault.
            array.block_until_ready()


def _run_fence() -> None:
    # The runtime runs computations that span devices one after the other. So a computation on all devices (the fence)
    # ends after all others. `jax.effects_barrier` is not enough: it does not wait for a jitted function's calls after
    # the first one, which leave no token. It also raises after a fault outside any context (see `lowering`): once on
    # jax 0.12, at every call on 0.11.
    function, argument = _fence(tuple(jax.local_devices(backend="cpu")))
    jax.block_until_ready(function(argument))


def run_fence_at_exit(watch: Callable[[], None]) -> None:
    """Waits for the end of the program, and then for its launches. Runs in a thread that is started beforehand.

    It calls `watch` now and then while it waits for the end of the program.

    jax waits only for calls that leave a token. Python ends the process by SIGABRT if a callback still runs when the
    interpreter is gone. It starts no thread any more when exit handlers run.
    """
    while (main := threading.main_thread()).is_alive():
        watch()
        main.join(_WATCH_EVERY_S)
    interrupt.end()
    _run_fence()


def current_run() -> tuple[Run, bool]:
    """Returns (the run for a launch that begins now, whether an `emulate` context is active)."""
    with _lock:
        if _active:
            return _active[-1], True
    return _background, False


@contextlib.contextmanager
def active(run: Run) -> Iterator[None]:
    """A context in which launches belong to `run`."""
    with _lock:
        _active.append(run)
    try:
        yield
    finally:
        with _lock:
            _active.remove(run)
