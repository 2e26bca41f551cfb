"""Copies between GPUs: a tile to or from a peer, a shard in chunks, and the rules of completion."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from overlap.primitives import marks
from overlap.primitives.arguments import in_kernel, require_barrier, require_constant, require_index, require_memory
from overlap.primitives.atomics import draw, loop_while
from overlap.primitives.integers import ceil_div, largest_divisor, quotient, remainder
from overlap.primitives.marks import Work
from overlap.primitives.types import BarrierRef, GmemRef, Index, SemaphoreRef, SmemRef, Tree

IN_BOUNDS = plgpu.OOBFillMode.PROMISE_IN_BOUNDS
_OF_LOAD = (
    "call `tma_load(source_gmem, tile_smem, loaded)` in a kernel, with references (`ref.at[…]`), not their values"
)
_OF_STORE = "call `tma_store(tile_smem, destination_gmem)` in a kernel, with references (`ref.at[…]`), not their values"


def wait_stores_read(in_flight: int = 0) -> None:
    """Waits until all but the last `in_flight` stores of this thread have read their shared-memory source.

    Call it in the warp or warpgroup that has called `tma_store`.

    Ordering: the source may then be overwritten. The destination must not be read yet, and no flag be raised for it.
    """
    with in_kernel("wait_stores_read"):
        plgpu.wait_smem_to_gmem(in_flight, wait_read_only=True)


def wait_stores_landed(in_flight: int = 0) -> None:
    """Waits until all but the last `in_flight` stores of this thread are complete.

    Call it in the warp or warpgroup that has called `tma_store`.

    Ordering: the bytes are at their destination, here or on a peer. A flag may be raised for them.
    """
    with in_kernel("wait_stores_landed"):
        plgpu.wait_smem_to_gmem(in_flight, wait_read_only=False)


def tma_load(source_gmem: GmemRef, tile_smem: SmemRef, loaded: BarrierRef) -> None:
    """Starts the copy (TMA) of a tile from global memory, here or on a peer, to shared memory.

    Call it in one warp or one warpgroup. It returns at once.

    Ordering: the tile has landed when `plgpu.barrier_wait(loaded)` returns. If a flag stands for the source's bytes,
    wait for it with `semaphore_wait_peer`, or with `semaphore_wait` and then `fence_async_proxy`.

    Args:
      source_gmem: the tile in global memory. For a peer's memory, pass a slice of `PeerGroup.remote_ref`. The tile must
        be one contiguous range of memory whose size is a multiple of 16 bytes, and must lie within its array: bytes
        outside of the array are not replaced by zeros.
      tile_smem: shared memory of the same shape and dtype.
      loaded: an mbarrier. The copy counts as one arrival.

    Raises:
      TypeError: an argument is no reference, or refers to another kind of memory.
      ValueError: jax refuses the copy: the shapes or the dtypes differ.
    """
    require_memory("tma_load", "source_gmem", source_gmem, plgpu.GMEM, _OF_LOAD)
    require_memory("tma_load", "tile_smem", tile_smem, plgpu.SMEM, _OF_LOAD)
    require_barrier("tma_load", "loaded", loaded)
    plgpu.copy_gmem_to_smem(source_gmem, tile_smem, loaded, oob_mode=IN_BOUNDS)


def tma_store(tile_smem: SmemRef, destination_gmem: GmemRef) -> None:
    """Starts the copy (TMA) of a tile from shared memory to global memory, here or on a peer.

    Call it in one warp or one warpgroup. It returns at once.

    Ordering: none until `wait_stores_read` (the tile may be overwritten) or `wait_stores_landed` (a flag may be
    raised).

    Args:
      tile_smem: the tile. It must have been loaded by TMA, or written by threads and committed (`plgpu.commit_smem`).
      destination_gmem: global memory of the same shape and dtype. For a peer's memory, pass a slice of
        `PeerGroup.remote_ref`. If the peer's position is known only inside the kernel, the destination must be one
        contiguous range of an untiled buffer.

    Raises:
      TypeError: an argument is no reference, or refers to another kind of memory.
      ValueError: jax refuses the copy: the shapes or the dtypes differ.

    Examples:
      `tma_store(tile_smem, group.remote_ref(out_gmem, group.peer(1)).at[pl.ds(row, rows)])`
    """
    require_memory("tma_store", "tile_smem", tile_smem, plgpu.SMEM, _OF_STORE)
    require_memory("tma_store", "destination_gmem", destination_gmem, plgpu.GMEM, _OF_STORE)
    plgpu.copy_smem_to_gmem(tile_smem, destination_gmem)


# The part of a shard that a chunk is, and a function of (shard, rows and columns, the chunk's place in shared memory).
type Part = tuple[pl.Slice, pl.Slice]
type Copy = Callable[[Tree, Part, SmemRef], None]


@dataclasses.dataclass(frozen=True)
class Chunking:
    """How one shard is cut into chunks. A chunk is what `copy_chunks` moves by one copy.

    The shard is a row-major array [shard_rows, shard_cols]. A chunk is one contiguous range of it: `rows` whole rows,
    or a part (`cols` columns) of one row. The last chunk of the shard may have fewer rows. If chunks are parts of rows,
    the last chunk of each row may have fewer columns.

    `Chunking.cut` finds the sizes. All sizes are Python ints, counted in elements, and are not checked here. A chunk's
    size in bytes must be a multiple of 16. Chunks have numbers from 0 to `chunks` - 1, row by row.

    Attributes:
      shard_rows: rows of the shard.
      shard_cols: columns of the shard.
      rows: rows per chunk.
      cols: columns per chunk; `shard_cols` if `rows` > 1.

    Examples:
      >>> from overlap import primitives
      >>> chunking = primitives.Chunking.cut(64, 1024, itemsize=4, block_rows=64, max_bytes=16384)
      >>> chunking.rows, chunking.cols, chunking.chunks, chunking.short
      (4, 1024, 16, None)
      >>> chunking.origin(3)
      (12, 0)
    """

    shard_rows: int
    shard_cols: int
    rows: int
    cols: int

    @property
    def row_groups(self) -> int:
        """The number of groups of `rows` rows that the shard has; the last group may have fewer rows."""
        return ceil_div(self.shard_rows, self.rows)

    @property
    def chunks_per_row_group(self) -> int:
        """The number of chunks that lie side by side in a group of `rows` rows; 1 unless rows are cut."""
        return ceil_div(self.shard_cols, self.cols)

    @property
    def chunks(self) -> int:
        """The number of chunks of the shard."""
        return self.row_groups * self.chunks_per_row_group

    @property
    def short(self) -> tuple[int, int] | None:
        """(rows, columns) of the chunks that are smaller than the others; None if all have the same size."""
        rows, cols = self.shard_rows % self.rows or self.rows, self.shard_cols % self.cols or self.cols
        return None if (rows, cols) == (self.rows, self.cols) else (rows, cols)

    def lacks(self, row: Index, column: Index) -> Index:
        """Returns a number greater than 0 if a chunk is smaller than the others: the rows or columns that it lacks.

        Args:
          row: the chunk's first row in the shard.
          column: the chunk's first column in the shard.
        """
        if self.shard_rows % self.rows:
            return row + self.rows - self.shard_rows
        return column + self.cols - self.shard_cols

    def origin(self, chunk: Index) -> tuple[Index, Index]:
        """Returns the row and the column of the shard at which a chunk begins.

        Args:
          chunk: the chunk's number, 0 … `chunks` - 1: a Python int or an int32 scalar. So are the results.
        """
        group, part = quotient(chunk, self.chunks_per_row_group), remainder(chunk, self.chunks_per_row_group)
        return group * self.rows, part * self.cols

    @staticmethod
    def cut(shard_rows: int, shard_cols: int, itemsize: int, block_rows: int, max_bytes: int) -> Chunking:
        """Cuts a shard into chunks as large as possible, each of at most `max_bytes` and within one block of rows.

        If a row is cut, its parts have equal length, provided that parts of equal length can have at least two thirds
        of the greatest possible length.

        Args:
          shard_rows: rows of the shard, at least 1.
          shard_cols: columns of the shard, at least 1.
          itemsize: bytes of an element: 1, 2, 4, 8 or 16.
          block_rows: rows of a block that no chunk may straddle, at least 1. Block 0 begins at row 0. Without such
            blocks: `shard_rows`.
          max_bytes: the most bytes of a chunk, at least 16: the size of a chunk buffer in shared memory.

        Raises:
          TypeError: an argument is not a Python int.
          ValueError: an argument is too small; or the size of a row is not a multiple of 16 bytes, as the copy engine
            demands.
        """
        sizes = {"shard_rows": shard_rows, "shard_cols": shard_cols, "itemsize": itemsize, "block_rows": block_rows}
        for name, size in sizes.items():
            require_constant("Chunking.cut", name, size, 1, "sizes are positive numbers that are known while tracing")
        require_constant("Chunking.cut", "max_bytes", max_bytes, 16, "the copy engine moves at least 16 bytes")
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
        # Prefer chunks of one size: two sizes take twice the code, for a few percent more bytes in flight.
        return Chunking(shard_rows, shard_cols, 1, unit * (equal if 3 * equal >= 2 * nearly_equal else nearly_equal))


def copy_chunks(
    number: Index,
    numbers: tuple[int, int],
    counter: SemaphoreRef,
    plan: Chunking,
    *,
    at: Callable[[Index], tuple[Tree, Index, Index]],
    source: Callable[..., GmemRef],
    destination: Callable[..., GmemRef],
    landed: Callable[[Tree, Index, Index], None],
    chunk_buffers_smem: SmemRef,
    loaded: BarrierRef,
    ready: Callable[[Tree, Index, Index], None] | None = None,
    send: Callable[..., None] | None = None,
) -> jax.Array:
    """Copies chunks from global memory through shared memory to global memory, by one warp of each CTA.

    Call it in one warp of each CTA (`plgpu.warp_map`). The source or the destination may be a peer's memory. Each warp
    draws the chunks that it copies from a counter, one after the other. So all chunks are copied by whichever CTAs are
    running, and a faster CTA copies more of them. At any time all chunk buffers but the one that is being stored are
    being loaded.

    One call may copy the chunks of several shards, for example of all peers. All shards are cut alike, by `plan`.

    Ordering: as for `tma_load` and `tma_store`. `ready` must make the source visible to the copy engine
    (`semaphore_wait_peer`, or `semaphore_wait` and then `fence_async_proxy`). When `landed` is called, the chunk's
    bytes are at their destination, and a flag may be raised for them.

    Args:
      number: the number that this warp has drawn from the counter before the call (`draw`, `Handshake.begin`): an int32
        scalar.
      numbers: (begin, end), two Python ints. The counter's numbers begin … end - 1 stand for chunks: number n stands
        for the chunk with the index n - begin, over all shards.
      counter: one semaphore, as in `draw`.
      plan: the chunks' sizes; with `send`, anything that has the same `rows`, `cols`, `short` and `lacks`.
      at: called as `at(index)` with an int32 scalar, 0 … end - begin - 1. It returns (shard, row, column): the chunk's
        shard, as any object that the other functions take, and the chunk's first row and column there, for example by
        `plan.origin`.
      source: called as `source(shard, rows, columns)` with two slices (`pl.ds`) within the shard. It returns the
        reference to that part in global memory, here or on a peer.
      destination: called with the same arguments. It returns the reference in global memory, here or on a peer, to
        which the chunk is copied.
      landed: called as `landed(shard, row, column)`, with the result of `at`, when the chunk is complete at its
        destination. Raise the flag here.
      chunk_buffers_smem: the chunk buffers: shared memory of shape [buffers, plan.rows, plan.cols], of the dtype of
        the source and the destination. At least one buffer; with two or more, loads run while a chunk is stored.
      loaded: mbarriers of one arrival, one for each chunk buffer: `plgpu.Barrier(num_barriers=buffers)`.
      ready: called as `ready(shard, row, column)` before the chunk is loaded. Wait here until the source is ready.
        None: the source is ready from the beginning.
      send: called as `send(shard, rows, columns, chunk_smem)` in place of a copy to `destination`. It starts the copies
        of a chunk, which may go to several places, and whose rows may lie apart. With `send`, a chunk at the edge of
        its source is filled up with zeros, `landed` is not called, and a chunk buffer is free once it has been read.

    Returns:
      How many chunks this warp has copied, an int32 scalar. All its reads of the sources are over, and all its chunks
      have landed.

    Raises:
      TypeError: `number` is not an integer scalar, or an entry of `numbers` is not a Python int.
      ValueError: the chunk buffers do not have the shape [buffers, plan.rows, plan.cols].
    """
    begin, end = numbers
    buffers = chunk_buffers_smem.shape[0]
    require_index("copy_chunks", "number", number, "the number drawn first")
    for name, bound in (("numbers[0]", begin), ("numbers[1]", end)):
        require_constant("copy_chunks", name, bound, 0, "the counter's numbers that stand for chunks")
    if not buffers or tuple(chunk_buffers_smem.shape[1:]) != (plan.rows, plan.cols):
        raise ValueError(
            "`chunk_buffers_smem` of `copy_chunks` must have the shape [buffers, plan.rows, plan.cols], at least one "
            f"buffer of ({plan.rows}, {plan.cols}), got {tuple(chunk_buffers_smem.shape)}"
        )

    def in_its_size(number: Index, buffer: Index, copy: Copy) -> None:
        """Calls `copy` with a chunk's shard, its place in the shard, and its place in shared memory."""
        shard, row, column = at(number - begin)

        def of_size(rows: int, cols: int) -> Callable[[], None]:
            chunk_smem = chunk_buffers_smem.at[buffer, pl.ds(0, rows), pl.ds(0, cols)]
            return lambda: copy(shard, (pl.ds(row, rows), pl.ds(column, cols)), chunk_smem)

        if plan.short is None:
            of_size(plan.rows, plan.cols)()
            return
        # (Mosaic GPU has no `not` for a warp.)
        lacking = plan.lacks(row, column)
        pl.when(lacking <= 0)(of_size(plan.rows, plan.cols))
        pl.when(lacking > 0)(of_size(*plan.short))

    def load(number: Index, buffer: Index) -> None:
        if ready is not None:
            wait = ready

            def wait_for_it() -> None:
                marks.now(Work.AWAIT_TILE, number=number - begin)
                wait(*at(number - begin))
                marks.now(Work.COPY, number=number - begin)

            pl.when(number < end)(wait_for_it)

        def start(shard: Tree, place: Part, chunk_smem: SmemRef) -> None:
            bounds = IN_BOUNDS if send is None else None
            plgpu.copy_gmem_to_smem(source(shard, *place), chunk_smem, loaded.at[buffer], oob_mode=bounds)

        pl.when(number < end)(lambda: in_its_size(number, buffer, start))

    def forward(shard: Tree, place: Part, chunk_smem: SmemRef) -> None:
        if send is not None:
            send(shard, *place, chunk_smem)
        else:
            tma_store(chunk_smem, destination(shard, *place))

    # The numbers of the chunks that are being loaded, from the oldest on, and the number that follows them.
    drawn = [number]
    for buffer in range(buffers):
        load(drawn[buffer], buffer)
        drawn.append(draw(counter, end, drawn[buffer]))

    def carry(state: Tree) -> Tree:
        buffer, count, (oldest, *others, following) = state
        marks.now(Work.COPY, number=oldest - begin)
        plgpu.barrier_wait(loaded.at[buffer])
        in_its_size(oldest, buffer, forward)
        # The store is under way meanwhile.
        after = draw(counter, end, following)
        if send is None:
            # Landed, not only read, because `landed` raises a flag for the destination. The chunk buffer is free as
            # well.
            wait_stores_landed()
            landed(*at(oldest - begin))
        else:
            wait_stores_read()
        load(following, buffer)
        return remainder(buffer + 1, buffers), count + 1, (*others, following, after)

    start = (jnp.int32(0), jnp.int32(0), tuple(drawn))
    carried = loop_while(lambda state: state[2][0] < end, carry, start)[1]
    if send is not None:
        wait_stores_landed()
    return carried
