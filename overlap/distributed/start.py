"""`initialize`: one process per GPU under mpirun, srun or torchrun; a single process needs nothing.

    import overlap
    overlap.initialize()        # before anything asks jax for devices

`jax.distributed.initialize` detects Open MPI by a variable that version 5 no longer sets, and MPICH not at all. So
coordinator, process count, process id and local devices are found here, and all of them are passed on.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import time
from collections.abc import Sequence
from typing import Any

import jax

from overlap import _compat, _cuda, _departures
from overlap.distributed import aborting, by_mpi, cards, gpus, launchers, meeting, ports
from overlap.primitives import windows

_logger = logging.getLogger("overlap")

# Each host compiles a program with a fused kernel for itself (overlap/primitives/clique.py), and XLA by default has the
# processes share the work of choosing algorithms, which takes the same program everywhere.
_OWN_AUTOTUNING = "xla_gpu_shard_autotuning"
# When the last process has come at the last moment, jax still has to connect them.
_LEFT_FOR_JAX_S = 10


def initialize(
    *,
    coordinator_port: int | None = None,
    local_device_ids: Sequence[int] | None = None,
    check_nccl: bool = True,
    timeout_s: float = 120,
) -> None:
    """Connects the processes of a job started by mpirun, srun or torchrun; does nothing in a single process.

    Call it once at the start of the program, before anything touches devices (a second call does nothing). With GPUs,
    the process with local rank r gets GPU r of its host, and NCCL_WIN_STRIDE is set unless it is set already (room for
    the windows of more than one program). On several hosts --xla_gpu_shard_autotuning=false is added to XLA_FLAGS,
    unless they say something of it. (Neither is done without `check_nccl`.) If a rank raises or exits with a non-zero
    status, the whole job is aborted, so that the others do not wait for it (under srun with --kill-on-bad-exit). MPI is
    used only by jobs of mpirun on several hosts; the processes of the others meet over TCP.

    Args:
      coordinator_port: TCP port of the coordinator on the host of process 0; the processes meet there as well. By
        default free ones are chosen.
      local_device_ids: the GPUs of this process, as indices into the visible ones. By default the local rank; if the
        launcher has given each process of the host its own CUDA_VISIBLE_DEVICES, all that are visible.
      check_nccl: whether to insist on an NCCL that the fused kernels can use. Pass False in a program that runs
        `implementation="xla"` only.
      timeout_s: how long to wait for the other processes, in seconds. Then the missing ones are named.

    Raises:
      RuntimeError: if devices have been used already; if a process has not come within `timeout_s`; if the processes
        run different versions of jax or overlap; if `coordinator_port` is not free; if the launcher's variables are
        incomplete; if a host has more processes than GPUs; if NCCL is older than 2.30; or, with mpirun on several
        hosts, if mpi4py is missing or belongs to another MPI.
      ValueError: if `coordinator_port` is no port, or `timeout_s` no time.

    Example:
      `launch/mpirun.sh -np 8 -- python train.py`, and train.py begins with

          import overlap
          overlap.initialize()
    """
    coordinator_port = ports.check_port(coordinator_port)
    _check_timeout(timeout_s)
    if jax.distributed.is_initialized():
        return
    place = launchers.find_place(os.environ)
    if place is None:
        _logger.debug("initialize: a single process, nothing to do")
        return
    if _compat.backends_are_initialized():
        raise RuntimeError(
            "overlap.initialize() came after the first use of devices in this process, so it cannot join the job of "
            f"{place.size} processes. Call it before anything that asks for devices (jax.devices, jax.device_count, "
            "jnp.array, jax.jit of anything)."
        )
    until = time.monotonic() + timeout_s
    # Before the processes meet: if this one fails there, the others may wait already, and MPICH would let them.
    ending = aborting.Ending(functools.partial(aborting.leave, under_mpich=place.mpi == "MPICH"))
    aborting.abort_job_on_failure(ending)
    aborting.abort_at_exit(place.rank, ending)
    meet = by_mpi.meet if place.host is None else meeting.meet
    agreement = meet(place, cards.own_card(place), coordinator_port, timeout_s)
    ending.abort = agreement.abort or ending.abort
    with agreement.held or contextlib.nullcontext():
        _join(cards.job_of(place, agreement.cards), agreement, ending, local_device_ids, check_nccl, until)


def _join(
    job: cards.Job,
    agreement: cards.Agreement,
    ending: aborting.Ending,
    local_device_ids: Sequence[int] | None,
    check_nccl: bool,
    until: float,
) -> None:
    """Connects this process, which knows its job, to jax's coordinator."""
    gpus.warn_about_binding(job)
    if gpus.uses_gpus():
        gpu_count = len(_cuda.visible_gpus())
        if local_device_ids is None:
            local_device_ids = gpus.local_device_ids(job, gpu_count)
        if check_nccl:
            gpus.require_nccl(_cuda.nccl())
            # NCCL's default, the size of the GPU, is full after the first program: only address space is spent.
            os.environ.setdefault(windows.STRIDE_VARIABLE, str(windows.stride_bytes(job.local_size)))
            flags = os.environ.get("XLA_FLAGS", "")
            several_hosts = job.local_size != job.size or "JAX_PARTITION_INDEX" in os.environ
            if several_hosts and _OWN_AUTOTUNING not in flags:
                os.environ["XLA_FLAGS"] = f"{flags} --{_OWN_AUTOTUNING}=false".strip()
    else:
        local_device_ids = None
    coordinator = agreement.coordinator
    _logger.info("process %d of %d, coordinator %s, GPUs %s", job.rank, job.size, coordinator, local_device_ids)
    if job.mpi == "MPICH" and "JAX_ENABLE_PREEMPTION_SERVICE" not in os.environ:
        # It catches SIGTERM, which MPICH's mpirun hands on to the processes before it waits for them to end. Others'
        # launchers follow it up with SIGKILL.
        jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        coordinator,
        job.size,
        job.rank,
        local_device_ids,
        cluster_detection_method="deactivate",
        initialization_timeout=max(_LEFT_FOR_JAX_S, math.ceil(until - time.monotonic())),
        # A job of one host stays off the network.
        coordinator_bind_address=coordinator if coordinator.startswith(f"{ports.THIS_HOST}:") else None,
    )
    # Exit handlers run in reverse order: these have to come before jax's, which waits for the other processes.
    ending.tell = _departures.watch(job.rank)
    aborting.abort_at_exit(job.rank, ending)


def _check_timeout(timeout_s: Any) -> None:
    number = isinstance(timeout_s, (int, float)) and not isinstance(timeout_s, bool)
    if not number or not 0 < timeout_s < math.inf:
        raise ValueError(f"`timeout_s` has to be a number of seconds above 0, and is {timeout_s!r}.")
