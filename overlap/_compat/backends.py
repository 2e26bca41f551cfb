"""Whether jax has started a backend in this process.

Reason: `jax.distributed.initialize` must be called before the first backend starts, and `python -m overlap` can choose
emulated CPU devices only as long as no backend runs. The public `jax.extend.backend.backends()` does not answer the
question: calling it starts the backends.

Checked: jax 0.11.2 and 0.12.0.1. Replaced by: a public function that asks without starting anything.
For upstream: docs/upstream.md#started-backends.
"""

from __future__ import annotations

from overlap._compat.patch import private


def backends_are_initialized() -> bool:
    """Whether any JAX backend has been started in this process."""
    return private("jax._src.xla_bridge", "backends_are_initialized")()
