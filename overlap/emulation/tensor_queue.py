"""What a thread has under way in tensor memory and in the tensor core (Blackwell).

The operations that one thread issues to the tensor core run in the order of issue, some time later. A commit arrives on
a barrier when all operations that its thread has issued before it are complete; nothing else tells of that. So the
operations of one thread share one component of the vector clocks.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

from .clocks import Components, Knowledge
from .engines import Issued, Issuer
from .errors import ProtocolError


class TensorThread:
    """What one thread has under way in tensor memory and the tensor core.

    Attributes:
        loads: (component, time) of the loads not waited for.
        stores: ((component, time), view, value) of the stores not committed; `view` is None if they are written.
        queue: the operations that the thread has issued to the tensor core.
    """

    __slots__ = ("loads", "queue", "stores")

    def __init__(self, components: Components):
        self.loads: list[tuple[int, int]] = []
        self.stores: list[tuple[tuple[int, int], Any, Any]] = []
        self.queue = TensorQueue(components)


class TensorQueue:
    """The operations that one thread has issued to the tensor core, in order.

    Attributes:
        component, time: of the last operation in the vector clocks.
        knowledge: what has happened when the last operation is complete; None if there is none.
    """

    __slots__ = ("_collective", "_components", "_pending", "component", "knowledge", "time")

    def __init__(self, components: Components):
        self._components = components
        self.component = -1
        self.time = 0  # of the last operation
        self.knowledge: Knowledge | None = None
        self._pending: collections.deque[tuple[int, Callable[[], None]]] = collections.deque()
        self._collective: bool | None = None

    def check(self, what: str, *, collective: bool) -> None:
        """Checks that all operations are of one CTA, or all of a pair: a commit tracks only those of its own kind."""
        if self._collective is not None and self._collective != collective:
            kinds = ("without", "with")
            raise ProtocolError(
                f"{what} {kinds[collective]} collective_axis, after operations {kinds[not collective]} it: all tcgen05 "
                "operations of a kernel must be of one kind, and a commit tracks only those of its own"
            )

    def issue(self, thread: Issuer, what: str, *, collective: bool) -> Issued:
        """Issues an operation, of one CTA or (`collective`) of a pair; `append` says what it does."""
        self.check(what, collective=collective)
        self._collective = collective
        if self.component < 0:
            self.component = self._components.new()
        self.time += 1
        self.knowledge = known = thread.knowledge.copy()
        known.note(self.component, self.time)
        return Issued(thread, thread.instruction, known, self.component, self.time)

    def append(self, run: Callable[[], None], *, at_once: bool) -> None:
        """Has the last operation issued do `run` when its turn comes, or now (`at_once`)."""
        self._pending.append((self.time, run))
        if at_once:
            self.run_until(self.time)

    def run_until(self, time: int) -> None:
        """Completes the operations up to that time."""
        pending = self._pending
        while pending and pending[0][0] <= time:
            pending.popleft()[1]()
