"""How a search ends before it is done: by Ctrl-C, by SIGTERM, or because its time is over.

A signal raises nothing at first: while jax's runtime works, the first Python code that runs is often a callback of the
garbage collector. There, an exception is printed and dropped, and the interrupt would be lost. So the search asks
between launches (`Stop.check`). A launch on a GPU takes milliseconds. An emulated launch can take hours, so a signal
and the end of the time stop it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from overlap.emulation import stoppable

_SAID = {
    signal.SIGINT: b"\ninterrupted: ends with the results so far; Ctrl-C again ends it at once\n",
    signal.SIGTERM: b"\nterminated: ends with the results so far; a second SIGTERM ends it at once\n",
}
# So long after the deadline, emulated launches are stopped, though there may be no result yet.
GRACE_S = 60.0


class Ended(Exception):
    """Raised in a search that has to end now."""


class Stop:
    """Says when a search has to end.

    Attributes:
      deadline: the time, as in `time.monotonic()`, after which no further work begins.
      signal: the signal that has come, SIGINT or SIGTERM; 0 if none has.
    """

    def __init__(self, deadline: float = float("inf")) -> None:
        self.deadline = deadline
        self.signal = 0
        self._launches_ended = False
        self._end_launches: Callable[[], None] | None = None

    def come(self, number: int) -> None:
        """Notes a signal, and stops emulated launches."""
        self.signal = number
        self.end_launches()

    def end_launches(self) -> None:
        """Stops emulated launches, those under way and later ones."""
        if self._end_launches is not None:
            self._launches_ended = True
            self._end_launches()

    def check(self) -> None:
        """Raises `Ended` if a signal has come, or if launches were stopped."""
        if self.signal or self._launches_ended:
            raise Ended

    def check_launches(self) -> None:
        """Raises `Ended` if launches were stopped: what they computed means nothing."""
        if self._launches_ended:
            raise Ended

    @contextmanager
    def ends_launches(self) -> Iterator[None]:
        """Makes emulated launches that are compiled inside the block end with the search."""
        left_s = self.deadline + GRACE_S - time.monotonic()
        with stoppable() as self._end_launches:
            self._launches_ended = False
            timer = threading.Timer(min(max(left_s, 0), threading.TIMEOUT_MAX), self.end_launches)
            timer.daemon = True
            timer.start()
            try:
                yield
            finally:
                timer.cancel()
                self._end_launches = None


@contextmanager
def stopped_by_signals() -> Iterator[Stop]:
    """Handles SIGINT and SIGTERM inside the block.

    A second signal raises an exception at once, KeyboardInterrupt for SIGINT and SystemExit for SIGTERM, so that files
    that are being written are cleaned up.

    Outside the main thread nothing changes, nor for a signal for which the program has its own handler. (SIGINT is
    handled here if its handler is Python's or the emulator's, SIGTERM if it has no handler.)
    """
    stop = Stop()
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in _SAID}
        if not _raises_keyboard_interrupt(before[signal.SIGINT]):
            del before[signal.SIGINT]
        if before[signal.SIGTERM] != signal.SIG_DFL:
            del before[signal.SIGTERM]

    def handle(number: int, frame: types.FrameType | None) -> None:
        if not stop.signal:
            stop.come(number)
            with suppress(OSError):  # Standard error may be gone with the terminal.
                os.write(2, _SAID[signal.Signals(number)])  # Not print: the signal may have interrupted a print.
        elif callable(handler := before[signal.Signals(number)]):
            handler(number, frame)
        else:
            raise SystemExit(128 + number)

    for number in before:
        signal.signal(number, handle)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _raises_keyboard_interrupt(handler: object) -> bool:
    return handler is signal.default_int_handler or getattr(handler, "raises_keyboard_interrupt", False)
