"""Trains three times: by XLA, with the fused kernels, and by XLA with another order of summation.

The third run says how far the losses drift apart by rounding alone.
"""

from __future__ import annotations

import dataclasses
import gc
import math

import numpy as np

from gpt import progress, run
from gpt.curves import differences
from gpt.losses import Step
from gpt.options import Options, in_another_order

# Runs that differ in rounding alone drift apart, by chance. The comparison fails if the fused run drifts more than this
# many times as far from XLA's first run as XLA's second run does.
_MOST_TIMES = 3.0


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The losses of all runs.

    Attributes:
      runs: the steps of each run, by name: XLA, XLA in another order, fused.
      speeds: how fast each run was, see `progress.speed`.
      fused_largest, fused_rms: the largest and the root-mean-square distance of the fused losses from XLA's.
      noise_largest, noise_rms: the same distances for XLA in another order.
    """

    runs: dict[str, list[Step]]
    speeds: list[str]
    fused_largest: float
    fused_rms: float
    noise_largest: float
    noise_rms: float

    @property
    def agree(self) -> bool:
        """Whether the fused curve is about as close to XLA's as rounding allows (see `_MOST_TIMES`)."""
        return self.fused_rms <= _MOST_TIMES * self.noise_rms

    def lines(self) -> list[str]:
        """The result as lines to print."""
        xla, other, fused = self.runs
        width = max(map(len, self.runs))
        relation = "within" if self.agree else "NOT within"
        return [
            *(f"{name:<{width}}  {speed}" for name, speed in zip(self.runs, self.speeds, strict=True)),
            f"Losses of {len(self.runs[xla])} steps, distance from {xla}:",
            f"  {fused:<{width}}  largest {self.fused_largest:.2e}  root mean square {self.fused_rms:.2e}",
            f"  {other:<{width}}  largest {self.noise_largest:.2e}  root mean square {self.noise_rms:.2e}",
            f"The fused curve is {relation} {_MOST_TIMES:g} times the distance that another order of summation makes.",
        ]


def compare(options: Options, text: np.ndarray) -> Comparison | None:
    """Trains three times, each run in a folder of its own. A run that was stopped is continued.

    Returns:
      The comparison in the first process of a job, None in all others.

    Raises:
      Refused, Stopped, Diverged: as `run.train`.
    """
    other = in_another_order(options)
    axes = other.axes
    variants = {
        "xla": ("xla", options, "xla"),
        f"xla, {axes.data} data × {axes.fsdp} fsdp × {axes.tensor} tensor": ("xla-other-order", other, "xla"),
        "fused": ("fused", options, "fused"),
    }
    runs, speeds = {}, []
    for name, (folder, of_variant, implementation) in variants.items():
        chosen = dataclasses.replace(of_variant, implementation=implementation, out=options.out / folder)
        runs[name] = run.train(chosen, text, title=folder).steps
        times = [step.seconds for step in runs[name] if step.seconds is not None]
        speeds.append(progress.speed(chosen, times) if times else "not timed")
        gc.collect()  # Frees the state of this run before the next one begins.
    if not all(runs.values()):
        return None
    reference, noise, fused = (runs[name] for name in runs)
    apart, noise_apart = (list(differences(reference, steps).values()) for steps in (fused, noise))
    return Comparison(runs, speeds, max(apart), _rms(apart), max(noise_apart), _rms(noise_apart))


def _rms(values: list[float]) -> float:
    return math.sqrt(math.fsum(value * value for value in values) / len(values))
