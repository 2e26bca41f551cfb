"""The checks of `python -m overlap doctor` for GPUs, NCCL and jax's memory allocator."""

from __future__ import annotations

import os
from collections.abc import Sequence

from overlap import _compat, _cuda, _requirements
from overlap.cli import allocators
from overlap.cli.facts import NOTE, OK, PROBLEM, Fact, ask, status_of
from overlap.cli.machine import Machine

JAX_DEVICES = "import jax; print(jax.default_backend(), len(jax.local_devices()), jax.local_devices()[0].device_kind)"
_VARIABLE = "CUDA_VISIBLE_DEVICES"


def visible_devices(facts: Sequence[Fact], machine: Machine) -> Fact:
    """Whether CUDA_VISIBLE_DEVICES is valid. With a wrong entry, CUDA shows fewer GPUs or none, without a message."""
    subject, given = "visible GPUs", os.environ.get(_VARIABLE)
    if given is None:
        return Fact(subject, OK, f"{_VARIABLE} is unset: all of them")
    there = machine.driver.in_all
    found = f"{_VARIABLE}={given!r}"
    if given.strip() in ("", "-1"):
        return Fact(
            subject, NOTE, f"{found} hides all GPUs ({there} are here)", "unset it to use them" if there else ""
        )
    entries = [entry.strip() for entry in given.split(",")]
    if wrong := _senseless(entries, there):
        shown = f"CUDA shows {len(machine.driver.gpus)} of {there} GPUs" if there else "there is no GPU here"
        numbers = f" from 0 to {there - 1}" if there else ""
        return Fact(
            subject,
            PROBLEM,
            f"{found}: {wrong}; {shown}",
            f"CUDA ignores all entries after one that it does not know. List numbers{numbers} or UUIDs "
            "(nvidia-smi -L), each once, with commas between them, or unset it",
        )
    if not there:
        return Fact(subject, NOTE, f"{found}, and there is no GPU here")
    return Fact(subject, OK, f"{found}: {len(machine.driver.gpus)} of {there}")


def _senseless(entries: Sequence[str], there: int) -> str:
    """Says what is wrong with the first wrong entry of CUDA_VISIBLE_DEVICES; "" if all entries are right.

    Args:
      entries: the entries.
      there: how many GPUs this machine has; 0: unknown, so that no number is too large.
    """
    seen: set[str] = set()
    for entry in entries:
        if entry in seen:
            return f"{entry!r} is listed twice"
        seen.add(entry)
        if entry.startswith(("GPU-", "MIG-")):
            continue
        if not entry.isascii() or not entry.isdigit():
            return f"{entry!r} is neither the number of a GPU nor a UUID"
        if there and int(entry) >= there:
            return f"there is no GPU {entry}"
    return ""


def devices(facts: Sequence[Fact], machine: Machine) -> Fact:
    """Which GPUs are visible, and whether jax uses them."""
    gpus, driver = machine.driver.gpus, _cuda.driver_version()
    if machine.driver.error:
        advice = "check nvidia-smi; the fused kernels may still run emulated on the CPU"
        return Fact("GPUs", PROBLEM, f"the NVIDIA driver gives no answer: {machine.driver.error}", advice)
    if not gpus:
        if machine.driver.in_all:
            return Fact("GPUs", NOTE, f"none of {machine.driver.in_all} is visible", f"see {_VARIABLE} above")
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
    # These modules import jax. The checks above have shown that it works.
    from overlap.kernels.architectures import mainloop_of
    from overlap.kernels.target import Target

    for gpu in gpus:
        try:
            mainloop_of(Target("gpu", gpu.name, num_cores=1))
        except NotImplementedError as error:
            return Fact("GPUs", NOTE, found, str(error))
    works, answer = ask(JAX_DEVICES, timeout_s=120)
    if not works or not answer.startswith("gpu"):
        advice = f"JAX_PLATFORMS is {os.environ.get('JAX_PLATFORMS', '(unset)')}; {_library_advice()}"
        return Fact("GPUs", PROBLEM, f"{found}; jax says: {answer}", advice)
    return Fact("GPUs", OK, found)


def peer_access(facts: Sequence[Fact], machine: Machine) -> Fact:
    """Whether each GPU can read the memory of each other GPU."""
    if not machine.driver.gpus:
        return Fact("peer access", NOTE, "no GPUs")
    if pairs := machine.driver.pairs:
        listed = ", ".join(f"{reader}→{owner}" for reader, owner in pairs[:8])
        return Fact(
            "peer access",
            PROBLEM,
            f"missing for {len(pairs)} pairs of GPUs: {listed}",
            "the fused kernels read their peers' memory: choose GPUs with NVLink (nvidia-smi topo -m) through "
            f"{_VARIABLE}",
        )
    return Fact("peer access", OK, f"all {len(machine.driver.gpus)} GPUs reach each other")


def nccl(facts: Sequence[Fact], machine: Machine) -> Fact:
    """Which NCCL XLA would use, whether it is new enough, and which files have NCCL's name but are not NCCL."""
    library, fakes = machine.nccl.library, machine.nccl.fakes
    upgrade = "pip install --upgrade 'nvidia-nccl-cu13>=2.32.3'"
    if machine.nccl.error:
        return Fact("NCCL", PROBLEM, f"loading it fails: {machine.nccl.error}", _library_advice())
    if fakes:
        advice = "take it out of the variable"
        if library is not None:
            return Fact("NCCL", NOTE, f"{library} is used; {'; '.join(fakes)}", advice)
        return Fact("NCCL", PROBLEM, "; ".join(fakes), f"{advice}; NCCL comes with pip install 'overlap[cuda13]'")
    if library is None:
        status = PROBLEM if machine.driver.gpus else NOTE
        return Fact("NCCL", status, "none found", "comes with pip install 'overlap[cuda13]'; not needed without GPUs")
    if len(library.copies) > 1:
        listed = ", ".join(library.copies)
        return Fact("NCCL", NOTE, f"{library}; several are loaded: {listed}", _library_advice())
    oldest = _compat.oldest_nccl_of_one_process(machine.jax.version)
    if oldest is not None and library.version[:2] < oldest:
        return Fact(
            "NCCL",
            PROBLEM if machine.driver.gpus else NOTE,
            str(library),
            f"this jax needs >= {oldest[0]}.{oldest[1]} for its small all-reduces (psum), in one process as well: "
            f"{upgrade}",
        )
    if library.version < _cuda.NCCL_OF_PROCESSES:
        return Fact(
            "NCCL",
            NOTE,
            str(library),
            f"enough for one process with all GPUs; one process per GPU needs >= 2.32.3: {upgrade}",
        )
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
    blocking = [name for name in ("jax", "GPUs", "peer access", "NCCL", "MPI") if status_of(facts, name) == PROBLEM]
    blocking += [name for name in ("GPUs", "NCCL", "MPI") if status_of(facts, name) == NOTE]
    if blocking:
        advice = "one process with all GPUs does not need this"
        return Fact(subject, NOTE, f"not possible yet, see {', '.join(blocking)}", advice)
    return Fact(subject, OK, "launch/mpirun.sh -- python your_program.py")


def allocator(facts: Sequence[Fact], machine: Machine) -> Fact:
    """Whether the fused kernels run with jax's memory allocator."""
    name, preallocates = allocators.chosen()
    verdict = allocators.VERDICTS.get((name, preallocates))
    found = allocators.described()
    if verdict is None:
        names = ", ".join(sorted({name for name, _ in allocators.VERDICTS}))
        return Fact("allocator", PROBLEM, found, f"jax takes {names}: correct {allocators.ALLOCATOR_VARIABLE}")
    found += f"; {verdict}"
    if "fails" in (verdict.one_process, verdict.process_per_gpu):
        default = f"unset {allocators.ALLOCATOR_VARIABLE} and {allocators.PREALLOCATE_VARIABLE}"
        return Fact("allocator", PROBLEM if machine.driver.gpus else NOTE, found, verdict.advice or default)
    measured = verdict.one_process == verdict.process_per_gpu == "runs"
    return Fact("allocator", OK if measured else NOTE, found, verdict.advice)
