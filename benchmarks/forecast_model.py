"""Forecasts the time of a rung of a matmul ladder, from the phases of an output tile and which of them overlap.

The forecast is made in four parts:

    k step   the longest of four times: the tensor cores', their reads of shared memory, the copies from L2, and the
             copies' latency / the number of stages by which they run ahead
    tile     the k steps, and the parts of CTA start, first copy and epilogue that are not hidden
    device   rounds of tiles on an SM (the last one may be partly empty), or the traffic to memory if that takes longer
    clock    depends on how busy the tensor cores are, since the chip runs at its power limit (`Chip.clock_mhz`)

`benchmarks.forecast` prints these forecasts after a table of their errors on an H200. The library ranks configurations
by another model, `overlap/choice/model.py`.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Sequence

from benchmarks.forecast_chips import Chip
from benchmarks.forecast_lessons import F32_BYTES, LADDER, TILE_K_BYTES, Lesson, Matmul
from overlap.kernels.tile_order import TileOrder
from overlap.primitives.integers import ceil_div

# Work that runs beside the product still costs this fraction of its time, since it draws power.
HIDDEN_COST = 0.1


@dataclasses.dataclass(frozen=True)
class Forecast:
    """The forecast for one rung.

    Attributes:
      lesson: the rung.
      us: microseconds of one call.
      mhz: the clock in MHz.
      utilization: the call's TFLOP/s / the data sheet's TFLOP/s.
      bound: the resource that limits a k step, or "memory".
      hbm_bytes: bytes read from and written to memory.
    """

    lesson: Lesson
    us: float
    mhz: float
    utilization: float
    bound: str
    hbm_bytes: float


def step_cycles(chip: Chip, lesson: Lesson, itemsize: int) -> dict[str, float]:
    """Returns the cycles that one k step of a CTA takes on each resource, if the SM runs no other CTA."""
    tile_k = TILE_K_BYTES // itemsize
    shared_columns = lesson.tile_n / lesson.cluster
    columns = shared_columns if lesson.collective else lesson.tile_n
    read_rows = lesson.tile_m + columns * ceil_div(lesson.tile_m, chip.mma_rows)
    return {
        "tensor cores": lesson.tile_m * lesson.tile_n * tile_k / (chip.macs(itemsize) * chip.sustained),
        "shared memory": read_rows * TILE_K_BYTES / chip.smem_bytes_per_cycle,
        "L2": (lesson.tile_m + shared_columns) * TILE_K_BYTES / chip.l2_bytes_per_cycle,
    }


def epilogue_cycles(chip: Chip, lesson: Lesson, itemsize: int) -> float:
    """Returns the cycles from a tile's last product until its shared memory is free, if the SM does nothing else."""
    elements = lesson.tile_m * lesson.tile_n
    write = elements * itemsize / chip.smem_write_bytes_per_cycle + elements * F32_BYTES / chip.tmem_bytes_per_cycle
    store = elements * itemsize / chip.store_bytes_per_cycle
    if lesson.epilogue == "whole":
        return chip.drain_cycles + write + store
    chunks = lesson.tile_n / lesson.epilogue_tile_n
    return chip.drain_cycles + max(write, store) + min(write, store) / chunks


def _ctas_per_sm(chip: Chip, lesson: Lesson, itemsize: int) -> int:
    return max(1, chip.smem_limit_bytes // lesson.smem_bytes(itemsize))


def _core_cycles(chip: Chip, lesson: Lesson, problem: Matmul) -> tuple[float, str]:
    """Returns the cycles of the busiest SM, and the name of the resource that limits a k step."""
    steps = step_cycles(chip, lesson, problem.itemsize)
    k_steps = ceil_div(problem.k * problem.itemsize, TILE_K_BYTES)
    tiles = ceil_div(problem.m, lesson.tile_m * lesson.cluster) * ceil_div(problem.n, lesson.tile_n)
    epilogue = epilogue_cycles(chip, lesson, problem.itemsize)
    slowest = max(steps, key=steps.__getitem__)
    start = chip.cta_start_cycles + chip.copy_latency_cycles
    if lesson.persistent:
        waves = ceil_div(tiles, chip.sms // lesson.cluster)
        mainloop = k_steps * _pipelined_step(chip, lesson, steps)
        if lesson.epilogue == "dedicated":
            return start + waves * max(mainloop, epilogue) + epilogue, slowest
        # The last two chunks are stored while the next tile's products run.
        hidden = 2 * lesson.tile_m * lesson.epilogue_tile_n * problem.itemsize / chip.store_bytes_per_cycle
        return start + waves * (mainloop + epilogue - hidden) + hidden, slowest
    ctas_per_sm = _ctas_per_sm(chip, lesson, problem.itemsize)
    full_rounds, left = divmod(tiles, chip.sms // lesson.cluster * ctas_per_sm)
    last = ceil_div(left, chip.sms // lesson.cluster)
    cycles = 0.0
    for rounds, resident in ((full_rounds, ctas_per_sm), (1 if left else 0, last)):
        if lesson.stages == 1:
            # Copy, then product. Other CTAs on the same SM may use the resources that this one leaves idle.
            alone = k_steps * (chip.copy_latency_cycles + steps["L2"] + steps["tensor cores"]) + start + epilogue
        else:
            alone = k_steps * _pipelined_step(chip, lesson, steps) + start + epilogue
        cycles += rounds * max(alone, resident * k_steps * steps[slowest])
    return cycles, "copy latency" if lesson.stages == 1 else slowest


def _pipelined_step(chip: Chip, lesson: Lesson, steps: dict[str, float]) -> float:
    # A stage is released one k step late, so the copies run `stages` - 1 stages ahead.
    return max(*steps.values(), (chip.copy_latency_cycles + steps["L2"]) / max(1, lesson.stages - 1))


def hbm_bytes(chip: Chip, lesson: Lesson, problem: Matmul) -> float:
    """Returns the bytes read from and written to memory: the result, and operands that are not in L2 when needed."""
    m_tiles, n_tiles = ceil_div(problem.m, lesson.tile_m * lesson.cluster), ceil_div(problem.n, lesson.tile_n)
    order = TileOrder(m_tiles, n_tiles, lesson.minor, lesson.width or (m_tiles if lesson.minor == "m" else n_tiles))
    ctas_per_sm = 1 if lesson.persistent else _ctas_per_sm(chip, lesson, problem.itemsize)
    at_once = chip.sms // lesson.cluster * ctas_per_sm
    panel_bytes = {
        "m": lesson.tile_m * lesson.cluster * problem.k * problem.itemsize,
        "n": lesson.tile_n * problem.k * problem.itemsize,
    }
    held: OrderedDict[tuple[str, int], None] = OrderedDict()
    held_bytes = read = 0.0
    for first in range(0, order.tiles, at_once):
        coordinates = [order(index) for index in range(first, min(first + at_once, order.tiles))]
        panels = [("m", row) for row, _ in coordinates] + [("n", column) for _, column in coordinates]
        for panel in dict.fromkeys(panels):
            if panel in held:
                held.move_to_end(panel)
                continue
            read += panel_bytes[panel[0]]
            held[panel] = None
            held_bytes += panel_bytes[panel[0]]
            while held_bytes > chip.l2_bytes and len(held) > 1:
                oldest, _ = held.popitem(last=False)
                held_bytes -= panel_bytes[oldest[0]]
    return read + float(problem.m) * problem.n * problem.itemsize


def forecast(chip: Chip, lesson: Lesson, problem: Matmul = LADDER) -> Forecast:
    """Forecasts the time of `problem` on `chip` with the rung `lesson`."""
    cycles, bound = _core_cycles(chip, lesson, problem)
    needed = problem.multiply_adds / (chip.sms * chip.macs(problem.itemsize) * chip.sustained)
    mhz = chip.clock_mhz(min(1.0, needed / cycles))
    traffic = hbm_bytes(chip, lesson, problem)
    on_cores, from_memory = cycles / mhz, traffic / chip.hbm_bytes_per_us
    us = chip.launch_us + max(on_cores, from_memory) + HIDDEN_COST * min(on_cores, from_memory)
    best_us = 1e-6 * 2 * problem.multiply_adds / chip.peak_tflops
    return Forecast(lesson, us, mhz, best_us / us, "memory" if from_memory > on_cores else bound, traffic)


def best(chip: Chip, lessons: Sequence[Lesson], problem: Matmul = LADDER) -> Forecast:
    """Returns the forecast of the fastest rung among those that fit into shared memory."""
    fitting = [lesson for lesson in lessons if lesson.smem_bytes(problem.itemsize) <= chip.smem_limit_bytes]
    return min((forecast(chip, lesson, problem) for lesson in fitting), key=lambda result: result.us)
