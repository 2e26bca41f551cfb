"""Chooses the configuration of a call without `config=`, and whether XLA is faster. Nothing is measured here."""

from __future__ import annotations

import dataclasses
import logging
import os
import pathlib

import jax

from overlap.choice import crossover, tables
from overlap.choice.crossover import Cause, Measured, Verdict
from overlap.choice.problem import Problem
from overlap.choice.rates import gpu_of, rates_of
from overlap.choice.session import session
from overlap.choice.space import heuristic
from overlap.kernels.config import Config
from overlap.kernels.hopper.limits import spills
from overlap.kernels.target import Target

# Every device has room for this configuration, so its check names what a problem lacks.
_LEAST_CONFIG = Config(tile_n=128, stages=2)
logger = logging.getLogger("overlap")
_missed: set[tuple[Problem, str]] = set()


@dataclasses.dataclass(eq=False)
class Session:
    """An active `overlap.autotune`. It records each problem that needs a configuration; its results come before tables.

    Attributes:
      configs: the configuration for each tuned problem.
      measured: the times of these configurations and of XLA.
      asked: the problems that `choose_config` was called with, in the order of their first calls. The keys serve as an
        ordered set; the values are None.
      verdicts: for each problem, what runs it ("fused" or "xla"), since that was found for a whole step.
      collects: whether the session only collects the problems of a function that is traced. Then the fused kernel is
        chosen wherever it can run: its backward products are to be collected as well.
    """

    configs: dict[Problem, Config] = dataclasses.field(default_factory=dict)
    measured: dict[Problem, Measured] = dataclasses.field(default_factory=dict)
    asked: dict[Problem, None] = dataclasses.field(default_factory=dict)
    verdicts: dict[Problem, str] = dataclasses.field(default_factory=dict)
    collects: bool = False


def choose_config(problem: Problem, target: Target) -> tuple[Config, str]:
    """Returns the configuration for a call, and where it comes from.

    The first of these that has a configuration is used: the active `overlap.autotune`, the user's table, the tables
    shipped with the library, the heuristic. Nothing is measured or compiled here. If no table has an entry for the
    problem, this is logged once per problem (INFO, logger "overlap").

    Args:
      problem: the operation and the sizes of the call.
      target: the device that the call is for.

    Returns:
      (config, source). The source is one of these:
        "tuned"      the active `overlap.autotune` has measured the problem
        "table …"    the user's table, or "shipped table …", a table that comes with the library. The text names the
                     file and the entry. If the entry was measured with other versions of jax or of this library than
                     run now, the text names both versions.
        "heuristic"  the model (`space.heuristic`)
        "default"    the smallest configuration, because none can run the problem. Its check says why.
    """
    active: Session | None = session.value
    if active is not None and heuristic(problem, target) is not None:
        active.asked[problem] = None
        config = active.configs.get(problem)
        if config is not None and problem.accepts(config, target):
            return config, "tuned"
    source, entry = _entry(problem, target)
    if entry is not None:
        return entry.config, source
    config = heuristic(problem, target)
    if config is None:
        return _LEAST_CONFIG, "default"
    # A session collects the problems in order to tune them, so inside a session this message is not logged.
    if active is None and target.platform == "gpu" and (problem, target.kind) not in _missed:
        _missed.add((problem, target.kind))
        devices = f" --devices {problem.devices}" if problem.devices > 1 else ""
        devices += f" --groups {problem.batch}" if problem.spec.groups else ""
        command = f"python -m overlap tune --op {problem.op} --shapes {problem.shape} --dtype {problem.dtype}{devices}"
        logger.info(
            "%s is in no tuning table for %s: the heuristic takes %s. To measure: %s",
            problem,
            target.kind,
            config,
            command,
        )
    return config, "heuristic"


def why_no_config(problem: Problem, target: Target) -> str:
    """Says why no configuration of the fused kernel can run a problem (`space.candidates` is empty)."""
    try:
        problem.check(_LEAST_CONFIG, target)
    except (ValueError, NotImplementedError) as error:
        return str(error)
    return "no configuration of the search fits this problem"


def is_collecting() -> bool:
    """Whether the active session only collects problems (`Session.collects`)."""
    return session.value is not None and session.value.collects


def settled(problem: Problem) -> str | None:
    """What runs a problem, "fused" or "xla", if the active session says so; else None."""
    return None if session.value is None else session.value.verdicts.get(problem)


def _of_step(way: str, source: str) -> Verdict:
    by = "by XLA" if way == "xla" else "by kernels"
    return Verdict(way == "xla", f"a whole step was measured to be fastest {by} alone ({source})", Cause.IN_STEP)


def verdict(problem: Problem, target: Target) -> Verdict:
    """Returns whether XLA runs instead of the fused kernel, and why: which was or should be faster.

    The fused kernel is assumed to run with the configuration of `choose_config`. If that configuration was measured,
    XLA was measured in the same run, and these two times decide. Otherwise the times measured for similar problems
    decide (`overlap.choice.crossover`).
    """
    active: Session | None = session.value
    if (way := settled(problem)) is not None:
        return _of_step(way, "overlap.autotune")
    if active is not None and problem in active.measured:
        return active.measured[problem].verdict
    source, entry = _entry(problem, target)
    if entry is not None and entry.step:
        return _of_step(entry.step, source)
    if entry is not None and "xla" in entry.others:
        measured = Measured(entry.problem, entry.us, entry.others["xla"]).verdict
        return measured._replace(reason=f"{measured.reason} ({source})")
    if not rates_of(target).measured:
        return crossover.NOTHING_MEASURED
    if problem.spec.xla_wastes:
        return Verdict(False, problem.spec.xla_wastes, Cause.PREDICTED)
    return crossover.verdict(problem, gpu_of(target))


def _entry(problem: Problem, target: Target) -> tuple[str, tables.Entry | None]:
    """Returns (source, entry): the table entry for a problem, and a text that names its file; ("", None) if none."""
    if target.platform == "gpu":
        for name, files in (("table", _user_files(target)), ("shipped table", tables.shipped_files())):
            for file in files:
                entry = tables.find(tables.load(file), problem, target, jax.__version__)
                # An entry may be from another version of jax. With the running version its configuration may need more
                # registers than a thread has; then the entry is not used.
                if entry is not None and not spills(entry.config):
                    other = entry.measured_elsewhere(jax.__version__)
                    return f"{name} {file}: {entry.problem.shape}{f', {other}' if other else ''}", entry
    return "", None


def _user_files(target: Target) -> list[pathlib.Path]:
    # All processes of one program must choose the same kernels, so they must read the same tables. With several
    # processes, the user's table is read only if the user has named its folder in the environment: only then is the
    # folder assumed to have the same content for all processes.
    if jax.process_count() > 1 and not os.environ.get(tables.DIRECTORY_VARIABLE):
        return []
    path = tables.user_file(target.kind)
    return [] if path is None else [path]
