"""The number of cores of an emulated device. This module imports nothing of the emulator."""

from __future__ import annotations

import jax

DEFAULT_CORES = 4
# Part of the cache key of `jax.jit`: a function traced for two cores is not reused for three.
cores = jax.make_user_context(DEFAULT_CORES)


def core_count() -> int:
    """The number of cores that a CPU device pretends to have; 4 outside `emulate`.

    The value is part of the cache key of `jax.jit`, so a function may depend on it while it is traced.
    """
    return cores.value
