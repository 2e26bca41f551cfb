"""Adds up a GPU's time by kind of kernel, from a profile of jax."""

from __future__ import annotations

import collections
import pathlib
import re

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


def kind_of(kernel: str) -> str:
    """Returns the kind of the kernel whose name is `kernel`."""
    return next((kind for kind, pattern in KINDS if re.search(pattern, kernel, re.IGNORECASE)), REST)


def device_us_by_kind(folder: str, turns: int) -> dict[str, float]:
    """Returns the time of a GPU's kernels by kind, in microseconds per turn: the mean over the GPUs.

    The result is empty if no GPU was profiled.

    Kernels in several streams may run at the same time, so the sum over all kinds may be more than the time of a turn.

    Args:
      folder: where `jax.profiler.trace` has written its files.
      turns: how many turns the profiled program has.
    """
    total: collections.Counter[str] = collections.Counter()
    gpus = 0
    for path in pathlib.Path(folder).rglob("*.xplane.pb"):
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            if not plane.name.startswith("/device:GPU"):
                continue
            gpus += 1
            for line in plane.lines:
                # Only the lines of streams have the kernels. The other lines show the same times by operation, scope
                # or module.
                if line.name.startswith("Stream"):
                    for event in line.events:
                        total[kind_of(event.name)] += event.duration_ns * 1e-3
    return {kind: us / turns / max(gpus, 1) for kind, us in total.items()}
