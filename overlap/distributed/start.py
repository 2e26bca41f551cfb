"""`initialize`: one process per GPU under mpirun, srun or torchrun; a single process needs nothing.

    import overlap
    overlap.initialize()        # before anything asks jax for devices

`jax.distributed.initialize` detects Open MPI 5 by mpi4py alone, and neither MPICH nor torchrun. So this module finds
coordinator, process count, process id and local devices, and passes all of them to it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import time
from collections.abc import Iterator, Sequence

import jax

from overlap import _compat, _cuda
from overlap.distributed import aborting, by_mpi, cards, failures, gpus, launchers, ports, rendezvous
from overlap.primitives import windows

_logger = logging.getLogger("overlap")

# By default the processes of a job share the work of choosing algorithms, which needs the same program on all hosts.
# Programs with fused kernels differ from host to host (overlap/primitives/host_mesh.py). So each process chooses alone.
_OWN_AUTOTUNING = "xla_gpu_shard_autotuning"
# If the last process comes just before the timeout, jax still needs time to connect all of them.
_LEFT_FOR_JAX_S = 10


def initialize(
    *,
    coordinator_port: int | None = None,
    local_device_ids: Sequence[int] | None = None,
    check_nccl: bool = True,
    timeout_s: float = 120,
) -> None:
    """Connects the processes of a job started by mpirun, srun or torchrun; does nothing in a single process.

    Call it once at the start of the program, before anything uses devices. A second call does nothing, nor does a call
    in a child of a process that has called it, such as a worker of a data loader, which imports the main module.

    - With GPUs, the process with local rank r gets GPU r of its host.
    - With GPUs and `check_nccl`, it sets NCCL_WIN_STRIDE, unless that is set already, so that NCCL has room for the
      windows of more than one program. On several hosts it adds --xla_gpu_shard_autotuning=false to XLA_FLAGS, unless
      they mention this flag.
    - If a process raises or exits with a non-zero status, the whole job is aborted, so that the other processes do not
      wait for it. (srun needs --kill-on-bad-exit for that.)
    - The processes meet over TCP. Jobs of mpirun on several hosts ask MPI where. They connect to jax's coordinator
      directly, whatever http_proxy, https_proxy, grpc_proxy and no_proxy say.

    Args:
      coordinator_port: TCP port of jax's coordinator on the host of process 0. The processes meet there as well. By
        default free ports are chosen.
      local_device_ids: the GPUs of this process, as indices into the visible GPUs. By default the local rank; or all
        visible GPUs, if the launcher has given each process of the host its own CUDA_VISIBLE_DEVICES.
      check_nccl: whether to require an NCCL that the fused kernels can use. Pass False in a program that only runs
        `implementation="xla"`.
      timeout_s: how long to wait for the other processes, in seconds. The error message then names the missing ones.

    Raises:
      RuntimeError: if devices have been used already; if a process has not come within `timeout_s`; if the processes
        run different versions of jax or overlap; if `coordinator_port` is not free; if the launcher's variables are
        incomplete; if a host has more processes than GPUs; if NCCL is older than 2.32.3; or, with mpirun on several
        hosts, if mpi4py is missing or belongs to another MPI.
      ValueError: if `coordinator_port` is not a TCP port, or `timeout_s` not a positive number.

    Examples:
      `launch/mpirun.sh -np 8 -- python train.py`, and train.py begins with

          import overlap
          overlap.initialize()
    """
    if coordinator_port is not None and not (_is_number(coordinator_port, int) and 0 < coordinator_port < 65536):
        raise ValueError(
            f"`coordinator_port` has to be a TCP port, a whole number from 1 to 65535, and is {coordinator_port!r}. "
            "Leave it out, and a free one is chosen."
        )
    if not (_is_number(timeout_s, (int, float)) and 0 < timeout_s < math.inf):
        raise ValueError(f"`timeout_s` has to be a number of seconds above 0, and is {timeout_s!r}.")
    if jax.distributed.is_initialized():
        return
    place = launchers.find_place(os.environ)
    if place is None:
        _logger.debug("initialize: not a process of a job, nothing to do")
        return
    if _compat.backends_are_initialized():
        raise RuntimeError(
            "overlap.initialize() came after the first use of devices in this process, so it cannot join the job of "
            f"{place.size} processes. Call it before anything that asks for devices (jax.devices, jax.device_count, "
            "jnp.array, jax.jit of anything)."
        )
    until = time.monotonic() + timeout_s
    launchers.note_joined(os.environ)
    # Install this before the processes meet: if this process fails there, the others may be waiting already, and MPICH
    # would not end them.
    ending = aborting.install(place.rank, functools.partial(aborting.leave, under_mpich=place.mpi == "MPICH"))
    if place.host is None:
        place = by_mpi.with_host(place, timeout_s)
    agreement = rendezvous.meet(place, cards.own_card(place), coordinator_port, timeout_s)
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
    """Connects this process to jax's coordinator.

    Args:
      job: this process's place in the job.
      agreement: what the processes have agreed on when they met.
      ending: the callable that ends the job.
      local_device_ids, check_nccl: as in `initialize`.
      until: when to give up, as in `time.monotonic()`.
    """
    gpus.warn_about_binding(job)
    if gpus.uses_gpus():
        gpu_count = len(_cuda.visible_gpus())
        if local_device_ids is None:
            local_device_ids = gpus.local_device_ids(job, gpu_count)
        if check_nccl:
            gpus.require_nccl(_cuda.nccl())
            # NCCL's default, the size of the GPU's memory, has room for the pool once. A larger stride costs address
            # space only.
            os.environ.setdefault(windows.STRIDE_VARIABLE, str(windows.STRIDE_BYTES))
            flags = os.environ.get("XLA_FLAGS", "")
            several_hosts = job.local_size != job.size or "JAX_PARTITION_INDEX" in os.environ
            if several_hosts and _OWN_AUTOTUNING not in flags:
                os.environ["XLA_FLAGS"] = f"{flags} --{_OWN_AUTOTUNING}=false".strip()
    else:
        local_device_ids = None
    coordinator = agreement.coordinator
    _logger.info("process %d of %d, coordinator %s, GPUs %s", job.rank, job.size, coordinator, local_device_ids)
    if job.mpi == "MPICH" and "JAX_ENABLE_PREEMPTION_SERVICE" not in os.environ:
        # jax's preemption service catches SIGTERM. MPICH's mpirun passes SIGTERM to the processes and then waits for
        # them to end: the service must not catch it. Other launchers send SIGKILL after it.
        jax.config.update("jax_enable_preemption_service", False)
    with _without_proxies():
        jax.distributed.initialize(
            coordinator,
            job.size,
            job.rank,
            local_device_ids,
            cluster_detection_method="deactivate",
            initialization_timeout=max(_LEFT_FOR_JAX_S, math.ceil(until - time.monotonic())),
            # Nobody outside this host can connect to a job of one host.
            coordinator_bind_address=coordinator if coordinator.startswith(f"{ports.THIS_HOST}:") else None,
        )
    # Exit handlers run in reverse order. These two must run before jax's, which waits for the other processes, so they
    # are registered after it.
    ending.tell = failures.watch(job.rank)
    aborting.abort_at_exit(job.rank, ending)


@contextlib.contextmanager
def _without_proxies() -> Iterator[None]:
    """Hides the variables of proxies, such as http_proxy, while jax connects to its coordinator.

    gRPC reads them then, and would ask the proxy even for an address of this host, unless no_proxy has that address.
    No proxy is needed: the processes have just met without one.
    """
    hidden = {name: os.environ.pop(name) for name in list(os.environ) if name.lower().endswith("_proxy")}
    try:
        yield
    finally:
        os.environ.update(hidden)


def _is_number(value: object, kinds: type | tuple[type, ...]) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)
