"""The search space: few configurations, all of which pass the kernel's own predicate, the best guess first.

A configuration is a *shape*, which the model ranks (tile, depth of a stage, split), and *fine* choices, about which the
model knows nothing: there the first value is the usual one, and what differs from it in many fields ranks low.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

from overlap.kernels.config import Config
from overlap.kernels.target import Target
from overlap.tuning.model import output_tiles, predicted_us
from overlap.tuning.problem import Problem

SHAPE: dict[str, tuple[int, ...]] = {
    "tile_m": (128, 256, 64),
    "tile_n": (256, 192, 128, 64),
    "tile_k": (64, 128),
    "split_k": (1, 2, 3, 4, 6, 8, 12, 16),
}
# The first is what is taken if nothing speaks against it.
FINE: dict[str, tuple[Any, ...]] = {
    "epilogue_tile_n": (64, 128, 32),
    "epilogue_slots": (1, 2),
    "order_minor": ("m", "n"),
    "order_width": (8, 16, 4),
}
PULLS: dict[str, tuple[int, ...]] = {"chunk_bytes": (8192, 16384, 4096), "chunk_slots": (2, 4)}
# As many as fit; fewer are tried because they leave more of the L1 to other traffic.
STAGES = (8, 7, 6, 5, 4, 3, 2)
_MAX_DEVIATIONS = 2
# How much slower a configuration is assumed to be for each fine field that is not the usual one.
_DEVIATION_COST = 0.015


def candidates(problem: Problem, target: Target) -> list[Config]:
    """The configurations worth trying for a problem, the best guess first; empty if none can run it.

    Each passes `Config.check`: what does not fit into shared memory or registers, or does not divide the problem, is
    found by arithmetic and never compiled.
    """
    return list(_candidates(problem, target))


def heuristic(problem: Problem, target: Target) -> Config | None:
    """The configuration for a problem that nobody measured; None if no configuration can run it."""
    return next(iter(_candidates(problem, target)), None)


def differences(config: Config) -> str:
    """A configuration in words: its tile, and the fields in which it differs from `Config()` otherwise."""
    fields = [field.name for field in dataclasses.fields(Config) if field.name not in ("tile_m", "tile_n", "tile_k")]
    rest = [f"{name}={value}" for name in fields if (value := getattr(config, name)) != getattr(Config(), name)]
    return " ".join([f"{config.tile_m}x{config.tile_n}x{config.tile_k}", *rest])


@functools.lru_cache(maxsize=1024)
def _candidates(problem: Problem, target: Target) -> tuple[Config, ...]:
    ranked: dict[Config, float] = {}
    seen: set[Any] = set()
    for shape in _shapes(problem, target):
        base = _base(shape, problem, target)
        if base is None:
            continue
        us = predicted_us(base, problem, target)
        for config, deviations in _variations(base, problem):
            same = _walk(config, problem)
            if same not in seen and problem.accepts(config, target):
                seen.add(same)
                ranked[config] = us * (1 + _DEVIATION_COST * deviations)
    return tuple(sorted(ranked, key=ranked.__getitem__))


def _shapes(problem: Problem, target: Target) -> Iterator[Config]:
    """The tile shapes, each with the splits that could fill idle cores; all else as `Config` has it."""
    names = [name for name in SHAPE if name != "split_k"]
    for values in itertools.product(*(SHAPE[name] for name in names)):
        whole = dataclasses.replace(Config(), **dict(zip(names, values, strict=True)))
        tiles = output_tiles(whole, problem)
        for split_k in (1,) if problem.pulls else SHAPE["split_k"]:
            # No more parts than fill one wave, and each with some depth.
            if split_k == 1 or (split_k * tiles <= target.num_cores and problem.k >= 2 * split_k * whole.tile_k):
                yield dataclasses.replace(whole, split_k=split_k)


def _base(shape: Config, problem: Problem, target: Target) -> Config | None:
    """The usual configuration of a tile shape, with as many stages as fit and are filled; None if none can run."""
    epilogue = ("epilogue_tile_n", "epilogue_slots")
    for values in itertools.product(*(FINE[name] for name in epilogue)):
        least = dataclasses.replace(shape, **dict(zip(epilogue, values, strict=True)), stages=min(STAGES))
        if not problem.accepts(least, target):
            continue
        filled = max(-(-problem.k // (shape.split_k * shape.tile_k)), least.stages)
        deeper = (dataclasses.replace(least, stages=stages) for stages in STAGES if stages <= filled)
        return next((config for config in deeper if problem.accepts(config, target)), least)
    return None


def _variations(base: Config, problem: Problem) -> Iterator[tuple[Config, int]]:
    """`base` with up to a few fine fields changed, and how many."""
    fields = dict(FINE, stages=(base.stages, base.stages - 1), **(PULLS if problem.pulls else {}))
    changes = [(name, value) for name, values in fields.items() for value in values if value != getattr(base, name)]
    for count in range(_MAX_DEVIATIONS + 1):
        for chosen in itertools.combinations(changes, count):
            if len({name for name, _ in chosen}) == count and all(name != "stages" or v > 1 for name, v in chosen):
                yield dataclasses.replace(base, **dict(chosen)), count


def _walk(config: Config, problem: Problem) -> Config:
    """The same configuration with its order of tiles as it comes out on the problem's grid: equal ones are one."""
    tiles = {"m": -(-problem.m // config.tile_m), "n": -(-problem.n // config.tile_n)}
    minor = config.order_minor if min(tiles.values()) > 1 else "m"
    width = min(config.order_width, tiles[minor]) if min(tiles.values()) > 1 else 1
    return dataclasses.replace(config, order_minor=minor, order_width=width)
