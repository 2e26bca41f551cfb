r"""Draws time and roof's time / time against the number of devices, or XLA's time / time against the number of rows.

These commands draw one picture of each kind:

    python3 -m benchmarks.plot benchmarks/results/all_gather_lhs_matmul-h200-[24]-one_process.csv --out devices.png
    python3 -m benchmarks.plot --against m --methods fused \
        benchmarks/results/all_gather_lhs_matmul-h200-[24]-one_process.csv --out rows.png
"""

from __future__ import annotations

import csv
import importlib.util
import pathlib
import sys
from collections.abc import Sequence

from benchmarks import command
from overlap.cli import ending
from overlap.cli.arguments import WrongArguments, new_file, old_file
from overlap.cli.picture import write_whole


def read(paths: Sequence[str | pathlib.Path]) -> list[dict[str, str]]:
    """Reads the rows with times from all files. Of several rows for one method and problem, the last row counts.

    Files with the times of single rounds are ignored.
    """
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    for path in paths:
        with pathlib.Path(path).open() as file:
            table = csv.DictReader(file)
            if "loop_us_p10" in (table.fieldnames or ()):
                rows |= {(*_problem(row), row["devices"], row["method"]): row for row in table if row["loop_us"]}
    return list(rows.values())


def _problem(row: dict[str, str]) -> tuple[str, ...]:
    # Old files have no layout; there it is "nn".
    return (row["op"], row["shape"], row["dtype"], row.get("layout", "nn"))


def draw_rows(rows: Sequence[dict[str, str]], out: pathlib.Path) -> None:
    """Draws XLA's time / the method's time against the number of rows of all devices together.

    The picture has a panel for each number of devices, with a line for each method and (n, k).
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines: dict[int, dict[str, list[tuple[int, float]]]] = {}
    for row in rows:
        if row["method"] == "xla" or not row["xla_over_this"]:
            continue
        (m, n, k), devices = (int(size) for size in row["shape"].split("x")), int(row["devices"])
        name = f"{n} x {k}" if row["method"] == "fused" else f"{row['method']} {n} x {k}"
        lines.setdefault(devices, {}).setdefault(name, []).append((m * devices, float(row["xla_over_this"])))
    figure, panels = pyplot.subplots(1, len(lines), figsize=(6.2 * len(lines), 4.4), squeeze=False, sharey=True)
    names = sorted({name for of_devices in lines.values() for name in of_devices})
    for panel, devices in zip(panels[0], sorted(lines), strict=True):
        for index, name in enumerate(names):
            points, line = sorted(lines[devices].get(name, [])), "-" if index < 10 else "--"  # There are 10 colors.
            panel.plot([m for m, _ in points], [gain for _, gain in points], line, marker="o", markersize=4, label=name)
        panel.set_xscale("log", base=2)
        panel.set(title=f"{devices} devices", xlabel="rows of all devices")
        panel.axhline(1.0, color="grey", linewidth=0.8)
    panels[0][0].set_ylabel("XLA's time / this")
    panels[0][0].legend(title="n x k per shard", fontsize=7)
    figure.tight_layout()
    write_whole(out, lambda temporary: figure.savefig(temporary, dpi=130, format=out.suffix[1:]))


def draw(rows: Sequence[dict[str, str]], out: pathlib.Path) -> None:
    """Draws the time and, below it, the roof's time / the time, against the number of devices.

    Each problem has a column of two panels. Times are in microseconds per call.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    problems = sorted({_problem(row) for row in rows})
    methods = list(dict.fromkeys(row["method"] for row in rows))
    figure, panels = pyplot.subplots(2, len(problems), figsize=(4.2 * len(problems), 6.4), squeeze=False, sharex=True)
    for column, problem in enumerate(problems):
        above, below = panels[0][column], panels[1][column]
        for method in methods:
            own = [row for row in rows if _problem(row) == problem and row["method"] == method]
            own.sort(key=lambda row: int(row["devices"]))
            if not own:
                continue
            devices = [int(row["devices"]) for row in own]
            times, low, high = ([float(row[f"loop_us{end}"]) for row in own] for end in ("", "_p10", "_p90"))
            spread = [
                [time - least for time, least in zip(times, low, strict=True)],
                [most - time for time, most in zip(times, high, strict=True)],
            ]
            above.errorbar(devices, times, yerr=spread, marker="o", markersize=4, capsize=2, label=method)
            with_roof = [row for row in own if row["roof_over_this"]]
            below.plot(
                [int(row["devices"]) for row in with_roof],
                [float(row["roof_over_this"]) for row in with_roof],
                marker="o",
                markersize=4,
            )
        ticks = sorted({int(row["devices"]) for row in rows})
        above.set(title=f"{problem[0]}\n(m, n, k) per shard {' '.join(problem[1:])}", ylim=(0, None))
        below.set(xlabel="devices", xticks=ticks, ylim=(0, 1.1))
        below.axhline(1.0, color="grey", linewidth=0.8)
    panels[0][0].set_ylabel("µs per call, in a device loop")
    panels[1][0].set_ylabel("fraction of the roof")
    panels[0][0].legend()
    figure.tight_layout()
    write_whole(out, lambda temporary: figure.savefig(temporary, dpi=130, format=out.suffix[1:]))


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.tool_parser("plot", __doc__)
    parser.add_argument("files", nargs="+", type=old_file, help="CSV files of benchmarks.all_gather_matmul")
    parser.add_argument("--against", choices=("devices", "m"), default="devices", help="what the x axis shows")
    parser.add_argument("--methods", help="the methods to draw, separated by commas (default: all)")
    parser.add_argument("--out", type=new_file, required=True, help="the picture to write, .png or .svg")
    arguments = parser.parse_args(argv)
    if arguments.out.suffix not in (".png", ".svg"):
        raise WrongArguments(f"`--out` must end in .png or .svg, got {arguments.out}")
    if importlib.util.find_spec("matplotlib") is None:
        raise WrongArguments("plot needs matplotlib: pip install 'overlap[bench]'")
    rows = read(arguments.files)
    if arguments.methods:
        # The rows of the other methods have their ratios to XLA, so XLA's own rows are not needed.
        rows = [row for row in rows if row["method"] in arguments.methods.split(",")]
    if not rows:
        raise WrongArguments(
            "none of the files holds a time of these methods: pass the CSV files that a benchmark wrote with --out"
        )
    if arguments.against == "m" and not any(row["method"] != "xla" and row["xla_over_this"] for row in rows):
        raise WrongArguments("none of the files compares a method to XLA: pass files of a run with --methods fused,xla")
    (draw if arguments.against == "devices" else draw_rows)(rows, arguments.out)
    print(f"wrote {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(ending.run(main))
