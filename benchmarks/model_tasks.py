"""Draws random problems, and for each the configurations to time: the task file of `benchmarks.configurations`.

    python -m benchmarks.model_tasks --seed 1 --problems 220 --out tasks.jsonl             tasks to fit the model
    python -m benchmarks.model_tasks --seed 2 --problems 60 --judge --out held_out.jsonl   tasks to judge it, with XLA

The logarithms of sizes are uniformly distributed. To fit the model, configurations are drawn from the whole search
space, and more often if their predicted time is short. To judge the model, a task has as many of the search's first
configurations as the tuner tries, and some configurations that the search would not reach.
"""

from __future__ import annotations

import argparse
import math
import pathlib
import random
import sys
from collections.abc import Iterable

from benchmarks import command
from benchmarks.configurations import Task
from overlap.choice import space
from overlap.choice.problem import Layout, Problem
from overlap.choice.tables import replace
from overlap.cli import ending
from overlap.cli.arguments import whole_number
from overlap.kernels.config import Config
from overlap.kernels.target import Target

# The GPUs that the model is fitted to, by the name that files and options use.
TARGETS = {"h200": Target("gpu", "NVIDIA H200", 132), "h100": Target("gpu", "NVIDIA H100 80GB HBM3", 132)}
ROWS, COLUMNS, DEPTH = (64, 16384), (256, 32768), (256, 16384)
# A call of the largest problem takes 3 ms, and a call of a problem of FEW_FLOPS 15 µs.
MOST_FLOPS, FEW_FLOPS = 2e12, 1e10
# How many elements of 2 bytes a cache line has. Rows are aligned if their length is a multiple of this number.
_LINE = 64
_KINDS = (("bfloat16", 14), ("float16", 3), ("float8_e4m3fn", 3))
_LAYOUTS: tuple[tuple[Layout, int], ...] = (("nn", 7), ("nt", 7), ("tn", 4), ("tt", 2))


def _drawn(chance: random.Random, limits: tuple[int, int], unit: int) -> int:
    low, high = map(math.log2, limits)
    return max(round(2 ** chance.uniform(low, high) / unit), 1) * unit


def _one_of[T](chance: random.Random, weighted: tuple[tuple[T, int], ...]) -> T:
    values, weights = zip(*weighted, strict=True)
    return chance.choices(values, weights)[0]


def draw_problem(chance: random.Random, *, aligned: float, few_rows: float, bfloat16_only: bool) -> Problem:
    """Draws a random problem.

    Args:
      chance: the source of random numbers.
      aligned: the fraction of problems whose rows are aligned to cache lines.
      few_rows: the fraction of problems with at most 64 rows.
      bfloat16_only: whether all operands are bfloat16.
    """
    while True:
        dtype = "bfloat16" if bfloat16_only else _one_of(chance, _KINDS)
        layout: Layout = "nt" if dtype.startswith("float8") else _one_of(chance, _LAYOUTS)
        # Elements of f8 have 1 byte. So a cache line has twice as many, and rows still begin at multiples of 16 bytes.
        unit = 2 * _LINE if dtype.startswith("float8") else _LINE
        unit = unit if chance.random() < aligned else unit // 8
        of_m = unit if layout[0] == "t" else 8
        rows = (8, 64) if chance.random() < few_rows else ROWS
        m, n, k = _drawn(chance, rows, of_m), _drawn(chance, COLUMNS, unit), _drawn(chance, DEPTH, unit)
        flops = 2.0 * m * n * k
        # Few problems that hardly take longer than a launch are needed: most of them are drawn again.
        if flops <= MOST_FLOPS and (flops > FEW_FLOPS or chance.random() < 0.35):
            return Problem("matmul", m, n, k, dtype, "bfloat16" if dtype.startswith("float8") else dtype, layout=layout)


def shape_of(config: Config) -> tuple[object, ...]:
    """Returns the values of the fields that `space.SHAPE` names: the fields that matter most for the time."""
    return tuple(getattr(config, name) for name in space.SHAPE)


def draw_configs(chance: random.Random, problem: Problem, target: Target) -> tuple[Config, ...]:
    """Draws at most fourteen configurations, most of them with a short predicted time.

    The configurations are ordered by predicted time and grouped by `shape_of`. The function takes the first
    configuration of each of the first six groups, the first configuration of each of four groups drawn from the next
    24, and four configurations drawn from the others of the first five groups.
    """
    ranked = space.candidates(problem, target)
    first: dict[object, list[Config]] = {}
    for config in ranked:
        first.setdefault(shape_of(config), []).append(config)
    shapes = list(first.values())
    bases = [configs[0] for configs in shapes]
    chosen = bases[:6] + chance.sample(bases[6:30], min(4, len(bases[6:30])))
    finer = [config for configs in shapes[:5] for config in configs[1:]]
    return tuple(dict.fromkeys(chosen + chance.sample(finer, min(4, len(finer)))))


def judged_configs(chance: random.Random, problem: Problem, count: int, target: Target) -> tuple[Config, ...]:
    """Returns the search's first `count` configurations, and six drawn from the others, which differ in `shape_of`."""
    ranked = space.candidates(problem, target)
    shapes = {shape_of(config): config for config in reversed(ranked[count:])}
    return tuple(ranked[:count] + chance.sample(list(shapes.values()), min(6, len(shapes))))


def add_gpu(parser: argparse.ArgumentParser) -> None:
    """Adds the option `--gpu`, a name of `TARGETS`."""
    parser.add_argument("--gpu", choices=list(TARGETS), default="h200", help="the GPU to measure or to fit")


def main(arguments: Iterable[str] | None = None) -> int:
    """Runs the command. Returns the exit status."""
    parser = command.tool_parser("model_tasks", __doc__)
    parser.add_argument("--seed", type=whole_number(0), required=True, help="seed of the random numbers")
    add_gpu(parser)
    parser.add_argument("--problems", type=whole_number(1), required=True, help="how many problems")
    parser.add_argument(
        "--judge", action="store_true", help="tasks to judge the model: with XLA's product, in bfloat16"
    )
    parser.add_argument(
        "--configs",
        type=whole_number(1),
        default=16,
        help="with --judge: how many of the search's first configurations",
    )
    parser.add_argument(
        "--few-tiles", action="store_true", help='only products that clusters along k (cluster_along="k") may compute'
    )
    parser.add_argument("--out", type=pathlib.Path, required=True, help="the task file to write")
    given = parser.parse_args(None if arguments is None else list(arguments))
    chance, target, lines = random.Random(given.seed), TARGETS[given.gpu], []
    while len(lines) < given.problems:
        if given.judge:
            problem = draw_problem(chance, aligned=1.0, few_rows=0.0, bfloat16_only=True)
        else:
            problem = draw_problem(chance, aligned=0.85, few_rows=0.1, bfloat16_only=False)
        along_k = [config for config in space.candidates(problem, target) if config.ctas_per_tile > 1]
        if given.few_tiles and not along_k:
            continue
        if given.judge:
            configs = judged_configs(chance, problem, given.configs, target)
        else:
            configs = draw_configs(chance, problem, target)
        if given.few_tiles:
            first = {shape_of(config): config for config in reversed(along_k)}
            configs = tuple(dict.fromkeys((*configs, *list(first.values())[-1:-5:-1])))
        lines.append(Task(problem, configs, given.judge).to_json())
    replace(given.out, "\n".join(lines) + "\n")
    print(f"{len(lines)} tasks in {given.out}")
    return 0


if __name__ == "__main__":
    sys.exit(ending.run(main))
