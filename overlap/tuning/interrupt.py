"""Ctrl-C as a question that the search asks, not as an exception that may strike anywhere."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_SAID = b"\ninterrupted: ends after what is being measured now; Ctrl-C again ends it at once\n"


@contextmanager
def noticed() -> Iterator[Callable[[], bool]]:
    """Yields a function that says whether Ctrl-C was pressed since; pressed again, it raises KeyboardInterrupt at once.

    While the runtime works, the first Python code to run is often a callback of its garbage collection, where an
    exception is printed and forgotten: an interrupt would be lost. Outside the main thread, and where the signal has
    another handler than Python's own or the emulator's, nothing is changed.
    """
    pressed = threading.Event()
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not _raises_keyboard_interrupt(before):
        yield pressed.is_set
        return

    def handle(number: int, frame: Any) -> None:
        if pressed.is_set():
            assert callable(before)
            before(number, frame)
            return
        pressed.set()
        os.write(2, _SAID)  # Not print: the signal may have come in the middle of one.

    signal.signal(signal.SIGINT, handle)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, before)


def _raises_keyboard_interrupt(handler: Any) -> bool:
    return handler is signal.default_int_handler or getattr(handler, "raises_keyboard_interrupt", False)
