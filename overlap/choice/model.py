"""How long a configuration should take: waves of tiles, and what bounds a tile. For ranking, not for forecasts.

What differs between architectures is in `rates.py`.
"""

from __future__ import annotations

import jax.numpy as jnp

from overlap.choice.problem import Problem
from overlap.choice.rates import HOPPER, Rates, rates_of
from overlap.kernels.config import SWIZZLE_BYTES, Config
from overlap.kernels.stream_k import StreamK
from overlap.kernels.target import Target
from overlap.primitives.integers import ceil_div

# What is hidden is not quite free: it draws power. It also tells apart what something else bounds.
HIDDEN_COST = 0.1
HIDDEN_LOADS_COST = 0.02
F32_BYTES = 4
LAUNCH_US = 3.0
NEXT_LAUNCH_US = 1.5
ZERO_FLAGS_US = 2.0
# From the start until the first rows of a peer may be multiplied.
GATHER_US = 6.0
# From the end of a peer's tile until its part of it may be added.
SCATTER_US = 6.0
# From there until all devices have what has been added. Or, of parts that go to all devices from shared memory, the
# whole way.
SPREAD_US = 8.0
ONE_SHOT_US = 6.0
# Two CTAs begin and end together.
CLUSTER_US = 0.5


def copied_sooner_than_received(copied_bytes: float, received_bytes: float) -> bool:
    """Whether a device copies so many bytes within its memory in less time than so many come from its peers."""
    return 2 * copied_bytes / HOPPER.hbm_bytes_per_us < received_bytes / HOPPER.pulled_bytes_per_us


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
    rates, work, itemsize = rates_of(target), work_of(config, problem, target), problem.itemsize
    out_bytes = jnp.dtype(problem.out_dtype).itemsize if config.split_k == 1 else F32_BYTES
    active = config.cluster * (work.num_ctas if work.full_waves else work.workers)
    elements = config.tile_m * config.tile_n
    depth = waves(config, problem, target) * work.k_steps * config.tile_k
    epilogues = work.full_waves + (work.left > 0)
    store_cycles = elements * out_bytes / rates.store_bytes_per_cycle + rates.tile_cycles
    mainloop_cycles = depth * _cycles_per_depth(config, problem, rates, active, target)
    if rates.overlaps_epilogue:
        # All but the last one run beside the products of the next tile.
        cycles = max(mainloop_cycles, (epilogues - 1) * store_cycles) + store_cycles
    else:
        cycles = mainloop_cycles + epilogues * store_cycles
    hbm_rate = rates.hbm_bytes_per_us * active / target.num_cores
    weights, (*_, products) = problem.n * problem.k * itemsize, problem.grid(config)
    again = products - 1 if problem.pulls and problem.gathered == "m" and weights > rates.l2_bytes else 0
    on_cores, from_hbm = cycles / rates.cycles_per_us, (problem.bytes_per_device + again * weights) / hbm_rate
    us = max(on_cores, from_hbm) + HIDDEN_COST * min(on_cores, from_hbm) + LAUNCH_US
    if work.cuts:
        # All CTAs come to it at the end, when nothing else is left to do.
        added = (work.parts - 1) / rates.add_bytes_per_cycle
        summed = elements * F32_BYTES * (1 / rates.store_bytes_per_cycle + added)
        us += (summed + rates.flag_cycles) / rates.cycles_per_us
    if problem.pulls and problem.gathered == "m":
        us = _with_gather(us, work, config, problem, rates, hbm_rate)
    if problem.transport(config) == "one_shot":
        us = _with_one_shot(us, work, config, problem, rates)
    elif problem.pulls and problem.scattered:
        us = _with_scatter(us, work, config, problem, rates)
    if work.cuts:
        us += ZERO_FLAGS_US
    if config.cluster > 1:
        us += CLUSTER_US
    if config.split_k > 1:
        # The partial results are read again, mostly from the L2, and summed by a kernel of its own.
        partial_bytes = config.split_k * problem.batch * problem.m * problem.n * F32_BYTES
        us += NEXT_LAUNCH_US + partial_bytes / rates.sum_bytes_per_us
    return us


def _cycles_per_depth(config: Config, problem: Problem, rates: Rates, active: int, target: Target) -> float:
    """Cycles of one core per element of depth, if so many are active: the tensor cores, their reads, the loads."""
    itemsize = problem.itemsize
    l2_rate = min(rates.l2_bytes_per_cycle_alone, rates.l2_bytes_per_cycle * target.num_cores / active)
    multiply = config.tile_m * config.tile_n * itemsize / rates.tensor_core_rate
    read = rates.smem_reads(config) * itemsize / rates.smem_bytes_per_cycle
    lhs_row, rhs_row = problem.row_bytes
    m, *_ = problem.grid(config)
    loaded = rates.rows_loaded(config, m, problem.transpose_lhs)
    # Per tile; those of the last one are shared out to all that lie above it.
    empty = 0 if problem.transpose_lhs else loaded - m / ceil_div(m, loaded)
    lhs_load = (loaded - empty) * _lines(lhs_row) * itemsize / l2_rate + empty * rates.empty_row_cycles / config.tile_k
    rhs_load = config.tile_n * _lines(rhs_row) * itemsize / l2_rate
    shared = rhs_load if config.cluster_along == "m" else lhs_load
    load = lhs_load + rhs_load - shared * (1 - 1 / config.cluster)
    return max(multiply, read, load) + HIDDEN_LOADS_COST * load + rates.step_cycles / config.tile_k


def _with_gather(
    us: float, work: StreamK, config: Config, problem: Problem, rates: Rates, hbm_rate: float
) -> float:
    """The time of the products and of the gather beside them."""
    gather_us = GATHER_US + problem.received_bytes_per_device / rates.pulled_bytes_per_us
    if not config.joined:
        # Behind the last rows come the tiles of a shard, or at least one tile.
        last = max(1 / problem.devices, work.k_steps / max(work.total_steps(0), work.k_steps))
        return max(us, gather_us + us * last)
    # No product before the last rows. What fills the slots until then need not be waited for after that.
    active = config.cluster * (work.num_ctas if work.full_waves else work.workers)
    early_steps = min(config.stages, work.total_steps(0))
    early_us = early_steps * config.tile_k * config.tile_n * problem.itemsize * active / hbm_rate
    return us + gather_us - min(gather_us, early_us, us)


def _with_scatter(us: float, work: StreamK, config: Config, problem: Problem, rates: Rates) -> float:
    """The time of the products and of what travels beside them."""
    # Own tiles come last. What of them begins together with the last tiles of peers waits for these to come.
    of_peers = work.tiles * (problem.devices - 1) // problem.devices
    waves_in_all, waves_of_peers = ceil_div(work.tiles, work.num_ctas), ceil_div(of_peers, work.num_ctas)
    tile_bytes = config.tile_m * config.tile_n * jnp.dtype(problem.out_dtype).itemsize
    last_us = min(of_peers, work.num_ctas) * tile_bytes / rates.pulled_bytes_per_us
    slack_us = us * (waves_in_all - waves_of_peers) / waves_in_all
    us += SCATTER_US + max(last_us - slack_us, 0.0)
    if problem.spreads:
        # What the last tiles have summed up is sent when nothing is left to compute.
        own = min(work.tiles - of_peers, work.num_ctas) * (problem.devices - 1)
        us += SPREAD_US + own * tile_bytes / rates.pulled_bytes_per_us
    return max(us, SCATTER_US + problem.received_bytes_per_device / rates.pulled_bytes_per_us)


def _with_one_shot(us: float, work: StreamK, config: Config, problem: Problem, rates: Rates) -> float:
    """The time of the products, each wave of which waits for the peers' parts."""
    rows, columns, products = problem.grid(config)
    of_wave = min(work.tiles, work.num_ctas) * min(rows, config.tile_m) * config.tile_n
    sent = min(of_wave, products * rows * columns) * jnp.dtype(problem.out_dtype).itemsize * (problem.devices - 1)
    return us + ceil_div(work.tiles, work.num_ctas) * (ONE_SHOT_US + sent / rates.sent_bytes_per_us)


def _lines(row_bytes: int) -> int:
    """How many lines of the cache one row of a box touches."""
    return 1 if row_bytes % SWIZZLE_BYTES == 0 else 2
