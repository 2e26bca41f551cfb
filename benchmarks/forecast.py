"""Forecasts what a B200 should reach. Nothing here has run on a B200.

    python -m benchmarks.forecast
    python -m benchmarks.forecast --csv forecast.csv

This command needs no GPU. First the command forecasts the ladder of matmul kernels for Hopper (overlap/kernels/ladder),
and prints how far the forecast is from the measurements on an H200. Errors of that size must be expected in the tables
for the B200. No figure is fitted to Blackwell.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks.forecast_tables import RESULTS, Section, csv_text, sections
from overlap.choice import tables
from overlap.cli import ending
from overlap.cli.arguments import Parser, new_file_with_folders


def _show(section: Section) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=section.title, title_justify="left")
    for i, heading in enumerate(section.headings):
        table.add_column(heading, justify="left" if i == 0 or heading in ("from", "bound by") else "right")
    for row in section.rows:
        table.add_row(*row)
    # Wide enough for every column, also if the output is a file.
    console = Console(width=max(Console().width, 160), highlight=False)
    console.print(table)
    for remark in section.remarks:
        console.print(f"  {remark}")
    console.print()


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        "python -m benchmarks.forecast",
        description="Forecasts what a B200 should give for each lesson of the matmul ladder and for fused operations. "
        "First it compares the same forecast with what H200s measured. It needs no GPU; nothing has run on a B200.",
    )
    parser.add_argument(
        "--csv",
        type=new_file_with_folders,
        metavar="FILE",
        help="also write all numbers to this file, when all tables are printed",
    )
    arguments = parser.parse_args(argv)
    try:
        shown = sections()
    except (OSError, KeyError, ValueError) as error:
        print(f"forecast: the measurements in {RESULTS} cannot be read: {error!r}", file=sys.stderr)
        return 1
    for section in shown:
        _show(section)
    if arguments.csv is not None:
        tables.replace(arguments.csv, csv_text(shown))
        print(f"wrote {arguments.csv}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(ending.run(main))
