"""The kernel of `matmul_all_reduce` for few rows: each device sends its part of every tile to all others, once.

    producer      for each tile that it draws: loads the operands; then the parts of all devices, once their flags are
                  raised
    compute       its part, scaled and rounded → shared memory → memory here and on all peers; then, of the same tile,
                  the sum of all parts + bias, activation → the result
    forwarder     when its part has landed everywhere: raises the flags of the tile, here and on all peers; whoever has
                  done so for the last tile takes leave of the peers
    communicator  looks for the peers

With few rows the time of a trip counts and not the bytes: so nothing lies between the tensor cores and the peers'
memory, and each device adds up the whole result instead of a block that it would have to send on. Parts are added in
the order of the devices, each rounded alike, the own one as well: so all devices have the same bits.

Why it is right, beside what `overlap/primitives` says: a compute warpgroup sends when all peers have begun. A part has
landed everywhere before the forwarder is told, which raises the peers' flags with releases at system scope. The peer's
producer acquires that, and a proxy fence is between it and the loads. Nobody waits for a CTA that may not have started:
of the tiles that are not finished on all devices, the first one has been drawn by a running CTA of each device or will
be drawn next, and none of these waits for anything before it has sent its part. All that peers write here is what own
tiles wait for; the handshake at the end guards the beacon and the words around it.

Shape legend: D: devices; m, k, n: sizes of one device's product.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from overlap.collectives import scattered
from overlap.collectives.communicator import wait_for_block
from overlap.collectives.scatter_schedule import ReduceScatterSchedule
from overlap.frame.operands import LaunchPlan, Operands, sizes
from overlap.kernels import epilogue
from overlap.kernels.architectures import mainloop_of
from overlap.kernels.grid import cta
from overlap.kernels.hooks import Boxes, DirectSends, Epilogue, Exchange, Hooks, OneOf, Tile
from overlap.kernels.mainloop import OperandTypes
from overlap.kernels.product_kernel import ProductKernel, Refs
from overlap.kernels.stream_k import StreamK
from overlap.primitives import HANDSHAKE_FLAGS, Handshake, PeerGroup, board, semaphore_signal, semaphore_signal_peer
from overlap.primitives.integers import ceil_div


def launch(operands: Operands, plan: LaunchPlan, group: PeerGroup) -> jax.Array:
    """Runs the kernel on checked operands: [batch, m, n] for lhs [(batch,) m, k]."""
    config: Any = plan.config
    (_, m, (n,), k), lhs = sizes(operands, plan.layouts), operands.lhs
    schedule, types, boxes = _schedule(operands, plan)
    kernel = ProductKernel(
        f"overlap_{plan.operation.name}_one_shot",
        plan.target,
        config,
        types,
        StreamK.on(plan.target, config, schedule.tiles, ceil_div(k, config.tile_k)),
        # Parts that have come, of each device.
        ((group.size, schedule.tiles), HANDSHAKE_FLAGS),
        draws=True,
        transport="one_shot",
    )
    result, parts, landing = (
        jax.ShapeDtypeStruct(shape, plan.out_dtype)
        for shape in ((schedule.batch_size, m, n), boxes, (group.size, *boxes))
    )
    rows = operands.row_scale
    rows = None if rows is None else scattered.padded(rows.reshape(-1, m), config.tile_m)
    addends = [x.reshape(-1, m, n).astype(plan.out_dtype) for x in operands.addends or ()]
    inputs: Any = lhs.reshape(-1, *lhs.shape[-2:]), operands.rhs_list[0], plan.vectors(operands, rows), addends, []
    out_types = result, parts, landing
    if scattered.lands_in_an_operand():
        inputs, out_types = (*inputs[:-1], [scattered.landing_place(landing)]), out_types[:2]
        kernel = dataclasses.replace(kernel, peers_read=(len(jax.tree.leaves(inputs)) - 1,))
    body_of = lambda refs: _Body(kernel, schedule, group, plan, refs, group.me())  # noqa: E731
    return kernel.launch(inputs, out_types, body_of)[0]


def scratch_bytes(operands: Operands, plan: LaunchPlan, devices: int) -> int:
    """Memory of one device for its parts, and for those that it receives."""
    return (devices + 1) * math.prod(_schedule(operands, plan)[2]) * jnp.dtype(plan.out_dtype).itemsize


def _schedule(operands: Operands, plan: LaunchPlan) -> tuple[ReduceScatterSchedule, OperandTypes, tuple[int, int]]:
    """The tiles, what the mainloop must know, and the boxes of all tiles with their elements; arrays may be types."""
    config: Any = plan.config
    batch, m, (n,), _ = sizes(operands, plan.layouts)
    types = plan.types(operands, m, exchanges=True, direct_sends=True)
    count, rows, columns = boxes = mainloop_of(plan.target).box_shape(config, types)
    itemsize = jnp.dtype(plan.out_dtype).itemsize
    # As if there were one device, whose block is everything.
    schedule = ReduceScatterSchedule.of(1, "m", (batch or 1, m, n), boxes, itemsize, config)
    return schedule, types, (schedule.tiles * count, rows * columns)


@dataclasses.dataclass(frozen=True)
class _Body:
    """The kernel's body: its tiles, and what becomes of them.

    Attributes:
      kernel: what is static about it.
      schedule: the tiles.
      ring: the devices.
      plan: the call.
      refs: the kernel's references.
      me: this device's position on the ring.
    """

    kernel: ProductKernel
    schedule: ReduceScatterSchedule
    group: PeerGroup
    plan: LaunchPlan
    refs: Refs
    me: Any

    def tile_at(self, index: Any) -> Tile:
        _, element, m, n = self.schedule.tile(index)
        return Tile(0, m, n, batch=element)

    def hooks(self) -> Hooks:
        lhs_gmem, rhs_gmem, vectors, addends, _ = self.refs.inputs
        out_gmem, parts_gmem, *_ = self.refs.outputs
        has_scales = vectors.row_scale is not None or vectors.column_scale is not None
        return Hooks(
            load_lhs=lambda tile, load: load(_of_element(lhs_gmem, tile)),
            rhs_at=lambda tile: rhs_gmem,
            out_at=lambda tile: out_gmem.at[tile.batch],
            communicate=self._look_for_peers,
            addend_at=(lambda tile: _of_element(addends[0], tile)) if addends else None,
            epilogue_at=lambda tile: self._epilogue_at(tile, of_part=False),
            exchange=Exchange(
                terms=self.group.size,
                is_own=lambda tile: True,
                part_at=lambda tile: Boxes(parts_gmem, self._first_box(tile)),
                term_at=self._term_at,
                await_terms=self._await_terms,
                part_stored=self._announce,
                part_epilogue_at=(lambda tile: self._epilogue_at(tile, of_part=True)) if has_scales else None,
                direct_sends=DirectSends(self.group.size - 1, self._handshake.await_peers_by_warpgroup, self._at_peer),
            ),
        )

    @property
    def _handshake(self) -> Handshake:
        name, (_, flags) = self.plan.operation.name, self.refs.flags
        return Handshake(flags, self.group, cta(self.kernel.config), name, self.schedule.tiles)

    @property
    def _landing(self) -> Any:
        """Where the peers' parts arrive: [D, boxes, elements]."""
        (*_, operand), (_, _, *result) = self.refs.inputs, self.refs.outputs
        return (*operand, *result)[0]

    def _place(self, tile: Tile) -> Any:
        return self.schedule.index_in_block(tile.batch, tile.m, tile.n)

    def _first_box(self, tile: Tile) -> Any:
        return self._place(tile) * self.schedule.boxes[0]

    def _at_peer(self, tile: Tile, distance: Any) -> Boxes:
        there = self.group.remote_ref(self._landing, self.group.peer(distance))
        return Boxes(there.at[self.me], self._first_box(tile))

    def _term_at(self, tile: Tile, position: Any) -> Boxes:
        _, parts_gmem, *_ = self.refs.outputs
        either = OneOf([self._landing.at[position], parts_gmem], jnp.where(position == self.me, 1, 0))
        return Boxes(either, self._first_box(tile))

    def _epilogue_at(self, tile: Tile, *, of_part: bool) -> Epilogue:
        _, _, vectors, *_ = self.refs.inputs
        if not of_part:
            rest = dataclasses.replace(vectors, row_scale=None, column_scale=None)
            return epilogue.epilogue(rest, self.plan.program, self.kernel.mainloop)
        rows = vectors.row_scale
        scales = dataclasses.replace(vectors, row_scale=None if rows is None else _of_element(rows, tile), bias=None)
        return epilogue.epilogue(scales, None, self.kernel.mainloop)

    def _look_for_peers(self) -> None:
        # It has nothing to carry, so what it has drawn beyond the looks does not matter.
        self._handshake.begin()

    def _announce(self, tile: Tile) -> None:
        flag, group, handshake = self.refs.flags[0].at[self.me, self._place(tile)], self.group, self._handshake
        pl.loop(1, group.size)(lambda distance: semaphore_signal_peer(flag, group, group.peer(distance)))
        semaphore_signal(flag)
        handshake.leave(1)

    def _await_terms(self, tile: Tile) -> None:
        flags, place, handshake = self.refs.flags[0], self._place(tile), self._handshake

        @pl.loop(1, self.group.size)
        def _peer(distance: Any) -> None:
            peer = self.group.peer(distance)
            handshake.wait_for(board.TERMS, flags.at[peer, place], 1, peer)

        wait_for_block(flags.at[self.me, place], 1)


def _of_element(ref: Any, tile: Tile) -> Any:
    return ref.at[tile.batch if ref.shape[0] > 1 else 0]
