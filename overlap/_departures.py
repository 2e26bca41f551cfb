"""In a job of several processes: who has ended while others go on.

A process that ends with an error ends the job (`distributed`). One that ends well may be done before the others, or may
have left a loop that they are still in, who then wait for it. Nobody can tell the two apart, so the others are told:
each process that ends says so to the job's key-value store, and a thread of the others looks there.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from typing import Any

from overlap import _compat, _settings

_LOOK_EVERY_S = 2.0
# Processes that do the same end within moments of each other.
_SAID_AFTER_S = 10.0
_FOLDER = "overlap/ended/"
_logger = logging.getLogger("overlap")


def watch(rank: int) -> None:
    """Has the end of this process noted, and that of others said. Call it once the job's processes are connected."""
    store, ending = _compat.job_store(), threading.Event()
    if store is None:
        return

    def note_end() -> None:
        ending.set()
        store.key_value_set(f"{_FOLDER}{rank}", "0")

    # Exit handlers run in reverse order: before jax's own, which waits for the other processes.
    atexit.register(note_end)
    threading.Thread(target=_look, args=(store, rank, ending), name="overlap-ended", daemon=True).start()


def _look(store: Any, rank: int, ending: threading.Event) -> None:
    first_seen: dict[int, float] = {}
    said: set[int] = set()
    while not ending.wait(_LOOK_EVERY_S):
        try:
            ended = {int(key.rsplit("/", 1)[1]) for key, _ in store.key_value_dir_get(_FOLDER)}
        except Exception:  # The store is gone: the job is ending.
            return
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
