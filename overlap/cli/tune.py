"""`python -m overlap tune`: measures configurations for a list of problems, and writes a tuning table."""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Sequence

import jax
from rich.console import Console
from rich.table import Table

from overlap import _compat, _cuda, emulation
from overlap.choice import dispatch, space
from overlap.choice.choose import why_no_config
from overlap.choice.model import predicted_us, waves
from overlap.choice.problem import Problem, default_out_dtype
from overlap.cli import tables
from overlap.kernels.operations import BY_NAME
from overlap.kernels.target import Target
from overlap.tuning import autotune, search
from overlap.tuning.operations import require_equal_parts, require_layout
from overlap.tuning.progress import shown

# The GPU that the emulator stands for: Hopper, Blackwell.
_STANDS_FOR = Target("gpu", "NVIDIA H200", 132), Target("gpu", "NVIDIA B200", 148)
# The most emulated devices. Each needs at least one thread.
_MOST_EMULATED = 64


def run(arguments: argparse.Namespace) -> int:
    """Runs the command.

    Returns:
      The exit status: 0; 1 if a problem has no result, or a result could not be written; 2 for wrong arguments; 130
      after Ctrl-C; 143 after SIGTERM.
    """
    errors = Console(stderr=True)
    outcomes: list[search.Outcome] = []
    try:
        # Check this before anything that takes time.
        if arguments.out is not None:
            autotune.require_writable(arguments.out, "--out")
        target = _start(arguments)
        problems = _problems(arguments)
        settings = search.Settings.for_platform(target.platform, arguments.max_configs)
        if arguments.dry_run:
            listed = target if target.platform == "gpu" else _STANDS_FOR[target.is_blackwell]
            return _dry_run(problems, listed, settings)
        file = autotune.result_file(target, arguments.out)
    except (ValueError, NotImplementedError, RuntimeError) as error:
        return _refused(errors, error)
    if note := autotune.emulation_note(problems, target, settings):
        errors.print(f"tune: {note}", style="yellow", markup=False, highlight=False)
    budget_s = float("inf") if arguments.budget_s is None else arguments.budget_s
    try:
        with shown(lambda line: errors.print(f"… {line}", soft_wrap=True, markup=False, highlight=False)) as progress:
            autotune.tune(
                problems,
                target,
                settings,
                file,
                budget_s=budget_s,
                force=arguments.force,
                progress=progress,
                found=outcomes.append,
            )
    except (ValueError, NotImplementedError) as error:
        return _refused(errors, error)
    finally:
        # However the search ended, print what it has found.
        if outcomes:
            _print(outcomes, target, file, len(problems))
    if ended_by := next((outcome.interrupted for outcome in outcomes if outcome.interrupted), 0):
        return 128 + ended_by
    return int(any(outcome.result is None or outcome.unwritten for outcome in outcomes))


def _refused(errors: Console, error: Exception) -> int:
    errors.print(f"tune: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
    return 2


def _start(arguments: argparse.Namespace) -> Target:
    """Chooses the GPUs, or emulated devices if there are no GPUs. Returns what kind of device they are."""
    if arguments.op not in BY_NAME:
        raise ValueError(f"--op must be one of {', '.join(BY_NAME)}, got {arguments.op!r}")
    if not _compat.backends_are_initialized():
        if not _cuda.visible_gpus():
            if (arguments.devices or 0) > _MOST_EMULATED:
                raise ValueError(
                    f"--devices must be at most {_MOST_EMULATED} where devices are emulated, got {arguments.devices}"
                )
            jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", arguments.devices or 2)
    target = dispatch.target()
    if arguments.devices is not None and arguments.devices > len(jax.devices()):
        raise ValueError(f"--devices must be at most {len(jax.devices())} on this machine, got {arguments.devices}")
    if target.platform == "cpu":
        emulation.enable()  # In the main thread, so that Ctrl-C ends a launch.
    return target


def _problems(arguments: argparse.Namespace) -> list[Problem]:
    """The problems that the arguments name, each once, in the order of the command line."""
    devices = 1 if arguments.op == "matmul" else arguments.devices or len(jax.devices())
    problems: dict[Problem, None] = {}
    for m, n, k, own_dtype in arguments.shapes:
        dtype = own_dtype or arguments.dtype
        out_dtype = arguments.out_dtype or default_out_dtype(dtype)
        for layout in arguments.layouts:
            require_layout(arguments.op, layout, "--layouts")
            problem = Problem(arguments.op, m, n, k, dtype, out_dtype, devices, layout)
            require_equal_parts(problem, "--shapes")
            problems[problem] = None
    return list(problems)


def _dry_run(problems: Sequence[Problem], target: Target, settings: search.Settings) -> int:
    """Prints the configurations that would be tried for each problem. Returns the exit status."""
    for problem in problems:
        configs = space.candidates(problem, target)
        # Not the table's title, since rich would wrap a title to the table's width.
        console = Console()
        console.print(
            f"{problem}: {len(configs)} configurations for {target.kind}",
            style="italic",
            soft_wrap=True,
            markup=False,
            highlight=False,
        )
        table = Table(show_lines=console.width < 80)  # With few columns, configurations take several lines.
        table.add_column("configuration", overflow="fold")
        for heading in ("waves", "predicted, µs"):
            table.add_column(heading, justify="right")
        for config in configs[: settings.max_configs]:
            us = predicted_us(config, problem, target)
            table.add_row(space.differences(config), f"{waves(config, problem, target):.2f}", f"{us:.1f}")
        if configs:
            console.print(table)
        else:
            console.print(_why_none(problem, target), soft_wrap=True, markup=False, highlight=False)
    return 0


def _why_none(problem: Problem, target: Target) -> str:
    """Says why the fused kernel has no configuration for this problem."""
    # The reason speaks of the operation's arguments.
    option = "; the option for it is --layouts nt" if problem.itemsize == 1 and problem.layout != "nt" else ""
    return f"{why_no_config(problem, target)}{option}"


def _print(outcomes: Sequence[search.Outcome], target: Target, file: pathlib.Path | None, problems: int) -> None:
    """Prints the outcomes so far, of `problems` problems, and where they are written."""
    console = Console()
    title = f"{target.kind}, jax {jax.__version__}"
    emulated = target.platform == "cpu"
    caption = (
        "Emulated: the results were checked; the times say nothing about a GPU's."
        if emulated
        else ("Per call, in a loop on the device; medians of interleaved rounds. TFLOP/s per device.")
    )
    rows = [_row(outcome) for outcome in outcomes]
    tables.show(console, title, _HEADINGS, rows, text_columns=("problem", "configuration", "note"), caption=caption)
    for outcome in outcomes:
        for trial in outcome.trials:
            if trial.status != "ok":
                console.print(f"{outcome.problem.shape} {trial.name}: {trial.status}", markup=False, highlight=False)
    if len(outcomes) < problems:
        console.print(f"Interrupted: {problems - len(outcomes)} problems were not begun.")
    text, why = autotune.unwritten(outcomes)
    where = "Nothing was written: name a file with --out." if file is None else f"The results are in {file}"
    if text:
        where = f"tune: {file} could not be written ({why}). What it lacks, as a table:"
    console.print(where, style="red" if text else None, soft_wrap=True, markup=False, highlight=False)
    if text:
        print(text, end="", flush=True)  # Unchanged, so that the user can save it as a file.


_HEADINGS = ("problem", "configuration", "µs", "TFLOP/s", "XLA, µs", "XLA / this", "heuristic / this", "tried", "note")


def _row(outcome: search.Outcome) -> list[str]:
    """The cells of an outcome, "–" where there is no value."""
    entry = outcome.result
    wrong = sum(trial.status != "ok" for trial in outcome.trials)
    notes = [outcome.note, f"{wrong} failed" if wrong else "", "" if outcome.complete else "partial"]
    note = "; ".join(filter(None, notes))
    if entry is None:
        return [str(outcome.problem), *["–"] * (len(_HEADINGS) - 2), note]
    xla, guess = entry.others.get("xla"), entry.others.get("heuristic")
    return [
        str(outcome.problem),
        space.differences(entry.config),
        f"{entry.us:.1f}",
        f"{outcome.problem.flops_per_device / entry.us / 1e6:.1f}",
        *(("–", "–") if xla is None else (f"{xla:.1f}", f"{xla / entry.us:.3f}")),
        "–" if guess is None else f"{guess / entry.us:.3f}",
        str(entry.tried),
        note,
    ]
