"""The choices that belong to a class of kernels, ready to be assembled, and what may be wrong with their kernels."""

from __future__ import annotations

import dataclasses
import math
import random
import re
from collections.abc import Iterator

from overlap.choice import space
from overlap.choice.problem import Problem
from overlap.kernels.config import SWIZZLE_BYTES, Config
from overlap.kernels.hopper.limits import COMPUTE_WARPGROUPS, smem_bytes, warpgroup_tile
from overlap.kernels.limits import (
    BARRIER_BYTES,
    EPILOGUE_COLUMNS,
    F32_BYTES,
    cluster_sums_bytes,
    rows_loaded,
    stages_bytes,
)
from overlap.primitives.integers import ceil_div
from tests.assembly import registers, targets
from tests.assembly.assembly import Case
from tests.assembly.programs import of_operation
from tests.assembly.registers import Registers
from tests.assembly.report import KernelReport
from tests.assembly.space import (
    DTYPES,
    GATHER_LHS,
    GATHER_RHS,
    LARGE,
    SMALL,
    SUMS,
    TARGET,
    KernelClass,
    classify,
    config_of,
    problems_op,
    values_of,
)

# Registers that a kernel must leave unused, because other members of its class may need a setmaxnreg step or two more.
RESERVE = Registers(compute=16, transfer=8)
# The index arithmetic of some gathers uses all registers of the transfer threads: about one in thirty with swapped
# operands (of 340), one of twelve with "pingpong", one of six with gathered weights and cut tiles. None of them spills.
RESERVE_OF_GATHERS = Registers(compute=16, transfer=0)
# The largest tiles of two transposed operands with the whole epilogue: of some members fewer than 16 are left.
RESERVE_OF_TRANSPOSED = Registers(compute=8, transfer=8)
# With jax 0.12, the largest tiles with a full epilogue spill at most these bytes (`KernelReport.ignores_setmaxnreg`).
SPILLS_OF_JAX_0_12 = 640
# The shapes have whole and ragged tiles, few and many tiles, one and several k steps. Plain products have a batch too.
SHAPES = (
    LARGE,
    (1024, 1024, 14336),
    (2064, 1552, 4112),
    (512, 8192, 8192),
    (272, 528, 2064),
    (16, 8192, 64),
    (48, 4096, 4096),
)
# Products of no more tiles than there are clusters, of few and of many k steps, even and uneven. A CTA of some of them
# has 8 k steps, and the compiler unrolls the loop over these.
SHAPES_ALONG_K = (
    SMALL,
    (128, 768, 1024),
    (272, 528, 2064),
    (48, 1792, 4096),
    (200, 384, 14336),
    (16, 3584, 8208),
    (384, 512, 4096),
)
# These rows split into whole chunks, so that chunk buffers are as large as `limits.smem_bytes` says.
PULL_SHAPES = ((1024, 4096, 4096), (1000, 2048, 8192), (512, 8192, 4096), (264, 1024, 4096), (40, 2048, 4096))
# All numbers of devices divide these sizes, and blocks are no smaller than tiles: so boxes have their full size.
SCATTER_SHAPES = ((6144, 3072, 4096), (2112, 2112, 1032), (8448, 1536, 64), (2304, 3264, 2064))
BATCHES, DEVICES = (1, 1, 3), (2, 3, 4, 8)


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
        """Returns the case for `assembly.py`. It states all fields, so that no tuning table is read for defaults."""
        problem, config = self.problem, dict(vars(self.config))
        config |= {"layout": problem.layout, "out": problem.out_dtype, "rhs_dtype": self.rhs_dtype}
        config |= {"batch": [problem.batch]} if problem.batch > 1 else {}
        config |= {"epilogue": "all"} if self.kernel.epilogue else {}
        config |= {"op": problem.op} if problem.communicates else {}
        config |= {"return_gathered": self.keeps} if problem.op == GATHER_LHS else {}
        shape = problem.m, problem.n, problem.k
        return Case(of_operation(problem.op), problem.devices, shape, problem.dtype, config=config)

    @property
    def smem_bytes(self) -> int:
        """Returns the expected shared memory: `limits.smem_bytes` plus the barriers for `addend`."""
        out_dtype = "float32" if self.config.split_k > 1 else self.problem.out_dtype
        announced = smem_bytes(self.config, out_dtype, self.problem.transport(self.config))
        if self.kernel.swapped:
            # A transposed tile stores only rows that exist; `limits.smem_bytes` counts all rows of the tile.
            announced -= self.kernel.out_bytes * self._rows_not_stored * COMPUTE_WARPGROUPS * EPILOGUE_COLUMNS
        if self.kernel.along_k:
            announced -= self._bytes_of_sums_not_stored
        if not self.kernel.epilogue or (self.kernel.pulls and not self.problem.scattered):
            return announced
        boxes = EPILOGUE_COLUMNS * self.kernel.out_bytes // SWIZZLE_BYTES
        return announced + COMPUTE_WARPGROUPS * boxes * BARRIER_BYTES

    @property
    def _rows_not_stored(self) -> int:
        joined = self.config.joined and self.kernel.op == GATHER_LHS
        shards = self.problem.devices * self.problem.batch if joined else 1
        return self.config.tile_m - rows_loaded(self.config, self.problem.m * shards, self.problem.dtype)

    @property
    def _bytes_of_sums_not_stored(self) -> int:
        """Returns by how much less a cluster along k needs because its sums are smaller than those of the whole tile.

        Sums matter only where they exceed the stages, whose memory they share.
        """
        sums, stages = cluster_sums_bytes(self.config), stages_bytes(self.config)
        if self.kernel.swapped:
            return max(sums, stages) - max(sums - F32_BYTES * self._rows_not_stored * self.config.tile_n, stages)
        wg_m, wg_n = warpgroup_tile(self.config)
        loaded = rows_loaded(self.config, self.problem.m, self.problem.dtype, self.problem.transpose_lhs)
        idle = 0 if wg_m == self.config.tile_m else COMPUTE_WARPGROUPS - ceil_div(loaded, wg_m)
        not_stored = idle * F32_BYTES * wg_m * wg_n
        return max(sums, stages) - max(sums - not_stored, stages) + idle * 2 * BARRIER_BYTES


def shapes_of(kernel: KernelClass) -> tuple[tuple[int, int, int], ...]:
    """Returns the sizes m, n and k (per device) of the problems that the members of a class are for."""
    if kernel.pulls:
        return SCATTER_SHAPES if kernel.op in SUMS else PULL_SHAPES
    return SHAPES_ALONG_K if kernel.along_k else SHAPES


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
    fields = {name: chance.choice(values) for name, values in values_of(kernel).items()}
    fields["stream_k"] = chance.choice([parts for parts in space.SHAPE["stream_k"] if (parts > 1) == kernel.cuts])
    dtype, out_dtype = (chance.choice(DTYPES[size]) for size in (kernel.operand_bytes, kernel.out_bytes))
    m, n, k = chance.choice(shapes_of(kernel))
    if not (kernel.pulls or kernel.cuts or kernel.epilogue or kernel.along_k) and kernel.out_bytes == 4:
        fields["split_k"] = chance.choice(space.SHAPE["split_k"])
        out_dtype = chance.choice(DTYPES[2] + DTYPES[4]) if fields["split_k"] > 1 else out_dtype
    batches = (1,) if kernel.op in GATHER_RHS else BATCHES
    problem = Problem(
        problems_op(kernel), m, n, k, dtype, out_dtype, devices=chance.choice(DEVICES) if kernel.pulls else 1,
        layout=kernel.layout, batch=chance.choice(batches),
    )  # fmt: skip
    return config_of(kernel, fields), problem


def _converges_at_the_end(ptx: str) -> bool:
    """Returns whether `bar.warp.sync` directly precedes the last barrier of a warpgroup."""
    before = [line.strip() for line in ptx[: ptx.rindex("bar.sync")].splitlines()]
    return [line for line in before if line and not line.startswith(("//", ".loc"))][-1] == "bar.warp.sync 0xffffffff;"


def checks_of(report: KernelReport, target: targets.Target) -> dict[str, bool]:
    """Returns what must hold for every kernel of the library: a description of the fault, and whether all is well."""
    smem, most = report.shared_memory_bytes, target.shared_memory_per_block_optin
    spills = SPILLS_OF_JAX_0_12 if report.ignores_setmaxnreg else 0
    return {
        f"assembled for {report.architecture}": report.architecture == target.architecture,
        f"{report.spills} bytes of spills": report.spills <= spills,
        f"{report.stack_frame_bytes} bytes of local memory": report.stack_frame_bytes <= report.spills,
        # Any remark of ptxas costs time: serialized wgmma, for example, or an ignored setmaxnreg.
        f"remarks: {report.remarks}": not report.remarks,
        f"{report.registers} registers of {report.threads}": report.registers * math.prod(report.threads) <= 65536,
        f"{smem} + {report.static_shared_memory_bytes} bytes of shared memory of {most}":
            smem is not None and smem + report.static_shared_memory_bytes <= most,
        # All CTAs must be resident. A CTA that waits for an SM would block the CTAs that wait for its flags.
        f"a grid of {report.grid}": math.prod(report.grid) <= target.core_count,
    }  # fmt: skip


def faults(member: Member, report: KernelReport, ptx: str) -> list[str]:
    """Returns descriptions of what is wrong with an assembled kernel; the list is empty if nothing is wrong."""
    limits, kernel, smem = registers.stated(ptx), member.kernel, report.shared_memory_bytes
    taken, launched = (
        128 * (COMPUTE_WARPGROUPS * limits.compute + limits.transfer),
        report.registers * math.prod(report.threads),
    )
    crowded = kernel.swapped or kernel.schedule == "pingpong" or (kernel.op in GATHER_RHS and kernel.cuts)
    reserve = RESERVE_OF_GATHERS if kernel.pulls and crowded else RESERVE
    if kernel.layout == "tt" and kernel.epilogue and kernel.tile_m * kernel.tile_n >= 128 * 256:
        reserve = RESERVE_OF_TRANSPOSED
    # A division by a variable is a function call. With such a call jax 0.12 has ptxas serialize wgmma.
    divisions = sorted(set(re.findall(r"\b(?:div|rem)\.[su]\d+", ptx)))
    checks = checks_of(report, targets.TARGETS["h200"]) | {
        f"divides: {divisions}": not divisions,
        # See `overlap.primitives.converge_warp`.
        "warps meet the others before all of their lanes are there": _converges_at_the_end(ptx),
        # The roles together must take at most the registers of the launch, or setmaxnreg waits forever.
        f"{taken} registers taken of {launched}": report.ignores_setmaxnreg or taken <= launched,
        f"{smem} bytes of shared memory, announced {member.smem_bytes}": smem == member.smem_bytes,
        # Where setmaxnreg is ignored, no role is limited by its number; then spills tell what is missing.
        f"fewer than {reserve} of {limits} are left": report.ignores_setmaxnreg or registers.leaves(ptx, reserve),
    }
    return [fault for fault, good in checks.items() if not good]
