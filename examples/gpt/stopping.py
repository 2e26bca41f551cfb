"""Ctrl-C, SIGTERM and SIGUSR1: the run finishes its step, writes a checkpoint, and exits with the signal's status."""

from __future__ import annotations

import signal
import types
from typing import Self

# Open MPI's mpirun kills its processes a second after SIGINT or SIGTERM, but it passes SIGUSR1 on. Slurm can send
# SIGUSR1 before the time limit.
_HEARD = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class Stopped(Exception):
    """Training was stopped, and its state is saved."""

    def __init__(self, step: int, signal_number: int | None) -> None:
        super().__init__(step)
        self.step = step
        # None if another process received the signal.
        self.signal_number = signal_number
        self.status = 128 + (signal_number or signal.SIGTERM)


class Signals:
    """A context that records the first signal. A second signal acts as it would without the context."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._before = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._note) for number in _HEARD}
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _note(self, number: int, frame: types.FrameType | None) -> None:
        self.received = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            # None: the old handler was not set by Python, and cannot be restored.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}
