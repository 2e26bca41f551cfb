"""The settings of `emulate` and `run_sequence`, which say how kernels are emulated."""

from __future__ import annotations

import dataclasses
from typing import Literal

from .cores import DEFAULT_CORES
from .scheduler import SCHEDULERS

Completion = Literal["late", "random", "eager"]
Scheduler = Literal["pct", "random", "round_robin"]

_COMPLETIONS = ("late", "random", "eager")


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a run. `emulate` describes each of them.

    Raises:
        ValueError: a setting has a value that is not allowed.
    """

    cores: int = DEFAULT_CORES
    completion: Completion = "late"
    scheduler: Scheduler = "pct"
    seed: int = 0
    detect_races: bool = True
    resident: int | None = None
    step_limit: int | None = 20_000_000
    record: bool = False
    laps: int = 1
    keep: bool = False

    def __post_init__(self):
        if not isinstance(self.cores, int) or self.cores < 1:
            raise ValueError(f"`cores` must be an integer of at least 1, got {self.cores!r}")
        if self.completion not in _COMPLETIONS:
            raise ValueError(f"`completion` must be one of {_COMPLETIONS}, got {self.completion!r}")
        if self.scheduler not in SCHEDULERS:
            raise ValueError(f"`scheduler` must be one of {tuple(SCHEDULERS)}, got {self.scheduler!r}")
        if self.laps < 1:
            raise ValueError(f"`laps` must be at least 1, got {self.laps}")
        if self.resident is not None and self.resident < 1:
            raise ValueError(f"`resident` must be at least 1 or None, got {self.resident}")
