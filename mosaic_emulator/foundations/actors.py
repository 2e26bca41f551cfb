"""What the lower layers ask of a thread and of its CTA (`execution.machine.Thread`, `state.clusters.Cta`)."""

from __future__ import annotations

from typing import Protocol

from .clocks import Knowledge
from .source_lines import Instruction


class Block(Protocol):
    """A CTA, to which memory and barriers belong."""

    index: int

    def note_use(self, thread: Actor, what: str, component: int, time: int) -> None:
        """Remembers that a thread of another CTA uses this CTA's memory or barriers."""
        ...


class Actor(Protocol):
    """A thread that accesses memory and words, and whose actions are recorded. Messages name it by its `str`.

    Attributes:
        component, time: the thread's component of the vector clocks, and the time of that component.
        where: the thread's name and its source line.
    """

    knowledge: Knowledge
    component: int
    time: int
    device: int
    warpgroup: int
    warp: int | None
    blocked_at: int

    @property
    def cta(self) -> Block: ...
    @property
    def instruction(self) -> Instruction: ...
    @property
    def blocked(self) -> object: ...
    @property
    def where(self) -> str: ...
