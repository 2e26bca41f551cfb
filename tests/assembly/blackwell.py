"""Lists all kernels of the Blackwell mainloop that differ in code, as classes, and a small set with all value pairs.

On Blackwell no thread holds an accumulator, so registers are no limit. Each class must assemble, spill nothing, and use
the shared memory and tensor memory that `limits` announces.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
import re
from collections.abc import Iterator
from typing import Any

from overlap.choice.model import work_of
from overlap.choice.problem import Problem
from overlap.kernels.blackwell.limits import ACCUMULATORS, TENSOR_MEMORY_COLUMNS, smem_bytes
from overlap.kernels.config import SWIZZLE_BYTES, Config
from overlap.kernels.limits import BARRIER_BYTES, EPILOGUE_COLUMNS
from overlap.kernels.target import Target
from tests.assembly.assembly import Case
from tests.assembly.members import PULL_SHAPES, SCATTER_SHAPES, SHAPES, checks_of
from tests.assembly.programs import of_operation
from tests.assembly.report import KernelReport
from tests.assembly.space import fewest, value_pairs, values_and_features
from tests.assembly.targets import TARGETS

B200 = Target("gpu", TARGETS["b200"].name, TARGETS["b200"].core_count)
# For each operation: its name in `Problem`, its layouts, whether it has 32-bit results, whether it has an epilogue.
# Gathered right operands have no 8-bit elements (`WIDE_OPERANDS`).
OPERATIONS: dict[str, tuple[str, tuple[str, ...], bool, bool]] = {
    "matmul": ("matmul", ("nn", "nt", "tn", "tt"), True, True),
    "pull": ("all_gather_lhs_matmul", ("nn", "nt"), False, True),
    "ring": ("all_gather_lhs_matmul", ("nn", "nt"), False, False),
    "joined": ("all_gather_lhs_matmul", ("nn", "nt"), False, True),
    "rhs n": ("all_gather_rhs_matmul_n", ("nn",), False, False),
    "rhs k": ("all_gather_rhs_matmul_k", ("nn", "tn"), False, False),
    "scatter m": ("matmul_reduce_scatter", ("nn", "nt", "tn", "tt"), True, True),
    "scatter n": ("matmul_reduce_scatter_n", ("nn", "tt"), True, True),
    "ring m": ("matmul_reduce_scatter", ("nn", "nt"), True, True),
    "spread": ("matmul_all_reduce", ("nn", "nt"), True, True),
    "one shot": ("matmul_all_reduce", ("nn", "nt"), True, True),
}
WIDE_OPERANDS = ("rhs n", "rhs k")
TRANSPORTS = {"ring": "ring", "ring m": "ring"}
DTYPES = {2: ("bfloat16", "float16"), 1: ("float8_e4m3fn", "float8_e5m2"), 4: ("float32",)}


@dataclasses.dataclass(frozen=True, order=True)
class KernelClass:
    """The properties of a choice that change the code of its kernel."""

    op: str
    layout: str
    operand_bytes: int
    out_bytes: int
    tile_n: int
    cluster: int
    cuts: bool
    epilogue: bool

    def __str__(self) -> str:
        flags = [name for name in ("cuts", "epilogue") if getattr(self, name)]
        pairs = ["pairs"] if self.cluster > 1 else []
        bits = f"{8 * self.operand_bytes}to{8 * self.out_bytes}"
        return " ".join([self.op, self.layout, bits, str(self.tile_n), *pairs, *flags])

    @property
    def devices(self) -> tuple[int, ...]:
        """Returns the numbers of devices for which the class may be assembled."""
        return (1,) if self.op == "matmul" else (4, 8)


@dataclasses.dataclass(frozen=True)
class Member:
    """One choice of a class, ready to be assembled."""

    kernel: KernelClass
    config: Config
    problem: Problem

    @property
    def case(self) -> Case:
        """Returns the case for `assembly.py`. It states all fields, so that no tuning table is read for defaults."""
        problem, config, name = self.problem, dict(vars(self.config)), self.kernel.op
        config |= {"layout": problem.layout, "out": problem.out_dtype}
        config |= {"epilogue": "all"} if self.kernel.epilogue else {}
        config |= {"op": problem.op} if name != "matmul" else {}
        config |= {"transport": TRANSPORTS[name]} if name in TRANSPORTS else {}
        shape = problem.m, problem.n, problem.k
        return Case(of_operation(problem.op), problem.devices, shape, problem.dtype, "b200", config)

    @property
    def smem_bytes(self) -> int:
        """Returns the expected shared memory: `limits.smem_bytes` plus the barriers for `addend`."""
        transport = "ring" if self.kernel.op == "ring" else self.problem.transport(self.config)
        announced = smem_bytes(self.config, self.problem.out_dtype, transport)
        if not self.kernel.epilogue or (self.problem.communicates and not self.problem.scattered):
            return announced
        return announced + EPILOGUE_COLUMNS * self.kernel.out_bytes // SWIZZLE_BYTES * BARRIER_BYTES


@functools.cache
def every() -> tuple[KernelClass, ...]:
    """Returns all classes: every combination of values that some configuration can have."""
    endings = list(itertools.product((64, 128, 192, 256), (1, 2), (False, True), (False, True)))
    classes = []
    for op, (_, layouts, wide, has_epilogue) in OPERATIONS.items():
        operand_sizes = (2,) if op in WIDE_OPERANDS else (1, 2)
        for layout, operand_bytes, out_bytes in itertools.product(layouts, operand_sizes, (2, 4)[: 1 + wide]):
            for tile_n, cluster, cuts, epilogue in endings:
                kernel = KernelClass(op, layout, operand_bytes, out_bytes, tile_n, cluster, cuts, epilogue)
                if epilogue <= has_epilogue and _exists(kernel):
                    classes.append(kernel)
    return tuple(sorted(classes))


def _exists(kernel: KernelClass) -> bool:
    if kernel.op == "ring" and kernel.cluster > 1:
        return False
    config = _config(kernel, stages=2, chunk_bytes=4096, stream_k=2 if kernel.cuts else 1)
    return _problem(kernel, SHAPES[0], kernel.devices[0], 0).accepts(config, B200)


def _config(kernel: KernelClass, **fields: Any) -> Config:
    return Config(
        tile_m=128, tile_n=kernel.tile_n // kernel.operand_bytes, cluster=kernel.cluster,
        joined=kernel.op == "joined",
        one_shot=kernel.op == "one shot", **fields,
    )  # fmt: skip


def _problem(kernel: KernelClass, shape: tuple[int, int, int], devices: int, dtype: int) -> Problem:
    operand, out = DTYPES[kernel.operand_bytes][dtype], DTYPES[kernel.out_bytes][0]
    layout: Any = kernel.layout
    return Problem(OPERATIONS[kernel.op][0], *shape, operand, out, devices=devices, layout=layout)


def members(kernel: KernelClass) -> Iterator[Member]:
    """Yields random choices of a class without end. The sequence is the same in every process."""
    chance, name = random.Random(str(kernel)), OPERATIONS[kernel.op][0]
    shapes = SCATTER_SHAPES if name.startswith("matmul_") else SHAPES if name == "matmul" else PULL_SHAPES
    while True:
        config = _config(
            kernel, stages=chance.choice((2, 3, 4, 5, 6)), stream_k=chance.choice((2, 3, 4)) if kernel.cuts else 1,
            order_minor=chance.choice("mn"), order_width=chance.choice((8, 16, 4)),
            chunk_bytes=chance.choice((8192, 4096)), chunk_buffers=chance.choice((2, 4)),
        )  # fmt: skip
        problem = _problem(kernel, chance.choice(shapes), chance.choice(kernel.devices), chance.choice((0, 1)))
        if problem.accepts(config, B200) and work_of(config, problem, B200).cuts == kernel.cuts:
            yield Member(kernel, config, problem)


@functools.cache
def pairwise() -> list[KernelClass]:
    """Returns classes with every pair of values of any two fields that occurs in some class."""
    return fewest(_shuffled(), value_pairs)


@functools.cache
def core() -> list[KernelClass]:
    """Returns classes with every operation, each value of each field, and each feature of each operation."""
    return fewest(sorted(_shuffled(), key=lambda kernel: kernel.tile_n * (1 + kernel.epilogue)), values_and_features)


def _shuffled() -> list[KernelClass]:
    kernels = list(every())
    random.Random(3).shuffle(kernels)
    return kernels


def tensor_memory_columns(ptx: str) -> int:
    """Returns the number of columns of tensor memory that a kernel allocates."""
    (register,) = re.findall(r"tcgen05\.alloc\.cta_group::\d\.\S+ \[%r\d+\], (%r\d+);", ptx)
    (columns,) = re.findall(rf"mov\.b32\s+{re.escape(register)}, (\d+);", ptx)
    return int(columns)


def faults(member: Member, report: KernelReport, ptx: str) -> list[str]:
    """Returns descriptions of what is wrong with an assembled kernel; the list is empty if nothing is wrong."""
    smem = report.shared_memory_bytes
    groups = set(re.findall(r"tcgen05\.mma\.cta_group::(\d)", ptx))
    columns, announced = tensor_memory_columns(ptx), member.smem_bytes
    # The ring has one chunk buffer for what it passes on, whatever `chunk_buffers` says.
    as_announced = smem == announced or (member.kernel.op == "ring m" and smem is not None and smem < announced)
    checks = checks_of(report, TARGETS["b200"]) | {
        f"products by groups of {groups}": groups == {str(member.kernel.cluster)},
        f"{columns} columns of tensor memory":
            ACCUMULATORS * member.config.tile_n <= columns <= TENSOR_MEMORY_COLUMNS,
        f"{smem} bytes of shared memory, announced {announced}": as_announced,
    }  # fmt: skip
    return [fault for fault, good in checks.items() if not good]
