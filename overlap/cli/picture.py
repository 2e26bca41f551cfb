"""Draws what each device multiplied, added, received and sent, and when, from a run of the emulator."""

from __future__ import annotations

import os
import pathlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from overlap.cli.spans import LANES, Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes

type Color = tuple[float, float, float, float]


def draw(panels: Mapping[str, Sequence[Span]], path: pathlib.Path, *, devices: int, title: str) -> None:
    """Writes the picture.

    Args:
      panels: the spans of each operation, by the operation's name; operations are drawn side by side.
      path: the PNG file to write. It appears only when it is complete.
      devices: how many devices.
      title: the text above the picture.
    """
    # Do not use pyplot, which needs a display and keeps global state.
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    colors = [colormaps["tab10"](shard % 10) for shard in range(devices)]
    figure = Figure(figsize=(16, 1.6 + 1.6 * devices), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(devices, len(panels), sharex="col", squeeze=False)
    for column, (op, spans) in enumerate(panels.items()):
        axes[0, column].set_title(op, loc="left", fontsize=10)
        for device, axis in enumerate(axes[:, column]):
            _draw_device(axis, [span for span in spans if span.device == device], LANES[op], colors)
            if not column:
                axis.set_ylabel(f"device {device}", fontweight="bold")
    figure.supxlabel(
        "logical time of the emulator (steps, not seconds). One bar per CTA. Colour: the device whose rows they are; "
        "in “receives” the device they come from, in “sends” the device they go to",
        fontsize=10,
    )
    legend = [Patch(facecolor=color, label=f"rows of device {shard}") for shard, color in enumerate(colors)]
    figure.legend(handles=legend, loc="outside upper right", ncols=min(devices, 8), frameon=False)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    write_whole(path, lambda temporary: figure.savefig(temporary, dpi=130, format="png"))


def _draw_device(axis: Axes, spans: Sequence[Span], lanes: Sequence[str], colors: Sequence[Color]) -> None:
    ctas = 1 + max((span.cta for span in spans), default=0)
    for span in spans:
        # One thin bar for each CTA inside the lane shows how far each CTA is.
        bottom = -lanes.index(span.lane) - 0.9 + 0.8 * span.cta / ctas
        axis.broken_barh(
            [(span.start, max(span.end - span.start, 0.5))],
            (bottom, 0.8 / ctas),
            facecolor=colors[span.shard],
            linewidth=0,
        )
    axis.set_yticks([-index - 0.5 for index in range(len(lanes))], lanes)
    axis.set_ylim(-len(lanes), 0)
    axis.tick_params(axis="y", length=0)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def write_whole(path: pathlib.Path, write: Callable[[str], object]) -> None:
    """Calls `write` with a temporary file's name and renames the file to `path`, so `path` is never half-written."""
    path = path.resolve()  # If `path` is a link, replace the file that it points to.
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    os.close(handle)
    try:
        write(temporary)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)  # mkstemp has made it private.
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
