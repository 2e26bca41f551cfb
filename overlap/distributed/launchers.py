"""Finds the place of this process in its job, from the environment variables of mpirun, srun and torchrun."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import socket
import struct
from collections.abc import Mapping, MutableMapping, Sequence

from overlap.distributed import ports

_logger = logging.getLogger("overlap")

# Set by each process that joins a job, for its children, which inherit the launcher's variables as well.
_JOINED = "OVERLAP_JOINED"
# No two processes that launchers have started have the same values of all these variables.
_OF_ONE_PROCESS = (
    "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT", "RANK",
    "PMIX_NAMESPACE", "OMPI_COMM_WORLD_RANK", "PMI_SIZE", "PMI_RANK",
    "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_RESTART_COUNT",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Place:
    """The place of this process in a job of several processes.

    Attributes:
      launcher: "mpirun", "srun" or "torchrun".
      mpi: under mpirun "Open MPI", or "MPICH" for MPICH, Intel MPI and MVAPICH; else None.
      size: how many processes the job has.
      rank: the rank of this process in the job.
      local_rank: the rank of this process on its host; None if the launcher does not say.
      local_size: how many processes this host has; None if the launcher does not say.
      node: the launcher's name or number for this host; None if it has none.
      host: the address at which the other processes reach process 0; None if only MPI knows.
      key: a text that all processes of this job know and that no other job has; None if only MPI knows.
    """

    launcher: str
    mpi: str | None
    size: int
    rank: int
    local_rank: int | None
    local_size: int | None
    node: str | None
    host: str | None
    key: str | None


@dataclasses.dataclass(frozen=True)
class _Variables:
    """The names of a launcher's variables.

    Attributes:
      launcher, mpi: as in `Place`.
      size, rank, local_rank, local_size, node: the variables with these attributes of `Place`; "" if there is none.
      needed: variables that the launcher sets along with `size`.
      key: variables whose values together no other job has.
    """

    launcher: str
    mpi: str | None
    size: str
    rank: str
    local_rank: str
    local_size: str
    needed: tuple[str, ...]
    key: tuple[str, ...] = ()
    node: str = ""


# The namespace names the job, and the URI the daemon of this job on this host.
_OPEN_MPI = _Variables(
    "mpirun", "Open MPI", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE", ("OMPI_COMM_WORLD_RANK",), ("PMIX_NAMESPACE", "PMIX_SERVER_URI2"),
)  # fmt: skip
# MPICH, Intel MPI or MVAPICH: an MPI whose mpirun is Hydra, or speaks its protocol.
_MPICH = _Variables("mpirun", "MPICH", "PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", ("PMI_RANK",))
# A job that is queued again keeps its number, so the restart count belongs to the key.
_SRUN = _Variables(
    "srun", None, "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", "",
    ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_LOCALID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_NODES"),
    ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"), "SLURM_NODEID",
)  # fmt: skip
# torch's own store listens at MASTER_PORT. Here this number only tells jobs apart; the port is not used.
_TORCHRUN = _Variables(
    "torchrun", None, "WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
    ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT"), "GROUP_RANK",
)  # fmt: skip


def find_place(environ: Mapping[str, str]) -> Place | None:
    """The place that the environment variables describe. Loads no MPI library.

    Args:
      environ: the environment variables.

    Returns:
      The place; None for a single process, and for a child of a process of a job: it is no process of the job.

    Raises:
      RuntimeError: if the variables contradict each other, or some are missing.
    """
    if _are_of_a_parent(environ):
        _logger.debug("a child of a process of a job, which has joined that job itself")
        return None
    by_srun = "SLURM_PROCID" in environ and "SLURM_STEP_NUM_TASKS" in environ
    # One launcher may start another (srun torchrun, or mpirun in a Slurm allocation): the innermost one counts.
    if "TORCHELASTIC_RUN_ID" in environ:
        _require(environ, "torchrun", "TORCHELASTIC_RUN_ID", ["WORLD_SIZE"])
        place = _place(environ, _TORCHRUN)
    elif "OMPI_COMM_WORLD_SIZE" in environ:
        place = _place(environ, _OPEN_MPI)
    elif "PMI_SIZE" in environ and ("MPI_LOCALNRANKS" in environ or not by_srun):
        place = _place(environ, _MPICH)
    elif "SLURM_PROCID" in environ:
        place = _place(environ, _SRUN) if by_srun else _batch_script(environ)
    # RANK and WORLD_SIZE alone may mean anything. Together with MASTER_ADDR and MASTER_PORT they are PyTorch's env://.
    elif all(name in environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
        place = _place(environ, _TORCHRUN)
    else:
        place = None
    if place is not None and not 0 <= place.rank < place.size:
        raise RuntimeError(
            f"{place.launcher}'s variables make this process rank {place.rank} of {place.size}, which cannot be: some "
            f"of them are left over from another job. Start the program with {place.launcher}, or unset them."
        )
    return place


def note_joined(environ: MutableMapping[str, str]) -> None:
    """Notes that the place in the environment variables is taken by this process, whatever children it starts."""
    environ[_JOINED] = f"{os.getpid()} {_hydra(environ)} {_variables(environ)}"


def _are_of_a_parent(environ: Mapping[str, str]) -> bool:
    """Whether another process has joined the job with the same launcher's variables: a parent of this process."""
    fields = environ.get(_JOINED, "").split(" ", 2)
    if len(fields) < 3:  # No process has joined: `note_joined` writes three fields.
        return False
    pid, hydra, variables = fields
    # MPICH has no name for a job, only its socket. A process that `spawn` has started has not inherited the socket.
    return variables == _variables(environ) and pid != str(os.getpid()) and _hydra(environ) in (hydra, "None")


def _variables(environ: Mapping[str, str]) -> str:
    return " ".join(environ.get(name, "-") for name in _OF_ONE_PROCESS)


def _hydra(environ: Mapping[str, str]) -> str:
    descriptor = environ.get("PMI_FD", "")
    return str(_creator_of(int(descriptor)) if descriptor.isdecimal() else None)


def _place(environ: Mapping[str, str], names: _Variables) -> Place | None:
    """The place that the variables of one launcher describe; None for a single process."""
    size = _number(environ, names.size)
    if size == 1:
        return None
    _require(environ, names.launcher, names.size, names.needed)
    local_rank, local_size = (_number_or_none(environ, name) for name in (names.local_rank, names.local_size))
    if names is _SRUN and _number(environ, "SLURM_STEP_NUM_NODES") == 1:
        local_size = size
    key: str | None = " ".join([names.mpi or names.launcher, *(environ.get(name, "-") for name in names.key)])
    if names is _OPEN_MPI and not all(name in environ for name in names.key):
        key = None
    if names is _MPICH:
        key = f"MPICH {starter}" if (starter := _hydra_of(environ, size)) else None
    host = None
    if local_rank is not None and local_size == size and key is not None:
        host = ports.THIS_HOST
    elif names is _SRUN:
        host = first_slurm_host(environ["SLURM_STEP_NODELIST"])
    elif names is _TORCHRUN:
        host = environ["MASTER_ADDR"]
    else:  # mpirun's variables say which processes share a host, but only MPI knows which host has process 0.
        key = None
    rank = _number(environ, names.rank)
    return Place(names.launcher, names.mpi, size, rank, local_rank, local_size, environ.get(names.node), host, key)


def _hydra_of(environ: Mapping[str, str], size: int) -> int | None:
    """The id of the proxy of MPICH's mpirun that has started this process; None if it is unknown."""
    if "PMI_FD" not in environ:
        return None
    descriptor = _number(environ, "PMI_FD")
    try:
        os.fstat(descriptor)
    except OSError as error:
        raise RuntimeError(
            f"PMI_SIZE={size} is set, but PMI_FD={descriptor} is not open in this process: no mpirun started it, and "
            "the variables are left over from another job. Unset PMI_SIZE, PMI_RANK and PMI_FD, or start the program "
            "with mpirun."
        ) from error
    return _creator_of(descriptor)


def _creator_of(descriptor: int) -> int | None:
    """The id of the process that created the socket pair to which `descriptor` belongs; None if it is no such socket.

    That process is Hydra's proxy. Each job has one proxy on each host, so the proxy's id tells jobs apart.
    """
    try:
        with socket.socket(fileno=os.dup(descriptor)) as end:
            if end.family != socket.AF_UNIX:
                return None
            pid, _, _ = struct.unpack(
                "3i", end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            )
            return pid or None
    except OSError:  # The descriptor is not a socket.
        return None


def _batch_script(environ: Mapping[str, str]) -> None:
    """Warns in a process that the batch script has started itself, without srun.

    A process without srun has SLURM_PROCID too, but belongs to no step. It runs alone, whatever SLURM_NTASKS says.
    """
    if environ["SLURM_PROCID"] != "0" or "SLURM_JOB_ID" not in environ:
        _require(environ, "srun", "SLURM_PROCID", ["SLURM_JOB_ID", "SLURM_STEP_NUM_TASKS"])
    if environ.get("SLURM_NTASKS", "1") != "1":
        _logger.warning(
            "this process was started by a batch script itself and is a single one, though SLURM_NTASKS=%s: for a "
            "process per task, the script has to say srun before the command (launch/srun.sbatch)",
            environ["SLURM_NTASKS"],
        )


def first_slurm_host(node_list: str) -> str:
    """The first host of a Slurm node list: "gpu[007-009,012],login1" begins with gpu007."""
    first = re.split(r",(?![^\[]*\])", node_list)[0]  # Commas within brackets separate numbers.
    return re.sub(r"\[([^],-]*)[^]]*\]", r"\1", first)


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ[name]
    least = int(name.endswith(("SIZE", "LOCALNRANKS", "NUM_TASKS", "NUM_NODES")))
    if not (text.isascii() and text.isdigit()) or int(text) < least:
        raise RuntimeError(
            f"{name}={text} should be a whole number{' of at least 1' * least}: the launcher sets it for each process. "
            "If no launcher started this program, unset the variable."
        )
    return int(text)


def _number_or_none(environ: Mapping[str, str], name: str) -> int | None:
    return _number(environ, name) if name in environ else None


def _require(environ: Mapping[str, str], launcher: str, present: str, needed: Sequence[str]) -> None:
    """Raises RuntimeError if the variable `present` is set and a variable of `needed` is missing."""
    if missing := [name for name in needed if name not in environ]:
        raise RuntimeError(
            f"{present}={environ[present]} is set, but not {', '.join(missing)}, which {launcher} sets along with it: "
            "left over from another job, or taken away on the way to this process (by a container, env -i). Start the "
            f"program with {launcher} and hand on all its variables, or unset {present} for a single process."
        )
