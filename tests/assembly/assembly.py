"""Compiles a jitted function to machine code for H200, B200 or B300 without a GPU, and reports the resources it uses.

A compile-only topology takes the place of the GPUs: the function is lowered for it, and the CUDA plugin's own ptxas
assembles every Mosaic kernel. What ptxas and the host code say about each kernel (registers, spills, shared memory,
grid, warnings) comes back as a `KernelReport`.

There are two ways to use this module. `assemble` works in the current process, whose environment must be
`child_environment`; it captures file descriptor 1, to which Mosaic prints its figures. `assemble_case` asks a child
process to assemble one `Case`, with one child per target; the tests use this one.

From the command line (more by --help):

    python -m tests.assembly.assembly --op all_gather_lhs_matmul --devices 4 --shape 1024,4096,4096 --dtype f16
        [--target b200] [--config tile_n=128,stages=3] [--ptx FILE]

Constraints: needs the wheels of the extra `aot` (jax-cuda13-plugin, jax-cuda13-pjrt, nvidia-cuda-nvcc and so on);
`unavailable_reason` says what is missing. The numbers come from ptxas, so they change with its version.
"""

from __future__ import annotations

import argparse
import ast
import atexit
import concurrent.futures
import contextlib
import ctypes
import dataclasses
import gc
import hashlib
import importlib
import importlib.util
import itertools
import math
import multiprocessing
import os
import pathlib
import re
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tests.assembly.report import KernelReport, dumped_ptx, parse_reports
from tests.assembly.targets import TARGETS, topology

if TYPE_CHECKING:
    import jax

_REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
_KERNEL_HASH = re.compile(r'kernel_hash = "((?:[^"\\]|\\.)*)"')
_DTYPES = {"f16": "float16", "bf16": "bfloat16", "f32": "float32"}


@dataclasses.dataclass(frozen=True)
class Case:
    """One compilation: an operation, the shape per shard as (m, n, k), and the target.

    `op` names a function of `programs`, or `module:function` with a function `(case, mesh) -> (fn, args)` where `fn`
    can be jitted and `args` are ShapeDtypeStructs. `mesh` maps axis names to sizes; empty means one axis `x` of
    `devices`. The fused axis is always `x`. `processes` is the number of processes per host; they share the host's GPUs
    equally.
    """

    op: str
    devices: int = 1
    shape: tuple[int, ...] = (1024, 4096, 4096)
    dtype: str = "f16"
    target: str = "h200"
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    mesh: Mapping[str, int] = dataclasses.field(default_factory=dict)
    hosts: int = 1
    processes: int = 1


# --- The environment --------------------------------------------------------------------------------------------------


def cuda_root() -> pathlib.Path | None:
    """Returns the folder of the CUDA wheels that holds bin/ptxas, or None."""
    with contextlib.suppress(ImportError):
        spec = importlib.util.find_spec("nvidia.cu13")
        for folder in (spec and spec.submodule_search_locations) or ():
            if (pathlib.Path(folder) / "bin" / "ptxas").exists():
                return pathlib.Path(folder)
    return None


def unavailable_reason() -> str | None:
    """Returns why nothing can be assembled in this environment, or None if assembling works."""
    found = importlib.util.find_spec
    missing = {
        "jax-cuda13-pjrt": found("jax_plugins") is None or found("jax_plugins.xla_cuda13") is None,
        "jax-cuda13-plugin": found("jax_cuda13_plugin") is None,
        "nvidia-cuda-nvcc (ptxas)": cuda_root() is None,
    }
    return next((f"{name} is not installed: install the extra `aot`" for name, lacks in missing.items() if lacks), None)


def child_environment() -> dict[str, str]:
    """Returns the environment variables that `assemble` needs; they must be set before jax is imported."""
    root = cuda_root()
    if root is None:
        raise RuntimeError(unavailable_reason())
    environment = {key: value for key, value in os.environ.items() if key not in ("XLA_FLAGS", "JAX_ENABLE_X64")}
    environment["PATH"] = os.pathsep.join([str(root / "bin"), environment.get("PATH", "")])
    environment["PYTHONPATH"] = os.pathsep.join([str(_REPOSITORY), environment.get("PYTHONPATH", "")])
    environment["JAX_PLATFORMS"] = "cpu"
    environment["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    # A persistent cache would return a finished executable, and Mosaic would print nothing.
    environment["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    return environment


# --- Compiling in this process ----------------------------------------------------------------------------------------


_numbers = itertools.count()


class _Salted:
    """Takes the place of `hashlib` in Mosaic, which assembles kernels of one hash once and prints figures only then."""

    def __init__(self) -> None:
        self._salt = str(next(_numbers)).encode()

    def sha256(self, code: bytes) -> Any:
        """Returns the hash of a kernel, different for each case."""
        return hashlib.sha256(code + self._salt)


def assemble(
    fn: Callable[..., Any], *args: jax.ShapeDtypeStruct, ptx: str | None = None, hlo: str | None = None
) -> list[KernelReport]:
    """Assembles every Mosaic kernel of `fn(*args)` for the GPU that the arguments' shardings name (a `topology` mesh).

    Args:
        fn: The function to compile.
        *args: Global shapes with shardings.
        ptx: The file for the PTX.
        hlo: The file for XLA's program.
    """
    import jax
    from jax.experimental.mosaic.gpu import core

    core.hashlib = _Salted()
    os.environ.update({f"MOSAIC_GPU_DUMP_{kind}": "1" for kind in ("PTXAS", "HOST_LLVM", "PTX")})
    lowered = jax.jit(fn).lower(*args)
    kernels = frozenset(_KERNEL_HASH.findall(lowered.as_text()))
    with _captured_stdout() as captured:
        compiled = lowered.compile()
    text = captured()
    if hlo:
        pathlib.Path(hlo).write_text(compiled.as_text())
    if ptx:
        pathlib.Path(ptx).write_text(dumped_ptx(text))
    reports = parse_reports(text)
    if len(reports) != len(kernels):
        raise RuntimeError(f"{len(kernels)} Mosaic kernels were lowered, and {len(reports)} assembled")
    return reports


@contextlib.contextmanager
def _captured_stdout() -> Iterator[Callable[[], str]]:
    """Collects what native code writes to file descriptor 1."""
    flush = ctypes.CDLL(None).fflush
    with tempfile.TemporaryFile() as sink:
        sys.stdout.flush()
        flush(None)
        saved = os.dup(1)
        os.dup2(sink.fileno(), 1)
        text: list[str] = []
        try:
            yield lambda: "".join(text)
        finally:
            sys.stdout.flush()
            flush(None)
            os.dup2(saved, 1)
            os.close(saved)
            sink.seek(0)
            text.append(sink.read().decode(errors="replace"))


# --- Cases -----------------------------------------------------------------------------------------------------------


def struct(mesh: jax.sharding.Mesh, shape: Sequence[int], dtype: str, spec: Any = None) -> jax.ShapeDtypeStruct:
    """Returns a ShapeDtypeStruct of the *global* shape, sharded by `spec` (None: replicated)."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    sharding = NamedSharding(mesh, PartitionSpec() if spec is None else spec)
    return jax.ShapeDtypeStruct(tuple(shape), dtype_of(dtype), sharding=sharding)


def dtype_of(name: str) -> str:
    """Returns the full name of a dtype: float16 for f16."""
    return _DTYPES.get(name, name)


def build(case: Case) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns the function of a case and its arguments, ready for `assemble`."""
    import jax
    import numpy as np

    from overlap.primitives import host_mesh, stalls

    axes = dict(case.mesh) or {"x": case.devices}
    processes = case.hosts * case.processes
    devices = topology(case.target, math.prod(axes.values()) // processes, processes)
    # A device of a topology has a process index, but no number of its host. Compute the host from the process index.
    host_mesh.host_of = lambda device: device.process_index // case.processes
    host_mesh._own_host = lambda mesh: 0
    # No GPU here could share memory with the host. Pretend that one can, so that the whole wait is assembled.
    stalls.address = lambda: stalls.ADDRESS
    mesh = jax.sharding.Mesh(np.array(devices).reshape(tuple(axes.values())), tuple(axes))
    module, _, function = case.op.rpartition(":")
    return getattr(importlib.import_module(module or "tests.assembly.programs"), function)(case, mesh)


# --- A child process --------------------------------------------------------------------------------------------------


class Assembler:
    """Assembles cases one after the other in child processes, with one child per target.

    One process cannot serve two targets: after the first, jax 0.11.2 fails with "Pass pipeline failed".
    """

    def __init__(self) -> None:
        self._children: dict[str, tuple[concurrent.futures.ProcessPoolExecutor, Any]] = {}

    def assemble(self, case: Case, timeout_s: float = 300.0, **files: str) -> list[KernelReport]:
        """Assembles a case in the child process for its target, which is started if it is not running yet.

        Args:
            case: The case to compile.
            timeout_s: Limit for the answer.
            **files: `ptx=FILE` or `hlo=FILE`, as in `assemble`.

        Raises:
            RuntimeError: The case cannot be compiled; the message ends with the child's traceback or its last output.
        """
        if case.target not in self._children:
            self._children[case.target] = _started()
        child, log = self._children[case.target]
        try:
            answer = child.submit(_answer, case, files).result(timeout_s)
        except (concurrent.futures.BrokenExecutor, TimeoutError) as died:
            del self._children[case.target]
            child.shutdown(wait=False, cancel_futures=True)
            log.seek(0)
            raise RuntimeError(f"assembling {case} failed, the process ended: {log.read()[-4000:]}") from died
        if isinstance(answer, str):
            raise RuntimeError(f"assembling {case} failed:\n{answer[-4000:]}")
        return answer


_starting = threading.Lock()


def _started() -> tuple[concurrent.futures.ProcessPoolExecutor, Any]:
    """Starts a child in `child_environment`. Returns it with the file of its errors."""
    log, environment = tempfile.NamedTemporaryFile("r", errors="replace"), dict(os.environ)  # noqa: SIM115
    child = concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _begin, (log.name,))
    atexit.register(child.shutdown)
    with _starting:
        os.environ.clear()
        os.environ.update(child_environment())
        try:
            child.submit(int)
        finally:
            os.environ.clear()
            os.environ.update(environment)
    return child, log


def _begin(log: str) -> None:
    os.dup2(os.open(log, os.O_WRONLY), 2)
    # At Python's default thresholds the garbage collector takes a tenth of the time.
    gc.set_threshold(200_000, 20, 100)


def _answer(case: Case, files: Mapping[str, str]) -> list[KernelReport] | str:
    """Returns the reports of a case, or the text of any error, which the parent might not be able to unpickle."""
    try:
        fn, args = build(case)
        return assemble(fn, *args, **files)
    except Exception:
        return traceback.format_exc()


assemble_case = Assembler().assemble


def main() -> None:
    """The command line: assembles one case and prints its reports."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.assembly.assembly", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--op", default="all_gather_lhs_matmul", help="function of `programs`, or module:function")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--shape", default="1024,4096,4096", help="m,n,k per shard")
    parser.add_argument("--dtype", default="f16", help=", ".join(_DTYPES))
    parser.add_argument("--target", default="h200", choices=TARGETS)
    parser.add_argument("--config", default="", help="fields of overlap.Config, as Python: tile_n=128,stages=3")
    parser.add_argument("--ptx", metavar="FILE", help="write the PTX here")
    given = parser.parse_args()
    if os.environ.get("JAX_SKIP_CUDA_CONSTRAINTS_CHECK") != "1" or os.environ.get("JAX_PLATFORMS") != "cpu":
        os.execve(sys.executable, [sys.executable, "-m", "tests.assembly.assembly", *sys.argv[1:]], child_environment())
    shape = tuple(int(size) for size in given.shape.split(","))
    pairs = (item.split("=") for item in given.config.split(",") if item)
    config = {name: ast.literal_eval(value) for name, value in pairs}
    fn, args = build(Case(given.op, given.devices, shape, given.dtype, given.target, config))
    for report in assemble(fn, *args, ptx=given.ptx):
        print(f"{report.name} ({report.architecture}): {report.registers} registers, {report.spills} B of spills, "
              f"shared memory {report.shared_memory_bytes} of {TARGETS[given.target].shared_memory_per_block_optin} B, "
              f"grid {report.grid}, threads {report.threads}", *report.warnings, sep="\n  ")  # fmt: skip


if __name__ == "__main__":
    main()
