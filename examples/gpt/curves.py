"""The plot of the losses of one run, or of several runs that should agree."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence

from gpt.losses import Step

# Line widths, in the order of the runs. The first one is the widest, so that all curves are visible where they agree.
_WIDTHS = (4.0, 2.2, 1.0)


def draw(runs: Mapping[str, Sequence[Step]], path: pathlib.Path, *, title: str) -> None:
    """Writes the losses as a PNG; for several runs, also the distance of each run from the first.

    The file is written under a temporary name and then renamed to `path`, so it is never seen half-written.
    """
    # Do not use pyplot: it may look for a display, and keeps global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7 if len(runs) > 1 else 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2 if len(runs) > 1 else 1, 1, sharex=True, squeeze=False)[:, 0]
    (first, reference), *others = runs.items()
    for number, ((name, steps), width) in enumerate(zip(runs.items(), _WIDTHS, strict=False)):
        axes[0].plot(
            [step.step for step in steps],
            [step.loss for step in steps],
            label=name,
            color=f"C{number}",
            linewidth=width if others else 1.2,
        )
    axes[0].set_ylabel("loss (nats per byte)")
    if others:
        axes[0].legend(frameon=False)
        for number, (name, steps) in enumerate(others, 1):
            distances = differences(reference, steps)
            axes[1].plot(list(distances), list(distances.values()), label=name, color=f"C{number}", linewidth=1.2)
        axes[1].set_ylabel(f"distance from {first}")
        axes[1].set_yscale("symlog", linthresh=1e-5)
        axes[1].set_ylim(bottom=0)
        axes[1].legend(frameon=False)
    axes[-1].set_xlabel("step")
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    figure.savefig(path, dpi=130, format="png")


def differences(reference: Sequence[Step], steps: Sequence[Step]) -> dict[int, float]:
    """The distance of the losses for each step that both runs have."""
    losses = {step.step: step.loss for step in reference}
    return {step.step: abs(step.loss - losses[step.step]) for step in steps if step.step in losses}
