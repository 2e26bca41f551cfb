"""`emulate`: the context manager in which kernels run on CPU devices."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from ..cores import DEFAULT_CORES, core_count_of_devices
from ..cores import cores as in_cores
from ..foundations import interrupt
from ..foundations.settings import Completion, Scheduler, Settings
from ..state import runs
from ..state.runs import Run, drain
from .lowering import enable


def _raise_if_interrupted(run: Run) -> None:
    """Raises KeyboardInterrupt if Ctrl-C has stopped launches of this run, which therefore have no results."""
    while interrupt.pending():
        time.sleep(0.001)  # KeyboardInterrupt is raised here.
    if interrupt.stopped(run.interrupts):
        raise KeyboardInterrupt


@contextlib.contextmanager
def emulate(
    cores: int = DEFAULT_CORES,
    completion: Completion = "late",
    scheduler: Scheduler = "pct",
    seed: int = 0,
    *,
    detect_races: bool = True,
    resident: int | None = None,
    step_limit: int | None = 20_000_000,
    record: bool = False,
    laps: int = 1,
    keep: bool = False,
) -> Iterator[Run]:
    """While the context is active, emulates Mosaic GPU kernels on CPU devices, and looks for races and deadlocks.

    Only `cores` affects tracing. All other arguments are read when a kernel runs, so a jitted function is not traced
    again for another seed.

    Args:
        cores: the number of cores of a device. `core_count()` and `device.core_count` of CPU devices return it.
        completion: when asynchronous copies and wgmma complete: as ``"late"`` as the rules allow, at ``"random"``
            moments or at once (``"eager"``).
        scheduler: ``"pct"`` (random priorities with rare changes), ``"random"`` or ``"round_robin"``.
        seed: seeds all random choices; the same seed gives the same run.
        detect_races: whether to look for races, with vector clocks. Deadlocks are found in either case, and so are
            most broken protocols.
        resident: how many CTAs fit on a device at a time. The others start when a CTA ends. None: all fit.
        step_limit: the number of scheduler steps in one launch after which an error is raised. None: no limit.
        record: whether to keep a list of events in `run.events`.
        laps: how many times in a row each launch runs, on the same memory and semaphores. Its inputs that are no
            integers are NaN, except the last time. If the kernel skips the framework's barrier, each device begins the
            next lap on its own, at once after its last lap or later.
        keep: whether to keep all launches in `run.launches`, with their operands and results.

    Yields:
        A `Run`. When the context ends, `emulate` waits for all computations under way and raises the first error.
        `run.check()` does the same earlier.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed. The launches under way stop; later ones run as usual.

    Examples:
        >>> import mosaic_emulator
        >>> with mosaic_emulator.emulate(cores=2, completion="random", seed=3) as run:
        ...     y = f(x)  # any function that calls plgpu.kernel, usually under jax.shard_map
        >>> run.counts["copies"]
    """
    enable()
    run = Run(Settings(cores, completion, scheduler, seed, detect_races, resident, step_limit, record, laps, keep))
    with runs.active(run):
        try:
            with in_cores(cores), core_count_of_devices():
                yield run
        except Exception as consequence:
            drain()
            # The exception is probably a consequence of a fault that was found, so the fault is raised instead.
            _raise_if_interrupted(run)
            if run.errors:
                raise run.errors[0] from consequence
            raise
        except KeyboardInterrupt:
            if not interrupt.stopped(run.interrupts):  # The emulator's own handler has not seen this interrupt.
                interrupt.note()
            drain()
            raise
        else:
            drain()  # Computations that start inside the context end inside it.
            _raise_if_interrupted(run)
    if run.errors:
        raise run.errors[0]
