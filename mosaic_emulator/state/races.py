"""Race detection: each access to memory is checked against the buffer's shadow and the thread's vector clock.

The shadow (`shadow.Shadow`) holds for each granule of memory the numbers of two sets of accesses: the last write (or
the last atomic operations, between which there is no order), and the reads since then. The detector keeps the sets.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from ..foundations.actors import Actor
from ..foundations.clocks import Knowledge, covers
from ..foundations.source_lines import Instruction
from .memory import View


@dataclasses.dataclass(slots=True, eq=False)
class Access:
    """One access to memory, as the shadow remembers it.

    Attributes:
        thread: the thread that makes the access, or has issued the operation that makes it.
        what: names the access in messages.
        component, time: the event of the access.
        asynchronous: whether the access goes through the asynchronous proxy.
        by_rows: whether this is a read whose rows each affect only the same row of a result.
    """

    thread: Actor
    view: View
    what: str
    instruction: Instruction
    component: int
    time: int
    _: dataclasses.KW_ONLY
    write: bool
    asynchronous: bool = False
    atomic: bool = False
    by_rows: bool = False

    def __str__(self) -> str:
        proxy = " (asynchronous proxy)" if self.asynchronous else ""
        cta = self.view.buffer.cta
        elsewhere = "" if cta is None or cta is self.thread.cta else f" in CTA {cta.index}"
        return f"{self.what}{proxy} of {self.view}{elsewhere} by {self.thread} at {self.instruction.source}"


def _distinct(cells: np.ndarray) -> list[int]:
    if cells.size <= 32:
        return list(dict.fromkeys(cells.ravel().tolist()))
    first = cells.flat[0]
    if (cells == first).all():
        return [int(first)]
    return np.unique(cells).tolist()


class RaceDetector:
    """Checks accesses against the accesses in the shadows, and calls `report(kind, old, new)` for each race."""

    def __init__(self, report: Callable[[str, Access, Access], None]):
        self._sets: list[dict[int, Access]] = [{}]
        self._report = report
        # instruction -> (a read that touched unwritten memory, whether all of the memory that it read was unwritten)
        self.unwritten: dict[int, tuple[Access, bool]] = {}

    def access(self, access: Access, knowledge: Knowledge) -> None:
        """Checks an access of a thread or operation that has this `knowledge`, and remembers the access."""
        view = access.view
        if not view.array.size:
            return
        writes, reads = view.cells()
        seen = knowledge.seen
        sets = self._sets
        old_writes = _distinct(writes)
        for number in old_writes:
            for prior in sets[number].values():
                self._check(prior, access, knowledge)
        if not access.write:
            if 0 in old_writes and not view.buffer.written and not self._is_row_by_row(access, old_writes):
                self.unwritten.setdefault(access.instruction.index, (access, old_writes == [0]))
            for number in _distinct(reads):
                old = sets[number]
                new = {c: a for c, a in old.items() if not covers(seen, a.component, a.time)} if number else {}
                new[access.component] = access
                self._replace(reads, number, new)
            return
        for number in _distinct(reads):
            for prior in sets[number].values():
                self._check(prior, access, knowledge)
        if access.atomic:
            # Earlier reads stay: the next atomic, unordered with this one, has to be checked against them as well.
            for number in old_writes:
                new = {c: a for c, a in sets[number].items() if a.atomic and not covers(seen, a.component, a.time)}
                new[access.component] = access
                self._replace(writes, number, new)
            return
        sets.append({access.component: access})
        writes[...] = len(sets) - 1
        reads[...] = 0

    @staticmethod
    def _is_row_by_row(access: Access, old_writes: list[int]) -> bool:
        """Whether a read of partly unwritten memory is no fault, since each row is wholly written or wholly unwritten.

        The rows of the read must each affect only the same row of a result (`Access.by_rows`), and some memory must be
        written. This happens at the end of an operand: a tile is loaded there without the rows out of bounds, which
        stay NaN. The same rows of the result are dropped when the result is stored.
        """
        if not access.by_rows or old_writes == [0]:
            return False
        view = access.view
        missing = view.buffer.shadow.unwritten(view.array, view.buffer.data).reshape(view.shape)
        return bool((missing.any(axis=-1) == missing.all(axis=-1)).all())

    def _replace(self, cells: np.ndarray, old: int, new: dict[int, Access]) -> None:
        self._sets.append(new)
        number = len(self._sets) - 1
        if cells.size == 1:
            cells[...] = number
        else:
            cells[cells == old] = number

    def _check(self, prior: Access, access: Access, knowledge: Knowledge) -> None:
        if prior.component == access.component:  # Events of one component are in order.
            return
        if prior.atomic and access.atomic:
            return
        if not covers(knowledge.seen, prior.component, prior.time):
            self._report("data", prior, access)
            return
        if access.view.buffer.space == "tmem":
            if knowledge.tensor is None or not covers(knowledge.tensor, prior.component, prior.time):
                self._report("tensor", prior, access)
            return
        if not (access.asynchronous and prior.write):
            return
        # Two accesses through the asynchronous proxy need no proxy fence between them if they are of one CTA, or to
        # shared memory (by CTAs of one cluster). Between a write and any other asynchronous access, a fence is needed.
        shared = access.view.buffer.space == "smem"
        if prior.asynchronous and (shared or prior.thread.cta is access.thread.cta):
            return
        fenced = knowledge.smem if shared else knowledge.gmem
        if not covers(fenced, prior.component, prior.time):
            self._report("proxy", prior, access)
