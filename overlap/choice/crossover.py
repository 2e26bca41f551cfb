"""Predicts where XLA is faster than the fused kernel, from measured pairs of times (fused kernel, XLA).

The measurements are in `crossover.csv`, which `python -m benchmarks.crossover` makes from results of benchmarks. They
were taken on H200s and H100s, and all are used for all Hopper GPUs.

A problem that was measured is decided by its measurement. For other problems, an estimate of both times from the work
of each part (`estimated_log_ratio`: the product, the bytes between devices) is corrected by measurements: by the
average of how far they lie from their own estimates. The weight of a measurement falls exponentially with its distance,
which is a sum over the differences between the two problems, each times a fitted factor (`crossover_distances.json`,
written by `python -m benchmarks.fit_crossover`). No prediction exceeds what hiding all communication could gain
(`most_gain`). XLA is also chosen if the operation was not measured at similar sizes.
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
# A device's work per µs by its data sheet, for each name of `rates.gpu_of`: 16-bit floating-point operations, bytes of
# the device's memory, bytes over NVLink in each direction.
_DATA_SHEETS = {
    "h100": (989e6, 3.35e6, 450e3),
    "h200": (989e6, 4.8e6, 450e3),
    "h800": (989e6, 3.35e6, 200e3),
    "h20": (148e6, 4.0e6, 450e3),
}
# The parts of these rates that products, memory, XLA's collectives and the kernels' transfers were measured to reach:
# fitted to the 172 collectives of `crossover.csv`.
_MULTIPLIED, _MOVED, _SENT_BY_XLA, _SENT_BY_KERNEL = 0.7, 0.94, 0.62, 0.67
# XLA multiplies 8-bit operands this much more slowly than at twice the rate of 16-bit ones.
_XLA_FLOAT8 = 1.4
# The time of a call beside its work, in µs: launches, and waiting for the other devices.
_XLA_US, _KERNEL_US = 24.0, 19.0
# A transfer beside a product slows the product down: this part of the time that it would take alone is added.
_SLOWED = 0.22
# No prediction promises more than to hide transfers at this rate, in bytes per µs, behind a product at this part of the
# data sheet's rate. XLA's large transfers are faster, with the time to start them, and all products slower.
_LEAST_SENT, _MOST_MULTIPLIED = 200e3, 0.91
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
    def verdict(self) -> tuple[bool, str]:
        """Whether XLA was faster, and a text that says which was."""
        if _is_close(self.ratio):
            # Where devices communicate, the kernel runs: then the backward pass may take kernels too, which gain more.
            xla_runs = self.ratio < 1 and not self.problem.communicates
            alike = f"the kernel and XLA were measured to be about as fast ({self.ratio:.2f} x) for {self.problem}"
            return xla_runs, alike
        if self.ratio < 1:
            return True, f"XLA was measured to be {1 / self.ratio:.2f} x as fast for {self.problem}"
        return False, f"the kernel was measured to be {self.ratio:.2f} x as fast as XLA for {self.problem}"

    @property
    def described(self) -> str:
        """What was measured, and on which GPU."""
        return f"{self.problem} (NVIDIA {self.gpu.upper()})"


def _is_close(ratio: float) -> bool:
    return 1 / LEAST_GAIN < ratio < LEAST_GAIN


def _work_us(problem: Problem, gpu: str) -> tuple[float, float]:
    """Returns the µs of a device's product, and of its transfers over NVLink, at the rates of the data sheet."""
    flops, moved, sent = _DATA_SHEETS[gpu]
    product = problem.flops_per_device * problem.itemsize / 2 / flops / _MULTIPLIED
    # Where both limits are close, a product reaches neither.
    product = (product**4 + (problem.bytes_per_device / moved / _MOVED) ** 4) ** 0.25
    return product, problem.received_bytes_per_device / sent


def estimated_log_ratio(problem: Problem, gpu: str = "h200") -> float:
    """Returns the logarithm of XLA's time over the kernel's, from the work of each part; 0 if devices send nothing.

    XLA multiplies before or after it communicates; the kernel at the same time.
    """
    if not problem.communicates:
        return 0.0
    product, sent = _work_us(problem, gpu)
    xla = product * (_XLA_FLOAT8 if problem.itemsize == 1 else 1.0) + sent / _SENT_BY_XLA + _XLA_US
    fused = max(product + _SLOWED * sent / _SENT_BY_KERNEL, sent / _SENT_BY_KERNEL) + _KERNEL_US
    return math.log(xla / fused)


def most_gain(problem: Problem, gpu: str = "h200") -> float:
    """Returns XLA's time over the kernel's if the kernel hid all communication; infinity if devices send nothing."""
    if not problem.communicates:
        return math.inf
    flops, *_ = _DATA_SHEETS[gpu]
    product = problem.flops_per_device * problem.itemsize / 2 / (_MOST_MULTIPLIED * flops)
    slower = _XLA_FLOAT8 if problem.itemsize == 1 else 1.0
    return slower + problem.received_bytes_per_device / _LEAST_SENT / product


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


def expected_ratio(problem: Problem, gpu: str, near: list[tuple[float, Measured]]) -> float:
    """Returns XLA's time over the fused kernel's: estimated, and corrected by the measurements of `neighbours`."""
    if near[0][0] == 0:
        return near[0][1].ratio
    weights = [math.exp(near[0][0] - distance) for distance, _ in near]
    logs = [math.log(measured.ratio) - estimated_log_ratio(measured.problem, measured.gpu) for _, measured in near]
    correction = sum(w * x for w, x in zip(weights, logs, strict=True)) / sum(weights)
    return min(math.exp(estimated_log_ratio(problem, gpu) + correction), most_gain(problem, gpu))


def verdict(problem: Problem, gpu: str = "h200") -> tuple[bool, str]:
    """Returns whether XLA runs, and why. It runs if it was faster, or if the kernel should gain less than `LEAST_GAIN`.

    Args:
      problem: the operation and the sizes.
      gpu: the GPU that the call is for (`rates.gpu_of`).
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
    nearest, ratio = near[0][1], expected_ratio(problem, gpu, near)
    source = f"predicted from measurements, of which the nearest is of {nearest.described}"
    if _is_close(ratio):
        return True, f"the kernel and XLA should be about as fast ({ratio:.2f} x), {source}{_WAY_OUT}"
    if ratio < 1:
        return True, f"XLA should be {1 / ratio:.2f} x as fast, {source}{_WAY_OUT}"
    # Rounded down, so that the text promises no more than `most_gain`.
    gain = f"the kernel should be {math.floor(100 * ratio) / 100:.2f} x as fast as XLA"
    of_product = ", whose float8 products are slower as well" if problem.itemsize == 1 else ""
    return False, f"{gain}{of_product}, {source}"


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
    """Returns the name of the dtype, or "16 bits" for float16 and bfloat16, which run at the same rates.

    Results of 32 bits need smaller tiles, and are sent as twice the bytes. So they make a kind of their own.
    """
    operands = "16 bits" if problem.itemsize == 2 else problem.dtype
    return f"{operands} to 32 bits" if jnp.dtype(problem.out_dtype).itemsize == 4 else operands


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
