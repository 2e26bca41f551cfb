"""All kernels that the tuner and the heuristic can choose, grouped into classes that need the same registers.

Most fields of a `Config` hardly change the code beyond constants: the depth of the pipeline, the order of tiles, the
number of pieces in the last wave. The sizes of the problem do not change more either. The remaining fields make up a
`KernelClass`. There are finitely many classes, and `classify` says to which class a choice belongs. All members of a
class need the same number of registers to within `RESERVE`; `python -m tests.assembly.sweep` measures this.

A class is a *loop* (operation, layout, bytes of an operand), a *tile* (sizes, bytes of a result) and an *ending* (cut
tiles, cluster, epilogue). It is enough to assemble every loop with every tile, and every tile with every ending: from
the loop to the ending a warpgroup holds only the accumulator, which the tile determines. So an untested pair of loop
and ending needs no more registers than the two tested classes. `cover` returns these classes, `pairwise` those with
every pair of values: `make test-all` assembles both. `core` returns a few of them, for every run of the tests.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp

from overlap.choice import space
from overlap.choice.model import work_of
from overlap.choice.problem import Layout, Problem
from overlap.kernels.config import FLOAT8, FLOAT16, Config
from overlap.kernels.hopper import limits
from overlap.kernels.operations import BY_NAME
from overlap.kernels.target import Target
from tests.assembly.targets import TARGETS

TARGET = Target("gpu", TARGETS["h200"].name, TARGETS["h200"].core_count)
MATMUL, GATHER_LHS = "matmul", "all_gather_lhs_matmul"
GATHER_RHS = ("all_gather_rhs_matmul_n", "all_gather_rhs_matmul_k")
SCATTER = ("matmul_reduce_scatter", "matmul_reduce_scatter_n")
# `matmul_all_reduce` has two kernels. SPREAD sums blocks (of rows or columns, depending on the sizes), then sends each
# sum to all devices. ONE_SHOT sends all parts to all devices at once.
SPREAD, ONE_SHOT = "matmul_all_reduce", "matmul_all_reduce_one_shot"
SUMS = (*SCATTER, SPREAD, ONE_SHOT)
# For each operation: layouts, bytes of an operand (8-bit operands are read in nt only), whether it has an epilogue.
# `Config.check` refuses some of them.
OPERATIONS: dict[str, tuple[tuple[Layout, ...], tuple[int, ...], bool]] = {
    op: (spec.layouts, (2, 1) if "nt" in spec.layouts else (2,), bool(spec.epilogue))
    for op, spec in BY_NAME.items()
    if not spec.groups
}
OPERATIONS |= {SCATTER[1]: (("nn",), (2,), True), ONE_SHOT: OPERATIONS[SPREAD]}

# The fields of a Config that determine the class. split_k > 1 only makes the
# result f32 and leaves the epilogue to XLA. stream_k > 1 only cuts tiles, if the problem has tiles to cut. Of
# cluster_along, which is in `UNSEEN`, the class sees only whether it is "k" (`values_of`).
SEEN = frozenset({"tile_m", "tile_n", "schedule", "swap_operands", "cluster", "split_k", "stream_k"})
# A class with swapped operands has its own number of rows and those down to the next value (limits of `spills`).
_MOST = {limits.MOST_ACCUMULATED, limits.MOST_ACCUMULATED_IN_CLUSTERS, limits.MOST_ACCUMULATED // 2}
ROWS_OF_SWAPPED = (256, *sorted(_MOST, reverse=True))
# The same in clusters along k. The most rows with 128 and with 256 columns; and two numbers whose sums in shared memory
# have other swizzles (`cluster_sums_type`).
ROWS_OF_SWAPPED_ALONG_K = (256, 128, 104, 80)
# The fields of a Config that do not determine the class, with all values that can be chosen.
UNSEEN: dict[str, tuple[Any, ...]] = {
    "cluster_along": ("m",),
    "stages": space.STAGES,
    **{name: values for name, values in (space.SHAPE | space.FINE | space.CHUNKS).items() if name not in SEEN},
}
# Products that every configuration can run: m, n, k. Clusters along k run products of few tiles only.
LARGE, SMALL = (4096, 4608, 4096), (256, 512, 2048)
DTYPES = {2: [dtype.name for dtype in FLOAT16], 4: ["float32"], 1: [dtype.name for dtype in FLOAT8]}


@dataclasses.dataclass(frozen=True, order=True)
class KernelClass:
    """The properties of a choice that change the registers its kernel needs.

    Attributes:
        op: the operation.
        layout: which operands are transposed.
        operand_bytes: bytes per operand element; dtypes of one size differ only in one word of an instruction.
        out_bytes: bytes per element that the kernel writes.
        tile_m: as in `Config`; if the operands are swapped, one of `ROWS_OF_SWAPPED` or `ROWS_OF_SWAPPED_ALONG_K`.
        tile_n: as in `Config`.
        cluster: CTAs per cluster.
        cuts: whether CTAs share tiles.
        epilogue: whether the epilogue does more than convert; then bias, addend, scales and activation all at once.
        schedule: as in `Config`.
        swapped: whether the operands are swapped (`Config.swap_operands`).
        along_k: whether the CTAs of a cluster compute a tile together (`Config.cluster_along` is "k").
    """

    op: str
    layout: Layout
    operand_bytes: int
    out_bytes: int
    tile_m: int
    tile_n: int
    cluster: int
    cuts: bool
    epilogue: bool
    schedule: str = "cooperative"
    swapped: bool = False
    along_k: bool = False

    @property
    def loop(self) -> tuple[Any, ...]:
        return self.op, self.layout, self.operand_bytes

    @property
    def tile(self) -> tuple[Any, ...]:
        return self.tile_m, self.tile_n, self.out_bytes, self.schedule, self.swapped

    @property
    def ending(self) -> tuple[Any, ...]:
        return self.cluster, self.cuts, self.epilogue, self.along_k

    @property
    def pulls(self) -> bool:
        return self.op != MATMUL

    def __str__(self) -> str:
        op = {
            MATMUL: "", GATHER_LHS: "gather-lhs-", GATHER_RHS[0]: "gather-rhs-n-", GATHER_RHS[1]: "gather-rhs-k-",
            SCATTER[0]: "scatter-m-", SCATTER[1]: "scatter-n-", SPREAD: "spread-", ONE_SHOT: "one-shot-",
        }  # fmt: skip
        flags = [name for name in ("cuts", "epilogue") if getattr(self, name)]
        tile = f"{self.tile_m}x{self.tile_n}"
        turn = ["swapped"] * self.swapped + (["pingpong"] if self.schedule == "pingpong" else [])
        bits = f"{8 * self.operand_bytes}to{8 * self.out_bytes}"
        cluster = [f"cluster-of-{self.cluster}-along-k"] if self.along_k else ["cluster"] * (self.cluster > 1)
        return " ".join([op[self.op] + self.layout, bits, tile, *cluster, *turn, *flags])


def classify(config: Config, problem: Problem, *, epilogue: bool) -> KernelClass:
    """Returns the class of a choice. `epilogue`: whether the call has an epilogue beside the product."""
    split = config.split_k > 1
    return KernelClass(
        op=ONE_SHOT if problem.transport(config) == "one_shot" else problem.op,
        layout=problem.layout,
        operand_bytes=jnp.dtype(problem.dtype).itemsize,
        out_bytes=4 if split else jnp.dtype(problem.out_dtype).itemsize,
        tile_m=_rows_of_class(config),
        tile_n=config.tile_n,
        cluster=config.cluster,
        cuts=_cuts(config, problem),
        epilogue=epilogue and not split,
        schedule=config.schedule,
        swapped=config.swap_operands,
        along_k=config.ctas_per_tile > 1,
    )


def values_of(kernel: KernelClass) -> dict[str, tuple[Any, ...]]:
    """Returns the fields of a Config that do not determine the class, with the values that occur in this class."""
    return UNSEEN | ({"cluster_along": ("k",)} if kernel.along_k else {})


def _rows_of_class(config: Config) -> int:
    if not config.swap_operands:
        return config.tile_m
    rows_of_classes = ROWS_OF_SWAPPED_ALONG_K if config.ctas_per_tile > 1 else ROWS_OF_SWAPPED
    return min(rows for rows in rows_of_classes if rows >= config.tile_m)


def _cuts(config: Config, problem: Problem) -> bool:
    if problem.gathered == "k":  # The devices' shards form one long contraction.
        problem = dataclasses.replace(problem, k=problem.whole[2], devices=1)
    return work_of(config, problem, TARGET).cuts


@functools.cache
def every() -> tuple[KernelClass, ...]:
    """Returns all classes: every combination of values that `Config.check` accepts and the search tries."""
    return tuple(sorted(kernel for kernel in (*_apart(), *_along_k()) if _exists(kernel)))


def _apart() -> Iterator[KernelClass]:
    """Yields all classes in which no cluster computes a tile together, and combinations that are not accepted."""
    of_swapped = space.SHAPE | space.SWAPPED | {"tile_m": ROWS_OF_SWAPPED}
    tiles = [
        (*tile, swapped)
        for swapped, shape, out_bytes in ((False, space.SHAPE, (2, 4)), (True, of_swapped, (2,)))
        for tile in itertools.product(out_bytes, shape["tile_m"], shape["tile_n"], (1,))
    ]
    for op, (layouts, sizes, epilogues) in OPERATIONS.items():
        # One shot has one tile per core, so its warpgroups do not take turns.
        schedules = space.SHAPE["schedule"][: 1 if op == ONE_SHOT else None]
        of_op = itertools.product(schedules, layouts, sizes, tiles, (False, True), (False, True)[: 1 + epilogues])
        for schedule, layout, operand_bytes, (*tile, swapped), cuts, epilogue in of_op:
            yield KernelClass(op, layout, operand_bytes, *tile, cuts, epilogue, schedule, swapped)


def _along_k() -> Iterator[KernelClass]:
    """Yields all classes in which a cluster computes a tile together, and combinations that are not accepted."""
    upright = itertools.product((False,), (2, 4), space.SHAPE["tile_m"], space.SHAPE["tile_n"])
    swapped = itertools.product((True,), (2,), ROWS_OF_SWAPPED_ALONG_K, space.SWAPPED["tile_n"])
    layouts, sizes, _ = OPERATIONS[MATMUL]
    for layout, operand_bytes, (swap, *tile), cluster, epilogue in itertools.product(
        layouts, sizes, (*upright, *swapped), space.CLUSTERS_ALONG_K, (False, True)
    ):
        yield KernelClass(MATMUL, layout, operand_bytes, *tile, cluster, False, epilogue, swapped=swap, along_k=True)


def _exists(kernel: KernelClass) -> bool:
    fields = {name: min(values) for name, values in values_of(kernel).items()} | {"stream_k": 2 if kernel.cuts else 1}
    shape = SMALL if kernel.along_k else LARGE
    problem = Problem(
        problems_op(kernel), *shape, DTYPES[kernel.operand_bytes][0], DTYPES[kernel.out_bytes][0],
        devices=2 if kernel.pulls else 1, layout=kernel.layout,
    )  # fmt: skip
    config = config_of(kernel, fields)
    return problem.accepts(config, TARGET) and not space.spills(config)


def problems_op(kernel: KernelClass) -> Any:
    return SPREAD if kernel.op == ONE_SHOT else kernel.op


def config_of(kernel: KernelClass, fields: dict[str, Any]) -> Config:
    """Returns a configuration of a class: with its own number of rows, or the most of its rows that do not spill."""
    config = Config(
        tile_m=kernel.tile_m, tile_n=kernel.tile_n, cluster=kernel.cluster, schedule=kernel.schedule,
        swap_operands=kernel.swapped, **fields | {"one_shot": kernel.op == ONE_SHOT},
    )  # fmt: skip
    fewer = (config.replace(tile_m=rows) for rows in range(kernel.tile_m, 0, -8) if kernel.swapped)
    of_class = itertools.takewhile(lambda smaller: _rows_of_class(smaller) == kernel.tile_m, fewer)
    return next((smaller for smaller in of_class if not space.spills(smaller)), config)


@functools.cache
def cover() -> list[KernelClass]:
    """Returns classes that together contain every pair of (loop, tile) and every pair of (tile, ending)."""

    def pairs(kernel: KernelClass) -> set[Any]:
        return {(kernel.loop, kernel.tile), (kernel.pulls, kernel.tile, kernel.ending)}

    kernels, chosen = list(every()), []
    random.Random(0).shuffle(kernels)
    missing = set().union(*map(pairs, kernels))
    for new in (2, 1):  # Take classes that add two missing pairs first.
        for kernel in kernels:
            if len(pairs(kernel) & missing) >= new:
                chosen.append(kernel)
                missing -= pairs(kernel)
    return sorted(chosen)


# Pairs (tile, ending) for which a compute thread needs more than 160 registers. They come from the table of registers
# that `python -m tests.assembly.sweep` writes. The list also has three small tiles that need far more registers than
# tiles of similar sizes.
MOST_REGISTERS: tuple[tuple[tuple[Any, ...], tuple[Any, ...]], ...] = (
    ((256, 128, 2, "cooperative", False), (True, 1, True, True, False)),
    ((256, 128, 2, "cooperative", False), (False, 1, False, True, False)),
    ((128, 256, 2, "cooperative", False), (False, 1, True, True, False)),
    ((128, 256, 2, "cooperative", False), (False, 1, False, True, False)),
    ((128, 256, 2, "cooperative", False), (True, 1, True, True, False)),
    ((128, 64, 2, "cooperative", False), (True, 1, True, False, False)),
    ((256, 64, 2, "cooperative", False), (True, 1, True, False, False)),
    ((64, 256, 4, "pingpong", False), (False, 1, False, True, False)),
    ((128, 128, 2, "pingpong", False), (True, 1, True, True, False)),
    ((limits.MOST_ACCUMULATED, 256, 2, "cooperative", True), (True, 1, False, True, False)),
    ((limits.MOST_ACCUMULATED, 128, 2, "pingpong", True), (True, 1, False, True, False)),
    ((limits.MOST_ACCUMULATED // 2, 256, 2, "pingpong", True), (False, 1, False, True, False)),
    ((limits.MOST_ACCUMULATED, 256, 2, "cooperative", True), (False, 1, True, True, False)),
)


def fewest(kernels: Sequence[Any], properties: Callable[[Any], set[Any]], chosen: Iterable[Any] = ()) -> list[Any]:
    """Returns `chosen` and as few further classes as have every property together (one after the other, greedily)."""
    of_each = {kernel: properties(kernel) for kernel in kernels}
    found = set(chosen)
    missing = set().union(*of_each.values()).difference(*(of_each[kernel] for kernel in found))
    while missing:
        best = max(kernels, key=lambda kernel: len(of_each[kernel] & missing))
        found.add(best)
        missing -= of_each[best]
    return sorted(found)


def value_pairs(kernel: Any) -> set[Any]:
    """Returns, for any two fields, the pair of values that the class has."""
    return set(itertools.combinations(dataclasses.asdict(kernel).items(), 2))


def values_and_features(kernel: Any) -> set[Any]:
    """Returns the value of each field, and for each operation whether tiles are cut, have an epilogue, take turns."""
    fields = dataclasses.asdict(kernel)
    plain = {"cuts": False, "epilogue": False, "schedule": "cooperative"}
    return {*fields.items(), *((kernel.op, name) for name, value in plain.items() if fields.get(name, value) != value)}


def _largest(wanted: Sequence[Any], kernels: Sequence[KernelClass]) -> set[KernelClass]:
    return {next(k for k in kernels if (k.tile, (k.pulls, *k.ending)) == each) for each in wanted}


@functools.cache
def pairwise() -> list[KernelClass]:
    """Returns a class for each entry of `MOST_REGISTERS`, and others with every pair of values of any two fields."""
    kernels = list(every())
    random.Random(10).shuffle(kernels)
    return fewest(kernels, value_pairs, _largest(MOST_REGISTERS, kernels))


@functools.cache
def core() -> list[KernelClass]:
    """Returns the classes that every run of the tests assembles: some of the largest, each value, each feature.

    Where there is a choice, small tiles without an epilogue, which assemble fastest.
    """
    kernels = list(every())
    random.Random(10).shuffle(kernels)
    kernels.sort(key=lambda kernel: kernel.tile_m * kernel.tile_n * (1 + kernel.epilogue))
    return fewest(kernels, values_and_features, _largest(MOST_REGISTERS[::5], kernels))
