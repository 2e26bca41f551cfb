"""From the emulator's events to spans of work: what a device multiplied, added, received or sent when."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator

from overlap.emulation import Event

LANES = {
    "all_gather_lhs_matmul": ("multiplies", "receives", "sends"),
    "matmul_reduce_scatter": ("multiplies", "adds", "receives", "sends"),
}
# How the emulator names a tile of what a kernel stores: by the output, and its first index.
_STORED = re.compile(r"output (\d+)\[(\d+), ")


@dataclasses.dataclass(frozen=True)
class Span:
    """A piece of work, in logical time.

    Attributes:
      device: who does it.
      cta: which of its CTAs; of what is sent and received that of whoever copies it.
      lane: one of `LANES`.
      shard: whose rows it is; for "receives" from whom they come, for "sends" to whom they go.
      start, end: scheduler steps of the emulator.
    """

    device: int
    cta: int
    lane: str
    shard: int
    start: int
    end: int


def spans_of(events: Iterable[Event], op: str, devices: int) -> list[Span]:
    """The spans in one launch of an operation of `LANES`.

    A wgmma does not know whose rows it multiplies; the store of the tile that follows it does. So a tile lasts from a
    thread's first wgmma after its last store to its next store. Of a tile to which parts of peers are added that is
    from the end of its last wgmma on.

    Args:
      events: of `overlap.emulation.emulate(record=True)`.
      op: the operation.
      devices: how many.
    """
    spans = []
    tiles: dict[tuple[int, int, str], tuple[int, int]] = {}  # start of the first wgmma, end of the last one
    for event in sorted(events, key=lambda event: event.start):
        thread = event.device, event.cta, event.thread
        if event.kind == "remote_copy" and event.peer is not None:
            spans += _travel(event, event.peer)
        elif event.kind == "wgmma":
            start, _ = tiles.get(thread, (event.start, 0))
            tiles[thread] = start, event.end
        elif event.kind == "copy" and thread in tiles and (stored := _STORED.match(event.target)):
            start, end = tiles.pop(thread)
            output, index = map(int, stored.groups())
            if op == "all_gather_lhs_matmul":  # [shards, m_shard, n]
                spans.append(Span(event.device, event.cta, "multiplies", index, start, event.start))
                continue
            # The own block, or parts of the peers' in steps: [steps, boxes, …].
            whose = event.device if output == 0 else (event.device + 1 + index) % devices
            end = end if output == 0 else event.start
            spans.append(Span(event.device, event.cta, "multiplies", whose, start, end))
            if output == 0:
                spans.append(Span(event.device, event.cta, "adds", whose, end, event.start))
    return spans


def _travel(event: Event, peer: int) -> Iterator[Span]:
    """Both ends of a copy to the peer, or from it."""
    is_push = event.target.endswith(f"of device {peer} (gmem)")
    sender, receiver = (event.device, peer) if is_push else (peer, event.device)
    yield Span(receiver, event.cta, "receives", sender, event.start, event.end)
    yield Span(sender, event.cta, "sends", receiver, event.start, event.end)
