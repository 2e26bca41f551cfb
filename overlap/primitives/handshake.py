"""The two handshakes of a kernel that talks to its peers: none begins too early, none leaves too early.

The framework can run a barrier over all devices before such a kernel. It costs a kernel launch and a round trip, while
the tensor cores idle, and lets the fastest device wait for the slowest. These handshakes take its place *inside* the
kernel, where there is other work to do: the first tells that a peer has begun, so that its inputs are ready and its
flags are zero; the second, that nobody needs this device's memory any more.

No flag of a peer may be touched before that peer has begun, since its memory still belongs to somebody else. So a
device begins by raising a *beacon* in its own memory, and its peers look for it there:

    begin   raise the own beacon; look at each peer's until it is raised, and tell that peer that it has been seen
    end     when this device needs no peer's memory any more and all peers have seen its beacon: lower that, then tell
            every peer; leave when all peers have said so

Why a launch is never taken for another
---------------------------------------
What a device sees before the beacon of this launch is whatever that memory last held, also what another launch has left
there, with other members, of another operation or program: XLA gives the flags of all of them the same addresses. So a
raised beacon is a key of 128 bits, and the key says who talks to whom: it is made of the mesh, with its devices in
order, of the axes along which the kernel talks, and of which peers a device looks for (`_key`). Let device A, in launch
L, see its key in the memory of its peer P, and suppose that P has raised it in another launch M.

- M has the same key, so the same mesh and the same axes. P belongs to one group along these axes of this mesh, so A is
  a member of M as it is of L; and A looks for P in M, too.
- Devices run the programs that they share in the same order, so either both ran M before L, or both will run it after.
- M before L: A has left M. So it had P's last word of M, which P said after it had lowered its beacon of M.
- M after L: P has left L, so it had A's last word of L, which A says only after it has seen P's beacon of L.

Either way P's beacon of M is not raised while A looks for that of L. Nothing is said of where the flags of L and M lie,
of what either computes, nor of how late anybody is; no state outlives a launch. The emulator runs random sequences of
launches on shared flags, with the key and, as a negative control, without (`tests/test_sequences.py`).

Whoever is there
----------------
Other kernels (NCCL's) may hold some of the cores, for as long as they wait for other devices. So nothing here waits for
a CTA that may not have started: the looking is dealt by a counter to the CTAs that are there, each once; whoever
completes the last piece of work with peers' memory speaks for the device; who comes later finds nothing left to do. One
CTA on each device suffices for all devices to be done with each other.

    items of the counter:   0 … looks − 1        look for a peer
                            looks … end − 1      a transport's transfers
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl

from overlap.primitives import atomics, board, clique, marks
from overlap.primitives.addresses import require_told
from overlap.primitives.marks import Work
from overlap.primitives.peers import PeerGroup
from overlap.primitives.semaphores import fence_async_proxy, semaphore_signal, semaphore_wait
from overlap.primitives.waits import look_until, wait_for_word, wait_within_device

_WORDS = 4
_BEGUN, _SEEN, _COMPLETED, _DONE, _DRAWN = range(_WORDS, _WORDS + 5)
# Shape of the flags of both handshakes: the beacon's words, then two counters, a word with a bit for each position
# before and after the second, and the counter of the items.
HANDSHAKE_FLAGS = (_WORDS + 5,)
# Between zero, which is a beacon that has not been raised yet, and its key.
_LOWERED = 1


def _key(context: Any, group: PeerGroup, only: int | None) -> list[int]:
    """The words of a raised beacon; asked for at lowering, when the devices of the mesh are known."""
    text = f"overlap: {group.places} on {clique.device_ids(context)}, looking for {only}"
    digest = hashlib.sha256(text.encode()).digest()
    words = [int.from_bytes(digest[4 * word : 4 * word + 4], "little") for word in range(_WORDS)]
    return [max(words[0], _LOWERED + 1), *words[1:]]


@dataclasses.dataclass(frozen=True)
class Handshake:
    """The handshakes of one kernel.

    Attributes:
      flags: of shape `HANDSHAKE_FLAGS`, in memory that the peers can address.
      ring: the peers.
      cta: this CTA's index on the device.
      operation: its name, for whoever waits too long.
      transfers: how many transfers the device has: items of the counter after the looks.
      only: the distance of the one peer whose memory this device needs; None: that of all peers. In the same distance
        behind it is the one peer that needs its own.
    """

    flags: Any
    group: PeerGroup
    cta: Any
    operation: str
    transfers: int = 0
    only: int | None = None

    @property
    def looks(self) -> int:
        """How many peers this device looks for: so many items of the counter come first."""
        return self.group.size - 1 if self.only is None else 1

    @property
    def items(self) -> int:
        """How many items the counter deals in all."""
        return self.looks + self.transfers

    @property
    def counter(self) -> Any:
        """The counter that deals items to the CTAs."""
        return self.flags.at[_DRAWN]

    @property
    def _number(self) -> int:
        return board.describe(self.operation, self.group)

    def begin(self) -> Any:
        """Every communicator calls it once, first: looks for the peers that fall to it.

        Returns its first item that is no look: at least `looks`.
        """
        return self._begin(self._look)

    def begin_and_leave(self) -> None:
        """Instead of `begin` and `leave`, where the communicator has no transfers: who has looked speaks at once.

        All that peers do to this device's memory must then be what its other warps wait for.
        """

        def look_and_speak(item: Any) -> None:
            self._look(item)
            self._speak()

        assert self.looks == 1 and not self.transfers
        self._begin(look_and_speak)

    def _begin(self, look: Callable[[Any], None]) -> Any:
        marks.now(Work.AWAIT_PEERS)
        # CTA 0 is nearly always there, and need not wait for a number; else whoever has drawn the first one raises it.
        pl.when(self.cta == 0)(self._raise)
        first = atomics.draw(self.counter, self.items)
        pl.when(jnp.logical_and(first == 0, self.cta != 0))(self._raise)
        return atomics.each_drawn(self.counter, first, self.looks, self.items, look)[0]

    def await_peers(self) -> None:
        """Waits until all peers have begun whose memory this device needs: it may then be read and written."""
        wait_within_device(self.flags.at[_BEGUN], self.looks)

    def await_peers_by_warpgroup(self) -> None:
        """The same by a compute warpgroup."""
        semaphore_wait(self.flags.at[_BEGUN], self.looks)
        fence_async_proxy()

    def leave(self, completed: Any) -> None:
        """Every communicator calls it once, last: whoever completes the device's last transfer speaks for the device.

        Args:
          completed: how many transfers this CTA has completed: it accesses no peer's memory any more.

        Why it suffices: an addition to the counter releases a CTA's completed accesses, the last one acquires them all,
        and its release at system scope passes them on to the peer, which acquires it before it leaves; a kernel ends
        with its last CTA.
        """
        assert self.transfers
        marks.now(Work.LEAVE)

        @pl.when(completed > 0)
        def _count() -> None:
            before = atomics.add(self.flags.at[_COMPLETED], completed)
            pl.when(before + completed == self.transfers)(self._speak)

    def wait_for(self, role: int, word: Any, expected: Any, position: Any) -> None:
        """Waits until a word of this device, which the peer at `position` raises, has reached `expected`."""
        wait_for_word(word, expected, self.group, position, operation=self._number, role=role, at_least=True)

    def _raise(self) -> None:
        atomics.inline(self._raise_code, [self.flags.at[0]])

    def _raise_code(self, context: Any, pointer: Any) -> None:
        key = _key(context, self.group, self.only)
        others = [f"@first st.relaxed.sys.global.b32 [$0+{4 * i}], {key[i]};" for i in range(1, _WORDS)]
        lines = [
            *atomics.BY_LANE_0, ".reg .b32 before;",
            # What was computed before this kernel, and the zeroed flags, come before the beacon.
            "fence.acq_rel.sys;", *others,
            # Only once: who comes late must not raise it again.
            f"@first atom.relaxed.sys.global.cas.b32 before, [$0], 0, {key[0]};",
        ]  # fmt: skip
        atomics.ptx(lines, pointer)

    def _lower_code(self, context: Any, pointer: Any) -> None:
        require_told(context)
        lines = [*atomics.BY_LANE_0, f"@first st.relaxed.sys.global.b32 [$0], {_LOWERED};"]
        atomics.ptx(lines, pointer)

    def _look(self, item: Any) -> None:
        """Looks for one peer until it has begun, and tells it so."""
        group, beacon = self.group, self.flags.at[0]
        peer = group.peer(item + 1 if self.only is None else self.only)
        atomics.inline(self._look_code, [group.remote_ref(beacon, peer), beacon], group.me(), peer, 1)
        semaphore_signal(self.flags.at[_BEGUN])
        atomics.set_bit_at_peer(self.flags.at[_SEEN], group, peer, group.me())

    def _look_code(self, context: Any, *operands: Any) -> None:
        # A peer's memory is not cached here: each look crosses NVLink.
        key = _key(context, self.group, self.only)
        look = [
            ".reg .b32 word<4>;", *(f"ld.relaxed.sys.global.b32 word{i}, [$0+{4 * i}];" for i in range(_WORDS)),
            "mov.b32 got, word0;", f"setp.eq.u32 there, word0, {key[0]};",
            *(f"setp.eq.and.u32 there, word{i}, {key[i]}, there;" for i in range(1, _WORDS)),
        ]  # fmt: skip
        look_until(look, operands, operation=self._number, role=board.BEGUN)

    def _speak(self) -> None:
        """Lowers the beacon, tells all peers concerned, and waits for their word."""
        group = self.group
        readers, owners = (1, 1) if self.only is None else (group.size - self.only, self.only)
        self._wait(_SEEN, board.SEEN, readers)
        atomics.inline(self._lower_code, [self.flags.at[0]])
        for_all = self.only is None

        @pl.loop(1, group.size) if for_all else _once(readers)
        def _tell(distance: Any) -> None:
            atomics.set_bit_at_peer(self.flags.at[_DONE], group, group.peer(distance), group.me())

        self._wait(_DONE, board.DONE, owners)

    def _wait(self, flag: int, role: int, distance: int) -> None:
        """Waits for a bit of each peer, or of the one in that distance."""
        group = self.group
        if self.only is None:
            me = group.me()
            expected, peer = jnp.int32((1 << group.size) - 1) ^ (jnp.int32(1) << me), me
        else:
            peer = group.peer(distance)
            expected = jnp.int32(1) << peer
        wait_for_word(self.flags.at[flag], expected, group, peer, operation=self._number, role=role)


def _once(value: int) -> Callable[[Callable[[Any], None]], None]:
    return lambda act: act(value)
