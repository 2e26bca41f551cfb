"""What a mainloop is, whatever the architecture: the interface between the operations and the tensor cores.

A mainloop runs all roles of one persistent CTA: it loads operand tiles, multiplies them, applies an epilogue and stores
the results. Operations say through `Loop` which tiles these are, and through its hooks what else is to happen.
`overlap.kernels.product_kernel` is the only caller.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import jax

from overlap import _compat
from overlap.kernels.config import Config
from overlap.kernels.hooks import Hooks, Tile
from overlap.kernels.layouts import PLAIN, OperandLayouts
from overlap.kernels.partial_sums import PartialSums
from overlap.kernels.stream_k import StreamK

if TYPE_CHECKING:
    from overlap.kernels.limits import Sizes
    from overlap.kernels.target import Target


@dataclasses.dataclass(frozen=True)
class OperandTypes:
    """What a mainloop must know of the operands to lay out its shared memory.

    Attributes:
      m: rows of the left operand that one tile may take rows from.
      dtype: of the left operand.
      rhs_dtype: of the right operand.
      out_dtype: of the result.
      layouts: how the operands lie in memory.
      forwards: whether the forwarder warp passes operand tiles on (`Hooks.in_smem`).
      addend: whether the epilogue has an addend (`Hooks.addend_at`).
      exchanges: whether parts of tiles are exchanged with peers (`Hooks.exchange`).
      sends: whether they are sent to them from shared memory (`Exchange.sends`).
      block_scaled: whether the operands have scales of blocks (`Hooks.block_scales_at`).
    """

    m: int
    dtype: Any
    rhs_dtype: Any
    out_dtype: Any
    layouts: OperandLayouts = PLAIN
    forwards: bool = False
    addend: bool = False
    exchanges: bool = False
    sends: bool = False
    block_scaled: bool = False


@dataclasses.dataclass(frozen=True)
class Loop:
    """What one CTA is to do.

    Attributes:
      work: which tiles are its share.
      tile_at: the tile order: from a tile's index to the tile, the same in every role.
      config: sizes.
      hooks: where operands come from and results go, and what else is to happen.
      layouts: how the operands lie in memory.
      partial: where the CTAs that share a tile meet; needed if `work.cuts`.
      counter: deals the tiles to whichever CTAs run, one after the other; None: `work` deals them beforehand.
    """

    work: StreamK
    tile_at: Callable[[Any], Tile]
    config: Config
    hooks: Hooks
    layouts: OperandLayouts = PLAIN
    partial: PartialSums | None = None
    counter: Any = None


class Mainloop(Protocol):
    """The matmul of one architecture.

    Attributes:
      num_threads: warpgroups of a CTA.
      compute_warpgroups: how many of them hold a part of the accumulator.
    """

    @property
    def num_threads(self) -> int: ...

    @property
    def compute_warpgroups(self) -> int: ...

    def check_types(self, sizes: Sizes) -> None:
        """Raises NotImplementedError if it does not take these dtypes and layouts."""
        ...

    def check_config(self, sizes: Sizes, config: Config, target: Target) -> None:
        """Raises ValueError if the configuration contradicts itself, or needs more than the device has."""
        ...

    def mends(self, config: Config, types: OperandTypes) -> tuple[_compat.Mend, ...]:
        """The changes of jax that a kernel needs for this mainloop."""
        ...

    def buffer_types(self, config: Config, types: OperandTypes) -> Any:
        """The types of the shared memory that it needs, for `pl.run_scoped`."""
        ...

    def box_shape(self, config: Config, types: OperandTypes) -> tuple[int, int, int]:
        """Of a tile that is stored as boxes (`Hooks.exchange`): how many, and the rows and columns of each."""
        ...

    def run(self, loop: Loop, buffers: Any) -> None:
        """Runs all roles of this CTA. `buffers`: allocated from `buffer_types`."""
        ...

    def broadcast_vector(self, vector_gmem: Any, where: Any, shape: tuple[int, ...], dimension: int) -> jax.Array:
        """`vector_gmem[where]`, broadcast over the rows (`dimension` 0) or columns (1) of an epilogue's values.

        Nothing checks where the vector ends: it must be filled up to whole tiles.
        """
        ...
