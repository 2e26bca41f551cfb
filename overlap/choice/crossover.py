"""Says where XLA is faster than the fused kernel, from measured pairs of times (fused kernel, XLA).

The measurements are in `crossover.csv`, which `python -m benchmarks.crossover` makes from results of benchmarks. They
were taken on H200s and H100s, and all are used for all Hopper GPUs.

A problem that was measured is decided by its measurement, any other by the NEAREST measurements of its operation: by
the geometric mean of XLA's time over the kernel's, with a weight that falls with the distance. The distance is the
number of doublings between the sizes, and one more for each property that differs (`distance`). Nothing is fitted. XLA
also runs if the operation was not measured at similar sizes.
"""

from __future__ import annotations

import csv
import dataclasses
import enum
import functools
import heapq
import math
import operator
import pathlib
from typing import NamedTuple, cast

import jax.numpy as jnp

from overlap.choice.problem import Layout, Problem
from overlap.kernels.config import SWIZZLE_BYTES

FILE = pathlib.Path(__file__).parent / "crossover.csv"
# A problem that was not measured is left to XLA unless the fused kernel should be faster by this factor. Wrong
# predictions by which a call becomes slower than XLA's are worse than small gains that are missed.
LEAST_GAIN = 1.02
# How many measurements count, and by which factor a weight falls with each unit of distance. Of the numbers from 4 to
# 24 and several ways to weigh them, these chose best on the products that `benchmarks.fit_model --judge` judges: better
# than distances that were fitted to the measurements.
NEAREST, FALLING = 7, 0.63
# If the nearest measurement is farther away, the problem counts as not measured.
_FAR = 6.0
_WAY_OUT = ': implementation="fused" runs the kernel'


class Cause(enum.Enum):
    """Why an implementation runs. `Explanation.reason` says it in words."""

    ASKED_FOR = "the caller named the implementation, or a configuration of the kernel"
    EMULATED = "on a CPU the fused kernel runs emulated, for tests only"
    NOT_SERVED = "the fused kernel cannot serve the call"
    NOT_BY_DEFAULT = "the fused kernel runs only if the caller asks for it"
    NOT_MEASURED = "no similar problem was measured on this GPU"
    MEASURED = "the faster one in a measurement of this problem"
    PREDICTED = "the faster one by measurements of similar problems"


class Verdict(NamedTuple):
    """Whether XLA runs instead of the fused kernel, and why."""

    xla_runs: bool
    reason: str
    cause: Cause


NOTHING_MEASURED = Verdict(True, "not measured on this GPU yet" + _WAY_OUT, Cause.NOT_MEASURED)


@dataclasses.dataclass(frozen=True)
class Measured:
    """One measured pair of times.

    Attributes:
      problem: the problem that was measured.
      fused_us: the fused kernel's time per call, in a loop on the device.
      xla_us: XLA's time per call, in the same run.
      gpu: what was measured on (`rates.gpu_of`).
    """

    problem: Problem
    fused_us: float
    xla_us: float
    gpu: str = "h200"

    @property
    def ratio(self) -> float:
        """XLA's time over the fused kernel's; above 1 the fused kernel is faster."""
        return self.xla_us / self.fused_us

    @property
    def verdict(self) -> Verdict:
        """Which was faster."""
        if 1 / LEAST_GAIN < self.ratio < LEAST_GAIN:
            # Where devices communicate, the kernel runs: then the backward pass may take kernels too, which gain more.
            xla_runs = self.ratio < 1 and not self.problem.communicates
            text = f"the kernel and XLA were measured to be about as fast ({self.ratio:.2f} x)"
        elif self.ratio < 1:
            xla_runs, text = True, f"XLA was measured to be {1 / self.ratio:.2f} x as fast"
        else:
            xla_runs, text = False, f"the kernel was measured to be {self.ratio:.2f} x as fast as XLA"
        return Verdict(xla_runs, f"{text} for {self.problem}", Cause.MEASURED)


def verdict(problem: Problem, gpu: str = "h200") -> Verdict:
    """Returns whether XLA runs: if it was faster, or if the kernel should gain less than `LEAST_GAIN`.

    Args:
      problem: the operation and the sizes.
      gpu: the GPU that the call is for (`rates.gpu_of`).
    """
    near = neighbours(problem, gpu)
    if not near:
        return NOTHING_MEASURED
    nearest_distance, nearest = near[0]
    described = f"{nearest.problem} (NVIDIA {nearest.gpu.upper()})"
    if nearest_distance > _FAR:
        reason = f"not measured on this GPU yet near this size (the nearest is {described}){_WAY_OUT}"
        return Verdict(True, reason, Cause.NOT_MEASURED)
    if nearest_distance == 0:
        return nearest.verdict
    ratio = expected_ratio(near)
    source = f"by the {len(near)} nearest measurements, the first of {described}"
    if ratio >= LEAST_GAIN:
        return Verdict(False, f"the kernel should be {ratio:.2f} x as fast as XLA {source}", Cause.PREDICTED)
    alike = f"the kernel and XLA should be about as fast ({ratio:.2f} x)"
    text = alike if ratio > 1 / LEAST_GAIN else f"XLA should be {1 / ratio:.2f} x as fast"
    return Verdict(True, f"{text} {source}{_WAY_OUT}", Cause.PREDICTED)


def neighbours(problem: Problem, gpu: str = "h200") -> list[tuple[float, Measured]]:
    """Returns the nearest measurements of a problem's operation, each with its distance from the problem, in order.

    Among equally near measurements, those of the same dtype come first, and of these the one with the smallest ratio
    (the worst for the fused kernel). The list is empty if the problem's operation was never measured.
    """
    pairs = [(distance(problem, gpu, one), one) for one in measurements() if one.problem.op == problem.op]
    return heapq.nsmallest(
        NEAREST, pairs, key=lambda pair: (pair[0], pair[1].problem.dtype != problem.dtype, pair[1].ratio)
    )


def expected_ratio(near: list[tuple[float, Measured]]) -> float:
    """Returns XLA's time over the fused kernel's for a problem with these `neighbours`."""
    weights = [FALLING**distance for distance, _ in near]
    logs = [math.log(measured.ratio) for _, measured in near]
    return math.exp(sum(map(operator.mul, weights, logs)) / sum(weights))


def distance(problem: Problem, gpu: str, measured: Measured) -> float:
    """Returns how far a problem lies from a measured one.

    The sum of the doublings between the sizes (those of the product that a device computes, the batch, the devices),
    and 1 for each of these that differs: the layout, the dtype, whether rows are aligned, the GPU.
    """
    (sizes, properties), (others, other_properties) = _place(problem), _place(measured.problem)
    doublings = sum(abs(x - y) for x, y in zip(sizes, others, strict=True))
    return doublings + sum(map(operator.ne, (*properties, gpu), (*other_properties, measured.gpu)))


@functools.lru_cache(maxsize=1 << 14)
def _place(problem: Problem) -> tuple[tuple[float, ...], tuple[object, ...]]:
    """Returns the logarithms of a problem's sizes, and its layout, dtypes and alignment.

    float16 and bfloat16 run at the same rates. Results of 32 bits need smaller tiles, and are sent as twice the bytes.
    """
    operands = "16 bits" if problem.itemsize == 2 else problem.dtype
    has_wide_results = jnp.dtype(problem.out_dtype).itemsize == 4
    # Whether rows of both operands begin at cache lines, so that each row of a box is exactly one cache line.
    is_aligned = all(row % SWIZZLE_BYTES == 0 for row in problem.row_bytes)
    sizes = (*problem.whole, problem.batch, problem.devices)
    return tuple(map(math.log2, sizes)), (problem.layout, (operands, has_wide_results), is_aligned)


@functools.cache
def measurements() -> tuple[Measured, ...]:
    """Returns the measurements in `crossover.csv`."""
    with FILE.open(encoding="utf-8", newline="") as file:
        return tuple(_measured(row) for row in csv.DictReader(file))


def _measured(row: dict[str, str]) -> Measured:
    m, n, k, devices = (int(row[name]) for name in ("m", "n", "k", "devices"))
    layout = cast(Layout, row["layout"])
    problem = Problem(row["op"], m, n, k, row["dtype"], row["out_dtype"], devices=devices, layout=layout)
    return Measured(problem, float(row["fused_us"]), float(row["xla_us"]), row["gpu"])
