"""Turns the emulator's events into spans of work: what a device multiplied, added, received or sent, and when."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator

from overlap.emulation import Event

LANES = {
    "all_gather_lhs_matmul": ("multiplies", "receives", "sends"),
    "matmul_reduce_scatter": ("multiplies", "adds", "receives", "sends"),
}
# How the emulator names a tile that a kernel stores: number of the output, and first index.
_STORED = re.compile(r"output (\d+)\[(\d+), ")


@dataclasses.dataclass(frozen=True)
class Span:
    """A part of a device's work, in the emulator's logical time.

    Attributes:
      device: the device that works.
      cta: which CTA of the device; for "receives" and "sends", the CTA that copies, on either device.
      lane: one of `LANES`.
      shard: the device whose rows these are; for "receives" the sender, for "sends" the receiver.
      start, end: scheduler steps of the emulator.
    """

    device: int
    cta: int
    lane: str
    shard: int
    start: int
    end: int


def spans_of(events: Iterable[Event], op: str, devices: int) -> list[Span]:
    """The spans of one launch.

    The event of a wgmma does not say whose rows it multiplies, but the store of its tile does. So a tile begins with
    the thread's first wgmma after a store, and ends with the thread's next store. If parts of peers are added to the
    tile, the adding begins with the end of its last wgmma.

    On Blackwell another thread stores the tile, while the next tile is multiplied. There, all tiles of a CTA have the
    same number of stores, in the order of the tiles.

    Args:
      events: the record of `overlap.emulation.emulate(record=True)`.
      op: the operation, one of `LANES`.
      devices: how many devices.
    """
    spans = []
    tiles: dict[tuple[int, int, str], tuple[int, int]] = {}  # Start of the first wgmma, end of the last wgmma.
    in_order = sorted(events, key=lambda event: event.start)
    for (first, last), stored in _tensor_core_tiles(in_order):
        spans += _tile(first.start, last.end, stored, op, devices)
    for event in in_order:
        thread = event.device, event.cta, event.thread
        if event.kind == "remote_copy" and event.peer is not None:
            spans += _travel(event, event.peer)
        elif event.kind == "wgmma":
            start, _ = tiles.get(thread, (event.start, 0))
            tiles[thread] = start, event.end
        elif event.kind == "copy" and thread in tiles and _STORED.match(event.target):
            spans += _tile(*tiles.pop(thread), event, op, devices)
    return spans


def _tile(start: int, end: int, stored: Event, op: str, devices: int) -> Iterator[Span]:
    """Yields the spans of a tile that was multiplied from `start` to `end`, and then stored by the event `stored`."""
    match = _STORED.match(stored.target)
    assert match is not None
    device, cta, (output, index) = stored.device, stored.cta, map(int, match.groups())
    if op == "all_gather_lhs_matmul":  # [shards, m_shard, n]
        yield Span(device, cta, "multiplies", index, start, stored.start)
        return
    # Output 0 is the device's own block. The other output has the parts for peers: [steps, boxes, …].
    whose = device if output == 0 else (device + 1 + index) % devices
    yield Span(device, cta, "multiplies", whose, start, end if output == 0 else stored.start)
    if output == 0:
        yield Span(device, cta, "adds", whose, end, stored.start)


def _tensor_core_tiles(events: Iterable[Event]) -> Iterator[tuple[tuple[Event, Event], Event]]:
    """Yields for each tile that Blackwell's tensor cores multiplied ((first product, last product), first store)."""
    products: dict[tuple[int, int], list[list[Event]]] = {}
    stores: dict[tuple[int, int], list[Event]] = {}
    for event in events:
        cta = event.device, event.cta
        if event.kind == "mma":
            tiles = products.setdefault(cta, [])
            # Two consecutive tiles have different accumulators.
            if tiles and tiles[-1][-1].target == event.target:
                tiles[-1].append(event)
            else:
                tiles.append([event])
        elif event.kind == "copy" and not event.thread.count(".") and _STORED.match(event.target):
            stores.setdefault(cta, []).append(event)
    for cta, tiles in products.items():
        each = len(stores[cta]) // len(tiles)
        for number, tile in enumerate(tiles):
            yield (tile[0], tile[-1]), stores[cta][number * each]


def _travel(event: Event, peer: int) -> Iterator[Span]:
    """Yields the two spans of a copy between a device and its peer: one on the sender, one on the receiver."""
    is_push = f" of device {peer} (gmem" in event.target
    sender, receiver = (event.device, peer) if is_push else (peer, event.device)
    yield Span(receiver, event.cta, "receives", sender, event.start, event.end)
    yield Span(sender, event.cta, "sends", receiver, event.start, event.end)
