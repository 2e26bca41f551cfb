"""Asynchronous engines: TMA loads, TMA stores and wgmma, which complete later than they are issued.

The completion mode says when an operation completes. ``eager``: at once. ``random``: at any later step, by chance.
``late``: as late as the rules allow. A store or a wgmma then completes at the wait for it, a load when no thread can
run.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..foundations.errors import ProtocolError
from ..state.memory import View
from ..state.races import Access
from ..state.simulation import Simulation
from ..state.sync import MBarrier
from .operations import Arrival, CountedWrite, Issued, Issuer, Landing, Operation, Product, Store

_EARLY = 0.25  # the chance, per step, that some operation completes in random mode


class Engine:
    """All operations in flight in one launch."""

    def __init__(self, simulation: Simulation):
        self.simulation = simulation
        self.mode = simulation.settings.completion
        self._flying: list[CountedWrite | Store | Arrival] = []

    def record(
        self,
        op: Operation | Issued,
        view: View,
        what: str,
        *,
        write: bool,
        atomic: bool = False,
        by_rows: bool = False,
    ) -> None:
        """Checks an access to memory by an operation, or by a thread itself, for races and faults, and remembers it."""
        simulation = self.simulation
        if write and view.buffer.read_only:
            raise ProtocolError(f"{view} is an input that is not aliased to an output: it must not be written")
        if simulation.detector is None:
            return
        component, how = op.component, dict(write=write, atomic=atomic, by_rows=by_rows, asynchronous=op.asynchronous)
        access = Access(op.thread, view, what, op.instruction, component, op.time, **how)
        simulation.detector.access(access, op.knowledge)
        op.thread.note_remote(access)
        if view.buffer.space in ("smem", "tmem") and component != op.thread.component:
            view.buffer.async_uses[component] = access

    def completes_at_once(self) -> bool:
        """Whether a product that is issued now is complete at once: never in late mode, by chance in random mode."""
        return self.mode == "eager" or (self.mode == "random" and self.simulation.random.random() < 0.5)

    # ---- loads -------------------------------------------------------------------------------------------------------

    def load(
        self,
        thread: Issuer,
        source: View,
        landings: Sequence[Landing],
        barrier: MBarrier | None,
        nbytes: int,
        undefined: bool,
        by_rows: bool = False,
    ) -> None:
        """Issues a TMA load.

        Args:
            thread: the issuer.
            source: the source.
            landings: the destinations: one, or one for each CTA of a multicast load.
            barrier: this CTA's barrier, which expects `nbytes`; None if a peer's barrier counts the load.
            nbytes: the bytes that `barrier` expects; in a multicast load, other CTAs send a part of them.
            undefined: whether elements out of bounds are undefined; if not, they are zero.
            by_rows: as in `Access`.
        """
        run, device = self.simulation.run, source.buffer.device
        ops = []
        for landing in landings:
            target, counting = landing.view, landing.barrier
            value = lambda landing=landing: landing.cut(source.read(undefined))  # noqa: E731
            op = CountedWrite(thread, target, counting, value, target.array.nbytes)
            self.record(op, source, "TMA load, read", write=False, by_rows=by_rows)
            what = "TMA load, write" if landing.part is None else "multicast TMA load, write"
            self.record(op, target, what, write=True)
            if counting.cta is not thread.cta:
                counting.cta.note_use(thread, f"{what}, arrival on {counting.name}", op.component, op.time)
            run.count("copies", target.array.nbytes)
            op.event = run.event(thread, "copy" if device == thread.device else "remote_copy", source, target, device)
            ops.append(op)
        if barrier is not None:
            barrier.expect(nbytes)
            barrier.arrive(thread.knowledge)
        thread.tick()
        for op in ops:
            self.fly(op)

    def fly(self, op: CountedWrite | Store | Arrival) -> None:
        """Adds an operation to those in flight, or completes it at once in eager mode."""
        if self.mode == "eager":
            self._finish(op)
        else:
            self._flying.append(op)

    def _advance(self, op: Operation | Arrival) -> None:
        op.advance()
        if op.is_done:
            self.simulation.run.event_end(op.event)

    def _finish(self, op: Operation | Arrival) -> None:
        while not op.is_done:
            self._advance(op)

    # ---- stores ------------------------------------------------------------------------------------------------------

    def store(self, thread: Issuer, source: View, target: View, reduction: str | None) -> None:
        """Issues a TMA store and adds it to the thread's open group."""
        op = Store(thread, source, target, reduction)
        self.record(op, source, "TMA store, read", write=False)
        what = "TMA store, write" if reduction is None else f"TMA reduction ({reduction})"
        self.record(op.written, target, what, write=True, atomic=reduction is not None)
        thread.tick()
        thread.open_stores.append(op)
        run, device = self.simulation.run, target.buffer.device
        run.count("copies", source.array.nbytes)
        op.event = run.event(thread, "copy" if device == thread.device else "remote_copy", source, target, device)
        self.fly(op)

    def commit(self, thread: Issuer) -> None:
        """Closes the thread's open group of stores."""
        if thread.open_stores:
            thread.groups.append(thread.open_stores)
            thread.open_stores = []

    def wait_stores(self, thread: Issuer, allowed: int, read_only: bool) -> None:
        """Completes stores until at most `allowed` groups are pending, as a thread's wait for its stores does.

        With `read_only`, a group is pending until shared memory has been read, else until global memory is written.
        """
        done = max(len(thread.groups) - allowed, 0)
        for op in (op for group in thread.groups[:done] for op in group):
            if op.value is None:
                self._advance(op)
            thread.knowledge.note(op.component, op.time)
            if not read_only:
                self._finish(op)
                thread.knowledge.note(op.write_component, op.write_time)
        if not read_only:
            del thread.groups[:done]
            self._flying = [op for op in self._flying if not op.is_done]

    # ---- wgmma -------------------------------------------------------------------------------------------------------

    def wgmma(self, thread: Issuer, accumulator: View, a: View | np.ndarray, b: View) -> None:
        """Issues accumulator += a @ b; `a` is a view of shared memory or a value in registers."""
        op = Product(thread, accumulator, a, b)
        if isinstance(a, View):
            self.record(op, a, "wgmma, left operand", write=False, by_rows=True)
        self.record(op, b, "wgmma, right operand", write=False, by_rows=b is a)
        thread.tick()
        thread.wgmmas.append(op)
        run = self.simulation.run
        run.count("wgmmas")
        op.event = run.event(thread, "wgmma", a if isinstance(a, View) else b, b, None)
        if self.completes_at_once():
            self._multiply(thread, len(thread.wgmmas))

    def _multiply(self, thread: Issuer, count: int) -> None:
        for op in thread.wgmmas[:count]:
            self._finish(op)

    def wait_wgmma(self, thread: Issuer, allowed: int) -> None:
        """Completes the thread's products until at most `allowed` are in flight."""
        done = max(len(thread.wgmmas) - allowed, 0)
        self._multiply(thread, done)
        for op in thread.wgmmas[:done]:
            thread.knowledge.note(op.component, op.time)
        del thread.wgmmas[:done]

    # ---- completion --------------------------------------------------------------------------------------------------

    def maybe_complete(self) -> None:
        """In random mode, with some probability advances one random operation in flight by one stage."""
        if self.mode != "random" or not self._flying or self.simulation.random.random() > _EARLY:
            return
        self._complete(int(self.simulation.random.random() * len(self._flying)))

    def _complete(self, position: int) -> None:
        op = self._flying[position]
        self._advance(op)
        if op.is_done:
            self._flying[position] = self._flying[-1]
            self._flying.pop()

    def complete_awaited(self) -> bool:
        """Completes one load or arrival when no thread can run. Returns False if none is in flight.

        An operation on whose barrier a thread waits is preferred.
        """
        loads = [(i, op.barrier) for i, op in enumerate(self._flying) if not isinstance(op, Store)]
        awaited = [i for i, barrier in loads if barrier.waiters]
        choices = awaited or [i for i, _ in loads]
        if not choices:
            return False
        self._complete(self.simulation.random.choice(choices))
        return True

    def finish(self, machine: object, device: int) -> None:
        """Completes all operations of a launch on a device whose last thread has ended."""
        for op in self._flying:
            if op.thread.machine is machine and op.thread.device == device:
                self._finish(op)
        self._flying = [op for op in self._flying if not op.is_done]
