"""Predicts where XLA is faster than the fused kernel, from measured pairs of times (fused kernel, XLA).

The measurements are in `crossover.csv`, which `python -m benchmarks.crossover` makes from results of benchmarks. They
were taken on H200s, and some of them on an H100. All are used for all Hopper GPUs: the choice depends mostly on the
fixed costs of a launch relative to the size of the problem, and this relation is similar on all of them. But those of
the same GPU count as nearer.

Between measurements, the ratio of the two times is interpolated: the logarithm of the ratio is averaged over near
measurements, each weighted by the inverse square of its distance. Distances are taken between the logarithms of the
sizes. XLA is chosen if the interpolated ratio, or a measurement of nearly the same problem, says that it is faster by
more than noise. XLA is also chosen if the operation was not measured at similar sizes.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import math
import pathlib
from typing import cast

import jax.numpy as jnp

from overlap.choice.problem import Layout, Problem
from overlap.kernels.config import SWIZZLE_BYTES

FILE = pathlib.Path(__file__).parent / "crossover.csv"
# If the ratio of XLA's time to the fused kernel's is below this, XLA is faster. A ratio between this and 1 counts as
# noise: the same pair measured twice differs by up to 4%.
LEAST_RATIO = 0.96
NOT_MEASURED = "not measured on this GPU yet"
_WAY_OUT = ': implementation="fused" runs the kernel'
NOTHING_MEASURED = NOT_MEASURED + _WAY_OUT
# The distance between two problems is 1 for each doubling of m, n, k or the batch. These are added: `_DEVICES` for each
# doubling of the number of devices, `_LAYOUT` if the layouts differ, `_KIND` if the dtypes differ (`_kind`),
# `_ALIGNMENT` if only one of the problems has aligned rows (`_aligned`), and `_OTHER_GPU` if another GPU was measured.
_DEVICES, _LAYOUT, _KIND, _ALIGNMENT, _OTHER_GPU = 1.0, 0.5, 3.0, 3.0, 0.5
# A measurement is not used if its distance exceeds the distance of the nearest measurement by more than _REACH. If the
# nearest is not farther away than _NEARLY_SAME, and XLA was faster there, that decides alone. With these values, each
# measurement was predicted from the others: the better of both takes 0.976 of the time of what is chosen, in the mean
# over 640 plain products (5th percentile 0.89). If the nearest always decides, it is 0.972 (0.85).
_REACH, _NEARLY_SAME = 1.5, 0.5
# If the nearest measurement is farther away than this, the problem counts as not measured.
_FAR = 6.0


@dataclasses.dataclass(frozen=True)
class Measured:
    """One measured pair of times.

    Attributes:
      problem: the problem that was measured.
      fused_us: the fused kernel's time per call, in a loop on the device.
      xla_us: XLA's time per call, in the same run.
      gpu: what was measured on (`rates.measured_gpu`).
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
    def says_xla(self) -> str | None:
        """The message that XLA was faster; None unless XLA was faster by more than noise."""
        if self.ratio >= LEAST_RATIO:
            return None
        return f"XLA was measured to be {1 / self.ratio:.2f} x as fast for {self.problem}"


def neighbours(problem: Problem, gpu: str = "h200") -> list[tuple[float, Measured]]:
    """Returns the measurements that decide about a problem on a GPU, each with its distance, the nearest first.

    Among equally near measurements, those of the same dtype come first, and of these the one with the smallest ratio
    (the worst for the fused kernel). The list is empty if the problem's operation was never measured.
    """
    alike = [measured for measured in _measurements() if measured.problem.op == problem.op]
    pairs = [(_distance(one.problem, problem) + _OTHER_GPU * (one.gpu != gpu), one) for one in alike]
    pairs.sort(key=lambda pair: (pair[0], pair[1].problem.dtype != problem.dtype, pair[1].ratio))
    return [pair for pair in pairs if pair[0] <= pairs[0][0] + _REACH]


def expected_ratio(near: list[tuple[float, Measured]]) -> float:
    """Returns XLA's time divided by the fused kernel's, interpolated between the measurements of `neighbours`."""
    if near[0][0] == 0:
        return near[0][1].ratio
    weights = [distance**-2 for distance, _ in near]
    logs = [math.log(measured.ratio) for _, measured in near]
    return math.exp(sum(w * x for w, x in zip(weights, logs, strict=True)) / sum(weights))


def xla_is_faster(problem: Problem, gpu: str = "h200") -> str | None:
    """Returns why XLA is expected to be faster for a problem, with the measurement that says so; None if it is not.

    Args:
      problem: the operation and the sizes.
      gpu: whose measurements count as the nearest (`rates.measured_gpu`).
    """
    near = neighbours(problem, gpu)
    if not near:
        return NOTHING_MEASURED
    distance, nearest = near[0]
    if distance > _FAR:
        return f"{NOT_MEASURED} near this size (the nearest is {nearest.problem}){_WAY_OUT}"
    if distance <= _NEARLY_SAME and nearest.says_xla:
        return nearest.says_xla
    ratio = expected_ratio(near)
    if ratio >= LEAST_RATIO:
        return None
    worst = min((measured for _, measured in near), key=lambda measured: measured.ratio)
    return f"XLA should be {1 / ratio:.2f} x as fast, between {nearest.problem} and {worst.problem}"


def _distance(a: Problem, b: Problem) -> float:
    # Compare the gathered rows: a device multiplies the rows of all devices.
    sizes = ((_rows(a), _rows(b)), (a.n, b.n), (a.k, b.k), (a.batch, b.batch))
    devices = _DEVICES * abs(math.log2(a.devices / b.devices))
    kind = _KIND * (_kind(a) != _kind(b)) + _LAYOUT * (a.layout != b.layout) + _ALIGNMENT * (_aligned(a) != _aligned(b))
    return sum(abs(math.log2(x / y)) for x, y in sizes) + devices + kind


def _rows(problem: Problem) -> int:
    return problem.whole[0]


def _kind(problem: Problem) -> str:
    """Returns the name of the dtype, or "16 bits" for float16 and bfloat16, which run at the same rates."""
    return "16 bits" if jnp.dtype(problem.dtype).itemsize == 2 else problem.dtype


def _aligned(problem: Problem) -> bool:
    """Whether rows of both operands begin at cache lines, so that each row of a box is exactly one cache line."""
    return all(row % SWIZZLE_BYTES == 0 for row in problem.row_bytes)


@functools.cache
def _measurements() -> tuple[Measured, ...]:
    with FILE.open(encoding="utf-8", newline="") as file:
        return tuple(_measured(row) for row in csv.DictReader(file))


def _measured(row: dict[str, str]) -> Measured:
    m, n, k, devices = (int(row[name]) for name in ("m", "n", "k", "devices"))
    layout = cast(Layout, row["layout"])
    problem = Problem(row["op"], m, n, k, row["dtype"], row["out_dtype"], devices=devices, layout=layout)
    return Measured(problem, float(row["fused_us"]), float(row["xla_us"]), row["gpu"])
