"""Describes each rung (kernel) of the two matmul ladders for `benchmarks.forecast`.

The description has the rung's tiles, its number of stages, and which work it overlaps.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

F32_BYTES = 4
TILE_K_BYTES = 128  # The bytes of one k step in a row of an operand tile: the widest swizzle.
Epilogue = Literal["whole", "chunks", "dedicated"]


@dataclasses.dataclass(frozen=True)
class Matmul:
    """The sizes of a product [m, k] @ [k, n] on one device, and the bytes of an element."""

    m: int
    n: int
    k: int
    itemsize: int = 2

    @property
    def multiply_adds(self) -> float:
        """The number of multiply-adds of the whole product."""
        return float(self.m) * self.n * self.k


LADDER = Matmul(4096, 8192, 4096)


@dataclasses.dataclass(frozen=True)
class Lesson:
    """One rung of a ladder.

    Attributes:
      name: the name in the tables.
      tile_m: rows of the accumulator of one CTA.
      tile_n: columns of the accumulator of one CTA.
      stages: pairs of operand tiles in shared memory; 1: a copy begins when the product before it has ended.
      epilogue: how the accumulator is stored: as a "whole"; in "chunks" of columns; or in such chunks by a "dedicated"
        warpgroup, while the next tile is multiplied.
      epilogue_tile_n: columns of a chunk.
      persistent: whether a CTA computes one tile after the other, and loads the next tile during the epilogue.
      cluster: how many CTAs form a cluster. Their tiles lie one above the other, and they share the right operand.
      collective: whether the two CTAs of a cluster compute one MMA together, for which each of them holds its part of
        the right operand. Else the copy of the right operand is multicast to both.
      minor: the dimension along which tiles are visited first. In a grid without bands it is assumed to be n.
      width: how many tiles a band has along that dimension; None: all.
      published: the tensor-core utilization that JAX's guide to Blackwell kernels states, in percent.
    """

    name: str
    tile_m: int = 128
    tile_n: int = 128
    stages: int = 4
    epilogue: Epilogue = "whole"
    epilogue_tile_n: int = 64
    persistent: bool = False
    cluster: int = 1
    collective: bool = False
    minor: Literal["m", "n"] = "n"
    width: int | None = None
    published: float | None = None

    def smem_bytes(self, itemsize: int) -> int:
        """Returns how many bytes of shared memory one CTA takes."""
        columns = self.tile_n // self.cluster if self.collective else self.tile_n
        out_columns = self.tile_n if self.epilogue == "whole" else 2 * self.epilogue_tile_n
        return self.stages * (self.tile_m + columns) * TILE_K_BYTES + self.tile_m * out_columns * itemsize


_SPECIALIZED = Lesson("warp_specialized", tile_n=256, stages=3)
_CHUNKS = dataclasses.replace(_SPECIALIZED, name="tiled_epilogue", stages=4, epilogue="chunks")
_PERSISTENT = dataclasses.replace(_CHUNKS, name="persistent", persistent=True)
_CLUSTER = dataclasses.replace(_PERSISTENT, name="cluster_multicast", cluster=2)
_BANDS = dataclasses.replace(_CLUSTER, name="grid_tiling", minor="m", width=8)
# The rungs of overlap/kernels/ladder/, with their default sizes.
HOPPER = (
    Lesson("basic", stages=1),
    Lesson("pipelined"),
    _SPECIALIZED,
    _CHUNKS,
    _PERSISTENT,
    _CLUSTER,
    _BANDS,
    dataclasses.replace(_BANDS, name="templated_epilogue"),
)

# JAX's benchmark of its guide takes the best of these sizes (JAX's tests/pallas/mgpu_examples_test.py). That benchmark
# too leaves out sizes that do not fit into shared memory.
_SEARCHED = tuple((tile_n, stages) for tile_n in (128, 256, 512) for stages in (4, 6))
_BANDS_SEARCHED: tuple[tuple[Literal["m", "n"], int], ...] = tuple(
    (minor, width) for minor in ("m", "n") for width in (1, 4, 12, 16)
)
_COLLECTIVE = Lesson(
    "3 collective MMA", tile_n=256, stages=6, epilogue="chunks", cluster=2, collective=True, published=59.41
)
_ONE_BY_ONE = dataclasses.replace(_COLLECTIVE, name="4 persistent", persistent=True, published=61.46)
_DEDICATED = dataclasses.replace(_ONE_BY_ONE, name="5 dedicated epilogue", epilogue="dedicated", published=63.38)
BLACKWELL: tuple[tuple[Lesson, ...], ...] = (
    tuple(Lesson("0 basic", tile_n=n, stages=stages, published=37.62) for n, stages in _SEARCHED),
    tuple(Lesson("1 warp specialization", tile_n=n, stages=stages, published=45.47) for n, stages in _SEARCHED),
    tuple(
        Lesson("2 tiled epilogue", tile_n=n, stages=stages, epilogue="chunks", published=55.82)
        for n, stages in _SEARCHED
    ),
    (_COLLECTIVE,),
    (_ONE_BY_ONE,),
    (_DEDICATED,),
    tuple(
        dataclasses.replace(_DEDICATED, name="6 grid tiling", minor=minor, width=width, published=69.44)
        for minor, width in _BANDS_SEARCHED
    ),
)
