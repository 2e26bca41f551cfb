"""The settings of `emulate` and `run_sequence`, which say how kernels are emulated."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

import numpy as np

from ..cores import DEFAULT_CORES
from .scheduler import SCHEDULERS

Completion = Literal["late", "random", "eager"]
Scheduler = Literal["pct", "random", "round_robin"]

_COMPLETIONS = get_args(Completion)


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
        _require_integer("cores", self.cores, least=1)
        if self.completion not in _COMPLETIONS:
            raise ValueError(f"`completion` must be one of {_COMPLETIONS}, got {self.completion!r}")
        if self.scheduler not in SCHEDULERS:
            raise ValueError(f"`scheduler` must be one of {tuple(SCHEDULERS)}, got {self.scheduler!r}")
        _require_integer("seed", self.seed)
        _require_integer("laps", self.laps, least=1)
        _require_integer("resident", self.resident, least=1, is_optional=True)
        _require_integer("step_limit", self.step_limit, least=1, is_optional=True)
        for name in ("detect_races", "record", "keep"):
            value = getattr(self, name)
            if not isinstance(value, (bool, np.bool_)):
                raise ValueError(f"`{name}` must be True or False, got {value!r}")


def _require_integer(name: str, value: object, *, least: int | None = None, is_optional: bool = False) -> None:
    if value is None and is_optional:
        return
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool) and (least is None or value >= least):
        return
    at_least = "" if least is None else f" of at least {least}"
    raise ValueError(f"`{name}` must be an integer{at_least}{' or None' if is_optional else ''}, got {value!r}")
