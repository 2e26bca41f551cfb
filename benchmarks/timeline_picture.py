"""Draws the file of `benchmarks.timeline` as SVG."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from benchmarks.profile_kinds import kind_of


class Theme(NamedTuple):
    """The colors of a picture. It has no background of its own."""

    text: str
    quiet: str
    lane: str
    tensor_cores: str
    nvlink: str
    on_bar: str


THEMES = {
    "light": Theme("#1f2328", "#59636e", "#e4e8ed", "#1a7f37", "#8250df", "#ffffff"),
    "dark": Theme("#f0f6fc", "#9198a1", "#2a313c", "#3fb950", "#b184f5", "#0d1117"),
}
_WIDTH, _HEIGHT, _LEFT, _RIGHT = 700, 352, 150, 690
# The upper edges of the lanes; the heading of a side stands above its lanes.
_XLA, _FUSED, _LANE, _GAP = 36, 176, 42, 6
_AXIS = _FUSED + 2 * _LANE + _GAP + 14
# Words in a bar, and the gain beside the fused kernel, need this much room.
_ROOM = 100


def svg(content: dict[str, Any], theme: str) -> str:
    """Returns the picture of GPU 0: two lanes for XLA, and below them two lanes for the fused kernel."""
    xla_us = max(start + us for _, start, us in content["xla"][0])
    fused_us = max(content["fused"][0]["us"], *content["fused_us"][:1], 0)
    about = f"Timeline of one GPU. XLA: {xla_us:.0f} µs, the fused kernel: {fused_us:.0f} µs."
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" '
        'role="img" font-family="-apple-system, Segoe UI, Helvetica, Arial, sans-serif">\n'
        f"<title>{about}</title>\n" + "\n".join(_lines(content, THEMES[theme], xla_us, fused_us)) + "\n</svg>\n"
    )


def _lines(content: dict[str, Any], colors: Theme, xla_us: float, fused_us: float) -> Iterator[str]:
    per_us = (_RIGHT - _LEFT) / max(xla_us, fused_us)
    lanes = ("tensor cores", colors.tensor_cores), ("NVLink", colors.nvlink)
    for top, heading, end_us in (
        (_XLA, "XLA: gather, then multiply", xla_us),
        (_FUSED, "overlap: one kernel", fused_us),
    ):
        yield _text(4, top - 12, heading, colors.text, size=22, bold=True)
        yield _text(
            _LEFT + end_us * per_us, top - 12, f"{end_us:.0f} µs", colors.text, size=22, anchor="end", bold=True
        )
        for index, (lane, _) in enumerate(lanes):
            y = top + index * (_LANE + _GAP)
            yield _text(_LEFT - 10, y + 28, lane, colors.text, anchor="end")
            yield _rect(_LEFT, _LEFT + end_us * per_us, y, colors.lane)
    idle_us = xla_us
    for name, start, us in content["xla"][0]:
        kind = kind_of(name)
        if kind not in ("products", "gather", "communication"):
            continue
        index = 0 if kind == "products" else 1
        y, left, right = _XLA + index * (_LANE + _GAP), _LEFT + start * per_us, _LEFT + (start + us) * per_us
        yield _rect(left, right, y, lanes[index][1])
        if right - left >= _ROOM:
            yield _text((left + right) / 2, y + 28, ("cuBLAS", "NCCL")[index], colors.on_bar, anchor="middle")
        if kind == "products":
            idle_us = min(idle_us, start)
    if idle_us * per_us >= _ROOM:
        yield _text(_LEFT + idle_us * per_us / 2, _XLA + 28, "idle", colors.quiet, anchor="middle")
    marks = content["fused"][0]
    for index, work in enumerate(("multiply", "copy")):
        yield _area(marks[work], marks["us"] * per_us, _FUSED + index * (_LANE + _GAP), lanes[index][1])
    gain_x = _LEFT + fused_us * per_us + 16
    if _RIGHT - gain_x >= _ROOM:
        yield _text(gain_x, _FUSED + 46, f"{xla_us / fused_us:.1f}×", colors.tensor_cores, size=44, bold=True)
        yield _text(gain_x, _FUSED + 76, "as fast", colors.text)
    yield from _axis(max(xla_us, fused_us), per_us, colors)
    m, n, k = content["sizes"]
    gpus, device = len(content["xla"]), content["facts"]["devices"].partition(" x ")[2].split(" (")[0]
    words = f"{gpus} × {device.removeprefix('NVIDIA ')}, bf16, {gpus * m} × {n} × {k}; one GPU is shown"
    if not content["measured"]:
        words = "NOT MEASURED: from the emulator, or made up for a test"
    yield _text(4, _HEIGHT - 8, words, colors.quiet, size=17)


def _axis(end_us: float, per_us: float, colors: Theme) -> Iterator[str]:
    step = next(step for step in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000) if end_us / step <= 6)
    yield f'<path d="M{_LEFT} {_AXIS}H{_RIGHT}" stroke="{colors.quiet}"/>'
    for us in range(0, int(end_us) + 1, step):
        yield f'<path d="M{_LEFT + us * per_us:.1f} {_AXIS}v6" stroke="{colors.quiet}"/>'
        label = f"{us} µs" if us + step > end_us else str(us)
        yield _text(_LEFT + us * per_us, _AXIS + 24, label, colors.quiet, size=17, anchor="middle")


def _text(
    x: float, y: float, words: str, color: str, *, size: int = 20, anchor: str = "start", bold: bool = False
) -> str:
    weight = ' font-weight="700"' if bold else ""
    place = f'x="{x:.1f}" y="{y}" font-size="{size}" fill="{color}" text-anchor="{anchor}"{weight}'
    return f"<text {place}>{html.escape(words)}</text>"


def _rect(left: float, right: float, y: float, color: str) -> str:
    return f'<rect x="{left:.1f}" y="{y}" width="{right - left:.1f}" height="{_LANE}" fill="{color}"/>'


def _area(shares: Sequence[int], width: float, y: float, color: str) -> str:
    """A lane that is filled up to a share, in percent, at each time."""
    step, path = width / len(shares), f"M{_LEFT} {y + _LANE}"
    for index, share in enumerate(shares):
        path += f"V{y + _LANE * (1 - share / 100):.1f}H{_LEFT + (index + 1) * step:.1f}"
    return f'<path d="{path}V{y + _LANE}Z" fill="{color}"/>'
