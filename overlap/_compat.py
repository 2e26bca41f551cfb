"""Every import from `jax._src` and every test of a jax version, each with its reason.

Nothing else in the library imports private names. When a jax release moves one of them, this file alone changes.
"""

from __future__ import annotations

__all__ = ["backends_are_initialized"]


def backends_are_initialized() -> bool:
    """Whether any JAX backend has been started in this process.

    `jax.distributed.initialize` must come before that. There is no public way to ask without starting the backends:
    `jax.extend.backend.backends()` starts them.
    """
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()
