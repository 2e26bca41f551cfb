"""Defects of the handshakes between devices, for the tests on the emulator and on GPUs.

A defect is a function of a `pytest.MonkeyPatch`. The defect is in all kernels that are traced while the patch is
active.
"""

from __future__ import annotations

import dataclasses
import re

from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mgpu_utils

from overlap.collectives import communicator
from overlap.primitives import atomics, copies, handshake, semaphores
from overlap.primitives.handshake import Handshake

# Each of these modules calls `draw` through its own name, so a patch must replace the name in all of them.
DRAWERS = (atomics, copies, communicator)


def change_text(patch, found, replacement):
    """Replaces `found` (a regular expression) in the PTX of the kernels that are traced."""
    emit = mgpu_utils.inline_ptx

    def changed(text, *operands, **keywords):
        return emit(re.sub(found, replacement, text), *operands, **keywords)

    patch.setattr(mgpu_utils, "inline_ptx", changed)


def change_draws(patch, change):
    """Replaces `draw` by `change(draw)` in all modules of `DRAWERS`."""
    for module in DRAWERS:
        patch.setattr(module, "draw", change(module.draw))


def change_transfers(patch, change):
    """Calls `change(copy_chunks, number, numbers, *args, **kwargs)` where chunks of peers are copied."""
    _change_copy_chunks(patch, change, of_own=False)


def change_own_chunks(patch, change):
    """Calls `change(copy_chunks, number, numbers, *args, **kwargs)` where the device's own chunks are copied."""
    _change_copy_chunks(patch, change, of_own=True)


def _change_copy_chunks(patch, change, *, of_own):
    copy_chunks = communicator.copy_chunks

    def changed(number, numbers, *args, **kwargs):
        # The own shard's chunks have a separate counter. Its numbers begin with chunks; those of the peers' counter
        # begin with looking for peers.
        if (numbers[0] == 0) == of_own:
            return change(copy_chunks, number, numbers, *args, **kwargs)
        return copy_chunks(number, numbers, *args, **kwargs)

    patch.setattr(communicator, "copy_chunks", changed)


def change_tells(patch, change, *, of):
    """Calls `change(tell, word, group, position, bit)` in place of setting a bit at a peer.

    `of` names the method that sets the bit: `_look` sets bits of `seen`, `_speak` sets bits of `done`.
    """
    tell, act, inside = atomics.set_bit_at_peer, getattr(Handshake, of), []

    def acts(*args):
        inside.append(True)
        act(*args)
        inside.pop()

    def told(*args):
        if inside:
            change(tell, *args)
        else:
            tell(*args)

    patch.setattr(Handshake, of, acts)
    patch.setattr(atomics, "set_bit_at_peer", told)


# --- The beginning ----------------------------------------------------------------------------------------------------


def never_raise_the_ready_flag(patch):
    patch.setattr(Handshake, "_raise", lambda self: None)


def raise_the_ready_flag_again_when_late(patch):
    """A plain store replaces the compare-and-swap, which stores only if the word is zero."""
    change_text(patch, r"atom\.relaxed\.sys\.global\.cas\.b32 before, \[\$0\], 0,", "st.relaxed.sys.global.b32 [$0],")


def do_not_look(patch):
    """All peers count as begun, and are told that they have been seen, without looking at their ready flags."""
    patch.setattr(Handshake, "_look_code", lambda *_: None)


def look_for_nobody(patch):
    patch.setattr(Handshake, "_look", lambda *_: None)


def look_at_the_own_ready_flag(patch):
    look = Handshake._look_code
    patch.setattr(Handshake, "_look_code", lambda self, context, _, own, *rest: look(self, context, own, own, *rest))


def look_for_the_same_peer(patch):
    look = Handshake._look
    patch.setattr(Handshake, "_look", lambda self, item: look(self, item * 0))


def look_at_the_other_neighbour(patch):
    """A kernel that needs only one neighbour looks for the neighbour on the other side instead."""
    look = Handshake._look

    def at_the_other(self, item):
        look(self if self.only is None else dataclasses.replace(self, only=self.group.size - self.only), item)

    patch.setattr(Handshake, "_look", at_the_other)


def tell_before_looking(patch):
    look = Handshake._look

    def tell_and_look(self, item):
        peer = self.group.peer(item + 1 if self.only is None else self.only)
        atomics.set_bit_at_peer(self.flags.at[handshake._SEEN], self.group, peer, self.group.me())
        look(self, item)

    patch.setattr(Handshake, "_look", tell_and_look)


def begin_at_once(patch):
    patch.setattr(Handshake, "await_peers", lambda self: None)


def begin_when_all_but_one_have(patch):
    wait = handshake.wait_within_device
    patch.setattr(handshake, "wait_within_device", lambda word, count: wait(word, count - 1))


def begin_without_a_proxy_fence(patch):
    patch.setattr(handshake, "wait_within_device", semaphores.semaphore_wait)


def say_seen_to_nobody(patch):
    change_tells(patch, lambda *_: None, of="_look")


def say_seen_to_the_wrong_peer(patch):
    change_tells(patch, lambda tell, word, group, _, bit: tell(word, group, group.peer(1), bit), of="_look")


def say_seen_by_the_wrong_bit(patch):
    change_tells(patch, lambda tell, word, group, place, _: tell(word, group, place, place), of="_look")


# --- Numbers ----------------------------------------------------------------------------------------------------------


def draw_each_number_twice(patch):
    change_draws(patch, lambda draw: lambda counter, end, *previous: draw(counter, end, *previous) // 2)


def draw_one_number_again_and_again(patch):
    change_draws(patch, lambda draw: lambda counter, end, *previous: draw(counter, end, *previous) * 0)


def stop_drawing_too_early(patch):
    """The device that draws the last number draws it again."""
    change_draws(patch, lambda draw: lambda counter, end, *previous: draw(counter, end - 1, *previous))


# --- The end ----------------------------------------------------------------------------------------------------------


def without_waiting_for(*words):
    """Returns a defect: the CTA that speaks for the device does not wait for "seen" or "done"."""
    left_out = [{"seen": handshake._SEEN, "done": handshake._DONE}[word] for word in words]

    def defect(patch):
        wait = Handshake._wait
        patch.setattr(
            Handshake, "_wait", lambda self, flag, *rest: None if flag in left_out else wait(self, flag, *rest)
        )

    defect.__name__ = "_and_".join(("without_waiting_for", *words))
    return defect


def wait_for_all_but_one_to_be_done(patch):
    wait = handshake.wait_for_word

    def wait_for_fewer(word, expected, group, peer, *, role, **kwargs):
        fewer = expected & (expected - 1) if role == handshake.stalls.DONE else expected
        wait(word, fewer, group, peer, role=role, **kwargs | {"at_least": True})

    patch.setattr(handshake, "wait_for_word", wait_for_fewer)


def wait_for_the_other_neighbour(patch):
    """Exchanges two peers where they differ: the one that looks for this device, and the one this device looks for."""
    wait = Handshake._wait
    patch.setattr(
        Handshake,
        "_wait",
        lambda self, flag, role, distances: wait(self, flag, role, [self.group.size - d for d in distances]),
    )


def never_lower_the_ready_flag(patch):
    patch.setattr(Handshake, "_lower_code", lambda *_: None)


def lower_the_ready_flag_after_telling(patch):
    wait, lower_code = Handshake._wait, Handshake._lower_code

    def wait_then_lower(self, flag, *rest):
        wait(self, flag, *rest)
        if flag == handshake._DONE:
            atomics.inline(lambda *args: lower_code(self, *args), [self.flags.at[0]])

    patch.setattr(Handshake, "_lower_code", lambda *_: None)
    patch.setattr(Handshake, "_wait", wait_then_lower)


def say_done_to_nobody(patch):
    change_tells(patch, lambda *_: None, of="_speak")


def say_done_to_the_wrong_peer(patch):
    change_tells(patch, lambda tell, word, group, place, bit: tell(word, group, group.me(), bit), of="_speak")


def say_done_by_the_wrong_bit(patch):
    change_tells(patch, lambda tell, word, group, place, bit: tell(word, group, place, place), of="_speak")


def leave_without_a_word(patch):
    patch.setattr(Handshake, "leave", lambda *_: None)
    patch.setattr(Handshake, "begin_and_leave", lambda self: (self.begin(), None)[1])


def speak_when_the_first_has_completed_something(patch):
    def leave(self, completed):
        @pl.when(completed > 0)
        def _count():
            before = atomics.add(self.flags.at[handshake._COMPLETED], completed)
            pl.when(before == 0)(self._speak)

    patch.setattr(Handshake, "leave", leave)


def speak_whoever_has_completed_something(patch):
    patch.setattr(Handshake, "leave", lambda self, completed: pl.when(completed > 0)(self._speak))


def speak_before_the_transfers(patch):
    """All handshakes take place, so nothing hangs; but this device reads peers' memory after they may have left."""
    await_peers = Handshake.await_peers

    def await_and_speak(self):
        await_peers(self)
        pl.when(self.cta == 0)(self._speak)

    patch.setattr(Handshake, "await_peers", await_and_speak)
    patch.setattr(Handshake, "leave", lambda *_: None)


def count_a_transfer_too_few(patch):
    change_the_count(patch, -1)


def count_a_transfer_too_many(patch):
    change_the_count(patch, 1)


def change_the_count(patch, by):
    leave = Handshake.leave
    patch.setattr(
        Handshake,
        "leave",
        lambda self, completed: leave(dataclasses.replace(self, transfers=self.transfers + by), completed),
    )


def count_without_acquiring_what_others_did(patch):
    change_text(patch, r"atom\.acq_rel(\S*add)", r"atom.relaxed\1")


def count_transfers_when_they_begin(patch):
    """The CTA that begins the last chunk speaks for the device before that chunk has arrived."""
    leave, begin, begun = Handshake.leave, Handshake.begin, []

    def begin_here(self):
        begun[:] = [self]
        return begin(self)

    def count_first(copy_chunks, *args, source, **kwargs):
        def counted(*place):
            leave(begun[0], 1)
            return source(*place)

        copy_chunks(*args, source=counted, **kwargs)
        return 0

    patch.setattr(Handshake, "begin", begin_here)
    change_transfers(patch, count_first)


def leave_the_last_number(patch):
    change_transfers(patch, lambda copy_chunks, number, numbers, *args, **kwargs: copy_chunks(
        number, (numbers[0], numbers[1] - 1), *args, **kwargs))  # fmt: skip


def take_a_number_too_many(patch):
    change_transfers(patch, lambda copy_chunks, number, numbers, *args, **kwargs: copy_chunks(
        number, (numbers[0], numbers[1] + 1), *args, **kwargs))  # fmt: skip
