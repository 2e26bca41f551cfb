"""The files of `python -m overlap trace` and `demo`: a trace for Perfetto, and a picture."""

from __future__ import annotations

import gzip
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from overlap.primitives.marks import Work
from overlap.tuning.timeline import Span, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# How many marks each role has room for: more than in the largest problems of the benchmarks.
CAPACITY = 2048
# The words and the colour for each kind of work.
LABELS = {
    Work.AWAIT_PEERS: ("wait for peers", "#d62728"),
    Work.AWAIT_ROWS: ("wait for rows", "#ff9896"),
    Work.AWAIT_OPERANDS: ("wait for operands", "#f7c6c5"),
    Work.AWAIT_TILE: ("wait for a tile", "#c49c94"),
    Work.LOAD: ("load", "#1f77b4"),
    Work.MULTIPLY: ("multiply", "#2ca02c"),
    Work.STORE: ("store", "#ff7f0e"),
    Work.COPY: ("copy between GPUs", "#9467bd"),
    Work.FORWARD: ("forward", "#17becf"),
    Work.LEAVE: ("take leave", "#bdbdbd"),
}
_OF_A_SHARD = Work.LOAD, Work.MULTIPLY, Work.STORE, Work.FORWARD
_WAITS = "#eeeeee"
_MOST_ROLES = 8  # The most roles that one CTA has.
# With at most this many CTAs, the picture separates spans by lines.
_ROOMY_CTAS = 16


def write_trace(timelines: Sequence[Timeline], path: pathlib.Path) -> None:
    """Writes a trace in the Trace Event format (JSON), which ui.perfetto.dev opens.

    The trace has a process for each device and kernel, and in it a thread for each role of each CTA. Steps of the
    emulator appear as microseconds.

    Args:
      timelines: the timeline of each kernel.
      path: the file to write; compressed if its name ends with ".gz".
    """
    events: list[dict[str, Any]] = []
    first = 1  # The number of the first process of a kernel.
    for timeline in timelines:
        events += _events(first, timeline)
        first += timeline.devices
    content = {
        "displayTimeUnit": "ns",
        "otherData": {
            timeline.kernel: {
                "unit": timeline.unit,
                "devices": timeline.devices,
                "clock_error": timeline.clock_error,
                "missing_marks": timeline.missing,
            }
            for timeline in timelines
        },
        "traceEvents": events,
    }
    data = json.dumps(content, separators=(",", ":")).encode()
    # Leave out the time of day, so that the same trace gives the same bytes.
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


def _events(first: int, timeline: Timeline) -> Iterator[dict[str, Any]]:
    for device in range(timeline.devices):
        yield _name("process_name", first + device, 0, f"{_kind(timeline)} {device}: {timeline.kernel}")
    roles = list(dict.fromkeys(span.role for span in timeline.spans))
    named = set()
    for span in timeline.spans:
        process = first + span.device
        thread = 1 + span.cta * _MOST_ROLES + roles.index(span.role)
        if (process, thread) not in named:
            named.add((process, thread))
            yield _name("thread_name", process, thread, f"CTA {span.cta} {span.role}")
        yield {
            "ph": "X",
            "name": LABELS[span.work][0],
            "cat": span.role.split()[0],
            "pid": process,
            "tid": thread,
            "ts": round(span.start, 4),
            "dur": round(span.end - span.start, 4),
            "args": {"chunk" if span.role == "communicator" else "tile": span.number, "shard_step": span.shard},
        }


def _name(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


def _kind(timeline: Timeline) -> str:
    return "device" if timeline.unit == "steps" else "GPU"


def draw(timelines: Sequence[Timeline], path: pathlib.Path, title: str, *, by_shard: bool = False) -> None:
    """Writes a picture (PNG): a column for each kernel, a panel for each device, a band for each role.

    A band has a line for each CTA.

    Args:
      timelines: the timeline of each kernel, all on the same devices.
      path: the file to write.
      title: the text above the picture.
      by_shard: show by the colour on which device's rows a role works, not what it does.
    """
    # Do not use pyplot, which needs a display and keeps global state.
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    devices = timelines[0].devices
    shard_colors = [colormaps["tab10"](shard % 10) for shard in range(devices)]

    def color(kernel: str, span: Span) -> Any:
        if not by_shard or span.work == Work.COPY:
            return LABELS[span.work][1]
        # A reduce-scatter begins with the rows of the next device and ends with the device's own rows.
        first = span.device + ("reduce_scatter" in kernel)
        return shard_colors[(first + span.shard) % devices] if span.work in _OF_A_SHARD else _WAITS

    roles = [list(dict.fromkeys(span.role for span in timeline.spans)) for timeline in timelines]
    figure = Figure(figsize=(16, 1.4 + 0.55 * max(map(len, roles)) * devices), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(devices, len(timelines), sharex="col", squeeze=False)
    for column, timeline in enumerate(timelines):
        for device, axis in enumerate(axes[:, column]):
            spans = [span for span in timeline.spans if span.device == device]
            _draw_device(axis, spans, roles[column], [color(timeline.kernel, span) for span in spans])
            axis.set_ylabel(f"{_kind(timeline)} {device}", fontweight="bold")
            axis.set_xlim(0, timeline.end)
        axes[0, column].set_title(timeline.kernel, loc="left", fontsize=10)
        unit = "steps of the emulator (no times)" if timeline.unit == "steps" else "µs"
        axes[-1, column].set_xlabel(f"{unit}; one line for each CTA")
    used = {span.work for timeline in timelines for span in timeline.spans}
    legend = [Patch(facecolor=tint, label=label) for work, (label, tint) in LABELS.items() if work in used]
    if by_shard:
        legend = [Patch(facecolor=tint, label=f"rows of device {shard}") for shard, tint in enumerate(shard_colors)]
        label, tint = LABELS[Work.COPY]
        legend += [Patch(facecolor=tint, label=label), Patch(facecolor=_WAITS, label="waits")]
    figure.legend(handles=legend, loc="outside lower center", ncols=len(legend), frameon=False, fontsize=8)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    figure.savefig(path, dpi=130, format="png")


def _draw_device(axis: Axes, spans: Sequence[Span], roles: Sequence[str], colors: Sequence[Any]) -> None:
    from matplotlib.collections import PolyCollection

    ctas = 1 + max((span.cta for span in spans), default=0)
    height = 0.9 / ctas
    boxes = []
    for span in spans:
        top = -roles.index(span.role) - 0.05 - span.cta * height
        low = top - height
        boxes.append([(span.start, low), (span.start, top), (span.end, top), (span.end, low)])
    # A white line separates each span from the next, if there is room.
    line = 0.3 if ctas <= _ROOMY_CTAS else 0
    axis.add_collection(PolyCollection(boxes, facecolors=colors, edgecolors="white", linewidths=line), autolim=False)
    axis.set_yticks([-index - 0.5 for index in range(len(roles))], roles)
    axis.set_ylim(-len(roles), 0)
    axis.tick_params(axis="y", length=0)
    axis.spines[["top", "right"]].set_visible(False)
