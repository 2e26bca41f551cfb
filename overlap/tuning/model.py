"""How long a configuration should take: waves of tiles, and what bounds a tile. For ranking, not for forecasts.

The rates are those of a Hopper SM. The one that is fitted is `L2_BYTES_PER_CYCLE`: with it a tile of 128 × 256 reaches
83% of the tensor cores' peak, which is what cuBLAS and our mainloop sustain on an H200.
"""

from __future__ import annotations

import jax.numpy as jnp

from overlap.kernels.config import COMPUTE_WARPGROUPS, WGMMA_M, Config
from overlap.kernels.target import Target
from overlap.tuning.problem import Problem

CYCLES_PER_US = 1600.0
# Multiply-adds per cycle times bytes per operand element: 2048 for 2 bytes, 4096 for 1.
TENSOR_CORE_RATE = 4096.0
SMEM_BYTES_PER_CYCLE = 128.0
# Of one SM when all load at once; alone it gets more.
L2_BYTES_PER_CYCLE = 40.0
L2_BYTES_PER_CYCLE_ALONE = 64.0
STORE_BYTES_PER_CYCLE = 64.0
# Filling the pipeline and draining it, per tile; the accumulator is read while no wgmma runs.
TILE_CYCLES = 600.0
# Of the whole device; a core alone draws no more than its share. Measured on an H200: 16 × 8192 × 8192 on 64 cores
# moves 2.3 MB/µs, on 128 cores 2.9 (with the split's overhead in it).
HBM_BYTES_PER_US = 4.0e6
LAUNCH_US = 3.0
HIDDEN_COST = 0.1
F32_BYTES = 4


def output_tiles(config: Config, problem: Problem) -> int:
    """How many tiles one device computes; the parts of a split contraction are tiles of their own."""
    rows = problem.batch * problem.devices * -(-problem.m // config.tile_m)
    return rows * -(-problem.n // config.tile_n) * config.split_k


def waves(config: Config, problem: Problem, target: Target) -> int:
    """How many tiles the busiest core computes."""
    return -(-output_tiles(config, problem) // target.num_cores)


def predicted_us(config: Config, problem: Problem, target: Target) -> float:
    """The model's time for one call, in microseconds."""
    itemsize = jnp.dtype(problem.dtype).itemsize
    out_bytes = jnp.dtype(problem.out_dtype).itemsize if config.split_k == 1 else F32_BYTES
    depth = config.tile_k * -(-problem.k // (config.split_k * config.tile_k))
    half_m, half_n = config.halves
    active = min(output_tiles(config, problem), target.num_cores)
    l2_rate = min(L2_BYTES_PER_CYCLE_ALONE, L2_BYTES_PER_CYCLE * target.num_cores / active)
    # Cycles per element of depth: the tensor cores, their reads of shared memory, the loads into it.
    multiply = config.tile_m * config.tile_n * itemsize / TENSOR_CORE_RATE
    read = COMPUTE_WARPGROUPS * (half_m / WGMMA_M) * (WGMMA_M + half_n) * itemsize / SMEM_BYTES_PER_CYCLE
    load = (config.tile_m + config.tile_n) * itemsize / l2_rate
    epilogue = config.tile_m * config.tile_n * out_bytes / STORE_BYTES_PER_CYCLE
    cycles = waves(config, problem, target) * (depth * max(multiply, read, load) + epilogue + TILE_CYCLES)
    hbm_rate = HBM_BYTES_PER_US * active / target.num_cores
    on_cores, from_hbm = cycles / CYCLES_PER_US, problem.bytes_per_device / hbm_rate
    # What is hidden is not quite free; it also tells apart what memory alone bounds.
    us = max(on_cores, from_hbm) + HIDDEN_COST * min(on_cores, from_hbm) + LAUNCH_US
    if config.split_k > 1:
        # The partial results are written, read again and summed by a kernel of its own.
        partial_bytes = 2 * config.split_k * problem.batch * problem.m * problem.n * F32_BYTES
        us += LAUNCH_US + partial_bytes / HBM_BYTES_PER_US
    return us
