"""Ends the whole job when one of its processes fails.

Without that, the other processes would wait for the failed one: for ever in a collective, and at their exit for the
100 s of jax's heartbeat.

An uncaught exception reaches `sys.excepthook`. A SystemExit does not, and exit handlers are not told the exit status.
So a `sys.monitoring` callback notes the status when a SystemExit unwinds the outermost frame of the main thread. A
SystemExit that the program catches, as test runners do, never unwinds that frame.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import logging
import os
import signal
import stat
import sys
import termios
import threading
import time
import types
from collections.abc import Callable

_logger = logging.getLogger("overlap")
_exit_status: int = 0
# How long a failing process waits for its output to be read. A reader may have stopped, such as a pager.
_MOST_WAIT_S = 2.0

# A function that ends the job with an exit status, as far as a process of the job can do that.
type Abort = Callable[[int], object]


def leave(status: int, *, under_mpich: bool = False) -> None:
    """Ends this process at once. Open MPI's mpirun, torchrun, and srun with --kill-on-bad-exit then end the others.

    MPICH's mpirun ends the others only if the process that exits has called MPI. So with `under_mpich` this process
    sends the message that MPI_Abort would send, "abort" of PMI 1, to mpirun's proxy on this host.
    """
    if under_mpich:
        with contextlib.suppress(KeyError, ValueError, OSError):
            os.write(int(os.environ["PMI_FD"]), f"cmd=abort exitcode={status}\n".encode())
    os._exit(status)


class Ending:
    """Ends the job: a callable that takes the exit status.

    Attributes:
      abort: a function that ends this process and, if possible, the job. `initialize` replaces this function when more
        is known about the job.
      tell: a function that is called before `abort`, and tells the other processes the exit status.
    """

    def __init__(self, abort: Abort) -> None:
        self.abort = abort
        self.tell: Callable[[int], None] = lambda status: None

    def __call__(self, status: int) -> None:
        self.tell(status)
        self.abort(status)


_ending: Ending | None = None


def install(rank: int, abort: Abort) -> Ending:
    """Makes a failure of this process end the job by `abort`. Returns the `Ending`, whose attributes may be replaced.

    The hooks are installed once for each process, also if `overlap.initialize` fails and is called again.
    """
    global _ending
    if _ending is None:
        _ending = Ending(abort)
        abort_job_on_failure(_ending)
        abort_at_exit(rank, _ending)
    _ending.abort = abort
    return _ending


def abort_job_on_failure(abort: Abort) -> None:
    """Makes an uncaught exception or a non-zero SystemExit of this process end the whole job.

    A child made by `os.fork` inherits the hooks. It is no process of the job, so its failure ends the child alone.
    """
    previous_hook = sys.excepthook
    process = os.getpid()

    def hook(kind: type[BaseException], value: BaseException, trace: types.TracebackType | None) -> None:
        global _exit_status
        previous_hook(kind, value, trace)
        if os.getpid() == process:
            _flush_and(abort, 1)
        _exit_status = 1

    sys.excepthook = hook
    os.register_at_fork(after_in_child=_end_by_sigterm)
    _note_exit_status()


def _end_by_sigterm() -> None:
    """Undoes, in a forked child, the handler that jax's preemption service sets and of which Python does not know.

    That handler swallows the signal, so that `Process.terminate()` and a `multiprocessing.Pool` would wait for ever.
    """
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def abort_at_exit(rank: int, abort: Abort) -> None:
    """Registers an exit handler that ends the job if this process exits with a status other than 0.

    Call this function again after `jax.distributed.initialize`. Exit handlers run in reverse order, and jax's handler
    waits for the other processes, so this handler must run before jax's. The first handler that runs ends the process.
    """
    atexit.register(_at_exit, os.getpid(), rank, abort)


def _note_exit_status() -> None:
    """Registers a callback that stores in `_exit_status` the status of a SystemExit that nothing catches."""
    monitoring = sys.monitoring
    tool = next((tool for tool in (4, 3) if monitoring.get_tool(tool) is None), None)
    if tool is None:
        _logger.warning("no free sys.monitoring tool id: a rank that calls sys.exit(1) will not end the whole job")
        return

    def unwinding(code: types.CodeType, offset: int, error: BaseException) -> None:
        global _exit_status
        if isinstance(error, SystemExit) and threading.current_thread() is threading.main_thread():
            frame = sys._getframe(1)
            if frame.f_back is None:
                _exit_status = error.code if isinstance(error.code, int) else int(error.code is not None)

    monitoring.use_tool_id(tool, "overlap.initialize")
    monitoring.register_callback(tool, monitoring.events.PY_UNWIND, unwinding)
    monitoring.set_events(tool, monitoring.events.PY_UNWIND)


def _at_exit(process: int, rank: int, abort: Abort) -> None:
    if os.getpid() != process:
        # jax's exit handler would wait for ever in a forked child, for threads that only the parent has.
        _flush_and(os._exit, _exit_status)
    if _exit_status:
        print(f"overlap: process {rank} exits with status {_exit_status}: ending the job", file=sys.stderr)
        _flush_and(abort, _exit_status)


def _flush_and(abort: Abort, status: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    _wait_until_read()
    abort(status)


def _wait_until_read() -> None:
    """Waits until the launcher has read this process's output, but at most `_MOST_WAIT_S`.

    MPICH's mpirun does not read on once it is told to end the job: the end of a traceback, which says what was wrong,
    would be lost. Only pipes say how much was not read yet.
    """
    end = time.monotonic() + _MOST_WAIT_S
    for stream in (1, 2):
        with contextlib.suppress(OSError):
            if not stat.S_ISFIFO(os.fstat(stream).st_mode):
                continue
            while _unread_bytes(stream) and time.monotonic() < end:
                time.sleep(0.01)


def _unread_bytes(pipe: int) -> int:
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)
