"""Finds out which jax, GPUs and NCCL this machine has: each once, in another process with a time limit."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import json
import os
import pathlib
import re
from typing import Any

from overlap import _cuda
from overlap.cli.facts import ask

_JAX = """
import json, numpy, jax, jaxlib
found = {"jax": str(getattr(jax, "__version__", "")), "numpy": numpy.__version__, "path": str(list(jax.__path__)[0])}
print(json.dumps(found))
"""
_DRIVER = "from overlap.cli import machine; machine.print_driver()"
_NCCL = "from overlap.cli import machine; machine.print_nccl()"


@dataclasses.dataclass(frozen=True)
class Jax:
    """The jax that `import jax` finds.

    Attributes:
      error: why the import fails, or "".
      version: the version of jax.
      numpy: the version of numpy.
      path: the folder of the imported package.
    """

    error: str = ""
    version: str = ""
    numpy: str = ""
    path: str = ""


@dataclasses.dataclass(frozen=True)
class Driver:
    """What the NVIDIA driver reports.

    Attributes:
      gpus: the GPUs that are visible to this process.
      in_all: how many GPUs there are, whatever CUDA_VISIBLE_DEVICES is.
      pairs: pairs (reader, owner) of visible GPUs without peer access.
      error: why the driver gave no answer (it crashed, or took too long), or "".
    """

    gpus: tuple[_cuda.Gpu, ...] = ()
    in_all: int = 0
    pairs: tuple[tuple[int, int], ...] = ()
    error: str = ""


@dataclasses.dataclass(frozen=True)
class Nccl:
    """The NCCL that XLA would use.

    Attributes:
      library: the library, or None if there is none.
      fakes: files that have NCCL's name but are not NCCL, each with the reason.
      error: why loading it gave no answer, or "".
    """

    library: _cuda.NcclLibrary | None = None
    fakes: tuple[str, ...] = ()
    error: str = ""


class Machine:
    """This machine. Each property is found out when it is first needed."""

    @functools.cached_property
    def jax(self) -> Jax:
        """The jax that `import jax` finds."""
        works, answer = _asked(_JAX, timeout_s=120)
        if not works:
            return Jax(error=answer)
        return Jax(version=answer["jax"], numpy=answer["numpy"], path=answer["path"])

    @functools.cached_property
    def driver(self) -> Driver:
        """What the NVIDIA driver reports."""
        works, answer = _asked(_DRIVER, timeout_s=60)
        if not works:
            return Driver(error=answer)
        gpus = tuple(_cuda.Gpu(name, (major, minor)) for name, (major, minor) in answer["gpus"])
        in_all = len(gpus)
        if "CUDA_VISIBLE_DEVICES" in os.environ:
            works, without = _asked(_DRIVER, timeout_s=60, CUDA_VISIBLE_DEVICES=None)
            in_all = len(without["gpus"]) if works else in_all
        return Driver(gpus, in_all, tuple((reader, owner) for reader, owner in answer["pairs"]))

    @functools.cached_property
    def nccl(self) -> Nccl:
        """The NCCL that XLA would use."""
        works, answer = _asked(_NCCL, timeout_s=60)
        if not works:
            return Nccl(error=answer)
        library = answer["library"]
        if library is not None:
            library = _cuda.NcclLibrary(tuple(library["version"]), library["path"], tuple(library["copies"]))
        return Nccl(library, tuple(answer["fakes"]))


def _asked(code: str, timeout_s: int, **environment: None) -> tuple[bool, Any]:
    """Runs `code` in a Python process of its own, with these environment variables unset (see `ask`).

    Returns:
      Whether the code succeeded; and the value that it printed as JSON, or the error.
    """
    works, answer = ask(code, timeout_s=timeout_s, **environment)
    if not works:
        return False, answer
    try:
        return True, json.loads(answer)
    except ValueError:
        return False, f"the process ended without an answer: {answer or 'nothing was printed'}"


# --- These run in the other process -----------------------------------------------------------------------------------


def print_driver() -> None:
    """Prints what `Machine.driver` reads."""
    gpus = [(gpu.name, gpu.compute_capability) for gpu in _cuda.visible_gpus()]
    print(json.dumps({"gpus": gpus, "pairs": _cuda.pairs_without_peer_access()}))


def print_nccl() -> None:
    """Prints what `Machine.nccl` reads."""
    # Call this before `_fakes`, which loads the files that it examines.
    library = _cuda.nccl()
    print(json.dumps({"library": None if library is None else dataclasses.asdict(library), "fakes": _fakes()}))


def _fakes() -> list[str]:
    """The files in LD_PRELOAD and LD_LIBRARY_PATH that have NCCL's name but are not NCCL, each with the reason."""
    # The loader's rules: LD_PRELOAD separates files by spaces or colons, LD_LIBRARY_PATH by colons or semicolons.
    preloaded = [name for name in re.split(r"[\s:]+", os.environ.get("LD_PRELOAD", "")) if "libnccl" in name]
    named = [("LD_PRELOAD", path) for path in preloaded]
    for folder in re.split("[:;]", os.environ.get("LD_LIBRARY_PATH", "")):
        path = pathlib.Path(folder) / _cuda.NCCL_SONAME
        if folder and (path.exists() or path.is_symlink()):
            named.append(("LD_LIBRARY_PATH", str(path)))
    fakes = []
    for variable, path in dict.fromkeys(named):
        try:
            is_nccl = _cuda.nccl_version_of(ctypes.CDLL(path)) is not None
            reason = "" if is_nccl else "it has no ncclGetVersion"
        except OSError as error:
            reason = str(error).removeprefix(f"{path}: ")
        if reason:
            fakes.append(f"{path} (from {variable}) is no NCCL: {reason}")
    return fakes
