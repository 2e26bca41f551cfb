"""Looks up the configuration for a call that names none. Nothing is measured."""

from __future__ import annotations

import dataclasses
import logging
import os
import pathlib

import jax

from overlap.choice import crossover, tables
from overlap.choice.crossover import Measured
from overlap.choice.problem import Problem
from overlap.choice.rates import rates_of
from overlap.choice.session import session
from overlap.choice.space import heuristic, spills
from overlap.kernels.config import Config, default_config
from overlap.kernels.target import Target

logger = logging.getLogger("overlap")
_missed: set[tuple[Problem, str]] = set()


@dataclasses.dataclass(eq=False)
class Session:
    """An active `overlap.autotune`. It notes every problem that is asked about, and its results come before any table.

    Attributes:
      configs: the configuration for each tuned problem.
      measured: the times of these configurations and of XLA.
      asked: the problems, in the order in which they were first asked about (an ordered set).
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
      (config, source). The source is one of these:
        "tuned"      the active `overlap.autotune` has measured the problem
        "table …"    the user's table, or "shipped table …": names the file, the entry, and the versions of jax and of
                     this library that the entry was measured with, if others run now
        "heuristic"  the model
        "default"    no configuration can run the problem; the check of this one says why
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
    # In a session problems are collected to be tuned, so a miss is not logged.
    if active is None and target.platform == "gpu" and (problem, target.kind) not in _missed:
        _missed.add((problem, target.kind))
        devices = f" --devices {problem.devices}" if problem.devices > 1 else ""
        command = f"python -m overlap tune --op {problem.op} --shapes {problem.shape} --dtype {problem.dtype}{devices}"
        logger.info(
            "%s is in no tuning table for %s: the heuristic takes %s. To measure: %s",
            problem,
            target.kind,
            config,
            command,
        )
    return config, "heuristic"


def xla_is_faster(problem: Problem, target: Target) -> str | None:
    """Why XLA is the better choice for a call with the configuration of `choose_config`; None if it is not.

    A measured configuration was measured together with XLA, and this pair of times decides. Where no pair was measured,
    those of similar problems decide (`overlap.choice.crossover`).
    """
    active: Session | None = session.value
    if active is not None and problem in active.measured:
        return active.measured[problem].says_xla
    source, entry = _entry(problem, target)
    if entry is not None and "xla" in entry.others:
        slower = Measured(entry.problem, entry.us, entry.others["xla"]).says_xla
        return slower and f"{slower} ({source})"
    if not rates_of(target).measured:
        return crossover.NOTHING_MEASURED
    return crossover.xla_is_faster(problem)


def _entry(problem: Problem, target: Target) -> tuple[str, tables.Entry | None]:
    """The entry for a problem in the tables (None: there is none), and in words which file and measurement it is of."""
    if target.platform == "gpu":
        for name, files in (("table", _user_files(target)), ("shipped table", tables.shipped_files())):
            for file in files:
                entry = tables.find(tables.load(file), problem, target, jax.__version__)
                # A configuration measured with another version of jax may need more registers than there are with this
                # one.
                if entry is not None and not spills(entry.config):
                    other = entry.measured_elsewhere(jax.__version__)
                    return f"{name} {file}: {entry.problem.shape}{f', {other}' if other else ''}", entry
    return "", None


def _user_files(target: Target) -> list[pathlib.Path]:
    # The processes of one program must choose the same kernels. Only a folder that the user named explicitly is taken
    # to be the same for all of them.
    if jax.process_count() > 1 and not os.environ.get(tables.DIRECTORY_VARIABLE):
        return []
    path = tables.user_file(target.kind)
    return [] if path is None else [path]
