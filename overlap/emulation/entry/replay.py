"""`run_sequence`: runs launches that `emulate` has kept again, in any order and number, on memory that they share."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from ..cores import DEFAULT_CORES
from ..execution.program import Launch
from ..foundations.settings import Completion, Scheduler, Settings
from ..state.runs import Run
from .sequence import World

_FLAG_SHIFTS = (0,) * 7 + (1, 4, 7)  # the addresses from which that of a launch's first semaphore is drawn


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

    The launches may be of different kernels, along different axes, and on different meshes: with the devices in another
    order, or with only some of the devices. Each device runs its launches in the order given; the scheduler chooses the
    delays between them. All launches have their operands and results at the same addresses of a device's memory, and
    their semaphores at nearly the same addresses (shifted by a few words, by chance). So a launch finds there what
    earlier launches have left.

    Args:
        launches: from `Run.launches` (`emulate(keep=True)`).
        completion, scheduler, seed, detect_races, resident, step_limit: see `emulate`.

    Returns:
        The outputs: for each launch, for each position of the launch's mesh, a list of arrays.

    Raises:
        EmulationError: the first fault. The message names the launch of each thread, by its number from 1.
        NotImplementedError: a launch ran along only some axes of its mesh (a partly manual `shard_map`), so that its
            devices are not known.

    Example:
        >>> with emulation.emulate(cores=2, keep=True) as run:
        ...     along_x(a), along_y(b)
        >>> x, y = run.launches
        >>> for seed in range(100):
        ...     emulation.run_sequence([y, y, x, x], seed=seed)
    """
    for number, launch in enumerate(launches, 1):
        if len(launch.devices) != len(launch.inputs):
            raise NotImplementedError(
                f"`launches`: launch {number} ({launch.name}) ran on {len(launch.inputs)} of the {len(launch.devices)} "
                "devices of a mesh whose other axes are not manual: expected a shard_map over all axes"
            )
    settings = Settings(
        DEFAULT_CORES, completion, scheduler, seed, detect_races=detect_races, resident=resident, step_limit=step_limit
    )
    world = World(settings, Run(settings), ", ".join(launch.name for launch in launches), is_replay=True)
    chance = random.Random(seed)
    machines = [world.add(launch, flags_at=chance.choice(_FLAG_SHIFTS)) for launch in launches]
    simulation = world.simulation
    simulation.run.begin(lambda: simulation.now)
    ended = world.execute()
    if simulation.errors:
        raise simulation.errors[0]
    return [machine.outputs(ended=ended) for machine in machines]
