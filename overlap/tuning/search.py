"""The search for the fastest configuration of one problem.

    waves     compiles as many configurations at a time as there are workers, best predictions first. Checks each
              result, and times each configuration once. While the first ones are compiled, XLA's
              implementation is checked.
    halving   times all configurations that are left and drops the slower half, until a few finalists are left.
    finals    times the finalists, XLA and the model's choice in turns for several rounds. The medians decide.

After an interrupt or the end of the budget, the result is made from the measurements so far.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import datetime
import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import jax
import numpy as np

from overlap.choice import space
from overlap.choice.choose import why_no_config
from overlap.choice.problem import Problem
from overlap.choice.tables import Entry
from overlap.kernels.config import Config
from overlap.kernels.target import Target
from overlap.tuning.bench import Bench
from overlap.tuning.programs import error_bound
from overlap.tuning.progress import Progress
from overlap.tuning.settings import Settings
from overlap.tuning.stop import Ended, Stop


@dataclasses.dataclass(eq=False)
class Trial:
    """One competitor in the search.

    Attributes:
      config: the configuration; None for XLA.
      status: "ok"; or a text that begins with "wrong" (the result is wrong) or "error" (an exception).
      error: relative error of the result; None before the check.
      samples_us: the samples: times of one call, in microseconds.
      survived: how often the trial was kept when the slower half was dropped; the same, highest number for all
        finalists.
      program: the compiled loop; None when it is not needed any more.
    """

    config: Config | None
    status: str = "ok"
    error: float | None = None
    samples_us: list[float] = dataclasses.field(default_factory=list)
    survived: int = 0
    program: Any = dataclasses.field(default=None, repr=False)

    @property
    def us(self) -> float:
        """The median time of one call, in microseconds; infinite if there is none, or if the result is wrong."""
        return statistics.median(self.samples_us) if self.samples_us and self.status == "ok" else float("inf")

    @property
    def name(self) -> str:
        """The name of the competitor in tables."""
        return "xla" if self.config is None else space.differences(self.config)


@dataclasses.dataclass
class Outcome:
    """The outcome of a search.

    Attributes:
      problem: the problem that was tuned.
      trials: XLA, then all configurations that were measured or have failed.
      complete: False if the budget or an interrupt ended the search.
      interrupted: whether Ctrl-C ended the search.
      note: why there is no result, or why no search was needed; else "".
      result: the table entry: of this search, or the old one that made a search unnecessary. None if no configuration
        has run with a right result.
    """

    problem: Problem
    trials: list[Trial] = dataclasses.field(default_factory=list)
    complete: bool = True
    interrupted: bool = False
    note: str = ""
    result: Entry | None = None

    def __str__(self) -> str:
        if self.result is None:
            return f"{self.problem}: {self.note}"
        us = self.result.us
        others = self.result.others
        parts = [f"{us:.1f} µs", f"{self.problem.flops_per_device / us / 1e6:.0f} TFLOP/s"]
        parts += [f"XLA {others['xla']:.1f} µs ({others['xla'] / us:.3f} ×)"] if "xla" in others else []
        parts += [f"model's choice {others['heuristic'] / us:.3f} ×"] if "heuristic" in others else []
        failed = sum(trial.status != "ok" for trial in self.trials)
        parts += [f"{failed} of {self.result.tried} failed" if failed else f"{self.result.tried} tried"]
        parts += list(filter(None, [self.note, "" if self.complete else "partial"]))
        return f"{self.problem}:\n    {space.differences(self.result.config)}\n    {', '.join(parts)}"

    @property
    def ranked(self) -> list[Trial]:
        """The configurations with a right result, best first: by how often they survived, then by time."""
        usable = [trial for trial in self.trials if trial.config is not None and trial.us < float("inf")]
        return sorted(usable, key=lambda trial: (-trial.survived, trial.us))

    @property
    def xla_us(self) -> float | None:
        """XLA's time in microseconds; None if there is none."""
        return next((trial.us for trial in self.trials if trial.config is None and trial.samples_us), None)

    def summarize(self, target: Target) -> Entry | None:
        """The table entry that follows from the trials; None if no configuration has a right result."""
        if not self.ranked:
            return None
        best, *rest = self.ranked
        assert best.config is not None
        others = {trial.name: round(trial.us, 3) for trial in rest[:4]}
        if self.xla_us is not None and self.xla_us < float("inf"):  # Infinite if XLA's last check failed.
            others["xla"] = round(self.xla_us, 3)
        guess = space.heuristic(self.problem, target)
        others.update(("heuristic", round(trial.us, 3)) for trial in self.ranked if trial.config == guess)
        return Entry(
            self.problem,
            target.kind,
            jax.__version__,
            best.config,
            round(best.us, 3),
            others,
            tried=sum(trial.config is not None for trial in self.trials),
            complete=self.complete,
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        )


def search(
    problem: Problem,
    target: Target,
    devices: Sequence[Any],
    settings: Settings,
    *,
    stop: Stop,
    progress: Progress = lambda text, fraction: None,
) -> Outcome:
    """Finds the fastest configuration of `problem` on `devices`.

    Args:
      problem: the problem to tune.
      target: the kind of the devices.
      devices: as many devices as the problem has.
      settings: how much is searched.
      stop: when the search has to end. The first wave is measured even after the deadline.
      progress: called with what is being done and the fraction that is done.

    Returns:
      The outcome. An error that ends the search is in its `note`.
    """
    configs = space.candidates(problem, target)[: settings.max_configs]
    outcome = Outcome(problem)
    if not configs:
        outcome.note = f"no configuration of the fused kernel can run it: {why_no_config(problem, target)}"
        return outcome
    race = _Race(outcome, settings, stop, progress, len(configs))
    try:
        with stop.ends_launches() if target.platform == "cpu" else nullcontext():
            race.bench = Bench(problem, devices, settings)
            first = race.begin_compiling(configs[: settings.workers])
            race.start()
            race.waves(configs, first)
            race.halve()
            race.finals()
    except (Ended, KeyboardInterrupt) as end:
        stop.interrupted |= isinstance(end, KeyboardInterrupt)
        outcome.complete = False
        outcome.interrupted = stop.interrupted
    except Exception as error:  # For example, the GPU has too little memory. The next problem may fit.
        outcome.complete = False
        outcome.note = _one_line(error)
    finally:
        race.close()
    # Drop the trials that were never measured.
    outcome.trials = [trial for trial in outcome.trials if trial.samples_us or trial.status != "ok"]
    outcome.result = outcome.summarize(target)
    if outcome.result is None and not outcome.note:
        failed = next((trial.status for trial in outcome.trials if trial.status != "ok"), "ended before the first one")
        outcome.note = f"no configuration came through: {failed}"
    for trial in outcome.trials:
        trial.program = None
    progress("done", 1.0)
    return outcome


class _Race:
    """The state of one search. After each method, the best trial of `outcome` may be used.

    Attributes:
      alive: the trials that are still in the race.
      total, done: the work of the search, and how much of it is done. The unit is compiling one configuration.
      error_bound: the largest error of a right result. Before XLA's error is known it is NaN, so that nothing passes.
    """

    bench: Bench

    def __init__(self, outcome: Outcome, settings: Settings, stop: Stop, progress: Progress, count: int) -> None:
        self.outcome = outcome
        self.settings = settings
        self.stop = stop
        self.progress = progress
        # A sample takes about a tenth of the time of compiling a configuration.
        self.total = count * 1.2 + 0.1 * settings.rounds * (min(settings.finalists, count) + 2)
        self.done = 0.0
        self.alive: list[Trial] = []
        self.pool: concurrent.futures.ThreadPoolExecutor | None = None
        self.random = np.random.default_rng(settings.seed)
        self.xla = Trial(None)
        self.error_bound = math.nan

    def _report(self, text: str, amount: float) -> None:
        """Reports what is done next, after `amount` more work. Ends the search after Ctrl-C."""
        self.done += amount
        self.progress(text, min(self.done / self.total, 1.0))
        self.stop.check()

    def _failed(self, trial: Trial, error: Exception) -> None:
        """Notes why a configuration has failed."""
        self.stop.check()
        trial.status = _one_line(error)

    def begin_compiling(self, configs: Sequence[Config]) -> list[Callable[[], Any]]:
        """Starts compiling in other threads. Returns functions that wait for each program."""
        if self.settings.workers == 1:  # One worker is this thread, which has the emulator's context.
            return [functools.partial(self.bench.compile, config) for config in configs]
        self.pool = self.pool or concurrent.futures.ThreadPoolExecutor(self.settings.workers)
        return [self.pool.submit(self.bench.compile, config).result for config in configs]

    def close(self) -> None:
        """Ends all threads. Configurations whose compilation has not begun are not compiled."""
        if self.pool is not None:
            self.pool.shutdown(wait=True, cancel_futures=True)

    def start(self) -> None:
        """Runs XLA's implementation: finds the bound for errors, and warms up the devices."""
        self._report("XLA", 0.0)
        self.outcome.trials.append(self.xla)
        self.xla.program = self.bench.compile(None)
        self.xla.error = self.bench.error_of(self.xla.program)
        self.error_bound = error_bound(self.outcome.problem, self.xla.error)
        self.stop.check()  # On a CPU these steps can take minutes.
        self.bench.warm_up(self.xla.program)
        self.stop.check()
        self.xla.samples_us.append(self.bench.sample_us(self.xla.program))

    def waves(self, configs: Sequence[Config], programs: Sequence[Callable[[], Any]]) -> None:
        """Compiles, checks and times all configurations, as many at a time as there are workers.

        Args:
          configs: the configurations, best predictions first.
          programs: what `begin_compiling` has returned for the first wave.
        """
        size = self.settings.workers
        for first in range(0, len(configs), size):
            wave = [Trial(config) for config in configs[first : first + size]]
            self.outcome.trials += wave
            self._report(f"compiling {len(wave)} of {len(configs)} configurations", 0.0)
            for trial, program in zip(
                wave, self.begin_compiling(configs[first : first + size]) if first else programs, strict=True
            ):
                try:
                    trial.program = program()
                except Exception as error:  # The search goes on with the other configurations.
                    self._failed(trial, error)
                self._report(f"compiled {trial.name}", 1.0)
            for trial in wave:
                self._report(f"checking {trial.name}", 0.0)
                self._check(trial)
                self._report(f"timing {trial.name}", 0.0)
                self._sample(trial)
            self.alive += [trial for trial in wave if trial.status == "ok"]
            # Drop configurations that are far slower: their programs take memory.
            best = min((trial.us for trial in self.alive), default=0.0)
            self._keep([trial for trial in self.alive if trial.us < 2 * best])
            self._check_deadline()

    def halve(self) -> None:
        """Times all trials that are left and drops the slower half, until only the finalists are left."""
        while len(self.alive) > self.settings.finalists:
            self._round(self.alive)
            self.alive.sort(key=lambda trial: trial.us)
            self._keep(self.alive[: max(len(self.alive) // 2, self.settings.finalists)])
            for trial in self.alive:
                trial.survived += 1

    def finals(self) -> None:
        """Times the finalists, XLA and the model's first choice for several rounds, and checks their results again."""
        guess = self.outcome.trials[1]  # XLA is trial 0.
        if guess.program is None and guess.status == "ok":
            guess.program = self.bench.compile(guess.config)
        final = [*self.alive, self.xla]
        if guess not in final and guess.status == "ok":
            final.append(guess)
        for trial in final:
            trial.survived = max(trial.survived for trial in final)
        for _ in range(self.settings.rounds):
            self._round(final)
        for trial in final:
            self._report(f"checking {trial.name}", 0.0)
            self._check(trial)

    def _check(self, trial: Trial) -> None:
        if trial.status != "ok":
            return
        try:
            error = self.bench.error_of(trial.program)
        except Exception as failure:
            self._failed(trial, failure)
            return
        self.stop.check()
        # Use np.max, since max() may drop a NaN.
        trial.error = error if trial.error is None else float(np.max([trial.error, error]))
        if trial.config is not None and not trial.error <= self.error_bound:
            trial.status = f"wrong: relative error {trial.error:.2g}, allowed {self.error_bound:.2g}"

    def _sample(self, trial: Trial) -> None:
        if trial.status != "ok":
            return
        try:
            us = self.bench.sample_us(trial.program)
        except Exception as failure:
            self._failed(trial, failure)
            return
        self.stop.check()
        trial.samples_us.append(us)

    def _round(self, trials: Sequence[Trial]) -> None:
        """Takes a sample of each trial."""
        # The order is random: under a power limit, a sample starts with the clock that the sample before has left.
        for index in self.random.permutation(len(trials)):
            self._check_deadline()
            self._report(f"timing {trials[index].name}", 0.0)
            self._sample(trials[index])
            self._report(f"timed {trials[index].name}", 0.1)

    def _keep(self, trials: list[Trial]) -> None:
        """Drops all trials but `trials` from the race."""
        for trial in self.alive:
            if trial not in trials:
                trial.program = None
        self.alive = [trial for trial in trials if trial.status == "ok"]

    def _check_deadline(self) -> None:
        if time.monotonic() > self.stop.deadline and self.outcome.ranked:
            raise Ended


def _one_line(error: BaseException) -> str:
    return f"error: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
