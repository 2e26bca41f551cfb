"""CPU devices that answer `device.core_count`, for kernels that take their grid from it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import jax

from .cores import core_count

_lock = threading.Lock()
_active = 0  # contexts that have been entered and not left


def _core_count_of(device: Any) -> int:
    if device.platform != "cpu":
        raise AttributeError("core_count")  # Python then asks the class's own `__getattr__`, as without the property.
    return core_count()


@contextlib.contextmanager
def core_count_of_devices() -> Iterator[None]:
    """While active, `device.core_count` of a CPU device is what `core_count()` returns.

    `emulate` does this by itself. Only kernels that run without it, after `enable()`, need this context, and only if
    they ask the device: a CPU device has no such attribute. Devices of other platforms answer as before. Contexts
    may be nested.

    Example:
        >>> from overlap import emulation
        >>> with emulation.core_count_of_devices():
        ...     cores = jax.local_devices()[0].core_count
        >>> cores
        4
    """
    global _active
    with _lock:
        _active += 1
        if _active == 1:
            # All devices share this class: it is changed while a context is active, and no longer.
            setattr(jax.Device, "core_count", property(_core_count_of))  # noqa: B010
    try:
        yield
    finally:
        with _lock:
            _active -= 1
            if not _active:
                delattr(jax.Device, "core_count")
