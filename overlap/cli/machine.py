"""What this machine has, asked once each: jax, the GPUs and NCCL, all in processes of their own with a time limit."""

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
    """What `import jax` gives.

    Attributes:
      error: why it fails, or "".
      version, numpy: of what was imported.
      path: the folder that it was imported from.
    """

    error: str = ""
    version: str = ""
    numpy: str = ""
    path: str = ""


@dataclasses.dataclass(frozen=True)
class Driver:
    """What the NVIDIA driver says.

    Attributes:
      gpus: those that this process would see.
      in_all: how many there are without CUDA_VISIBLE_DEVICES.
      pairs: (reader, owner) without peer access.
      error: why it gave no answer (it crashed, or took too long), or "".
    """

    gpus: tuple[_cuda.Gpu, ...] = ()
    in_all: int = 0
    pairs: tuple[tuple[int, int], ...] = ()
    error: str = ""


@dataclasses.dataclass(frozen=True)
class Nccl:
    """The NCCL that XLA would use.

    Attributes:
      library: that one, or None.
      fakes: what is called libnccl.so.2 and is none, each with the reason.
      error: why loading it gave no answer, or "".
    """

    library: _cuda.NcclLibrary | None = None
    fakes: tuple[str, ...] = ()
    error: str = ""


class Machine:
    """The answers; each question is asked when its answer is first needed."""

    @functools.cached_property
    def jax(self) -> Jax:
        """What `import jax` gives."""
        works, answer = _asked(_JAX, timeout_s=120)
        if not works:
            return Jax(error=answer)
        return Jax(version=answer["jax"], numpy=answer["numpy"], path=answer["path"])

    @functools.cached_property
    def driver(self) -> Driver:
        """What the NVIDIA driver says."""
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
    works, answer = ask(code, timeout_s=timeout_s, **environment)
    if not works:
        return False, answer
    try:
        return True, json.loads(answer)
    except ValueError:
        return False, f"the process ended without an answer: {answer or 'nothing was printed'}"


# --- In a process of their own ----------------------------------------------------------------------------------------


def print_driver() -> None:
    """Prints what `Machine.driver` reads."""
    gpus = [(gpu.name, gpu.compute_capability) for gpu in _cuda.visible_gpus()]
    print(json.dumps({"gpus": gpus, "pairs": _cuda.pairs_without_peer_access()}))


def print_nccl() -> None:
    """Prints what `Machine.nccl` reads."""
    # First, since to look at the files loads them.
    library = _cuda.nccl()
    print(json.dumps({"library": None if library is None else dataclasses.asdict(library), "fakes": _fakes()}))


def _fakes() -> list[str]:
    """The files by the name of NCCL, in LD_PRELOAD and LD_LIBRARY_PATH, that are none, each with the reason."""
    # The loader's own rules: LD_PRELOAD has spaces or colons between files, LD_LIBRARY_PATH colons or semicolons.
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
