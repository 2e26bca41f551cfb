"""The rates of each GPU (work per cycle, bytes per µs, fixed times) that the model in `model.py` uses.

Hopper's rates for plain products are fitted to measurements on an H200 and on an H100: `rates_h200.json` and
`rates_h100.json`, written by `python -m benchmarks.fit_model`. An H800 has the memory of an H100 and uses its rates;
all other Hopper GPUs use the H200's (`measured_gpu`). For operations over several devices, all Hopper GPUs use
`rates_collectives.json`, fitted on an H200.

Blackwell's rates are for a B200, and none of them is measured. Those that its data sheet states (2250 TFLOP/s of 16-bit
products, 148 SMs, 8 TB/s, 126 MB of L2, 900 GB/s of NVLink in each direction) are reduced to what such rates were
measured to be, as a fraction of the data sheet's, on an H200 in November 2026. Further rates that `BLACKWELL` sets are
estimates; the rest come from `rates_collectives.json`.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
from typing import Literal

from overlap.kernels import limits as tma
from overlap.kernels.blackwell.limits import rhs_columns
from overlap.kernels.config import Config
from overlap.kernels.hopper import limits as hopper
from overlap.kernels.target import Target


@dataclasses.dataclass(frozen=True)
class Rates:
    """The rates of one GPU.

    Attributes:
      cycles_per_us: the clock rate in cycles per µs while power is not limited.
      tensor_core_rate: multiply-adds per cycle of one SM, times bytes per operand element.
      step_cycles: cycles that each k step takes in addition to its products, for barriers and for issuing instructions.
        This cost makes small tiles slow.
      smem_bytes_per_cycle: bytes of shared memory that the tensor cores of one SM read per cycle.
      l2_bytes_per_cycle: bytes per cycle that one SM loads from the L2 while all SMs load.
      group_bytes_per_cycle: bytes per cycle that a GPC loads from the L2, divided by the number of its SMs. A byte
        that several of them load counts once.
      unaligned_lines: how many cache lines are loaded for one row of a box if the row does not begin at a cache line.
      overlap_exponent: the exponent p of the model: two activities that take a and b cycles alone take (a**p + b**p) **
        (1 / p) cycles when they run at the same time.
      empty_row_cycles: cycles to load one row of a box that lies beyond the operand, which TMA fills with zeros.
        Measured on an H200 for 32 × 8192 × 8192: 8 with tiles of 128 × 64, 14 with tiles of 128 × 128.
      store_bytes_per_cycle: bytes per cycle that one SM stores.
      store_wait_cycles: cycles until an epilogue buffer has been read and can be filled again.
      tile_cycles: cycles to fill and to drain the pipeline, per tile.
      in_turn: the factor by which an SM's products take longer with the schedule "pingpong" than with "cooperative".
      gathering_in_turn: the factor that replaces `in_turn` in operations that gather, whose buffers leave less room for
        stages. Measured on 2 H200s: 1.03 to 1.11.
      load_latency_cycles: cycles from the request of an operand tile until it has arrived.
      hbm_bytes_per_us: bytes per µs that all SMs together move to and from the device's memory.
      hbm_bytes_per_us_alone: bytes per µs that one SM alone moves to and from the device's memory. Measured on an
        H200: 16 × 8192 × 8192 takes 45.8 µs on 64 SMs, 36.3 µs on 128; that is 3.4 and 4.4 MB/µs, less the launch.
      l2_bytes: size of the L2. Weights larger than this are read from memory once for each shard, since the shards are
        multiplied one after the other.
      sum_bytes_per_us: with split-k, bytes per µs that are read by the kernel that adds up the partial products.
      flag_cycles: with stream-k, cycles that CTAs that share a tile need in addition to storing and adding sums: a flag
        crosses the L2, and the sums of the other CTAs are read one round trip after another.
      add_bytes_per_cycle: with stream-k, bytes per cycle at which the sums of the other CTAs are read and added.
      exchange_cycles: with `cluster_along="k"`, cycles in which the CTAs of a cluster tell each other that sums may be
        read, and that they have been read. Measured by traces on an H200.
      exchange_bytes_per_cycle: with `cluster_along="k"`, bytes per cycle at which a CTA reads and adds the sums in the
        shared memory of its cluster's CTAs. Measured by traces on an H200: 1.2 µs for 32 KB.
      launch_us: µs to launch a kernel.
      next_launch_us: µs to launch a second kernel right after the first.
      multiplied_per_us: multiply-adds, times bytes of an element, that the device could compute per µs if all of its
        power went into products.
      loaded_per_us: bytes that the device could load from the L2 per µs if all of its power went into these loads.
      clock_exponent: if work at full clocks would take more power than the limit allows, the clock rate is divided by
        (power / limit) ** clock_exponent.
      pulled_bytes_per_us: bytes that the communicators of one device move over NVLink per µs.
      sent_bytes_per_us: bytes that the compute warpgroups of one device send over NVLink per µs.
      overlaps_epilogue: whether a tile is stored while the next one is multiplied, with any `Config.schedule`.
      measured: whether this GPU was measured. If not, XLA runs unless the caller asks for the fused kernel.
    """

    cycles_per_us: float
    tensor_core_rate: float
    step_cycles: float
    smem_bytes_per_cycle: float
    l2_bytes_per_cycle: float
    group_bytes_per_cycle: float
    unaligned_lines: float
    overlap_exponent: float
    empty_row_cycles: float
    store_bytes_per_cycle: float
    store_wait_cycles: float
    tile_cycles: float
    in_turn: float
    gathering_in_turn: float
    load_latency_cycles: float
    hbm_bytes_per_us: float
    hbm_bytes_per_us_alone: float
    l2_bytes: float
    sum_bytes_per_us: float
    flag_cycles: float
    add_bytes_per_cycle: float
    exchange_cycles: float
    exchange_bytes_per_cycle: float
    launch_us: float
    next_launch_us: float
    multiplied_per_us: float
    loaded_per_us: float
    clock_exponent: float
    pulled_bytes_per_us: float
    sent_bytes_per_us: float
    overlaps_epilogue: bool = False
    measured: bool = True

    def stores(self, config: Config) -> int:
        """Returns how many epilogue buffers a compute warpgroup fills and stores for its part of one tile."""
        _, columns = hopper.warpgroup_tile(config)
        return columns // tma.EPILOGUE_COLUMNS

    def cycles_per_step(self, config: Config) -> float:
        """Returns the cycles that each k step takes in addition to its products."""
        return self.step_cycles

    def smem_reads(self, config: Config) -> float:
        """Returns how many elements of shared memory the tensor cores read for a tile, per element of k."""
        rows, columns = hopper.warpgroup_tile(config)
        parts = config.tile_m * config.tile_n // (rows * columns)
        if config.swap_operands:
            rows, columns = columns, rows
        return parts * (rows / hopper.WGMMA_M) * (hopper.WGMMA_M + columns)

    def rows_multiplied(self, config: Config, loaded: int) -> int:
        """Returns how many rows of a tile are multiplied if `loaded` rows of it are loaded."""
        rows, _ = hopper.warpgroup_tile(config)
        return -(-loaded // rows) * rows


# Names in the kinds of devices that have the memory of an H100. An H200's measurements stand for all other Hopper GPUs.
_LIKE_H100 = ("H100", "H800")


# Cycles that each k step takes in addition in a pair of CTAs, which wait for each other. Clusters of two CTAs that
# shared loads took so many on an H200.
PAIR_STEP_CYCLES = 61.78


class BlackwellRates(Rates):
    """Rates for a mainloop whose tensor cores read each operand once per k step and keep the sums in tensor memory."""

    def cycles_per_step(self, config: Config) -> float:
        return self.step_cycles + (PAIR_STEP_CYCLES if config.tiles_per_cluster > 1 else 0.0)

    def smem_reads(self, config: Config) -> float:
        return config.tile_m + rhs_columns(config)

    def rows_multiplied(self, config: Config, loaded: int) -> int:
        return config.tile_m

    def stores(self, config: Config) -> int:
        return config.tile_n // tma.EPILOGUE_COLUMNS


def gpu_of(target: Target) -> Literal["h100", "h200", "h800", "h20"]:
    """Returns the Hopper GPU whose data sheet (products, memory, NVLink) is that of a device."""
    if re.search(r"\bH20\b", target.kind):
        return "h20"
    return "h800" if "H800" in target.kind else measured_gpu(target)


def measured_gpu(target: Target) -> Literal["h100", "h200"]:
    """Returns the Hopper GPU whose measurements stand for a device: "h100" or "h200"."""
    return "h100" if any(name in target.kind for name in _LIKE_H100) else "h200"


def file_of(name: str) -> pathlib.Path:
    """Returns the file with the fitted rates for plain products on a GPU ("h200", "h100"), or for "collectives"."""
    return pathlib.Path(__file__).parent / f"rates_{name}.json"


def _fitted(name: str) -> Rates:
    return Rates(**json.loads(file_of(name).read_text(encoding="utf-8"))["rates"])


H200 = _fitted("h200")
H100 = _fitted("h100")
# For operations over several devices. The configurations that the model chooses with these rates were measured on 2 and
# 4 H200s. These rates were fitted before neighbouring SMs' loads were counted, so they let such loads take no time.
COLLECTIVES = _fitted("collectives")
BLACKWELL = dataclasses.replace(
    BlackwellRates(**vars(COLLECTIVES)),
    overlaps_epilogue=True,
    measured=False,
    cycles_per_us=1700.0,
    tensor_core_rate=7200.0,
    step_cycles=80.0,
    smem_bytes_per_cycle=128.0,
    l2_bytes_per_cycle=55.0,
    store_bytes_per_cycle=64.0,
    store_wait_cycles=0.0,
    tile_cycles=600.0,
    hbm_bytes_per_us=6.4e6,
    l2_bytes=100e6,
    sum_bytes_per_us=9.0e6,
    clock_exponent=0.0,  # `cycles_per_us` above is already the clock rate at the power limit.
    pulled_bytes_per_us=0.7e6,
    sent_bytes_per_us=0.8e6,
)


def rates_of(target: Target, *, communicates: bool = False) -> Rates:
    """Returns the rates of a device for plain products, or for operations over several devices (`communicates`)."""
    if target.is_blackwell:
        return BLACKWELL
    if communicates:
        return COLLECTIVES
    return H100 if measured_gpu(target) == "h100" else H200
