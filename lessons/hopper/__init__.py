"""The ladder: a matmul for Hopper in eight versions, each with one idea more than the last (float16 and bfloat16).

Read the files in the order of `RUNGS`. Each rung shows one new idea, and imports the rest from the rungs below it. The
rungs are lessons. `overlap.matmul` does not use them: it has all of these ideas, and serves any shape.
`python -m benchmarks ladder` measures the rungs side by side; `tests/ops/single_gpu/` runs them emulated, and
`tests/assembly/` assembles them.

Measured on an H200 at its power limit, 4096 × 8192 × 4096 float16, as fractions of cuBLAS (2026-11-21, spread ±3%):
0.75, 0.84, 0.93, 0.93, 0.97, 0.99, 0.99, 1.04 (the last without an activation: the same kernel as the one before it).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax

from lessons.hopper import (
    basic,
    cluster_multicast,
    grid_tiling,
    persistent,
    pipelined,
    templated_epilogue,
    tiled_epilogue,
    warp_specialized,
)


@dataclasses.dataclass(frozen=True)
class Rung:
    """One kernel of the ladder.

    Attributes:
      name: the name in tables and on the command line.
      matmul: the function `matmul(lhs, rhs, **sizes) -> [m, n]`.
      idea: what this rung adds, in one sentence.
    """

    name: str
    matmul: Callable[..., jax.Array]
    idea: str


RUNGS = (
    Rung("basic", basic.matmul, "One CTA per tile, one warpgroup, copies and products in turn."),
    Rung("pipelined", pipelined.matmul, "The next tiles travel while the tensor cores work; stages are released late."),
    Rung("warp_specialized", warp_specialized.matmul, "One warpgroup copies, two multiply a tile twice as wide."),
    Rung("tiled_epilogue", tiled_epilogue.matmul, "The output leaves in small tiles, and a fourth stage fits."),
    Rung("persistent", persistent.matmul, "A CTA per SM loads the next tile while it stores this one."),
    Rung("cluster_multicast", cluster_multicast.matmul, "Two CTAs load the right operand once for both."),
    Rung("grid_tiling", grid_tiling.matmul, "Tiles are visited in bands, so that operands are found in L2."),
    Rung(
        "templated_epilogue",
        templated_epilogue.matmul,
        "An activation, passed as a Python function, is applied to the accumulator.",
    ),
)

__all__ = ["RUNGS", "Rung"]
