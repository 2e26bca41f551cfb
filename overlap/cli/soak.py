"""`python -m overlap soak`: runs fused launches of all kinds in random sequences, and compares every bit.

Some devices are late on purpose. It runs in one process with all GPUs, or in one process per GPU (launch/mpirun.sh --
python -m overlap soak). Without GPUs it is emulated, to try it out. The seed alone determines what runs, and in which
order.
"""

from __future__ import annotations

import argparse
import collections
import random
import time

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from rich.progress import Progress

import overlap
from overlap.cli import soak_programs, soak_step
from overlap.cli.arguments import WrongArguments
from overlap.cli.console import console, progress_bar, refuse
from overlap.cli.devices import start
from overlap.cli.soak_programs import Axis, Case, Experts
from overlap.cli.soak_step import STEP, Step

# How many programs are started before their results are checked.
_BLOCK = 24
_LATE_US = (0.0, 0.0, 0.0, 100.0, 1000.0, 10000.0, 50000.0)
CASES: tuple[Case | Experts | Step, ...] = (*soak_programs.CASES, STEP)
# A case, a mesh, and the axis of the mesh along which the case runs.
type _Kind = tuple[Case | Experts | Step, Mesh, Axis]
# A kind of program; by how many microseconds each device is late; the number of launches from one delay to the next.
type _Drawn = tuple[_Kind, list[float], int]
# The number of a program, the program, and how many of its results were wrong.
type _Failure = tuple[int, _Drawn, int]


def run(arguments: argparse.Namespace) -> int:
    """Runs the command.

    Returns:
      The exit status: 0; 1 if a result was wrong or the job could not start; 2 if there are too few devices.
    """
    try:
        overlap.initialize()
    except RuntimeError as error:
        refuse("soak", error)
        return 1
    devices, emulated = start("soak", None)
    if len(devices) < 2:
        raise WrongArguments(f"soak: needs at least 2 devices, got {len(devices)}: make more GPUs visible")
    meshes = list(soak_programs.meshes(devices))
    kinds = [(case, mesh, axis) for mesh in meshes for axis in soak_programs.axes_of(mesh) for case in CASES]
    steps = arguments.steps or (1 if emulated else 200)
    where = f"{len(devices)} emulated CPU devices ({emulated})" if emulated else f"{len(devices)} GPUs"
    leads = jax.process_index() == 0
    errors = console(stderr=True, quiet=not leads)
    errors.print(f"{where}, {len(kinds)} kinds of programs of {steps} launches each, seed {arguments.seed}")
    with progress_bar(errors) as progress:
        done, failed = _run_all(arguments, kinds, steps, progress)
    if leads:
        _print(done, failed, arguments, steps)
    return int(bool(failed))


def _run_all(
    arguments: argparse.Namespace, kinds: list[_Kind], steps: int, progress: Progress
) -> tuple[collections.Counter[str], list[_Failure]]:
    """Runs programs until the time is over or a result is wrong.

    Returns:
      How many programs of each case have run, and the failures.
    """
    chance = random.Random(arguments.seed)
    end = time.monotonic() + 60 * arguments.minutes
    operands: dict[Mesh, tuple[jax.Array, jax.Array]] = {}
    done: collections.Counter[str] = collections.Counter()
    task = progress.add_task("0 launches", total=1.0)
    number = 0
    pending = []
    while True:
        drawn = _draw(chance, kinds)
        if number >= arguments.first:
            pending.append((number, drawn, _start(drawn, steps, arguments.seed, operands)))
        number += 1
        is_last = arguments.programs is not None and number >= arguments.first + arguments.programs
        if len(pending) < _BLOCK and not is_last:
            continue
        ended = [(at, drawn, int(jax.device_get(wrong))) for at, drawn, wrong in pending]
        failed = [(at, drawn, wrong) for at, drawn, wrong in ended if wrong]
        done.update(drawn[0][0].name for _, drawn, _ in pending)
        pending = []
        elapsed = 1 - (end - time.monotonic()) / (60 * arguments.minutes)
        launches = f"{steps * done.total():,} launches"
        progress.update(task, completed=min(elapsed, 1.0), description=launches)
        if failed or is_last or _in_any_process(elapsed >= 1):
            return done, failed


def _draw(chance: random.Random, kinds: list[_Kind]) -> _Drawn:
    """Draws a kind of program, the delay of each device, and the number of launches from one delay to the next."""
    case, mesh, axis = chance.choice(kinds)
    late = [chance.choice(_LATE_US) for _ in range(mesh.size)]
    # Long delays are rare, since otherwise the programs would do little else than wait.
    period = chance.choice((7, 40)) if max(late) <= 1000 else 1 << 20
    return (case, mesh, axis), late, period


def _start(drawn: _Drawn, steps: int, seed: int, operands: dict[Mesh, tuple[jax.Array, jax.Array]]) -> jax.Array:
    """Starts a program. Returns the number of its wrong results. `operands` keeps the operands of each mesh."""
    (case, mesh, axis), late, period = drawn
    if mesh not in operands:
        operands[mesh] = soak_programs.operands(mesh, seed)
    every = tuple(mesh.axis_names)
    late_us = soak_programs.on_all(mesh, P(every), np.array(late, np.float32))
    # If the period is longer than the program, the devices are late in the last launch.
    of_steps = soak_programs.on_all(mesh, P(), np.array(min(period, steps), np.int32))
    is_step = isinstance(case, Step)
    program = soak_step.program(case, mesh, axis, steps) if is_step else soak_programs.program(case, mesh, axis, steps)
    return program(late_us, of_steps, *operands[mesh])


def _in_any_process(own: bool) -> bool:
    """Whether `own` is true in any process. With this answer, all processes stop after the same program."""
    return own if jax.process_count() == 1 else bool(np.any(multihost_utils.process_allgather(np.int32(own))))


def _print(done: collections.Counter[str], failed: list[_Failure], arguments: argparse.Namespace, steps: int) -> None:
    out = console()
    for name, count in sorted(done.items()):
        out.print(f"  {name:<24} {count:>6} programs  {count * steps:>10,} launches")
    if not failed:
        out.print(f"{done.total() * steps:,} launches, no bit differed", style="green")
        return
    for number, ((case, mesh, axis), late, _), wrong in failed:
        ids = [device.id for device in mesh.devices.flat]
        text = f"program {number}: {wrong} wrong results of {case.name} along {axis!r} of {dict(mesh.shape)} on devices"
        out.print(f"{text} {ids}, late by {late} µs", style="red")
    # Repeat also the programs that were started together with the failed one and before it.
    first = max(0, failed[0][0] - _BLOCK)
    out.print(
        f"to repeat it: python -m overlap soak --seed {arguments.seed} --first {first} --programs "
        f"{failed[-1][0] - first + 1} --steps {steps} --minutes {arguments.minutes}"
    )
