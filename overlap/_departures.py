"""In a job of several processes: tells the processes that go on which processes have ended.

A process that ends with status 0 may simply be done first, or it may have left a loop in which the others still wait
for it. Neither side can tell which. So each process that ends writes a word to the job's key-value store, and a thread
of every other process reads the store and warns. A process that fails writes that too, and the others then end with its
status. Most launchers end them as well, but some only after half a minute, and srun only on request.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from overlap import _compat, _settings

_LOOK_EVERY_S = 2.0
# Processes that run the same program end within moments of each other: nothing to warn of.
_SAID_AFTER_S = 10.0
_FOLDER, _FAILED = "overlap/ended/", "overlap/failed/"
_logger = logging.getLogger("overlap")


def watch(rank: int) -> Callable[[int], None]:
    """Notes the end of this process in the store, and warns when other processes have ended.

    Call it once, after the job's processes are connected.

    Args:
      rank: of this process.

    Returns:
      A function to call before this process fails, with the exit status: it notes the failure in the store.
    """
    store, ending = _compat.job_store(), threading.Event()
    if store is None:
        return lambda status: None

    def note_end() -> None:
        ending.set()
        store.key_value_set(f"{_FOLDER}{rank}", "0")

    def note_failure(status: int) -> None:
        if ending.is_set():
            return
        ending.set()
        with contextlib.suppress(Exception):  # The store may be gone: the job is ending.
            store.key_value_set(f"{_FAILED}{rank}", str(status))
            if rank == 0:
                # The store ends with process 0: the others must read it before.
                time.sleep(_LOOK_EVERY_S + 0.5)

    # Exit handlers run in reverse order: before jax's own, which waits for the other processes.
    atexit.register(note_end)
    threading.Thread(target=_look, args=(store, rank, ending), name="overlap-ended", daemon=True).start()
    return note_failure


def _look(store: Any, rank: int, ending: threading.Event) -> None:
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
            print(f"overlap: process {rank} ends, since process {other} failed", file=sys.stderr, flush=True)
            os._exit(status)
        now = time.monotonic()
        for other in ended - {rank}:
            first_seen.setdefault(other, now)
        late = sorted(rank for rank, since in first_seen.items() if now - since >= _SAID_AFTER_S and rank not in said)
        if late:
            said.update(late)
            _logger.warning("%s", _message(rank, late))


def _message(rank: int, others: list[int]) -> str:
    who = f"process{'es' if len(others) > 1 else ''} {', '.join(map(str, others))}"
    limit = _settings.wait_timeout_s()
    until = f"for {limit:.0f} s at most (OVERLAP_WAIT_TIMEOUT_S)" if limit else "for ever (OVERLAP_WAIT_TIMEOUT_S=0)"
    return (
        f"{who} of the job ended {_SAID_AFTER_S:.0f} s ago or more, with status 0, and process {rank} goes on. If it "
        f"still needs {'them' if len(others) > 1 else 'it'}, it waits in vain: in a fused kernel {until}, in other "
        "collective operations as long as those do"
    )
