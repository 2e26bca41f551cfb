"""The common interface of both transports of the gathered left operand: how peers' rows reach a device.

    pull   every device reads each peer's shard itself (`pull.py`)
    ring   every device passes the rows that it has just multiplied on to the device before it (`ring.py`)

With both, the shard of step s ≥ 1 ends up in the device's own scratch memory, at `AllGatherSchedule.scratch_index`. A
flag for each (step, row block) says that the rows are there. Both compute the same tiles in the same order, so their
results have the same bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal, Protocol

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from overlap.collectives.gather.lhs_schedule import AllGatherSchedule
from overlap.kernels.config import Config
from overlap.kernels.hooks import Hooks, Tile
from overlap.primitives import PeerGroup
from overlap.primitives.types import GmemRef, Index, ScratchType, SemaphoreRef, SmemRef


@dataclasses.dataclass(frozen=True)
class Shards:
    """Where the shards of the left operand lie, and in which order a device multiplies them.

    Attributes:
      operation: the operation's name, for the message of a wait that takes too long.
      group: the devices.
      schedule: the order of the tiles, and the flags that say that their rows have landed.
      config: tile sizes and chunk sizes.
      tile_pieces: the number of pieces along k of each tile that is cut.
      lhs_gmem: [(batch,) m_shard, k], this device's shard.
      scratch_gmem: [(batch,) scratch shards, m_shard, k], the memory for the peers' shards.
      scales: a pair: this device's scales, and the memory for its peers' scales. None if no scales travel
        (`AllGatherSchedule.scaled`). Scales of rows: f32 [1, entries], where each batch element is padded to whole
        tiles, and [D - 1, 1, entries]. Scales of blocks (if `AllGatherSchedule.scale_k_steps`): [tiles, k steps, words]
        and [(D - 1) · tiles, k steps, words].
    """

    operation: str
    group: PeerGroup
    schedule: AllGatherSchedule
    config: Config
    tile_pieces: int
    lhs_gmem: GmemRef
    scratch_gmem: GmemRef
    scales: tuple[GmemRef, GmemRef] | None = None

    def within(self, ref: GmemRef, batch: Index, *index: Index | pl.Slice) -> GmemRef:
        """Returns `ref.at[batch, *index]` if the shards have several batch elements, else `ref.at[index]`."""
        index = (batch, *index) if self.schedule.batch_size > 1 else index
        return ref.at[index] if index else ref

    def flag(self, step: Index, tile: Tile) -> tuple[Index, Index]:
        """Returns the index of the flag of a tile's rows in the shard of `step` ≥ 1."""
        return self.schedule.flag(step, tile.batch * self.schedule.chunking.shard_rows + tile.m * self.config.tile_m)

    def wait_for_rows(self, wait: Callable[[Tile], None]) -> Callable[[Tile], None]:
        """Returns a `Hooks.before_load` that calls `wait` for each tile with rows of a peer."""

        def before_load(tile: Tile) -> None:
            # The second tile of a pair may lie wholly below the last row. It then waits for nothing.
            pl.when(jnp.logical_and(tile.step > 0, tile.m < self.schedule.row_blocks))(lambda: wait(tile))

        return before_load


class Transport(Protocol):
    """What the kernel's body needs of a transport of the gathered left operand.

    Attributes:
      name: the transport's name.
      why: the reason given for the transport where the caller names none.
      reads_inputs_only: whether a device accesses only the operands and flags of its peers. Only the addresses of these
        can be told to peers in other processes (`overlap/primitives/addresses.py`).
      needs_all_ctas: whether a launch ends only if all CTAs of a device run at the same time. Then two kernels may wait
        for each other for ever: this one, and one that holds some of the SMs while it waits for another device, as
        XLA's collectives do.
      brings_scales: whether the scales of rows travel with the rows. Otherwise XLA gathers them before the kernel.
    """

    name: Literal["pull", "ring"]
    why: str
    reads_inputs_only: bool
    needs_all_ctas: bool
    brings_scales: bool

    def flag_shapes(self, schedule: AllGatherSchedule) -> tuple[tuple[int, ...], ...]:
        """Returns the shapes of the flags that the transport needs. All flags are zero at launch."""
        ...

    def smem_types(self, schedule: AllGatherSchedule, config: Config, dtype: DTypeLike) -> tuple[ScratchType, ...]:
        """Returns the types of the shared memory that the transport needs beside the mainloop's.

        The mainloop's check that all shared memory fits counts this memory as well.
        """
        ...

    def hook_in(
        self, hooks: Hooks, shards: Shards, flags: tuple[SemaphoreRef, ...], smem: tuple[SmemRef, ...]
    ) -> Hooks:
        """Returns the mainloop's hooks with the transport's own hooks added.

        Args:
          hooks: the hooks of the kernel's body.
          shards: where the shards lie.
          flags: flags of the shapes `flag_shapes`.
          smem: shared memory of the types `smem_types`.
        """
        ...
