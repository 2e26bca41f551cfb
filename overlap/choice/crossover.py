"""Where XLA is faster than the fused kernel, by measured pairs of times (the fused kernel's and XLA's).

The measurements are in `crossover.csv`, which is made from results of benchmarks (`python -m benchmarks.crossover`).
They were taken on an H200. What matters here is how the fixed costs of a launch compare with the sizes, and in that
other Hopper GPUs are close to an H200.

Between measurements the ratio of the times is interpolated, in the logarithms of ratio and sizes, by inverse squared
distance. XLA runs where the interpolated ratio or the nearest measurement says that XLA is faster by more than noise.
It also runs where the operation was not measured at similar sizes.
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
# A smaller ratio of XLA's time to the fused kernel's means that XLA is faster; between this and 1 it is noise. The same
# pair measured twice differs by up to 4%, and XLA's times from runs of many configurations are corrected by an estimate
# of 3% (`benchmarks.fit_model`).
LEAST_RATIO = 0.93
NOT_MEASURED = "not measured on this GPU yet"
_WAY_OUT = ': implementation="fused" runs the kernel'
NOTHING_MEASURED = NOT_MEASURED + _WAY_OUT
# Distances between problems are counted in doublings of m, n or k. Each doubling of the devices, another layout,
# another dtype, and aligned rows in only one of the two problems add these to the distance.
_DEVICES, _LAYOUT, _KIND, _ALIGNMENT = 1.0, 0.5, 3.0, 3.0
# Measurements that are farther away than the nearest one by more than this are not used.
_REACH = 1.0
# If the nearest measurement is farther away than this, the problem counts as not measured.
_FAR = 6.0


@dataclasses.dataclass(frozen=True)
class Measured:
    """One measured pair of times.

    Attributes:
      problem: the problem that was measured.
      fused_us: the fused kernel's time per call, in a loop on the device.
      xla_us: XLA's time per call, in the same run.
    """

    problem: Problem
    fused_us: float
    xla_us: float

    @property
    def ratio(self) -> float:
        """XLA's time over the fused kernel's; above 1 the fused kernel is faster."""
        return self.xla_us / self.fused_us

    @property
    def says_xla(self) -> str | None:
        """The message that XLA was faster, if it was by more than noise; else None."""
        if self.ratio >= LEAST_RATIO:
            return None
        return f"XLA was measured to be {1 / self.ratio:.2f} x as fast for {self.problem}"


def neighbours(problem: Problem) -> list[tuple[float, Measured]]:
    """The measurements that decide about a problem, each with its distance, the nearest first.

    Among equally near ones, the one that is worst for the fused kernel comes first. The list is empty if the problem's
    operation was never measured.
    """
    alike = [measured for measured in _measurements() if measured.problem.op == problem.op]
    pairs = [(_distance(measured.problem, problem), measured) for measured in alike]
    pairs.sort(key=lambda pair: (pair[0], pair[1].ratio))
    return [pair for pair in pairs if pair[0] <= pairs[0][0] + _REACH]


def expected_ratio(near: list[tuple[float, Measured]]) -> float:
    """XLA's time over the fused kernel's, interpolated between neighbours."""
    if near[0][0] == 0:
        return near[0][1].ratio
    weights = [distance**-2 for distance, _ in near]
    logs = [math.log(measured.ratio) for _, measured in near]
    return math.exp(sum(w * x for w, x in zip(weights, logs, strict=True)) / sum(weights))


def xla_is_faster(problem: Problem) -> str | None:
    """Why XLA is the better choice for a problem, with the measurement that says so; None if it is not."""
    near = neighbours(problem)
    if not near:
        return NOTHING_MEASURED
    distance, nearest = near[0]
    if distance > _FAR:
        return f"{NOT_MEASURED} near this size (the nearest is {nearest.problem}){_WAY_OUT}"
    if nearest.says_xla:
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
    """The dtype. The two 16-bit dtypes count as one, since they run at the same rates."""
    return "16 bits" if jnp.dtype(problem.dtype).itemsize == 2 else problem.dtype


def _aligned(problem: Problem) -> bool:
    """Whether each row of a box (what one TMA copy moves) is exactly one cache line."""
    return all(row % SWIZZLE_BYTES == 0 for row in problem.row_bytes)


@functools.cache
def _measurements() -> tuple[Measured, ...]:
    with FILE.open(encoding="utf-8", newline="") as file:
        return tuple(_measured(row) for row in csv.DictReader(file))


def _measured(row: dict[str, str]) -> Measured:
    m, n, k, devices = (int(row[name]) for name in ("m", "n", "k", "devices"))
    layout = cast(Layout, row["layout"])
    problem = Problem(row["op"], m, n, k, row["dtype"], row["out_dtype"], devices=devices, layout=layout)
    return Measured(problem, float(row["fused_us"]), float(row["xla_us"]))
