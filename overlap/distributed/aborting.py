"""A process that fails ends the whole job.

A rank that leaves early would keep the others waiting: in a collective forever, at exit for the 100 s of the heartbeat.
An uncaught exception reaches sys.excepthook; SystemExit does not, and no exit handler is told the status. So a
monitoring callback notes it as it unwinds the outermost frame of the main thread; a SystemExit that is caught on the
way, as test runners do, never gets there.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

_logger = logging.getLogger("overlap")
_exit_status: int = 0

# Ends the job with this status, as far as that can be done from within.
type Abort = Callable[[int], Any]


def leave(status: int, *, under_mpich: bool = False) -> None:
    """Ends this process at once. Open MPI's mpirun, torchrun, and srun with --kill-on-bad-exit then end the others.

    MPICH's does that only for processes that have called MPI; so its proxy on this host is told, in the words of
    MPI_Abort: the message "abort" of PMI 1.
    """
    if under_mpich:
        with contextlib.suppress(KeyError, ValueError, OSError):
            os.write(int(os.environ["PMI_FD"]), f"cmd=abort exitcode={status}\n".encode())
    os._exit(status)


class Ending:
    """How the job is ended; `abort` changes when more is known of the job, and `tell` says it to the others."""

    def __init__(self, abort: Abort) -> None:
        self.abort = abort
        self.tell: Callable[[int], None] = lambda status: None

    def __call__(self, status: int) -> None:
        self.tell(status)
        self.abort(status)


def abort_job_on_failure(abort: Abort) -> None:
    """Makes an uncaught exception or a non-zero SystemExit of this process end the whole job."""
    previous_hook = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, trace: types.TracebackType | None) -> None:
        previous_hook(kind, value, trace)
        _flush_and(abort, 1)

    sys.excepthook = hook
    _note_exit_status()


def abort_at_exit(rank: int, abort: Abort) -> None:
    """Registers the exit handler. Once jax's own is registered, which waits for the others, it is to be called again.

    (They run in reverse order. The first one to run ends the process, if anything is wrong.)
    """
    atexit.register(_at_exit, rank, abort)


def _note_exit_status() -> None:
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


def _at_exit(rank: int, abort: Abort) -> None:
    if _exit_status:
        print(f"overlap: process {rank} exits with status {_exit_status}: ending the job", file=sys.stderr)
        _flush_and(abort, _exit_status)


def _flush_and(abort: Abort, status: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    abort(status)
