"""The active `overlap.autotune`. Apart from the rest, since it must be there before anything is traced."""

from __future__ import annotations

from typing import Any

import jax

# Part of the cache key of `jax.jit`: a function that was traced outside a session is traced again inside, so that its
# calls are seen, and the configurations of a session do not outlive it.
session: Any = jax.make_user_context(None)
