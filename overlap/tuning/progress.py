"""Shows the progress of a search: a bar on a terminal, else a line from time to time."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[str, float], None]  # (what is being done, the fraction that is done)

_LINE_EVERY_S = 10.0


@contextmanager
def shown(say: Callable[[str], None], every_s: float = _LINE_EVERY_S) -> Iterator[Progress]:
    """Yields a callback that shows the progress: with rich if standard error is a terminal, else by `say`.

    Args:
      say: takes a line of text. It is called when the next problem begins, and else at most once in `every_s` seconds.
      every_s: see `say`.
    """
    if sys.stderr.isatty() and importlib.util.find_spec("rich") is not None:
        from rich.console import Console
        from rich.progress import Progress as Bar

        with Bar(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("starting", total=1.0)
            yield lambda text, fraction: bar.update(task, description=text, completed=fraction)
        return
    last_problem, last_s = "", 0.0

    def lines(text: str, fraction: float) -> None:
        nonlocal last_problem, last_s
        problem = text.partition(":")[0]
        now = time.monotonic()
        if problem != last_problem or now - last_s >= every_s:
            last_problem, last_s = problem, now
            say(f"{fraction:4.0%} {text}")

    yield lines
