"""Selects the mainloop for a kind of device. No other module knows all architectures."""

from __future__ import annotations

from overlap.kernels.blackwell.mainloop import BLACKWELL
from overlap.kernels.hopper.mainloop import HOPPER
from overlap.kernels.mainloop import Mainloop
from overlap.kernels.target import Target


def mainloop_of(target: Target) -> Mainloop:
    """Returns the mainloop that runs on a device; on a CPU it runs emulated.

    Raises:
      NotImplementedError: the library has no mainloop for this device.
    """
    if target.platform not in ("gpu", "cpu"):
        raise NotImplementedError(
            f"the fused kernels need an NVIDIA GPU or, emulated, a CPU, got platform {target.platform!r}: use "
            'implementation="xla"'
        )
    if target.is_blackwell:
        return BLACKWELL
    if not target.is_hopper:
        raise NotImplementedError(
            "the fused kernels need a Hopper or a Blackwell GPU (compute capability 9.0 or 10), got "
            f'{target.kind!r}: use implementation="xla"'
        )
    return HOPPER
