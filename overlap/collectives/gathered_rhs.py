"""The kernel of `all_gather_rhs_matmul`: which tiles there are, and where their columns and k steps lie.

    producer       for each output tile, for each k step; at the first step of each block of rows of a peer's shard:
                       wait for the block's flag; then load from scratch
                   along n: tiles of the own shard's columns first, then the peers' in the order d+1, d+2, …
                   along k: every tile needs all shards: it begins with the own one, then d+1, d+2, …
    communicator   as in `pull.py`

A wait stands inside the k loop, so that a tile begins as soon as the first rows of its columns are there.

Shape legend: D: devices; m, k, n: sizes of the product of one device; k_shard = k / D or n_shard = n / D.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from overlap.collectives import pull
from overlap.collectives.pull import Chunks, Communicator
from overlap.collectives.rhs_schedule import GatherRhsSchedule
from overlap.frame.operands import Operands, Plan
from overlap.kernels.grid import own_tile
from overlap.kernels.hooks import ByStep, Hooks, OneOf, Tile
from overlap.kernels.product_kernel import ProductKernel, Refs
from overlap.kernels.stream_k import StreamK
from overlap.primitives import Ring, signal


def launch(operands: Operands, plan: Plan, ring: Ring, along: Any) -> jax.Array:
    """Runs the kernel on checked operands: [m, n] for lhs [m, k]."""
    (lhs, (rhs,)), config, size = (operands.lhs, operands.rhs_list), plan.config, ring.size
    assert config is not None
    (m, _), (rows, columns) = lhs.shape, rhs.shape
    schedule = GatherRhsSchedule.of(size, along, m, (rows, columns), rhs.dtype.itemsize, config)
    clusters = plan.target.num_cores // config.cluster
    work = StreamK(schedule.tiles, schedule.k_steps, clusters, config.stream_k)
    kernel = ProductKernel(
        f"overlap_{plan.operation.name}_{along}", plan.target, config, plan.types(operands, m), work,
        pull.flag_shapes(schedule.flags, copies_own=False), pull.smem_types(config, schedule.plan, rhs.dtype),
        peers_read=(1,),
    )  # fmt: skip
    # A dimension of its own for the shards, so that the last step, or the last columns, of one are clipped there.
    inputs = lhs.reshape(m, size, rows) if along == "k" else lhs, rhs
    out_types = (
        jax.ShapeDtypeStruct((m, columns) if along == "k" else (m, size, columns), plan.out_dtype),
        jax.ShapeDtypeStruct((schedule.pulled, rows, columns), rhs.dtype),
    )
    body = _Body(kernel, schedule, ring, plan.operation.name)
    out, _ = kernel.launch(inputs, out_types, body.at)
    return out.reshape(m, -1)


@dataclasses.dataclass(frozen=True)
class _Body:
    """The kernel's body: its tiles, and where their operands lie."""

    kernel: ProductKernel
    schedule: GatherRhsSchedule
    ring: Ring
    operation: str

    def at(self, refs: Refs) -> tuple[Callable[[Any], Tile], Hooks]:
        (lhs_gmem, rhs_gmem), (out_gmem, scratch_gmem), flags = refs.inputs, refs.outputs, refs.flags[0]
        schedule, config, me = self.schedule, self.kernel.config, self.ring.me()
        along_k = schedule.along == "k"

        def tile_at(index: Any) -> Tile:
            step, row, column = schedule.tile(index)
            m, n = own_tile(config, row, column)
            return Tile(step, m, n, out_row=m * config.tile_m)

        def load_rows(tile: Tile, load: Any) -> None:
            def where(k: Any) -> tuple[Any, Any]:
                self._wait_for_block(flags, tile, k)
                if not along_k:
                    return lhs_gmem, k * config.tile_k
                step, row = schedule.rows_of(tile.step, k)
                return lhs_gmem.at[:, schedule.shard(me, step)], row

            load(ByStep(where))

        def rhs_at(tile: Tile) -> Any:
            def of_step(step: Any) -> Any:
                return OneOf((rhs_gmem, scratch_gmem.at[jnp.maximum(step - 1, 0)]), (step > 0).astype(jnp.int32))

            def where(k: Any) -> tuple[Any, Any]:
                step, row = schedule.rows_of(tile.step, k)
                return of_step(step), row

            return ByStep(where) if along_k else of_step(tile.step)

        return tile_at, Hooks(
            load_lhs=load_rows,
            rhs_at=rhs_at,
            out_at=lambda tile: out_gmem if along_k else out_gmem.at[:, schedule.shard(me, tile.step)],
            communicate=lambda: self._communicate(refs),
        )

    def _wait_for_block(self, flags: Any, tile: Tile, k: Any) -> None:
        """Before the first k step of a block of a peer's shard, or of this CTA's part of the tile."""
        schedule = self.schedule
        step, row = schedule.rows_of(tile.step, k)
        column, last_column = schedule.columns_of(tile.n)

        def wait(column: Any) -> None:
            pull.wait_for_block(flags.at[schedule.flag(step, row, column)], schedule.flag_target(row, column))

        # The second tile of a cluster may lie wholly beyond the last column; it then waits for nothing.
        needed = jnp.logical_and(step > 0, column < schedule.plan.shard_cols)

        @pl.when(jnp.logical_and(needed, jnp.logical_or(schedule.begins_block(k), k == tile.k_first)))
        def _wait() -> None:
            wait(column)
            if schedule.straddles:
                wait(last_column)

    def _communicate(self, refs: Refs) -> None:
        (_, rhs_gmem), (_, scratch_gmem), (flags, *rest) = refs.inputs, refs.outputs, refs.flags
        schedule, ring = self.schedule, self.ring
        peers = Chunks(
            schedule.pulls, schedule.plan, schedule.chunk,
            source=lambda step, *place: ring.remote(rhs_gmem, ring.peer(step)).at[place],
            destination=lambda step, *place: scratch_gmem.at[(step - 1, *place)],
            landed=lambda *where: signal(flags.at[schedule.flag(*where)]),
        )  # fmt: skip
        Communicator(self.operation, ring, self.kernel.config, tuple(rest), refs.smem, peers).run()
