"""The library's environment variables, read once per process and checked.

This module imports only the standard library, so that kernels and `python -m overlap doctor` can both use it.
docs/environment.md lists the variables.
"""

from __future__ import annotations

import functools
import math
import os

WAIT_TIMEOUT_VARIABLE = "OVERLAP_WAIT_TIMEOUT_S"
WAIT_TIMEOUT_DEFAULT_S = 600.0
EMULATED_GPU_VARIABLE = "OVERLAP_EMULATED_GPU"
EMULATED_GPUS = ("hopper", "blackwell")
UNCHECKED_JAX_VARIABLE = "OVERLAP_UNCHECKED_JAX"


def require_valid() -> None:
    """Raises RuntimeError if a variable that this module reads has a wrong value, whether or not a call needs it.

    So a wrong value is noticed in the first call, also where the variable changes nothing, e.g. in the emulator.
    """
    for read in (wait_timeout_s, emulated_gpu, unchecked_jax):
        read()


@functools.cache
def wait_timeout_s() -> float:
    """How long a kernel may wait for another device before it gives up, in seconds; 0: for ever.

    Read from $OVERLAP_WAIT_TIMEOUT_S at the first call in the process. A later change of the variable has no effect,
    since the value is compiled into kernels.

    Returns:
      A finite number of seconds, at least 0. 600 if the variable is unset or empty.

    Raises:
      RuntimeError: the variable is no such number.

    Examples:
      >>> import overlap._settings
      >>> overlap._settings.wait_timeout_s() >= 0
      True
    """
    text = os.environ.get(WAIT_TIMEOUT_VARIABLE, "").strip()
    if not text:
        return WAIT_TIMEOUT_DEFAULT_S
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds >= 0):
        raise RuntimeError(
            f"`{WAIT_TIMEOUT_VARIABLE}` must be a number of seconds, at least 0 (0: wait for ever), got {text!r}: "
            f"correct the variable, or unset it for the default of {WAIT_TIMEOUT_DEFAULT_S:.0f} s"
        )
    return seconds


@functools.cache
def emulated_gpu() -> str:
    """The GPU that a CPU device stands for when kernels run emulated: "hopper" (the default) or "blackwell".

    Read from $OVERLAP_EMULATED_GPU at the first call in the process.

    Raises:
      RuntimeError: the variable names another GPU.

    Examples:
      >>> import overlap._settings
      >>> overlap._settings.emulated_gpu()
      'hopper'
    """
    text = os.environ.get(EMULATED_GPU_VARIABLE, "").strip()
    if (name := text.lower() or EMULATED_GPUS[0]) not in EMULATED_GPUS:
        raise RuntimeError(
            f"`{EMULATED_GPU_VARIABLE}` must be {' or '.join(EMULATED_GPUS)}, got {text!r}: correct the variable, or "
            f"unset it for {EMULATED_GPUS[0]}"
        )
    return name


@functools.cache
def unchecked_jax() -> bool:
    """Whether the library may change jax's modules in a version with which these changes were not checked.

    Read from $OVERLAP_UNCHECKED_JAX at the first call in the process: "1" for yes; "0", empty or unset for no.

    Raises:
      RuntimeError: the variable has another value.

    Examples:
      >>> import overlap._settings
      >>> overlap._settings.unchecked_jax()
      False
    """
    text = os.environ.get(UNCHECKED_JAX_VARIABLE, "").strip()
    if text not in ("", "0", "1"):
        raise RuntimeError(
            f"`{UNCHECKED_JAX_VARIABLE}` must be 1 or 0, got {text!r}: correct the variable, or unset it for 0"
        )
    return text == "1"
