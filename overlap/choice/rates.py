"""What a core of each architecture does per cycle, for the model that ranks configurations.

Hopper's are those of an H200, fitted to measurements: `rates_h200.json`, written by `python -m benchmarks.fit_model`.

Blackwell's are those of a B200, and none of them is measured. They come from its data sheet (2250 TFLOP/s of 16-bit
products, 148 cores, 8 TB/s, 126 MB of L2, 900 GB/s of NVLink in each direction), less what an H200 falls short of its
own; what a data sheet does not say is taken to be as on an H200.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

from overlap.kernels.blackwell.limits import rhs_columns
from overlap.kernels.config import Config
from overlap.kernels.hopper import limits as hopper
from overlap.kernels.target import Target
from overlap.kernels.tma import limits as tma


@dataclasses.dataclass(frozen=True)
class Rates:
    """The rates of one architecture.

    Attributes:
      cycles_per_us: at full clocks.
      tensor_core_rate: multiply-adds per cycle times bytes per operand element.
      step_cycles: barriers and issue, per k step: why small tiles fall short.
      cluster_step_cycles: likewise, what two CTAs that share their loads wait for each other.
      smem_bytes_per_cycle: what the tensor cores read of shared memory.
      l2_bytes_per_cycle: of one core when all load at once.
      l2_bytes_per_cycle_alone: of one core alone.
      unaligned_lines: how many lines of the cache a row of a box costs that does not begin where a line begins.
      overlap_exponent: what goes on at the same time takes (a**p + b**p) ** (1 / p).
      empty_row_cycles: of a row that TMA fills with zeros, since the operand has no such row. Measured on an H200,
        32 × 8192 × 8192 by tiles of 128 × 64 and of 128 × 128: 8 and 14.
      store_bytes_per_cycle: of one core.
      store_wait_cycles: until a buffer of the epilogue has been read.
      tile_cycles: filling the pipeline and draining it, per tile.
      turn_cycles: from one warpgroup's products to the other's, if they take turns.
      in_turn: how much longer all products of a core take then.
      gathering_in_turn: likewise beside a gather, whose buffers leave less room for stages. Measured on 2 H200s: 1.03
        to 1.11.
      load_latency_cycles: from the request of an operand tile until it is there.
      hbm_bytes_per_us: of the whole device.
      hbm_bytes_per_us_alone: of one core alone. Measured on an H200: 16 × 8192 × 8192 takes 45.8 µs on 64 cores, 36.3
        on 128: 3.4 and 4.4 MB/µs behind the launch.
      l2_bytes: weights that are larger are read anew for each shard's tiles, which come one after the other.
      sum_bytes_per_us: of the kernel that sums up the parts of a split contraction.
      flag_cycles: of a tile that CTAs share: a flag crosses the L2, and what others have summed up is read one round
        trip after another.
      add_bytes_per_cycle: likewise.
      launch_us: of a kernel.
      next_launch_us: of another one behind it.
      zero_flags_us: of the one that zeroes its flags.
      cluster_us: until two CTAs have begun and ended together.
      multiplied_per_us: how much the device can multiply (multiply-adds times bytes of an element) if all its power
        goes there.
      loaded_per_us: likewise, bytes that it loads from the L2.
      read_per_us: likewise, bytes that the tensor cores read of shared memory.
      moved_per_us: likewise, bytes that it moves to and from its memory.
      clock_exponent: how clocks fall with the power that is asked for, once that is more than there is.
      pulled_bytes_per_us: what the communicators of one device move over NVLink.
      sent_bytes_per_us: what its compute warpgroups send.
      overlaps_epilogue: whether a tile is stored while the next one is multiplied, whatever the schedule.
    """

    cycles_per_us: float
    tensor_core_rate: float
    step_cycles: float
    cluster_step_cycles: float
    smem_bytes_per_cycle: float
    l2_bytes_per_cycle: float
    l2_bytes_per_cycle_alone: float
    unaligned_lines: float
    overlap_exponent: float
    empty_row_cycles: float
    store_bytes_per_cycle: float
    store_wait_cycles: float
    tile_cycles: float
    turn_cycles: float
    in_turn: float
    gathering_in_turn: float
    load_latency_cycles: float
    hbm_bytes_per_us: float
    hbm_bytes_per_us_alone: float
    l2_bytes: float
    sum_bytes_per_us: float
    flag_cycles: float
    add_bytes_per_cycle: float
    launch_us: float
    next_launch_us: float
    zero_flags_us: float
    cluster_us: float
    multiplied_per_us: float
    loaded_per_us: float
    read_per_us: float
    moved_per_us: float
    clock_exponent: float
    pulled_bytes_per_us: float
    sent_bytes_per_us: float
    overlaps_epilogue: bool = False

    def stores(self, config: Config) -> int:
        """In how many steps a compute warpgroup stores a tile, or its part of one."""
        _, columns = hopper.warpgroup_tile(config)
        return columns // config.epilogue_tile_n

    def smem_reads(self, config: Config) -> float:
        """Elements that the tensor cores read of shared memory, per element of a tile's depth."""
        rows, columns = hopper.warpgroup_tile(config)
        parts = config.tile_m * config.tile_n // (rows * columns)
        if config.swap_operands:
            rows, columns = columns, rows
        return parts * (rows / hopper.WGMMA_M) * (hopper.WGMMA_M + columns)

    def rows_multiplied(self, config: Config, loaded: int) -> int:
        """How many rows of a tile are multiplied if so many are loaded."""
        rows, _ = hopper.warpgroup_tile(config)
        return -(-loaded // rows) * rows

    def rows_loaded(self, config: Config, m: int, transpose_lhs: bool) -> int:
        """How many rows of its tiles are loaded of a left operand with `m` rows."""
        return hopper.rows_loaded(config, m, transpose_lhs)


class BlackwellRates(Rates):
    """Those of a mainloop whose tensor cores read each operand once, and keep their sums to themselves."""

    def smem_reads(self, config: Config) -> float:
        return config.tile_m + rhs_columns(config)

    def rows_multiplied(self, config: Config, loaded: int) -> int:
        return config.tile_m

    def stores(self, config: Config) -> int:
        return config.tile_n // config.epilogue_tile_n

    def rows_loaded(self, config: Config, m: int, transpose_lhs: bool) -> int:
        return tma.rows_loaded(config, m, transpose_lhs)


FILE = pathlib.Path(__file__).parent / "rates_h200.json"
_FITTED: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))["rates"]
HOPPER = Rates(**_FITTED)
BLACKWELL = BlackwellRates(
    overlaps_epilogue=True,
    **_FITTED
    | dict(
        cycles_per_us=1700.0,
        tensor_core_rate=7200.0,
        step_cycles=80.0,
        smem_bytes_per_cycle=128.0,
        l2_bytes_per_cycle=55.0,
        l2_bytes_per_cycle_alone=64.0,
        store_bytes_per_cycle=64.0,
        store_wait_cycles=0.0,
        tile_cycles=600.0,
        hbm_bytes_per_us=6.4e6,
        l2_bytes=100e6,
        sum_bytes_per_us=9.0e6,
        # The clocks are those at the power limit already.
        clock_exponent=0.0,
        pulled_bytes_per_us=0.7e6,
        sent_bytes_per_us=0.8e6,
    ),
)


def rates_of(target: Target) -> Rates:
    """The rates of a device."""
    return BLACKWELL if target.is_blackwell else HOPPER
