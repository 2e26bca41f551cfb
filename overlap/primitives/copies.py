"""Bytes between GPUs: a tile sent to a peer, a shard pulled from one, and the rules of completion."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from overlap.primitives import marks
from overlap.primitives.atomics import draw, loop_while
from overlap.primitives.integers import ceil_div, largest_divisor, quotient, remainder
from overlap.primitives.marks import Work
from overlap.primitives.types import BarrierRef, GmemRef, SmemRef

IN_BOUNDS = plgpu.OOBFillMode.PROMISE_IN_BOUNDS


def wait_stores_read(in_flight: int = 0) -> None:
    """Waits until all but the last `in_flight` stores of this thread have read their shared-memory source.

    The source may then be overwritten. The destination may not yet be read, and no flag raised for it.
    """
    plgpu.wait_smem_to_gmem(in_flight, wait_read_only=True)


def wait_stores_landed(in_flight: int = 0) -> None:
    """Waits until all but the last `in_flight` stores of this thread are complete: a flag may be raised for them."""
    plgpu.wait_smem_to_gmem(in_flight, wait_read_only=False)


def tma_load(source_gmem: GmemRef, tile_smem: SmemRef, loaded: BarrierRef) -> None:
    """Starts the copy (TMA) of a tile from global memory, here or on a peer, to shared memory.

    Call it in one warp or one warpgroup. It returns at once.

    Ordering: the tile has landed when `plgpu.barrier_wait(loaded)` returns. If a flag stands for the source's bytes,
    wait for it with `semaphore_wait_peer`, or with `semaphore_wait` and then `fence_async_proxy`.

    Args:
      source_gmem: the tile in global memory; of a peer: a slice of `PeerGroup.remote_ref`. It must be one contiguous
        piece of memory, of a multiple of 16 bytes, and lie within its array: no byte outside is filled in.
      tile_smem: shared memory of the same shape and dtype.
      loaded: an mbarrier. The copy counts as one arrival.
    """
    plgpu.copy_gmem_to_smem(source_gmem, tile_smem, loaded, oob_mode=IN_BOUNDS)


def tma_store(tile_smem: Any, destination_gmem: Any) -> None:
    """Starts the copy of a shared-memory tile to global memory, here or (`PeerGroup.remote_ref`) on a peer.

    The tile must have been loaded by TMA, or written by threads and committed (`plgpu.commit_smem`). A destination that
    is a peer chosen on the device must be a contiguous piece of an untiled buffer.
    """
    plgpu.copy_smem_to_gmem(tile_smem, destination_gmem)


@dataclasses.dataclass(frozen=True)
class Chunking:
    """How one shard is cut into chunks that a single copy can carry.

    A chunk is a contiguous piece of the row-major shard: `rows` whole rows, or a part (`cols` columns) of one row. The
    last one of the shard may have fewer rows, or the last one of each row fewer columns.

    Attributes:
      shard_rows: rows of the shard.
      shard_cols: columns of the shard.
      rows: rows per chunk.
      cols: columns per chunk; all of them if `rows` > 1.
    """

    shard_rows: int
    shard_cols: int
    rows: int
    cols: int

    @property
    def row_groups(self) -> int:
        """Chunks one below the other."""
        return ceil_div(self.shard_rows, self.rows)

    @property
    def chunks_per_row_group(self) -> int:
        """Chunks side by side in `rows` rows."""
        return ceil_div(self.shard_cols, self.cols)

    @property
    def chunks(self) -> int:
        """Chunks per shard."""
        return self.row_groups * self.chunks_per_row_group

    @property
    def short(self) -> tuple[int, int] | None:
        """Rows and columns of the chunks that are smaller than the others; None if there are none."""
        rows, cols = self.shard_rows % self.rows or self.rows, self.shard_cols % self.cols or self.cols
        return None if (rows, cols) == (self.rows, self.cols) else (rows, cols)

    def lacks(self, row: Any, column: Any) -> Any:
        """How many rows or columns the chunk that begins there is short of, if positive."""
        if self.shard_rows % self.rows:
            return row + self.rows - self.shard_rows
        return column + self.cols - self.shard_cols

    def origin(self, chunk: Any) -> tuple[Any, Any]:
        """Row and column at which a chunk begins; chunks run along rows, then down."""
        group, part = quotient(chunk, self.chunks_per_row_group), remainder(chunk, self.chunks_per_row_group)
        return group * self.rows, part * self.cols

    @staticmethod
    def cut(shard_rows: int, shard_cols: int, itemsize: int, block_rows: int, max_bytes: int) -> Chunking:
        """Large chunks of at most `max_bytes` that do not straddle a block of `block_rows` rows.

        The parts of a row are equally long if parts of at least two thirds of the greatest length can be.

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
            rows = largest_divisor(block_rows, min(fitting, shard_rows))
            return Chunking(shard_rows, shard_cols, rows, shard_cols)
        units = shard_cols // unit
        nearly_equal = ceil_div(units, ceil_div(units, max_bytes // 16))
        equal = largest_divisor(units, max_bytes // 16)
        # Two sizes of chunks take twice the code, which a few percent more bytes in flight are not worth.
        return Chunking(shard_rows, shard_cols, 1, unit * (equal if 3 * equal >= 2 * nearly_equal else nearly_equal))


def copy_chunks(
    number: Any,
    numbers: tuple[int, int],
    counter: Any,
    plan: Chunking,
    *,
    at: Callable[[Any], tuple[Any, Any, Any]],
    source: Callable[..., Any],
    destination: Callable[..., Any],
    landed: Callable[[Any, Any, Any], None],
    slots_smem: Any,
    loaded: Any,
    ready: Callable[[Any, Any, Any], None] | None = None,
    send: Callable[..., None] | None = None,
) -> Any:
    """Copies chunks global memory → shared memory → global memory, by one warp of each CTA.

    Either side may be a peer's.

    Which ones says a counter, from which each warp draws as it goes on: so whichever CTAs run carry all of them, and
    who is faster carries more. All slots but the one being stored are on their way across NVLink at any time.

    Args:
      number: this CTA's first number of the counter, an int32 scalar.
      numbers: the numbers from the first to before the second are chunks, in this order.
      counter: the counter.
      plan: the chunks' sizes; with `send`, anything that has the same `rows`, `cols`, `short` and `lacks`.
      at: from a chunk's index (0 first) to the shard that it is of, in whatever terms, and its first row and column.
      source: from a shard, rows and columns (slices) to the (remote) reference in global memory.
      destination: likewise to the local reference.
      landed: called with what `at` says of a chunk once that is complete at its destination: raise the flag here.
      slots_smem: shared memory of shape [slots, plan.rows, plan.cols].
      loaded: one barrier per slot, of one arrival.
      ready: called with what `at` says of a chunk before that is loaded: wait for it here.
      send: called as `send(shard, rows, columns, slot_smem)` in place of a copy to `destination`: starts the copies of
        a chunk, which may go to several places, and whose rows may lie apart. At the edges of its source a chunk is
        then filled up with zeros, and nobody is told that it has landed: a slot is free once it has been read.

    Returns:
      How many chunks this warp has carried, an int32 scalar; all its accesses to the sources are over, and all chunks
      have landed.
    """
    (begin, end), slots = numbers, slots_smem.shape[0]

    def in_its_size(number: Any, slot: Any, copy: Callable[[Any, Any, Any], None]) -> None:
        """Calls `copy` with the shard, the place there, and the place in shared memory of a chunk."""
        shard, row, column = at(number - begin)

        def of_size(rows: int, cols: int) -> Callable[[], None]:
            slot_smem = slots_smem.at[slot, pl.ds(0, rows), pl.ds(0, cols)]
            return lambda: copy(shard, (pl.ds(row, rows), pl.ds(column, cols)), slot_smem)

        if plan.short is None:
            of_size(plan.rows, plan.cols)()
            return
        # (Mosaic GPU has no `not` for a warp.)
        lacking = plan.lacks(row, column)
        pl.when(lacking <= 0)(of_size(plan.rows, plan.cols))
        pl.when(lacking > 0)(of_size(*plan.short))

    def load(number: Any, slot: Any) -> None:
        if ready is not None:
            wait = ready

            def wait_for_it() -> None:
                marks.now(Work.AWAIT_TILE, number=number - begin)
                wait(*at(number - begin))
                marks.now(Work.COPY, number=number - begin)

            pl.when(number < end)(wait_for_it)

        def start(shard: Any, place: Any, slot_smem: Any) -> None:
            bounds = IN_BOUNDS if send is None else None
            plgpu.copy_gmem_to_smem(source(shard, *place), slot_smem, loaded.at[slot], oob_mode=bounds)

        pl.when(number < end)(lambda: in_its_size(number, slot, start))

    def forward(shard: Any, place: Any, slot_smem: Any) -> None:
        if send is not None:
            send(shard, *place, slot_smem)
        else:
            tma_store(slot_smem, destination(shard, *place))

    # The numbers of the chunks that are on their way, in the order of the slots from the oldest on, and the next one.
    drawn = [number]
    for slot in range(slots):
        load(drawn[slot], slot)
        drawn.append(draw(counter, end, drawn[slot]))

    def carry(state: Any) -> Any:
        slot, count, (oldest, *others, following) = state
        marks.now(Work.COPY, number=oldest - begin)
        plgpu.barrier_wait(loaded.at[slot])
        in_its_size(oldest, slot, forward)
        # While the store is under way.
        after = draw(counter, end, following)
        if send is None:
            # Landed, not only read: the flag speaks of the destination. It also frees the slot.
            wait_stores_landed()
            landed(*at(oldest - begin))
        else:
            wait_stores_read()
        load(following, slot)
        return remainder(slot + 1, slots), count + 1, (*others, following, after)

    start = (jnp.int32(0), jnp.int32(0), tuple(drawn))
    carried = loop_while(lambda state: state[2][0] < end, carry, start)[1]
    if send is not None:
        wait_stores_landed()
    return carried
