"""Defines the interface of a mainloop: what operations pass to it, and what each architecture implements.

A mainloop runs all roles of one persistent CTA: it loads operand tiles, multiplies them, applies an epilogue and stores
the results. An operation passes a `Loop`, which says which tiles the CTA computes and, by its hooks, what else the
roles do. Only `overlap.kernels.product_kernel` calls a mainloop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import jax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from overlap import _compat
from overlap.kernels.config import Config
from overlap.kernels.hooks import Hooks, Tile
from overlap.kernels.operations import PLAIN, TRANSPORTS, Dimension, OperandLayouts, Transport, Travel
from overlap.kernels.partial_sums import PartialSums
from overlap.kernels.stream_k import StreamK
from overlap.primitives.types import GmemRef, Index, ScratchType, SemaphoreRef, Tree

if TYPE_CHECKING:
    from overlap.kernels.target import Target


@dataclasses.dataclass(frozen=True)
class OperandTypes:
    """The properties of the operands that a mainloop needs in order to lay out its shared memory.

    Attributes:
      m: rows of the matrix from which one tile takes its rows, e.g. of one shard of the left operand.
      dtype: the dtype of the left operand.
      rhs_dtype: the dtype of the right operand.
      out_dtype: the dtype of the result.
      layouts: how the operands lie in memory.
      transport: how data travels between devices; empty: nothing travels.
      addend: whether the epilogue has an addend (`Hooks.addend_at`).
      block_scaled: whether the operands have block scales (`Hooks.block_scales_at`).
      sides: how many right operands a tile has columns of (`SideBySide`).
      boxes: how many results the epilogue makes of each value, or how many addends it takes, whichever are more. An
        epilogue buffer has a box for each.
      grouped: the dimension that groups of any sizes divide: "m" if tiles may end before their last row
        (`Tile.rows`), "k" if the last k step may (`Hooks.last_k_at`); empty if there are no groups.
    """

    m: int
    dtype: DTypeLike
    rhs_dtype: DTypeLike
    out_dtype: DTypeLike
    layouts: OperandLayouts = PLAIN
    transport: Transport = ""
    addend: bool = False
    block_scaled: bool = False
    sides: int = 1
    boxes: int = 1
    grouped: Dimension = ""

    @property
    def travel(self) -> Travel:
        """What the transport asks of the mainloop."""
        return TRANSPORTS[self.transport]


@dataclasses.dataclass(frozen=True)
class Loop:
    """The work of one CTA.

    Attributes:
      work: which pieces of which tiles each CTA computes.
      tile_at: the tile order: a function from a tile's index to the tile. All roles call it with the same indices.
      config: sizes.
      hooks: where operands come from and results go, and what else the roles do.
      layouts: how the operands lie in memory.
      partial: where the CTAs that share a tile exchange their sums; needed if `work.cuts`.
      counter: the counter from which running CTAs draw tiles, one after the other; None: `work` assigns the tiles to
        CTAs in advance.
    """

    work: StreamK
    tile_at: Callable[[Index], Tile]
    config: Config
    hooks: Hooks
    layouts: OperandLayouts = PLAIN
    partial: PartialSums | None = None
    counter: SemaphoreRef | None = None


class Mainloop(Protocol):
    """The matmul of one architecture.

    Attributes:
      num_threads: how many warpgroups a CTA has (Pallas calls a warpgroup a thread).
      compute_warpgroups: how many warpgroups run the epilogue, which brings sums to memory. On Hopper they also
        multiply.
      long_activation_columns: for how many columns at a time an activation of many operations is computed.
    """

    @property
    def num_threads(self) -> int: ...

    @property
    def compute_warpgroups(self) -> int: ...

    @property
    def long_activation_columns(self) -> int: ...

    def check_types(self, types: OperandTypes) -> None:
        """Raises NotImplementedError if the mainloop does not take these dtypes and layouts."""
        ...

    def check_config(self, types: OperandTypes, config: Config, target: Target, beside_bytes: int = 0) -> None:
        """Raises ValueError if the configuration contradicts itself, or needs more than the device has.

        `beside_bytes`: shared memory that the kernel needs beside that of the mainloop and the transport.
        """
        ...

    def crowds_registers(self, types: OperandTypes, tiles: int, config: Config, target: Target) -> bool:
        """Whether a thread of a kernel with this number of tiles may need more registers than it has."""
        ...

    def patches(self, config: Config, types: OperandTypes) -> tuple[_compat.Patch, ...]:
        """Returns the changes of jax (patches) that a kernel with this mainloop needs."""
        ...

    def buffer_types(self, config: Config, types: OperandTypes) -> ScratchType:
        """Returns the types of the shared memory that the mainloop needs, for `pl.run_scoped`."""
        ...

    def box_shape(self, config: Config, types: OperandTypes) -> tuple[int, int, int]:
        """Returns how many boxes a tile is stored as (`Hooks.exchange`), and the rows and columns of each box."""
        ...

    def run(self, loop: Loop, buffers: Tree) -> None:
        """Runs all roles of this CTA. `buffers`: allocated from `buffer_types`."""
        ...

    def broadcast_vector(
        self, vector_gmem: GmemRef, where: pl.Slice, shape: tuple[int, ...], dimension: int
    ) -> jax.Array:
        """Loads `vector_gmem[where]` and broadcasts it to `shape`, in the register layout of the mainloop's values.

        The vector's entries run along the dimension `dimension` (0 or 1) of `shape`. There are no bounds checks: the
        vector must be padded to whole tiles.
        """
        ...
