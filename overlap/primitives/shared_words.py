"""Loads a word of shared memory, in a single warp or in a warpgroup.

Pallas's own `ref[i]` does this for a warpgroup only: Mosaic GPU lists stores, but not loads, among the operations of a
single warp. So the load is PTX. It orders nothing: put an mbarrier between the store and the load.
"""

from __future__ import annotations

import jax
from jax.extend.mlir import ir

from overlap.primitives import atomics
from overlap.primitives.types import SmemRef


def load_word(word: SmemRef) -> jax.Array:
    """Returns the int32 scalar in a word of shared memory, in every thread."""
    return atomics.inline(_load, [word], returns=True)


def _load(_: object, pointer: ir.Value) -> ir.Value:
    return atomics.ptx(["ld.shared.b32 $0, [$1];"], pointer, returns=True)
