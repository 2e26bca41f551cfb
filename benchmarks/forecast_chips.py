"""States the figures of the chips for `benchmarks.forecast`, such as clocks and bandwidths, and the origin of each.

There are five origins:

- *data sheet*: published in a data sheet, a white paper or the PTX ISA
- *measured*: measured by this library's authors
- *model*: a constant of the model by which the library ranked configurations until 2026-11-23. (Today's model has other
  formulas, in which the same figures mean something else.)
- *fitted*: fitted to the measured times of the Hopper ladder
- *assumed*: a guess

Nothing is fitted to Blackwell.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

Origin = Literal["data sheet", "measured", "model", "fitted", "assumed"]

# These two figures are fitted to the measured Hopper ladder, by least squares of the relative errors. The rung
# `basic` determines the first figure. The second one hardly matters: between 1250 and 2250 cycles the sum of squares
# changes by 2%.
COPY_LATENCY_CYCLES = 1100.0
CTA_START_CYCLES = 1750.0
# The bandwidths that our H200s sustain, and their fractions of the data sheet's: 4.0 of 4.8 TB/s, 350 of 450 GB/s.
_HBM_BYTES_PER_US, _NVLINK_BYTES_PER_US, _L2_BYTES = 4.0e6, 0.35e6, 40e6
_HBM_SHARE = _HBM_BYTES_PER_US / 4.8e6
_NVLINK_SHARE = _NVLINK_BYTES_PER_US / 0.45e6
_L2_SHARE = _L2_BYTES / 50e6


@dataclasses.dataclass(frozen=True)
class Chip:
    """The figures of a GPU. Rates per cycle are rates of one SM.

    Attributes:
      name: the name of the GPU.
      sms: how many streaming multiprocessors it has.
      peak_mhz: the clock that follows from the data sheet's TFLOP/s. No forecast assumes a higher clock.
      load_mhz: the clock at the power limit if the tensor cores never wait (independent normal inputs).
      clock_exponent: how the clock rises if the tensor cores wait; see `clock_mhz`.
      macs_16bit: multiply-adds per cycle, 16-bit operands.
      macs_8bit: multiply-adds per cycle, 8-bit operands.
      sustained: the fraction of `macs_16bit` or `macs_8bit` that a mainloop sustains.
      mma_rows: how many rows of the left operand share one read of the right operand from shared memory.
      smem_limit_bytes: the most shared memory that one CTA can have.
      smem_bytes_per_cycle: the rate at which tensor cores read operands from shared memory.
      smem_write_bytes_per_cycle: the rate at which threads write the output tile to shared memory.
      l2_bytes_per_cycle: the rate of TMA copies from L2 to shared memory while all SMs copy.
      store_bytes_per_cycle: the rate of TMA copies from shared memory to L2.
      tmem_bytes_per_cycle: the rate from tensor memory to registers; infinite if the accumulator is in registers.
      l2_bytes: the part of L2 that holds operands for reuse.
      hbm_bytes_per_us: the memory bandwidth of the device.
      copy_latency_cycles: the time from the issue of a TMA copy under load until threads that wait for it continue,
        less the time of the transfer itself.
      cta_start_cycles: the time from the end of one CTA to the first copy of the next: launch, barriers, descriptors.
      drain_cycles: the time of draining the tensor cores and starting the epilogue of a tile.
      nvlink_bytes_per_us: the rate at which one device receives over NVLink.
      launch_us: the time of launching a kernel.
      origins: for each figure its origin, and a remark.
    """

    name: str
    sms: int
    peak_mhz: float
    load_mhz: float
    clock_exponent: float
    macs_16bit: float
    macs_8bit: float
    sustained: float
    mma_rows: int
    smem_limit_bytes: int
    smem_bytes_per_cycle: float
    smem_write_bytes_per_cycle: float
    l2_bytes_per_cycle: float
    store_bytes_per_cycle: float
    tmem_bytes_per_cycle: float
    l2_bytes: float
    hbm_bytes_per_us: float
    copy_latency_cycles: float
    cta_start_cycles: float
    drain_cycles: float
    nvlink_bytes_per_us: float
    launch_us: float
    origins: Mapping[str, tuple[Origin, str]]

    def macs(self, itemsize: int) -> float:
        """Returns the multiply-adds per cycle and SM for operands of `itemsize` bytes."""
        return {1: self.macs_8bit, 2: self.macs_16bit}[itemsize]

    @property
    def peak_tflops(self) -> float:
        """The data sheet's dense TFLOP/s for 16-bit operands."""
        return 2 * self.sms * self.macs_16bit * self.peak_mhz / 1e6

    def clock_mhz(self, busy: float) -> float:
        """Returns the clock in MHz if the tensor cores multiply for the fraction `busy` of the time.

        With an exponent of 1/3, clock³ × activity is constant at the power limit: dynamic power is activity × clock ×
        voltage², and the voltage is proportional to the clock. With an exponent of 0 the clock is always `load_mhz`.
        """
        return min(self.peak_mhz, self.load_mhz * busy**-self.clock_exponent)


def _peak_mhz(tflops: float, sms: int, macs: float) -> float:
    return tflops * 1e6 / (2 * sms * macs)


_H200_PEAK_MHZ = _peak_mhz(989.4, 132, 2048)
_H200_LOAD_MHZ = 1365.0

H200 = Chip(
    name="H200",
    sms=132,
    peak_mhz=_H200_PEAK_MHZ,
    load_mhz=_H200_LOAD_MHZ,
    clock_exponent=1 / 3,
    macs_16bit=2048,
    macs_8bit=4096,
    sustained=3600 / 4096,
    mma_rows=64,
    smem_limit_bytes=227 * 1024,
    smem_bytes_per_cycle=100.0,
    smem_write_bytes_per_cycle=128.0,
    l2_bytes_per_cycle=55.0,
    store_bytes_per_cycle=64.0,
    tmem_bytes_per_cycle=float("inf"),
    l2_bytes=_L2_BYTES,
    hbm_bytes_per_us=_HBM_BYTES_PER_US,
    copy_latency_cycles=COPY_LATENCY_CYCLES,
    cta_start_cycles=CTA_START_CYCLES,
    drain_cycles=600.0,
    nvlink_bytes_per_us=_NVLINK_BYTES_PER_US,
    launch_us=3.0,
    origins=MappingProxyType(
        {
            "sms": ("data sheet", "H200 SXM"),
            "peak_mhz": ("data sheet", "989.4 TFLOP/s over 132 SMs at that rate"),
            "load_mhz": ("measured", "one reading beside cuBLAS at 690 W, in the ladder's csv"),
            "clock_exponent": ("assumed", "dynamic power goes with the clock's cube"),
            "macs_16bit": ("data sheet", "white paper: 4 tensor cores × 512"),
            "macs_8bit": ("data sheet", "twice the 16-bit rate"),
            "sustained": ("model", "fitted there to cuBLAS and our mainloop"),
            "mma_rows": ("data sheet", "PTX ISA: wgmma m64"),
            "smem_limit_bytes": ("data sheet", "227 KB"),
            "smem_bytes_per_cycle": ("model", "not fitted"),
            "smem_write_bytes_per_cycle": ("data sheet", "32 banks of 4 bytes"),
            "l2_bytes_per_cycle": ("model", "fitted there to operands across lines"),
            "store_bytes_per_cycle": ("model", "not fitted"),
            "tmem_bytes_per_cycle": ("data sheet", "none: accumulators in registers"),
            "l2_bytes": ("model", "40 of 50 MB"),
            "hbm_bytes_per_us": ("model", "4.0 of 4.8 TB/s"),
            "copy_latency_cycles": ("fitted", "to the Hopper ladder"),
            "cta_start_cycles": ("fitted", "to the Hopper ladder"),
            "drain_cycles": ("model", "not fitted"),
            "nvlink_bytes_per_us": ("model", "350 of 450 GB/s"),
            "launch_us": ("model", "not fitted"),
        }
    ),
)

_AS_H200 = "as on the H200"
_B200_PEAK_MHZ = _peak_mhz(2250.0, 148, 4096)
B200 = dataclasses.replace(
    H200,
    name="B200",
    sms=148,
    peak_mhz=_B200_PEAK_MHZ,
    load_mhz=_B200_PEAK_MHZ * _H200_LOAD_MHZ / _H200_PEAK_MHZ,
    macs_16bit=4096,
    macs_8bit=8192,
    mma_rows=128,
    tmem_bytes_per_cycle=512.0,
    l2_bytes=126e6 * _L2_SHARE,
    hbm_bytes_per_us=8e6 * _HBM_SHARE,
    nvlink_bytes_per_us=0.9e6 * _NVLINK_SHARE,
    origins=MappingProxyType(
        {
            "sms": ("data sheet", "as chipsandcheese.com found on one"),
            "peak_mhz": ("data sheet", "2250 TFLOP/s over 148 SMs at that rate"),
            "load_mhz": ("assumed", "the H200's fraction of its peak clock"),
            "clock_exponent": ("assumed", _AS_H200),
            "macs_16bit": ("assumed", "twice Hopper's"),
            "macs_8bit": ("data sheet", "twice the 16-bit rate"),
            "sustained": ("assumed", _AS_H200),
            "mma_rows": ("data sheet", "PTX ISA: tcgen05.mma, M = 128 in a CTA"),
            "smem_limit_bytes": ("data sheet", "227 KB"),
            "smem_bytes_per_cycle": ("assumed", _AS_H200),
            "smem_write_bytes_per_cycle": ("assumed", _AS_H200),
            "l2_bytes_per_cycle": ("assumed", _AS_H200),
            "store_bytes_per_cycle": ("assumed", _AS_H200),
            "tmem_bytes_per_cycle": ("assumed", "4 bytes per lane and cycle, 128 lanes"),
            "l2_bytes": ("assumed", "the H200's fraction of 126 MB (data sheet)"),
            "hbm_bytes_per_us": ("assumed", "the H200's fraction of 8 TB/s (data sheet)"),
            "copy_latency_cycles": ("assumed", _AS_H200),
            "cta_start_cycles": ("assumed", _AS_H200),
            "drain_cycles": ("assumed", _AS_H200),
            "nvlink_bytes_per_us": ("assumed", "the H200's fraction of 900 GB/s (data sheet)"),
            "launch_us": ("assumed", _AS_H200),
        }
    ),
)
