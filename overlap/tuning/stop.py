"""How a search ends before it is done: by Ctrl-C, or because its time is over.

Ctrl-C raises nothing at first: while jax's runtime works, the first Python code that runs is often a callback of the
garbage collector. There, an exception is printed and dropped, and the interrupt would be lost. So the search asks
between launches (`Stop.check`). A launch on a GPU takes milliseconds. An emulated launch can take hours, so Ctrl-C
stops it.
"""

from __future__ import annotations

import os
import signal
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from overlap.emulation import stoppable

_SAID = b"\ninterrupted: ends with the results so far; Ctrl-C again ends it at once\n"


class Ended(Exception):
    """Raised in a search that has to end now."""


class Stop:
    """Says when a search has to end.

    Attributes:
      deadline: the time, as in `time.monotonic()`, after which no further work begins.
      interrupted: whether Ctrl-C was pressed.
    """

    def __init__(self, deadline: float = float("inf")) -> None:
        self.deadline = deadline
        self.interrupted = False
        self._end_launches: Callable[[], None] = lambda: None

    def interrupt(self) -> None:
        """Notes Ctrl-C, and stops emulated launches, those under way and later ones."""
        self.interrupted = True
        self._end_launches()

    def check(self) -> None:
        """Raises `Ended` after Ctrl-C. What emulated launches have computed then means nothing."""
        if self.interrupted:
            raise Ended

    @contextmanager
    def ends_launches(self) -> Iterator[None]:
        """Makes emulated launches that are compiled inside the block end with the search."""
        with stoppable() as self._end_launches:
            yield


@contextmanager
def stopped_by_ctrl_c() -> Iterator[Stop]:
    """Handles SIGINT inside the block. A second SIGINT raises KeyboardInterrupt at once.

    Outside the main thread nothing changes, nor where the program has a handler of its own, other than Python's or the
    emulator's.
    """
    stop = Stop()
    before = signal.getsignal(signal.SIGINT)
    usual = before is signal.default_int_handler or getattr(before, "raises_keyboard_interrupt", False)
    if threading.current_thread() is not threading.main_thread() or not usual or not callable(before):
        yield stop
        return

    def handle(number: int, frame: types.FrameType | None) -> None:
        if stop.interrupted:
            before(number, frame)
            return
        stop.interrupt()
        with suppress(OSError):  # Standard error may be gone with the terminal.
            os.write(2, _SAID)  # Not print: the signal may have interrupted a print.

    signal.signal(signal.SIGINT, handle)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)
