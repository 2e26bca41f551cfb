"""Stall reports: where a kernel records that it has waited long and for whom, and the host thread that prints that.

A kernel cannot print: a call of `vprintf` makes the assembler serialize every wgmma of the kernel. It can write to
memory of the host. So the report is host memory to which all GPUs of the process can write, and a thread of the host
reads it each second. The kernel must know its address. Compiled programs are kept in caches, so the address
must be the same in each process: it is a fixed address of the virtual memory.

    kernel      writes its record after `REPORT_AFTER_S`, and again when it gives up; marks it as over if the wait ends
    host        prints each change of a record, with the waits of the other devices at that time

The processes of a job tell each other of their waits through the job's key-value store. So if the processes of a job
call two operations in different orders, one line shows both.

Each pair of devices has a record of its own, so that devices do not overwrite each other's records. A record holds
numbers. The host knows the name of the operation, since the kernel was traced in this process (`describe`).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import json
import logging
import mmap
import threading
import time

import jax
import numpy as np

from overlap import _compat, _cuda
from overlap.primitives.peers import PeerGroup

REPORT_AFTER_S = 30.0
# A kernel that has given up lingers for this time before it traps, so that the host can read its record.
LINGER_S = 2.5
_LOOK_EVERY_S = 1.0
ADDRESS = 0x4F56_4C41_0000  # About 87 TB: far from the addresses that programs, libraries and drivers use.
MOST_DEVICES = 32
RECORD_BYTES = 64
_BYTES = MOST_DEVICES * MOST_DEVICES * RECORD_BYTES
# The index of each word in a record. The word STATE is written last. Its values are below; OVER is 0, so memory in
# which no record was ever written reads as OVER too.
STATE, OPERATION, POSITION, PEER, ROLE, EXPECTED, GOT, WAITED, POINTER = range(9)  # The pointer has two words.
# A kernel's clock counts in 2^20 ns.
TICK_S = 2**20 / 1e9

OVER, STILL_WAITING, GIVEN_UP = range(3)

BEGUN, SEEN, DONE, ROWS, TERMS, FLAG = range(6)
_ROLES = {
    BEGUN: "to begin this operation",
    SEEN: "to notice that this device has begun; flag: seen, with a bit for each position",
    DONE: "to be done with this device's memory; flag: done, with a bit for each position",
    ROWS: "to pass rows on; flag: parts of rows",
    TERMS: "to send its part of a tile; flag: that it is here",
    FLAG: "to raise a flag",
}

_WAITS = "overlap/waits/"
_MOST_OTHERS = 4
_WHAT_NOW = (
    "The kernel ends with a CUDA error, after which this process cannot use its GPU any more. OVERLAP_WAIT_TIMEOUT_S "
    "sets the limit in seconds (0: none)"
)
_logger = logging.getLogger("overlap")
_described: dict[int, tuple[str, int]] = {}


def describe(operation: str, group: PeerGroup) -> int:
    """Returns the number by which a kernel names itself in the report. It is the same in each process.

    Args:
      operation: the kernel's name in messages.
      group: the peers with which it talks.
    """
    # Compute the number from the axes' places and sizes, not from their names: a compiled kernel must not depend on the
    # names of axes.
    number = int.from_bytes(hashlib.sha256(f"{operation} {group.places}".encode()).digest()[:4], "little")
    _described[number] = (f"{operation} along {group.axis_name!r} of {group.size} devices", group.size)
    return number


@functools.cache
def address() -> int | None:
    """Returns the address of the report, for the kernels of this process; None if there is no stall report.

    The first call sets it up. There is no stall report in a process without GPUs (which compiles for another machine),
    where the driver cannot share host memory with GPUs, or where the address is taken. Kernels that give up then end
    without a message.
    """
    gpus = [device.local_hardware_id for device in jax.local_devices() if device.platform == "gpu"]
    if not gpus:
        return None
    try:
        memory = _map_at(ADDRESS, _BYTES)
    except OSError as error:
        _logger.debug("no stall report for waits: %s", error)
        return None
    if not _cuda.share_host_memory(ADDRESS, _BYTES, gpus):
        _logger.debug("no stall report for waits: the driver does not share host memory at its own address")
        return None
    records = np.frombuffer(memory, np.uint32).reshape(-1, RECORD_BYTES // 4)
    threading.Thread(target=_watch, args=(records,), name="overlap-waits", daemon=True).start()
    return ADDRESS


def _map_at(start: int, length: int) -> ctypes.Array[ctypes.c_char]:
    """Returns fresh memory at the address `start`, or raises OSError if that address is taken."""
    fixed_noreplace = 0x100000
    private_anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    got = library.mmap(start, length, mmap.PROT_READ | mmap.PROT_WRITE, private_anonymous | fixed_noreplace, -1, 0)
    if got != start:
        raise OSError(ctypes.get_errno(), f"{length} bytes at {start:#x} cannot be had")
    return (ctypes.c_char * length).from_address(start)


def line(record: np.ndarray) -> str:
    """Returns a record as text."""
    role = int(record[ROLE])
    expected = int(record[EXPECTED])
    got = int(record[GOT])
    waits = f"{_who(record)} has waited {int(record[WAITED]) * TICK_S:.0f} s for {_for_whom(record)}"
    if role != BEGUN:
        return f"{waits} {_ROLES.get(role, 'for a flag')}, expected {expected:#x}, got {got:#x}"
    # This is the place where the peer's flag will be once it runs this operation. Until then anything may be there.
    seen = {0: "nothing", 1: "that of an operation which has ended"}.get(got, "other contents")
    return f"{waits} {_ROLES[role]}: its memory must show the flag {expected:#010x}, and shows {got:#x} ({seen})"


def _who(record: np.ndarray) -> str:
    """Says which device is in which operation."""
    operation, _ = _described.get(int(record[OPERATION]), ("a fused operation", MOST_DEVICES))
    gpu = _cuda.gpu_of(int(record[POINTER]) | int(record[POINTER + 1]) << 32)
    where = f"GPU {'?' if gpu is None else gpu}, process {jax.process_index()}"
    return f"{operation}: position {int(record[POSITION])} ({where})"


def _for_whom(record: np.ndarray) -> str:
    """Returns the positions of the devices that a record waits for."""
    _, devices = _described.get(int(record[OPERATION]), ("", MOST_DEVICES))
    missing = [int(record[PEER])]
    if int(record[ROLE]) in (SEEN, DONE):
        missing = [place for place in range(devices) if int(record[EXPECTED]) & ~int(record[GOT]) & 1 << place]
    return f"position{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"


def _elsewhere(own: str, waits: list[str]) -> str:
    """Says who else waits at the same time, those in another operation than `own` first."""
    others = [wait for wait in waits if wait != own]
    others.sort(key=lambda wait: wait.partition(":")[0] == own.partition(":")[0])
    if not others:
        return "No other device of this job has waited long in a fused operation"
    more = f", and {len(others) - _MOST_OTHERS} more" if len(others) > _MOST_OTHERS else ""
    differ = any(wait.partition(":")[0] != own.partition(":")[0] for wait in others)
    hint = ". All processes must call the same operations in the same order" if differ else ""
    return f"At the same time: {'; '.join(others[:_MOST_OTHERS])}{more}{hint}"


def _exchanged(waits: list[str]) -> list[str]:
    """Tells the other processes of this process's waits. Returns the waits of all processes."""
    store = _compat.job_store()
    with contextlib.suppress(Exception):  # There is no store, or it is gone: the job is ending.
        store.key_value_set(f"{_WAITS}{jax.process_index()}", json.dumps(waits), allow_overwrite=True)
        return [wait for _, text in store.key_value_dir_get(_WAITS) for wait in json.loads(text)]
    return waits


def _watch(records: np.ndarray) -> None:
    said = np.zeros(len(records), np.uint32)
    changed: list[tuple[int, np.ndarray]] = []
    while True:
        time.sleep(_LOOK_EVERY_S)
        states = records[:, STATE].copy()
        waiting = {place: records[place] for place in np.flatnonzero(states).tolist()}
        own = {place: f"{_who(record)} waits for {_for_whom(record)}" for place, record in waiting.items()}
        # What has changed is printed one look later, when all processes have told of their waits.
        waits = _exchanged(list(own.values())) if changed or (states != said).any() else []
        for place, record in changed:
            _say(record, _elsewhere(own.get(place, ""), waits))
        changed = [(place, records[place].copy()) for place in np.flatnonzero(states != said).tolist()]
        said = states


def _say(record: np.ndarray, elsewhere: str) -> None:
    """Logs a record that has changed."""
    if record[STATE] == STILL_WAITING:
        _logger.warning("still waiting: %s. %s", line(record), elsewhere)
    elif record[STATE] == GIVEN_UP:
        _logger.error("gave up waiting: %s. %s. %s", line(record), elsewhere, _WHAT_NOW)
    else:
        _logger.warning("no longer waiting: %s", line(record))
