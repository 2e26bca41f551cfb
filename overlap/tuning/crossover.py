"""Where XLA is faster than the fused kernel: measured pairs of times, and the nearest of them for a call.

The measurements lie in `crossover.csv`, made from results of benchmarks (`python -m benchmarks.crossover`). They are of
an H200; other GPUs are not far from it in what matters here, the fixed costs of a launch against the sizes.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import math
import pathlib

import jax.numpy as jnp

from overlap.kernels.config import SWIZZLE_BYTES
from overlap.tuning.problem import Problem

FILE = pathlib.Path(__file__).parent / "crossover.csv"
# Below this the difference is no noise: the same pair measured twice differs by up to 4%.
LEAST_RATIO = 0.95
# How far apart two problems are, in doublings of m, n or k, that differ in one of these otherwise.
_DEVICES, _LAYOUT, _KIND, _ALIGNMENT = 1.0, 0.5, 3.0, 3.0


@dataclasses.dataclass(frozen=True)
class Measured:
    """One pair of times.

    Attributes:
      problem: what was measured.
      fused_us: the fused kernel's time per call, in a loop on the device.
      xla_us: XLA's, in the same run.
    """

    problem: Problem
    fused_us: float
    xla_us: float

    @property
    def ratio(self) -> float:
        """XLA's time over the fused kernel's; above 1 the fused kernel is faster."""
        return self.xla_us / self.fused_us


def nearest(problem: Problem) -> Measured | None:
    """The measurement that says most about a problem; None if its operation was never measured."""
    alike = [measured for measured in _measurements() if measured.problem.op == problem.op]
    return min(alike, key=lambda measured: _distance(measured.problem, problem), default=None)


def xla_is_faster(problem: Problem) -> str | None:
    """Why XLA is the better choice for a problem, with the measurement that says so; None if it is not."""
    measured = nearest(problem)
    if measured is None or measured.ratio >= LEAST_RATIO:
        return None
    return f"XLA was measured to be {1 / measured.ratio:.2f} x as fast for {measured.problem}"


def _distance(a: Problem, b: Problem) -> float:
    sizes = sum(abs(math.log2(x / y)) for x, y in ((a.m, b.m), (a.n, b.n), (a.k, b.k), (a.batch, b.batch)))
    devices = _DEVICES * abs(math.log2(a.devices / b.devices))
    kind = _KIND * (_kind(a) != _kind(b))
    return sizes + devices + kind + _LAYOUT * (a.layout != b.layout) + _ALIGNMENT * (_aligned(a) != _aligned(b))


def _kind(problem: Problem) -> str:
    """The dtype; the two of 16 bits run at the same rates."""
    return "16 bits" if jnp.dtype(problem.dtype).itemsize == 2 else problem.dtype


def _aligned(problem: Problem) -> bool:
    """Whether each row of a box is one line of the cache."""
    return all(row % SWIZZLE_BYTES == 0 for row in problem.row_bytes)


@functools.cache
def _measurements() -> tuple[Measured, ...]:
    with FILE.open(encoding="utf-8", newline="") as file:
        return tuple(_measured(row) for row in csv.DictReader(file))


def _measured(row: dict[str, str]) -> Measured:
    m, n, k, devices = (int(row[name]) for name in ("m", "n", "k", "devices"))
    problem = Problem(
        row["op"], m, n, k, row["dtype"], row["out_dtype"], devices=devices, layout=row["layout"]  # pyright: ignore[reportArgumentType]
    )  # fmt: skip
    return Measured(problem, float(row["fused_us"]), float(row["xla_us"]))
