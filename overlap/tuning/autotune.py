"""`autotune`: measures configurations for every operation that a function calls, and keeps the fastest."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import pathlib
import time
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from overlap.choice import dispatch, tables
from overlap.choice.choose import Session
from overlap.choice.crossover import Measured
from overlap.choice.problem import Problem
from overlap.choice.session import explaining, session
from overlap.frame import arguments
from overlap.kernels.target import Target
from overlap.tuning import step
from overlap.tuning.progress import Progress, shown
from overlap.tuning.search import Outcome, search
from overlap.tuning.settings import Settings
from overlap.tuning.stop import stopped_by_ctrl_c

logger = logging.getLogger("overlap")


class Tuning:
    """The results of `autotune`.

    A `Tuning` is a context manager. For the problems that it tuned, calls that are traced inside it use its results
    instead of any table.

    Attributes:
      outcomes: the outcome of each problem, with all configurations that were tried.
      configs: the fastest configuration of each problem.
      path: the file that has the results; None if they were not written.
      step_ms: the milliseconds of the whole function with all products by kernels ("fused"), by XLA ("xla"), and by the
        choice for each (""); empty if it was not measured.
      chosen: what calls use inside `with`.
    """

    def __init__(
        self, outcomes: Sequence[Outcome], path: pathlib.Path | None, step_ms: Mapping[str, float] | None = None
    ) -> None:
        self.outcomes = tuple(outcomes)
        self.step_ms = dict(step_ms or {})
        self.path = path
        self.configs = {outcome.problem: outcome.result.config for outcome in self.outcomes if outcome.result}
        measured = {
            outcome.problem: Measured(outcome.problem, outcome.result.us, outcome.result.others["xla"])
            for outcome in self.outcomes
            if outcome.result and "xla" in outcome.result.others
        }
        way = step.faster(self.step_ms)
        # A problem that no configuration ran has no kernel to be measured, but may be XLA's.
        problems = self.configs if way == "fused" else [outcome.problem for outcome in outcomes]
        verdicts = dict.fromkeys(problems, way) if way else {}
        self.chosen = Session(dict(self.configs), measured, verdicts=verdicts)
        self._contexts: list[contextlib.AbstractContextManager[object]] = []

    def __enter__(self) -> Tuning:
        context = session(self.chosen)
        context.__enter__()
        self._contexts.append(context)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        self._contexts.pop().__exit__(kind, value, trace)

    def __str__(self) -> str:
        named = {"fused": "all by kernels", "xla": "all by XLA", "": "the choice"}
        ms = ", ".join(f"{named[way]} {ms:.2f} ms" for way, ms in self.step_ms.items())
        return "\n".join([*map(str, self.outcomes), *([f"the whole function: {ms}"] if ms else [])])


def problems_of(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Problem]:
    """The problems of all calls in `fn(*args, **kwargs)` that give no `config` and that the fused kernel can run.

    `fn` is traced, not run. Jitted functions inside it are traced again. Calls choose the kernel wherever it can run,
    so that the products of gradients are found, too; no kernel is traced.
    """
    collecting = Session(collects=True)
    try:
        with session(collecting), explaining(object()):
            jax.eval_shape(fn, *args, **kwargs)
    except Exception:
        # `fn` may run or compile calls itself, which only the usual choice allows (on a CPU it is XLA).
        with session(usual := Session()):
            jax.eval_shape(fn, *args, **kwargs)
        collecting.asked |= usual.asked
    return list(collecting.asked)


def autotune(
    fn: Callable[..., Any],
    *args: Any,
    max_configs: int | None = None,
    budget_s: float = float("inf"),
    path: str | pathlib.Path | None = None,
    save: bool = True,
    force: bool = False,
    progress: Progress | None = None,
    **kwargs: Any,
) -> Tuning:
    """Tunes every operation of this library that `fn(*args, **kwargs)` calls without a `config`.

    `fn` is traced to find the calls. Calls inside `jit`, `shard_map`, `grad` and `scan` are found too, and so are the
    products of gradients, whether or not XLA runs the forward products. Then each
    problem is measured separately against XLA, with random operands, on as many devices as the problem has. A
    configuration counts only if its result is right.

    At last `fn` itself is measured, on GPUs and if `args` are arrays: with all products by kernels, all by XLA, and by
    the choice for each. If one of the first two is fastest, it is the verdict for all these problems. Arguments that
    `fn` donates are copied before each call.

    The results go to the user's table, one JSON file for each kind of GPU in $OVERLAP_TUNING_DIR, else in
    ~/.cache/overlap/tuning. All later calls use it, in this process and in others. But a function that `jax.jit` has
    traced before keeps its compiled configuration: use the returned object as a context manager, or call
    `jax.clear_caches()`.

    Args:
      fn: a function of arrays.
      *args: the arguments of `fn`; arrays or `jax.ShapeDtypeStruct`s.
      max_configs: configurations to try per problem, at most (default: 12; on a CPU 3).
      budget_s: after this time, in seconds, the search ends with the results so far.
      path: a file to write to instead of the user's table.
      save: whether to write the results. On a CPU kernels run emulated, and only a file named by `path` is written.
      force: measure problems again that the file already has.
      progress: called with a text and the fraction that is done. None: a bar on a terminal (with rich), else lines of
        the logger "overlap" (level INFO).
      **kwargs: keyword arguments of `fn`.

    Returns:
      A `Tuning`. Printing it gives three lines for each problem. Inside `with`, calls use its results, and no
      table for these problems.

    Raises:
      ValueError: an argument makes no sense, `fn` makes no call to tune, or the file is not a table or cannot be
        written. It comes before any measurement.
      OSError: a result cannot be written.
      NotImplementedError: there are several processes. Tune in one process, on the same kind of GPU.
      KeyboardInterrupt: after Ctrl-C, when the results so far have been written.

    Examples:
      >>> with overlap.autotune(layer, x, w) as tuning:
      ...     y = jax.jit(layer)(x, w)
      >>> print(tuning)
    """
    if jax.process_count() > 1:
        raise NotImplementedError(
            f"`autotune` measures in one process, and there are {jax.process_count()}: tune in a single process on the "
            f"same kind of GPU, and give all processes its table with {tables.DIRECTORY_VARIABLE}"
        )
    arguments.function("fn", fn)
    if progress is not None:
        arguments.function("progress", progress)
    arguments.count("max_configs", max_configs)
    arguments.flag("save", save)
    arguments.flag("force", force)
    if isinstance(budget_s, bool) or not isinstance(budget_s, (int, float)) or not budget_s > 0:
        raise ValueError(f"`budget_s` must be seconds, more than 0, got {arguments.shown(budget_s)}: leave it out")
    if path is not None and not isinstance(path, (str, pathlib.Path)):
        raise ValueError(f"`path` must be None or the path of a file, got {arguments.shown(path)}: leave it out")
    if path is not None and save:
        require_writable(path, "`path`")
    problems = problems_of(fn, *args, **kwargs)
    if not problems:
        raise ValueError(
            "`fn` makes no call of an operation of this library that leaves `config` open and that the fused kernel "
            "can serve, so there is nothing to tune: overlap.explain says what is in the way of a call"
        )
    target = dispatch.target()
    file = result_file(target, path) if save else None
    settings = dataclasses.replace(Settings.for_platform(target.platform, max_configs), budget_s=budget_s, force=force)
    if note := emulation_note(problems, target, settings):
        logger.warning("autotune: %s", note)
    lines = shown(lambda line: logger.info("autotune: %s", line))
    with lines if progress is None else contextlib.nullcontext(progress) as report:
        outcomes = tune(problems, target, settings, file, progress=report)
    if any(outcome.interrupted for outcome in outcomes):
        raise KeyboardInterrupt
    tuning = Tuning(outcomes, file)
    if target.platform == "cpu" or not step.can_run((args, kwargs)):
        return tuning
    return of_whole(tuning, fn, args, kwargs)


def of_whole(tuning: Tuning, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tuning:
    """Measures the whole function as well, and writes which way is fastest into the table."""
    problems = [outcome.problem for outcome in tuning.outcomes]
    ms = step.times_ms(fn, args, kwargs, problems, tuning.chosen)
    if tuning.path is not None:
        way = step.faster(ms)
        results = [outcome.result for outcome in tuning.outcomes if outcome.result is not None]
        tables.add(tuning.path, [dataclasses.replace(result, step=way) for result in results])
    return Tuning(tuning.outcomes, tuning.path, ms)


def emulation_note(problems: Sequence[Problem], target: Target, settings: Settings) -> str:
    """Tells the user, before a search on a CPU, that kernels are emulated and what that takes; "" on a GPU."""
    if target.platform != "cpu":
        return ""
    largest = max(problems, key=lambda problem: problem.flops_per_device * problem.devices)
    return (
        f"on a CPU the kernels run emulated, so this checks results, and its times say nothing about a GPU's; up to "
        f"{settings.max_configs} configurations of {len(problems)} problem(s), the largest {largest}: above about 1000 "
        "in each dimension expect minutes per configuration (`max_configs` and `budget_s` limit it)"
    )


def require_writable(path: str | pathlib.Path, name: str) -> None:
    """Checks that a table can be written to a file. The file's folder must exist.

    Args:
      path: the file.
      name: the argument or option that names the file, for the error message.

    Raises:
      ValueError: the file cannot be written, or it exists and is not a table.
    """
    path = pathlib.Path(path)
    if path.is_dir() or not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise ValueError(
            f"{name} must be a file that can be written, got {str(path)!r}: name a file in a folder that can be written"
        )
    if path.exists():
        tables.read(path)


def result_file(target: Target, path: str | pathlib.Path | None) -> pathlib.Path | None:
    """The file for the results: `path`, else the user's table; None for emulated results without a `path`.

    Raises:
      ValueError: the user's table cannot be written.
    """
    if path is not None or target.platform == "cpu":
        return None if path is None else pathlib.Path(path)
    file = tables.user_file(target.kind)
    why = "there is no home directory"
    try:
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            require_writable(file, "it")
            return file
    except (OSError, ValueError) as error:
        why = str(error)
    raise ValueError(
        f"the tuning table {file or ''} cannot be written, and nothing has been measured yet: {why}; name a folder "
        f"with {tables.DIRECTORY_VARIABLE}, or a file with `path` (--out)"
    )


def tune(
    problems: Sequence[Problem],
    target: Target,
    settings: Settings,
    file: pathlib.Path | None,
    *,
    progress: Progress = lambda text, fraction: None,
    found: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Searches for each problem in turn, and writes each result at once.

    If the file already has a complete result for a problem, the problem is measured again only with `settings.force`.
    The remaining time is shared equally by the remaining problems.

    Args:
      problems: the problems to tune.
      target: the kind of the devices.
      settings: how much is searched.
      file: the table; None: nothing is written.
      progress: called with a text and the fraction that is done.
      found: called with each outcome before the outcome is written, so that none is lost by an exception.

    Returns:
      The outcomes. After Ctrl-C, the outcomes so far; the last one is `interrupted`.

    Raises:
      ValueError: the file is not a table, an operation cannot be tuned, there are too few devices, or
        `settings.budget_s` is not positive.
      OSError: a result cannot be written.
    """
    if not settings.budget_s > 0:
        raise ValueError(f"`budget_s` must be a number of seconds, more than 0, got {settings.budget_s}")
    for problem in problems:
        if problem.devices > len(jax.devices()):
            raise ValueError(f"{problem}: there are {len(jax.devices())} devices")
    known = {} if file is None or not file.exists() else {entry.key: entry for entry in tables.read(file)}
    end = time.monotonic() + settings.budget_s
    outcomes: list[Outcome] = []

    def note(outcome: Outcome) -> None:
        outcomes.append(outcome)
        found(outcome)

    with stopped_by_ctrl_c() as stop:
        for index, problem in enumerate(problems):
            old = known.get((problem, target.kind, jax.__version__))
            if old is not None and old.complete and problem.accepts(old.config, target) and not settings.force:
                note(Outcome(problem, note="already measured", result=old))
                continue
            now = time.monotonic()
            if outcomes and now > end:
                note(Outcome(problem, complete=False, note="the budget was spent before its turn"))
                continue

            def report(text: str, fraction: float, index: int = index, problem: Problem = problem) -> None:
                progress(f"{problem.shape}: {text}", (index + fraction) / len(problems))

            stop.deadline = now + (end - now) / (len(problems) - index)
            # Each problem has a mesh of its own, whatever mesh the caller has set.
            with jax.set_mesh(jax.sharding.Mesh(np.empty((), object), ())):
                outcome = search(
                    problem, target, jax.devices()[: problem.devices], settings, stop=stop, progress=report
                )
            note(outcome)
            if file is not None and outcome.result is not None:
                tables.add(file, [outcome.result])
            if stop.interrupted:
                outcome.interrupted = True
                break
    return outcomes
