"""Holds the active `overlap.autotune` session in a module of its own, since it must exist before anything is traced."""

from __future__ import annotations

from typing import Any

import jax

# The value is None or the active `choose.Session`, and it is a part of the cache key of `jax.jit`. So a function that
# was traced before a session began is traced again inside the session, which then sees the calls in it. A function that
# was traced inside a session is traced again after the session, so that it no longer uses the configurations of the
# session.
session: Any = jax.make_user_context(None)
