"""Defects of the protocol of `matmul_reduce_scatter`, each injected by a patch: for `test_scatter_protocol.py`."""

import dataclasses
import types

import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from overlap import primitives
from overlap.collectives import communicator
from overlap.collectives.reduce import blocks_kernel
from overlap.collectives.reduce.blocks_schedule import ReduceScatterSchedule
from overlap.kernels.tma import drawn, exchange, staging
from overlap.primitives import PeerGroup, atomics, stalls, waits
from overlap.primitives.handshake import Handshake
from overlap.primitives.integers import remainder

NOTHING = lambda *_, **__: None  # noqa: E731
CHUNKS_OF_A_TILE = 4  # This number holds for `of_sums` with its default sizes.


# --- What a device computes for its peers -----------------------------------------------------------------------------


def within(patch, module, name, **words):
    """Replaces functions of `plgpu`, as `module` sees it, while its function `name` is traced."""
    function = getattr(module, name)

    def changed(*args, **kwargs):
        with pytest.MonkeyPatch.context() as inside:
            inside.setattr(module, "plgpu", types.SimpleNamespace(**{**vars(plgpu), **words}))
            return function(*args, **kwargs)

    patch.setattr(module, name, changed)


def change_chunks(patch, **changes):
    """Replaces each of these fields of `Chunks` by `change(field)`."""

    def chunks(*args, **kwargs):
        made = communicator.Chunks(*args, **kwargs)
        return dataclasses.replace(made, **{name: change(getattr(made, name)) for name, change in changes.items()})

    patch.setattr(blocks_kernel, "Chunks", chunks)


def change_flag(patch, which, change):
    """Makes the kernel use another flag: that of the step and tile that `change(step, tile)` returns."""
    flag = blocks_kernel._Body._flag

    def changed(self, number, step, tile):
        return flag(self, number, *(change(step, tile) if number == which else (step, tile)))

    patch.setattr(blocks_kernel._Body, "_flag", changed)


def tell_stored_at_once(patch):
    patch.setattr(exchange, "wait_stores_landed", NOTHING)


def tell_stored_when_only_read(patch):
    patch.setattr(exchange, "wait_stores_landed", primitives.wait_stores_read)


def never_tell_stored(patch):
    within(patch, exchange, "tell_stored", barrier_arrive=NOTHING)


def announce_without_waiting(patch):
    within(patch, exchange, "announce", barrier_wait=NOTHING)


def announce_another_tile(patch):
    change_flag(patch, 0, lambda step, tile: (step, dataclasses.replace(tile, n=1 - tile.n)))


def store_both_halves_in_one_place(patch):
    store = exchange.store_boxes
    patch.setattr(exchange, "store_boxes", lambda boxes, views, first: store(boxes, views, 0 * first))


def drop_the_communicators_proxy_fence(patch):
    patch.setattr(communicator, "fence_async_proxy", NOTHING)


def send_without_waiting_for_the_tile(patch):
    change_chunks(patch, ready=lambda ready: None)


def wait_for_the_first_tile_only(patch):
    change_chunks(patch, ready=lambda ready: lambda step, row, column: ready(step, 0 * row, column))


def wait_for_the_first_step_only(patch):
    change_chunks(patch, ready=lambda ready: lambda step, row, column: ready(0 * step, row, column))


# --- What is sent -----------------------------------------------------------------------------------------------------


def count_other_than(patch, more):
    """A CTA that has sent a chunk reads a wrong number of chunks sent before for the tile: `more` is added to it."""
    patch.setattr(blocks_kernel, "add", lambda word, amount: atomics.add(word, amount) + more)


def raise_the_peers_flag_at_the_first_chunk(patch):
    count_other_than(patch, CHUNKS_OF_A_TILE - 1)


def raise_the_peers_flag_a_chunk_too_early(patch):
    count_other_than(patch, 1)


def raise_the_peers_flag_a_chunk_too_late(patch):
    count_other_than(patch, -1)


def raise_the_peers_flag_by_every_chunk(patch):
    patch.setattr(blocks_kernel, "add", lambda word, amount: 0 * atomics.add(word, amount) + CHUNKS_OF_A_TILE - 1)


def count_chunks_without_acquiring(patch):
    def relaxed(context, *operands):
        emit = atomics.ptx
        with pytest.MonkeyPatch.context() as inside:
            inside.setattr(
                atomics, "ptx", lambda lines, *rest, **kwargs: emit(
                    [line.replace("atom.acq_rel", "atom.relaxed") for line in lines], *rest, **kwargs)
            )  # fmt: skip
            return atomics._add(context, *operands)

    patch.setattr(blocks_kernel, "add", lambda word, amount: atomics.inline(relaxed, [word], amount, returns=True))


def signal_peers_at_the_scope_of_one_gpu(patch):
    def signal(flag, group, position):
        plgpu.semaphore_signal(flag, 1, device_id=group.device_id(position), memory_scope="gpu")

    patch.setattr(blocks_kernel, "semaphore_signal_peer", signal)


def signal_another_peer(patch):
    patch.setattr(
        blocks_kernel,
        "semaphore_signal_peer",
        lambda flag, group, position: primitives.semaphore_signal_peer(
            flag, group, remainder(position + 1, group.size)
        ),
    )


def signal_nobody(patch):
    patch.setattr(blocks_kernel, "semaphore_signal_peer", NOTHING)


def send_to_another_peer(patch):
    """Sends the data to another peer, but raises the flags at the right peer."""
    remote = PeerGroup.remote_ref

    def to_another(self, ref, position):
        is_memory = len(ref.shape) > 1
        return remote(self, ref, remainder(position + 1, self.size) if is_memory else position)

    patch.setattr(PeerGroup, "remote_ref", to_another)


def send_to_another_slot(patch):
    change_chunks(patch, destination=lambda destination: lambda step, *where: destination(1 - step, *where))


def send_the_part_of_another_step(patch):
    """Sends the part for another peer's block. That part may be still being written, or not written yet."""
    change_chunks(patch, source=lambda source: lambda step, *where: source(1 - step, *where))


def send_a_chunk_twice(patch):
    chunk = ReduceScatterSchedule.chunk
    patch.setattr(ReduceScatterSchedule, "chunk", lambda self, index: chunk(self, index - remainder(index, 2)))


def leave_the_last_chunk(patch):
    sends = vars(ReduceScatterSchedule)["sent_chunks"].fget
    patch.setattr(ReduceScatterSchedule, "sent_chunks", property(lambda self: sends(self) - 1))


def send_before_peers_have_begun(patch):
    patch.setattr(Handshake, "await_peers", NOTHING)


# --- What comes -------------------------------------------------------------------------------------------------------


def do_not_wait_for_terms(patch):
    patch.setattr(blocks_kernel._Body, "_await_terms", NOTHING)


def wait_for_the_first_term_only(patch):
    change_flag(patch, 2, lambda step, tile: (0 * step, tile))


def wait_for_another_tiles_terms(patch):
    change_flag(patch, 2, lambda step, tile: (step, dataclasses.replace(tile, n=1 - tile.n)))


def wait_for_terms_as_for_this_device(patch):
    patch.setattr(
        Handshake, "wait_for", lambda self, role, word, expected, position: communicator.wait_for_block(word, expected)
    )


def wait_for_terms_with_fences(patch, *fences):
    look_until = waits.look_until

    def look(*args, role, **kwargs):
        look_until(*args, role=role, **kwargs | ({"fences": fences} if role == stalls.TERMS else {}))

    patch.setattr(waits, "look_until", look)


def drop_the_producers_proxy_fence(patch):
    wait_for_terms_with_fences(patch, "fence.acquire.sys;")


def acquire_terms_at_the_scope_of_one_gpu(patch):
    wait_for_terms_with_fences(patch, "fence.acquire.gpu;", "fence.proxy.async.global;")


def do_not_acquire_terms(patch):
    wait_for_terms_with_fences(patch, "fence.proxy.async.global;")


def load_terms_into_slots_in_use(patch):
    within(patch, exchange, "load_terms", barrier_wait=NOTHING)


def count_more_copies(patch, more):
    """Adds `more` to the number of arrivals expected by the barrier of a stage's copies."""
    types = staging.buffer_types

    def counted(*args):
        fields = types(*args)
        return fields | {"copies": fields["copies"] + more}

    patch.setattr(staging, "buffer_types", counted)


def count_an_arrival_too_few(patch):
    count_more_copies(patch, -1)


def count_an_arrival_too_many(patch):
    count_more_copies(patch, 1)


def read_terms_without_waiting(patch):
    within(patch, exchange, "sum_of_terms", barrier_wait=NOTHING)


def give_slots_of_terms_back_twice(patch):
    def arrive(barrier):
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_arrive(barrier)

    within(patch, exchange, "sum_of_terms", barrier_arrive=arrive)


def never_give_slots_of_terms_back(patch):
    within(patch, exchange, "sum_of_terms", barrier_arrive=NOTHING)


def count_a_step_of_terms_too_few_in_the_producer(patch):
    deal, steps = drawn.deal, exchange.term_stages

    def deal_fewer(*args):
        with pytest.MonkeyPatch.context() as inside:
            inside.setattr(exchange, "term_stages", lambda *args: jnp.maximum(steps(*args) - 1, 0))
            deal(*args)

    patch.setattr(drawn, "deal", deal_fewer)


def load_terms_of_another_tile(patch):
    boxes = blocks_kernel._Body._boxes

    def of_another(self, ref, step, tile):
        is_term = ref is self._landing[0]
        return boxes(self, ref, step, dataclasses.replace(tile, n=1 - tile.n) if is_term else tile)

    patch.setattr(blocks_kernel._Body, "_boxes", of_another)


# --- Tiles that are drawn ---------------------------------------------------------------------------------------------


def change_numbers(patch, change):
    """Replaces each tile number that is drawn by `change(number)`."""
    draw = drawn.draw
    patch.setattr(drawn, "draw", lambda *args: change(draw(*args)))


def draw_a_tile_twice(patch):
    """Draws the first tile again, instead of the second."""
    change_numbers(patch, lambda number: jnp.where(number == 1, 0, number))


def draw_each_tile_twice(patch):
    change_numbers(patch, lambda number: number // 2)


def leave_the_first_tile(patch):
    change_numbers(patch, lambda number: number + 1)


def compute_own_tiles_first(patch):
    tile = ReduceScatterSchedule.tile

    def backwards(self, index):
        step, *place = tile(self, index)
        return self.last_step - step, *place

    patch.setattr(ReduceScatterSchedule, "tile", backwards)


def read_mail_without_waiting(patch):
    within(patch, drawn, "for_each", barrier_wait=NOTHING)


def overwrite_mail(patch):
    within(patch, drawn, "deal", barrier_wait=NOTHING)


def post_mail_without_a_word(patch):
    within(patch, drawn, "deal", barrier_arrive=NOTHING)


def never_give_mail_back(patch):
    within(patch, drawn, "for_each", barrier_arrive=NOTHING)


def give_back_first(patch, *, announcer):
    """Gives the mail slot back before the tile is announced, or before it is computed. Other roles are unchanged."""
    for_each = drawn.for_each

    def too_early(loop, buffers, role, *more):
        if (role is exchange.announce) != announcer:
            return for_each(loop, buffers, role, *more)
        postponed = []

        def arrive_and_act(barrier):
            plgpu.barrier_arrive(barrier)
            role(*postponed.pop())

        with pytest.MonkeyPatch.context() as inside:
            words = {**vars(plgpu), "barrier_arrive": arrive_and_act}
            inside.setattr(drawn, "plgpu", types.SimpleNamespace(**words))
            return for_each(loop, buffers, lambda *args: postponed.append(args), *more)

    patch.setattr(drawn, "for_each", too_early)


def give_mail_back_before_the_tile_is_announced(patch):
    give_back_first(patch, announcer=True)


def give_mail_back_before_the_tile_is_computed(patch):
    give_back_first(patch, announcer=False)
