"""The kernel of `all_gather_rhs_matmul`.

    producer       for each output tile, for each k step:
                       if this is the first k step of a block of rows of a peer's shard: waits for the block's flag
                       loads a peer's rows from scratch, and the own shard's rows from rhs
                   gathered along n: tiles of the own shard's columns first, then those of the peers d+1, d+2, …
                   gathered along k: every tile needs all shards, first the own shard, then those of d+1, d+2, …
    communicator   copies the peers' shards to scratch, as in `communicator.py`

The producer waits inside the k loop, so that a tile begins as soon as the first rows of its columns have landed.

Shape legend: D: number of devices; m, k, n: sizes of the product of one device; k_shard = k / D or n_shard = n / D.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from overlap.collectives import communicator
from overlap.collectives.communicator import Chunks, Communicator
from overlap.collectives.gather.rhs_schedule import GatherRhsSchedule
from overlap.frame.operands import Operands
from overlap.frame.operation import LaunchPlan
from overlap.kernels.config import tile_k
from overlap.kernels.grid import own_row
from overlap.kernels.hooks import ByKStep, Hooks, OneOf, Tile
from overlap.kernels.operations import Dimension
from overlap.kernels.product_kernel import ProductKernel, Refs
from overlap.kernels.stream_k import StreamK
from overlap.primitives import PeerGroup, marks, semaphore_signal
from overlap.primitives.marks import Work
from overlap.primitives.types import GmemRef, Index, SemaphoreRef


def launch(operands: Operands, plan: LaunchPlan, group: PeerGroup, along: Dimension) -> jax.Array:
    """Runs the kernel on checked operands.

    Args:
      operands: `lhs` is [m, k], or [k, m] if it is transposed; `rhs` is one shard.
      plan: the configuration and the layouts.
      group: the devices.
      along: the dimension along which the shards are gathered: "n" or "k".

    Returns:
      [m, n].
    """
    lhs = operands.lhs
    (rhs,) = operands.rhs_list
    config = plan.config
    size = group.size
    m, _ = plan.layouts.m_k(lhs.shape)
    rows, columns = rhs.shape
    schedule = GatherRhsSchedule.of(size, along, m, (rows, columns), rhs.dtype.itemsize, config)
    work = StreamK.on(plan.target, config, schedule.tiles, schedule.k_steps)
    kernel = ProductKernel(
        f"overlap_{plan.operation.name}_{along}",
        plan.target,
        config,
        plan.types(operands, m, "pull"),
        work,
        communicator.flag_shapes(schedule.flags_shape, copies_own=False),
        communicator.smem_types(config, schedule.chunking, rhs.dtype),
        peers_read=(1,),
    )
    # The shards have a dimension of their own, so that TMA clips the last k step, or the last columns, of each shard.
    if along == "k":
        lhs = lhs.reshape((size, rows, m) if plan.layouts.transpose_lhs else (m, size, rows))
    out_types = _Outputs(
        jax.ShapeDtypeStruct((m, columns) if along == "k" else (m, size, columns), plan.out_dtype),
        jax.ShapeDtypeStruct((schedule.pulled_shards, rows, columns), rhs.dtype),
    )
    name = str(plan)
    body_of = lambda refs: _Body(kernel, schedule, group, name, refs, group.me())  # noqa: E731
    return kernel.launch(_Inputs(lhs, rhs), out_types, body_of).out.reshape(m, -1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Inputs:
    """The kernel's operands; peers read `rhs`."""

    lhs: GmemRef
    rhs: GmemRef


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Outputs:
    """The kernel's results; `scratch` has the peers' shards of the right operand."""

    out: GmemRef
    scratch: GmemRef


@dataclasses.dataclass(frozen=True)
class _Body:
    """The kernel's body: its tiles, and where their operands lie.

    Attributes:
      kernel: the static part of the kernel: configuration, mainloop, work.
      schedule: the tiles, chunks and flags.
      group: the devices.
      operation: the operation's name, for the message of a wait that takes too long.
      refs: the kernel's references.
      me: this device's position in the peer group.
    """

    kernel: ProductKernel
    schedule: GatherRhsSchedule
    group: PeerGroup
    operation: str
    refs: Refs[_Inputs, _Outputs]
    me: Index

    def tile_at(self, index: Index) -> Tile:
        step, row, column = self.schedule.tile(index)
        return Tile(step, own_row(self.kernel.config, row), column)

    def hooks(self) -> Hooks:
        return Hooks(
            load_lhs=lambda tile, load: load(ByKStep(functools.partial(self._lhs_of_k_step, tile))),
            rhs_at=self._rhs_at,
            out_at=self._out_at,
            communicate=self._communicate,
        )

    def _lhs_of_k_step(self, tile: Tile, k_step: Index) -> tuple[GmemRef, Index]:
        """Returns where a k step of the left operand lies: a reference, and the index of its first k in that reference.

        Before that, waits until the rows of the right operand for the same k step have landed.
        """
        lhs_gmem = self.refs.inputs.lhs
        schedule = self.schedule
        self._wait_for_block(self.refs.flags[0], tile, k_step)
        if schedule.along == "n":
            return lhs_gmem, k_step * tile_k(self.kernel.types.dtype)
        step, row = schedule.rows_of_k_step(tile.step, k_step)
        shard = schedule.shard(self.me, step)
        return lhs_gmem.at[shard] if self.kernel.types.layouts.transpose_lhs else lhs_gmem.at[:, shard], row

    def _rhs_at(self, tile: Tile) -> OneOf | ByKStep:
        def of_k_step(k_step: Index) -> tuple[OneOf, Index]:
            step, row = self.schedule.rows_of_k_step(tile.step, k_step)
            return self._rhs_of(step), row

        return ByKStep(of_k_step) if self.schedule.along == "k" else self._rhs_of(tile.step)

    def _rhs_of(self, step: Index) -> OneOf:
        """Returns the shard of `step`: this device's own in step 0, else a peer's in scratch.

        `step` is an int32 scalar.
        """
        of_peer = self.refs.outputs.scratch.at[jnp.maximum(step - 1, 0)]
        return OneOf((self.refs.inputs.rhs, of_peer), jnp.asarray(step > 0, jnp.int32))

    def _out_at(self, tile: Tile) -> GmemRef:
        out_gmem = self.refs.outputs.out
        return out_gmem if self.schedule.along == "k" else out_gmem.at[:, self.schedule.shard(self.me, tile.step)]

    def _wait_for_block(self, flags: SemaphoreRef, tile: Tile, k_step: Index) -> None:
        """Waits until a k step's part of the right operand has landed: its rows of the tile's columns.

        It waits only for a peer's shard (`step > 0`): at the first k step of each block of rows, and at the first one
        of this CTA's piece of the tile. If the tile's columns may lie in two blocks (`straddles`), it waits for both.
        """
        schedule = self.schedule
        step, row = schedule.rows_of_k_step(tile.step, k_step)
        column, last_column = schedule.columns_of(tile.n)

        def wait(column: Index) -> None:
            communicator.wait_for_block(flags.at[schedule.flag(step, row, column)], schedule.flag_target(row, column))

        of_peer = step > 0

        @pl.when(jnp.logical_and(of_peer, jnp.logical_or(schedule.begins_block(k_step), k_step == tile.k_first)))
        def _wait() -> None:
            with marks.during(Work.AWAIT_ROWS):
                wait(column)
                if schedule.straddles:
                    wait(last_column)

    def _communicate(self) -> None:
        refs = self.refs
        schedule = self.schedule
        group = self.group
        rhs_gmem = refs.inputs.rhs
        scratch_gmem = refs.outputs.scratch
        flags, *rest = refs.flags
        peers = Chunks(
            schedule.pulled_chunks,
            schedule.chunking,
            schedule.chunk,
            source=lambda step, *place: group.remote_ref(rhs_gmem, group.peer(step)).at[place],
            destination=lambda step, *place: scratch_gmem.at[(step - 1, *place)],
            landed=lambda *where: semaphore_signal(flags.at[schedule.flag(*where)]),
        )
        Communicator(self.operation, group, self.kernel.config, tuple(rest), refs.smem, peers).run()
