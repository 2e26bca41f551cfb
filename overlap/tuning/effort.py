"""How much a search measures: `Settings`, of which `Effort` is how long each measurement takes."""

from __future__ import annotations

import dataclasses
import os

from overlap.choice.problem import Problem
from overlap.tuning.timing import iterations_for


@dataclasses.dataclass(frozen=True)
class Effort:
    """How long to measure.

    Attributes:
      launch_us: about how long one program runs, in microseconds; determines how often its loop calls the operation.
      max_iterations: calls in one loop, at most.
      launches: how many programs a sample times, after one that is not counted. 0 if times mean nothing (on a
        CPU): a sample is then the plain time of one program.
      warm_up_s: how long the devices work before the first sample, in seconds.
    """

    launch_us: float = 10_000.0
    max_iterations: int = 64
    launches: int = 2
    warm_up_s: float = 1.0

    @staticmethod
    def emulated() -> Effort:
        """The effort for CPU devices, where times mean nothing: loops of two calls."""
        return Effort(0.0, 2, 0, 0.0)

    def iterations(self, problem: Problem) -> int:
        """How often a loop calls the operation."""
        return iterations_for(problem, self.launch_us, 2, self.max_iterations)


@dataclasses.dataclass(frozen=True)
class Settings:
    """How much is searched.

    Attributes:
      max_configs: how many configurations to compile, at most.
      finalists: how many configurations come into the finals.
      rounds: samples of each finalist.
      workers: how many configurations are compiled at the same time.
      effort: how long to measure.
      seed: the seed of the operands, and of the order within a round.
    """

    # For 55 random problems on an H200, the best of the model's first 12 is within 0.2% of the best of its first 18.
    max_configs: int = 12
    finalists: int = 4
    rounds: int = 5
    workers: int = dataclasses.field(default_factory=lambda: min(16, os.cpu_count() or 1))
    effort: Effort = dataclasses.field(default_factory=Effort)
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("max_configs", "finalists", "rounds", "workers"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, got {getattr(self, name)}")

    @staticmethod
    def for_platform(platform: str, max_configs: int | None = None) -> Settings:
        """The default settings; on a CPU, where kernels run emulated, the smallest ones that still use all stages."""
        if platform == "cpu":
            configs = 3 if max_configs is None else max_configs
            return Settings(configs, finalists=2, rounds=1, workers=1, effort=Effort.emulated())
        return Settings() if max_configs is None else Settings(max_configs)
