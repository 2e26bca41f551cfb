"""`python -m overlap tune`: measures configurations for a list of problems, and writes a tuning table."""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
from collections.abc import Sequence

import jax

from overlap import emulation
from overlap.choice import dispatch, space
from overlap.choice.choose import why_no_config
from overlap.choice.model import predicted_us, waves
from overlap.choice.problem import Problem, default_out_dtype
from overlap.cli.arguments import groups_of
from overlap.cli.console import console, show
from overlap.cli.devices import start
from overlap.kernels.operations import BY_NAME
from overlap.kernels.target import Target
from overlap.tuning import autotune, search
from overlap.tuning.progress import shown
from overlap.tuning.settings import Settings

# The GPU that the emulator stands for: Hopper, Blackwell.
_STANDS_FOR = Target("gpu", "NVIDIA H200", 132), Target("gpu", "NVIDIA B200", 148)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command.

    Returns:
      The exit status: 0; 1 if a problem has no result, or a result could not be written; 2 for wrong arguments; 130
      after Ctrl-C.
    """
    errors = console(stderr=True)
    outcomes: list[search.Outcome] = []
    try:
        # Check this before anything that takes time.
        if arguments.out is not None:
            autotune.require_writable(arguments.out, "--out")
        devices, _ = start("tune", arguments.devices, emulated=2)
        target = dispatch.target()
        if target.platform == "cpu":
            emulation.enable()  # In the main thread, so that Ctrl-C ends a launch.
        problems = _problems(arguments, len(devices))
        settings = dataclasses.replace(
            Settings.for_platform(target.platform, arguments.max_configs),
            budget_s=arguments.budget_s,
            force=arguments.force,
        )
        if arguments.dry_run:
            listed = target if target.platform == "gpu" else _STANDS_FOR[target.is_blackwell]
            return _dry_run(problems, listed, settings)
        file = autotune.result_file(target, arguments.out)
        if note := autotune.emulation_note(problems, target, settings):
            errors.print(f"tune: {note}", style="yellow")
        with shown(lambda line: errors.print(f"… {line}")) as progress:
            autotune.tune(
                problems,
                target,
                settings,
                file,
                progress=progress,
                found=outcomes.append,
            )
    finally:
        # However the search ended, print what it has found.
        if outcomes:
            _print(outcomes, target, file, len(problems))  # pyright: ignore[reportPossiblyUnboundVariable]
    if any(outcome.interrupted for outcome in outcomes):
        return 130
    return int(any(outcome.result is None for outcome in outcomes))


def _problems(arguments: argparse.Namespace, available: int) -> list[Problem]:
    """The problems that the arguments name, each once, in the order of the command line."""
    op = arguments.op
    spec = BY_NAME[arguments.op]
    devices = available if spec.transports else 1
    groups = groups_of(arguments)
    problems: dict[Problem, None] = {}
    for m, n, k, own_dtype in arguments.shapes:
        dtype = own_dtype or arguments.dtype
        out_dtype = arguments.out_dtype or default_out_dtype(dtype)
        for layout in arguments.layouts:
            if layout not in spec.layouts:
                raise ValueError(f"--layouts must be one of {', '.join(spec.layouts)} for {op}, got {layout}")
            if {"m": m, "n": n}.get(spec.scatters, 0) % devices:
                raise ValueError(f"--shapes: {spec.scatters} of {op} must be a multiple of the {devices} devices")
            problems[Problem(op, m, n, k, dtype, out_dtype, devices, layout, groups)] = None
    return list(problems)


def _dry_run(problems: Sequence[Problem], target: Target, settings: Settings) -> int:
    """Prints the configurations that would be tried for each problem. Returns the exit status."""
    out = console()
    for problem in problems:
        configs = space.candidates(problem, target)
        title = f"{problem}: {len(configs)} configurations for {target.kind}"
        rows = [
            (
                space.differences(config),
                f"{waves(config, problem, target):.2f}",
                f"{predicted_us(config, problem, target):.1f}",
            )
            for config in configs[: settings.max_configs]
        ]
        show(out, title, ("configuration", "waves", "predicted, µs"), rows, texts=1)
        if not configs:
            out.print(_why_none(problem, target))
    return 0


def _why_none(problem: Problem, target: Target) -> str:
    """Says why the fused kernel has no configuration for this problem."""
    # The reason speaks of the operation's arguments.
    option = "; the option for it is --layouts nt" if problem.itemsize == 1 and problem.layout != "nt" else ""
    return f"{why_no_config(problem, target)}{option}"


def _print(outcomes: Sequence[search.Outcome], target: Target, file: pathlib.Path | None, problems: int) -> None:
    """Prints the outcomes so far, of `problems` problems, and where they are written."""
    out = console()
    out.print(f"{target.kind}, jax {jax.__version__}", style="italic")
    for outcome in outcomes:
        out.print(str(outcome))
        for trial in outcome.trials:
            if trial.status != "ok":
                out.print(f"    {trial.name}: {trial.status}")
    if target.platform == "cpu":
        out.print("Emulated: the results were checked; the times say nothing about a GPU's.")
    else:
        out.print("Per call, in a loop on the device; medians of interleaved rounds. TFLOP/s per device.")
    if len(outcomes) < problems:
        out.print(f"Interrupted: {problems - len(outcomes)} problems were not begun.")
    out.print("Nothing was written: name a file with --out." if file is None else f"The results are in {file}")
