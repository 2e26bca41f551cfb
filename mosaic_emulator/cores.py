"""The number of cores of an emulated device. This module imports nothing of the emulator."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import jax

DEFAULT_CORES = 4
# Part of the cache key of `jax.jit`: a function traced for two cores is not reused for three.
cores = jax.make_user_context(DEFAULT_CORES)
_lock = threading.Lock()
_active = 0  # contexts that have been entered and not left


def core_count() -> int:
    """The number of cores that a CPU device pretends to have; 4 outside `emulate`.

    The value is part of the cache key of `jax.jit`, so a function may depend on it while it is traced.
    """
    return cores.value


def _core_count_of(device: Any) -> int:
    if device.platform != "cpu":
        raise AttributeError("core_count")  # Python then calls the class's `__getattr__`, as without the property.
    return core_count()


@contextlib.contextmanager
def core_count_of_devices() -> Iterator[None]:
    """While the context is active, `device.core_count` of a CPU device returns what `core_count()` returns.

    `emulate` enters this context itself. It is needed only for kernels that run without `emulate`, after `enable()`,
    and that read `device.core_count`, which a CPU device does not have otherwise. Devices of other platforms are not
    affected. Contexts may be nested.

    Examples:
        >>> import mosaic_emulator
        >>> with mosaic_emulator.core_count_of_devices():
        ...     cores = jax.local_devices()[0].core_count
        >>> cores
        4
    """
    global _active
    with _lock:
        _active += 1
        if _active == 1:
            # All devices share this class, so the property is removed when the last context ends.
            setattr(jax.Device, "core_count", property(_core_count_of))  # noqa: B010
    try:
        yield
    finally:
        with _lock:
            _active -= 1
            if not _active:
                delattr(jax.Device, "core_count")
