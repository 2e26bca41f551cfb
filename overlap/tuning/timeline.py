"""Turns the marks that the roles of kernels make (`overlap.primitives.marks`) into spans of work with a common time.

Three clocks are combined:

- Each SM counts cycles, exactly.
- All SMs of a GPU share a clock of nanoseconds, which may tick coarsely. A straight line through all marks of a CTA
  turns cycles into nanoseconds more finely than this clock ticks.
- `clocks.offsets` measures how far the clocks of the GPUs are apart.

In the emulator, all devices count the steps of the scheduler.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from overlap.primitives import marks
from overlap.primitives.marks import Work
from overlap.tuning.clocks import Offset

_CLOCK = 1
_TIME = 2
# Cycles per nanosecond of a GPU's SMs, used if a kernel is too short to measure it.
_USUAL_RATE = 1.7
# An array for each (CTA, row) of a device. Each role of a CTA writes one row.
type _ByLane = dict[tuple[int, int], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Span:
    """A part of the work of one role of one CTA.

    Attributes:
      device: the device's position on the mesh.
      cta: the CTA's number on the device.
      role: the name of the role, such as "producer" or "compute 0".
      work: what the role did.
      shard: the step of the shard on which the role worked; step 0 is the device's own shard.
      number: the number of the tile or, for the communicator, of the chunk.
      start, end: microseconds since the first mark of any device; in the emulator, steps of the scheduler.
    """

    device: int
    cta: int
    role: str
    work: Work
    shard: int
    number: int
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class Timeline:
    """The work of all roles in one launch of a kernel.

    Attributes:
      kernel: the name of the kernel.
      devices: how many devices.
      unit: of all times, "µs" or "steps".
      spans: ordered by device, CTA and role, and by time within a role.
      missing: how many marks were lost because there was no room for them.
      clock_error: the largest error between the times of two devices, in `unit`.
      origin: the first device's clock at time 0, in nanoseconds; in the emulator, in steps of the scheduler.
    """

    kernel: str
    devices: int
    unit: str
    spans: list[Span]
    missing: int
    clock_error: float
    origin: int = 0

    @functools.cached_property
    def end(self) -> float:
        """The time when the last span ended."""
        return max((span.end for span in self.spans), default=0.0)

    def share(self, device: int, role: str, work: Work) -> float:
        """The fraction of the launch that roles of a device spend on one kind of work.

        Args:
          device: the device.
          role: the beginning of the roles' names: "compute" stands for all compute warpgroups.
          work: the work.
        """
        of_role = [span for span in self.spans if span.device == device and span.role.startswith(role)]
        lanes = {(span.cta, span.role) for span in of_role}
        whole = self.end * len(lanes)
        return sum(span.end - span.start for span in of_role if span.work == work) / whole if whole else 0.0


def timeline(name: str, roles: dict[int, str], entries: np.ndarray, offsets: Sequence[Offset]) -> Timeline:
    """Makes the timeline of one launch.

    Args:
      name: the name of the kernel.
      roles: the name of the role that writes each row of `entries`.
      entries: int32 [devices * CTAs, rows, entries, words], as the devices wrote them.
      offsets: the clock offset of each device.

    Raises:
      RuntimeError: a role has made no marks, so the kernel was not recorded.
    """
    words = np.ascontiguousarray(entries).view(np.uint32).reshape(len(offsets), -1, *entries.shape[1:])
    capacity = words.shape[3] - 2
    times_ns = np.ascontiguousarray(words[..., _TIME:]).view(np.int64)[..., 0]
    emulated = not times_ns[:, :, sorted(roles), 1].any()
    # Nanoseconds since 1970 do not fit into a float: subtract the first one as an integer.
    first_ns = times_ns[0, 0, min(roles), 1]
    spans: list[Span] = []
    missing = 0
    for device, of_device in enumerate(words):
        counts = of_device[:, :, 0, 0].astype(np.int64)
        if not counts[:, sorted(roles)].all():
            raise RuntimeError(f"device {device} has roles without marks in {name}: was the kernel recorded?")
        missing += int(np.maximum(counts - capacity, 0)[:, sorted(roles)].sum())
        made = {
            (cta, row): of_device[cta, row, 1 : 1 + min(int(counts[cta, row]), capacity)]
            for cta in range(of_device.shape[0])
            for row in sorted(roles)
        }
        times = _steps(made) if emulated else _nanoseconds(made, int(first_ns), offsets[device].ns)
        for (cta, row), lane in made.items():
            spans += _spans(device, cta, roles[row], lane[:, 0], times[cta, row])
    begin = min(span.start for span in spans)
    scale = 1.0 if emulated else 1e-3
    moved = [
        dataclasses.replace(span, start=(span.start - begin) * scale, end=(span.end - begin) * scale) for span in spans
    ]
    error = 0.0 if emulated else max(offset.error_ns for offset in offsets) * scale
    origin = round(begin) + (0 if emulated else int(first_ns))
    return Timeline(name, len(offsets), "steps" if emulated else "µs", moved, missing, error, origin)


def _spans(device: int, cta: int, role: str, what: np.ndarray, times: np.ndarray) -> list[Span]:
    """Makes the spans of a role: each begins at a mark and ends at the next mark. Idle time makes no span."""
    spans = []
    for word, start, end in zip(what[:-1], times[:-1], times[1:], strict=True):
        work, shard, number = marks.unpack(int(word))
        if work != Work.IDLE:
            spans.append(Span(device, cta, role, work, shard, number, float(start), float(end)))
    return spans


def _steps(made: _ByLane) -> _ByLane:
    return {place: lane[:, _CLOCK].astype(np.float64) for place, lane in made.items()}


def _nanoseconds(made: _ByLane, first_ns: int, ahead_ns: float) -> _ByLane:
    """The time of each mark of a device, in nanoseconds after `first_ns`, by the first device's clock."""
    ctas = sorted({cta for cta, _ in made})
    cycles: dict[int, np.ndarray] = {}
    ns: dict[int, np.ndarray] = {}
    for cta in ctas:
        lanes = [lane for (of, _), lane in made.items() if of == cta]
        clock = np.concatenate([lane[:, _CLOCK] for lane in lanes])
        # The cycle counter has 32 bits and wraps every few seconds. Signed differences are right across the wrap.
        cycles[cta] = (clock - clock[0]).view(np.int32).astype(np.float64)
        times_ns = np.concatenate([np.ascontiguousarray(lane[:, _TIME:]).view(np.int64)[:, 0] for lane in lanes])
        ns[cta] = (times_ns - first_ns).astype(np.float64)
    # All lines have the same slope, since all SMs of a GPU have the same clock rate. Each CTA has its own offset.
    x = np.concatenate([cycles[cta] - cycles[cta].mean() for cta in ctas])
    y = np.concatenate([ns[cta] - ns[cta].mean() for cta in ctas])
    slope = float(x @ y / (x @ x)) if x.any() and y.any() else 1 / _USUAL_RATE
    times: _ByLane = {}
    for cta in ctas:
        fitted = iter(slope * (cycles[cta] - cycles[cta].mean()) + ns[cta].mean() - ahead_ns)
        for (of, row), lane in made.items():
            if of == cta:
                times[of, row] = np.array([next(fitted) for _ in lane])
    return times
