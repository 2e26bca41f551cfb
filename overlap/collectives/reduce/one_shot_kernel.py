"""The kernel of `matmul_all_reduce` for few rows: each device sends its part of every tile to all others, once.

    producer      for each tile that it draws: loads the operands; then loads the parts of all devices, once their flags
                  are raised
    compute       this device's part of the tile, scaled and rounded → shared memory → memory here and on all peers;
                  then, for the same tile, the sum of all parts + bias, activation → the result
    forwarder     when this device's part of a tile has landed everywhere: raises its flag, here and on all peers;
                  after the last tile, does the second handshake (`Handshake.leave`)
    communicator  does the first handshake: looks for the peers

With few rows, latency counts and not the number of bytes. So the compute warpgroups store to the peers' memory
directly, and each device computes the whole sum, instead of a block that it would have to send on. All devices add the
parts in the order of the devices' positions, and round every part in the same way, their own one as well. So all
devices get the same bits.

Why this is correct (`overlap/primitives` has the rest of the argument):
- A compute warpgroup sends only when all peers have begun.
- A part has landed everywhere before the forwarder is told. The forwarder then raises the peers' flags with releases at
  system scope. The peer's producer acquires the flag, and a proxy fence stands between that and its loads.
- No CTA waits for a CTA that may not have started. Of the tiles that are not finished on all devices, consider the
  first: on each device a running CTA has drawn it, or will draw it next, and none of these CTAs waits for anything
  before it has sent its part.
- This device's tiles wait for everything that peers write to its memory, but for the words of the handshakes. The
  second handshake ensures that these words are written before the device leaves.

Shape legend: D: number of devices; m, k, n: sizes of one device's product.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from overlap.collectives.communicator import wait_for_block
from overlap.collectives.reduce.blocks_operands import (
    k_steps,
    padded,
)
from overlap.collectives.reduce.blocks_schedule import ReduceScatterSchedule
from overlap.collectives.reduce.refs import Inputs, Outputs, SumBody
from overlap.frame.operands import Operands
from overlap.frame.operation import LaunchPlan
from overlap.kernels import epilogue
from overlap.kernels.architectures import mainloop_of
from overlap.kernels.grid import cta
from overlap.kernels.hooks import Boxes, DirectSends, Epilogue, Exchange, Hooks, OneOf, Tile, of_pairs
from overlap.kernels.landing import landing_place, lands_in_an_operand
from overlap.kernels.mainloop import OperandTypes
from overlap.kernels.product_kernel import ProductKernel
from overlap.kernels.stream_k import StreamK
from overlap.primitives import HANDSHAKE_FLAGS, Handshake, PeerGroup, semaphore_signal, semaphore_signal_peer, stalls
from overlap.primitives.types import GmemRef, Index


def launch(operands: Operands, plan: LaunchPlan, group: PeerGroup) -> jax.Array:
    """Runs the kernel on checked operands.

    Args:
      operands: the operands; `lhs` is [(batch,) m, k].
      plan: the configuration and the layouts.
      group: the devices.

    Returns:
      [batch, m, n], the same on all devices.
    """
    config = plan.config
    m, n = plan.form.m, plan.form.n
    steps = k_steps(plan)
    schedule, types, boxes = _schedule(operands, plan)
    kernel = ProductKernel(
        f"overlap_{plan.operation.name}_one_shot",
        plan.target,
        config,
        types,
        StreamK.on(plan.target, config, schedule.tiles, sum(steps)),
        # Flags of parts that have landed here, one for each device and tile; flags of the handshakes.
        ((group.size, schedule.tiles), HANDSHAKE_FLAGS),
        draws=True,
    )
    result, parts, landing = (
        jax.ShapeDtypeStruct(shape, plan.out_dtype)
        for shape in ((schedule.batch_size, m, n), boxes, (group.size, *boxes))
    )
    rows = operands.row_scale
    rows = None if rows is None else padded(rows.reshape(-1, m), config.tile_m)
    addends = [x.reshape(-1, m, n).astype(plan.out_dtype) for x in operands.addends or ()]
    lefts = [lhs.reshape(-1, *lhs.shape[-2:]) for lhs in operands.lefts]
    inputs = Inputs(lefts, list(operands.rights), plan.vectors(operands, rows), addends)
    out_types = Outputs(result, parts, [landing])
    if lands_in_an_operand():
        inputs = dataclasses.replace(inputs, landing=[landing_place(landing)])
        out_types = Outputs(result, parts, [])
        kernel = dataclasses.replace(kernel, peers_read=(len(jax.tree.leaves(inputs)) - 1,))
    name = str(plan)
    body_of = lambda refs: _Body(kernel, schedule, steps, group, plan, name, refs, group.me())  # noqa: E731
    return kernel.launch(inputs, out_types, body_of).out


def scratch_bytes(operands: Operands, plan: LaunchPlan, devices: int) -> int:
    """Returns the bytes of scratch memory of one device, for its own parts and for the parts that it receives."""
    return (devices + 1) * math.prod(_schedule(operands, plan)[2]) * jnp.dtype(plan.out_dtype).itemsize


def _schedule(operands: Operands, plan: LaunchPlan) -> tuple[ReduceScatterSchedule, OperandTypes, tuple[int, int]]:
    """Returns the schedule, what the mainloop must know of the operands, and the shape of all parts of one device.

    The shape is [boxes of all tiles, elements of a box]. Arrays may be `jax.ShapeDtypeStruct`s.
    """
    config = plan.config
    batch, m, n = plan.form.batch, plan.form.m, plan.form.n
    types = plan.types(operands, m, "one_shot")
    count, rows, columns = boxes = mainloop_of(plan.target).box_shape(config, types)
    itemsize = jnp.dtype(plan.out_dtype).itemsize
    # The schedule is that of a single device whose block is the whole result.
    schedule = ReduceScatterSchedule.of(1, "m", (batch or 1, m, n), boxes, itemsize, config)
    return schedule, types, (schedule.tiles * count, rows * columns)


@dataclasses.dataclass(frozen=True)
class _Body(SumBody):
    """The kernel's body: its tiles, and what is done with each. See `SumBody`."""

    def tile_at(self, index: Index) -> Tile:
        _, batch, m, n = self.schedule.tile(index)
        return Tile(0, m, n, batch=batch)

    def hooks(self) -> Hooks:
        inputs = self.refs.inputs
        lefts = inputs.lefts
        addends = inputs.addends
        out_gmem, parts_gmem = self.refs.outputs.out, self.refs.outputs.parts
        return Hooks(
            load_lhs=lambda tile, load: load(of_pairs([_of_batch(x, tile) for x in lefts], self.steps)),
            rhs_at=lambda tile: of_pairs(inputs.rights, self.steps),
            out_at=lambda tile: out_gmem.at[tile.batch],
            communicate=self._look_for_peers,
            addend_at=(lambda tile: _of_batch(addends[0], tile)) if addends else None,
            epilogue_at=lambda tile: self._epilogue_at(tile, of_part=False),
            exchange=Exchange(
                terms=self.group.size,
                is_own=lambda tile: True,
                part_at=lambda tile: Boxes(parts_gmem, self._first_box(tile)),
                term_at=self._term_at,
                await_terms=self._await_terms,
                part_stored=self._announce,
                part_epilogue_at=(lambda tile: self._epilogue_at(tile, of_part=True)) if self._has_scales else None,
                direct_sends=DirectSends(
                    peers=self.group.size - 1,
                    rows=self.schedule.boxes[1],
                    before=self._handshake.await_peers_by_warpgroup,
                    to_peer=self._at_peer,
                ),
            ),
        )

    @property
    def _handshake(self) -> Handshake:
        _, flags = self.refs.flags
        return Handshake(flags, self.group, cta(self.kernel.config), self.name, self.schedule.tiles)

    @property
    def _landing(self) -> GmemRef:
        """The memory to which the peers send their parts: [D, boxes, elements]."""
        return (*self.refs.inputs.landing, *self.refs.outputs.landing)[0]

    def _first_box(self, tile: Tile) -> Index:
        return self._index_of(tile) * self.schedule.boxes[0]

    def _at_peer(self, tile: Tile, distance: Index) -> Boxes:
        """Returns where this device's part of a tile lies in the memory of the peer `distance` positions ahead."""
        there = self.group.remote_ref(self._landing, self.group.peer(distance))
        return Boxes(there.at[self.me], self._first_box(tile))

    def _term_at(self, tile: Tile, position: Index) -> Boxes:
        """Returns where in this device's memory the part of a tile lies that the device at `position` has computed."""
        part = OneOf([self._landing.at[position], self.refs.outputs.parts], jnp.where(position == self.me, 1, 0))
        return Boxes(part, self._first_box(tile))

    def _epilogue_at(self, tile: Tile, *, of_part: bool) -> Epilogue:
        """Returns the epilogue of this device's part (its scales) or, unless `of_part`, that of the sum.

        The epilogue of the sum adds the bias and applies the activation.
        """
        vectors = self.refs.inputs.vectors
        if not of_part:
            rest = dataclasses.replace(vectors, row_scale=None, column_scale=None)
            return epilogue.epilogue(rest, self.plan.program, self.kernel.mainloop)
        rows = vectors.row_scale
        scales = dataclasses.replace(vectors, row_scale=None if rows is None else _of_batch(rows, tile), bias=None)
        return epilogue.epilogue(scales, None, self.kernel.mainloop)

    def _look_for_peers(self) -> None:
        # After it has looked for the peers, the communicator would draw numbers of chunks. Here there is nothing to
        # copy, so these numbers are not used.
        self._handshake.begin()

    def _announce(self, tile: Tile) -> None:
        """Raises the flag of this device's part of a tile on all devices: the part has landed there."""
        flag = self.refs.flags[0].at[self.me, self._index_of(tile)]
        group = self.group
        handshake = self._handshake
        pl.loop(1, group.size)(lambda distance: semaphore_signal_peer(flag, group, group.peer(distance)))
        semaphore_signal(flag)
        handshake.leave(1)

    def _await_terms(self, tile: Tile) -> None:
        """Waits until the parts of all devices have landed here."""
        flags = self.refs.flags[0]
        index = self._index_of(tile)
        handshake = self._handshake

        @pl.loop(1, self.group.size)
        def _peer(distance: Index) -> None:
            peer = self.group.peer(distance)
            handshake.wait_for(stalls.TERMS, flags.at[peer, index], 1, peer)

        wait_for_block(flags.at[self.me, index], 1)


def _of_batch(ref: GmemRef, tile: Tile) -> GmemRef:
    """Returns the tile's batch element of an operand; if the operand has a single one for all tiles, that one."""
    return ref.at[tile.batch if ref.shape[0] > 1 else 0]
