"""Patch: a single warp (`plgpu.warp_map`) runs a `lax.while_loop` over scalars, as a warpgroup can.

Reason: a loop that draws numbers from a counter ends when the counter is used up, so its length is not known before
(`loop_while` in `overlap/primitives/atomics.py`). Pallas lowers such a loop in a warp to `scf.while`. Mosaic GPU then
refuses the loop, because `scf.while` is not in its set of operations that a warp may run. But the lowering of an
`scf.while` without arrays would work for a warp: it does not depend on the number of threads. The same is true of
`scf.for` and `scf.if`, which are in the set.

Change: `scf.while` is added to the set. Same code in jax 0.11.2 and 0.12.0.1.

Replaced by: `support_warp_semantics=True` at the rule for `scf.while` in jax.
For upstream: docs/upstream.md#loops-in-warps.
"""

from __future__ import annotations

from overlap._compat.patch import Patch, private


def _change() -> None:
    from jax.extend.mlir.dialects import scf

    supported = private("jax.experimental.mosaic.gpu.dialect_lowering", "_supported_warp_lowerings")
    supported.add(scf.WhileOp.OPERATION_NAME)


WARP_LOOPS = Patch("a single warp runs while loops", _change)
