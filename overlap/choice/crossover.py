"""Says where XLA is faster than the fused kernel, from measured pairs of times (fused kernel, XLA).

The measurements are in `crossover.csv`, which `python -m benchmarks.crossover` makes from results of benchmarks. They
were taken on H200s and H100s, and all are used for all Hopper GPUs.

A problem that was measured is decided by its measurement. For any other problem of a collective the nearest measurement
of the operation decides, and for a plain product the `NEAREST` ones, by their geometric mean, with a weight that falls
with the distance. XLA also runs if no plain product was measured at a similar size. Nothing is fitted.
"""

from __future__ import annotations

import csv
import dataclasses
import enum
import functools
import heapq
import math
import pathlib
from typing import NamedTuple, cast

import jax.numpy as jnp

from overlap.choice.problem import Layout, Problem
from overlap.choice.space import MOST_JOINED_ROWS
from overlap.kernels.config import SWIZZLE_BYTES, Config
from overlap.primitives.integers import ceil_div

FILE = pathlib.Path(__file__).parent / "crossover.csv"
# A plain product that was not measured is left to XLA unless the fused kernel should be faster by this factor. Wrong
# predictions by which a call becomes slower than XLA's are worse than small gains that are missed.
LEAST_GAIN = 1.02
# Where devices communicate, of two that are about as fast the kernel runs: then the backward pass may take kernels too,
# which gain more.
_LEAST_OF_COLLECTIVES = 1 / LEAST_GAIN
# For plain products: how many measurements count, and by which factor a weight falls with each unit of distance. Of the
# numbers from 4 to 24 and several ways to weigh them, these chose best on the products that `benchmarks.fit_model
# --judge` judges. By the same command, a collective is chosen as well by one.
NEAREST = 7
FALLING = 0.63
# If the nearest measurement is farther away, a plain product counts as not measured.
_FAR = 6.0
# The fewest rows of a tile. A block of fewer rows takes the time of this many.
_TILE_ROWS = 64
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
    IN_STEP = "the faster one for all products in a measurement of a whole step"


class Verdict(NamedTuple):
    """Whether XLA runs instead of the fused kernel, why, and XLA's time over the kernel's (1 if nothing is known)."""

    xla_runs: bool
    reason: str
    cause: Cause
    ratio: float = 1.0


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
        xla_runs = self.ratio < (_LEAST_OF_COLLECTIVES if self.problem.communicates else 1)
        reason = f"{_compared('was measured to be', self.ratio)} for {self.problem}"
        return Verdict(xla_runs, reason, Cause.MEASURED, self.ratio)


def verdict(problem: Problem, gpu: str = "h200", *, left_out: bool = False) -> Verdict:
    """Returns which of both runs: the one that was faster, or should be.

    Args:
      problem: the operation and the sizes.
      gpu: the GPU that the call is for (`rates.gpu_of`).
      left_out: whether the measurements of this very problem do not count, to judge the choice by them.
    """
    near = neighbours(problem, gpu, left_out)
    if not near:
        return NOTHING_MEASURED
    nearest_distance, nearest = near[0]
    described = f"{nearest.problem} (NVIDIA {nearest.gpu.upper()})"
    if nearest_distance > _FAR and not problem.communicates:
        reason = f"not measured on this GPU yet near this size (the nearest is {described}){_WAY_OUT}"
        return Verdict(True, reason, Cause.NOT_MEASURED)
    # In the measured problems all rows lie in one dimension. To divide them costs time only where it makes more tiles.
    more_tiles = _tiles(problem) / _tiles(problem.undivided)
    if nearest_distance == 0 and more_tiles == 1:
        return nearest.verdict
    ratio = expected_ratio(near) / more_tiles
    number = f"{len(near)} nearest measurements, the first" if len(near) > 1 else "nearest measurement, that"
    reason = f"{_compared('should be', ratio)} by the {number} of {described}"
    if more_tiles > 1:
        reason += f", with {more_tiles:.3g} x as many tiles, since a block has only {problem.block[0]} rows"
    xla_runs = ratio < (_LEAST_OF_COLLECTIVES if problem.communicates else LEAST_GAIN)
    return Verdict(xla_runs, reason + _WAY_OUT * xla_runs, Cause.PREDICTED, ratio)


def _compared(verb: str, ratio: float) -> str:
    """Says in words what XLA's time over the fused kernel's means."""
    if 1 / LEAST_GAIN < ratio < LEAST_GAIN:
        return f"the kernel {verb} about as fast as XLA ({ratio:.2f} x)"
    return f"XLA {verb} {1 / ratio:.2f} x as fast" if ratio < 1 else f"the kernel {verb} {ratio:.2f} x as fast as XLA"


def neighbours(problem: Problem, gpu: str = "h200", left_out: bool = False) -> list[tuple[float, Measured]]:
    """Returns the measurements that decide about a problem, each with its distance from it, in order.

    One for a collective, `NEAREST` for a plain product, none if the operation was never measured. Among equally near
    measurements, those of the same dtype come first, and of these the one with the largest ratio.
    """
    of_operation = [one for one in measurements() if one.problem.op == problem.op]
    counted = [one for one in of_operation if not (left_out and one.problem == problem)]

    def rank(pair: tuple[float, Measured]) -> tuple[float, bool, float]:
        apart, measured = pair
        return apart, measured.problem.dtype != problem.dtype, -measured.ratio

    pairs = [(distance(problem, gpu, one), one) for one in counted]
    return heapq.nsmallest(1 if problem.communicates else NEAREST, pairs, key=rank)


def expected_ratio(near: list[tuple[float, Measured]]) -> float:
    """Returns XLA's time over the fused kernel's for a problem with these `neighbours`."""
    weights = [FALLING**apart for apart, _ in near]
    logs = [math.log(measured.ratio) for _, measured in near]
    weighted = sum(weight * log for weight, log in zip(weights, logs, strict=True))
    return math.exp(weighted / sum(weights))


def distance(problem: Problem, gpu: str, measured: Measured) -> float:
    """Returns how far a problem lies from a measured one.

    The sum of the doublings between the sizes (those of the product that a device computes, the batch of a plain
    product, the devices), and 1 for each of these that differs: the layout, the dtype, whether rows are aligned, the
    GPU. How rows are divided into leading dimensions does not count: a product of 16 x 512 rows is one of 8192 rows.
    """
    sizes, properties = _place(problem)
    others, other_properties = _place(measured.problem)
    doublings = sum(abs(x - y) for x, y in zip(sizes, others, strict=True))
    differences = sum(x != y for x, y in zip(properties, other_properties, strict=True)) + (gpu != measured.gpu)
    return round(doublings, 6) + differences


def _tiles(problem: Problem) -> int:
    """Returns the number of tiles above one another in a device's product, if each has `_TILE_ROWS` rows."""
    # The kernels for few rows join the blocks of a gather, and do not cut the rows of a sum for all.
    joined = problem.gathered == "m" and problem.batch * problem.whole[0] <= MOST_JOINED_ROWS
    rows, _, blocks = problem.grid(Config(joined=joined, one_shot=True))
    return blocks * ceil_div(rows, _TILE_ROWS)


@functools.lru_cache(maxsize=1 << 14)
def _place(problem: Problem) -> tuple[tuple[float, ...], tuple[object, ...]]:
    """Returns the logarithms of a problem's sizes, and its layout, dtypes and alignment.

    float16 and bfloat16 run at the same rates. Results of 32 bits need smaller tiles, and are sent as twice the bytes.
    """
    operands = "16 bits" if problem.itemsize == 2 else problem.dtype
    has_wide_results = jnp.dtype(problem.out_dtype).itemsize == 4
    # Whether rows of both operands begin at cache lines, so that each row of a box is exactly one cache line.
    is_aligned = all(row % SWIZZLE_BYTES == 0 for row in problem.row_bytes)
    sizes = (*problem.undivided.whole, problem.undivided.batch, problem.devices)
    return tuple(map(math.log2, sizes)), (problem.layout, (operands, has_wide_results), is_aligned)


@functools.cache
def measurements() -> tuple[Measured, ...]:
    """Returns the measurements in `crossover.csv`."""
    with FILE.open(encoding="utf-8", newline="") as file:
        return tuple(_measured(row) for row in csv.DictReader(file))


def _measured(row: dict[str, str]) -> Measured:
    problem = Problem(
        op=row["op"],
        m=int(row["m"]),
        n=int(row["n"]),
        k=int(row["k"]),
        dtype=row["dtype"],
        out_dtype=row["out_dtype"],
        devices=int(row["devices"]),
        layout=cast(Layout, row["layout"]),
    )
    return Measured(problem, float(row["fused_us"]), float(row["xla_us"]), row["gpu"])
