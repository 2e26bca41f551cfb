"""Tracing without `check_vma`: the types of values then do not name the mesh axes along which a value varies.

Reason: an activation is traced where the user calls an operation, but its operands may vary along any mesh axes. So the
activation is traced as if there were no mesh (`typeless` in `overlap/frame/entries.py`). The activation may capture a
scalar that varies. Inside `jax.shard_map(..., check_vma=True)` jax then fails on an assertion, because the axis along
which the scalar varies is not in the empty mesh. A library cannot turn `check_vma` off: it is an argument of
`jax.shard_map`, which the user calls.

Checked: jax 0.11.2 and 0.12.0.1. Replaced by: a public context for code that a primitive contains, where the primitive
states the types.
For upstream: docs/upstream.md#varying-axes.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from overlap._compat.patch import private


def without_varying_axes() -> AbstractContextManager[Any]:
    """A context in which jax traces and lowers without `check_vma`."""
    return private("jax._src.config", "_check_vma")(False)
