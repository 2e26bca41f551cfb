"""Tells the processes of a job which of them have ended or failed.

Each process notes its end in the job's key-value store, and a thread of each process reads these notes.

- A process that ended with status 0 may simply have finished first. Or it may have left a loop that the other processes
  are still in, and they wait for it. The library cannot tell the two apart. So the processes that go on log a warning.
- After a process that failed, the other processes end with its status. Most launchers end them too, but some only
  after half a minute, and srun only with --kill-on-bad-exit.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from overlap import _compat, _settings

_LOOK_EVERY_S = 2.0
# Processes that run the same program end within moments of each other: no warning before this time.
_SAID_AFTER_S = 10.0
_FOLDER, _FAILED = "overlap/ended/", "overlap/failed/"
_logger = logging.getLogger("overlap")


def watch(rank: int) -> Callable[[int], None]:
    """Notes the end of this process, and watches for the end of others. Call it once jax has connected the processes.

    Args:
      rank: of this process.

    Returns:
      A function of the exit status. Call it just before this process ends with a status other than 0.
    """
    store, ending = _compat.job_store(), threading.Event()
    if store is None:
        return lambda status: None

    def note(folder: str, status: int) -> None:
        if ending.is_set():
            return
        ending.set()
        with contextlib.suppress(Exception):  # The store may be gone: jax.distributed.shutdown, or the job is ending.
            store.key_value_set(f"{folder}{rank}", str(status))
            if status and rank == 0:
                # The store ends with process 0: leave the others time to read it.
                time.sleep(_LOOK_EVERY_S + 0.5)

    # Exit handlers run in reverse order. So this one runs before jax's own, which waits for the other processes.
    atexit.register(note, _FOLDER, 0)
    threading.Thread(target=_look, args=(store, rank, ending), name="overlap-ended", daemon=True).start()
    return functools.partial(note, _FAILED)


def _look(store: Any, rank: int, ending: threading.Event) -> None:
    """Reads the notes of the other processes until this one ends. Ends this process if another one has failed."""
    first_seen: dict[int, float] = {}
    said: set[int] = set()
    while not ending.wait(_LOOK_EVERY_S):
        try:
            ended = {int(key.rsplit("/", 1)[1]) for key, _ in store.key_value_dir_get(_FOLDER)}
            failed = {int(key.rsplit("/", 1)[1]): int(status) for key, status in store.key_value_dir_get(_FAILED)}
        except Exception:  # The store is gone: the job is ending.
            return
        if failed:
            other, status = min(failed.items())
            _end(f"overlap: process {rank} ends, since process {other} failed", status)
        now = time.monotonic()
        for other in ended - {rank}:
            first_seen.setdefault(other, now)
        late = sorted(rank for rank, since in first_seen.items() if now - since >= _SAID_AFTER_S and rank not in said)
        if late:
            said.update(late)
            _logger.warning("%s", _message(rank, late))


def _end(reason: str, status: int) -> NoReturn:
    """Ends this process. `os._exit` flushes nothing, so standard output and error are flushed before."""
    with contextlib.suppress(OSError, ValueError):  # The terminal may be gone, or the streams closed.
        print(reason, file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def _message(rank: int, others: list[int]) -> str:
    ended = f"process{'es' if len(others) > 1 else ''} {', '.join(map(str, others))}"
    limit = _settings.wait_timeout_s()
    until = f"for {limit:.0f} s at most (OVERLAP_WAIT_TIMEOUT_S)" if limit else "for ever (OVERLAP_WAIT_TIMEOUT_S=0)"
    return (
        f"{ended} of the job ended {_SAID_AFTER_S:.0f} s ago or more, with status 0, and process {rank} goes on. If it "
        f"still needs {'them' if len(others) > 1 else 'it'}, it waits in vain: in a fused kernel {until}, in other "
        "collective operations as long as those do"
    )
