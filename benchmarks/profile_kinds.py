"""Reads the kernels of a GPU from a profile of jax, and tells their kinds apart."""

from __future__ import annotations

import pathlib
import re
from typing import NamedTuple

import jax

# Each kind with a pattern for the names of its kernels. A kernel is of the first kind whose pattern matches.
KINDS = (
    ("fused", r"^overlap_"),
    ("gather", r"nccl.*allgather"),
    ("scatter", r"nccl.*reducescatter"),
    ("communication", r"nccl|memcpy.*(p2p|peer)"),
    ("attention", r"cudnn|flash|fmha|sdpa|mha"),
    ("products", r"nvjet|gemm|cutlass|cublas|xmma"),
)
REST = "rest"


class Kernel(NamedTuple):
    """A kernel that has run: its name, when it began, and how long it ran, in microseconds."""

    name: str
    start_us: float
    us: float


def kind_of(kernel: str) -> str:
    """Returns the kind of the kernel whose name is `kernel`."""
    return next((kind for kind, pattern in KINDS if re.search(pattern, kernel, re.IGNORECASE)), REST)


def kernels(profile: pathlib.Path) -> list[list[Kernel]]:
    """Returns the kernels of each GPU in the order in which they began. `profile`: an `.xplane.pb` file."""
    planes = {plane.name: plane for plane in jax.profiler.ProfileData.from_file(str(profile)).planes}
    # Only the lines of streams have the kernels. The other lines show the same times by operation, scope or module.
    return [
        sorted(
            (
                Kernel(event.name, event.start_ns * 1e-3, event.duration_ns * 1e-3)
                for line in planes[name].lines
                if line.name.startswith("Stream")
                for event in line.events
            ),
            key=lambda kernel: kernel.start_us,
        )
        for name in sorted(planes)
        if name.startswith("/device:GPU")
    ]
