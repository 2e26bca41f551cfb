"""Shows the progress of a search: a bar on a terminal, else a line from time to time."""

from __future__ import annotations

import importlib.util
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[str, float], None]  # (what is being done, the fraction that is done)

_LINE_EVERY_S = 10.0
_LEAST_DONE = 0.05


@contextmanager
def shown(say: Callable[[str], None], every_s: float = _LINE_EVERY_S) -> Iterator[Progress]:
    """Yields a callback that shows the progress: with rich if standard error is a terminal, else by `say`.

    Args:
      say: takes a line of text. It is called when the next problem begins, and else at most once in `every_s` seconds.
      every_s: see `say`.
    """
    if sys.stderr.isatty() and importlib.util.find_spec("rich") is not None:
        with _bar() as progress:
            yield progress
    else:
        yield _Lines(say, every_s)


class _Lines:
    """Shows the progress as lines of text."""

    def __init__(self, say: Callable[[str], None], every_s: float) -> None:
        self._say, self._every_s = say, every_s
        self._problem, self._said_at, self._began = "", 0.0, time.monotonic()

    def __call__(self, text: str, fraction: float) -> None:
        problem, now = text.partition(":")[0], time.monotonic()
        if problem != self._problem or now - self._said_at >= self._every_s:
            self._problem, self._said_at = problem, now
            self._say(f"{fraction:4.0%} {text}{_left(now - self._began, fraction)}")


def _left(elapsed_s: float, fraction: float) -> str:
    """The estimated time that is left, in words; "" while too little is done for an estimate."""
    if not _LEAST_DONE <= fraction < 1:
        return ""
    return f", about {math.ceil(elapsed_s * (1 - fraction) / fraction)} s left"


@contextmanager
def _bar() -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.table import Column

    # On a narrow terminal the text is cut, not the clock.
    text_column = TextColumn("{task.description}", markup=False, table_column=Column(ratio=1, no_wrap=True))
    columns = (text_column, BarColumn(bar_width=20), TaskProgressColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, expand=True) as bar:
        task = bar.add_task("starting", total=1.0)
        yield lambda text, fraction: bar.update(task, description=text, completed=fraction)
