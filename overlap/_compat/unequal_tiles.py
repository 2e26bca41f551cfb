"""Patch: the two operands of a wgmma lie in different tiles, 8 × S and S × S (`square_tiles.py`).

Reason: an operand whose rows run across k must lie in tiles of S × S. An operand whose number of rows per output tile
may be any multiple of 8 cannot lie in such tiles. A product may have one operand of each kind (`Config.swap_operands`).
The hardware allows it: each operand has a descriptor of its own, and only the swizzles must be equal. Mosaic GPU checks
the swizzles again when it makes the instruction, but its layout inference demands that the tiles be equal too.

Change: the layout inference's rule for wgmma gives constraints that two tilings are equal. Each of them is replaced by
the constraint that the first tiling is one that wgmma takes. Same code in jax 0.11.2 and 0.12.0.1.

Replaced by: the same change in jax's layout inference.
For upstream: docs/upstream.md#unequal-tiles.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from overlap._compat.patch import Patch, marked, private


def _change() -> None:
    rules = private("jax.experimental.mosaic.gpu.layout_inference", "_constraint_system_derivation_rules")
    name = private("jax.experimental.mosaic.gpu", "dialect.WGMMAOp").OPERATION_NAME
    equal = private("jax.experimental.mosaic.gpu.constraints", "Equals")
    private("jax.experimental.mosaic.gpu.layout_inference", "mma_tiling_constraint")

    def make(rule: Any) -> Any:
        def derive(ctx: Any, op: Any) -> Any:
            system, *rest = rule(ctx, op)
            # The function is looked up at each call, because `square_tiles.py` may have replaced it meanwhile.
            takes = private("jax.experimental.mosaic.gpu.layout_inference", "mma_tiling_constraint")
            free = [takes(each.lhs, op) if isinstance(each, equal) else each for each in system.constraints]
            return (dataclasses.replace(system, constraints=free), *rest)

        return derive

    if not getattr(rules[name], "operands_may_differ", False):
        rules[name] = marked(rules[name], "operands_may_differ", make)


UNEQUAL_TILES = Patch("the operands of a product lie in different tiles", _change)
