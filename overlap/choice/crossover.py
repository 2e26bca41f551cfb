"""Predicts where XLA is faster than the fused kernel, from measured pairs of times (fused kernel, XLA).

The measurements are in `crossover.csv`, which `python -m benchmarks.crossover` makes from results of benchmarks. They
were taken on H200s and H100s, and all are used for all Hopper GPUs: the ratio of the two times was found to be similar
on both.

A problem that was measured is decided by its measurement. For other problems the logarithm of the ratio is averaged
over the measurements of the operation. The weight of a measurement falls exponentially with its distance, which is a
sum over the differences between the two problems, each times a fitted factor (`crossover_distances.json`, written by
`python -m benchmarks.fit_crossover`). XLA is also chosen if the operation was not measured at similar sizes.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import json
import math
import operator
import pathlib
import statistics
from typing import cast

import jax.numpy as jnp

from overlap.choice.problem import Layout, Problem
from overlap.kernels.config import SWIZZLE_BYTES

FILE = pathlib.Path(__file__).parent / "crossover.csv"
DISTANCES = FILE.with_name("crossover_distances.json")
# A problem that was not measured is left to XLA unless the fused kernel should be faster by this factor. Wrong
# predictions by which a call becomes slower than XLA's are worse than small gains that are missed. With this factor,
# what is chosen for plain products has the highest 5th percentile of (XLA's time / time of what is chosen) at the same
# mean.
LEAST_GAIN = 1.02
NOT_MEASURED = "not measured on this GPU yet"
_WAY_OUT = ': implementation="fused" runs the kernel'
NOTHING_MEASURED = NOT_MEASURED + _WAY_OUT
# In how far problems differ (`differences`).
DIFFERENCES = ("rows", "n", "k", "batch", "devices", "layout", "kind", "alignment", "gpu")
# If the nearest measurement is farther away than this number of doublings, each counted with the mean factor of the
# sizes, the problem counts as not measured.
_FAR, SIZES = 6.0, ("rows", "n", "k")


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
    def verdict(self) -> tuple[bool, str]:
        """Whether XLA was faster, and a text that says which was."""
        if self.ratio < 1:
            return True, f"XLA was measured to be {_times(1 / self.ratio)} for {self.problem}"
        return False, f"the kernel was measured to be {_times(self.ratio)} as XLA for {self.problem}"

    @property
    def described(self) -> str:
        """What was measured, and on which GPU."""
        return f"{self.problem} (NVIDIA {self.gpu.upper()})"


def _times(factor: float) -> str:
    return "about as fast" if f"{factor:.2f}" == "1.00" else f"{factor:.2f} x as fast"


def neighbours(problem: Problem, gpu: str = "h200") -> list[tuple[float, Measured]]:
    """Returns the measurements of a problem's operation, each with its distance from the problem, the nearest first.

    Among equally near measurements, those of the same dtype come first, and of these the one with the smallest ratio
    (the worst for the fused kernel). The list is empty if the problem's operation was never measured.
    """
    alike = [measured for measured in measurements() if measured.problem.op == problem.op]
    factors = _factors()
    distance = lambda one: sum(map(operator.mul, factors, differences(one, Measured(problem, 0.0, 0.0, gpu))))  # noqa: E731
    pairs = [(distance(one), one) for one in alike]
    return sorted(pairs, key=lambda pair: (pair[0], pair[1].problem.dtype != problem.dtype, pair[1].ratio))


def expected_ratio(near: list[tuple[float, Measured]]) -> float:
    """Returns XLA's time divided by the fused kernel's, averaged over the measurements of `neighbours`."""
    if near[0][0] == 0:
        return near[0][1].ratio
    weights = [math.exp(near[0][0] - distance) for distance, _ in near]
    logs = [math.log(measured.ratio) for _, measured in near]
    return math.exp(sum(w * x for w, x in zip(weights, logs, strict=True)) / sum(weights))


def verdict(problem: Problem, gpu: str = "h200") -> tuple[bool, str]:
    """Returns whether XLA runs, and why. It runs if it was faster, or if the kernel should gain less than `LEAST_GAIN`.

    Args:
      problem: the operation and the sizes.
      gpu: the GPU that the call is for (`rates.measured_gpu`).
    """
    near = neighbours(problem, gpu)
    if not near:
        return True, NOTHING_MEASURED
    distance, nearest = near[0]
    of_sizes = (factor for name, factor in zip(DIFFERENCES, _factors(), strict=True) if name in SIZES)
    if distance > _FAR * statistics.mean(of_sizes):
        return True, f"{NOT_MEASURED} near this size (the nearest is {nearest.described}){_WAY_OUT}"
    if distance == 0:
        return nearest.verdict
    # Each dtype has its own ratios: XLA multiplies float8_e5m2 as 16 bits, and float8_e4m3fn faster. So where the dtype
    # was measured, other dtypes do not count.
    near = [pair for pair in near if kind(pair[1].problem) == kind(problem)] or near
    nearest, ratio = near[0][1], expected_ratio(near)
    source = f"predicted from measurements, of which the nearest is of {nearest.described}"
    if ratio >= LEAST_GAIN:
        return False, f"the kernel should be {_times(ratio)} as XLA, {source}"
    faster = f"XLA should be {_times(1 / ratio)}" if ratio < 1 else f"the kernel would gain little ({ratio:.2f} x)"
    return True, f"{faster}, {source}{_WAY_OUT}"


def xla_is_faster(problem: Problem, gpu: str = "h200") -> str | None:
    """Returns why XLA runs; None if the fused kernel runs. See `verdict`."""
    xla_runs, why = verdict(problem, gpu)
    return why if xla_runs else None


def differences(a: Measured, b: Measured) -> tuple[float, ...]:
    """Returns how two problems differ, a number for each name in `DIFFERENCES`.

    These are doublings (of the rows of all devices together, of n, k, the batch and the devices), and 1 or 0 for
    whether layouts, dtypes, GPUs differ, or only one of the problems has aligned rows.
    """
    (sizes, classes), (other_sizes, other_classes) = _place(a.problem), _place(b.problem)
    others = *map(operator.ne, classes, other_classes), a.gpu != b.gpu
    return (*(abs(x - y) for x, y in zip(sizes, other_sizes, strict=True)), *map(float, others))


@functools.lru_cache(maxsize=1 << 14)
def _place(problem: Problem) -> tuple[tuple[float, ...], tuple[object, ...]]:
    """Returns the logarithms of a problem's sizes, and its layout, dtype and alignment."""
    sizes = (problem.whole[0], problem.n, problem.k, problem.batch, problem.devices)
    return tuple(map(math.log2, sizes)), (problem.layout, kind(problem), _aligned(problem))


def kind(problem: Problem) -> str:
    """Returns the name of the dtype, or "16 bits" for float16 and bfloat16, which run at the same rates."""
    return "16 bits" if jnp.dtype(problem.dtype).itemsize == 2 else problem.dtype


def _aligned(problem: Problem) -> bool:
    """Whether rows of both operands begin at cache lines, so that each row of a box is exactly one cache line."""
    return all(row % SWIZZLE_BYTES == 0 for row in problem.row_bytes)


@functools.cache
def _factors() -> tuple[float, ...]:
    factors = json.loads(DISTANCES.read_text(encoding="utf-8"))["factors"]
    return tuple(factors[name] for name in DIFFERENCES)


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
