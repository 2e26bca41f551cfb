"""Defects of `matmul_all_reduce` for few rows, each injected by a patch. Further defects: `scatter_defects.py`."""

import dataclasses

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from overlap import primitives
from overlap.collectives.reduce import one_shot_kernel
from overlap.collectives.reduce.one_shot_kernel import _Body
from overlap.kernels.hooks import Boxes, Tile
from overlap.kernels.tma import exchange, finish, store
from overlap.primitives import Handshake, handshake
from overlap.primitives.integers import remainder
from tests.spread_defects import NOTHING, change_fields, leave_out_a_peer, with_words, within


def change_body(patch, name, change):
    """Replaces a method of the kernel's body by `change(method, self, *args)`."""
    method = getattr(_Body, name)
    patch.setattr(_Body, name, lambda self, *args, **kwargs: change(method, self, *args, **kwargs))


def beside(tile):
    """Returns another tile: the other tile of the same row."""
    return dataclasses.replace(tile, n=1 - tile.n)


# --- What is sent -----------------------------------------------------------------------------------------------------


def send_before_peers_have_begun(patch):
    patch.setattr(Handshake, "await_peers_by_warpgroup", NOTHING)


def send_when_all_but_one_have_begun(patch):
    wait = handshake.semaphore_wait
    patch.setattr(handshake, "semaphore_wait", lambda flag, count: wait(flag, count - 1))


def send_to_all_but_one(patch):
    change_fields(patch, one_shot_kernel, "DirectSends", peers=lambda peers: peers - 1)


def send_all_to_one_peer(patch):
    """Sends all parts to one peer, but raises the flags at the right peers."""
    change_fields(
        patch,
        one_shot_kernel,
        "DirectSends",
        to_peer=lambda to_peer: lambda tile, distance: to_peer(tile, 1 + 0 * distance),
    )


def send_to_the_place_of_the_receiver(patch):
    def there(_, self, tile, distance):
        peer = self.group.peer(distance)
        return Boxes(self.group.remote_ref(self._landing, peer).at[peer], self._first_box(tile))

    change_body(patch, "_at_peer", there)


def send_to_another_tiles_place(patch):
    change_body(patch, "_at_peer", lambda at_peer, self, tile, distance: at_peer(self, beside(tile), distance))


def send_both_halves_to_one_place(patch):
    send = exchange.send_boxes
    patch.setattr(exchange, "send_boxes", lambda *args: send(*args[:4], 0 * args[4]))


def overwrite_what_is_being_sent(patch):
    patch.setattr(store, "wait_stores_read", NOTHING)


def send_what_is_not_committed(patch):
    with_words(patch, store, "plgpu", commit_smem=NOTHING)


# --- Flags ------------------------------------------------------------------------------------------------------------


def raise_flags_of_all_but_one(patch):
    within(patch, _Body, "_announce", lambda inside: leave_out_a_peer(inside, one_shot_kernel))


def raise_the_flag_of_another_tile(patch):
    change_body(patch, "_announce", lambda announce, self, tile: announce(self, beside(tile)))


def raise_the_flag_of_the_receiver(patch):
    """Raises the flag at the receiver's index instead of the sender's index."""

    def announce_there(announce, self, tile):
        def signal(flag, group, position):
            del flag
            primitives.semaphore_signal_peer(self.refs.flags[0].at[position, self._index_of(tile)], group, position)

        patch.setattr(one_shot_kernel, "semaphore_signal_peer", signal)
        announce(self, tile)

    change_body(patch, "_announce", announce_there)


def signal_peers_at_the_scope_of_one_gpu(patch):
    def signal(flag, group, position):
        plgpu.semaphore_signal(flag, 1, device_id=group.device_id(position), memory_scope="gpu")

    patch.setattr(one_shot_kernel, "semaphore_signal_peer", signal)


def never_raise_the_own_flag(patch):
    patch.setattr(one_shot_kernel, "semaphore_signal", NOTHING)


def do_not_wait_for_terms(patch):
    patch.setattr(_Body, "_await_terms", NOTHING)


def do_not_wait_for_the_own_part(patch):
    patch.setattr(one_shot_kernel, "wait_for_block", NOTHING)


def wait_for_all_terms_but_one(patch):
    within(patch, _Body, "_await_terms", lambda inside: leave_out_a_peer(inside, one_shot_kernel))


def wait_for_another_tiles_terms(patch):
    change_body(patch, "_await_terms", lambda await_terms, self, tile: await_terms(self, beside(tile)))


def take_the_own_part_from_where_peers_send(patch):
    change_body(patch, "_term_at", lambda _, self, tile, n: Boxes(self._landing.at[n], self._first_box(tile)))


def leave_with_every_tile(patch):
    patch.setattr(Handshake, "leave", lambda self, completed: self._speak())


# --- What shows in the numbers alone ----------------------------------------------------------------------------------


def add_the_own_part_first(patch):
    """Adds the own part first. The order of adding then differs between devices, and so do the sums' last bits."""
    from_here = lambda self, position: remainder(self.me + position, self.group.size)  # noqa: E731
    change_body(patch, "_term_at", lambda term_at, self, tile, n: term_at(self, tile, from_here(self, n)))


def add_the_own_part_unrounded(patch):
    """Adds the own part first, without rounding, then the peers' parts in order."""

    @dataclasses.dataclass(frozen=True)
    class OfDevice(Tile):
        me: object = 0

    def with_device(tile_at, self, index):
        tile = tile_at(self, index)
        return OfDevice(tile.step, tile.m, tile.n, batch=tile.batch, me=self.me)

    def replace(made, **fields):
        return dataclasses.replace(made, **{name: x for name, x in fields.items() if name != "terms_replace_sums"})

    change_body(patch, "tile_at", with_device)
    with_words(patch, finish, "dataclasses", replace=replace)
    change_fields(
        patch, one_shot_kernel, "Exchange", terms=lambda terms: terms - 1,
        term_at=lambda term_at: lambda tile, n: term_at(tile, n + jnp.where(n < tile.me, 0, 1)),
    )  # fmt: skip


def add_the_first_term_for_all(patch):
    change_body(patch, "_term_at", lambda term_at, self, tile, n: term_at(self, tile, 0 * n))


def scale_the_sum_instead_of_parts(patch):
    def scaled_late(epilogue_at, self, tile, *, of_part):
        unscaled = lambda values, *_: values  # noqa: E731
        return unscaled if of_part else epilogue_at(self, tile, of_part=True)

    change_body(patch, "_epilogue_at", scaled_late)


def leave_the_last_tile(patch):
    tiles = vars(one_shot_kernel.ReduceScatterSchedule)["tiles"].fget
    patch.setattr(one_shot_kernel.ReduceScatterSchedule, "tiles", property(lambda self: tiles(self) - 1))
