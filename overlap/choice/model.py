"""Predicts a configuration's time from the number of waves of tiles and from what limits the time of a tile.

The model ranks configurations; its times are not exact enough to forecast how long a call takes. The rates of each GPU
are in `rates.py`.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from overlap.choice.problem import Problem
from overlap.choice.rates import Rates, rates_of
from overlap.choice.shared_loads import OperandTiles, operand_tiles
from overlap.kernels.config import SWIZZLE_BYTES, Config, tile_k
from overlap.kernels.hopper import limits as hopper
from overlap.kernels.limits import EPILOGUE_COLUMNS, rows_loaded
from overlap.kernels.stream_k import StreamK
from overlap.kernels.target import Target
from overlap.kernels.tile_order import TileOrder
from overlap.primitives.integers import ceil_div

F32_BYTES = 4
# The exponent with which `_at_power_limit` combines the time at full clocks and the time that the power limit allows.
# The larger it is, the more abruptly the clock rate begins to fall where work reaches the power limit.
_LIMITED = 8.0
# The part of the L2 that keeps an operand from one band of tiles to the next. Results and the other operand pass
# through the L2 meanwhile.
_KEPT_IN_L2 = 0.5
# The time of a gather from its start until the first rows of a peer may be multiplied.
GATHER_US = 6.0
# The time that each shard but the first adds to a gather, if the rows of all shards are not joined (`Config.joined`).
APART_US = 1.0
# In a sum over devices: the time from when a peer has computed its part of a tile until this device may add the part.
SCATTER_US = 6.0
# In a sum that all devices get (transport "broadcast"): the time from the addition until all devices have the result.
BROADCAST_US = 8.0
# In a sum that all devices get by "one_shot": the time from when a part is in shared memory until all devices have it.
ONE_SHOT_US = 6.0


def work_of(config: Config, problem: Problem, target: Target) -> StreamK:
    """Returns how the problem's tiles are distributed over the CTAs (or clusters) of one device.

    With split-k, each of the `split_k` partial products of a tile counts as a tile.
    """
    m, n, products = problem.grid(config)
    # If shards are gathered along k, each tile sums over all shards. Shards gathered along m or n have tiles of their
    # own.
    lengths = problem.devices if problem.gathered == "k" else 1
    tiles = products * TileOrder.of(m, n, config).tiles * config.split_k
    k_steps = lengths * ceil_div(problem.k, config.split_k * tile_k(problem.dtype))
    return StreamK.on(target, config, tiles, k_steps, may_spread=not problem.communicates)


def waves(config: Config, problem: Problem, target: Target) -> float:
    """Returns how many k steps the busiest SM computes, divided by the k steps of one tile."""
    work = work_of(config, problem, target)
    return work.total_k_steps(0) / work.k_steps


def predicted_us(
    config: Config, problem: Problem, target: Target, rates: Rates | None = None, *, with_order: bool = True
) -> float:
    """Returns the model's time for one call, in microseconds.

        products = at once (cycles of the busiest SM / clock rate, bytes of memory / their rate), slowed by power
        call     = products + launch + what they do not hide: exchanged sums, communication, split-k's second kernel

    Args:
      config: the configuration.
      problem: the operation and its sizes.
      target: the GPU.
      rates: its rates. None takes the fitted ones.
      with_order: False leaves out what depends on the tile order. The result is then a lower bound for all tile orders
        of this configuration, and takes less time to compute.
    """
    rates = rates or rates_of(target, communicates=problem.communicates)
    work = work_of(config, problem, target)
    busy_sms = config.cluster * (work.num_ctas if work.full_waves else work.workers)
    rows, columns, products = problem.grid(config)
    hbm_bytes = problem.bytes_per_device
    rhs_bytes = problem.n * problem.k * problem.itemsize
    if problem.communicates and problem.gathered == "m" and rhs_bytes > rates.l2_bytes:
        # Shards are multiplied one after the other, and the L2 does not keep the right operand from one to the next.
        hbm_bytes += (products - 1) * rhs_bytes
    if with_order and not problem.communicates:
        hbm_bytes += _read_again(TileOrder.of(rows, columns, config), config, problem, work, rates)
    hbm_rate = rates.hbm_bytes_per_us
    if hbm_bytes > rates.l2_bytes:
        # The data do not fit into the L2. So the rate at which the busy SMs can read memory is a limit, too.
        hbm_rate = min(hbm_rate, rates.hbm_bytes_per_us_alone * busy_sms)
    loads = OperandTiles(0.0, 0.0, 1.0)
    # The rates for operations over several devices let the loads of a GPC take no time.
    if with_order and not problem.communicates:
        loads = operand_tiles(TileOrder.of(rows, columns, config), work, config.cluster)
    # SMs that load share what the L2 can deliver: bytes per cycle of one of them.
    l2_rate = rates.l2_bytes_per_cycle * target.num_cores / busy_sms
    per_depth = _PerDepth.of(config, problem, rates, loads, l2_rate)
    cycles = _core_cycles(config, problem, rates, work, per_depth)
    us = _at_once(rates.overlap_exponent, cycles / rates.cycles_per_us, hbm_bytes / hbm_rate)
    # The elements of k of all tiles together.
    depth = work.tiles * config.tiles_per_cluster * work.k_steps * tile_k(problem.dtype)
    us = _at_power_limit(us, depth, per_depth, rates) + rates.launch_us
    if work.cuts:
        # CTAs that share a tile exchange and add their sums at the end, when no other work hides the time of this.
        sum_bytes = config.tile_m * config.tile_n * F32_BYTES
        cycles_per_byte = 1 / rates.store_bytes_per_cycle + (work.pieces_per_tile - 1) / rates.add_bytes_per_cycle
        us += (sum_bytes * cycles_per_byte + rates.flag_cycles) / rates.cycles_per_us
    if problem.communicates and problem.gathered == "m":
        us = _with_gather(us, work, config, problem, rates, hbm_rate)
    if problem.transport(config) == "one_shot":
        us = _with_one_shot(us, work, config, problem, rates)
    elif problem.communicates and problem.scattered:
        us = _with_scatter(us, work, config, problem, rates)
    if config.ctas_per_tile > 1:
        us += work.pieces(0) * _exchange_cycles(config, rates) / rates.cycles_per_us
    if config.split_k > 1:
        # A second kernel reads the partial results, mostly from the L2, and adds them.
        partial_bytes = config.split_k * problem.batch * problem.m * problem.n * F32_BYTES
        us += rates.next_launch_us + partial_bytes / rates.sum_bytes_per_us
    return us


def _read_again(order: TileOrder, config: Config, problem: Problem, work: StreamK, rates: Rates) -> float:
    """Returns the bytes of operands that are read from memory again, because the L2 has no room to keep them.

    Each band of the tile order needs its own part of one operand, and all of the other one.
    """
    m, n, products = problem.grid(config)
    if order.minor == "m":
        bands = ceil_div(order.m_tiles, order.width)
        of_all = n
    else:
        bands = ceil_div(order.n_tiles, order.width)
        of_all = m
    # Bands that are computed at the same time read together.
    at_once = work.num_ctas * bands / order.tiles
    needed = of_all * problem.k * problem.itemsize
    return products * max(bands / max(at_once, 1.0) - 1, 0.0) * max(needed - _KEPT_IN_L2 * rates.l2_bytes, 0.0)


def _at_once(exponent: float, *times: float) -> float:
    """Returns the time of activities that run at the same time: the longest, and a little more for the others."""
    longest = max(times)
    return longest * sum((time / longest) ** exponent for time in times) ** (1 / exponent) if longest else 0.0


@dataclasses.dataclass(frozen=True)
class _PerDepth:
    """The costs to an SM of one tile, for each element of k.

    Attributes:
      cycles: time, in cycles of the SM.
      multiplied: multiply-adds times the bytes of an operand's element.
      loaded: bytes loaded from the L2.
    """

    cycles: float
    multiplied: float
    loaded: float

    @staticmethod
    def of(config: Config, problem: Problem, rates: Rates, loads: OperandTiles, l2_rate: float) -> _PerDepth:
        """Returns the costs of a configuration on a problem, where an SM loads `l2_rate` bytes of the L2 per cycle."""
        itemsize = problem.itemsize
        lhs_row, rhs_row = problem.row_bytes
        m, *_ = problem.grid(config)
        rows = rows_loaded(config, m, problem.dtype, problem.transpose_lhs)
        # A warpgroup whose rows all lie beyond the operand multiplies nothing.
        busy_part = rates.rows_multiplied(config, rows) / config.tile_m
        multiplied = busy_part * config.tile_m * config.tile_n * itemsize
        read = busy_part * rates.smem_reads(config) * itemsize
        # The number of loaded rows that lie beyond the operand, averaged over the tiles along m: only the last of these
        # tiles has such rows.
        empty = 0 if problem.transpose_lhs else rows - m / ceil_div(m, rows)
        lhs, rhs = (
            rows * itemsize * (rates.unaligned_lines if row_bytes % SWIZZLE_BYTES else 1.0)
            for rows, row_bytes in ((rows - empty, lhs_row), (config.tile_n, rhs_row))
        )
        # Each CTA of a pair loads a half of the right operand for both.
        loaded = lhs + rhs / config.tiles_per_cluster
        # What a GPC loads per SM at work. A byte that several SMs of the GPC load counts once.
        of_group = (loads.rows * (rows - empty) + loads.columns * config.tile_n) * itemsize
        load = loaded / l2_rate + empty * rates.empty_row_cycles / tile_k(problem.dtype)
        busy = _at_once(
            rates.overlap_exponent,
            multiplied / rates.tensor_core_rate,
            read / rates.smem_bytes_per_cycle,
            load,
            of_group * loads.at_work / rates.group_bytes_per_cycle,
        )
        # A stage is released one k step after its product, and only then filled again.
        refill = (rates.load_latency_cycles / tile_k(problem.dtype) + busy) / (config.stages - 1)
        busy = _at_once(rates.overlap_exponent, busy, refill)
        return _PerDepth(busy + rates.cycles_per_step(config) / tile_k(problem.dtype), multiplied, loaded)


def _exchange_cycles(config: Config, rates: Rates) -> float:
    """Returns the cycles that a cluster takes to exchange the sums of a tile: barriers, reading and adding."""
    rows, _ = hopper.warpgroup_tile(config)
    # Each box of a tile is finished by one CTA, which reads the sums of all CTAs.
    boxes = ceil_div(config.tile_m * config.tile_n // (rows * EPILOGUE_COLUMNS), config.ctas_per_tile)
    read = boxes * rows * EPILOGUE_COLUMNS * config.ctas_per_tile * F32_BYTES
    return rates.exchange_cycles + read / rates.exchange_bytes_per_cycle


def _core_cycles(config: Config, problem: Problem, rates: Rates, work: StreamK, per_depth: _PerDepth) -> float:
    """Returns the cycles that the busiest SM takes for its products and its stores."""
    out_bytes = jnp.dtype(problem.out_dtype).itemsize if config.split_k == 1 else F32_BYTES
    mainloop = work.total_k_steps(0) * tile_k(problem.dtype) * per_depth.cycles
    tiles = work.full_waves + (work.left > 0)
    elements = config.tile_m * config.tile_n
    # Each store but the first waits for the epilogue buffer.
    waits = max(rates.stores(config) - 1, 0)
    store = elements * out_bytes / rates.store_bytes_per_cycle + rates.tile_cycles + waits * rates.store_wait_cycles
    if rates.overlaps_epilogue:
        # Each store but the last one runs at the same time as the products of the next tile.
        return max(mainloop, (tiles - 1) * store) + store
    if config.in_turn:
        # With the schedule "pingpong", each warpgroup computes every second tile, and stores it while the other
        # warpgroup multiplies.
        mainloop *= rates.gathering_in_turn if problem.communicates and problem.gathered else rates.in_turn
        turn = mainloop / max(tiles, 1) + store
        return max(mainloop, ceil_div(tiles, 2) * turn - store) + store
    return mainloop + tiles * store


def _at_power_limit(us: float, depth: int, per_depth: _PerDepth, rates: Rates) -> float:
    """Returns the time, at the clock rate that the power limit allows, of work that takes `us` at full clocks.

    Args:
      us: the time at full clocks.
      depth: elements of k of all tiles together.
      per_depth: the costs of each of them.
      rates: the rates of the GPU.
    """
    # How long the work would take if power were the only limit.
    energy_us = depth * (per_depth.multiplied / rates.multiplied_per_us + per_depth.loaded / rates.loaded_per_us)
    # A lower clock rate allows a lower voltage, which saves power as well. So the clock rate falls by a smaller factor
    # than the power.
    return us * (1 + (energy_us / us) ** _LIMITED) ** (rates.clock_exponent / _LIMITED) if us else us


def _with_gather(us: float, work: StreamK, config: Config, problem: Problem, rates: Rates, hbm_rate: float) -> float:
    """Returns the time of the products (`us`) and of the gather that runs at the same time, together."""
    gather_us = GATHER_US + problem.received_bytes_per_device / rates.pulled_bytes_per_us
    if not config.joined:
        # When the last rows have arrived, the tiles of one shard are left to compute; for each SM at least one tile.
        last = max(1 / problem.devices, work.k_steps / max(work.total_k_steps(0), work.k_steps))
        return max(us, gather_us + us * last) + APART_US * (problem.devices - 1)
    # With joined rows, no product can begin before the last rows have arrived. Until then the stages are filled with
    # the right operand; the time of these loads is saved afterwards.
    active = config.cluster * (work.num_ctas if work.full_waves else work.workers)
    early_steps = min(config.stages, work.total_k_steps(0))
    early_us = early_steps * tile_k(problem.dtype) * config.tile_n * problem.itemsize * active / hbm_rate
    return us + gather_us - min(gather_us, early_us, us)


def _with_scatter(us: float, work: StreamK, config: Config, problem: Problem, rates: Rates) -> float:
    """Returns the time of the products (`us`) and of the parts that are sent at the same time, together."""
    # A device computes the tiles for its peers first and its own tiles last. An own tile in the same wave as the last
    # tiles for peers has to wait, because the peers compute their parts of it in that wave.
    of_peers = work.tiles * (problem.devices - 1) // problem.devices
    waves_in_all = ceil_div(work.tiles, work.num_ctas)
    waves_of_peers = ceil_div(of_peers, work.num_ctas)
    tile_bytes = config.tile_m * config.tile_n * jnp.dtype(problem.out_dtype).itemsize
    last_us = min(of_peers, work.num_ctas) * tile_bytes / rates.pulled_bytes_per_us
    slack_us = us * (waves_in_all - waves_of_peers) / waves_in_all
    us += SCATTER_US + max(last_us - slack_us, 0.0)
    if problem.replicates:
        # The results of the last tiles are sent when nothing is left to compute, so no work hides the time of sending
        # them.
        own = min(work.tiles - of_peers, work.num_ctas) * (problem.devices - 1)
        us += BROADCAST_US + own * tile_bytes / rates.pulled_bytes_per_us
    return max(us, SCATTER_US + problem.received_bytes_per_device / rates.pulled_bytes_per_us)


def _with_one_shot(us: float, work: StreamK, config: Config, problem: Problem, rates: Rates) -> float:
    """Returns the time of the products (`us`) and of the exchange of parts (one shot) after each wave of tiles."""
    rows, columns, products = problem.grid(config)
    elements_of_tile = min(rows, config.tile_m) * config.tile_n
    elements_of_wave = min(min(work.tiles, work.num_ctas) * elements_of_tile, products * rows * columns)
    sent_bytes = elements_of_wave * jnp.dtype(problem.out_dtype).itemsize * (problem.devices - 1)
    waves_in_all = ceil_div(work.tiles, work.num_ctas)
    return us + waves_in_all * (ONE_SHOT_US + sent_bytes / rates.sent_bytes_per_us)
