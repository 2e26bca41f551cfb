"""The kernel of products that are summed over devices and cut into blocks, one for each device.

`matmul_reduce_scatter` leaves each block of the sum on its device. `matmul_all_reduce` sends it to all other devices as
well (the result is *replicated*), so that each device has all blocks. The schedule is in `blocks_schedule.py`.

    producer       for each tile that it draws, the peers' blocks first, the own block last: loads the operands; for an
                   own tile also loads the terms, once the flags of all of them are raised
    compute        a peer's tile: this device's part, scaled → boxes in local memory
                   an own tile: its part, scaled, + (term 0 + term 1 + …) + bias, activation → the result
    forwarder      when a peer's tile, or an own tile to be replicated, has landed in local memory: raises its flag
    communicator   looks for the peers
                   for each chunk that it draws, in the order of the tiles:
                       waits for the flag of the chunk's tile
                       own boxes → shared memory → the peer's boxes
                       after the last chunk of a tile, raises the peer's flag
                   for each strip of own tiles that it draws, from a second counter, if the result is replicated:
                       waits for the flag of the strip's tile
                       result → shared memory → the result on each peer
                   takes leave of the peers

With the transport "ring" a peer's tile has a term as well, from step 1 on: the sum that the device after this one has
computed for the same tile. So a device sends the sum of all parts so far, and only to the device before it. The owner
adds the last of these sums to its own part.

The compute warpgroups do not store tiles across NVLink: all CTAs finish their tiles at about the same time, so their
stores would hold each other up on the link. Sums are computed in f32, in an order that does not depend on which part
came first. The parts that travel have the result's dtype.

Why this is correct (`overlap/primitives` has the rest of the argument):
- A tile's boxes have landed before its flag is raised (at GPU scope), and the communicator waits for that flag before
  it loads them.
- Each chunk has landed at the peer before it is counted, by an addition that releases and acquires at GPU scope. The
  communicator that counts the last chunk of a tile raises the peer's flag with a release at system scope. That release
  makes the chunks of all communicators visible. The peer's producer acquires the flag, and a proxy fence stands between
  that and its loads.
- No CTA waits for a CTA that may not have started, since tiles and chunks are drawn. A peer's tile waits for nothing. A
  chunk waits for a tile that a running CTA draws before any own tile. An own tile waits for parts that running CTAs of
  the peers compute and send before their own tiles.
- With "ring" a tile waits for the same tile of the step before, on the device after this one. That tile has a lower
  number. So of the tiles that are not finished everywhere, the one with the lowest number waits for nothing unfinished.
- The forwarder is told that a tile is stored within the k steps of the CTA's next tile, before that tile waits for its
  terms. A chunk is sent before its communicator waits for another tile.
- Tiles of this device wait for all parts that peers write here. So no part lands in memory that XLA has given to
  something else. The second handshake does the same for results that peers write here, and for the words of the
  handshakes: a device says that it is done only when everything that it has sent has landed.
- A communicator begins to send strips when no chunk of a part is left to be drawn and the chunks that it has drawn have
  landed. So strips, which wait for own tiles, never hold up parts, for which the peers' own tiles wait.

Shape legend: D: number of devices; m, k, n: sizes of one device's product; block: [m / D, n] or [m, n / D].
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from overlap.collectives import communicator
from overlap.collectives.communicator import Chunks, Communicator
from overlap.collectives.reduce.blocks_operands import (
    addends_in_blocks,
    in_blocks,
    k_steps,
    shape_in_blocks,
)
from overlap.collectives.reduce.blocks_schedule import ReduceScatterSchedule, Strips
from overlap.collectives.reduce.passenger import Passenger
from overlap.collectives.reduce.refs import Inputs, Outputs, SumBody
from overlap.frame.operands import Operands
from overlap.frame.operation import LaunchPlan
from overlap.kernels import epilogue
from overlap.kernels.architectures import mainloop_of
from overlap.kernels.grid import cta
from overlap.kernels.hooks import Boxes, ByKStep, Epilogue, Exchange, Hooks, Tile, of_pairs
from overlap.kernels.landing import landing_place, lands_in_an_operand
from overlap.kernels.mainloop import OperandTypes
from overlap.kernels.operations import Dimension
from overlap.kernels.product_kernel import ProductKernel, Refs
from overlap.kernels.stream_k import StreamK
from overlap.primitives import Handshake, PeerGroup, semaphore_signal, semaphore_signal_peer, stalls, tma_store
from overlap.primitives.atomics import add
from overlap.primitives.types import GmemRef, Index, SemaphoreRef, SmemRef

# Indices into the kernel's flags: flags of tiles that are stored here, and of terms that have arrived here. Index 1 has
# the counters of the sent chunks of each tile.
_STORED, _ARRIVED = 0, 2


def launch(
    operands: Operands, plan: LaunchPlan, group: PeerGroup, along: Dimension
) -> tuple[jax.Array, jax.Array | None]:
    """Runs the kernel on checked operands.

    Args:
      operands: the operands; `lhs` is [(batch,) m, k].
      plan: the operation, the configuration and the layouts.
      group: the devices.
      along: the dimension along which the sum is scattered: "m" or "n".

    Returns:
      [batch, m / D, n] or [batch, m, n / D]; of an operation that replicates its result, [batch, m, n]. And the
      gathered passenger, [(batch,) D · rows, columns], or None.
    """
    config = plan.config
    m, n = plan.form.m, plan.form.n
    schedule, types, block = _schedule(operands, plan, group.size, along)
    strips = None
    batch = block[0]
    if plan.operation.spec.replicates:
        strips = schedule.strips(block, config.strip_rows(jnp.dtype(plan.out_dtype).itemsize), config)
    passenger_array: Any = operands.passenger
    passenger = Passenger.of(passenger_array, group.size, config)
    # The communicators carry chunks of at most one other kind: a passenger's, or strips of a replicated result.
    others = passenger.chunking if passenger else strips
    steps, block_tiles = schedule.flags_shape
    # With "ring" and several chunk buffers, a communicator could hold a loaded chunk while it waits for a tile that
    # itself waits for that chunk. So there is one chunk buffer.
    with_buffers = config.replace(chunk_buffers=1) if schedule.adds_before_sending else config
    kernel = ProductKernel(
        f"overlap_{plan.operation.name}_{along}",
        plan.target,
        config,
        types,
        work=StreamK.on(plan.target, config, schedule.tiles, sum(k_steps(plan))),
        # Flags of tiles that are stored here, counters of each tile's sent chunks, flags of terms that have arrived.
        # Own tiles are stored, too, in a step of their own.
        flags=(
            (steps + 1, block_tiles),
            schedule.flags_shape,
            *communicator.flag_shapes(schedule.flags_shape, copies_own=others is not None),
        ),
        smem=communicator.smem_types(with_buffers, schedule.chunking, plan.out_dtype, others=others),
        draws=True,
    )
    parts = jax.ShapeDtypeStruct(schedule.sent_shape, plan.out_dtype)
    result = jax.ShapeDtypeStruct(block if strips is None else shape_in_blocks((batch, m, n), schedule), plan.out_dtype)
    travelling = [passenger_array.reshape(passenger.shape)] if passenger else []
    inputs = Inputs(*in_blocks(operands, plan, schedule), addends_in_blocks(operands, plan, schedule), travelling)
    gathered = [jax.ShapeDtypeStruct(passenger.gathered_shape, passenger_array.dtype)] if passenger else []
    out_types = Outputs(result, parts, [parts], gathered)
    if lands_in_an_operand():
        count = len(jax.tree.leaves(inputs))
        landing = [landing_place(parts)]
        if strips is not None:
            landing.append(landing_place(result, becomes_result=True))
        aliased_results = () if strips is None else ((count + 1, 0),)
        inputs = dataclasses.replace(inputs, landing=landing)
        out_types = dataclasses.replace(out_types, landing=[])
        # The passenger is the last operand before the memory that peers write to.
        peers_read = tuple(range(count - len(travelling), count + len(landing)))
        kernel = dataclasses.replace(kernel, peers_read=peers_read, aliased_results=aliased_results)
    name = str(plan)
    steps_of_pairs = k_steps(plan)

    def body_of(refs: Refs[Inputs, Outputs]) -> _Body:
        return _Body(kernel, schedule, steps_of_pairs, group, plan, name, refs, group.me(), strips, passenger)

    results = kernel.launch(inputs, out_types, body_of)
    out = results.out.reshape(batch, *((m, n) if strips else block[1:]))
    if passenger is None:
        return out, None
    *batches, _, columns = passenger_array.shape
    return out, results.gathered[0].reshape(*batches, -1, columns)


def scratch_bytes(operands: Operands, plan: LaunchPlan, devices: int, along: Dimension) -> int:
    """Returns the bytes of scratch memory of one device, for the parts that it sends and the parts that it receives."""
    schedule, _, _ = _schedule(operands, plan, devices, along)
    return 2 * math.prod(schedule.sent_shape) * jnp.dtype(plan.out_dtype).itemsize


def _schedule(
    operands: Operands, plan: LaunchPlan, devices: int, along: Dimension
) -> tuple[ReduceScatterSchedule, OperandTypes, tuple[int, int, int]]:
    """Returns the schedule; what the mainloop must know of the operands; batch elements, rows and columns of a block.

    Arrays may be `jax.ShapeDtypeStruct`s.
    """
    batch, m, n = plan.form.batch, plan.form.m, plan.form.n
    block = (batch or 1, m // devices, n) if along == "m" else (batch or 1, m, n // devices)
    types = plan.types(operands, block[1], "broadcast" if plan.operation.spec.replicates else "push")
    boxes = mainloop_of(plan.target).box_shape(plan.config, types)
    itemsize = jnp.dtype(plan.out_dtype).itemsize
    schedule = ReduceScatterSchedule.of(devices, along, block, boxes, itemsize, plan.config)
    return dataclasses.replace(schedule, uses_ring=plan.operation.transport == "ring"), types, block


@dataclasses.dataclass(frozen=True)
class _Body(SumBody):
    """The kernel's body: its tiles, and what is done with each. See `SumBody`.

    Attributes:
      strips: how own tiles are cut to be sent to all peers; None: the result is not replicated.
      passenger: an array that is gathered beside the sum; None: there is none.
    """

    strips: Strips | None
    passenger: Passenger | None

    def tile_at(self, index: Index) -> Tile:
        step, batch, m, n = self.schedule.tile(index)
        return Tile(step, m, n, batch=batch)

    def hooks(self) -> Hooks:
        addends = self.refs.inputs.addends
        schedule = self.schedule
        out_gmem, parts_gmem = self.refs.outputs.out, self.refs.outputs.parts
        return Hooks(
            load_lhs=lambda tile, load: load(self._lhs_of(tile)),
            rhs_at=self._rhs_of,
            out_at=lambda tile: self._own_block(out_gmem, tile.batch),
            communicate=self._communicate,
            addend_at=(lambda tile: self._own_block(addends[0], tile.batch)) if addends else None,
            epilogue_at=lambda tile: self._epilogue_at(tile, whole=True),
            exchange=Exchange(
                terms=self.schedule.terms,
                is_own=lambda tile: tile.step == schedule.last_step,
                part_at=lambda tile: self._boxes(parts_gmem, tile.step, tile),
                term_at=lambda tile, term: self._boxes(self._landing[0], schedule.step_of_term(tile.step, term), tile),
                await_terms=self._await_terms,
                part_stored=lambda tile: semaphore_signal(self._flag(_STORED, tile.step, tile)),
                part_epilogue_at=(lambda tile: self._epilogue_at(tile, whole=False)) if self._has_scales else None,
                own_stored=None
                if self.strips is None
                else lambda tile: semaphore_signal(self._flag(_STORED, tile.step, tile)),
                part_has_terms=(lambda tile: schedule.has_terms(tile.step)) if schedule.adds_before_sending else None,
            ),
        )

    @property
    def _landing(self) -> tuple[GmemRef, GmemRef]:
        """The memory to which peers send their parts, and the memory to which they send results to be replicated."""
        landing = self.refs.inputs.landing
        outputs = self.refs.outputs
        return (landing[0], landing[-1]) if landing else (outputs.landing[0], outputs.out)

    def _own_block(self, ref: GmemRef, batch: Index) -> GmemRef:
        """Returns this device's block of a batch element of a result or addend."""
        batch = batch if ref.shape[0] > 1 else 0
        if self.strips is None:
            return ref.at[batch]
        return ref.at[batch, self.me] if self.schedule.along == "m" else ref.at[batch, :, self.me]

    def _block(self, tile: Tile, along: str) -> Index:
        """Returns the index of the tile's block in the dimension `along`: 0 if that dimension is not scattered."""
        return self.schedule.block(self.me, tile.step) if self.schedule.along == along else 0

    def _lhs_of(self, tile: Tile) -> GmemRef | ByKStep:
        lefts = self.refs.inputs.lefts
        block = self._block(tile, "m")
        batch = tile.batch if lefts[0].shape[0] > 1 else 0
        where = (batch, slice(None), block) if self.plan.layouts.transpose_lhs else (batch, block)
        return of_pairs([lhs.at[where] for lhs in lefts], self.steps)

    def _rhs_of(self, tile: Tile) -> GmemRef | ByKStep:
        block = self._block(tile, "n")
        where = (block,) if self.plan.layouts.transpose_rhs else (slice(None), block)
        return of_pairs([rhs.at[where] for rhs in self.refs.inputs.rights], self.steps)

    def _boxes(self, ref: GmemRef, step: Index, tile: Tile) -> Boxes:
        """Returns where the boxes of a tile of `step` lie in memory of shape `ReduceScatterSchedule.sent_shape`."""
        return Boxes(ref.at[step], self._index_of(tile) * self.schedule.boxes[0])

    def _flag(self, which: int, step: Index, tile: Tile) -> SemaphoreRef:
        return self.refs.flags[which].at[step, self._index_of(tile)]

    def _epilogue_at(self, tile: Tile, *, whole: bool) -> Epilogue:
        """Returns the epilogue of a part (its scales) or, if `whole`, of an own tile (also bias and activation)."""
        vectors = self.refs.inputs.vectors
        rows, columns = vectors.row_scale, vectors.column_scale
        if rows is not None:
            rows = rows.at[tile.batch if rows.shape[0] > 1 else 0, self._block(tile, "m")]
        if columns is not None:
            columns = columns.at[self._block(tile, "n")]
        bias = vectors.bias
        if bias is not None and len(bias.shape) > 1:
            bias = bias.at[self.me]
        scaled = dataclasses.replace(vectors, row_scale=rows, column_scale=columns, bias=bias)
        if not whole:
            return epilogue.epilogue(dataclasses.replace(scaled, bias=None), None, self.kernel.mainloop)
        return epilogue.epilogue(scaled, self.plan.program, self.kernel.mainloop)

    @property
    def _handshake(self) -> Handshake:
        return Handshake(self.refs.flags[3], self.group, cta(self.kernel.config), self.name)

    def _await_terms(self, tile: Tile) -> None:
        """Waits until all terms of a tile have arrived."""
        handshake = self._handshake
        schedule = self.schedule

        @pl.loop(0, schedule.terms)
        def _term(term: Index) -> None:
            step = schedule.step_of_term(tile.step, term)
            handshake.wait_for(stalls.TERMS, self._flag(_ARRIVED, step, tile), 1, schedule.sender(self.me, step))

    def _communicate(self) -> None:
        schedule = self.schedule
        group = self.group
        stored, sent, arrived, *handshake = self.refs.flags
        parts_gmem = self.refs.outputs.parts
        terms_gmem, _ = self._landing

        def receiver(step: Index) -> Index:
            return schedule.receiver(self.me, step)

        def landed(step: Index, row: Index, column: Index) -> None:
            del column
            index = schedule.tile_of_row(row)
            before = add(sent.at[step, index], 1)
            arrived_there = arrived.at[step, index]
            pl.when(before + 1 == schedule.tile_chunks)(
                lambda: semaphore_signal_peer(arrived_there, group, receiver(step))
            )

        def within(ref: GmemRef, step: Index, rows: pl.Slice, columns: pl.Slice) -> GmemRef:
            box, first = schedule.box_of_row(rows.start)
            return ref.at[step, box, pl.ds(first, rows.size), columns]

        chunks = Chunks(
            schedule.sent_chunks,
            schedule.chunking,
            schedule.chunk,
            source=lambda step, *where: within(parts_gmem, step, *where),
            destination=lambda step, *where: within(group.remote_ref(terms_gmem, receiver(step)), step, *where),
            ready=lambda step, row, _: communicator.wait_for_block(stored.at[step, schedule.tile_of_row(row)], 1),
            landed=landed,
        )
        buffers_smem, loaded = self.refs.smem
        others = None
        if self.strips is not None:
            buffers_smem, others_smem = buffers_smem
            others = self._results(self.strips), others_smem
        elif self.passenger is not None:
            buffers_smem, others_smem = buffers_smem
            others = self._passengers(self.passenger), others_smem
        Communicator(
            self.name,
            group,
            self.kernel.config,
            tuple(handshake),
            (buffers_smem, loaded),
            chunks,
            others=others,
            others_first=self.passenger is not None,
            only=schedule.last_step if schedule.uses_ring else None,
        ).run()

    def _passengers(self, passenger: Passenger) -> Chunks:
        (own_gmem,), (gathered_gmem,) = self.refs.inputs.passenger, self.refs.outputs.gathered
        return passenger.chunks(self.group, self.me, own_gmem, gathered_gmem)

    def _results(self, strips: Strips) -> Chunks:
        """Returns the strips of own tiles as chunks. Each strip is sent to all peers."""
        stored = self.refs.flags[0]
        out_gmem = self.refs.outputs.out
        _, results_gmem = self._landing
        group = self.group
        last = self.schedule.last_step

        def send(of: tuple[Index, Index], rows: pl.Slice, columns: pl.Slice, strip_smem: SmemRef) -> None:
            # Send row by row. The peer's position is known only inside the kernel, so each copy must be one contiguous
            # range of memory (see `tma_store`), and a row of a tile is contiguous.
            count = strips.rows_at(rows.start)
            end = columns.start + strips.cols

            @pl.loop(1, group.size)
            def _to_peer(distance: Index) -> None:
                there = group.remote_ref(results_gmem, group.peer(distance))

                def send_rows(width: int) -> None:
                    @pl.loop(0, count)
                    def _row(row: Index) -> None:
                        place = rows.start + row, pl.ds(columns.start, width)
                        tma_store(strip_smem.at[row, pl.ds(0, width)], self._own_block(there, of[0]).at[place])

                if strips.last_cols == strips.cols:
                    send_rows(strips.cols)
                else:
                    pl.when(end > strips.block[1])(lambda: send_rows(strips.last_cols))
                    # Two conditions, since Mosaic GPU has no `not` for a warp.
                    pl.when(end <= strips.block[1])(lambda: send_rows(strips.cols))

        return Chunks(
            strips.count,
            strips,
            strips.strip,
            source=lambda of, *where: self._own_block(out_gmem, of[0]).at[where],
            destination=lambda *_: None,
            ready=lambda of, *_: communicator.wait_for_block(stored.at[last, of[1]], 1),
            send=send,
        )
