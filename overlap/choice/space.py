"""Lists the configurations worth trying for a problem, the best by the model first.

All of them pass the kernel's own check. The fields of a configuration are of two kinds. The *shape* (`SHAPE`: the tile,
the size of a stage, how the last wave is cut) determines most of the time that the model predicts. Of the *fine* fields
(`FINE` and `CHUNKS`) only the tile order enters the model, and for each shape the best order is taken (`_ordered`). The
first value of any other fine field is the usual one.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator

import jax.numpy as jnp

from overlap.choice.model import predicted_us, waves, work_of
from overlap.choice.problem import Problem
from overlap.choice.rates import Rates, rates_of
from overlap.kernels.config import Config, tile_k
from overlap.kernels.hopper.limits import accumulator_registers, spills
from overlap.kernels.placement import clusters_at_once
from overlap.kernels.target import Target
from overlap.primitives.integers import ceil_div

TILE_M = (128, 256, 64)
TILE_N = (256, 192, 128, 64)
SPLIT_K = (1, 2, 3, 4, 6, 8, 12, 16)
STREAM_K = (1, 2, 3, 4)
SHAPE: dict[str, tuple[int | str, ...]] = {
    "tile_m": TILE_M,
    "tile_n": TILE_N,
    "schedule": ("cooperative", "pingpong"),
    "swap_operands": (False,),
    "cluster": (1, 2),
    "split_k": SPLIT_K,
    "stream_k": STREAM_K,
    "joined": (False, True),
    "one_shot": (False, True),
}
# The first value of each field is the usual one.
FINE: dict[str, tuple[int | str, ...]] = {
    "order_minor": ("m", "n"),
    "order_width": (8, 4, 16, 2),
}
CHUNKS: dict[str, tuple[int, ...]] = {"chunk_bytes": (8192, 16384, 4096), "chunk_buffers": (2, 4)}
# If a product has less than one wave of tiles, at most MOST_SHARED SMs share a tile (stream-k). To cut tiles into
# more pieces, split-k is better, where XLA adds up the pieces. With at most FEW_ROWS rows, narrow tiles are the
# fastest, and no tile is shared (measured on an H200).
MOST_SHARED = 6
FEW_ROWS = 64
# Joined rows make few tiles, so more SMs may share a tile (MORE_PARTS). With more than MOST_JOINED_ROWS rows, it is
# better to multiply each shard's rows as they arrive than to join them.
MORE_PARTS = (6, 8, 12, 16)
MOST_JOINED_ROWS = 1024
# Replaces entries of SHAPE for tiles with swapped operands. Their `tile_m` is chosen so that the last tile is full
# (`_rows_of_swapped`).
TILE_N_OF_SWAPPED = (256, 128, 64)
SWAPPED: dict[str, tuple[int | str, ...]] = {
    "tile_n": TILE_N_OF_SWAPPED,
    "swap_operands": (True,),
    "one_shot": (False,),
}
# Clusters that compute a tile together: their sizes, the fewest rows of their tiles, and the fewest k steps of a CTA.
CLUSTERS_ALONG_K = (2, 4)
LEAST_ROWS_ALONG_K = 16
LEAST_K_STEPS = 2
# With fewer rows per tile, a band of the tile order has twice as many tiles across.
FULL_BAND_ROWS = 128
SWAPPED_UNIT = 8
LEAST_ROWS_OF_SWAPPED = 64
MOST_ROWS_OF_SWAPPED = 256
# The usual number of stages is the largest that fits. Fewer stages are tried as well, because they leave more of the L1
# to other traffic.
STAGES = (8, 7, 6, 5, 4, 3, 2)
# The factor on the predicted time of swapped operands in a collective, of which none was measured. So the tuner tries
# them, but the heuristic takes them only if the model predicts that they are clearly faster.
_NOT_MEASURED = 1.05
# Fine fields are varied only for this many of the best shapes.
MOST_VARIED = 32
# The factor on the predicted time of configurations that differ in a fine field from the best of their shape. So the
# tuner, which tries the first configurations, tries other shapes before the model's ties.
_VARIED = 1.015


def candidates(problem: Problem, target: Target) -> list[Config]:
    """Returns the configurations worth trying for a problem, the best by the model first; [] if none can run it.

    Each configuration passes `limits.check`. So a configuration that does not fit into shared memory or registers, or
    does not suit the problem's sizes, is excluded by arithmetic and never compiled.
    """
    return list(_candidates(problem, target))


@functools.lru_cache(maxsize=1024)
def heuristic(problem: Problem, target: Target) -> Config | None:
    """Returns the first of `candidates`, for a problem that was not tuned; None if no configuration can run it.

    Programs are traced with it, so it has to be fast: it looks at the shapes in the order of a lower bound of their
    times, and stops where no other shape can be faster.
    """
    shapes = [(_least_us(shape, problem, target), place, shape) for place, shape in enumerate(_shapes(problem, target))]
    chosen, rank_of_chosen = None, (math.inf, 0, 0)
    for least_us, place, shape in sorted(shapes, key=lambda item: item[:2]):
        # The factor is for errors of rounding.
        if least_us > rank_of_chosen[0] * 1.0001:
            break
        base = _base(shape, problem, target)
        if base is not None:
            rank_of_base = expected_us(base, problem, target), -base.tile_n, place
            chosen, rank_of_chosen = min((chosen, rank_of_chosen), (base, rank_of_base), key=lambda item: item[1])
    return chosen


def expected_us(config: Config, problem: Problem, target: Target, rates: Rates | None = None) -> float:
    """Returns the model's time in µs, plus a little for a configuration of a kind that was never measured."""
    return predicted_us(config, problem, target, rates) * _unmeasured_factor(config, problem)


def _least_us(shape: Config, problem: Problem, target: Target) -> float:
    """Returns a lower bound of `expected_us` for all configurations with a shape (the fields in `SHAPE`).

    `heuristic` need not look at a shape whose bound exceeds the time of a configuration that it has found. It is a
    bound, since what else enters the model is taken at its best. More stages never take longer: so there are the most,
    even if they do not fit. A tile order only adds time: it is left out.
    """
    if not work_of(shape, problem, target).tiles:
        return math.inf  # A device's block is empty, so no configuration runs.
    ideal = dataclasses.replace(shape, stages=max(STAGES))
    return predicted_us(ideal, problem, target, with_order=False) * _unmeasured_factor(ideal, problem)


def _unmeasured_factor(config: Config, problem: Problem) -> float:
    """Returns `_NOT_MEASURED` for a configuration of a kind that was never measured, else 1."""
    return _NOT_MEASURED if config.swap_operands and problem.communicates else 1.0


def differences(config: Config) -> str:
    """Returns a configuration as text: its tile, and the other fields in which it differs from `Config()`."""
    usual = vars(Config())
    words = [f"{config.tile_m}x{config.tile_n}"]
    for name, value in vars(config).items():
        if name not in ("tile_m", "tile_n") and value != usual[name]:
            words.append(f"{name}={value}")
    return " ".join(words)


@functools.lru_cache(maxsize=1024)
def _candidates(problem: Problem, target: Target) -> tuple[Config, ...]:
    us_of: dict[Config, float] = {}

    def rank(config: Config) -> tuple[float, int]:
        # Of configurations with equal times, prefer the wider tile: it reads longer contiguous parts of the right
        # operand's rows.
        return us_of[config], -config.tile_n

    bases = [base for shape in _shapes(problem, target) if (base := _base(shape, problem, target)) is not None]
    us_of |= {base: expected_us(base, problem, target) for base in bases}
    found: list[Config] = []
    seen: set[Config] = set()
    for place, base in enumerate(sorted(bases, key=rank)):
        for config in _variations(base, problem) if place < MOST_VARIED else (base,):
            same = _on_grid(config, problem)
            if same not in seen and problem.accepts(config, target):
                seen.add(same)
                found.append(config)
                us_of.setdefault(config, us_of[base] * _VARIED)
    return tuple(sorted(found, key=rank))


def _shapes(problem: Problem, target: Target) -> Iterator[Config]:
    """Yields each tile shape with every different way to cut the last wave. The fine fields have their usual values."""
    if not min(problem.m, problem.n, problem.k, problem.batch):
        return
    names = [name for name in SHAPE if name not in ("split_k", "stream_k")]
    # Values that cannot run, or mean nothing for this operation, are left out first: that saves most of the time.
    joined = problem.op == "all_gather_lhs_matmul" and problem.devices > 1
    one_shot = problem.replicates and problem.communicates
    shapes = SHAPE | {
        "cluster": SHAPE["cluster"] if target.is_blackwell and not problem.spec.groups else (1,),
        "joined": SHAPE["joined"] if joined else (False,),
        "one_shot": SHAPE["one_shot"] if one_shot else (False,),
    }
    upright = itertools.product(*(shapes[name] for name in names))
    of_swapped = shapes | SWAPPED | {"tile_m": _rows_of_swapped(problem)}
    swapped = itertools.product(*(of_swapped[name] for name in names))
    yield from _along_k(problem, target)
    for values in itertools.chain(upright, swapped if _may_swap(problem, target) else ()):
        whole = dataclasses.replace(_usual(problem), **dict(zip(names, values, strict=True)))
        if _is_pointless(whole, problem, target):
            continue
        yield whole
        if problem.spec.groups:
            continue
        yield from (cut for cut in _cut(whole, problem, target) if not spills(cut))


def _along_k(problem: Problem, target: Target) -> Iterator[Config]:
    """Yields shapes with `cluster_along="k"`: only those whose tiles are all computed in one wave.

    Each CTA has at least LEAST_K_STEPS k steps.
    """
    if problem.communicates or problem.spec.groups or not target.is_hopper:
        return
    usual = _usual(problem)
    k_steps = ceil_div(problem.k, tile_k(problem.dtype))
    upright = itertools.product((False,), TILE_M, TILE_N)
    swapped = itertools.product((True,), _rows_of_swapped(problem, LEAST_ROWS_ALONG_K), TILE_N_OF_SWAPPED)
    tiles = itertools.chain(upright, swapped if _may_swap(problem, target) else ())
    for (swap, rows, columns), cluster in itertools.product(tiles, CLUSTERS_ALONG_K):
        count = problem.batch * ceil_div(problem.m, rows) * ceil_div(problem.n, columns)
        if count <= clusters_at_once(target.num_cores, cluster) and k_steps >= LEAST_K_STEPS * cluster:
            shape = dict(tile_m=rows, tile_n=columns, swap_operands=swap)
            config = dataclasses.replace(usual, **shape, cluster=cluster, cluster_along="k")
            if not spills(config):
                yield config


def _cut(whole: Config, problem: Problem, target: Target) -> Iterator[Config]:
    """Yields a tile shape with every different way to cut the last wave."""
    work = work_of(whole, problem, target)
    if not work.full_waves and not problem.communicates:
        # Cut each tile into at most as many pieces as fill one wave, each with at least two k steps.
        for parts in SPLIT_K[1:]:
            if parts * work.left <= work.num_ctas and work.k_steps >= 2 * parts:
                if not whole.swap_operands:
                    yield dataclasses.replace(whole, split_k=parts)
                if parts <= MOST_SHARED and problem.m > FEW_ROWS:
                    yield dataclasses.replace(whole, stream_k=parts)
        return
    seen = {work.workers}
    for parts in STREAM_K[1:] + (MORE_PARTS if whole.joined else ()):
        cut = dataclasses.replace(work, max_pieces=parts)
        if cut.workers not in seen and work.k_steps >= 2 * parts:
            seen.add(cut.workers)
            yield dataclasses.replace(whole, stream_k=parts)


def _may_swap(problem: Problem, target: Target) -> bool:
    """Whether the kernel can run the problem with swapped operands, that is, compute transposed tiles."""
    exchanges = problem.communicates and not problem.gathered
    return (
        target.is_hopper and not exchanges and not problem.transpose_lhs and jnp.dtype(problem.out_dtype).itemsize == 2
    )


def _rows_of_swapped(problem: Problem, least_rows: int = LEAST_ROWS_OF_SWAPPED) -> tuple[int, ...]:
    """Returns values of `tile_m` for swapped operands: for each number of tiles along m, the fewest rows needed."""
    found: set[int] = set()
    # Do this for the rows of one shard, and for the rows of all shards together, which are tiled if rows are joined.
    for m in {problem.m, problem.m * problem.devices * problem.batch} - {0}:
        least = min(least_rows, m)
        counts = range(ceil_div(m, MOST_ROWS_OF_SWAPPED), ceil_div(m, least) + 1)
        found |= {ceil_div(m, count * SWAPPED_UNIT) * SWAPPED_UNIT for count in counts}
    return tuple(sorted(rows for rows in found if rows <= MOST_ROWS_OF_SWAPPED))


def _usual(problem: Problem) -> Config:
    """Returns the configuration that holds the usual values of all fields that a shape does not set.

    If weights are gathered along k, a tile needs its columns of every shard. So the tile order runs through all rows
    before it moves on to the next columns: then the first wave of tiles needs only few columns.
    """
    return Config(order_minor="n") if problem.gathered == "k" else Config()


def _is_pointless(shape: Config, problem: Problem, target: Target) -> bool:
    """Whether a shape is not worth trying: equal to another one, known to be slower, or without effect here."""
    rows, *_ = problem.grid(shape)
    if shape.cluster > min(target.num_cores, ceil_div(rows, shape.tile_m)):
        return True
    if shape.swap_operands and not accumulator_registers(shape):
        return True
    if spills(shape):
        return True
    if shape.in_turn and (shape.joined or shape.one_shot or rates_of(target).overlaps_epilogue):
        return True
    if shape.in_turn and work_of(shape, problem, target).pieces(0) < 2:
        # With only one tile per CTA, the second warpgroup would have no work.
        return True
    if not shape.joined:
        return False
    if problem.block_scaled:
        return True
    # Join rows only if that makes fewer tiles and there are few rows. Otherwise it is better to multiply each shard's
    # rows as they arrive.
    shards = problem.batch * problem.devices
    filled = ceil_div(problem.m, shape.tile_m) * shards <= ceil_div(problem.m * shards, shape.tile_m)
    few = problem.m * shards <= MOST_JOINED_ROWS
    return filled or not few


def _base(shape: Config, problem: Problem, target: Target) -> Config | None:
    """Returns the configuration with a shape (the fields in `SHAPE`) and the usual fine fields; None if it cannot run.

    It has as many stages as shared memory holds, but no more than the busiest CTA has k steps.
    """
    least = dataclasses.replace(shape, stages=min(STAGES))
    if not problem.accepts(least, target):
        return None
    work = work_of(shape, problem, target)
    filled = max(math.ceil(waves(shape, problem, target) * work.k_steps), least.stages)
    deeper = (dataclasses.replace(least, stages=stages) for stages in STAGES if stages <= filled)
    deepest = next((config for config in deeper if problem.accepts(config, target)), least)
    return _ordered(deepest, problem, target)


def _ordered(config: Config, problem: Problem, target: Target) -> Config:
    """Returns a configuration with the best tile order: for plain products the one with the shortest predicted time."""
    if not problem.communicates and (rates_of(target).measured or problem.spec.groups):
        orders = itertools.product(FINE["order_width"], FINE["order_minor"])
        ordered = [dataclasses.replace(config, order_minor=minor, order_width=width) for width, minor in orders]
        return min(ordered, key=lambda config: predicted_us(config, problem, target))
    if config.in_turn and config.order_minor == "m" and (config.tile_m < FULL_BAND_ROWS or problem.scattered):
        # Tiles with few rows make a band (`TileOrder`) of few rows. Double the number of tiles across the band, so that
        # it has as many rows as a band of larger tiles. If sums are scattered, double the band for all tiles: this was
        # measured to be up to 7% faster (2 H200s).
        return dataclasses.replace(config, order_width=2 * config.order_width)
    return config


def _variations(base: Config, problem: Problem) -> Iterator[Config]:
    """Yields `base`, and each copy of `base` in which one fine field is changed."""
    yield base
    in_chunks = CHUNKS if problem.transport(base) not in ("", "one_shot") else {}
    fewer = (base.stages - 1,) if base.stages > min(STAGES) else ()
    for name, values in {**FINE, "stages": fewer, **in_chunks}.items():
        for value in values:
            if value != getattr(base, name):
                yield base.replace(**{name: value})


def _on_grid(config: Config, problem: Problem) -> Config:
    """Returns the configuration with its tile order limited to the problem's grid.

    Two configurations that are equal after this run the same kernel.
    """
    m, n, _ = problem.grid(config)
    tiles = {"m": ceil_div(m, config.cluster_tile_m), "n": ceil_div(n, config.tile_n)}
    if min(tiles.values()) == 1:  # There is one order only.
        return dataclasses.replace(config, order_minor="m", order_width=1)
    return dataclasses.replace(config, order_width=min(config.order_width, tiles[config.order_minor]))
