"""Draws the figures of docs/performance.md as SVG: the same bytes for the same results."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from benchmarks import experts
from benchmarks.current import Row, Table, method

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Legible on white and on black.
_GREY = "#808080"
_COLORS = {
    "all_gather_lhs_matmul": "#3b82f6",
    "all_gather_rhs_matmul": "#14b8a6",
    "matmul_reduce_scatter": "#f97316",
    "matmul_all_reduce": "#c026d3",
}
_MARKERS = {2: "o", 4: "^"}
# What `_experts` draws: colors of models, lines of passes, widths of layers, markers of routings.
_OF_MODELS = (*_COLORS.values(), "#84cc16", "#e11d48", "#a16207", "#6366f1")
_OF_PASSES: dict[str, str] = dict(zip(experts.PASSES, ("-", "--"), strict=True))
_OF_LAYERS = {"ours": 1.5, "tokamax": 0.5}
_OF_ROUTINGS = {"balanced": "o", "uniform": "s", "zipf": "^"}
# What `_bars` draws: the sizes on each device, and the color of each method.
_SHARD = "1024x3584x8192"
_OF_BARS = {"xla": "#a3a3a3", "fused": _COLORS["all_gather_lhs_matmul"], "roof": "#14b8a6"}


def drawn(tables: Sequence[Table]) -> dict[str, str]:
    """Returns the figures: by file name, the SVG text."""
    with _style():
        return {
            "bound.svg": _scatter(tables, _bound, _label_bound),
            "rows.svg": _scatter(tables, _rows, _label_rows),
            "devices.svg": _bars(tables),
            "experts.svg": _experts(tables),
        }


def _style() -> AbstractContextManager[None]:
    import matplotlib as mpl

    return mpl.rc_context({
        "svg.hashsalt": "overlap", "svg.fonttype": "none", "font.size": 9, "savefig.transparent": True,
        "text.color": _GREY, "axes.labelcolor": _GREY, "axes.edgecolor": _GREY, "xtick.color": _GREY,
        "ytick.color": _GREY,
    })  # fmt: skip


def _axes() -> Axes:
    from matplotlib.figure import Figure

    return Figure(figsize=(6.4, 4.6), layout="constrained").add_subplot()


def _svg(axes: Axes) -> str:
    axes.spines[["top", "right"]].set_visible(False)
    figure = axes.get_figure(root=True)
    assert figure is not None
    # Below the axes, where it covers no points.
    figure.legend(fontsize=7, frameon=False, loc="outside lower center", ncols=3)
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def _bars(tables: Sequence[Table]) -> str:
    """Draws a call's time against the number of devices, for a shard of a fixed size on each."""
    names: list[str] = []
    times: dict[str, list[float]] = {"xla": [], "fused": [], "roof": []}
    for table in sorted(tables, key=lambda table: (table.device_kind, table.devices)):
        for rows in table.problems():
            is_gather = table.operation == "all_gather_lhs_matmul" and not table.process_each
            found = [row for name in times if (row := method(rows, name))]
            if is_gather and (rows[0]["shape"], rows[0]["layout"]) == (_SHARD, "nn") and len(found) == len(times):
                names.append(f"{table.devices} × {table.device_kind.removeprefix('NVIDIA ').split()[0]}")
                for each, row in zip(times.values(), found, strict=True):
                    each.append(float(row["loop_us"]))
    axes = _axes()
    for number, (name, color) in enumerate(_OF_BARS.items()):
        label = {"xla": "XLA", "roof": "cuBLAS on gathered data"}.get(name, name)
        axes.bar([at + 0.26 * (number - 1) for at in range(len(names))], times[name], 0.24, color=color, label=label)
    axes.set_xticks(range(len(names)), names)
    axes.set(ylabel="µs", title=f"all_gather_lhs_matmul, {_SHARD.replace('x', '×')} bf16 on each GPU")
    return _svg(axes)


def _experts(tables: Sequence[Table]) -> str:
    """Draws what a layer of experts reaches against the tokens of each device, for each model, pass and routing."""
    curves: dict[tuple[str, ...], list[tuple[float, float]]] = {}
    for table in (table for table in tables if table.operation == "experts"):
        gpus = f"{table.devices} × {table.device_kind.removeprefix('NVIDIA ').split()[0]}"
        for rows in table.problems():
            name, _, rest = rows[0]["layout"].partition(", ")
            passed, routing = rest.rsplit(", ", 1)
            if passed in experts.PASSES:
                for how, row in experts.ours_and_rival(rows).items():
                    tokens, flops = experts.of_row(name, passed, int(row["shape"].split("x")[0]), table.devices)
                    point = tokens, flops / float(row["loop_us"]) / 1e6
                    curves.setdefault((name, passed, routing, gpus, how), []).append(point)
    axes = _axes()
    models = sorted({f"{name}, {gpus}" for name, _, _, gpus, _ in curves})
    for (name, passed, routing, gpus, how), points in sorted(curves.items()):
        xs, ys = zip(*sorted(points), strict=True)
        color = _OF_MODELS[models.index(f"{name}, {gpus}") % len(_OF_MODELS)]
        look = {"marker": _OF_ROUTINGS[routing], "color": color, "linewidth": _OF_LAYERS[how], "markersize": 4}
        axes.plot(xs, ys, _OF_PASSES[passed], **look)
    # The legend names each color, line and marker once.
    for number, name in enumerate(models):
        axes.plot([], [], color=_OF_MODELS[number % len(_OF_MODELS)], label=name)
    for passed, line in _OF_PASSES.items():
        axes.plot([], [], line, color=_GREY, label=passed.removeprefix("layer, "))
    for name, width in _OF_LAYERS.items():
        axes.plot([], [], linewidth=width, color=_GREY, label=name)
    for routing in sorted({key[2] for key in curves}):
        axes.plot([], [], _OF_ROUTINGS[routing], color=_GREY, markersize=4, label=f"routing: {routing}")
    axes.set_xscale("log", base=2)
    axes.set(xlabel="tokens of each GPU", ylabel="TFLOP/s of each GPU", ylim=(0, 900), title="A layer of experts")
    return _svg(axes)


def _bound(table: Table, fused: Row, xla: Row) -> tuple[float, float] | None:
    gain, roof = float(fused["xla_over_this"]), fused["roof_over_this"]
    return (gain / float(roof), gain) if roof else None


def _label_bound(axes: Axes) -> None:
    axes.axline((1.0, 1.0), slope=1.0, color=_GREY, linewidth=0.8)
    axes.annotate("free communication", (1.98, 1.94), color=_GREY, fontsize=8)
    axes.set(xlabel="XLA's time / time of the product alone, by cuBLAS", xlim=(1.0, None))


def _rows(table: Table, fused: Row, xla: Row) -> tuple[float, float]:
    rows = int(fused["shape"].split("x")[0])
    return rows * (table.devices if fused["op"] == "all_gather_lhs_matmul" else 1), float(fused["xla_over_this"])


def _label_rows(axes: Axes) -> None:
    axes.set_xscale("log", base=2)
    axes.set(xlabel="rows of the product (m)")


def _scatter(
    tables: Sequence[Table],
    point: Callable[[Table, Row, Row], tuple[float, float] | None],
    label: Callable[[Axes], None],
) -> str:
    """Draws XLA / fused of all collectives. `point` places a problem, `label` sets the axis of x."""
    axes = _axes()
    for operation, color in _COLORS.items():
        for devices, marker in _MARKERS.items():
            found = [
                point(table, fused, xla)
                for table in tables
                if table.operation.startswith(operation) and table.devices == devices
                for problem in table.problems()
                if (fused := method(problem, "fused")) and (xla := method(problem, "xla"))
            ]
            xs, ys = zip(*(each for each in found if each), strict=True) if any(found) else ((), ())
            if xs:
                name = f"{operation}, {devices} GPUs"
                axes.plot(xs, ys, marker, color=color, markersize=4.5, alpha=0.75, markeredgewidth=0, label=name)
    axes.axhline(1.0, color=_GREY, linewidth=0.8, linestyle="--")
    axes.set_ylabel("XLA's time / fused")
    label(axes)
    return _svg(axes)
