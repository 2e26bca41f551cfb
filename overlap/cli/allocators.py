"""Finds out which allocator jax uses on GPUs, and says what is known about the fused kernels with this allocator."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Literal

ALLOCATOR_VARIABLE, PREALLOCATE_VARIABLE = "XLA_PYTHON_CLIENT_ALLOCATOR", "XLA_PYTHON_CLIENT_PREALLOCATE"

Known = Literal["runs", "fails", "not measured"]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What is known about the fused kernels with one allocator.

    Attributes:
      one_process: whether the kernels run in one process with all GPUs.
      process_per_gpu: whether they run with one process per GPU, where peers read symmetric memory that NCCL maps.
      advice: what to do if they fail, or "".
    """

    one_process: Known
    process_per_gpu: Known
    advice: str = ""

    def __str__(self) -> str:
        return f"fused kernels: one process: {self.one_process}; a process per GPU: {self.process_per_gpu}"


# All allocators of jax, with the verdict seen on GPUs. The key: the allocator's name, and whether it takes most of the
# memory at the start. "default" is the allocator that jax uses if no variable is set. Change an entry only after a
# measurement.
VERDICTS: Mapping[tuple[str, bool], Verdict] = {
    ("default", True): Verdict("runs", "runs"),
    ("default", False): Verdict("runs", "runs"),
    ("bfc", True): Verdict("runs", "not measured"),
    ("bfc", False): Verdict("not measured", "not measured"),
    ("platform", False): Verdict(
        "runs", "fails", "peers do not see its memory: XLA runs instead; unset it, or take cuda_async"
    ),
    ("cuda_async", True): Verdict("runs", "runs"),
    ("cuda_async", False): Verdict("not measured", "not measured"),
    ("vmm", True): Verdict("runs", "not measured"),
    ("vmm", False): Verdict("not measured", "not measured"),
    ("address", True): Verdict("runs", "not measured"),
    ("address", False): Verdict("not measured", "not measured"),
}


def chosen(environ: Mapping[str, str] = os.environ) -> tuple[str, bool]:
    """The allocator that the environment variables choose, and whether it takes most of the memory at the start."""
    name = environ.get(ALLOCATOR_VARIABLE, "default").lower()
    # Only these words mean no, as in jax.
    preallocates = environ.get(PREALLOCATE_VARIABLE, "") not in ("false", "False", "0")
    # "platform" asks the driver for memory for each array separately.
    return name, preallocates and name != "platform"


def described(environ: Mapping[str, str] = os.environ) -> str:
    """Describes in words the allocator that the environment variables choose, with the values of these variables."""
    name, preallocates = chosen(environ)
    given = [
        f"{variable}={environ[variable]}"
        for variable in (ALLOCATOR_VARIABLE, PREALLOCATE_VARIABLE)
        if variable in environ
    ]
    memory = "memory taken at the start" if preallocates else "memory taken as needed"
    return f"{name}, {memory} ({', '.join(given) or 'nothing is set'})"
