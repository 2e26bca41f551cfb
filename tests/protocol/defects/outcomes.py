"""What the emulator, or the result, says of a defect in a kernel."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable
from typing import Literal

import jax

from overlap.emulation import EmulationError, emulate
from tests.protocol.defects.kernels import KERNELS, ONE_AT_A_TIME
from tests.protocol.defects import source
from tests.protocol.defects.source import Defect, injected
from tests.protocol.protocol_cases import Kernel

Outcome = Literal["reported", "wrong numbers", "refused", "unnoticed"]
# How a kernel is run until its defect shows: the first schedules find most.
SCHEDULES = (
    {"completion": "eager", "scheduler": "pct", "laps": 2},
    {"completion": "late", "scheduler": "pct", "laps": 2},
    {"completion": "random", "scheduler": "random", "laps": 2},
    {"completion": "eager", "scheduler": "pct", "resident": 1},
    {"completion": "late", "scheduler": "random", "laps": 3},
    {"completion": "random", "scheduler": "pct", "laps": 1},
)
_STEPS = 30_000


def run(name: str, kernel: Kernel, schedule: int) -> Outcome:
    settings = dict(SCHEDULES[schedule])
    if name not in ONE_AT_A_TIME:
        settings.pop("resident", None)
    try:
        with emulate(cores=KERNELS[name][1], seed=schedule, step_limit=_STEPS, **settings) as emulated:
            result = jax.block_until_ready(kernel.call())
            emulated.check()
    except EmulationError:
        return "reported"
    except Exception:  # The kernel cannot be traced, or jax refuses it.
        return "refused"
    try:
        kernel.check(result)
    except AssertionError:
        return "wrong numbers"
    return "unnoticed"


def outcome(defect: Defect, names: Iterable[str], schedules: Iterable[int] = range(len(SCHEDULES))) -> tuple[Outcome, str, int]:
    """Runs the kernels with the defect until it shows. Returns how, in which kernel, and under which schedule."""
    with injected(defect):
        kernels = {name: KERNELS[name][0]() for name in names}
        for schedule in schedules:
            for name, kernel in kernels.items():
                if (shown := run(name, kernel, schedule)) != "unnoticed":
                    return shown, name, schedule
    return "unnoticed", "", -1


def lines_of(name: str) -> set[tuple[str, int]]:
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
        assert run(name, KERNELS[name][0](), 0) == "unnoticed", f"the kernel {name} fails without a defect"
    finally:
        monitoring.set_events(tool, 0)
        monitoring.register_callback(tool, monitoring.events.LINE, None)
        monitoring.free_tool_id(tool)
        monitoring.restart_events()
    return found


def reached() -> dict[Defect, list[str]]:
    """Returns the defects that some kernel runs, each with the names of those kernels."""
    at_line: dict[tuple[str, int], set[str]] = {}
    for name in KERNELS:
        for place in lines_of(name):
            at_line.setdefault(place, set()).add(name)
    found = {}
    for module in source.modules():
        for defect, lines in source.of_module(module).items():
            running = set().union(*(at_line.get((str(source.file_of(module)), line), ()) for line in lines))
            if running:
                found[defect] = [name for name in KERNELS if name in running]
    return found
