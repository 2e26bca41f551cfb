"""The configuration of a call that names none: looked up, never measured."""

from __future__ import annotations

import dataclasses
import logging
import os
import pathlib

import jax

from overlap.choice import crossover, tables
from overlap.choice.crossover import Measured
from overlap.choice.problem import Problem
from overlap.choice.session import session
from overlap.choice.space import heuristic, spills
from overlap.kernels.config import Config, default_config
from overlap.kernels.target import Target

logger = logging.getLogger("overlap")
_missed: set[tuple[Problem, str]] = set()


@dataclasses.dataclass(eq=False)
class Session:
    """What choices are made under while it is active: notes every problem asked about, and may know better.

    Attributes:
      configs: comes before any table.
      measured: the times of these configurations and of XLA.
      asked: the problems, in the order in which they were first asked about.
    """

    configs: dict[Problem, Config] = dataclasses.field(default_factory=dict)
    measured: dict[Problem, Measured] = dataclasses.field(default_factory=dict)
    asked: dict[Problem, None] = dataclasses.field(default_factory=dict)


def choose_config(problem: Problem, target: Target) -> tuple[Config, str]:
    """The configuration for a call, and where it comes from.

    In this order: the active `overlap.autotune` result, the user's table, the table shipped with the library, the
    heuristic. Nothing is measured or compiled here. A miss in the tables is logged once per problem (INFO, logger
    "overlap").

    Args:
      problem: the call.
      target: the device that it is for.

    Returns:
      (config, source). The source is "tuned", "heuristic", "default" if no configuration can run the problem (the check
      of that config then says what is in the way), or begins with "table" or "shipped table": it then names the file,
      the entry, and another version of jax or of this library that it was measured with.
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
        return default_config(problem.dtype, block_scaled=problem.block_scaled), "default"
    # While problems are collected to be tuned, a miss is no news.
    if active is None and target.platform == "gpu" and (problem, target.kind) not in _missed:
        _missed.add((problem, target.kind))
        logger.info(
            "%s is in no tuning table for %s: the heuristic takes %s. To measure: python -m overlap tune --op %s "
            "--shapes %s --dtype %s%s", problem, target.kind, config, problem.op, problem.shape, problem.dtype,
            f" --devices {problem.devices}" if problem.devices > 1 else "",
        )  # fmt: skip
    return config, "heuristic"


def xla_is_faster(problem: Problem, target: Target) -> str | None:
    """Why XLA is the better choice for a call with the configuration of `choose_config`; None if it is not.

    Who measured that configuration has measured XLA as well, and that pair of times decides. All other problems are
    judged by those around them (`overlap.choice.crossover`).
    """
    active: Session | None = session.value
    if active is not None and problem in active.measured:
        return active.measured[problem].says_xla
    source, entry = _entry(problem, target)
    if entry is not None and "xla" in entry.others:
        slower = Measured(entry.problem, entry.us, entry.others["xla"]).says_xla
        return slower and f"{slower} ({source})"
    if target.is_blackwell:
        return crossover.NOTHING_MEASURED
    return crossover.xla_is_faster(problem)


def _entry(problem: Problem, target: Target) -> tuple[str, tables.Entry | None]:
    """What the tables have for a problem, and where that stands and was measured."""
    if target.platform == "gpu":
        for name, files in (("table", _user_files(target)), ("shipped table", tables.shipped_files())):
            for file in files:
                entry = tables.find(tables.load(file), problem, target, jax.__version__)
                # What was measured with another version of jax may have too many registers with this one.
                if entry is not None and not spills(entry.config):
                    other = entry.measured_elsewhere(jax.__version__)
                    return f"{name} {file}: {entry.problem.shape}{f', {other}' if other else ''}", entry
    return "", None


def _user_files(target: Target) -> list[pathlib.Path]:
    # Processes of one program must agree on their kernels. A folder that was named is taken to be one that all see.
    if jax.process_count() > 1 and not os.environ.get(tables.DIRECTORY_VARIABLE):
        return []
    path = tables.user_file(target.kind)
    return [] if path is None else [path]
