"""The two handshakes of a kernel that talks to its peers: no device begins too early, and none leaves too early.

The framework can run a barrier over all devices before such a kernel. The barrier costs a kernel launch and a round
trip during which the tensor cores idle, and makes the fastest device wait for the slowest. These handshakes take its
place *inside* the kernel, where there is other work to do. The first says that a peer has begun, so that its inputs are
ready and its flags are zero. The second says that nobody needs this device's memory any more.

No flag of a peer may be written before that peer has begun, since its memory still belongs to something else. So a
device begins by raising a *ready flag* in its own memory, and its peers look for it there:

    begin   raise the own ready flag; look at each peer's until it is raised, and tell that peer that it was seen
    end     when this device needs no peer's memory any more and all peers have seen its ready flag: lower it, then
            tell every peer; leave when all peers have told this device the same

Why a launch is never taken for another
---------------------------------------
Before the ready flag of this launch is raised, a peer's memory holds whatever was there before. That may be the ready
flag of another launch, with other members, of another operation or program: XLA gives the flags of all of them the same
addresses. So a raised ready flag is a key of 128 bits which says who talks to whom. It is made of the mesh with its
devices in order, of the axes along which the kernel talks, and of which peers a device looks for (`_key`). Let device
A, in launch L, see the key of L in the memory of its peer P, and suppose that P has raised this ready flag in another
launch M.

- M has the same key, so the same mesh and the same axes. P is in exactly one peer group along these axes, so M has the
  same members as L, A among them. The key also says who looks for whom, so A looks for P in M as it does in L.
- Devices run the programs that they share in the same order. So either both ran M before L, or both will run it after.
- M before L: A has left M. So A had P's last message of M, which P sends after it has lowered its ready flag of M.
- M after L: P has left L. So P had A's last message of L, which A sends only after it has seen P's ready flag of L.

Either way P's ready flag of M is not raised while A looks for P's ready flag of L. The argument assumes nothing about
where the flags of L and M lie, what either of them computes, or how late any device is. Nothing in memory is kept from
one launch for the next. The emulator runs random sequences of launches on shared flags, with the key and, as a negative
control, without the key (`tests/protocol/test_sequences.py`).

Progress with whichever CTAs run
--------------------------------
Other kernels (NCCL's) may hold some of the SMs, for as long as they wait for other devices. So nothing here waits for a
CTA that may not have started. The CTAs that run draw the *looks* (each look is a wait for one peer's ready flag) from a
counter. Whichever CTA completes the last transfer does the second handshake for the device. A CTA that starts later
finds nothing left to do. One CTA on each device suffices for all devices to finish.

    items of the counter:   0 … looks − 1        look for a peer
                            looks … end − 1      a transport's transfers
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import operator
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.extend.mlir import ir

from overlap.primitives import atomics, host_mesh, marks, stalls
from overlap.primitives.addresses import require_told
from overlap.primitives.arguments import require_constant, require_index, require_reference
from overlap.primitives.marks import Work
from overlap.primitives.peers import PeerGroup, require_group
from overlap.primitives.semaphores import fence_async_proxy, semaphore_signal, semaphore_wait
from overlap.primitives.types import Index, LoweringContext, SemaphoreRef
from overlap.primitives.waits import look_until, wait_for_word, wait_within_device

_WORDS = 4
_BEGUN, _SEEN, _COMPLETED, _DONE, _DRAWN = range(_WORDS, _WORDS + 5)
# The shape of the flags of both handshakes, for `shared_semaphores`: the ready flag's words; how many peers have been
# seen to begin (a counter); which peers have seen this device (a bit for each position); completed transfers (a
# counter); which peers are done (a bit for each position); the counter of the items.
HANDSHAKE_FLAGS = (_WORDS + 5,)
# The value of a lowered ready flag. Zero is a ready flag that has not been raised yet; a key is greater than this
# value.
_LOWERED = 1


def _key(context: LoweringContext, group: PeerGroup, only: int | None) -> list[int]:
    """Returns the words of a raised ready flag. Call it at lowering, when the devices of the mesh are known."""
    text = f"overlap: {group.places} on {host_mesh.device_ids(context)}, looking for {only}"
    digest = hashlib.sha256(text.encode()).digest()
    words = [int.from_bytes(digest[4 * word : 4 * word + 4], "little") for word in range(_WORDS)]
    return [max(words[0], _LOWERED + 1), *words[1:]]


@dataclasses.dataclass(frozen=True)
class Handshake:
    """The handshakes of one kernel, in place of the framework's barrier.

    Launch the kernel with `plgpu.CompilerParams(skip_device_barrier=True)`. Make the object in the kernel's body, in
    all CTAs with the same arguments (except `cta`). Then in each CTA one warp, the communicator, calls in this order:

    1. `begin`: looks for the peers that this CTA draws from the counter, and returns the first item that is left
    2. `await_peers`: behind it the peers' memory may be read and written
    3. `each_drawn` (or `copy_chunks`) with `counter`, from the item that `begin` has returned up to `items`: does the
       transfers. Item n stands for transfer n - `looks`
    4. `leave`, with the number of transfers that this CTA has completed

    Other warps that touch peers' memory call `await_peers` (or `await_peers_by_warpgroup`) themselves.

    Example: `gather_with_handshake` in examples/all_gather.py.

    Attributes:
      flags: semaphores of shape `HANDSHAKE_FLAGS`, of `shared_semaphores`. The kernel may not use them otherwise.
      group: the peers: at least two devices.
      cta: this CTA's index on the device, 0 … number of CTAs - 1: an int32 scalar such as `lax.axis_index("cta")`, or 0
        in a kernel of one CTA. A CTA with the index 0 must exist; no other CTA may have it.
      operation: the kernel's name in the reports of waits that take long; with the sizes, calls can be told apart.
      transfers: a Python int: how many transfers the device has in all. The kernel decides what a transfer is: work
        that reads or writes peers' memory. `leave` needs at least 1.
      only: a Python int, 1 … size of the group - 1: the distance (in positions ahead) of the only peer whose memory
        this device needs. The only peer that needs this device's memory is at the same distance behind this device.
        None: every device needs the memory of all peers.

    Raises:
      TypeError: `flags` is no reference or has another shape than `HANDSHAKE_FLAGS`, `group` is no `PeerGroup`,
        `transfers` or `only` is not a Python int, or `cta` is not an integer scalar.
      ValueError: the group has one device only, or `transfers` or `only` is out of range.
    """

    flags: SemaphoreRef
    group: PeerGroup
    cta: Index
    operation: str
    transfers: int = 0
    only: int | None = None

    def __post_init__(self) -> None:
        require_group("Handshake", self.group)
        if (shape := getattr(self.flags, "shape", None)) != HANDSHAKE_FLAGS:
            got = f"got {self.flags!r}" if shape is None else f"got shape {shape}"
            raise TypeError(
                f"`flags` of `Handshake` must be semaphores of shape HANDSHAKE_FLAGS, {HANDSHAKE_FLAGS}, {got}: take "
                "`shared_semaphores(HANDSHAKE_FLAGS)[0]`"
            )
        way_out = "take `shared_semaphores(HANDSHAKE_FLAGS)[0]` in the body of a kernel"
        require_reference("Handshake", "flags", self.flags, "semaphores of `shared_semaphores`", way_out)
        if self.group.size < 2:
            raise ValueError("`Handshake` needs a group of at least two devices, got one: launch a kernel without it")
        require_index("Handshake", "cta", self.cta, "this CTA's index on the device")
        require_constant("Handshake", "transfers", self.transfers, 0, "give the number of the device's transfers")
        if self.only is not None:
            require_constant("Handshake", "only", self.only, 1, "give the distance to a peer, or None")
            require_index("Handshake", "only", self.only, "the distance to a peer", self.group.size)

    @property
    def looks(self) -> int:
        """The number of peers that this device looks for. The counter's first `looks` numbers stand for these looks."""
        return self.group.size - 1 if self.only is None else 1

    @property
    def items(self) -> int:
        """The number of items that the counter deals in all, `looks` + `transfers`: the `end` for `each_drawn`."""
        return self.looks + self.transfers

    @property
    def counter(self) -> SemaphoreRef:
        """The counter that deals items to the CTAs: one semaphore, for `draw`, `each_drawn` and `copy_chunks`."""
        return self.flags.at[_DRAWN]

    @property
    def _number(self) -> int:
        return stalls.describe(self.operation, self.group)

    def begin(self) -> jax.Array:
        """Raises this device's ready flag (one CTA does it for the device) and waits for peers to begin.

        Each communicator calls it once, first. The communicators share the peers: each draws peers from `counter`, and
        waits until those that it has drawn have begun.

        Returns:
          The first number that this CTA has drawn that stands for no peer: an int32 scalar of at least `looks`. Below
          `items` it stands for transfer number − `looks`; otherwise no transfer is left for this CTA.
        """
        return self._begin(self._look)

    def begin_and_leave(self) -> None:
        """Takes the place of `begin` and `leave` where the communicator has no transfers.

        It ends the handshake as soon as the peer has begun. The device's other warps must then wait for everything that
        peers do to its memory.
        """

        def look_and_speak(item: Index) -> None:
            self._look(item)
            self._speak()

        assert self.looks == 1 and not self.transfers
        self._begin(look_and_speak)

    def _begin(self, look: Callable[[Index], None]) -> jax.Array:
        marks.now(Work.AWAIT_PEERS)
        # CTA 0 nearly always runs, and need not wait for a number. Otherwise the CTA that draws number 0 raises the
        # ready flag.
        pl.when(self.cta == 0)(self._raise)
        first = atomics.draw(self.counter, self.items)
        pl.when(jnp.logical_and(first == 0, self.cta != 0))(self._raise)
        return atomics.each_drawn(self.counter, first, self.looks, look)[0]

    def await_peers(self) -> None:
        """Waits until all peers whose memory this device needs have begun. Call it in one warp.

        Ordering: an acquire and a proxy fence. The peers' memory may then be read and written, by threads and by TMA.
        """
        wait_within_device(self.flags.at[_BEGUN], self.looks)

    def await_peers_by_warpgroup(self) -> None:
        """Does what `await_peers` does, in a whole warpgroup."""
        semaphore_wait(self.flags.at[_BEGUN], self.looks)
        fence_async_proxy()

    def leave(self, completed: Index) -> None:
        """Ends the handshake. Each communicator calls it once, last.

        The CTA that completes the device's last transfer tells all peers that this device needs their memory no more,
        and waits until they have said the same.

        Args:
          completed: how many transfers this CTA has completed, an int32 scalar, as `each_drawn` and `copy_chunks`
            return it. The CTA accesses no peer's memory any more. All CTAs together must complete `transfers`.

        Raises:
          TypeError: `completed` is not an integer scalar.
          ValueError: the handshake has no transfers.

        Why this suffices: each CTA's addition to the counter releases the accesses that the CTA has completed. The last
          addition acquires those of all CTAs, and the signal to the peers is a release at system scope. A peer acquires
          that signal before it leaves. A kernel ends with its last CTA.
        """
        if not self.transfers:
            raise ValueError("`Handshake.leave` counts transfers, and `transfers` is 0: give their number")
        require_index("Handshake.leave", "completed", completed, "the number of this CTA's transfers")
        marks.now(Work.LEAVE)

        @pl.when(completed > 0)
        def _count() -> None:
            before = atomics.add(self.flags.at[_COMPLETED], completed)
            pl.when(before + completed == self.transfers)(self._speak)

    def wait_for(self, role: int, word: SemaphoreRef, expected: Index, position: Index) -> None:
        """Waits until a word of this device, which the peer at `position` raises, has reached `expected`.

        `role` says what the wait is for, in the report of a long wait (`stalls.ROWS` and so on).
        """
        wait_for_word(word, expected, self.group, position, operation=self._number, role=role, at_least=True)

    def _raise(self) -> None:
        atomics.inline(self._raise_code, [self.flags.at[0]])

    def _raise_code(self, context: LoweringContext, pointer: ir.Value) -> None:
        key = _key(context, self.group, self.only)
        others = [f"@first st.relaxed.sys.global.b32 [$0+{4 * i}], {key[i]};" for i in range(1, _WORDS)]
        lines = [
            *atomics.BY_LANE_0, ".reg .b32 before;",
            # What was computed before this kernel, and the zeroed flags, come before the ready flag.
            "fence.acq_rel.sys;", *others,
            # Only once: a CTA that starts late must not raise it again.
            f"@first atom.relaxed.sys.global.cas.b32 before, [$0], 0, {key[0]};",
        ]  # fmt: skip
        atomics.ptx(lines, pointer)

    def _lower_code(self, context: LoweringContext, pointer: ir.Value) -> None:
        require_told(context)
        lines = [*atomics.BY_LANE_0, f"@first st.relaxed.sys.global.b32 [$0], {_LOWERED};"]
        atomics.ptx(lines, pointer)

    def _look(self, item: Index) -> None:
        """Looks at one peer's ready flag until it is raised, and tells that peer that it was seen."""
        group = self.group
        ready_flag = self.flags.at[0]
        peer = group.peer(item + 1 if self.only is None else self.only)
        atomics.inline(self._look_code, [group.remote_ref(ready_flag, peer), ready_flag], group.me(), peer, 1)
        semaphore_signal(self.flags.at[_BEGUN])
        atomics.set_bit_at_peer(self.flags.at[_SEEN], group, peer, group.me())

    def _look_code(self, context: LoweringContext, *operands: ir.Value) -> None:
        # A peer's memory is not cached here: each look crosses NVLink.
        key = _key(context, self.group, self.only)
        look = [
            ".reg .b32 word<4>;", *(f"ld.relaxed.sys.global.b32 word{i}, [$0+{4 * i}];" for i in range(_WORDS)),
            "mov.b32 got, word0;", f"setp.eq.u32 there, word0, {key[0]};",
            *(f"setp.eq.and.u32 there, word{i}, {key[i]}, there;" for i in range(1, _WORDS)),
        ]  # fmt: skip
        look_until(look, operands, operation=self._number, role=stalls.BEGUN, expected_constant=key[0])

    def _speak(self) -> None:
        """Lowers the ready flag, tells the peers that this device is done, and waits until they are done."""
        group = self.group
        flags = self.flags
        self._wait(_SEEN, stalls.SEEN, () if self.only is None else (group.size - self.only,))
        atomics.inline(self._lower_code, [flags.at[0]])

        def tell(distance: Index) -> None:
            atomics.set_bit_at_peer(flags.at[_DONE], group, group.peer(distance), group.me())

        if self.only is None:
            pl.loop(1, group.size)(tell)
            self._wait(_DONE, stalls.DONE, ())
        else:
            # The peer that this device looks for must lower its ready flag, and the peer that looks for this device
            # must be done with this device's memory. In a group of two they are the same.
            both = sorted({self.only, group.size - self.only})
            for distance in both:
                tell(distance)
            self._wait(_DONE, stalls.DONE, both)

    def _wait(self, flag: int, role: int, distances: Sequence[int]) -> None:
        """Waits for the bits of the peers at these distances; if none are given, for the bits of all peers."""
        group = self.group
        me = group.me()
        places = [group.peer(distance) for distance in distances]
        bits = [jnp.int32(1) << jnp.asarray(place, jnp.int32) for place in places]
        expected = (
            functools.reduce(operator.or_, bits) if bits else jnp.int32((1 << group.size) - 1) ^ (jnp.int32(1) << me)
        )
        peer = places[0] if len(places) == 1 else me
        wait_for_word(self.flags.at[flag], expected, group, peer, operation=self._number, role=role)
