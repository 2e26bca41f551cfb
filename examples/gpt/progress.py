"""Reports the progress of a run on standard error: as a bar on a terminal, else as a line from time to time."""

from __future__ import annotations

import statistics
from collections import deque
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from gpt.losses import Step

# The reported step time is the median of this many steps.
_RECENT = 20


class Report:
    """The progress of one run."""

    def __init__(self, title: str, *, steps: int, tokens: int, every: int, quiet: bool) -> None:
        """Makes the report of a run.

        Args:
          title: the beginning of each line.
          steps: the number of steps of the run.
          tokens: the number of tokens of a step.
          every: the number of steps between two lines, where the output is no terminal.
          quiet: whether to report nothing, since another process does.
        """
        self._console = Console(stderr=True, quiet=quiet, highlight=False)
        self._title, self._steps, self._tokens, self._every = title, steps, tokens, every
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._printed = 0
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=self._console, transient=True, disable=not self._console.is_terminal)
        self._task = self._bar.add_task(title, total=steps, figures="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        self._console.print(f"{self._title}: {text}", soft_wrap=True, markup=False)

    def step(self, step: Step) -> None:
        """Shows a step. Where the output is no terminal, it prints the first step, the last, and every `every`-th."""
        if step.seconds is not None:
            self._recent.append(step.seconds)
        figures = f"loss {step.loss:.4f}"
        if self._recent:
            seconds = statistics.median(self._recent)
            figures += f"  {seconds * 1e3:,.0f} ms/step  {self._tokens / seconds:,.0f} tokens/s"
        self._bar.update(self._task, completed=step.step, figures=figures)
        due = step.step % self._every == 0 or step.step == self._steps or not self._printed
        if due and not self._console.is_terminal:
            self.say(f"step {step.step}/{self._steps}  {figures}")
        self._printed += 1
