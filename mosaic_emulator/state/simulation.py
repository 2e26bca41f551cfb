"""The state that all launches of a simulation share.

It has the step count, the source of random choices, the race detector, and the errors found so far.
"""

from __future__ import annotations

import random
from collections.abc import Hashable

import numpy as np

from ..foundations.actors import Actor
from ..foundations.clocks import Components
from ..foundations.errors import EmulationError, RaceError
from ..foundations.scheduler import SCHEDULERS
from ..foundations.settings import Settings
from . import report
from .races import Access, RaceDetector
from .runs import Run

_MOST_ERRORS = 16


class Simulation:
    """The state that the launches of a sequence share, of all devices and kernels.

    Attributes:
        name: the name of the kernel, or of all kernels of a sequence.
        is_replay: whether `run_sequence` runs the launches. If not, `emulate` does.
        random: the source of all random choices.
        now: the number of the scheduler's steps so far.
        fences: what the last sequentially consistent fences knew: a clock for each device, and one for ``"sys"``.
        launches: how many launches there are.
        errors: the faults found, in order.
        warnings: messages about suspicious actions that are no faults.
        detector: finds races; None if `detect_races` is off.
    """

    def __init__(self, settings: Settings, run: Run, name: str, repetition: int = 0, *, is_replay: bool = False):
        self.settings, self.run, self.name, self.is_replay = settings, run, name, is_replay
        self.random = random.Random(f"{settings.seed}:{name}:{repetition}")
        self.components = Components()
        self.detector = RaceDetector(self._race) if settings.detect_races else None
        self.scheduler = SCHEDULERS[settings.scheduler](self.random)
        self.now = 0
        self.fences: dict[int | str, np.ndarray] = {}
        self.launches = 0
        self.errors: list[EmulationError] = []
        self.warnings: list[str] = []
        self._reported: set[Hashable] = set()

    def fail(self, error: EmulationError, thread: Actor | None) -> None:
        """Records a fault. Its message gets the thread in which it was found and the call that repeats the run."""
        where = f"{thread.where}: " if thread is not None else ""
        args = (error.kind,) if isinstance(error, RaceError) else ()
        repeat = report.how_to_repeat(self.settings, self.name, is_replay=self.is_replay)
        self.errors.append(type(error)(f"{where}{error}\n{repeat}", *args))

    def fault(self, key: Hashable, error: EmulationError, thread: Actor | None = None) -> None:
        """Records a fault that does not end the run, unless a fault with this `key` has been recorded."""
        if key not in self._reported and len(self.errors) < _MOST_ERRORS:
            self._reported.add(key)
            self.fail(error, thread)

    def _race(self, kind: str, prior: Access, access: Access) -> None:
        key = (kind, prior.instruction.index, access.instruction.index)
        self.fault(key, RaceError(report.race(kind, prior, access), kind))
