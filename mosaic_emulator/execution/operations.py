"""Asynchronous operations: copies, stores and products, which complete later than a thread issues them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from ..foundations.actors import Actor
from ..foundations.arithmetic import matmul
from ..foundations.clocks import ComponentPool, Knowledge
from ..foundations.source_lines import Instruction
from ..state.clusters import Cta
from ..state.memory import View
from ..state.races import Access
from ..state.runs import Event
from ..state.sync import MBarrier

REDUCTIONS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}  # fmt: skip


class Issuer(Actor, Protocol):
    """The thread that issues an operation.

    Attributes:
        open_stores: TMA stores that are not yet committed.
        groups: committed groups of stores, oldest first.
        wgmmas: wgmma operations in flight, oldest first.
    """

    open_stores: list[Store]
    groups: list[list[Store]]
    wgmmas: list[Product]

    @property
    def machine(self) -> object: ...
    @property
    def cta(self) -> Cta: ...
    @property
    def pool(self) -> ComponentPool: ...

    def tick(self) -> None: ...
    def note_remote(self, access: Access) -> None: ...


class Issued(NamedTuple):
    """What identifies an operation for race detection: its issuer, what is known before it, and its event.

    `asynchronous` says whether its accesses go through the asynchronous proxy.
    """

    thread: Issuer
    instruction: Instruction
    knowledge: Knowledge
    component: int
    time: int
    asynchronous: bool = False


class Operation:
    """An operation with an event of its own.

    Attributes:
        component, time: the event.
        knowledge: the events that have happened when the operation is complete, itself included.
        is_done: whether the operation is complete.
        event: its entry in the timeline; None if no timeline is recorded.
        asynchronous: whether its accesses go through the asynchronous proxy.
    """

    asynchronous = True

    def __init__(self, thread: Issuer):
        self.thread, self.instruction = thread, thread.instruction
        self.knowledge = thread.knowledge.copy()
        self.component, self.time = thread.pool.take(self.knowledge.seen)
        self.knowledge.note(self.component, self.time)
        self.is_done = False
        self.event: Event | None = None

    def advance(self) -> None:
        """Completes the next stage."""
        raise NotImplementedError


class CountedWrite(Operation):
    """A write to the shared memory of a CTA, whose bytes a barrier of that CTA (or of its leader) then counts.

    Attributes:
        barrier: the barrier. The issuer makes it expect the bytes.
        value: returns what is written, when the write lands.
    """

    def __init__(self, thread: Issuer, target: View, barrier: MBarrier, value: Callable[[], np.ndarray], nbytes: int):
        super().__init__(thread)
        self.target, self.barrier, self.value, self._nbytes = target, barrier, value, nbytes

    def advance(self) -> None:
        self.target.write(self.value())
        self.is_done = True
        knowledge = self.knowledge
        if self.barrier.cta is not self.thread.cta:
            # Another CTA learns of this write, but not of earlier actions of the issuer.
            knowledge = Knowledge()
            knowledge.note(self.component, self.time)
        self.barrier.landed(self._nbytes, knowledge)


class Arrival:
    """An arrival on a barrier that comes later, such as that of a commit. It is no event of its own."""

    def __init__(self, thread: Issuer, barrier: MBarrier, arrive: Callable[[], None]):
        self.thread, self.barrier, self._arrive = thread, barrier, arrive
        self.is_done, self.event = False, None

    def advance(self) -> None:
        self._arrive()
        self.is_done = True


class Store(Operation):
    """A TMA store. It completes in two stages: shared memory is read, then global memory is written.

    Attributes:
        write_component, write_time: the event of the second stage. The operation's own event is the first stage.
        value: what has been read; None before the first stage is complete.
    """

    def __init__(self, thread: Issuer, source: View, target: View, reduction: str | None):
        super().__init__(thread)
        self.source, self.target, self.reduction = source, target, reduction
        self.write_component, self.write_time = thread.pool.take(self.knowledge.seen)
        self.knowledge.note(self.write_component, self.write_time)
        self.value: np.ndarray | None = None

    @property
    def written(self) -> Issued:
        """The second stage, as an operation of its own."""
        return Issued(
            self.thread, self.instruction, self.knowledge, self.write_component, self.write_time, asynchronous=True
        )

    def advance(self) -> None:
        if self.value is None:
            self.value = self.source.read()
            return
        if self.reduction is not None:
            old = self.target.read()
            self.value = REDUCTIONS[self.reduction](old, self.value.reshape(old.shape)).astype(old.dtype)
        self.target.write(self.value)
        self.is_done = True


class Product(Operation):
    """A wgmma: accumulator += a @ b. `a` is a view of shared memory, or a value in registers."""

    def __init__(self, thread: Issuer, accumulator: View, a: View | np.ndarray, b: View):
        super().__init__(thread)
        self.accumulator, self.a, self.b = accumulator, a, b

    def advance(self) -> None:
        a, b, target = (
            self.a if isinstance(self.a, np.ndarray) else self.a.read(),
            self.b.read(),
            self.accumulator.array,
        )
        wide = np.int32 if target.dtype.kind == "i" else np.float32
        with np.errstate(all="ignore"):
            product = matmul(a.astype(wide), b.astype(wide))
            target[...] = (target + product.reshape(target.shape)).astype(target.dtype)
        self.is_done = True


class Landing(NamedTuple):
    """The place to which a load, or this CTA's part of a multicast load, is written; and the barrier that counts it."""

    view: View
    barrier: MBarrier
    part: tuple[slice, ...] | None = None  # the part of the loaded array of shape `whole` that is written
    whole: Sequence[int] = ()

    def cut(self, value: np.ndarray) -> np.ndarray:
        """Returns the part of the loaded value that is written here."""
        return value if self.part is None else value.reshape(self.whole)[self.part]
