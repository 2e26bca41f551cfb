"""Single words of shared memory, stored and loaded by a warp or by a warpgroup.

Pallas's own indexing (`ref[i]`) does this for a warpgroup only: Mosaic GPU does not list a load from shared memory
among the operations that a single warp may run, and a store loads the old value as well. So these are PTX. They order
nothing: an mbarrier between the store and the load does.
"""

from __future__ import annotations

from typing import Any

import jax

from overlap.primitives import atomics
from overlap.primitives.types import Index, SmemRef


def store_word(word: SmemRef, value: Index) -> None:
    """Stores an int32 scalar in a word. All threads that run it must have the same value."""
    atomics.inline(_store, [word], value)


def load_word(word: SmemRef) -> jax.Array:
    """The int32 scalar in a word, in every thread."""
    return atomics.inline(_load, [word], returns=True)


def _store(_: Any, pointer: Any, value: Any) -> None:
    atomics.ptx(["st.shared.b32 [$0], $1;"], pointer, value)


def _load(_: Any, pointer: Any) -> Any:
    return atomics.ptx(["ld.shared.b32 $0, [$1];"], pointer, returns=True)
