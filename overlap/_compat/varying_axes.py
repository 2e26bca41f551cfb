"""Tracing without `check_vma`: types that say nothing of the mesh axes along which a value varies.

Reason: inside `jax.shard_map(..., check_vma=True)` the references of a kernel would have such types, and Mosaic GPU
refuses them. `check_vma` is an argument of `jax.shard_map`, which the user calls, so a library inside of it cannot set
it. The context is used where a kernel is traced and lowered (`overlap/kernels/launch.py`), and where a function of
single values is (`overlap/frame/entries.py`). The types of the results are then stated by the primitive around it.

Checked: jax 0.11.2 and 0.12.0.1. Replaced by: Mosaic GPU kernels that accept types with varying axes.
For upstream: docs/upstream/varying-axes.md.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from overlap._compat.mend import private


def without_varying_axes() -> AbstractContextManager[Any]:
    """A context in which jax traces and lowers without `check_vma`."""
    return private("jax._src.config", "_check_vma")(False)
