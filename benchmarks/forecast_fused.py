"""Forecasts the time of a fused operation on any chip, with formulas like those of `overlap/choice/model.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from benchmarks.forecast_chips import Chip
from benchmarks.forecast_lessons import Lesson, Matmul
from benchmarks.forecast_model import HIDDEN_COST, best
from overlap.choice import model
from overlap.primitives.integers import ceil_div

Operation = Literal["all_gather_lhs_matmul", "matmul_reduce_scatter"]


@dataclasses.dataclass(frozen=True)
class Fused:
    """A fused operation and its sizes.

    Attributes:
      operation: the name of the operation.
      devices: how many devices, all in one host and connected by NVLink.
      m: for a gather, rows of one shard; for a scatter, rows of the whole result.
      n: columns of one device's product.
      k: contraction size of one device's product.
      itemsize: bytes of an element.
    """

    operation: Operation
    devices: int
    m: int
    n: int
    k: int
    itemsize: int = 2

    @property
    def product(self) -> Matmul:
        """The product that one device computes."""
        rows = self.m * self.devices if self.operation == "all_gather_lhs_matmul" else self.m
        return Matmul(rows, self.n, self.k, self.itemsize)

    @property
    def received_bytes(self) -> float:
        """The bytes that one device receives over NVLink."""
        if self.operation == "all_gather_lhs_matmul":
            return float(self.devices - 1) * self.m * self.k * self.itemsize
        return (self.devices - 1) / self.devices * self.m * self.n * self.itemsize


@dataclasses.dataclass(frozen=True)
class FusedForecast:
    """The forecast for a fused operation. Times are in microseconds.

    Attributes:
      roof_us: the time of the product alone, with the same mainloop on one device.
      nvlink_us: the time of the transfer alone: the received bytes / NVLink's bandwidth.
      us: the time of the fused operation.
    """

    roof_us: float
    nvlink_us: float
    us: float

    @property
    def roof_fraction(self) -> float:
        """The roof's time / the fused operation's time: the operation's speed as a fraction of the roof's."""
        return self.roof_us / self.us


def forecast_fused(chip: Chip, problem: Fused, lessons: Sequence[Lesson]) -> FusedForecast:
    """Forecasts `problem` on `chip`. The mainloop is configured like the fastest rung of `lessons`."""
    product = best(chip, lessons, problem.product)
    roof_us, nvlink_us = product.us, problem.received_bytes / chip.nvlink_bytes_per_us
    lesson = product.lesson
    at_once = chip.sms // lesson.cluster
    tiles = ceil_div(problem.product.m, lesson.tile_m * lesson.cluster) * ceil_div(problem.n, lesson.tile_n)
    waves = ceil_div(tiles, at_once)
    # The transfer takes power and bandwidth from the product that runs at the same time.
    hidden_us = HIDDEN_COST * min(roof_us, nvlink_us)
    if problem.operation == "all_gather_lhs_matmul":
        gather_us = model.GATHER_US + nvlink_us
        # When the last rows have come, the tiles of one shard are left to compute, or at least one wave.
        last = max(1 / problem.devices, 1 / waves)
        return FusedForecast(roof_us, nvlink_us, max(roof_us + hidden_us, gather_us + roof_us * last))
    # A device computes its own tiles last. During that time its parts of the last tiles for peers are sent.
    of_peers = tiles * (problem.devices - 1) // problem.devices
    tile_bytes = lesson.tile_m * lesson.cluster * lesson.tile_n * problem.itemsize
    last_us = min(of_peers, at_once) * tile_bytes / chip.nvlink_bytes_per_us
    slack_us = roof_us * (waves - ceil_div(of_peers, at_once)) / waves
    us = roof_us + hidden_us + model.SCATTER_US + max(last_us - slack_us, 0.0)
    return FusedForecast(roof_us, nvlink_us, max(us, model.SCATTER_US + nvlink_us))
