"""Every import from `jax._src` and every test of a jax version, each with its reason.

Nothing else in the library imports private names. When a jax release moves one of them, this file alone changes.
"""

from __future__ import annotations

from typing import Any

__all__ = ["backends_are_initialized", "offer_square_wgmma_tiles"]


def backends_are_initialized() -> bool:
    """Whether any JAX backend has been started in this process.

    `jax.distributed.initialize` must come before that. There is no public way to ask without starting the backends:
    `jax.extend.backend.backends()` starts them.
    """
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


def offer_square_wgmma_tiles() -> None:
    """Lets wgmma take operands in tiles of S × S, S being the elements of 128 bytes, besides 8 × S. Idempotent.

    Mosaic GPU's wgmma and its descriptors know these tiles, but its layout inference does not offer them. An operand
    that arrives as several exactly clipped boxes lies in them (`overlap/kernels/staging.py`). They are appended to the
    choices, so that only a buffer which states them has them. Same code in jax 0.11.2 and 0.12.0.1; the assembled tests
    would tell of a change.
    """
    from jax._src.lib import mosaic_gpu_dialect as dialect  # pyright: ignore[reportPrivateImportUsage]
    from jax.experimental.mosaic.gpu import constraints, launch_context, layout_inference, utils
    from jaxlib.mlir import ir

    offered = layout_inference.mma_tiling_constraint
    if getattr(offered, "offers_square_tiles", False):
        return

    def mma_tiling_constraint(variable: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        constraint: Any = offered(variable, op, *args, **kwargs)
        if not isinstance(op, dialect.WGMMAOp):
            return constraint
        side = 128 * 8 // utils.bitwidth(ir.MemRefType(variable.key.value.type).element_type)
        if any(size % side for size in variable.shape):
            return constraint
        square = constraints.SMEMTransforms(launch_context.TileTransform((side, side)), 128)
        return constraints.OneOf(variable, (*constraint.allowed, square))

    mma_tiling_constraint.offers_square_tiles = True  # pyright: ignore[reportFunctionMemberAccess]
    layout_inference.mma_tiling_constraint = mma_tiling_constraint
