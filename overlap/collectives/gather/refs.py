"""What the kernels of a gathered left operand read and write: arrays outside a kernel, references inside."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax

from overlap.kernels.epilogue import Vectors
from overlap.primitives.types import GmemRef


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inputs:
    """The operands.

    Attributes:
      lhs: [(batch,) m_shard, k], this device's rows.
      rhs_list: the right operands.
      vectors: the vectors of the epilogue.
      blocks: scales of blocks, as tiles load them: those of `lhs`, and a list of those of the right operands. () if
        there are none.
    """

    lhs: GmemRef
    rhs_list: Sequence[GmemRef]
    vectors: Vectors
    blocks: tuple[()] | tuple[GmemRef, Sequence[GmemRef]] = ()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Outputs:
    """The results.

    Attributes:
      outs: a product for each right operand, or one that the activation makes of all.
      scratch: the rows of the peers, or of all devices.
      scales: a list of the scales that travel with these rows; [] if none do.
    """

    outs: Sequence[GmemRef]
    scratch: GmemRef
    scales: Sequence[GmemRef]
