"""Asynchronous engines: TMA loads, TMA stores and wgmma, which complete later than they are issued.

When, within what the rules allow, is the completion mode: ``eager`` at once, ``random`` at any later step, ``late``
only when somebody has to have it: a store at the wait for it, a load when no thread can run without one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .clocks import Knowledge
from .clusters import note_use
from .errors import ProtocolError
from .races import Access

if TYPE_CHECKING:
    from .machine import Machine, Thread
    from .memory import View
    from .sequence import World

REDUCTIONS = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
_EARLY = 0.25  # the chance, per step, that some operation completes in random mode


# OpenBLAS starts threads above this many multiplications. They spin while they wait, which on a machine with few, busy
# cores makes a product of 20 us take milliseconds.
_SINGLE_THREADED = 1 << 18


def matmul(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a @ b in the dtype of `a`, by blocks of rows, each small enough to be computed by one thread.

    Floating-point products are summed in f64. In f32, BLAS gives a row other last bits in one place of a block than in
    another, on some CPUs; a tensor core does not, and users compare bits.
    """
    dtype, (rows, k) = a.dtype, a.shape
    if dtype.kind == "f":
        a, b = a.astype(np.float64), b.astype(np.float64)
    block = max(_SINGLE_THREADED // max(k * b.shape[1], 1), 1)
    while rows % block:
        block -= 1
    with np.errstate(all="ignore"):
        return (a.reshape(rows // block, block, k) @ b).reshape(rows, b.shape[1]).astype(dtype)


class Landing(NamedTuple):
    """Where a load, or this CTA's part of a multicast load, is written, and the barrier that counts its bytes there."""

    view: View
    barrier: Any
    part: tuple[slice, ...] | None = None  # of what is loaded, in the shape `whole`
    whole: tuple[int, ...] = ()


class Operation:
    """One asynchronous operation in flight.

    A store has two stages, each with its own component: shared memory has been read, global memory has been written.
    """

    __slots__ = (
        "barrier",
        "component",
        "dst",
        "event",
        "instruction",
        "issued",
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

    def __init__(self, kind: str, thread: Thread):
        self.kind, self.thread, self.instruction = kind, thread, thread.instruction
        self.knowledge: Knowledge = thread.knowledge.copy()
        self.component, self.time = thread.pool.take(self.knowledge.seen)
        self.knowledge.note(self.component, self.time)
        self.issued = thread.machine.world.now
        self.stage = 0  # stages completed
        self.event: Any = None
        self.barrier: Any = None


class Engine:
    """All operations in flight in one launch."""

    def __init__(self, world: World):
        self._world = world
        self.mode = world.settings.completion
        self._flying: list[Any] = []  # loads, stores and arrivals

    def record(
        self,
        op: Any,
        view: View,
        what: str,
        component: int,
        time: int,
        *,
        write: bool,
        atomic: bool = False,
        by_rows: bool = False,
    ) -> None:
        """Checks and remembers what an operation does to memory."""
        world = self._world
        if write and view.buffer.read_only:
            raise ProtocolError(f"{view} is an input that is not aliased to an output: it must not be written")
        if world.detector is None:
            return
        access = Access(
            op.thread, view, what, op.instruction, component, time, write=write, asynchronous=True, atomic=atomic,
            by_rows=by_rows,
        )  # fmt: skip
        world.detector.access(access, op.knowledge)
        op.thread.machine.note_remote(op.thread, access)
        if view.buffer.space in ("smem", "tmem"):
            view.buffer.async_uses[component] = access

    # ---- loads -------------------------------------------------------------------------------------------------------

    def load(
        self,
        thread: Thread,
        src: View,
        landings: Sequence[Landing],
        barrier: Any,
        nbytes: int,
        remote: bool,
        undefined: bool,
    ) -> None:
        """Issues a TMA load; `barrier` is to count `nbytes`, of which peers may send a part (None: a peer's is).

        `undefined`: what lies out of bounds is not even zero.
        """
        run = self._world.run
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
                note_use(thread, op.barrier.cta, f"{what}, arrival on {op.barrier.name}", op.component, op.time)
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
        """Lets an operation complete at a time that the completion mode allows."""
        if self.mode == "eager":
            while not self._advance(op):
                pass
        else:
            self._flying.append(op)

    def _advance(self, op: Any) -> bool:
        """Completes the next stage of `op`; returns whether it was the last."""
        if op.kind == "arrival":
            op.complete()
            return True
        if op.kind == "load":
            value = op.src.read(op.undefined)
            part = op.landing.part
            op.dst.write(value if part is None else value.reshape(op.landing.whole)[part])
            op.stage = 2
            self._world.run.event_end(op.event)
            knowledge = op.knowledge
            if op.barrier.cta is not op.thread.cta:  # a peer learns of this copy, not of what its issuer did before
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
            self._world.run.event_end(op.event)
        return True

    def _store_value(self, op: Operation) -> None:
        if op.reduction is None:
            op.dst.write(op.value)
            return
        old = op.dst.read()
        op.dst.write(REDUCTIONS[op.reduction](old, np.asarray(op.value).reshape(old.shape)).astype(old.dtype))

    # ---- stores ------------------------------------------------------------------------------------------------------

    def store(self, thread: Thread, src: View, dst: View, reduction: str | None, commit: bool, remote: bool) -> None:
        """Issues a TMA store, in the thread's open group."""
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
        self._world.run.count("copies", src.array.nbytes)
        op.event = self._world.run.event(thread, "remote_copy" if remote else "copy", src, dst, dst.buffer.device)
        self.fly(op)

    def commit(self, thread: Thread) -> None:
        if thread.open_stores:
            thread.groups.append(thread.open_stores)
            thread.open_stores = []

    def wait_stores(self, thread: Thread, allowed: int, read_only: bool) -> None:
        """Waits until at most `allowed` groups are pending: read from shared memory, or wholly written."""
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

    def wgmma(self, thread: Thread, accumulator: View, a: Any, b: View) -> None:
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
        run = self._world.run
        run.count("wgmmas")
        op.event = run.event(thread, "wgmma", a if not isinstance(a, np.ndarray) else b, b, None)
        if self.mode == "eager" or (self.mode == "random" and self._world.random.random() < 0.5):
            self._multiply(thread, len(thread.wgmmas))

    def _multiply(self, thread: Thread, count: int) -> None:
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
            self._world.run.event_end(op.event)

    def wait_wgmma(self, thread: Thread, allowed: int) -> None:
        done = len(thread.wgmmas) - allowed
        if done <= 0:
            return
        self._multiply(thread, done)
        for op in thread.wgmmas[:done]:
            thread.knowledge.note(op.component, op.time)
        del thread.wgmmas[:done]

    # ---- completion --------------------------------------------------------------------------------------------------

    def maybe_complete(self) -> None:
        """In random mode, completes a stage of some operation now and then."""
        if self.mode != "random" or not self._flying or self._world.random.random() > _EARLY:
            return
        self._complete(int(self._world.random.random() * len(self._flying)))

    def _complete(self, position: int) -> None:
        op = self._flying[position]
        if self._advance(op):
            self._flying[position] = self._flying[-1]
            self._flying.pop()

    def complete_awaited(self) -> bool:
        """Nothing can run: completes one load, preferably one that somebody waits for. False if there is none."""
        loads = [i for i, op in enumerate(self._flying) if op.kind != "store"]
        awaited = [i for i in loads if self._flying[i].barrier.waiters]
        choices = awaited or loads
        if not choices:
            return False
        self._complete(self._world.random.choice(choices))
        return True

    def finish(self, machine: Machine, device: int) -> None:
        """Completes all that is left of a launch on a device when its last thread has gone."""

        def is_left(op: Operation) -> bool:
            return op.thread.machine is machine and op.thread.device == device

        for op in filter(is_left, self._flying):
            while not self._advance(op):
                pass
        self._flying = [op for op in self._flying if not is_left(op)]
