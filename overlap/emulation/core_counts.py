"""CPU devices that answer `device.core_count`, for kernels that take their grid from it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax

from .cores import core_count


@contextlib.contextmanager
def core_count_of_devices() -> Iterator[None]:
    """While active, `device.core_count` of a CPU device is what `core_count()` returns.

    A CPU device has no such attribute. Use this for kernels that you cannot change; your
    own kernels call `core_count()`.

    Raises:
        RuntimeError: the default device has the attribute already: it is not a CPU device, or this context is active.

    Example:
        >>> from overlap import emulation
        >>> with emulation.emulate(cores=4), emulation.core_count_of_devices():
        ...     cores = jax.local_devices()[0].core_count
        >>> cores
        4
    """
    kind = type(jax.local_devices()[0])
    if hasattr(jax.local_devices()[0], "core_count"):
        raise RuntimeError("core_count_of_devices() is for CPU devices, and is active once at a time")
    # The class belongs to jaxlib and is common to all devices, so it is changed for as short a time as possible.
    setattr(kind, "core_count", property(lambda device: core_count()))  # noqa: B010
    try:
        yield
    finally:
        delattr(kind, "core_count")
