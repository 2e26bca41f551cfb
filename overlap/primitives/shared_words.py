"""A word of shared memory, loaded by a single warp or by a warpgroup.

Pallas's own `ref[i]` does this for a warpgroup only: a load is not among the operations that Mosaic GPU lists for a
single warp (a store is). So the load is PTX. It orders nothing: an mbarrier between the store and the load does.
"""

from __future__ import annotations

from typing import Any

import jax

from overlap.primitives import atomics
from overlap.primitives.types import SmemRef


def load_word(word: SmemRef) -> jax.Array:
    """The int32 scalar in a word of shared memory, in every thread."""
    return atomics.inline(_load, [word], returns=True)


def _load(_: Any, pointer: Any) -> Any:
    return atomics.ptx(["ld.shared.b32 $0, [$1];"], pointer, returns=True)
