"""Which version of NCCL a version of jax needs for XLA's own collectives.

Reason: from jax 0.12 on, XLA asks NCCL for its peers' addresses in each small all-reduce, such as the `psum` of a
scalar. With one process for all GPUs this fails with NCCL 2.28.9, which jax's own extra allows
("ncclGetPeerDevicePointer … unhandled system error"), and works with 2.30.7. Fused kernels run with either.
`python -m overlap doctor` warns.

Checked: jax 0.11.2 and 0.12.0.1. Replaced by: a lower bound for NCCL in jax's CUDA extras.
For upstream: docs/upstream.md#nccl-versions.
"""

from __future__ import annotations

from overlap import _cuda


def oldest_nccl_of_one_process(jax_version: str) -> tuple[int, int] | None:
    """The oldest NCCL with which one process that has all GPUs can run all programs; None if any version will do.

    Args:
      jax_version: such as "0.12.0.1". The caller passes it, because `python -m overlap doctor` does not import jax.
    """
    number = tuple(int(part) for part in jax_version.split(".")[:2] if part.isdecimal())
    return _cuda.NCCL_WITH_PEER_POINTERS if number >= (0, 12) else None
