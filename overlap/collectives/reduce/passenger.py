"""Gathers an array beside a sum over devices: a *passenger*, which has no part in the product.

A sum sends nothing until its first tiles are computed, and then less than the links could carry. So its communicators
begin with chunks of the passenger, which they pull as a gather does (`communicator.py`). No tile reads the result, so
no flag is raised for it. The first handshake ensures that the peers' rows are there, and the second that they stay
until all peers have read them. The backward pass of `all_gather_lhs_matmul` gathers its left operand like this, which
the products for the cotangents of the right operands need.
"""

from __future__ import annotations

import dataclasses

import jax

from overlap.collectives.communicator import Chunks
from overlap.kernels.config import Config
from overlap.primitives import PeerGroup
from overlap.primitives.copies import Chunking
from overlap.primitives.integers import quotient, remainder
from overlap.primitives.types import GmemRef, Index


@dataclasses.dataclass(frozen=True)
class Passenger:
    """An array of which each device has some rows, and which all devices get.

    Attributes:
      devices: number of devices in the peer group.
      shape: batch elements, rows of a device, columns.
      chunking: how the rows of a device, batch elements one below the other, are cut into chunks.
    """

    devices: int
    shape: tuple[int, int, int]
    chunking: Chunking

    @staticmethod
    def of(array: jax.Array | None, devices: int, config: Config) -> Passenger | None:
        """Cuts a passenger [(batch,) rows, columns] into chunks that fit the communicators' buffers."""
        if array is None:
            return None
        *batch, rows, columns = array.shape
        elements = batch[0] if batch else 1
        chunking = Chunking.cut(elements * rows, columns, array.dtype.itemsize, rows, config.chunk_bytes)
        return Passenger(devices, (elements, rows, columns), chunking)

    @property
    def gathered_shape(self) -> tuple[int, int, int, int]:
        """Shape of the result: [batch, devices, rows, columns]."""
        elements, rows, columns = self.shape
        return elements, self.devices, rows, columns

    def chunk(self, index: Index, me: Index) -> tuple[tuple[Index, Index], Index, Index]:
        """Returns where a chunk lies: (its device, its batch element), its first row there, and its first column.

        The chunks of the peers come first, each device's in another order; those of this device come last.
        """
        _, rows, _ = self.shape
        step = quotient(index, self.chunking.chunks)
        row, column = self.chunking.origin(index - step * self.chunking.chunks)
        batch = quotient(row, rows)
        return (remainder(me + 1 + step, self.devices), batch), row - batch * rows, column

    def chunks(self, group: PeerGroup, me: Index, own_gmem: GmemRef, gathered_gmem: GmemRef) -> Chunks:
        """Returns all chunks, with the copies from `own_gmem`, here and at the peers, to `gathered_gmem`."""
        return Chunks(
            self.devices * self.chunking.chunks,
            self.chunking,
            at=lambda index: self.chunk(index, me),
            source=lambda shard, *place: group.remote_ref(own_gmem, shard[0]).at[(shard[1], *place)],
            destination=lambda shard, *place: gathered_gmem.at[(shard[1], shard[0], *place)],
        )
