"""Decides whether a command runs on the GPUs of this machine, or emulated."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from overlap import _cuda
from overlap.kernels.architectures import mainloop_of
from overlap.kernels.target import Target

# The most emulated devices. With more, a command takes minutes, and a picture has no room for them.
MOST_EMULATED = 8


def why_no_gpu() -> str | None:
    """Says why jax has no GPU here; None if there is one. Starts no backend of jax."""
    if (jax.config.jax_platforms or "").startswith("cpu"):
        return "JAX_PLATFORMS=cpu"
    if not _cuda.visible_gpus():
        return "no GPU is visible"
    if _cuda.jax_plugin() is None:
        return "jax has no CUDA plugin here: pip install 'overlap[cuda13]'"
    return None


def why_unsupported(gpus: Sequence[_cuda.Gpu]) -> str | None:
    """Says why fused kernels do not run on these GPUs; None if they do. Starts no backend of jax."""
    try:
        for gpu in gpus:
            mainloop_of(Target("gpu", gpu.name, num_cores=1))
    except NotImplementedError as error:
        return str(error)
    return None


def why_not_gpus() -> str | None:
    """Says why fused kernels run emulated here; None if the visible GPUs run them. Starts no backend of jax."""
    return why_no_gpu() or why_unsupported(_cuda.visible_gpus())
