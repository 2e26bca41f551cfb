"""Patch: wgmma and tcgen05 take operands in tiles of S × S elements, besides 8 × S. S elements are 128 bytes.

Reason: an operand that is contiguous along m or n, not along k, is loaded as several boxes, each clipped exactly at the
matrix's end. Boxes beside each other lie in shared memory as tiles of S × S (`overlap/kernels/tma/staging.py`). The
descriptors that Mosaic GPU makes can express square tiles. But Mosaic GPU's layout inference does not offer such tiles,
and its lowering of tcgen05 does not pass their size to `create_descriptor`.

Change: the layout inference offers S × S as its last choice, so that only a buffer that states square tiles gets them;
and `create_descriptor` is passed the size of square tiles. Same code in jax 0.11.2 and 0.12.0.1.

Replaced by: S × S among the tilings that jax's layout inference offers for operands of matrix products.
For upstream: docs/upstream.md#square-tiles.
"""

from __future__ import annotations

from typing import Any

from overlap._compat.patch import Patch, private, replace

_MARK = "offers_square_tiles"


def _change() -> None:
    from jax.extend.mlir import ir

    wgmma = private("jax.experimental.mosaic.gpu", "dialect.WGMMAOp")
    tcgen05_mma = private("jax.experimental.mosaic.gpu", "dialect.TcGen05MMAOp")
    transforms = private("jax.experimental.mosaic.gpu.constraints", "SMEMTransforms")
    one_of = private("jax.experimental.mosaic.gpu.constraints", "OneOf")
    tile = private("jax.experimental.mosaic.gpu.launch_context", "TileTransform")
    bitwidth = private("jax.experimental.mosaic.gpu.utils", "bitwidth")
    private("jax.experimental.mosaic.gpu.mma_utils", "create_descriptor")

    def with_squares(offered: Any) -> Any:
        def mma_tiling_constraint(variable: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
            constraint: Any = offered(variable, op, *args, **kwargs)
            if not isinstance(op, (wgmma, tcgen05_mma)):
                return constraint
            side = 128 * 8 // bitwidth(ir.MemRefType(variable.key.value.type).element_type)
            if any(size % side for size in variable.shape):
                return constraint
            return one_of(variable, (*constraint.allowed, transforms(tile((side, side)), 128)))

        return mma_tiling_constraint

    def of_squares(describe: Any) -> Any:
        def create_descriptor(ref: Any, *args: Any, large_tile: Any = None, **kwargs: Any) -> Any:
            *_, rows, columns = ir.MemRefType(ref.type).shape
            return describe(ref, *args, large_tile=(rows, columns) if rows == columns else large_tile, **kwargs)

        return create_descriptor

    replace("jax.experimental.mosaic.gpu.layout_inference", "mma_tiling_constraint", _MARK, with_squares)
    replace("jax.experimental.mosaic.gpu.mma_utils", "create_descriptor", _MARK, of_squares)


SQUARE_TILES = Patch("operands of a product lie in square tiles", _change)
