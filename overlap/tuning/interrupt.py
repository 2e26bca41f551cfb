"""Ctrl-C and SIGTERM as a question that the search asks, not as an exception that may strike anywhere."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

_SAID = {
    signal.SIGINT: b"\ninterrupted: ends after what is being measured now; Ctrl-C again ends it at once\n",
    signal.SIGTERM: b"\nterminated: ends after what is being measured now; a second SIGTERM ends it at once\n",
}


@contextmanager
def noticed() -> Iterator[Callable[[], int]]:
    """Yields a function that returns the number of the first signal that came since, SIGINT or SIGTERM; 0 if none did.

    At a second one an exception is raised at once, so that files that are being written are cleaned up:
    KeyboardInterrupt at SIGINT, SystemExit at SIGTERM.

    While the runtime works, the first Python code to run is often a callback of its garbage collection, where an
    exception is printed and forgotten: an interrupt would be lost. Outside the main thread nothing is changed, and of
    the two signals only one whose handler is not the program's own: Python's or the emulator's for SIGINT, none for
    SIGTERM.
    """
    came: list[int] = []

    def first() -> int:
        return came[0] if came else 0

    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in _SAID}
        if not _raises_keyboard_interrupt(before[signal.SIGINT]):
            del before[signal.SIGINT]
        if before[signal.SIGTERM] != signal.SIG_DFL:
            del before[signal.SIGTERM]

    def handle(number: int, frame: Any) -> None:
        if not came:
            came.append(number)
            with suppress(OSError):  # Standard error may be gone with the terminal.
                os.write(2, _SAID[signal.Signals(number)])  # Not print: the signal may have come in the middle of one.
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


def _raises_keyboard_interrupt(handler: Any) -> bool:
    return handler is signal.default_int_handler or getattr(handler, "raises_keyboard_interrupt", False)
