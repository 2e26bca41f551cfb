"""The active `overlap.autotune`. It has a module of its own, since it must exist before anything is traced."""

from __future__ import annotations

from typing import Any

import jax

# The value is a part of the cache key of `jax.jit`. So a function that was traced outside a session is traced again
# inside, where the session sees its calls. And a trace from inside is not used outside, so that the configurations of a
# session do not outlive it.
session: Any = jax.make_user_context(None)
