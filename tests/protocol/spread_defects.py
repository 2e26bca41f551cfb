"""Defects in how `matmul_all_reduce` sends each device's block of sums to all devices, each injected by a patch.

Defects of the other phases are in `scatter_defects.py` (sums in blocks) and `one_shot_defects.py` (few rows).
"""

import dataclasses
import types

import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from overlap.collectives import communicator
from overlap.collectives.communicator import Communicator
from overlap.collectives.reduce import blocks_kernel
from overlap.collectives.reduce.blocks_schedule import ReduceScatterSchedule, Strips
from overlap.primitives import Handshake, PeerGroup, copies
from tests.protocol.handshake_cases import change_own_chunks, change_transfers

NOTHING = lambda *_, **__: None  # noqa: E731


# --- How they are injected --------------------------------------------------------------------------------------------


def while_called(function, inject):
    """Wraps the function, so that `inject(patch)` is active while it is traced."""

    def changed(*args, **kwargs):
        with pytest.MonkeyPatch.context() as inside:
            inject(inside)
            return function(*args, **kwargs)

    return changed


def within(patch, owner, name, inject):
    """Makes `inject(patch)` active while the function `name` of a class or module is traced."""
    patch.setattr(owner, name, while_called(getattr(owner, name), inject))


def with_words(patch, module, name, **words):
    """Replaces attributes of the object that `module` has imported as `name`."""
    patch.setattr(module, name, types.SimpleNamespace(**{**vars(getattr(module, name)), **words}))


def change_fields(patch, module, name, if_so=lambda made: True, **changes):
    """Replaces each of these fields by `change(field)`, in the instances that `module` makes of its class `name`."""
    make = getattr(module, name)

    def changed(*args, **kwargs):
        made = make(*args, **kwargs)
        fields = {field: change(getattr(made, field)) for field, change in changes.items()} if if_so(made) else {}
        return dataclasses.replace(made, **fields)

    patch.setattr(module, name, changed)


def leave_out_a_peer(patch, module):
    """Shortens the loops over the peers in `module`, which run from 1 to the number of devices."""
    with_words(patch, module, "pl", loop=lambda first, end: pl.loop(first, end - 1 if first == 1 else end))


def change_strips(patch, **changes):
    """Replaces each of these fields by `change(field)`, in the `Chunks` that describe strips."""
    change_fields(patch, blocks_kernel, "Chunks", lambda made: made.send is not None, **changes)


def while_copying(of, patch, name, word):
    """Replaces `copies.name` while chunks are copied; `of` selects result strips (own chunks) or parts (transfers)."""
    inject = lambda inside: inside.setattr(copies, name, word)  # noqa: E731
    of(patch, lambda copy_chunks, *args, **kwargs: while_called(copy_chunks, inject)(*args, **kwargs))


# --- When strips are sent ---------------------------------------------------------------------------------------------


def never_announce_own_tiles(patch):
    change_fields(patch, blocks_kernel, "Exchange", own_stored=lambda _: None)


def announce_another_own_tile(patch):
    another = lambda tile: dataclasses.replace(tile, n=1 - tile.n)  # noqa: E731
    change_fields(patch, blocks_kernel, "Exchange", own_stored=lambda tell: lambda tile: tell(another(tile)))


def send_strips_without_waiting_for_the_tile(patch):
    change_strips(patch, ready=lambda _: None)


def wait_for_the_first_own_tile_only(patch):
    change_strips(patch, ready=lambda ready: lambda of, *where: ready((of[0], 0 * of[1]), *where))


def wait_for_a_peers_tile(patch):
    """Waits for the tile at the same place in the previous step."""
    last = vars(ReduceScatterSchedule)["last_step"].fget
    step_before = property(lambda self: last(self) - 1)
    within(patch, blocks_kernel._Body, "_results", lambda p: p.setattr(ReduceScatterSchedule, "last_step", step_before))


def wait_for_own_tiles_without_a_proxy_fence(patch):
    change_strips(
        patch, ready=lambda f: while_called(f, lambda p: p.setattr(communicator, "fence_async_proxy", NOTHING))
    )


def send_strips_before_parts(patch):
    """Sends strips before parts. This is a deadlock: strips wait for own tiles, and own tiles wait for peers' parts."""
    copy = Communicator._copy

    def strips_first(self, chunks, number, first, counter, buffers_smem=None):
        if buffers_smem is not None:
            return 0
        (strips, buffers), of_strips = self.others, self.flags[1].at[0]
        carried = copy(self, strips, communicator.draw(of_strips, strips.count), 0, of_strips, buffers)
        return carried + copy(self, chunks, number, first, counter)

    patch.setattr(Communicator, "_copy", strips_first)


# --- The memory that they pass through --------------------------------------------------------------------------------


def load_strips_while_parts_are_being_sent(patch):
    while_copying(change_transfers, patch, "wait_stores_landed", NOTHING)


def load_strips_into_slots_in_use(patch):
    while_copying(change_own_chunks, patch, "wait_stores_read", NOTHING)


def promise_that_strips_are_whole(patch):
    copy = plgpu.copy_gmem_to_smem
    promise = {"oob_mode": copies.IN_BOUNDS}
    with_words(patch, copies, "plgpu", copy_gmem_to_smem=lambda *args, **given: copy(*args, **given | promise))


# --- The end ----------------------------------------------------------------------------------------------------------


def leave_before_results_have_landed(patch):
    while_copying(change_own_chunks, patch, "wait_stores_landed", NOTHING)


def leave_when_results_are_only_read(patch):
    while_copying(change_own_chunks, patch, "wait_stores_landed", copies.wait_stores_read)


def strips_are_no_transfers(patch):
    """Does not count strips as transfers: the device says that it is done after its last part, though strips remain."""
    run, strips = Communicator.run, []
    patch.setattr(Communicator, "run", lambda self: (strips.append(self.others[0].count), run(self))[0])
    patch.setattr(communicator, "Handshake", lambda *args: Handshake(*args[:4], args[4] - strips[-1]))


# --- What is sent where -----------------------------------------------------------------------------------------------


def send_all_strips_to_one_peer(patch):
    peer = PeerGroup.peer
    to_the_next = lambda p: p.setattr(PeerGroup, "peer", lambda self, distance: peer(self, 1 + 0 * distance))  # noqa: E731
    change_strips(patch, send=lambda send: while_called(send, to_the_next))


def send_rows_of_whole_tiles(patch):
    """Sends whole tile rows even if the result has fewer columns: the rest lands in the next row or the next block."""
    patch.setattr(Strips, "last_cols", property(lambda self: self.cols))


def send_strips_to_the_receivers_block(patch):
    """Sends to the receiver's block instead of this device's block."""
    remote, own_block, places = PeerGroup.remote_ref, blocks_kernel._Body._own_block, {}

    def remember(self, ref, position):
        there = remote(self, ref, position)
        places[id(there)] = there, position
        return there

    def of_receiver(self, ref, element):
        _, owner = places.get(id(ref), (ref, self.me))
        return own_block(dataclasses.replace(self, me=owner), ref, element)

    patch.setattr(PeerGroup, "remote_ref", remember)
    patch.setattr(blocks_kernel._Body, "_own_block", of_receiver)


# --- What shows in the numbers alone ----------------------------------------------------------------------------------


def send_no_strips_to_the_last_peer(patch):
    leave_out_a_peer(patch, blocks_kernel)


def leave_the_last_strip(patch):
    count = vars(Strips)["count"].fget
    patch.setattr(Strips, "count", property(lambda self: count(self) - 1))


def send_a_row_too_few(patch):
    rows_at = Strips.rows_at
    patch.setattr(Strips, "rows_at", lambda self, row: rows_at(self, row) - 1)


def begin_strips_a_row_too_late(patch):
    def later(of, row, column):
        return of, row + 1, column

    change_strips(patch, at=lambda at: lambda index: later(*at(index)))


def add_the_bias_of_the_first_block(patch):
    epilogue_at = blocks_kernel._Body._epilogue_at

    def of_the_first(self, tile, *, whole):
        return epilogue_at(dataclasses.replace(self, me=0 * self.me) if whole else self, tile, whole=whole)

    patch.setattr(blocks_kernel._Body, "_epilogue_at", of_the_first)
