"""The files of `python -m overlap trace`: a trace for Perfetto, and a picture."""

from __future__ import annotations

import gzip
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from overlap.cli.picture import write_whole
from overlap.primitives.marks import Work
from overlap.tuning.timeline import Span, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LABELS = {
    Work.AWAIT_PEERS: "wait for peers",
    Work.AWAIT_ROWS: "wait for rows",
    Work.AWAIT_OPERANDS: "wait for operands",
    Work.AWAIT_TILE: "wait for a tile",
    Work.LOAD: "load",
    Work.MULTIPLY: "multiply",
    Work.STORE: "store",
    Work.COPY: "copy between GPUs",
    Work.FORWARD: "forward",
    Work.LEAVE: "take leave",
}
_COLORS = {
    Work.AWAIT_PEERS: "#d62728",
    Work.AWAIT_ROWS: "#ff9896",
    Work.AWAIT_OPERANDS: "#f7c6c5",
    Work.AWAIT_TILE: "#c49c94",
    Work.LOAD: "#1f77b4",
    Work.MULTIPLY: "#2ca02c",
    Work.STORE: "#ff7f0e",
    Work.COPY: "#9467bd",
    Work.FORWARD: "#17becf",
    Work.LEAVE: "#bdbdbd",
}
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
        "traceEvents": [event for first, timeline in _numbered(timelines) for event in _events(first, timeline)],
    }
    data = json.dumps(content, separators=(",", ":")).encode()

    def write(temporary: str) -> None:
        # Leave out the time of day, so that the same trace gives the same bytes.
        pathlib.Path(temporary).write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)

    write_whole(path, write)


def _numbered(timelines: Sequence[Timeline]) -> Iterator[tuple[int, Timeline]]:
    """Yields (number of the first process in the trace, timeline) for each timeline."""
    first = 1
    for timeline in timelines:
        yield first, timeline
        first += timeline.devices


def _events(first: int, timeline: Timeline) -> Iterator[dict[str, Any]]:
    kind = "device" if timeline.unit == "steps" else "GPU"
    for device in range(timeline.devices):
        yield _name("process_name", first + device, 0, f"{kind} {device}: {timeline.kernel}")
    roles = list(dict.fromkeys(span.role for span in timeline.spans))
    assert len(roles) <= _MOST_ROLES
    named = set()
    for span in timeline.spans:
        process, thread = first + span.device, 1 + span.cta * _MOST_ROLES + roles.index(span.role)
        if (process, thread) not in named:
            named.add((process, thread))
            yield _name("thread_name", process, thread, f"CTA {span.cta} {span.role}")
        yield {
            "ph": "X",
            "name": LABELS[span.work],
            "cat": span.role.split()[0],
            "pid": process,
            "tid": thread,
            "ts": round(span.start, 4),
            "dur": round(span.end - span.start, 4),
            "args": {"chunk" if span.role == "communicator" else "tile": span.number, "shard_step": span.shard},
        }


def _name(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


def draw(timeline: Timeline, path: pathlib.Path, title: str) -> None:
    """Writes a picture (PNG): a panel for each device, with a band for each role, with a line for each CTA."""
    # Do not use pyplot, which needs a display and keeps global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    roles = list(dict.fromkeys(span.role for span in timeline.spans))
    figure = Figure(figsize=(16, 1.4 + 0.55 * len(roles) * timeline.devices), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(timeline.devices, 1, sharex=True, squeeze=False)[:, 0]
    for device, axis in enumerate(axes):
        _draw_device(axis, [span for span in timeline.spans if span.device == device], roles)
        axis.set_ylabel(f"{'device' if timeline.unit == 'steps' else 'GPU'} {device}", fontweight="bold")
        axis.set_xlim(0, timeline.end)
    unit = "steps of the emulator (no times)" if timeline.unit == "steps" else "µs"
    axes[-1].set_xlabel(f"{unit}; one line for each CTA")
    used = [work for work in LABELS if any(span.work == work for span in timeline.spans)]
    legend = [Patch(facecolor=_COLORS[work], label=LABELS[work]) for work in used]
    figure.legend(handles=legend, loc="outside lower center", ncols=len(used), frameon=False, fontsize=8)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    write_whole(path, lambda temporary: figure.savefig(temporary, dpi=130, format="png"))


def _draw_device(axis: Axes, spans: Sequence[Span], roles: Sequence[str]) -> None:
    from matplotlib.collections import PolyCollection

    ctas = 1 + max((span.cta for span in spans), default=0)
    height = 0.9 / ctas
    for work, color in _COLORS.items():
        boxes = []
        for span in spans:
            if span.work == work:
                top = -roles.index(span.role) - 0.05 - span.cta * height
                low, high = top - height, top
                boxes.append([(span.start, low), (span.start, high), (span.end, high), (span.end, low)])
        # A white line separates each span from the next, if there is room.
        line = 0.3 if ctas <= _ROOMY_CTAS else 0
        collection = PolyCollection(boxes, facecolors=color, edgecolors="white", linewidths=line)
        axis.add_collection(collection, autolim=False)
    axis.set_yticks([-index - 0.5 for index in range(len(roles))], roles)
    axis.set_ylim(-len(roles), 0)
    axis.tick_params(axis="y", length=0)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
