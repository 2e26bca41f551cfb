"""All kernels that the tuner and the heuristic can choose, grouped into classes that need the same registers.

Most fields of a `Config` hardly change the code beyond constants: the depth of the pipeline, the order of tiles, the
number of pieces in the last wave. The sizes of the problem do not change more either. The remaining fields make up a
`KernelClass`. There are finitely many classes, and `classify` says to which class a choice belongs. All members of a
class need the same number of registers to within `RESERVE`; `python -m tests.assembly_sweep` measures this.

A class is a *loop* (operation, layout, bytes of an operand), a *tile* (sizes, bytes of a result) and an *ending* (cut
tiles, cluster, epilogue). It is enough to assemble every loop with every tile, and every tile with every ending: from
the loop to the ending a warpgroup holds only the accumulator, which the tile determines. So an untested pair of loop
and ending needs no more registers than the two tested classes. `cover` returns these classes; `make test-all` assembles
them. `core` returns the classes that need the most registers, and every pair of values of any two fields; every run of
the tests assembles them.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import re
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from overlap.choice import space
from overlap.choice.model import work_of
from overlap.choice.problem import LAYOUTS, Layout, Problem
from overlap.kernels.config import FLOAT8, FLOAT16, SWIZZLE_BYTES, Config
from overlap.kernels.hopper.limits import COMPUTE_WARPGROUPS, rows_loaded, smem_bytes
from overlap.kernels.target import Target
from overlap.kernels.tma.limits import BARRIER_BYTES
from tests import assembly_registers
from tests.assembly import TARGETS, Case
from tests.assembly_largest import MOST_REGISTERS
from tests.assembly_registers import Registers
from tests.assembly_report import KernelReport

TARGET = Target("gpu", TARGETS["h200"].name, TARGETS["h200"].core_count)
# Registers that a kernel must leave unused, because other members of its class may need a setmaxnreg step or two more.
RESERVE = Registers(compute=16, transfer=8)
# The index arithmetic of some gathers uses all registers of the transfer threads: about one in thirty with swapped
# operands (of 340), one of twelve with "pingpong", one of six with gathered weights and cut tiles. None of them spills.
RESERVE_OF_GATHERS = Registers(compute=16, transfer=0)
# With jax 0.12, the largest tiles with a full epilogue spill at most these bytes (`KernelReport.ignores_setmaxnreg`).
SPILLS_OF_JAX_0_12 = 640
MATMUL, GATHER_LHS = "matmul", "all_gather_lhs_matmul"
GATHER_RHS = ("all_gather_rhs_matmul_n", "all_gather_rhs_matmul_k")
SCATTER = ("matmul_reduce_scatter", "matmul_reduce_scatter_n")
# `matmul_all_reduce` has two kernels. SPREAD sums blocks (of rows or columns, depending on the sizes), then sends each
# sum to all devices. ONE_SHOT sends all parts to all devices at once.
SPREAD, ONE_SHOT = "matmul_all_reduce", "matmul_all_reduce_one_shot"
SUMS = (*SCATTER, SPREAD, ONE_SHOT)
# For each operation: layouts, bytes of an operand, whether it has an epilogue. `Config.check` refuses some of them.
OPERATIONS: dict[str, tuple[tuple[Layout, ...], tuple[int, ...], bool]] = {
    MATMUL: (LAYOUTS, (2, 1), True),
    GATHER_LHS: (("nn", "nt"), (2, 1), True),
    **{op: (("nn", "tn"), (2,), False) for op in GATHER_RHS},
    SCATTER[0]: (LAYOUTS, (2, 1), True),
    SCATTER[1]: (("nn",), (2,), True),
    SPREAD: (LAYOUTS, (2, 1), True),
    ONE_SHOT: (LAYOUTS, (2, 1), True),
}

# The fields of a Config that determine the class. tile_k follows from the operand's bytes. split_k > 1 only makes the
# result f32 and leaves the epilogue to XLA. stream_k > 1 only cuts tiles, if the problem has tiles to cut.
SEEN = frozenset(
    {"tile_m", "tile_n", "tile_k", "schedule", "swap_operands", "epilogue_tile_n", "cluster", "split_k", "stream_k"}
)
# A class with swapped operands has its own number of rows and those down to the next value (limits of `space.spills`).
_MOST = {space.MOST_ACCUMULATED, space.MOST_ACCUMULATED_IN_CLUSTERS, space.MOST_ACCUMULATED // 2}
ROWS_OF_SWAPPED = (256, *sorted(_MOST, reverse=True))
# The fields of a Config that do not determine the class, with all values that can be chosen.
UNSEEN: dict[str, tuple[Any, ...]] = {
    "stages": space.STAGES,
    **{name: values for name, values in (space.SHAPE | space.FINE | space.CHUNKS).items() if name not in SEEN},
}
DTYPES = {2: [dtype.name for dtype in FLOAT16], 4: ["float32"], 1: [dtype.name for dtype in FLOAT8]}
# The shapes have whole and ragged tiles, few and many tiles, one and several k steps. Plain products have a batch too.
SHAPES = (
    (4096, 4608, 4096),
    (1024, 1024, 14336),
    (2064, 1552, 4112),
    (512, 8192, 8192),
    (272, 528, 2064),
    (16, 8192, 64),
    (48, 4096, 4096),
)
# These rows split into whole chunks, so that chunk buffers are as large as `limits.smem_bytes` says.
PULL_SHAPES = ((1024, 4096, 4096), (1000, 2048, 8192), (512, 8192, 4096), (264, 1024, 4096), (40, 2048, 4096))
# All numbers of devices divide these sizes, and blocks are no smaller than tiles: so boxes have their full size.
SCATTER_SHAPES = ((6144, 3072, 4096), (2112, 2112, 1032), (8448, 1536, 64), (2304, 3264, 2064))
BATCHES, DEVICES = (1, 1, 3), (2, 3, 4, 8)


@dataclasses.dataclass(frozen=True, order=True)
class KernelClass:
    """The properties of a choice that change the registers its kernel needs.

    Attributes:
        op: the operation.
        layout: which operands are transposed.
        operand_bytes: bytes per operand element; dtypes of one size differ only in one word of an instruction.
        out_bytes: bytes per element that the kernel writes.
        tile_m: as in `Config`; if the operands are swapped, one of `ROWS_OF_SWAPPED`.
        tile_n: as in `Config`.
        epilogue_tile_n: columns per store, as in `Config`.
        cluster: CTAs per cluster.
        cuts: whether CTAs share tiles.
        epilogue: whether the epilogue does more than convert; then bias, addend, scales and activation all at once.
        schedule: as in `Config`.
        swapped: whether the operands are swapped (`Config.swap_operands`).
    """

    op: str
    layout: Layout
    operand_bytes: int
    out_bytes: int
    tile_m: int
    tile_n: int
    epilogue_tile_n: int
    cluster: int
    cuts: bool
    epilogue: bool
    schedule: str = "cooperative"
    swapped: bool = False

    @property
    def loop(self) -> tuple[Any, ...]:
        return self.op, self.layout, self.operand_bytes

    @property
    def tile(self) -> tuple[Any, ...]:
        return self.tile_m, self.tile_n, self.epilogue_tile_n, self.out_bytes, self.schedule, self.swapped

    @property
    def ending(self) -> tuple[Any, ...]:
        return self.cluster, self.cuts, self.epilogue

    @property
    def tile_k(self) -> int:
        return 128 // self.operand_bytes

    @property
    def pulls(self) -> bool:
        return self.op != MATMUL

    def __str__(self) -> str:
        op = {
            MATMUL: "", GATHER_LHS: "gather-lhs-", GATHER_RHS[0]: "gather-rhs-n-", GATHER_RHS[1]: "gather-rhs-k-",
            SCATTER[0]: "scatter-m-", SCATTER[1]: "scatter-n-", SPREAD: "spread-", ONE_SHOT: "one-shot-",
        }  # fmt: skip
        flags = [name for name in ("cuts", "epilogue") if getattr(self, name)]
        tile = f"{self.tile_m}x{self.tile_n}-{self.epilogue_tile_n}"
        turn = ["swapped"] * self.swapped + (["pingpong"] if self.schedule == "pingpong" else [])
        bits = f"{8 * self.operand_bytes}to{8 * self.out_bytes}"
        return " ".join(
            [op[self.op] + self.layout, bits, tile, *(["cluster"] if self.cluster > 1 else []), *turn, *flags]
        )


def classify(config: Config, problem: Problem, *, epilogue: bool) -> KernelClass:
    """Returns the class of a choice. `epilogue`: whether the call has an epilogue beside the product."""
    split = config.split_k > 1
    return KernelClass(
        op=ONE_SHOT if problem.transport(config) == "one_shot" else problem.op,
        layout=problem.layout,
        operand_bytes=jnp.dtype(problem.dtype).itemsize,
        out_bytes=4 if split else jnp.dtype(problem.out_dtype).itemsize,
        tile_m=min(rows for rows in ROWS_OF_SWAPPED if rows >= config.tile_m)
        if config.swap_operands
        else config.tile_m,
        tile_n=config.tile_n,
        epilogue_tile_n=config.epilogue_tile_n,
        cluster=config.cluster,
        cuts=_cuts(config, problem),
        epilogue=epilogue and not split,
        schedule=config.schedule,
        swapped=config.swap_operands,
    )


def _rows_of_class(config: Config) -> int:
    return min(n for n in ROWS_OF_SWAPPED if n >= config.tile_m) if config.swap_operands else config.tile_m


def _cuts(config: Config, problem: Problem) -> bool:
    if problem.gathered == "k":  # The devices' shards form one long contraction.
        problem = dataclasses.replace(problem, k=problem.whole[2], devices=1)
    return work_of(config, problem, TARGET).cuts


def every() -> list[KernelClass]:
    """Returns all classes: every combination of values that `Config.check` accepts and the search tries."""
    of_swapped = space.SHAPE | space.SWAPPED | {"tile_m": ROWS_OF_SWAPPED}
    tiles = [
        (*tile, swapped)
        for swapped, shape, out_bytes in ((False, space.SHAPE, (2, 4)), (True, of_swapped, (2,)))
        for tile in itertools.product(
            out_bytes, shape["tile_m"], shape["tile_n"], space.FINE["epilogue_tile_n"], shape["cluster"]
        )
    ]
    classes = [
        KernelClass(op, layout, operand_bytes, *tile, cuts=cuts, epilogue=epilogue, schedule=schedule, swapped=swapped)
        for op, (layouts, sizes, epilogues) in OPERATIONS.items()
        # One shot has one tile per core, so its warpgroups do not take turns.
        for schedule in space.SHAPE["schedule"][: 1 if op == ONE_SHOT else None]
        for layout, operand_bytes, (*tile, swapped), cuts in itertools.product(layouts, sizes, tiles, (False, True))
        for epilogue in (False, True)[: 1 + epilogues]
    ]
    return sorted(kernel for kernel in classes if _exists(kernel))


def _exists(kernel: KernelClass) -> bool:
    fields = {name: min(values) for name, values in UNSEEN.items()} | {"stream_k": 2 if kernel.cuts else 1}
    problem = Problem(
        _problems_op(kernel), *SHAPES[0], DTYPES[kernel.operand_bytes][0], DTYPES[kernel.out_bytes][0],
        devices=2 if kernel.pulls else 1, layout=kernel.layout,
    )  # fmt: skip
    config = _config(kernel, fields)
    return problem.accepts(config, TARGET) and not space.spills(config)


def _problems_op(kernel: KernelClass) -> Any:
    return SPREAD if kernel.op == ONE_SHOT else kernel.op


def cover() -> list[KernelClass]:
    """Returns classes that together contain every pair of (loop, tile) and every pair of (tile, ending)."""

    def pairs(kernel: KernelClass) -> set[Any]:
        return {(kernel.loop, kernel.tile), (kernel.pulls, kernel.tile, kernel.ending)}

    kernels, chosen = every(), []
    random.Random(0).shuffle(kernels)
    missing = set().union(*map(pairs, kernels))
    for new in (2, 1):  # Take classes that add two missing pairs first.
        for kernel in kernels:
            if len(pairs(kernel) & missing) >= new:
                chosen.append(kernel)
                missing -= pairs(kernel)
    return sorted(chosen)


# These classes need the most registers beside `MOST_REGISTERS`: their communicator sends strips to all devices.
MOST_OF_SPREAD = [KernelClass(SPREAD, layout, 2, 2, 256, 128, 64, 1, False, True) for layout in ("nn", "tt")]


def value_pairs(kernel: KernelClass) -> set[Any]:
    """Returns, for any two fields, the pair of values that the class has."""
    return set(itertools.combinations(dataclasses.asdict(kernel).items(), 2))


def core() -> list[KernelClass]:
    """The classes that every run of the tests assembles: one for each entry of `MOST_REGISTERS`, and a few more.

    Together they contain every pair of values of any two fields that occurs in some class.
    """
    kernels = cover()
    chosen = {next(k for k in kernels if (k.tile, (k.pulls, *k.ending)) == wanted) for wanted in MOST_REGISTERS}
    kernels = every()
    chosen |= {kernel for kernel in MOST_OF_SPREAD if kernel in kernels}
    random.Random(10).shuffle(kernels)
    pairs = {kernel: value_pairs(kernel) for kernel in kernels}
    missing = set().union(*pairs.values()).difference(*(pairs[kernel] for kernel in chosen))
    while missing:
        best = max(kernels, key=lambda kernel: len(pairs[kernel] & missing))
        chosen.add(best)
        missing -= pairs[best]
    return sorted(chosen)


@dataclasses.dataclass(frozen=True)
class Member:
    """One choice of a class, ready to be assembled.

    Attributes:
        kernel: the class.
        config: the configuration.
        problem: the problem that the configuration is for.
        rhs_dtype: dtype of the right operand, since two float8 dtypes may be mixed.
        keeps: whether the gathered left operand is returned as well.
    """

    kernel: KernelClass
    config: Config
    problem: Problem
    rhs_dtype: str
    keeps: bool = False

    @property
    def case(self) -> Case:
        """Returns the case for `tests.assembly`. It states all fields, so that no tuning table is read for defaults."""
        problem, config = self.problem, self.config.fields
        config |= {"layout": problem.layout, "out": problem.out_dtype, "rhs_dtype": self.rhs_dtype}
        config |= {"batch": [problem.batch]} if problem.batch > 1 else {}
        config |= {"epilogue": "all"} if self.kernel.epilogue else {}
        function = "scattered" if problem.scattered else "gathered" if problem.communicates else "product"
        config |= {"op": problem.op} if problem.communicates else {}
        config |= {"return_gathered": self.keeps} if function == "gathered" else {}
        function = f"tests.assembly_products:{function}"
        return Case(function, problem.devices, (problem.m, problem.n, problem.k), problem.dtype, config=config)

    @property
    def smem_bytes(self) -> int:
        """Returns the expected shared memory: `limits.smem_bytes` plus the barriers for `addend`."""
        out_dtype = "float32" if self.config.split_k > 1 else self.problem.out_dtype
        announced = smem_bytes(self.config, self.problem.dtype, out_dtype, self.problem.transport(self.config))
        if self.kernel.swapped:
            # A transposed tile stores only rows that exist; `limits.smem_bytes` counts all rows of the tile.
            announced -= (
                self.kernel.out_bytes
                * self._rows_not_stored
                * math.prod((COMPUTE_WARPGROUPS, self.config.epilogue_buffers, self.config.epilogue_tile_n))
            )
        if not self.kernel.epilogue or (self.kernel.pulls and not self.problem.scattered):
            return announced
        boxes = self.kernel.epilogue_tile_n * self.kernel.out_bytes // SWIZZLE_BYTES
        return announced + COMPUTE_WARPGROUPS * boxes * BARRIER_BYTES

    @property
    def _rows_not_stored(self) -> int:
        joined = self.config.joined and self.kernel.op == GATHER_LHS
        shards = self.problem.devices * self.problem.batch if joined else 1
        return self.config.tile_m - rows_loaded(self.config, self.problem.m * shards)


def members(kernel: KernelClass) -> Iterator[Member]:
    """Yields random choices of a class without end. The sequence is the same in every process."""
    chance = random.Random(str(kernel))
    while True:
        config, problem = _draw(kernel, chance)
        if problem.accepts(config, TARGET) and classify(config, problem, epilogue=kernel.epilogue) == kernel:
            mixed, keeps = chance.choice(DTYPES[1]), chance.choice((False, True))
            rhs_dtype = mixed if kernel.operand_bytes == 1 else problem.dtype
            yield Member(kernel, config, problem, rhs_dtype, keeps and kernel.op == GATHER_LHS)


def _draw(kernel: KernelClass, chance: random.Random) -> tuple[Config, Problem]:
    fields = {name: chance.choice(values) for name, values in UNSEEN.items()}
    fields["stream_k"] = chance.choice([parts for parts in space.SHAPE["stream_k"] if (parts > 1) == kernel.cuts])
    dtype, out_dtype = (chance.choice(DTYPES[size]) for size in (kernel.operand_bytes, kernel.out_bytes))
    m, n, k = chance.choice(SCATTER_SHAPES if kernel.op in SUMS else PULL_SHAPES if kernel.pulls else SHAPES)
    if not (kernel.pulls or kernel.cuts or kernel.epilogue) and kernel.out_bytes == 4:
        fields["split_k"] = chance.choice(space.SHAPE["split_k"])
        out_dtype = chance.choice(DTYPES[2] + DTYPES[4]) if fields["split_k"] > 1 else out_dtype
    batches = (1,) if kernel.op in GATHER_RHS else BATCHES
    problem = Problem(
        _problems_op(kernel), m, n, k, dtype, out_dtype, devices=chance.choice(DEVICES) if kernel.pulls else 1,
        layout=kernel.layout, batch=chance.choice(batches),
    )  # fmt: skip
    return _config(kernel, fields), problem


def _config(kernel: KernelClass, fields: dict[str, Any]) -> Config:
    return Config.of(
        tile_m=kernel.tile_m, tile_n=kernel.tile_n, tile_k=kernel.tile_k, epilogue_tile_n=kernel.epilogue_tile_n,
        cluster=kernel.cluster, schedule=kernel.schedule, swap_operands=kernel.swapped,
        **fields | {"one_shot": kernel.op == ONE_SHOT},
    )  # fmt: skip


def _converges_at_the_end(ptx: str) -> bool:
    """Returns whether `bar.warp.sync` directly precedes the last barrier of a warpgroup."""
    before = [line.strip() for line in ptx[: ptx.rindex("bar.sync")].splitlines()]
    return [line for line in before if line and not line.startswith(("//", ".loc"))][-1] == "bar.warp.sync 0xffffffff;"


def faults(member: Member, report: KernelReport, ptx: str) -> list[str]:
    """Returns descriptions of what is wrong with an assembled kernel; the list is empty if nothing is wrong."""
    limits, threads = assembly_registers.stated(ptx), math.prod(report.threads)
    taken = 128 * (COMPUTE_WARPGROUPS * limits.compute + limits.transfer)
    kernel, smem, most = member.kernel, report.shared_memory_bytes, TARGETS["h200"].shared_memory_per_block_optin
    kernel = member.kernel
    crowded = kernel.swapped or kernel.schedule == "pingpong" or (kernel.op in GATHER_RHS and kernel.cuts)
    reserve = RESERVE_OF_GATHERS if kernel.pulls and crowded else RESERVE
    # A division by a variable is a function call. With such a call jax 0.12 has ptxas serialize wgmma.
    divisions = sorted(set(re.findall(r"\b(?:div|rem)\.[su]\d+", ptx)))
    checks = {
        f"divides: {divisions}": not divisions,
        f"assembled for {report.architecture}": report.architecture == "sm_90a",
        f"{report.spills} bytes of spills": report.spills <= (SPILLS_OF_JAX_0_12 if report.ignores_setmaxnreg else 0),
        f"{report.stack_frame_bytes} bytes of local memory": report.stack_frame_bytes <= report.spills,
        # Any remark of ptxas costs time: serialized wgmma, for example, or an ignored setmaxnreg.
        f"remarks: {report.remarks}": not report.remarks,
        # See `overlap.primitives.converge_warp`.
        "warps meet the others before all of their lanes are there": _converges_at_the_end(ptx),
        # The roles together must take at most the registers of the launch, or setmaxnreg waits forever.
        f"{taken} registers taken of {report.registers * threads}":
            report.ignores_setmaxnreg or taken <= report.registers * threads <= 65536,
        f"{smem} bytes of shared memory, announced {member.smem_bytes}": smem == member.smem_bytes,
        f"{smem} + {report.static_shared_memory_bytes} bytes of shared memory of {most}":
            smem is not None and smem + report.static_shared_memory_bytes <= most,
        # All CTAs must be resident. A CTA that waits for an SM would block the CTAs that wait for its flags.
        f"a grid of {report.grid}": math.prod(report.grid) <= TARGET.num_cores,
        f"fewer than {reserve} of {limits} are left": assembly_registers.leaves(ptx, reserve),
    }  # fmt: skip
    return [fault for fault, good in checks.items() if not good]
