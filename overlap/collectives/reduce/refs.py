"""What the kernels that sum over devices read and write: arrays outside a kernel, references inside."""

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
