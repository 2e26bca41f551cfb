"""Whether a command runs on the GPUs of this machine, or emulated."""

from __future__ import annotations

import jax

from overlap import _cuda
from overlap.kernels.architectures import mainloop_of
from overlap.kernels.target import Target


def why_not_gpus() -> str | None:
    """Why fused kernels run emulated here, or None if the visible GPUs run them. Starts no backend of jax."""
    if (jax.config.jax_platforms or "").startswith("cpu"):
        return "JAX_PLATFORMS=cpu"
    gpus = _cuda.visible_gpus()
    if not gpus:
        return "no GPU is visible"
    if _cuda.jax_plugin() is None:
        return "jax has no CUDA plugin here: pip install 'overlap[cuda13]'"
    try:
        for gpu in gpus:
            mainloop_of(Target("gpu", gpu.name, num_cores=1))
    except NotImplementedError as error:
        return str(error)
    return None
