"""Ends a run that hangs or gets SIGTERM, and keeps its measurements."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pathlib
import signal
import sys
import threading
from collections.abc import Callable, Sequence

# How many seconds writing the measurements may take. After this time, the process is ended even if they are not
# written.
_PATIENCE_S = 15
_STDERR = 2  # The number of the file: `sys.stderr` may be an object without a file descriptor.


class Watch:
    """A context manager that limits the time of each step, and keeps the measurements however the run ends.

    - A step that takes longer than `timeout_s` seconds ends the process with status 1 and a stack trace of all threads.
    - SIGTERM (from `timeout` or a batch system) ends the process with status 143.
    - An exception or Ctrl-C passes through.

    In each case `keep` is called first: a function that writes the measurements and returns the files that it has
    written.

    The thread that measures may be stuck in a kernel, where it runs no signal handlers of Python. So other threads wait
    for the end of the time limit and for the signal. If the stuck thread holds Python's lock, these threads cannot run
    either. Then a timer that needs no Python ends the process.
    """

    def __init__(self, timeout_s: int, keep: Callable[[], Sequence[pathlib.Path]]) -> None:
        self._timeout_s, self._keep = timeout_s, keep
        self._timer: threading.Timer | None = None
        self._signals: int | None = None

    def __enter__(self) -> Watch:
        # Only the main thread can set signal handlers. If there is a handler already, such as jax's, it stays.
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            self._listen()
        self.restart()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stop()
        if self._signals is not None:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.set_wakeup_fd(-1)
            os.close(self._signals)  # The thread that reads the other end of this pipe then ends.
        if kind is not None:
            self._keep_what_there_is()

    def restart(self) -> None:
        """Begins a step, whose time limit counts from now."""
        self._stop()
        faulthandler.dump_traceback_later(self._timeout_s + _PATIENCE_S, exit=True, file=_STDERR)
        self._timer = threading.Timer(self._timeout_s, self._hangs)
        self._timer.daemon = True
        self._timer.start()

    def _stop(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        if self._timer is not None:
            self._timer.cancel()

    def _hangs(self) -> None:
        faulthandler.dump_traceback(file=_STDERR, all_threads=True)
        self._end(1, f"no progress for {self._timeout_s} s (--timeout-s): ended")

    def _listen(self) -> None:
        read, write = os.pipe()
        os.set_blocking(write, False)
        self._signals = write
        signal.signal(signal.SIGTERM, lambda *_: None)
        # Python writes the number of each signal to this pipe at once, whatever the main thread is doing.
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)

        def wait() -> None:
            while number := os.read(read, 1):
                if number[0] == signal.SIGTERM:
                    self._end(128 + signal.SIGTERM, "ended by SIGTERM")
            os.close(read)

        threading.Thread(target=wait, name="benchmarks-signals", daemon=True).start()

    def _end(self, status: int, text: str) -> None:
        try:
            self._keep_what_there_is()
            print(text, file=sys.stderr, flush=True)
        finally:
            os._exit(status)

    def _keep_what_there_is(self) -> None:
        # If the disk is full, go on, so that the reason why the run ends is printed.
        with contextlib.suppress(OSError):
            for path in self._keep():
                print(f"kept {path}", file=sys.stderr, flush=True)
