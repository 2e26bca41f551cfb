"""Prints results as a table, or as paragraphs where the terminal is too narrow for the table."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

Cell = str | Text
_NOTHING = ("", "–")


def show(
    console: Console,
    title: str,
    headings: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    *,
    text_columns: Collection[str] = (),
    caption: str = "",
) -> None:
    """Prints rows of cells.

    If the table is wider than the terminal, its headings and the cells of text columns take several lines. No word and
    no number is cut. If that is not enough, each row becomes a paragraph: a line with its first cell, and a line for
    each other cell that has a value.

    Args:
      console: where to print.
      title: a line above the table.
      headings: the headings of the columns.
      rows: the cells of each row, as many as there are headings; "–" or "" where there is no value.
      text_columns: the headings of columns that hold text, aligned to the left. The others hold numbers, aligned to the
        right.
      caption: a text below the table.
    """
    texts = [[Text(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
    borders = 3 * len(headings) + 1
    widths = _widths(headings, texts, text_columns, console.width - borders)
    if widths is None:
        _show_paragraphs(console, title, headings, texts)
        if caption:
            console.print(Text(caption), style="italic")
        return
    table = Table(title=Text(title), title_justify="left", caption=caption and Text(caption))
    for heading, width in zip(headings, widths, strict=True):
        table.add_column(Text(heading), justify="left" if heading in text_columns else "right", width=width)
    for row in texts:
        table.add_row(*row)
    console.print(table)


def _widths(
    headings: Sequence[str], rows: Sequence[Sequence[Text]], text_columns: Collection[str], available: int
) -> list[int] | None:
    """The widths of the columns, which together take at most `available` characters; None if they need more."""
    widths, least = [], []
    for heading, *cells in zip(headings, *rows, strict=True):
        widths.append(max(Text(heading).cell_len, *(cell.cell_len for cell in cells)))
        wrapped = [heading, *(cell.plain for cell in cells if heading in text_columns)]
        words = [Text(word).cell_len for text in wrapped for word in text.split()]
        numbers = [cell.cell_len for cell in cells if heading not in text_columns]
        least.append(max(*words, *numbers, 1))
    while sum(widths) > available:
        wider = [column for column, width in enumerate(widths) if width > least[column]]
        if not wider:
            return None
        widths[max(wider, key=widths.__getitem__)] -= 1
    return widths


def _show_paragraphs(console: Console, title: str, headings: Sequence[str], rows: Sequence[Sequence[Text]]) -> None:
    console.print(Text(title), style="italic")
    for first, *others in rows:
        console.print(Text.assemble(f"{headings[0]} ", first), style="bold")
        for heading, cell in zip(headings[1:], others, strict=True):
            if cell.plain not in _NOTHING:
                console.print(Padding.indent(Text.assemble(f"{heading}: ", cell), 2))
