"""The two handshakes of a kernel that reads its peers' memory: none begins too early, none leaves too early.

The framework can run a barrier over all devices before such a kernel. It costs a kernel launch and a round trip, while
the tensor cores idle, and lets the fastest device wait for the slowest. These handshakes take its place *inside* the
kernel, where there is other work to do: `entry_handshake` tells that a peer has begun, so that its inputs are ready and
its flags are zero; `exit_handshake`, that nobody needs this device's memory any more.

No flag of a peer may be touched before that peer has begun, since its memory still belongs to somebody else. So a
device begins by raising a *beacon* in its own memory, and its peers look for it there:

    begin   raise the own beacon; look at each peer's until it is raised, and tell that peer that it has been seen
    end     when this device reads no peer's memory any more and all peers have seen its beacon: lower that, then tell
            every peer; leave when all peers have said so

What a peer sees before the beacon is whatever that memory last held, so a raised beacon is a key of 128 bits that
nothing else writes. That no key is left there by an earlier launch follows from the end: a device looks at a peer's
beacon of this launch only after it has left the one before, thus after that peer's word, which came after that beacon
had been lowered.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from overlap.primitives.addresses import require_told
from overlap.primitives.flags import signal, signal_peer, wait_at_least
from overlap.primitives.peers import Ring

_WORDS = 4
# Shape of the flags of both handshakes: the beacon's words, then four counters.
HANDSHAKE_FLAGS = (_WORDS + 4,)
_BEGUN, _SEEN, _OWN_CTAS, _DONE = range(_WORDS, _WORDS + 4)
_KEY = [
    int.from_bytes(hashlib.sha256(b"overlap: this device has begun").digest()[4 * word : 4 * word + 4], "little")
    for word in range(_WORDS)
]


def _write(beacon: Any, words: Sequence[int]) -> None:
    """By one thread of the warp, the one that signals."""
    address = mgpu_utils.memref_ptr(beacon)
    one = mgpu_utils.single_thread_predicate(mgpu_utils.ThreadSubset.WARP)
    for index, word in enumerate(words):
        mgpu_utils.inline_ptx(f"st.relaxed.sys.global.b32 [$0+{4 * index}], {word};", address, predicate=one)


def _raise(_: Any, beacon: Any) -> None:
    mgpu_utils.inline_ptx("fence.acq_rel.sys;", has_side_effects=True)
    _write(beacon, _KEY)


def _lower(context: Any, beacon: Any) -> None:
    require_told(context)
    _write(beacon, [0] * _WORDS)


def _await(_: Any, beacon: Any) -> None:
    """By all threads of the warp, as one access. A peer's memory is not cached here: each look crosses NVLink."""
    words = range(_WORDS)
    loads = (f"ld.relaxed.sys.global.b32 word{word}, [$0+{4 * word}];" for word in words)
    tests = (f"setp.eq.and.u32 raised, word{word}, {_KEY[word]}, raised;" for word in words[1:])
    lines = [
        "{", ".reg .pred raised;", *(f".reg .b32 word{word};" for word in words),
        "LOOK:", *loads, f"setp.eq.u32 raised, word0, {_KEY[0]};", *tests,
        "@raised bra SEEN;", "nanosleep.u32 40;", "bra LOOK;",
        "SEEN:", "fence.acquire.sys;", "fence.proxy.async.global;", "}",
    ]  # fmt: skip
    mgpu_utils.inline_ptx("\n".join(lines), mgpu_utils.memref_ptr(beacon), has_side_effects=True, convergent=True)


def _await_count(count: int) -> Any:
    """As `wait_at_least` within this GPU and `fence_async_proxy`, by all threads of the warp.

    Where one thread waits for the others, ptxas keeps more of what follows in registers than this warp has to spare.
    """

    def wait(_: Any, flag: Any) -> None:
        lines = [
            "{", ".reg .pred enough;", ".reg .b32 number;",
            "LOOK:", "ld.relaxed.gpu.global.b32 number, [$0];", f"setp.ge.u32 enough, number, {count};",
            "@!enough bra LOOK;", "fence.acquire.gpu;", "fence.proxy.async.global;", "}",
        ]  # fmt: skip
        mgpu_utils.inline_ptx("\n".join(lines), mgpu_utils.memref_ptr(flag), has_side_effects=True, convergent=True)

    return wait


def _act(act: Any, flag: Any) -> None:
    """Runs one of the above on a flag; of a beacon that is its first word."""
    plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))(act)(flag)


def entry_handshake(flags: Any, ring: Ring, cta: Any, num_ctas: int) -> None:
    """Waits until all peers have begun this kernel: their inputs may then be read and their flags raised.

    Every CTA calls it once, from the warp that reads the peers' memory, before it does.

    Args:
      flags: of shape `HANDSHAKE_FLAGS`, in memory that the peers can address.
      ring: the peers.
      cta: this CTA's index on the device.
      num_ctas: how many there are.
    """
    beacon, begun = flags.at[0], flags.at[_BEGUN]

    @pl.when(cta == 0)
    def _begin() -> None:
        _act(_raise, beacon)

    # Each peer is looked for by one CTA, all of them at the same time.
    @pl.loop(cta + 1, ring.size, step=num_ctas)
    def _look_for(distance: Any) -> None:
        peer = ring.peer(distance)
        _act(_await, ring.remote(beacon, peer))
        signal(begun)
        signal_peer(flags.at[_SEEN], ring, peer)

    _act(_await_count(ring.size - 1), begun)


def exit_handshake(flags: Any, ring: Ring, cta: Any, num_ctas: int) -> None:
    """Tells every peer that this device reads its memory no more, and waits until all peers have said the same.

    Every CTA calls it once, from the one warp whose remote reads have all completed (each awaited on its mbarrier).
    CTA 0 gathers the others' word and speaks for the device: devices − 1 signals cross NVLink, not CTAs times that.

    Why it suffices: a CTA's signal releases its completed reads; CTA 0 acquires them all, and its system-scope release
    to the peer passes them on; the peer's CTA 0 acquires that before it leaves, and a kernel ends with its last CTA.

    Args: as of `entry_handshake`, which the same warps have called before.
    """
    own_ctas, done = flags.at[_OWN_CTAS], flags.at[_DONE]
    signal(own_ctas)

    @pl.when(cta == 0)
    def _speak_for_the_device() -> None:
        wait_at_least(own_ctas, num_ctas)
        wait_at_least(flags.at[_SEEN], ring.size - 1, from_peer=True)
        _act(_lower, flags.at[0])

        @pl.loop(1, ring.size)
        def _tell(distance: Any) -> None:
            signal_peer(done, ring, ring.peer(distance))

        wait_at_least(done, ring.size - 1, from_peer=True)
