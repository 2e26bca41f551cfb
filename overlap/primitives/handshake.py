"""The exit handshake: no device leaves a kernel while a peer still reads its memory."""

from __future__ import annotations

from typing import Any

from jax.experimental import pallas as pl

from overlap.primitives.flags import signal, signal_peer, wait_at_least
from overlap.primitives.peers import Ring

# Shape of the flags of an exit handshake: [0] is raised by this device's CTAs, [1] by its peers.
HANDSHAKE_FLAGS = (2,)


def exit_handshake(flags: Any, ring: Ring, cta: Any, num_ctas: int) -> None:
    """Tells every peer that this device reads its memory no more, and waits until all peers have said the same.

    `flags` are of shape `HANDSHAKE_FLAGS`. Every CTA calls it once, from the one warp whose remote reads have all
    completed (each awaited on its mbarrier). CTA 0 gathers the others' word and speaks for the device: devices − 1
    signals cross NVLink, not CTAs times that.

    Why it suffices: a CTA's signal releases its completed reads; CTA 0 acquires them all, and its system-scope release
    to the peer passes them on; the peer's CTA 0 acquires that before it leaves, and a kernel ends with its last CTA.
    """
    own_ctas, peers = flags.at[0], flags.at[1]
    signal(own_ctas)

    @pl.when(cta == 0)
    def _speak_for_the_device() -> None:
        wait_at_least(own_ctas, num_ctas)

        @pl.loop(1, ring.size)
        def _tell(distance: Any) -> None:
            signal_peer(peers, ring, ring.peer(distance))

        wait_at_least(peers, ring.size - 1, from_peer=True)
