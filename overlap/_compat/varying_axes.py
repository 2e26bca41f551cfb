"""Tracing without `check_vma`: types that say nothing of the mesh axes along which a value varies.

Reason: an activation is traced where the user calls an operation, and is applied wherever the operands vary. So it is
traced as if there were no mesh (`typeless` in `overlap/frame/entries.py`). It may capture a scalar that varies; inside
of `jax.shard_map(..., check_vma=True)` jax then fails on an assertion, since the axis along which the scalar varies is
not in the empty mesh. `check_vma` is an argument of `jax.shard_map`, which the user calls, so a library inside of it
cannot set it.

Checked: jax 0.11.2 and 0.12.0.1. Replaced by: a public context for code whose types a primitive around it states.
For upstream: docs/upstream/varying-axes.md.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from overlap._compat.mend import private


def without_varying_axes() -> AbstractContextManager[Any]:
    """A context in which jax traces and lowers without `check_vma`."""
    return private("jax._src.config", "_check_vma")(False)
