"""Reports the progress of a run on standard error: as a bar on a terminal, else as a line from time to time."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from typing import Self

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from gpt.corpus import VOCABULARY
from gpt.losses import Step
from gpt.options import Options

# Of the data sheets, for dense products in bfloat16.
_FLOPS_PER_S = {"H100": 989e12, "H200": 989e12, "B200": 2250e12}
# The reported step time is the median of this many steps.
_RECENT = 20


def speed(options: Options, seconds: Iterable[float]) -> str:
    """Says how fast steps are, from the median of their seconds; on known GPUs also the model FLOPs utilization (MFU).

    MFU: the operations of a step's products, with half of those of a causal attention, as a part of what the data sheet
    promises in bfloat16 for the same time.
    """
    sizes, step_s = options.sizes, statistics.median(seconds)
    tokens = options.training.batch * sizes.sequence
    text = f"{step_s * 1e3:,.0f} ms/step  {tokens / step_s:,.0f} tokens/s"
    of_layer = 4 * sizes.features**2 + 3 * sizes.features * sizes.hidden + sizes.sequence * sizes.features
    flops = 6 * tokens * (sizes.layers * of_layer + VOCABULARY * sizes.features) / options.axes.devices
    kind = jax.devices()[0].device_kind
    peak = next((peak for name, peak in _FLOPS_PER_S.items() if name in kind), None)
    return text + (f"  MFU {flops / step_s / peak:.1%}" if peak else "")


class Report:
    """The progress of one run."""

    def __init__(self, title: str, options: Options, *, quiet: bool) -> None:
        """Makes the report of a run.

        Args:
          title: the beginning of each line.
          options: of the run.
          quiet: whether to report nothing, since another process does.
        """
        self._console = Console(stderr=True, quiet=quiet, highlight=False)
        self._title, self._options = title, options
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
        self._task = self._bar.add_task(title, total=options.training.steps, figures="")

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
            figures += "  " + speed(self._options, self._recent)
        self._bar.update(self._task, completed=step.step, figures=figures)
        steps = self._options.training.steps
        due = step.step % self._options.print_every == 0 or step.step == steps or not self._printed
        if due and not self._console.is_terminal:
            self.say(f"step {step.step}/{steps}  {figures}")
        self._printed += 1
