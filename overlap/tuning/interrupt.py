"""Lets the search ask whether Ctrl-C or SIGTERM has come, instead of raising an exception anywhere in it.

A launch on a GPU takes milliseconds, so the search asks between launches. An emulated launch can take hours, so it is
stopped (`emulated_launches_stop`).
"""

from __future__ import annotations

import enum
import os
import signal
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from overlap.emulation import stoppable

type _Handler = Callable[[int, types.FrameType | None], object] | int | None

_SAID = {
    signal.SIGINT: b"\ninterrupted: ends with the results so far; Ctrl-C again ends it at once\n",
    signal.SIGTERM: b"\nterminated: ends with the results so far; a second SIGTERM ends it at once\n",
}
_WATCHED_EVERY_S = 0.5


@contextmanager
def noticed() -> Iterator[Callable[[], int]]:
    """Handles SIGINT and SIGTERM inside the block.

    A second signal raises an exception at once, KeyboardInterrupt for SIGINT and SystemExit for SIGTERM, so that files
    that are being written are cleaned up.

    Why not raise at the first signal: while jax's runtime works, the first Python code that runs is often a callback of
    the garbage collector. There, an exception is printed and dropped, and the interrupt would be lost.

    Outside the main thread nothing changes, nor for a signal for which the program has its own handler. (SIGINT is
    handled here if its handler is Python's or the emulator's, SIGTERM if it has no handler.)

    Yields:
      A function that returns the first signal that has come, SIGINT or SIGTERM; 0 if none has.
    """
    came: list[int] = []

    def first() -> int:
        return came[0] if came else 0

    before: dict[int, _Handler] = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in _SAID}
        if not _raises_keyboard_interrupt(before[signal.SIGINT]):
            del before[signal.SIGINT]
        if before[signal.SIGTERM] != signal.SIG_DFL:
            del before[signal.SIGTERM]

    def handle(number: int, frame: types.FrameType | None) -> None:
        if not came:
            came.append(number)
            with suppress(OSError):  # Standard error may be gone with the terminal.
                os.write(2, _SAID[signal.Signals(number)])  # Not print: the signal may have interrupted a print.
        elif callable(handler := before[number]):
            handler(number, frame)
        else:
            raise SystemExit(128 + number)

    for number in before:
        signal.signal(number, handle)
    try:
        yield first
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Stopped(enum.Enum):
    """Why emulated launches were stopped."""

    SIGNAL = enum.auto()
    TIME = enum.auto()


@contextmanager
def emulated_launches_stop(at: float, interrupted: Callable[[], int]) -> Iterator[Callable[[], Stopped | None]]:
    """Stops the emulated launches of kernels that are compiled inside the block, at a certain time or after a signal.

    Args:
      at: the time, as in `time.monotonic()`; infinite: only a signal stops them.
      interrupted: returns the signal that has come, or 0; a KeyboardInterrupt that it raises is a signal, too. It is
        called from another thread, now and then.

    Yields:
      A function that returns why launches were stopped, None if they were not. What a stopped launch has computed means
      nothing.
    """
    left, why = threading.Event(), list[Stopped]()

    def reason() -> Stopped | None:
        try:
            return Stopped.SIGNAL if interrupted() else Stopped.TIME if time.monotonic() > at else None
        except KeyboardInterrupt:
            return Stopped.SIGNAL

    with stoppable() as stop:

        def watch() -> None:
            while not left.wait(_WATCHED_EVERY_S):
                if (found := reason()) is not None:
                    why.append(found)
                    stop()
                    return

        watcher = threading.Thread(target=watch, name="overlap-tuning-watch", daemon=True)
        try:
            watcher.start()
            yield lambda: why[0] if why else None
        finally:
            left.set()


def _raises_keyboard_interrupt(handler: object) -> bool:
    return handler is signal.default_int_handler or getattr(handler, "raises_keyboard_interrupt", False)
