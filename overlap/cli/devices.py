"""Decides whether a command runs on the GPUs of this machine, or emulated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from overlap import _compat, _cuda
from overlap.cli.arguments import WrongArguments
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


def start(
    command: str, devices: int | None, *, emulate: bool = False, emulated: int = 4
) -> tuple[list[Any], str | None]:
    """Starts jax on the GPUs of this machine, or on CPU devices where fused kernels run emulated.

    Args:
      command: the name of the command, for messages.
      devices: how many devices the user asks for; None: all GPUs, or `emulated` CPU devices.
      emulate: whether to emulate even if there are GPUs.
      emulated: see `devices`.

    Returns:
      The devices, and why they are emulated, or None. In a job of several processes, those of all processes.

    Raises:
      WrongArguments: there are fewer devices.
    """
    because = "asked for with --emulate" if emulate else why_not_gpus()
    if because is not None and not jax.distributed.is_initialized():
        if (devices or 0) > MOST_EMULATED:
            raise WrongArguments(
                f"{command}: --devices must be at most {MOST_EMULATED} where they are emulated, got {devices}"
            )
        if not _compat.backends_are_initialized():
            jax.config.update("jax_platforms", "cpu")
            jax.config.update("jax_num_cpu_devices", devices or emulated)
    available = jax.devices()
    if (devices or 0) > len(available):
        raise WrongArguments(f"{command}: --devices must be at most {len(available)} on this machine, got {devices}")
    return list(available[:devices]), because
