"""What a core of each architecture does per cycle, for the model that ranks configurations.

Hopper's are those of an H200 at its power limit. Two are fitted: `tensor_core_rate`, to what cuBLAS and our mainloop
sustain (83% of peak), and `l2_bytes_per_cycle`, to how much slower a product gets if each row of a box lies across two
lines of the cache.

Blackwell's are those of a B200, and none of them is measured. They come from its data sheet (2250 TFLOP/s of 16-bit
products, 148 cores, 8 TB/s, 126 MB of L2, 900 GB/s of NVLink in each direction), less what an H200 falls short of its
own; what a data sheet does not say is taken to be as on an H200.
"""

from __future__ import annotations

import dataclasses

from overlap.kernels.blackwell.limits import rhs_columns
from overlap.kernels.config import Config
from overlap.kernels.hopper import limits as hopper
from overlap.kernels.target import Target
from overlap.kernels.tma import limits as tma


@dataclasses.dataclass(frozen=True)
class Rates:
    """The rates of one architecture.

    Attributes:
      cycles_per_us: under load.
      tensor_core_rate: multiply-adds per cycle times bytes per operand element.
      step_cycles: barriers and issue, per k step: why small tiles fall short.
      smem_bytes_per_cycle: what the tensor cores read of shared memory.
      l2_bytes_per_cycle: of one core when all load at once.
      l2_bytes_per_cycle_alone: of one core alone.
      empty_row_cycles: of a row that TMA fills with zeros, since the operand has no such row. Measured on an H200,
        32 × 8192 × 8192 by tiles of 128 × 64 and of 128 × 128: 8 and 14.
      store_bytes_per_cycle: of one core.
      tile_cycles: filling the pipeline and draining it, per tile.
      hbm_bytes_per_us: of the whole device; a core alone draws no more than its share. Measured on an H200:
        16 × 8192 × 8192 on 64 cores moves 2.3 MB/µs, on 128 cores 2.9 (with the overhead of split tiles in it).
      l2_bytes: weights that are larger are read anew for each shard's tiles, which come one after the other.
      sum_bytes_per_us: of the kernel that sums up the parts of a split contraction.
      flag_cycles: of a tile that CTAs share: a flag crosses the L2, and what others have summed up is read one round
        trip after another.
      add_bytes_per_cycle: likewise.
      pulled_bytes_per_us: what the communicators of one device move over NVLink.
      sent_bytes_per_us: what its compute warpgroups send.
      overlaps_epilogue: whether a tile is stored while the next one is multiplied.
    """

    cycles_per_us: float = 1600.0
    tensor_core_rate: float = 3600.0
    step_cycles: float = 80.0
    smem_bytes_per_cycle: float = 100.0
    l2_bytes_per_cycle: float = 55.0
    l2_bytes_per_cycle_alone: float = 64.0
    empty_row_cycles: float = 8.0
    store_bytes_per_cycle: float = 64.0
    tile_cycles: float = 600.0
    hbm_bytes_per_us: float = 4.0e6
    l2_bytes: float = 40e6
    sum_bytes_per_us: float = 6.0e6
    flag_cycles: float = 8000.0
    add_bytes_per_cycle: float = 32.0
    pulled_bytes_per_us: float = 0.35e6
    sent_bytes_per_us: float = 0.45e6
    overlaps_epilogue: bool = False

    def smem_reads(self, config: Config) -> float:
        """Elements that the tensor cores read of shared memory, per element of a tile's depth."""
        half_m, half_n = hopper.halves(config)
        return hopper.COMPUTE_WARPGROUPS * (half_m / hopper.WGMMA_M) * (hopper.WGMMA_M + half_n)

    def rows_loaded(self, config: Config, m: int, transpose_lhs: bool) -> int:
        """How many rows of its tiles are loaded of a left operand with `m` rows."""
        return hopper.rows_loaded(config, m, transpose_lhs)


class BlackwellRates(Rates):
    """Those of a mainloop whose tensor cores read each operand once, and keep their sums to themselves."""

    def smem_reads(self, config: Config) -> float:
        return config.tile_m + rhs_columns(config)

    def rows_loaded(self, config: Config, m: int, transpose_lhs: bool) -> int:
        return tma.rows_loaded(config, m, transpose_lhs)


HOPPER = Rates()
BLACKWELL = BlackwellRates(
    cycles_per_us=1700.0,
    tensor_core_rate=7200.0,
    smem_bytes_per_cycle=128.0,
    hbm_bytes_per_us=6.4e6,
    l2_bytes=100e6,
    sum_bytes_per_us=9.0e6,
    pulled_bytes_per_us=0.7e6,
    sent_bytes_per_us=0.8e6,
    overlaps_epilogue=True,
)


def rates_of(target: Target) -> Rates:
    """The rates of a device."""
    return BLACKWELL if target.is_blackwell else HOPPER
