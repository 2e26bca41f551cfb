"""Ends the processes of a job after one of them has failed.

A process that fails notes that in the job's key-value store. A thread of each other process reads these notes, and ends
its process with the same status. Most launchers end the others too, but some only after half a minute, and srun only
with --kill-on-bad-exit.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from overlap import _compat

_LOOK_EVERY_S = 2.0
_FOLDER = "overlap/failed/"


def watch(rank: int) -> Callable[[int], None]:
    """Watches for failures of other processes. Call it once jax has connected the processes.

    Args:
      rank: of this process.

    Returns:
      A function of the exit status. Call it just before this process ends with a status other than 0.
    """
    store = _compat.job_store()
    ending = threading.Event()
    if store is None:
        return lambda status: None

    def note(status: int) -> None:
        if ending.is_set():
            return
        ending.set()
        with contextlib.suppress(Exception):  # The store may be gone: jax.distributed.shutdown, or the job is ending.
            store.key_value_set(f"{_FOLDER}{rank}", str(status))
            if rank == 0:
                # The store ends with process 0: leave the others time to read it.
                time.sleep(_LOOK_EVERY_S + 0.5)

    # Exit handlers run in reverse order. So this one runs before jax's own, which closes the store.
    atexit.register(ending.set)
    threading.Thread(target=_look, args=(store, rank, ending), name="overlap-failures", daemon=True).start()
    return note


def _look(store: Any, rank: int, ending: threading.Event) -> None:
    """Reads the notes of the other processes until this one ends. Ends this process if another one has failed."""
    while not ending.wait(_LOOK_EVERY_S):
        try:
            failed = {int(key.rsplit("/", 1)[1]): int(status) for key, status in store.key_value_dir_get(_FOLDER)}
        except Exception:  # The store is gone: the job is ending.
            return
        if failed:
            other, status = min(failed.items())
            _end(f"overlap: process {rank} ends, since process {other} failed", status)


def _end(reason: str, status: int) -> NoReturn:
    """Ends this process. `os._exit` flushes nothing, so standard output and error are flushed before."""
    with contextlib.suppress(OSError, ValueError):  # The terminal may be gone, or the streams closed.
        print(reason, file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)
