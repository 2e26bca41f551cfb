"""Bytes between GPUs: a tile sent to a peer, a shard pulled from one, and the rules of completion."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from overlap.primitives.integers import quotient, remainder

IN_BOUNDS = plgpu.OOBFillMode.PROMISE_IN_BOUNDS


def wait_stores_read(in_flight: int = 0) -> None:
    """Waits until all but the last `in_flight` stores of this thread have read their shared-memory source.

    The source may then be overwritten. The destination may not yet be read, and no flag raised for it.
    """
    plgpu.wait_smem_to_gmem(in_flight, wait_read_only=True)


def wait_stores_landed(in_flight: int = 0) -> None:
    """Waits until all but the last `in_flight` stores of this thread are complete: a flag may be raised for them."""
    plgpu.wait_smem_to_gmem(in_flight, wait_read_only=False)


def send_tile(tile_smem: Any, destination_gmem: Any) -> None:
    """Starts the copy of a shared-memory tile to global memory, here or (`Ring.remote`) on a peer.

    The tile must have been loaded by TMA, or written by threads and committed (`plgpu.commit_smem`). A destination that
    is a peer chosen on the device must be a contiguous piece of an untiled buffer.
    """
    plgpu.copy_smem_to_gmem(tile_smem, destination_gmem)


@dataclasses.dataclass(frozen=True)
class PullPlan:
    """How one shard is cut into chunks that a single copy can carry.

    A chunk is a contiguous piece of the row-major shard: `rows` whole rows, or a part (`cols` columns) of one row.

    Attributes:
      shard_rows: rows of the shard.
      shard_cols: columns of the shard.
      rows: rows per chunk; divides `shard_rows`.
      cols: columns per chunk; divides `shard_cols`, and equals it if `rows` > 1.
    """

    shard_rows: int
    shard_cols: int
    rows: int
    cols: int

    @property
    def chunks_per_row_group(self) -> int:
        """Chunks side by side in `rows` rows."""
        return self.shard_cols // self.cols

    @property
    def chunks(self) -> int:
        """Chunks per shard."""
        return (self.shard_rows // self.rows) * self.chunks_per_row_group

    def origin(self, chunk: Any) -> tuple[Any, Any]:
        """Row and column at which a chunk begins; chunks run along rows, then down."""
        group, part = quotient(chunk, self.chunks_per_row_group), remainder(chunk, self.chunks_per_row_group)
        return group * self.rows, part * self.cols

    @staticmethod
    def cut(shard_rows: int, shard_cols: int, itemsize: int, block_rows: int, max_bytes: int) -> PullPlan:
        """The largest chunks of at most `max_bytes` that do not straddle a block of `block_rows` rows.

        The last block may be shorter: chunks fill it exactly, too.

        Raises:
          ValueError: a row has no piece whose size is a multiple of 16 bytes, as the copy engine demands.
        """
        unit = 16 // itemsize
        if shard_cols % unit:
            raise ValueError(
                f"a row of {shard_cols} elements of {itemsize} bytes is no multiple of 16 bytes, which the copy engine "
                "needs: pad the contraction dimension"
            )
        if shard_cols * itemsize <= max_bytes:
            fitting = max_bytes // (shard_cols * itemsize)
            rows = largest_divisor(math.gcd(block_rows, shard_rows), fitting)
            return PullPlan(shard_rows, shard_cols, rows, shard_cols)
        return PullPlan(shard_rows, shard_cols, 1, unit * largest_divisor(shard_cols // unit, max_bytes // 16))


def largest_divisor(number: int, limit: int) -> int:
    """The largest divisor of `number` that is at most `limit`."""
    return next(d for d in range(min(number, limit), 0, -1) if number % d == 0)


def pull_chunks(
    count: Any,
    *,
    source: Callable[[Any], Any],
    destination: Callable[[Any], Any],
    landed: Callable[[Any], None],
    slots_smem: Any,
    loaded: Any,
) -> None:
    """Copies chunks remote global memory → shared memory → local global memory, in order, by one warp.

    All slots but the one being stored are on their way across NVLink at any time.

    Args:
      count: how many chunks this warp carries, an int32 scalar.
      source: from the running index of a chunk to its (remote) reference in global memory.
      destination: likewise to its local reference.
      landed: called with the running index once that chunk is complete at its destination: raise the flag here.
      slots_smem: shared memory of shape [slots, *chunk].
      loaded: one barrier per slot, of one arrival.
    """
    slots = slots_smem.shape[0]

    def load(index: Any) -> None:
        slot = remainder(index, slots)
        plgpu.copy_gmem_to_smem(source(index), slots_smem.at[slot], loaded.at[slot], oob_mode=IN_BOUNDS)

    @pl.loop(0, jnp.minimum(count, slots))
    def _prefetch(index: Any) -> None:
        load(index)

    @pl.loop(0, count)
    def _carry(index: Any) -> None:
        slot = remainder(index, slots)
        plgpu.barrier_wait(loaded.at[slot])
        send_tile(slots_smem.at[slot], destination(index))
        # Landed, not only read: the flag speaks of the destination. It also frees the slot.
        wait_stores_landed()
        landed(index)

        @pl.when(index + slots < count)
        def _refill() -> None:
            load(index + slots)
