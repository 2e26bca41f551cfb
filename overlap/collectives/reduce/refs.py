"""What the kernels that sum over devices read and write, and what their bodies have in common.

The operands and results are arrays outside a kernel, and references inside.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax

from overlap.collectives.reduce.blocks_schedule import ReduceScatterSchedule
from overlap.frame.operation import LaunchPlan
from overlap.kernels.epilogue import Vectors
from overlap.kernels.hooks import Tile
from overlap.kernels.product_kernel import ProductKernel, Refs
from overlap.primitives import PeerGroup
from overlap.primitives.types import GmemRef, Index


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inputs:
    """The operands.

    Attributes:
      lefts: the left operand of each pair.
      rights: the right operand of each pair.
      vectors: the vectors of the epilogue.
      addends: a list with the addend; [] if there is none.
      passenger: a list with the passenger; [] if there is none.
      landing: with one process per GPU the memory that peers write to: that of their parts, and that of results which
        every device gets; [] if peers write to results.
    """

    lefts: Sequence[GmemRef]
    rights: Sequence[GmemRef]
    vectors: Vectors
    addends: Sequence[GmemRef]
    passenger: Sequence[GmemRef] = ()
    landing: Sequence[GmemRef] = ()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Outputs:
    """The results.

    Attributes:
      out: this device's result.
      parts: the parts of the peers' results that this device computes.
      landing: a list with the memory that peers write their parts to; [] if that is an operand.
      gathered: a list with the gathered passenger; [] if there is none.
    """

    out: GmemRef
    parts: GmemRef
    landing: Sequence[GmemRef]
    gathered: Sequence[GmemRef] = ()


@dataclasses.dataclass(frozen=True)
class SumBody:
    """What both kernels need in their bodies.

    Attributes:
      kernel: the static part of the kernel: configuration, mainloop, work.
      schedule: the tiles; where peers' blocks are sent, also the chunks and flags.
      steps: the number of k steps of each pair of operands.
      group: the devices.
      plan: the operation, the configuration and the layouts.
      name: the operation with its sizes, for the message of a wait that takes too long.
      refs: the kernel's references.
      me: this device's position in the peer group.
    """

    kernel: ProductKernel
    schedule: ReduceScatterSchedule
    steps: Sequence[int]
    group: PeerGroup
    plan: LaunchPlan
    name: str
    refs: Refs[Inputs, Outputs]
    me: Index

    def _index_of(self, tile: Tile) -> Index:
        return self.schedule.index_in_block(tile.batch, tile.m, tile.n)

    @property
    def _has_scales(self) -> bool:
        vectors = self.refs.inputs.vectors
        return vectors.row_scale is not None or vectors.column_scale is not None
