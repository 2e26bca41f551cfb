"""How long a configuration should take: waves of tiles, and what bounds a tile. For ranking, not for forecasts.

The rates are those of an H200's core at its power limit. Two are fitted: `TENSOR_CORE_RATE`, to what cuBLAS and our
mainloop sustain (83% of peak), and `L2_BYTES_PER_CYCLE`, to how much slower a product gets if each row of a box lies
across two lines of the cache.
"""

from __future__ import annotations

import jax.numpy as jnp

from overlap.choice.problem import Problem
from overlap.kernels.config import SWIZZLE_BYTES, Config
from overlap.kernels.hopper.limits import COMPUTE_WARPGROUPS, WGMMA_M, halves, rows_loaded
from overlap.kernels.stream_k import StreamK
from overlap.kernels.target import Target
from overlap.primitives.integers import ceil_div

CYCLES_PER_US = 1600.0
# Multiply-adds per cycle times bytes per operand element.
TENSOR_CORE_RATE = 3600.0
# Barriers and issue, per k step: why small tiles fall short.
STEP_CYCLES = 80.0
SMEM_BYTES_PER_CYCLE = 100.0
# Of one SM when all load at once; alone it gets more.
L2_BYTES_PER_CYCLE = 55.0
L2_BYTES_PER_CYCLE_ALONE = 64.0
# That TMA fills with zeros, since the operand has no such row. Measured on an H200, 32 × 8192 × 8192 by tiles of
# 128 × 64 and of 128 × 128: 8 and 14.
EMPTY_ROW_CYCLES = 8.0
STORE_BYTES_PER_CYCLE = 64.0
# Filling the pipeline and draining it, per tile; the accumulator is read while no wgmma runs.
TILE_CYCLES = 600.0
# Of the whole device; a core alone draws no more than its share. Measured on an H200: 16 × 8192 × 8192 on 64 cores
# moves 2.3 MB/µs, on 128 cores 2.9 (with the overhead of split tiles in it).
HBM_BYTES_PER_US = 4.0e6
# Weights that are larger are read anew for each shard's tiles, which come one after the other.
L2_BYTES = 40e6
LAUNCH_US = 3.0
NEXT_LAUNCH_US = 1.5
SUM_BYTES_PER_US = 6.0e6
# What is hidden is not quite free: it draws power. It also tells apart what something else bounds.
HIDDEN_COST = 0.1
HIDDEN_LOADS_COST = 0.02
F32_BYTES = 4
# Of a tile that CTAs share: a flag crosses the L2, and what others have summed up is read one round trip after another.
FLAG_CYCLES = 8000.0
ADD_BYTES_PER_CYCLE = 32.0
ZERO_FLAGS_US = 2.0
# From the start until the first rows of a peer may be multiplied; and NVLink.
GATHER_US = 6.0
PULLED_BYTES_PER_US = 0.35e6
# From the end of a peer's tile until its part of it may be added.
SCATTER_US = 6.0
# From there until all devices have what has been added. Or, of parts that go to all devices from shared memory, the
# whole way, and NVLink.
SPREAD_US = 8.0
ONE_SHOT_US = 6.0
SENT_BYTES_PER_US = 0.45e6
# Two CTAs begin and end together.
CLUSTER_US = 0.5


def copied_sooner_than_received(copied_bytes: float, received_bytes: float) -> bool:
    """Whether a device copies so many bytes within its memory in less time than so many come from its peers."""
    return 2 * copied_bytes / HBM_BYTES_PER_US < received_bytes / PULLED_BYTES_PER_US


def work_of(config: Config, problem: Problem, target: Target) -> StreamK:
    """How the problem's tiles are dealt to the clusters of one device; the parts of a split are tiles of their own."""
    rows, columns = config.cluster_tile
    m, n, products = problem.grid(config)
    # Shards gathered along k lengthen the sums; in the other dimensions they bring tiles of their own.
    lengths = problem.devices if problem.gathered == "k" else 1
    tiles = products * ceil_div(m, rows) * ceil_div(n, columns) * config.split_k
    k_steps = lengths * ceil_div(problem.k, config.split_k * config.tile_k)
    return StreamK.on(target, config, tiles, k_steps)


def waves(config: Config, problem: Problem, target: Target) -> float:
    """How many tiles' worth of k steps the busiest core carries."""
    work = work_of(config, problem, target)
    return work.total_steps(0) / work.k_steps


def predicted_us(config: Config, problem: Problem, target: Target) -> float:
    """The model's time for one call, in microseconds."""
    itemsize = problem.itemsize
    out_bytes = jnp.dtype(problem.out_dtype).itemsize if config.split_k == 1 else F32_BYTES
    half_m, half_n = halves(config)
    work = work_of(config, problem, target)
    active = config.cluster * (work.num_ctas if work.full_waves else work.workers)
    l2_rate = min(L2_BYTES_PER_CYCLE_ALONE, L2_BYTES_PER_CYCLE * target.num_cores / active)
    # Cycles per element of depth: the tensor cores, their reads of shared memory, the loads into it.
    multiply = config.tile_m * config.tile_n * itemsize / TENSOR_CORE_RATE
    read = COMPUTE_WARPGROUPS * (half_m / WGMMA_M) * (WGMMA_M + half_n) * itemsize / SMEM_BYTES_PER_CYCLE
    lhs_row, rhs_row = problem.row_bytes
    m, _, products = problem.grid(config)
    loaded = rows_loaded(config, m, problem.transpose_lhs)
    # Per tile; those of the last one are shared out to all that lie above it.
    empty = 0 if problem.transpose_lhs else loaded - m / ceil_div(m, loaded)
    lhs_load = (loaded - empty) * _lines(lhs_row) * itemsize / l2_rate + empty * EMPTY_ROW_CYCLES / config.tile_k
    rhs_load = config.tile_n * _lines(rhs_row) * itemsize / l2_rate
    shared = rhs_load if config.cluster_along == "m" else lhs_load
    load = lhs_load + rhs_load - shared * (1 - 1 / config.cluster)
    elements = config.tile_m * config.tile_n
    depth = waves(config, problem, target) * work.k_steps * config.tile_k
    epilogues = work.full_waves + (work.left > 0)
    cycles = depth * (max(multiply, read, load) + HIDDEN_LOADS_COST * load + STEP_CYCLES / config.tile_k)
    cycles += epilogues * (elements * out_bytes / STORE_BYTES_PER_CYCLE + TILE_CYCLES)
    hbm_rate = HBM_BYTES_PER_US * active / target.num_cores
    weights = problem.n * problem.k * itemsize
    again = products - 1 if problem.pulls and problem.gathered == "m" and weights > L2_BYTES else 0
    on_cores, from_hbm = cycles / CYCLES_PER_US, (problem.bytes_per_device + again * weights) / hbm_rate
    us = max(on_cores, from_hbm) + HIDDEN_COST * min(on_cores, from_hbm) + LAUNCH_US
    if work.cuts:
        # All CTAs come to it at the end, when nothing else is left to do.
        added = (work.parts - 1) / ADD_BYTES_PER_CYCLE
        us += (elements * F32_BYTES * (1 / STORE_BYTES_PER_CYCLE + added) + FLAG_CYCLES) / CYCLES_PER_US
    if problem.pulls and problem.gathered == "m":
        us = _with_gather(us, work, config, problem, hbm_rate)
    if problem.transport(config) == "one_shot":
        us = _with_one_shot(us, work, config, problem)
    elif problem.pulls and problem.scattered:
        us = _with_scatter(us, work, config, problem)
    if work.cuts:
        us += ZERO_FLAGS_US
    if config.cluster > 1:
        us += CLUSTER_US
    if config.split_k > 1:
        # The partial results are read again, mostly from the L2, and summed by a kernel of its own.
        partial_bytes = config.split_k * problem.batch * problem.m * problem.n * F32_BYTES
        us += NEXT_LAUNCH_US + partial_bytes / SUM_BYTES_PER_US
    return us


def _with_gather(us: float, work: StreamK, config: Config, problem: Problem, hbm_rate: float) -> float:
    """The time of the products and of the gather beside them."""
    gather_us = GATHER_US + problem.received_bytes_per_device / PULLED_BYTES_PER_US
    if not config.joined:
        # Behind the last rows come the tiles of a shard, or at least one tile.
        last = max(1 / problem.devices, work.k_steps / max(work.total_steps(0), work.k_steps))
        return max(us, gather_us + us * last)
    # No product before the last rows. What fills the slots until then need not be waited for after that.
    active = config.cluster * (work.num_ctas if work.full_waves else work.workers)
    early_steps = min(config.stages, work.total_steps(0))
    early_us = early_steps * config.tile_k * config.tile_n * problem.itemsize * active / hbm_rate
    return us + gather_us - min(gather_us, early_us, us)


def _with_scatter(us: float, work: StreamK, config: Config, problem: Problem) -> float:
    """The time of the products and of what travels beside them."""
    # Own tiles come last. What of them begins together with the last tiles of peers waits for these to come.
    of_peers = work.tiles * (problem.devices - 1) // problem.devices
    waves_in_all, waves_of_peers = ceil_div(work.tiles, work.num_ctas), ceil_div(of_peers, work.num_ctas)
    tile_bytes = config.tile_m * config.tile_n * jnp.dtype(problem.out_dtype).itemsize
    last_us = min(of_peers, work.num_ctas) * tile_bytes / PULLED_BYTES_PER_US
    slack_us = us * (waves_in_all - waves_of_peers) / waves_in_all
    us += SCATTER_US + max(last_us - slack_us, 0.0)
    if problem.spreads:
        # What the last tiles have summed up is sent when nothing is left to compute.
        own = min(work.tiles - of_peers, work.num_ctas) * (problem.devices - 1)
        us += SPREAD_US + own * tile_bytes / PULLED_BYTES_PER_US
    return max(us, SCATTER_US + problem.received_bytes_per_device / PULLED_BYTES_PER_US)


def _with_one_shot(us: float, work: StreamK, config: Config, problem: Problem) -> float:
    """The time of the products, each wave of which waits for the peers' parts."""
    rows, columns, products = problem.grid(config)
    of_wave = min(work.tiles, work.num_ctas) * min(rows, config.tile_m) * config.tile_n
    sent = min(of_wave, products * rows * columns) * jnp.dtype(problem.out_dtype).itemsize * (problem.devices - 1)
    return us + ceil_div(work.tiles, work.num_ctas) * (ONE_SHOT_US + sent / SENT_BYTES_PER_US)


def _lines(row_bytes: int) -> int:
    """How many lines of the cache one row of a box touches."""
    return 1 if row_bytes % SWIZZLE_BYTES == 0 else 2
