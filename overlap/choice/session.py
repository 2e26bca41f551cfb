"""Holds the active `overlap.autotune` and `overlap.explain`, in a module that is loaded before anything is traced."""

from __future__ import annotations

from typing import Any

import jax

# The value is None or the active `choose.Session`, and it is a part of the cache key of `jax.jit`. So a function that
# was traced before a session began is traced again inside the session, which then sees the calls in it. A function that
# was traced inside a session is traced again after the session, so that it no longer uses the configurations of the
# session.
session: Any = jax.make_user_context(None)
# A new object for each `overlap.explain`, else None. It is a part of that key too, so `explain` traces all calls again.
explaining: Any = jax.make_user_context(None)
