"""Ctrl-C as a question that the search asks, not as an exception that may strike anywhere."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def noticed() -> Iterator[Callable[[], bool]]:
    """Yields a function that says whether Ctrl-C was pressed since; pressed again, it raises KeyboardInterrupt at once.

    While the runtime works, the first Python code to run is often a callback of its garbage collection, where an
    exception is printed and forgotten: an interrupt would be lost. Outside the main thread, and where the signal has
    another handler than Python's own, nothing is changed.
    """
    pressed = threading.Event()
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield pressed.is_set
        return

    def handle(number: int, frame: Any) -> None:
        if pressed.is_set():
            signal.default_int_handler(number, frame)
        pressed.set()

    signal.signal(signal.SIGINT, handle)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
