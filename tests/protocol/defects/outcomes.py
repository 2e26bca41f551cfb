"""What the emulator, or the result, says of a defect in a kernel."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

import jax

from overlap.emulation import EmulationError, emulate
from tests.protocol.defects import source
from tests.protocol.defects.kernels import KERNELS, ONE_AT_A_TIME
from tests.protocol.defects.source import Defect
from tests.protocol.exact import Kernel

Outcome = Literal["reported", "wrong numbers", "refused", "unnoticed"]
# How a kernel is run until its defect shows: the first schedules find most.
SCHEDULES = (
    {"completion": "eager", "scheduler": "pct", "laps": 2},
    {"completion": "late", "scheduler": "pct", "laps": 2},
    {"completion": "random", "scheduler": "random", "laps": 2},
    {"completion": "eager", "scheduler": "pct", "resident": 1},
    {"completion": "late", "scheduler": "random", "laps": 3},
    {"completion": "random", "scheduler": "pct", "laps": 1},
    {"completion": "eager", "seed": 2},
)
_STEPS = 30_000


def run(name: str, cores: int, kernel: Kernel, schedule: int) -> tuple[Outcome, str]:
    """Runs a kernel under a schedule. Returns what shows, and the report."""
    settings = {"seed": schedule} | SCHEDULES[schedule]
    if name not in ONE_AT_A_TIME:
        settings.pop("resident", None)
    try:
        with emulate(cores=cores, step_limit=_STEPS, **settings) as emulated:
            result = jax.block_until_ready(kernel.call())
            emulated.check()
    except EmulationError as report:
        return "reported", str(report)
    except Exception as error:  # The kernel cannot be traced, or jax refuses it.
        return "refused", str(error)
    try:
        kernel.check(result)
    except AssertionError as difference:
        return "wrong numbers", str(difference)
    return "unnoticed", ""


def first_that_shows(
    changed: contextlib.AbstractContextManager[None],
    kernels: Iterable[tuple[str, Callable[[], Kernel], int]],
    schedules: Iterable[int] = range(len(SCHEDULES)),
) -> Iterator[tuple[Outcome, str, int, str]]:
    """Runs changed kernels until the change shows. Yields how, in which kernel and schedule, and the report."""
    with changed:
        made = [(name, cores, make()) for name, make, cores in kernels]
        for schedule in schedules:
            for name, cores, kernel in made:
                shown, text = run(name, cores, kernel, schedule)
                if shown != "unnoticed":
                    yield shown, name, schedule, text
                    return


def outcome(defect: Defect, names: Iterable[str], schedules: Iterable[int]) -> tuple[Outcome, str, int]:
    """Runs the kernels of these names with the defect. Returns how it shows, in which kernel, under which schedule."""
    kernels = [(name, *KERNELS[name]) for name in names]
    for shown, name, schedule, _ in first_that_shows(source.injected(defect), kernels, schedules):
        return shown, name, schedule
    return "unnoticed", "", -1


def _lines_of(name: str) -> set[tuple[str, int]]:
    """Returns the lines of the library that tracing a kernel runs: the file and the number of each."""
    monitoring, tool = sys.monitoring, sys.monitoring.PROFILER_ID
    found: set[tuple[str, int]] = set()

    def note(code: types.CodeType, line: int) -> object:
        if "/overlap/" in code.co_filename:
            found.add((code.co_filename, line))
        return monitoring.DISABLE

    monitoring.use_tool_id(tool, "defects")
    monitoring.register_callback(tool, monitoring.events.LINE, note)
    monitoring.set_events(tool, monitoring.events.LINE)
    try:
        make, cores = KERNELS[name]
        shown, text = run(name, cores, make(), 0)
        assert shown == "unnoticed", f"the kernel {name} fails without a defect: {text}"
    finally:
        monitoring.set_events(tool, 0)
        monitoring.register_callback(tool, monitoring.events.LINE, None)
        monitoring.free_tool_id(tool)
        monitoring.restart_events()
    return found


def reached() -> dict[Defect, list[str]]:
    """Returns all defects of today's source, each with the names of the kernels that run it."""
    at_line: dict[tuple[str, int], set[str]] = {}
    for name in KERNELS:
        for place in _lines_of(name):
            at_line.setdefault(place, set()).add(name)
    found = {}
    for module in source.modules():
        for defect, lines in source.of_module(module).items():
            running = set().union(*(at_line.get((str(source.file_of(module)), line), ()) for line in lines))
            found[defect] = [name for name in KERNELS if name in running]
    return found
