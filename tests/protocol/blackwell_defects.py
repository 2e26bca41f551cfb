"""Defects of the Blackwell mainloop, each injected by a patch: (defect, kernel that has it, words of the report).

A missing `_Terms._await_all_threads` is not among them. The emulator runs a warpgroup as one thread, so it cannot see
that defect.
"""

from __future__ import annotations

import dataclasses
import types

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from overlap.kernels.blackwell import mainloop as blackwell
from overlap.kernels.tma import exchange, finish, produce, staging, store
from overlap.primitives.integers import following

NOTHING = lambda *_, **__: None  # noqa: E731


def with_words(patch, module, **words):
    """Replaces functions of `plgpu` as seen by `module`."""
    patch.setattr(module, "plgpu", types.SimpleNamespace(**{**vars(plgpu), **words}))


def within(patch, name, **words):
    """Replaces functions of `plgpu` while a function of the mainloop, or a method of one of its classes, is traced."""
    owner, _, method = name.rpartition(".")
    holder = getattr(blackwell, owner) if owner else blackwell
    function = getattr(holder, method)

    def changed(*args, **kwargs):
        before = blackwell.plgpu
        blackwell.plgpu = types.SimpleNamespace(**{**vars(plgpu), **words})
        try:
            return function(*args, **kwargs)
        finally:
            blackwell.plgpu = before

    patch.setattr(holder, method, changed)


# --- The multiplier ---------------------------------------------------------------------------------------------------


def multiply_before_the_operands_are_here(patch):
    within(patch, "_issue_k_step", barrier_wait=NOTHING)


def overwrite_sums_that_are_being_read(patch):
    patch.setattr(blackwell, "_await_drained", NOTHING)


def add_to_what_was_there(patch):
    mma = plgpu.tcgen05_mma
    within(patch, "_issue_k_step", tcgen05_mma=lambda *args, accumulate, **rest: mma(*args, accumulate=True, **rest))


def give_stages_back_at_once(patch):
    def mma(acc, lhs, rhs, consumed, **rest):
        plgpu.tcgen05_mma(acc, lhs, rhs, **rest)
        plgpu.barrier_arrive(consumed)

    within(patch, "_issue_k_step", tcgen05_mma=mma)


def never_give_stages_back(patch):
    mma = plgpu.tcgen05_mma
    within(patch, "_issue_k_step", tcgen05_mma=lambda acc, lhs, rhs, _, **rest: mma(acc, lhs, rhs, **rest))


def give_stages_back_twice(patch):
    def mma(acc, lhs, rhs, consumed, **rest):
        plgpu.tcgen05_mma(acc, lhs, rhs, consumed, **rest)
        plgpu.tcgen05_commit_arrive(consumed)

    within(patch, "_issue_k_step", tcgen05_mma=mma)


def give_the_next_stage_back(patch):
    mma = plgpu.tcgen05_mma

    def issue(loop, buffers, piece, k, stage, pair):
        of_next = buffers.consumed.at[following(stage, loop.config.stages)]
        other = lambda acc, lhs, rhs, _, **rest: mma(acc, lhs, rhs, of_next, **rest)  # noqa: E731
        blackwell.plgpu = types.SimpleNamespace(**{**vars(plgpu), "tcgen05_mma": other})
        try:
            step(loop, buffers, piece, k, stage, pair)
        finally:
            blackwell.plgpu = plgpu

    step = blackwell._issue_k_step
    patch.setattr(blackwell, "_issue_k_step", issue)


def never_tell_that_sums_are_complete(patch):
    within(patch, "_multiply", tcgen05_commit_arrive=NOTHING)


def tell_it_before_the_last_product(patch):
    multiply = blackwell._multiply

    def early(loop, buffers, tile, piece):
        with_commit = plgpu.tcgen05_commit_arrive
        with_commit(buffers.accumulated.at[blackwell._turn(piece.ordinal)])
        blackwell.plgpu = types.SimpleNamespace(**{**vars(plgpu), "tcgen05_commit_arrive": NOTHING})
        try:
            multiply(loop, buffers, tile, piece)
        finally:
            blackwell.plgpu = plgpu

    patch.setattr(blackwell, "_multiply", early)


def change_pieces(patch, change):
    """Changes the piece that the multiplier sees; the other roles see the right one."""
    multiply = blackwell._multiply
    changed = lambda loop, buffers, tile, piece: multiply(loop, buffers, tile, change(piece))  # noqa: E731
    patch.setattr(blackwell, "_multiply", changed)


def leave_the_last_product_out(patch):
    change_pieces(patch, lambda piece: dataclasses.replace(piece, k_steps=piece.k_steps - 1))


def count_stages_anew_for_each_tile(patch):
    change_pieces(patch, lambda piece: dataclasses.replace(piece, before=0 * piece.before))


def one_accumulator_for_all_tiles(patch):
    def first(self, piece, columns):
        return self.accumulators.at[:, pl.ds(columns.start, columns.size)]

    patch.setattr(blackwell.Buffers, "accumulator", first)


def one_turn_for_all_tiles(patch):
    patch.setattr(blackwell, "_turn", lambda ordinal: 0 * ordinal)


# --- The epilogue -----------------------------------------------------------------------------------------------------


def read_sums_before_they_are_complete(patch):
    within(patch, "_store", barrier_wait=NOTHING)


def tell_drained_before_loads_are_back(patch):
    within(patch, "_tell_drained", wait_load_tmem=NOTHING)


def tell_drained_before_reading(patch):
    tell = blackwell._tell_drained

    def early(loop, buffers, tile, piece, sums):
        tell(buffers, piece.ordinal)
        finish.finish(loop, buffers, tile, piece, sums)

    patch.setattr(blackwell, "finish", early)
    patch.setattr(blackwell, "_tell_drained", NOTHING)


def never_tell_drained(patch):
    patch.setattr(blackwell, "_tell_drained", NOTHING)


def tell_that_the_other_one_is_drained(patch):
    tell = blackwell._tell_drained
    patch.setattr(blackwell, "_tell_drained", lambda buffers, ordinal: tell(buffers, ordinal + 1))


def a_barrier_that_does_not_order_tensor_memory(patch):
    patch.setattr(blackwell, "_drained", lambda config: plgpu.Barrier(num_arrivals=1, num_barriers=2))


def refill_a_buffer_that_is_being_stored(patch):
    patch.setattr(store, "wait_stores_read", NOTHING)


def store_what_is_not_committed(patch):
    with_words(patch, store, commit_smem=NOTHING)


# --- The producer -----------------------------------------------------------------------------------------------------


def refill_stages_in_use(patch):
    with_words(patch, produce, barrier_wait=NOTHING)


def expect_a_copy_more(patch):
    copies = staging.copies_per_k_step
    patch.setattr(staging, "copies_per_k_step", lambda *args: copies(*args) + 1)


def expect_a_copy_less(patch):
    copies = staging.copies_per_k_step
    patch.setattr(staging, "copies_per_k_step", lambda *args: copies(*args) - 1)


# --- Pairs ------------------------------------------------------------------------------------------------------------


def tell_one_cta_alone(patch):
    commit = plgpu.tcgen05_commit_arrive
    within(patch, "_multiply", tcgen05_commit_arrive=lambda barrier, collective_axis: commit(barrier))


def ask_the_own_epilogue_alone(patch):
    barrier = lambda config: plgpu.Barrier(num_arrivals=1, num_barriers=2, orders_tensor_core=True)  # noqa: E731
    patch.setattr(blackwell, "_drained", barrier)


MAINLOOP = [
    (multiply_before_the_operands_are_here, "one", "tcgen05"),
    (overwrite_sums_that_are_being_read, "one", "accumulators"),
    (add_to_what_was_there, "one", "accumulators"),
    (give_stages_back_at_once, "one", "TMA load, write"),
    (never_give_stages_back, "one", "deadlock"),
    (give_stages_back_twice, "one", ""),
    (give_the_next_stage_back, "one", ""),
    (never_tell_that_sums_are_complete, "one", "deadlock"),
    (tell_it_before_the_last_product, "one", ""),
    (leave_the_last_product_out, "one", ""),
    (count_stages_anew_for_each_tile, "one", ""),
    (one_accumulator_for_all_tiles, "one", "accumulators"),
    (one_turn_for_all_tiles, "one", ""),
    (read_sums_before_they_are_complete, "one", "accumulators"),
    (tell_drained_before_loads_are_back, "one", "accumulators"),
    (tell_drained_before_reading, "one", "accumulators"),
    (never_tell_drained, "one", "deadlock"),
    (tell_that_the_other_one_is_drained, "one", ""),
    (a_barrier_that_does_not_order_tensor_memory, "one", "orders_tensor_core"),
    (refill_a_buffer_that_is_being_stored, "one", "TMA store, read"),
    (store_what_is_not_committed, "one", "proxy"),
    (refill_stages_in_use, "one", "TMA load, write"),
    (expect_a_copy_more, "one", "deadlock"),
    (expect_a_copy_less, "one", ""),
    (give_stages_back_at_once, "pair", ""),
    (tell_drained_before_loads_are_back, "pair", "accumulators"),
    (tell_one_cta_alone, "pair", "tcgen05_commit"),
    (ask_the_own_epilogue_alone, "pair", "accumulators"),
    (expect_a_copy_more, "pair", "deadlock"),
]


# --- Parts of peers ---------------------------------------------------------------------------------------------------


def read_parts_before_they_are_here(patch):
    within(patch, "_Terms.__call__", barrier_wait=NOTHING)


def load_parts_too_early(patch):
    load = blackwell._Terms._load

    def both(self, step):
        load(self, step)
        pl.when(jnp.int32(step) + 1 < self.loads)(lambda: load(self, step + 1))

    patch.setattr(blackwell._Terms, "_load", both)


def load_parts_that_have_not_come(patch):
    def begin(self):
        for step in range(min(blackwell.TERM_BUFFERS, self.loads)):
            self._load(step)

    patch.setattr(blackwell._Terms, "begin", begin)


def begin_no_loads(patch):
    patch.setattr(blackwell._Terms, "begin", lambda self: self.exchange.await_terms(self.tile))


def one_barrier_for_all_stored_tiles(patch):
    plan = blackwell._plan
    patch.setattr(blackwell, "_plan", lambda *args: dataclasses.replace(plan(*args), stored_barriers=1))


def tell_of_tiles_that_have_not_landed(patch):
    patch.setattr(exchange, "wait_stores_landed", NOTHING)


def never_tell_of_stored_tiles(patch):
    patch.setattr(exchange, "tell_stored", NOTHING)


def wait_for_a_reader_more(patch):
    plan = blackwell._plan
    patch.setattr(blackwell, "_plan", lambda *args: dataclasses.replace(plan(*args), mail_readers=4))


def wait_for_a_reader_less(patch):
    plan = blackwell._plan
    patch.setattr(blackwell, "_plan", lambda *args: dataclasses.replace(plan(*args), mail_readers=2))


def tell_of_every_tile_at_the_first_barrier(patch):
    patch.setattr(exchange, "_stored", lambda buffers, ordinal: buffers.stored.at[0])


EXCHANGED = [
    (read_parts_before_they_are_here, "scatter m", ""),
    (load_parts_too_early, "scatter m", ""),
    (load_parts_that_have_not_come, "scatter m", ""),
    (load_parts_that_have_not_come, "ring m", ""),
    (begin_no_loads, "scatter m", "deadlock"),
    (one_barrier_for_all_stored_tiles, "scatter m", "missed phase"),
    (tell_of_tiles_that_have_not_landed, "scatter m", ""),
    (never_tell_of_stored_tiles, "scatter m", "deadlock"),
    (wait_for_a_reader_more, "scatter m", "deadlock"),
    (wait_for_a_reader_less, "scatter m", ""),
    (tell_of_every_tile_at_the_first_barrier, "scatter m", ""),
    (overwrite_sums_that_are_being_read, "scatter m", "accumulators"),
    (tell_drained_before_loads_are_back, "scatter n", "accumulators"),
    (overwrite_sums_that_are_being_read, "pull", "accumulators"),
    (give_stages_back_at_once, "ring", ""),
]
