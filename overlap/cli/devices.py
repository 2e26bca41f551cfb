"""Decides whether a command runs on the GPUs of this machine, or emulated."""

from __future__ import annotations

import jax

from overlap import _cuda
from overlap.kernels.architectures import mainloop_of
from overlap.kernels.target import Target

# The most emulated devices. With more, the demo takes minutes, and the picture has no room for them.
MOST_EMULATED = 8


def why_no_gpu() -> str | None:
    """Says why jax has no GPU here; None if there is one. Starts no backend of jax."""
    if (jax.config.jax_platforms or "").startswith("cpu"):
        return "JAX_PLATFORMS=cpu"
    gpus = _cuda.visible_gpus()
    if not gpus:
        return "no GPU is visible"
    if _cuda.jax_plugin() is None:
        return "jax has no CUDA plugin here: pip install 'overlap[cuda13]'"
    return None


def why_not_gpus() -> str | None:
    """Says why fused kernels run emulated here; None if the visible GPUs run them. Starts no backend of jax."""
    if reason := why_no_gpu():
        return reason
    try:
        for gpu in _cuda.visible_gpus():
            mainloop_of(Target("gpu", gpu.name, num_cores=1))
    except NotImplementedError as error:
        return str(error)
    return None
