"""The checks of `python -m overlap doctor` for GPUs, NCCL and jax's memory allocator."""

from __future__ import annotations

import os
from collections.abc import Sequence

from overlap import _compat, _cuda, _requirements
from overlap.cli.facts import NOTE, OK, PROBLEM, Fact, Machine, ask, status_of

JAX_DEVICES = "import jax; print(jax.default_backend(), len(jax.local_devices()), jax.local_devices()[0].device_kind)"
# The allocators of jax. Measured: fused kernels run, in one process and with one process per GPU. "default" is the one
# that jax takes if nothing is set.
MEASURED_ALLOCATORS, OTHER_ALLOCATORS = ("default", "cuda_async"), ("bfc", "vmm", "address", "platform")
_VISIBLE, _ALLOCATOR = "CUDA_VISIBLE_DEVICES", "XLA_PYTHON_CLIENT_ALLOCATOR"


def visible_devices(facts: Sequence[Fact], machine: Machine) -> Fact:
    """Whether CUDA_VISIBLE_DEVICES is valid. With a wrong entry, CUDA shows fewer GPUs or none, without a message."""
    subject, given = "visible GPUs", os.environ.get(_VISIBLE)
    if given is None:
        return Fact(subject, OK, f"{_VISIBLE} is unset: all of them")
    found, shown = f"{_VISIBLE}={given!r}", len(machine.driver.gpus)
    if given.strip() in ("", "-1"):
        return Fact(subject, NOTE, f"{found} hides all GPUs", "unset it to use them")
    if shown == len(given.split(",")):
        return Fact(subject, OK, f"{found}: {shown} GPUs")
    if not _cuda.driver_version():
        return Fact(subject, NOTE, f"{found}, and there is no GPU here")
    advice = "list numbers or UUIDs (nvidia-smi -L), each once: CUDA ignores all entries after a wrong one; or unset it"
    return Fact(subject, PROBLEM, f"{found}: CUDA shows {shown} GPUs", advice)


def devices(facts: Sequence[Fact], machine: Machine) -> Fact:
    """Which GPUs are visible, and whether jax uses them."""
    gpus, driver = machine.driver.gpus, _cuda.driver_version()
    if machine.driver.error:
        advice = "check nvidia-smi; the fused kernels may still run emulated on the CPU"
        return Fact("GPUs", PROBLEM, f"the NVIDIA driver gives no answer: {machine.driver.error}", advice)
    if not gpus:
        if os.environ.get(_VISIBLE, "0").strip() in ("", "-1"):
            return Fact("GPUs", NOTE, "none is visible", f"see {_VISIBLE} above")
        if driver:
            return Fact("GPUs", PROBLEM, f"driver {driver}, but CUDA shows no GPU to this process", "check nvidia-smi")
        return Fact("GPUs", NOTE, "none, and no NVIDIA driver", "the fused kernels run emulated on the CPU")
    kinds = sorted({f"{gpu.name} (sm_{gpu.compute_capability[0]}{gpu.compute_capability[1]})" for gpu in gpus})
    found = f"{len(gpus)} × {', '.join(kinds)}, driver {driver or 'of unknown version'}"
    if _cuda.jax_plugin() is None:
        return Fact("GPUs", PROBLEM, found, "jax has no CUDA plugin: pip install 'overlap[cuda13]' (or [cuda12])")
    if _requirements.why_not_python() or status_of(facts, "jax") == PROBLEM:
        return Fact("GPUs", NOTE, found, "whether jax uses them was not tried: see Python and jax")
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        return Fact("GPUs", NOTE, found, "jax does not use them: unset JAX_PLATFORMS=cpu for that")
    # This module imports jax. The checks above have shown that it works.
    from overlap.cli.devices import why_unsupported

    if reason := why_unsupported(gpus):
        return Fact("GPUs", NOTE, found, reason)
    works, answer = ask(JAX_DEVICES)
    if not works or not answer.startswith("gpu"):
        advice = f"JAX_PLATFORMS is {os.environ.get('JAX_PLATFORMS', '(unset)')}; {_library_advice()}"
        return Fact("GPUs", PROBLEM, f"{found}; jax says: {answer}", advice)
    return Fact("GPUs", OK, found)


def peer_access(facts: Sequence[Fact], machine: Machine) -> Fact:
    """Whether each GPU can read the memory of each other GPU."""
    subject, gpus, pairs = "peer access", machine.driver.gpus, machine.driver.pairs
    if not gpus:
        return Fact(subject, NOTE, "no GPUs")
    if not pairs:
        return Fact(subject, OK, f"all {len(gpus)} GPUs reach each other")
    listed = ", ".join(f"{reader}→{owner}" for reader, owner in pairs[:8])
    advice = f"fused kernels read their peers' memory: choose GPUs with NVLink (nvidia-smi topo -m) through {_VISIBLE}"
    return Fact(subject, PROBLEM, f"missing for {len(pairs)} pairs of GPUs: {listed}", advice)


def nccl(facts: Sequence[Fact], machine: Machine) -> Fact:
    """Which NCCL XLA would use, and whether it is new enough."""
    library = machine.nccl.library
    problem = PROBLEM if machine.driver.gpus else NOTE
    upgrade = "pip install --upgrade 'nvidia-nccl-cu13>=2.32.3'"
    if machine.nccl.error:
        return Fact("NCCL", PROBLEM, f"loading it fails: {machine.nccl.error}", _library_advice())
    if library is None:
        return Fact("NCCL", problem, "none found", "comes with pip install 'overlap[cuda13]'; not needed without GPUs")
    if len(library.copies) > 1:
        return Fact("NCCL", NOTE, f"{library}; several are loaded: {', '.join(library.copies)}", _library_advice())
    oldest = _compat.oldest_nccl_of_one_process(machine.jax.version)
    if oldest is not None and library.version[:2] < oldest:
        needed = f"this jax needs >= {oldest[0]}.{oldest[1]} for its small all-reduces (psum), in one process as well"
        return Fact("NCCL", problem, str(library), f"{needed}: {upgrade}")
    if library.version < _cuda.NCCL_OF_PROCESSES:
        enough = "enough for one process with all GPUs; one process per GPU needs >= 2.32.3"
        return Fact("NCCL", NOTE, str(library), f"{enough}: {upgrade}")
    return Fact("NCCL", OK, str(library))


def _library_advice() -> str:
    path = os.environ.get("LD_LIBRARY_PATH")
    if not path:
        return "LD_LIBRARY_PATH is unset, which is right for pip's CUDA packages"
    return f"LD_LIBRARY_PATH={path} may bring in other CUDA libraries than jax's own: try without it"


def one_process_per_gpu(facts: Sequence[Fact], machine: Machine) -> Fact:
    """Whether a job with one process per GPU can run."""
    subject = "process per GPU"
    if len(machine.driver.gpus) < 2:
        return Fact(subject, NOTE, "needs two GPUs or more; on the CPU launch/mpirun.sh runs the XLA implementation")
    blocking = [name for name in ("jax", "peer access") if status_of(facts, name) == PROBLEM]
    blocking += [name for name in ("GPUs", "NCCL", "MPI") if status_of(facts, name) != OK]
    if blocking:
        advice = "one process with all GPUs does not need this"
        return Fact(subject, NOTE, f"not possible yet, see {', '.join(blocking)}", advice)
    return Fact(subject, OK, "launch/mpirun.sh -- python your_program.py")


def allocator(facts: Sequence[Fact], machine: Machine) -> Fact:
    """Whether the fused kernels run with jax's memory allocator."""
    subject, name = "allocator", os.environ.get(_ALLOCATOR, "default").lower()
    if name in MEASURED_ALLOCATORS:
        return Fact(subject, OK, f"{name}: fused kernels run, in one process and with one process per GPU")
    if name == "platform":
        advice = "with one process per GPU peers do not see its memory: XLA runs instead; unset it, or take cuda_async"
        return Fact(subject, PROBLEM if machine.driver.gpus else NOTE, name, advice)
    if name in OTHER_ALLOCATORS:
        return Fact(subject, NOTE, f"{name}: not measured with one process per GPU")
    known = ", ".join(sorted((*MEASURED_ALLOCATORS, *OTHER_ALLOCATORS)))
    return Fact(subject, PROBLEM, name, f"jax takes {known}: correct {_ALLOCATOR}")
