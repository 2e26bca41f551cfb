"""The operations that a thread has issued to tensor memory and to the tensor core (Blackwell).

The operations that one thread issues to the tensor core run in the order of issue, some time later. A commit arrives on
a barrier when all operations that its thread has issued before are complete. No other event tells that they are
complete. So the operations of one thread share one component of the vector clocks.
"""

from __future__ import annotations

import collections
from collections.abc import Callable

import numpy as np

from ..foundations.clocks import Components, Knowledge
from ..foundations.errors import ProtocolError
from ..state.memory import View
from .operations import Issued, Issuer


class TensorThread:
    """The operations of one thread.

    Attributes:
        loads: (component, time) of each load that has not been waited for.
        stores: ((component, time), view, value) of each store that has not been committed; `view` is None if the value
            has been written.
        queue: the operations that the thread has issued to the tensor core.
    """

    def __init__(self, components: Components):
        self.loads: list[tuple[int, int]] = []
        self.stores: list[tuple[tuple[int, int], View | None, np.ndarray]] = []
        self.queue = TensorQueue(components)


class TensorQueue:
    """The operations that one thread has issued to the tensor core, in order.

    Attributes:
        component, time: identify the last operation as an event: its component in the vector clocks, and the time of
            that component.
        knowledge: the events that have happened when the last operation is complete; None if there is no operation.
    """

    def __init__(self, components: Components):
        self._components = components
        self.component = -1
        self.time = 0  # of the last operation
        self.knowledge: Knowledge | None = None
        self._pending: collections.deque[tuple[int, Callable[[], None]]] = collections.deque()
        self._collective: bool | None = None

    def check(self, what: str, *, collective: bool) -> None:
        """Checks that an operation is of the same kind as those before: all of one CTA, or all of a pair.

        A commit tracks only the operations of its own kind.

        Raises:
            ProtocolError: operations before were of the other kind.
        """
        if self._collective is not None and self._collective != collective:
            kinds = ("without", "with")
            raise ProtocolError(
                f"{what} {kinds[collective]} collective_axis, after operations {kinds[not collective]} it: all tcgen05 "
                "operations of a kernel must be of one kind, and a commit tracks only those of its own"
            )

    def issue(self, thread: Issuer, what: str, *, collective: bool) -> Issued:
        """Issues an operation, of one CTA or (`collective`) of a pair. The caller passes its effect to `append`."""
        self.check(what, collective=collective)
        self._collective = collective
        if self.component < 0:
            self.component = self._components.new()
        self.time += 1
        self.knowledge = known = thread.knowledge.copy()
        known.note(self.component, self.time)
        return Issued(thread, thread.instruction, known, self.component, self.time)

    def append(self, run: Callable[[], None], *, at_once: bool) -> None:
        """Gives the last operation issued its effect: `run` is called when the operation completes, or `at_once`."""
        self._pending.append((self.time, run))
        if at_once:
            self.run_until(self.time)

    def run_until(self, time: int) -> None:
        """Completes the operations up to the one with this time."""
        pending = self._pending
        while pending and pending[0][0] <= time:
            pending.popleft()[1]()
