"""The ladder for Blackwell: one matmul, written seven times, each time with one idea more.

The kernels follow the seven lessons of "Writing high-performance matrix multiplication kernels for Blackwell" in the
JAX documentation. They are written like the rungs of Hopper's ladder (`lessons/hopper/`), and share code with
them where that fits. Read them in the order of `RUNGS`.

On a CPU they run inside `overlap.emulation.emulate()` (or after `overlap.emulation.enable()`).

NONE OF THESE KERNELS HAS RUN ON A BLACKWELL GPU. They have run emulated and in JAX's interpreter, and are assembled for
sm_100a (`tests/ops/single_gpu/`, `tests/assembly/`). `GUIDE_UTILIZATION` has the guide's figures for the guide's own
kernels, not measurements of these ones.
"""

from __future__ import annotations

from lessons.blackwell import (
    basic,
    collective_mma,
    dedicated_epilogue,
    grid_tiling,
    persistent,
    tiled_epilogue,
    warp_specialized,
)
from lessons.hopper import Rung

RUNGS = (
    Rung("basic", basic.matmul, "One CTA per tile, one warpgroup, and the accumulator is in tensor memory."),
    Rung("warp_specialized", warp_specialized.matmul, "One warp copies, another one issues the products."),
    Rung("tiled_epilogue", tiled_epilogue.matmul, "The output leaves in small tiles, and tiles twice as wide fit."),
    Rung("collective_mma", collective_mma.matmul, "Two CTAs compute a product together, from half of each operand."),
    Rung("persistent", persistent.matmul, "As many clusters as fit, and each computes many tiles."),
    Rung("dedicated_epilogue", dedicated_epilogue.matmul, "A warpgroup stores one tile while the next is multiplied."),
    Rung("grid_tiling", grid_tiling.matmul, "Tiles are visited in bands, so that operands are found in L2."),
)

# Tensor-core utilization in percent on a B200, 4096 × 8192 × 4096 float16 with normal operands, as the guide states it
# for its own kernels. These are not ours: no kernel of this folder has been measured.
GUIDE_UTILIZATION = {
    "basic": 37.62,
    "warp_specialized": 45.47,
    "tiled_epilogue": 55.82,
    "collective_mma": 59.41,
    "persistent": 61.46,
    "dedicated_epilogue": 63.38,
    "grid_tiling": 69.44,
    "cublas": 63.38,
}

__all__ = ["GUIDE_UTILIZATION", "RUNGS", "Rung"]
