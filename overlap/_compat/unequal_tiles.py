"""Mend: the two operands of a wgmma lie in different tiles, 8 × S and S × S (`square_tiles.py`).

Reason: an operand of which a tile has any multiple of 8 rows cannot lie in tiles of S × S, and an operand whose rows
run across k must; a product may have one of each (`Config.swap_operands`). A descriptor describes each operand for
itself. Only Mosaic GPU's layout inference demands that both tiles be equal. What must be equal is the swizzle, which is
checked again where the instruction is made.

Change: in the rule for wgmma, each constraint that two tilings are equal becomes the constraint that each of them is
one that wgmma takes. Same code in jax 0.11.2 and 0.12.0.1.

Replaced by: the same in jax's layout inference.
For upstream: docs/upstream/unequal-wgmma-tiles.md.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from overlap._compat.mend import Mend, marked, private


def _change() -> None:
    rules = private("jax.experimental.mosaic.gpu.layout_inference", "_constraint_system_derivation_rules")
    name = private("jax.experimental.mosaic.gpu", "dialect.WGMMAOp").OPERATION_NAME
    equal = private("jax.experimental.mosaic.gpu.constraints", "Equals")
    private("jax.experimental.mosaic.gpu.layout_inference", "mma_tiling_constraint")

    def make(rule: Any) -> Any:
        def derive(ctx: Any, op: Any) -> Any:
            system, *rest = rule(ctx, op)
            # Looked up now: `square_tiles.py` may have replaced it since.
            takes = private("jax.experimental.mosaic.gpu.layout_inference", "mma_tiling_constraint")
            free = [takes(each.lhs, op) if isinstance(each, equal) else each for each in system.constraints]
            return (dataclasses.replace(system, constraints=free), *rest)

        return derive

    if not getattr(rules[name], "operands_may_differ", False):
        rules[name] = marked(rules[name], "operands_may_differ", make)


UNEQUAL_TILES = Mend("the operands of a product lie in different tiles", _change)
