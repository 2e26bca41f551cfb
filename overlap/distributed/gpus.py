"""Chooses the GPUs of a process of a job, and checks its NCCL and its number of CPU cores."""

from __future__ import annotations

import os
import socket
import warnings

import jax

from overlap import _cuda
from overlap.distributed.cards import Job

_MORE_CORES = {
    "mpirun": "mpirun --bind-to none (launch/mpirun.sh does)",
    "srun": "srun --cpus-per-task (launch/srun.sbatch does)",
    "torchrun": "more cores for torchrun itself",
}


def nccl_version() -> tuple[int, int, int] | None:
    """The version of the NCCL that XLA uses or would use, as (major, minor, patch), or None. Starts no device."""
    library = _cuda.nccl()
    return library.version if library else None


def uses_gpus() -> bool:
    """Whether jax's default backend will be CUDA. Does not start it."""
    platforms = jax.config.jax_platforms  # JAX_PLATFORMS, or what the program set
    if platforms:
        return platforms.split(",")[0].strip() in ("cuda", "gpu")
    return _cuda.jax_plugin() is not None and bool(_cuda.visible_gpus())


def local_device_ids(job: Job, gpu_count: int) -> list[int]:
    """The GPUs of this process, as indices into the GPUs that are visible to it.

    Args:
      job: this process's place in the job.
      gpu_count: how many GPUs are visible to this process.

    Raises:
      RuntimeError: if no GPU is visible, or if the host has more processes than GPUs.
    """
    if gpu_count == 0:
        raise RuntimeError(
            "JAX_PLATFORMS asks for GPUs, but this process sees none: check nvidia-smi and CUDA_VISIBLE_DEVICES="
            f"{os.environ.get('CUDA_VISIBLE_DEVICES', '(unset)')}, or run with JAX_PLATFORMS=cpu."
        )
    visible = job.local_visible
    dealt_by_variable = None not in visible and len(set(visible)) == len(visible) > 1
    # With srun --gpus-per-task each task sees one GPU, its own, always as number 0. Only the number of GPUs shows this.
    dealt_by_srun = job.launcher == "srun" and gpu_count == 1
    if dealt_by_variable or dealt_by_srun:
        return list(range(gpu_count))
    if job.local_size > gpu_count:
        raise RuntimeError(
            f"{job.local_size} processes were started on {socket.gethostname()}, "
            f"which has {gpu_count} visible GPUs: one process per GPU is the layout that is supported. Start "
            f"{gpu_count} per host (-np {gpu_count}), make more GPUs visible (CUDA_VISIBLE_DEVICES), or run with "
            "JAX_PLATFORMS=cpu."
        )
    return [job.local_rank]


def require_nccl(library: _cuda.NcclLibrary | None) -> None:
    """Raises RuntimeError if XLA will use an NCCL that cannot address the memory of other processes."""
    if library is None or library.version >= _cuda.NCCL_OF_PROCESSES:
        return  # If there is no NCCL at all, jax's own message is better.
    several = len(library.copies) > 1
    copies = f" ({len(library.copies)} copies are loaded: {', '.join(library.copies)})" if several else ""
    raise RuntimeError(
        f"NCCL {'.'.join(map(str, library.version))} found at {library.path}{copies}; the fused kernels with one "
        "process per GPU need >= 2.32.3: pip install --upgrade 'nvidia-nccl-cu13>=2.32.3' (nvidia-nccl-cu12 for CUDA "
        '12), or run one process with all GPUs. A program that runs implementation="xla" only can pass '
        "check_nccl=False."
    )


def warn_about_binding(job: Job) -> None:
    """Warns if this process may use only one CPU core: XLA's host threads then get too little time."""
    if job.local_rank == 0 and len(os.sched_getaffinity(0)) == 1 < (os.cpu_count() or 1):
        warnings.warn(
            f"this process is bound to a single core of {os.cpu_count()}, which starves XLA's host threads: start it "
            f"with {_MORE_CORES[job.launcher]}.",
            RuntimeWarning,
            stacklevel=3,
        )
