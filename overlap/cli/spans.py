"""From the emulator's events to spans of work: which shard a device multiplied, received or sent when."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable

from overlap.emulation import Event

LANES = ("multiplies", "receives", "sends")
# How the emulator names a tile of the kernel's first output, the product [shards, m_shard, n]: by its shard first.
_PRODUCT_TILE = re.compile(r"output 0\[(\d+), ")


@dataclasses.dataclass(frozen=True)
class Span:
    """A piece of work, in logical time.

    Attributes:
      device: who does it.
      cta: which of its CTAs; for "sends" that of the receiver, since the receiver pulls.
      lane: one of `LANES`.
      shard: whose shard it is; for "sends" to whom it goes.
      start, end: scheduler steps of the emulator.
    """

    device: int
    cta: int
    lane: str
    shard: int
    start: int
    end: int


def spans_of(events: Iterable[Event]) -> list[Span]:
    """The spans in one launch of `all_gather_lhs_matmul`.

    A wgmma does not know whose rows it multiplies; the store of the tile that follows it does. So a tile lasts from a
    thread's first wgmma after its last store to its next store into the product, whose first index is the shard.

    Args:
      events: of `overlap.emulation.emulate(record=True)`.
    """
    spans = []
    tile_starts: dict[tuple[int, int, str], int] = {}
    for event in sorted(events, key=lambda event: event.start):
        thread = event.device, event.cta, event.thread
        if event.kind == "remote_copy" and event.peer is not None:
            spans.append(Span(event.device, event.cta, "receives", event.peer, event.start, event.end))
            spans.append(Span(event.peer, event.cta, "sends", event.device, event.start, event.end))
        elif event.kind == "wgmma":
            tile_starts.setdefault(thread, event.start)
        elif event.kind == "copy" and thread in tile_starts and (tile := _PRODUCT_TILE.match(event.target)):
            start = tile_starts.pop(thread)
            spans.append(Span(event.device, event.cta, "multiplies", int(tile[1]), start, event.start))
    return spans
