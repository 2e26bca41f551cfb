"""How a peer's rows reach the device that multiplies them: what the transports of the gathered left operand share.

    pull   every device reads each peer's shard itself (`pull.py`)
    ring   every device passes on what it has just multiplied to the device before it (`ring.py`)

Either way the shard of step s ≥ 1 ends up in the device's own scratch, in the place that `AllGatherSchedule.scratch_index`
names, and a flag per (step, row block) says that its rows are there. Who multiplies what when is the same as well, and
so are the bits of the result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax.numpy as jnp
from jax.experimental import pallas as pl

from overlap.collectives.schedule import AllGatherSchedule
from overlap.kernels.config import Config
from overlap.kernels.hooks import Hooks, Tile
from overlap.primitives import PeerGroup


@dataclasses.dataclass(frozen=True)
class Shards:
    """Where the shards lie, and who multiplies them when.

    Attributes:
      operation: the operation's name, for whoever waits too long.
      ring: the devices.
      schedule: who multiplies which rows when, and which flags say that they are there.
      config: sizes.
      tile_pieces: into how many parts a tile may be cut along k, if it is cut.
      lhs_gmem: [(batch,) m_shard, k], this device's shard.
      scratch_gmem: [(batch,) slots, m_shard, k], where the peers' shards are to lie.
      scales: of `AllGatherSchedule.scaled` rows, [1, n] of this device's in f32, each batch element filled up to whole
        tiles, and [D - 1, 1, n], where those of the peers are to lie. Or scales of blocks (`scale_k_steps`), [tiles, k
        steps, words] of this device's, and [(D - 1) · tiles, k steps, words].
    """

    operation: str
    group: PeerGroup
    schedule: AllGatherSchedule
    config: Config
    tile_pieces: int
    lhs_gmem: Any
    scratch_gmem: Any
    scales: tuple[Any, Any] | None = None

    def within(self, ref: Any, batch: Any, *index: Any) -> Any:
        """A piece of one batch element, where there are several."""
        index = (batch, *index) if self.schedule.batch_size > 1 else index
        return ref.at[index] if index else ref

    def flag(self, step: Any, tile: Tile) -> tuple[Any, Any]:
        """The flag of a tile's rows, if they are those of the shard of `step` ≥ 1."""
        return self.schedule.flag(step, tile.batch * self.schedule.chunking.shard_rows + tile.m * self.config.tile_m)

    def wait_for_rows(self, wait: Callable[[Tile], None]) -> Callable[[Tile], None]:
        """A `Hooks.before_load` that calls `wait` for each tile with rows of a peer."""

        def before_load(tile: Tile) -> None:
            # The second tile of a cluster may lie wholly below the last row; it then waits for nothing.
            pl.when(jnp.logical_and(tile.step > 0, tile.m < self.schedule.row_blocks))(lambda: wait(tile))

        return before_load


class Transport(Protocol):
    """What the kernel's body needs of a transport.

    Attributes:
      why: why it is chosen where nobody asks for it.
      forwards: whether it has a part for the forwarder warp (`OperandTypes.forwards`).
      reads_inputs_only: whether it touches nothing of its peers but operands and flags, so that their addresses can be told
        (`overlap/primitives/addresses.py`).
      needs_all_ctas: whether it ends only where all CTAs of a device run at the same time: another kernel that holds
        some of the cores while it waits for another device, as XLA's collectives do, can then make both wait for ever.
      brings_scales: whether the scales of rows travel with them; else XLA gathers them beforehand.
    """

    @property
    def why(self) -> str: ...

    @property
    def forwards(self) -> bool: ...

    @property
    def reads_inputs_only(self) -> bool: ...

    @property
    def needs_all_ctas(self) -> bool: ...

    @property
    def brings_scales(self) -> bool: ...

    def flag_shapes(self, schedule: AllGatherSchedule) -> tuple[tuple[int, ...], ...]:
        """The flags that it needs, zero at launch."""
        ...

    def smem_types(self, schedule: AllGatherSchedule, config: Config, dtype: Any) -> tuple[Any, ...]:
        """The shared memory that it needs beside the mainloop's, whose check counts it."""
        ...

    def hook_in(self, hooks: Hooks, shards: Shards, flags: tuple[Any, ...], smem: tuple[Any, ...]) -> Hooks:
        """The mainloop's hooks with its own among them; flags and shared memory as asked for."""
        ...
