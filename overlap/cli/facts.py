"""What `python -m overlap doctor` finds out about this machine, and the facts that it prints.

Whatever could hang or crash (importing jax, loading the driver or NCCL) is asked in another process with a time limit.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from overlap import _cuda

OK, NOTE, PROBLEM = "OK", "note", "PROBLEM"

_JAX = """
import json, numpy, jax, jaxlib
version, path = str(getattr(jax, "__version__", "")), str(list(jax.__path__)[0])
print(json.dumps({"version": version, "numpy": numpy.__version__, "path": path}))
"""
_DRIVER = """
import json
from overlap import _cuda
gpus = [(gpu.name, gpu.compute_capability) for gpu in _cuda.visible_gpus()]
print(json.dumps({"gpus": gpus, "pairs": _cuda.pairs_without_peer_access()}))
"""
_NCCL = """
import dataclasses, json
from overlap import _cuda
library = _cuda.nccl()
print(json.dumps({"library": library and dataclasses.asdict(library)}))
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


def status_of(facts: Sequence[Fact], subject: str) -> str | None:
    """The status of the fact about `subject`; None if it has not been checked yet."""
    return next((fact.status for fact in facts if fact.subject == subject), None)


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


@dataclasses.dataclass(frozen=True)
class Jax:
    """The jax that `import jax` finds: why that fails, or ""; its version, numpy's version, and its folder."""

    error: str = ""
    version: str = ""
    numpy: str = ""
    path: str = ""


@dataclasses.dataclass(frozen=True)
class Driver:
    """The visible GPUs, the pairs (reader, owner) without peer access, and why there is no answer, or ""."""

    gpus: tuple[_cuda.Gpu, ...] = ()
    pairs: tuple[tuple[int, int], ...] = ()
    error: str = ""


@dataclasses.dataclass(frozen=True)
class Nccl:
    """The NCCL that XLA would use, or None; and why loading it gave no answer, or ""."""

    library: _cuda.NcclLibrary | None = None
    error: str = ""


class Machine:
    """This machine. Each property is found out when it is first needed."""

    @functools.cached_property
    def jax(self) -> Jax:
        """The jax that `import jax` finds."""
        return Jax(**_answer(_JAX))

    @functools.cached_property
    def driver(self) -> Driver:
        """What the NVIDIA driver reports."""
        found = _answer(_DRIVER)
        gpus = tuple(_cuda.Gpu(name, tuple(capability)) for name, capability in found.pop("gpus", ()))
        return Driver(gpus, tuple((reader, owner) for reader, owner in found.pop("pairs", ())), **found)

    @functools.cached_property
    def nccl(self) -> Nccl:
        """The NCCL that XLA would use."""
        found = _answer(_NCCL)
        if library := found.pop("library", None):
            return Nccl(_cuda.NcclLibrary(tuple(library["version"]), library["path"], tuple(library["copies"])))
        return Nccl(**found)


def _answer(code: str) -> dict[str, Any]:
    """The JSON that `code` prints in another process; {"error": …} if it fails."""
    works, answer = ask(code)
    return json.loads(answer) if works else {"error": answer}
