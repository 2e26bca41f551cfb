"""Defects of the handshakes between devices as patches, for kernels on GPUs (tests/multi_gpu).

The emulator finds these and more: `defects/steps.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from jax.experimental import pallas as pl

from overlap.primitives import handshake
from overlap.primitives.handshake import Handshake


def do_not_look(patch: pytest.MonkeyPatch) -> None:
    """All peers count as begun, and are told that they have been seen, without looking at their ready flags."""
    patch.setattr(Handshake, "_look_code", lambda *_: None)


def without_waiting_for(*words: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Returns a defect: the CTA that speaks for the device does not wait for "seen" or "done"."""
    left_out = [{"seen": handshake._SEEN, "done": handshake._DONE}[word] for word in words]

    def defect(patch: pytest.MonkeyPatch) -> None:
        wait = Handshake._wait
        patch.setattr(
            Handshake, "_wait", lambda self, flag, *rest: None if flag in left_out else wait(self, flag, *rest)
        )

    return defect


def speak_before_the_transfers(patch: pytest.MonkeyPatch) -> None:
    """All handshakes take place, so nothing hangs; but this device reads peers' memory after they may have left."""
    await_peers = Handshake.await_peers

    def await_and_speak(self: Handshake) -> None:
        await_peers(self)
        pl.when(self.cta == 0)(self._speak)

    patch.setattr(Handshake, "await_peers", await_and_speak)
    patch.setattr(Handshake, "leave", lambda *_: None)
