"""The kernel of products that are summed over devices: which tiles there are, and what becomes of each.

Each device has a block of the sum. `matmul_reduce_scatter` leaves it there; `matmul_all_reduce` sends it to all (it is
*spread*), so that each device has all blocks.

    producer       for each tile that it draws, the peers' blocks first, the own one last: loads the operands; of an own
                   tile also the terms, once the flags of all of them are raised
    compute        a peer's tile: its part, scaled → boxes in local memory
                   an own tile: its part, scaled, + (term 0 + term 1 + …) + bias, activation → the result
    forwarder      when a peer's tile, or an own one that is spread, has landed: raises its flag
    communicator   looks for the peers; for each chunk that it draws, in the order of the tiles: waits for the flag of
                   its tile; own boxes → shared memory → the peer's boxes; who has sent the last chunk of a tile raises
                   the peer's flag; then likewise, from a counter of its own, for each strip of own tiles that are
                   spread: result → shared memory → the result on each peer; takes leave of the peers

By *ring* a peer's tile has a term as well, from step 1 on: what the device behind has computed of it. So what is sent
is the sum of all parts so far, and only to the device before; the owner adds the last of these sums to its own part.

The stores of a tile do not cross NVLink: all CTAs finish their tiles at about the same time, and would wait for each
other there. Sums are in f32, in an order that does not depend on who was first; what travels has the result's dtype.

Why it is right, beside what `overlap/primitives` says: a tile's boxes have landed before its flag is raised (GPU
scope), which the communicator waits for before it loads them. Each chunk has landed at the peer before it is counted
(an addition that releases and acquires at GPU scope); whoever counts the last one raises the peer's flag with a release
at system scope, which passes on what all of them have seen. The peer's producer acquires that, and a proxy fence is
between it and the loads. Nobody waits for a CTA that may not have started: tiles and chunks are drawn; a peer's tile
waits for nothing, a chunk for a tile that a running CTA draws before any own tile, and an own tile for what running
CTAs of the peers do before theirs. By ring a tile waits for the same tile of the step before on the device behind,
whose number is lower: of the tiles that are not finished everywhere, the one with the lowest number waits for nothing
unfinished. That a tile is stored is told within the k steps of the CTA's next one, before that waits; and a chunk is
sent before the communicator waits for another tile.

All parts that peers write here are what tiles wait for, so none of them lands in memory that XLA has given to others;
the handshake at the end guards the beacon. It also guards the results that peers write here: a device says that it is
done when all that it has sent has landed. A communicator comes to the strips when no chunk of a part is left to be
drawn and its own have landed. So strips, which wait for own tiles, never hold up parts, for which the peers' own tiles
wait.

Shape legend: D: devices; m, k, n: sizes of one device's product; block: [m / D, n] or [m, n / D].
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from overlap.collectives import communicator
from overlap.collectives.communicator import Chunks, Communicator
from overlap.collectives.scatter_schedule import ReduceScatterSchedule, Strips
from overlap.frame.operands import LaunchPlan, Operands, sizes
from overlap.kernels import epilogue
from overlap.kernels.architectures import mainloop_of
from overlap.kernels.grid import cta
from overlap.kernels.hooks import Boxes, Epilogue, Exchange, Hooks, Tile
from overlap.kernels.launch import sealed
from overlap.kernels.mainloop import OperandTypes
from overlap.kernels.product_kernel import ProductKernel, Refs
from overlap.kernels.stream_k import StreamK
from overlap.primitives import (
    Handshake,
    PeerGroup,
    addresses,
    board,
    semaphore_signal,
    semaphore_signal_peer,
    tma_store,
)
from overlap.primitives.atomics import add
from overlap.primitives.clique import IN_CLIQUES
from overlap.primitives.integers import ceil_div


def launch(operands: Operands, plan: LaunchPlan, group: PeerGroup, along: Any) -> jax.Array:
    """Runs the kernel on checked operands: [batch, m / D, n] or [batch, m, n / D] for lhs [(batch,) m, k].

    Of an operation that spreads its results, [batch, m, n].
    """
    config, (_, m, (n,), k) = plan.config, sizes(operands, plan.layouts)
    assert config is not None
    schedule, types, block = _schedule(operands, plan, group.size, along)
    strips, batch = None, block[0]
    if plan.operation.replicates:
        strips = schedule.strips(block, config.strip_rows(jnp.dtype(plan.out_dtype).itemsize), config)
    steps, places = schedule.flags_shape
    # By ring a communicator must not hold a chunk while it waits for a tile, which may wait for that chunk.
    with_buffers = config.replace(chunk_buffers=1) if schedule.adds_before_sending else config
    kernel = ProductKernel(
        f"overlap_{plan.operation.name}_{along}",
        plan.target,
        config,
        types,
        StreamK.on(plan.target, config, schedule.tiles, ceil_div(k, config.tile_k)),
        # Tiles stored here, chunks sent of each, and terms that have come.
        (
            (steps + 1, places),
            schedule.flags_shape,
            *communicator.flag_shapes(schedule.flags_shape, copies_own=strips is not None),
        ),
        communicator.smem_types(with_buffers, schedule.chunking, plan.out_dtype, results=strips),
        draws=True,
        transport="push" if strips is None else "broadcast",
    )
    parts = jax.ShapeDtypeStruct(schedule.sent_shape, plan.out_dtype)
    result = jax.ShapeDtypeStruct(block if strips is None else _in_blocks((batch, m, n), schedule), plan.out_dtype)
    inputs: Any = (*_blocks(operands, plan, schedule), _addends(operands, plan, schedule), [])
    out_types = result, parts, parts
    if lands_in_an_operand():
        out_types, count = out_types[:2], len(jax.tree.leaves(inputs))
        places = [landing_place(parts)]
        if strips is not None:
            places.append(landing_place(result, becomes_result=True))
        aliased_results = () if strips is None else ((count + 1, 0),)
        inputs = *inputs[:-1], places
        peers_read = tuple(range(count, count + len(places)))
        kernel = dataclasses.replace(kernel, peers_read=peers_read, aliased_results=aliased_results)
    body_of = lambda refs: _Body(kernel, schedule, strips, group, plan, refs, group.me())  # noqa: E731
    return kernel.launch(inputs, out_types, body_of)[0].reshape(batch, *((m, n) if strips else block[1:]))


def landing_place(memory: jax.ShapeDtypeStruct, **kind: bool) -> jax.Array:
    """`addresses.landing_place`, as one operation of jax."""
    make = functools.partial(addresses.landing_place, memory.shape, memory.dtype, **kind)
    return sealed(make, "overlap_landing_place", mends=(IN_CLIQUES,))()


def _in_blocks(shape: tuple[int, int, int], schedule: ReduceScatterSchedule) -> tuple[int, int, int, int]:
    """Of all blocks, [batch, m, n] with a dimension for them in front of the one that is cut."""
    batch, m, n = shape
    devices = schedule.devices
    return (batch, devices, m // devices, n) if schedule.along == "m" else (batch, m, devices, n // devices)


def scratch_bytes(operands: Operands, plan: LaunchPlan, devices: int, along: Any) -> int:
    """Memory of one device for the parts that it sends, and for those that it receives."""
    schedule, _, _ = _schedule(operands, plan, devices, along)
    return 2 * math.prod(schedule.sent_shape) * jnp.dtype(plan.out_dtype).itemsize


def _schedule(
    operands: Operands, plan: LaunchPlan, devices: int, along: Any
) -> tuple[ReduceScatterSchedule, OperandTypes, tuple[int, int, int]]:
    """The schedule, what the mainloop must know, and batch, rows and columns of a block; arrays may be types."""
    config: Any = plan.config
    batch, m, (n,), _ = sizes(operands, plan.layouts)
    block = (batch or 1, m // devices, n) if along == "m" else (batch or 1, m, n // devices)
    types = plan.types(operands, block[1], exchanges=True)
    boxes = mainloop_of(plan.target).box_shape(config, types)
    itemsize = jnp.dtype(plan.out_dtype).itemsize
    uses_ring = plan.operation.transport == "ring"
    return ReduceScatterSchedule.of(devices, along, block, boxes, itemsize, config, uses_ring=uses_ring), types, block


def lands_in_an_operand() -> bool:
    """Whether peers write to an operand instead of a result: where each GPU has a process of its own."""
    return jax.process_count() > 1


def _blocks(operands: Operands, plan: LaunchPlan, schedule: ReduceScatterSchedule) -> tuple[Any, Any, epilogue.Vectors]:
    """lhs, rhs and what the epilogue reads, what is scattered with a dimension of its own for the blocks.

    lhs is [batch, blocks, m, k] or [batch, k, blocks, m], rhs [k, blocks, n] or [blocks, n, k]; blocks is 1 in the
    dimension that is not scattered. So the last tiles of a block are clipped there.
    """
    config, layouts = plan.config, plan.layouts
    assert config is not None
    lhs, (rhs,) = operands.lhs, operands.rhs_list
    (m, k), (_, n) = layouts.m_k(lhs.shape), layouts.k_n(rhs.shape)
    by_m, by_n = (schedule.devices, 1) if schedule.along == "m" else (1, schedule.devices)
    lhs = lhs.reshape(-1, *((k, by_m, m // by_m) if layouts.transpose_lhs else (by_m, m // by_m, k)))
    rhs = rhs.reshape((by_n, n // by_n, k) if layouts.transpose_rhs else (k, by_n, n // by_n))
    rows, columns = operands.row_scale, operands.column_scales
    cut = plan.operation.replicates and schedule.along == "n"
    biases = None if cut else operands.biases
    vectors = plan.vectors(dataclasses.replace(operands, row_scale=None, column_scales=None, biases=biases))
    if cut and operands.biases is not None:
        vectors = dataclasses.replace(vectors, bias=padded(operands.biases[0].reshape(by_n, n // by_n), config.tile_n))
    if rows is not None:
        rows = padded(rows.reshape(-1, by_m, m // by_m), config.tile_m)
    if columns is not None:
        columns = padded(columns[0].reshape(by_n, n // by_n), config.tile_n)
    return lhs, rhs, dataclasses.replace(vectors, row_scale=rows, column_scale=columns)


def _addends(operands: Operands, plan: LaunchPlan, schedule: ReduceScatterSchedule) -> list[jax.Array]:
    """The addend, if there is one: [batch or 1, m, n] of a block, or of all. It passes through the result's buffer."""
    given = [x.reshape(-1, *x.shape[-2:]).astype(plan.out_dtype) for x in operands.addends or ()]
    return [x.reshape(_in_blocks(x.shape, schedule)) for x in given] if plan.operation.replicates else given


def padded(scales: jax.Array, unit: int) -> jax.Array:
    """Vectors filled up to a multiple of `unit` entries."""
    return jnp.pad(scales, ((0, 0),) * (scales.ndim - 1) + ((0, -scales.shape[-1] % unit),))


@dataclasses.dataclass(frozen=True)
class _Body:
    """The kernel's body: its tiles, and what becomes of them.

    Attributes:
      kernel: what is static about it.
      schedule: the tiles, chunks and flags.
      strips: how own tiles are cut for the peers; None: they stay here.
      ring: the devices.
      plan: the call.
      refs: the kernel's references.
      me: this device's position on the ring.
    """

    kernel: ProductKernel
    schedule: ReduceScatterSchedule
    strips: Strips | None
    group: PeerGroup
    plan: LaunchPlan
    refs: Refs
    me: Any

    def tile_at(self, index: Any) -> Tile:
        step, element, m, n = self.schedule.tile(index)
        return Tile(step, m, n, batch=element)

    def hooks(self) -> Hooks:
        _, _, vectors, addends, _ = self.refs.inputs
        has_scales = vectors.row_scale is not None or vectors.column_scale is not None
        out_gmem, parts_gmem, *_ = self.refs.outputs
        schedule = self.schedule
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
                part_stored=lambda tile: semaphore_signal(self._flag(0, tile.step, tile)),
                part_epilogue_at=(lambda tile: self._epilogue_at(tile, whole=False)) if has_scales else None,
                own_stored=None
                if self.strips is None
                else lambda tile: semaphore_signal(self._flag(0, tile.step, tile)),
                part_has_terms=(lambda tile: schedule.has_terms(tile.step)) if schedule.adds_before_sending else None,
            ),
        )

    @property
    def _landing(self) -> tuple[Any, Any]:
        """Where the peers' parts arrive, and their results (if they are spread)."""
        (*_, landing), (out_gmem, _, *parts) = self.refs.inputs, self.refs.outputs
        return (landing[0], landing[-1]) if landing else (*parts, out_gmem)

    def _own_block(self, ref: Any, element: Any) -> Any:
        """Of a result or addend, this device's block of a batch element."""
        element = element if ref.shape[0] > 1 else 0
        if self.strips is None:
            return ref.at[element]
        return ref.at[element, self.me] if self.schedule.along == "m" else ref.at[element, :, self.me]

    def _block(self, tile: Tile, along: str) -> Any:
        return self.schedule.block(self.me, tile.step) if self.schedule.along == along else 0

    def _lhs_of(self, tile: Tile) -> Any:
        lhs_gmem, *_ = self.refs.inputs
        block = self._block(tile, "m")
        element = tile.batch if lhs_gmem.shape[0] > 1 else 0
        return lhs_gmem.at[element, :, block] if self.plan.layouts.transpose_lhs else lhs_gmem.at[element, block]

    def _rhs_of(self, tile: Tile) -> Any:
        _, rhs_gmem, *_ = self.refs.inputs
        block = self._block(tile, "n")
        return rhs_gmem.at[block] if self.plan.layouts.transpose_rhs else rhs_gmem.at[:, block]

    def _place(self, tile: Tile) -> Any:
        return self.schedule.index_in_block(tile.batch, tile.m, tile.n)

    def _boxes(self, ref: Any, step: Any, tile: Tile) -> Boxes:
        # (Of an own tile there is no part to be stored, but the code for one is.)
        step = jnp.minimum(step, self.schedule.last_step - 1)
        return Boxes(ref.at[step], self._place(tile) * self.schedule.boxes[0])

    def _flag(self, which: int, step: Any, tile: Tile) -> Any:
        return self.refs.flags[which].at[step, self._place(tile)]

    def _epilogue_at(self, tile: Tile, *, whole: bool) -> Epilogue:
        """The scales of each part; of a whole tile what follows as well."""
        _, _, vectors, *_ = self.refs.inputs
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
        return Handshake(
            self.refs.flags[3], self.group, cta(self.kernel.config), self.plan.operation.name, self.schedule.sent_chunks
        )

    def _await_terms(self, tile: Tile) -> None:
        handshake, schedule = self._handshake, self.schedule

        @pl.loop(0, schedule.terms)
        def _term(term: Any) -> None:
            step = schedule.step_of_term(tile.step, term)
            handshake.wait_for(board.TERMS, self._flag(2, step, tile), 1, schedule.sender(self.me, step))

    def _communicate(self) -> None:
        schedule, group, (stored, sent, arrived, *handshake) = self.schedule, self.group, self.refs.flags
        (_, parts_gmem, *_), (terms_gmem, _) = self.refs.outputs, self._landing

        def receiver(step: Any) -> Any:
            return schedule.receiver(self.me, step)

        def landed(step: Any, row: Any, column: Any) -> None:
            del column
            place = schedule.tile_of_row(row)
            before = add(sent.at[step, place], 1)
            arrived_there = arrived.at[step, place]
            pl.when(before + 1 == schedule.tile_chunks)(
                lambda: semaphore_signal_peer(arrived_there, group, receiver(step))
            )

        def within(ref: Any, step: Any, rows: Any, columns: Any) -> Any:
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
        results = None
        if self.strips is not None:
            buffers_smem, strip_buffers_smem = buffers_smem
            results = self._results(self.strips), strip_buffers_smem
        Communicator(
            self.plan.operation.name,
            group,
            self.kernel.config,
            tuple(handshake),
            (buffers_smem, loaded),
            chunks,
            results=results,
            only=schedule.last_step if schedule.uses_ring else None,
        ).run()

    def _results(self, strips: Strips) -> Chunks:
        """The strips of own tiles, each to all peers."""
        stored, (out_gmem, *_), (_, results_gmem) = self.refs.flags[0], self.refs.outputs, self._landing
        group, last = self.group, self.schedule.last_step

        def send(of: Any, rows: Any, columns: Any, strip_smem: Any) -> None:
            # A row of a tile is one piece of memory, so that it can be sent to a peer chosen here.
            count, end = strips.rows_at(rows.start), columns.start + strips.cols

            @pl.loop(1, group.size)
            def _to_peer(distance: Any) -> None:
                there = group.remote_ref(results_gmem, group.peer(distance))

                def send_rows(width: int) -> None:
                    @pl.loop(0, count)
                    def _row(row: Any) -> None:
                        place = rows.start + row, pl.ds(columns.start, width)
                        tma_store(strip_smem.at[row, pl.ds(0, width)], self._own_block(there, of[0]).at[place])

                if strips.last_cols == strips.cols:
                    send_rows(strips.cols)
                else:
                    pl.when(end > strips.block[1])(lambda: send_rows(strips.last_cols))
                    # (Mosaic GPU has no `not` for a warp.)
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
