"""Asynchronous engines: TMA loads, TMA stores and wgmma, which complete later than they are issued.

The completion mode says when an operation completes. ``eager``: at once. ``random``: at any later step, by chance.
``late``: as late as the rules allow. A store or a wgmma then completes at the wait for it, a load when no thread can
run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..foundations.arithmetic import matmul
from ..foundations.clocks import ComponentPool, Knowledge
from ..foundations.errors import ProtocolError
from ..state.clusters import Cta
from ..state.memory import View
from ..state.races import Access
from ..state.runs import Actor
from ..state.simulation import Simulation
from ..state.sync import MBarrier

_EARLY = 0.25  # the chance, per step, that some operation completes in random mode
REDUCTIONS: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}  # fmt: skip


class Issuer(Actor, Protocol):
    """The thread that issues an asynchronous operation.

    Attributes:
        open_stores: TMA stores that are not yet committed.
        groups: committed groups of stores, oldest first.
        wgmmas: wgmma operations in flight, oldest first.
    """

    knowledge: Knowledge
    open_stores: list[Any]
    groups: list[list[Any]]
    wgmmas: list[Any]

    @property
    def machine(self) -> object: ...

    @property
    def cta(self) -> Cta: ...

    @property
    def pool(self) -> ComponentPool: ...

    @property
    def where(self) -> str: ...

    def tick(self) -> None: ...

    def note_remote(self, access: Access) -> None: ...


class Landing(NamedTuple):
    """The place to which a load, or this CTA's part of a multicast load, is written; and the barrier that counts it."""

    view: View
    barrier: MBarrier
    part: tuple[slice, ...] | None = None  # the part of the loaded array of shape `whole` that is written
    whole: tuple[int, ...] = ()


class Operation:
    """One asynchronous operation in flight.

    A store completes in two stages: shared memory is read, then global memory is written. Each has its own component.
    """

    __slots__ = (
        "barrier",
        "component",
        "dst",
        "event",
        "instruction",
        "kind",
        "knowledge",
        "landing",
        "nbytes",
        "reduction",
        "sources",
        "src",
        "stage",
        "thread",
        "time",
        "undefined",
        "value",
        "write_component",
        "write_time",
    )

    def __init__(self, kind: str, thread: Issuer):
        self.kind, self.thread, self.instruction = kind, thread, thread.instruction
        self.knowledge: Knowledge = thread.knowledge.copy()
        self.component, self.time = thread.pool.take(self.knowledge.seen)
        self.knowledge.note(self.component, self.time)
        self.stage = 0  # stages completed
        self.event: Any = None
        self.barrier: Any = None


class Issued(NamedTuple):
    """The facts about an issued operation that `Engine.record` needs."""

    thread: Issuer
    instruction: Any
    knowledge: Knowledge
    component: int
    time: int


class Arrival:
    """An operation that ends with an arrival on a barrier, such as a commit."""

    kind, stage = "arrival", 0  # `stage` as in `Operation`

    def __init__(self, thread: Issuer, barrier: MBarrier, complete: Callable[[], None]):
        self.thread, self.barrier, self.complete = thread, barrier, complete


class Engine:
    """All operations in flight in one launch."""

    def __init__(self, simulation: Simulation):
        self._simulation = simulation
        self.mode = simulation.settings.completion
        self._flying: list[Any] = []  # loads, stores and arrivals

    def record(
        self,
        op: Operation | Issued,
        view: View,
        what: str,
        component: int,
        time: int,
        *,
        write: bool,
        atomic: bool = False,
        by_rows: bool = False,
        asynchronous: bool = True,
    ) -> None:
        """Checks an access that an operation makes to memory for races and faults, and remembers the access.

        `asynchronous` says whether the access goes through the asynchronous proxy.
        """
        simulation = self._simulation
        if write and view.buffer.read_only:
            raise ProtocolError(f"{view} is an input that is not aliased to an output: it must not be written")
        if simulation.detector is None:
            return
        access = Access(
            op.thread,
            view,
            what,
            op.instruction,
            component,
            time,
            write=write,
            asynchronous=asynchronous,
            atomic=atomic,
            by_rows=by_rows,
        )
        simulation.detector.access(access, op.knowledge)
        op.thread.note_remote(access)
        if view.buffer.space in ("smem", "tmem"):
            view.buffer.async_uses[component] = access

    def completes_at_once(self) -> bool:
        """Whether a product that is issued now is complete at once: never in late mode, by chance in random mode."""
        return self.mode == "eager" or (self.mode == "random" and self._simulation.random.random() < 0.5)

    # ---- loads -------------------------------------------------------------------------------------------------------

    def load(
        self,
        thread: Issuer,
        src: View,
        landings: Sequence[Landing],
        barrier: MBarrier | None,
        nbytes: int,
        remote: bool,
        undefined: bool,
    ) -> None:
        """Issues a TMA load.

        Args:
            thread: the issuer.
            src: the source.
            landings: the destinations: one, or one for each CTA of a multicast load.
            barrier: this CTA's barrier, which expects `nbytes`; None if a peer's barrier counts the load.
            nbytes: the bytes that `barrier` expects; in a multicast load, other CTAs send a part of them.
            remote: whether the source is on another device.
            undefined: whether elements out of bounds are undefined; if not, they are zero.
        """
        run = self._simulation.run
        ops = []
        for landing in landings:
            dst, part = landing.view, landing.part
            op = Operation("load", thread)
            op.src, op.dst, op.barrier, op.landing, op.undefined = src, dst, landing.barrier, landing, undefined
            op.nbytes = dst.array.nbytes
            self.record(op, src, "TMA load, read", op.component, op.time, write=False)
            what = "TMA load, write" if part is None else "multicast TMA load, write"
            self.record(op, dst, what, op.component, op.time, write=True)
            if op.barrier.cta is not thread.cta:
                op.barrier.cta.note_use(thread, f"{what}, arrival on {op.barrier.name}", op.component, op.time)
            run.count("copies", op.nbytes)
            op.event = run.event(thread, "remote_copy" if remote else "copy", src, dst, src.buffer.device)
            ops.append(op)
        if barrier is not None:
            barrier.expect(nbytes)
            barrier.arrive(thread.knowledge)
        thread.tick()
        for op in ops:
            self.fly(op)

    def fly(self, op: Any) -> None:
        """Adds an operation to those in flight, or completes it at once in eager mode."""
        if self.mode == "eager":
            while not self._advance(op):
                pass
        else:
            self._flying.append(op)

    def _advance(self, op: Any) -> bool:
        """Completes the next stage of `op`. Returns whether that was the last stage."""
        if op.kind == "arrival":
            op.complete()
            return True
        if op.kind == "load":
            value = op.src.read(op.undefined)
            part = op.landing.part
            op.dst.write(value if part is None else value.reshape(op.landing.whole)[part])
            op.stage = 2
            self._simulation.run.event_end(op.event)
            knowledge = op.knowledge
            if op.barrier.cta is not op.thread.cta:
                # Another CTA learns of this copy, but not of earlier actions of the issuer.
                knowledge = Knowledge()
                knowledge.note(op.component, op.time)
            op.barrier.landed(op.nbytes, knowledge)
            return True
        if op.stage == 0:
            op.value = op.src.read()
            op.stage = 1
            return False
        if op.stage == 1:
            self._store_value(op)
            op.stage = 2
            self._simulation.run.event_end(op.event)
        return True

    def _store_value(self, op: Operation) -> None:
        if op.reduction is None:
            op.dst.write(op.value)
            return
        old = op.dst.read()
        op.dst.write(REDUCTIONS[op.reduction](old, np.asarray(op.value).reshape(old.shape)).astype(old.dtype))

    # ---- stores ------------------------------------------------------------------------------------------------------

    def store(self, thread: Issuer, src: View, dst: View, reduction: str | None, commit: bool, remote: bool) -> None:
        """Issues a TMA store and adds it to the thread's open group; `commit` closes the group."""
        op = Operation("store", thread)
        op.src, op.dst, op.reduction, op.value = src, dst, reduction, None
        op.write_component, op.write_time = thread.pool.take(op.knowledge.seen)
        op.knowledge.note(op.write_component, op.write_time)
        self.record(op, src, "TMA store, read", op.component, op.time, write=False)
        what = "TMA store, write" if reduction is None else f"TMA reduction ({reduction})"
        self.record(op, dst, what, op.write_component, op.write_time, write=True, atomic=reduction is not None)
        thread.tick()
        thread.open_stores.append(op)
        if commit:
            self.commit(thread)
        self._simulation.run.count("copies", src.array.nbytes)
        op.event = self._simulation.run.event(thread, "remote_copy" if remote else "copy", src, dst, dst.buffer.device)
        self.fly(op)

    def commit(self, thread: Issuer) -> None:
        if thread.open_stores:
            thread.groups.append(thread.open_stores)
            thread.open_stores = []

    def wait_stores(self, thread: Issuer, allowed: int, read_only: bool) -> None:
        """Completes stores until at most `allowed` groups are pending, as a thread's wait for its stores does.

        With `read_only`, a group is pending until shared memory has been read, else until global memory is written.
        """
        done = max(len(thread.groups) - allowed, 0)
        for group in thread.groups[:done]:
            for op in group:
                while op.stage < (1 if read_only else 2):
                    self._advance(op)
                thread.knowledge.note(op.component, op.time)
                if not read_only:
                    thread.knowledge.note(op.write_component, op.write_time)
        if not read_only:
            del thread.groups[:done]
            self._flying = [op for op in self._flying if op.stage < 2]

    # ---- wgmma -------------------------------------------------------------------------------------------------------

    def wgmma(self, thread: Issuer, accumulator: View, a: View | np.ndarray, b: View) -> None:
        """Issues accumulator += a @ b; `a` is a view of shared memory or a value in registers."""
        op = Operation("wgmma", thread)
        op.dst = accumulator
        op.sources = (a, b)
        for name, operand in (("left operand", a), ("right operand", b)):
            if not isinstance(operand, np.ndarray):
                what = f"wgmma, {name}"
                self.record(op, operand, what, op.component, op.time, write=False, by_rows=operand is a)
        thread.tick()
        thread.wgmmas.append(op)
        run = self._simulation.run
        run.count("wgmmas")
        op.event = run.event(thread, "wgmma", a if not isinstance(a, np.ndarray) else b, b, None)
        if self.completes_at_once():
            self._multiply(thread, len(thread.wgmmas))

    def _multiply(self, thread: Issuer, count: int) -> None:
        for op in thread.wgmmas[:count]:
            if op.stage == 2:
                continue
            a, b = (x if isinstance(x, np.ndarray) else x.read() for x in op.sources)
            target = op.dst.array
            wide = np.int32 if target.dtype.kind == "i" else np.float32
            with np.errstate(all="ignore"):
                product = matmul(a.astype(wide), b.astype(wide))
                target[...] = (target + product.reshape(target.shape)).astype(target.dtype)
            op.stage = 2
            self._simulation.run.event_end(op.event)

    def wait_wgmma(self, thread: Issuer, allowed: int) -> None:
        done = len(thread.wgmmas) - allowed
        if done <= 0:
            return
        self._multiply(thread, done)
        for op in thread.wgmmas[:done]:
            thread.knowledge.note(op.component, op.time)
        del thread.wgmmas[:done]

    # ---- completion --------------------------------------------------------------------------------------------------

    def maybe_complete(self) -> None:
        """In random mode, with some probability advances one random operation in flight by one phase."""
        if self.mode != "random" or not self._flying or self._simulation.random.random() > _EARLY:
            return
        self._complete(int(self._simulation.random.random() * len(self._flying)))

    def _complete(self, position: int) -> None:
        op = self._flying[position]
        if self._advance(op):
            self._flying[position] = self._flying[-1]
            self._flying.pop()

    def complete_awaited(self) -> bool:
        """Completes one load or arrival when no thread can run. Returns False if none is in flight.

        An operation on whose barrier a thread waits is preferred.
        """
        loads = [i for i, op in enumerate(self._flying) if op.kind != "store"]
        awaited = [i for i in loads if self._flying[i].barrier.waiters]
        choices = awaited or loads
        if not choices:
            return False
        self._complete(self._simulation.random.choice(choices))
        return True

    def finish(self, machine: object, device: int) -> None:
        """Completes all operations of a launch on a device whose last thread has ended."""

        def is_left(op: Operation) -> bool:
            return op.thread.machine is machine and op.thread.device == device

        for op in filter(is_left, self._flying):
            while not self._advance(op):
                pass
        self._flying = [op for op in self._flying if not is_left(op)]
