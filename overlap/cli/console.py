"""What commands print: text as it is, and tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text


def console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """A console that shows texts as they are: brackets are no markup, numbers have no colour, lines are not broken."""
    return Console(stderr=stderr, quiet=quiet, markup=False, highlight=False, soft_wrap=True)


def refuse(command: str, error: Exception | str) -> None:
    """Prints in one line on standard error why a command ends."""
    console(stderr=True).print(f"{command}: {' '.join(str(error).split())}", style="red")


def show(
    to: Console, title: str, headings: Sequence[str], rows: Iterable[Sequence[str | Text]], *, texts: int = 0
) -> None:
    """Prints a table. Its first `texts` columns hold text, aligned to the left; the others hold numbers."""
    to.print(title, style="italic")
    table = Table(show_lines=to.width < 80)  # With few columns, a row takes several lines.
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index < texts else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    to.print(table, soft_wrap=False)


def progress_bar(to: Console) -> Progress:
    """A line with what is being done, a bar and a clock; it disappears in the end."""
    return Progress(
        TextColumn("{task.description}"), BarColumn(bar_width=20), TimeElapsedColumn(), console=to, transient=True
    )
