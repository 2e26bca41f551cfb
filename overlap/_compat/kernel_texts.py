"""The texts of the Mosaic GPU kernels that this process has lowered.

Reason: `overlap/kernels/ahead.py` assembles kernels before XLA does. Mosaic GPU knows a kernel by the hash of its text.

Checked: jax 0.11.2 and 0.12.0.1. Replaced by: XLA or Mosaic GPU assembling the kernels of a program beside each other.
For upstream: docs/upstream.md#kernels-assembled-ahead.
"""

from __future__ import annotations

from collections.abc import Mapping

from overlap._compat.patch import private


def known_kernels() -> Mapping[bytes, bytes]:
    """The text of each kernel, by its hash. It grows when further kernels are lowered; empty: jax does not tell."""
    try:
        return private("jax.experimental.mosaic.gpu.core", "KNOWN_KERNELS")
    except RuntimeError:
        return {}
