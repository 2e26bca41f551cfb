"""Runs launches that were kept, in any order and number, as a sequence on memory that they share."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from .context import Completion, Run, Scheduler, Settings
from .machine import Machine
from .sequence import Launch, World

_FLAG_SHIFTS = (0, 0, 0, 1, 4, 7)


def run_sequence(
    launches: Sequence[Launch],
    completion: Completion = "late",
    scheduler: Scheduler = "pct",
    seed: int = 0,
    *,
    detect_races: bool = True,
    resident: int | None = None,
    step_limit: int | None = 20_000_000,
) -> list[list[list[np.ndarray]]]:
    """Runs launches one after the other, each device at its own pace, and returns the results of each.

    They may be of different kernels, along different axes and on different meshes, permuted ones and such of a part of
    the devices too. Each device runs those that it is a member of, in the order given, with whatever delay the
    scheduler chooses between them. All have their operands, results and semaphores at the same addresses of a device's
    memory, or nearly: semaphores are shifted by some words by chance. So they find there what the launch before left.

    Args:
        launches: of `Run.launches` (`emulate(keep=True)`).
        completion, scheduler, seed, detect_races, resident, step_limit: as of `emulate`.

    Raises:
        EmulationError: the first fault.

    Example:
        >>> with emulation.emulate(cores=2, keep=True) as run:
        ...     along_x(a), along_y(b)
        >>> x, y = run.launches
        >>> for seed in range(100):
        ...     emulation.run_sequence([y, y, x, x], seed=seed)
    """
    settings = Settings(
        completion=completion, scheduler=scheduler, seed=seed, detect_races=detect_races, resident=resident,
        step_limit=step_limit,
    )  # fmt: skip
    world = World(settings, Run(settings), "a sequence of " + ", ".join(launch.name for launch in launches))
    chance = random.Random(seed)

    def add(launch: Launch) -> Machine:
        at = chance.choice(_FLAG_SHIFTS)
        given = launch.mesh_shape, launch.devices, launch.inputs, launch.name
        return Machine(world, launch.program, *given, flags_at=at)

    machines = [add(launch) for launch in launches]
    world.run.begin(world)
    ended = world.execute()
    if world.errors:
        raise world.errors[0]
    return [machine.outputs(ended=ended) for machine in machines]
