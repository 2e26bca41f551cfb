"""Assembles every class of kernels that can be chosen, tests the assumptions behind the classes, and writes a report.

    python -m tests.assembly_sweep --out build/assembled_space.md

Takes about an hour on two cores; the tests assemble only the `cover` (`tests/test_assembled_space.py`). Three parts:

    classes    --draws members of every class, checked as the tests check them
    registers  for every tile and ending, the fewest registers with which the kernel assembles without spills
    members    for some classes, how registers change with each field, size and dtype that is not part of the class
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import datetime
import functools
import itertools
import pathlib
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax

from overlap.choice import space
from overlap.kernels.hopper import limits
from overlap.kernels.hopper.mainloop import REGISTERS
from tests import assembly, assembly_members, assembly_registers, assembly_space
from tests.assembly_members import BATCHES, DEVICES, Member, shapes_of
from tests.assembly_registers import Registers
from tests.assembly_space import DTYPES, TARGET, KernelClass, classify, values_of

_of_thread = threading.local()
# Tiles whose classes are compared member by member.
SAMPLED: list[tuple[Any, ...]] = [
    (128, 256, 2, "cooperative", False),
    (256, 128, 2, "cooperative", False),
    (64, 256, 4, "cooperative", False),
    (128, 128, 2, "pingpong", False),
    (limits.MOST_ACCUMULATED, 256, 2, "cooperative", True),
    (limits.MOST_ACCUMULATED, 128, 2, "pingpong", True),
    (104, 256, 2, "cooperative", True),
]


@dataclasses.dataclass(frozen=True)
class Result:
    """The result for one member: its faults and, if measured, the registers that compute and transfer threads need."""

    member: Member
    faults: Sequence[str]
    registers: Registers | None = None


def examine(member: Member, *, registers: bool) -> Result:
    """Assembles a member in the child process of this thread."""
    if not hasattr(_of_thread, "assembler"):
        _of_thread.assembler = assembly.Assembler()
    with tempfile.NamedTemporaryFile(suffix=".ptx") as file:
        try:
            (report,) = _of_thread.assembler.assemble(member.case, ptx=file.name)
        except RuntimeError as error:
            return Result(member, [str(error).splitlines()[-1]])
        ptx = pathlib.Path(file.name).read_text()
    needed = assembly_registers.needed(ptx) if registers else None
    return Result(member, assembly_members.faults(member, report, ptx), needed)


def relatives(member: Member) -> Iterator[tuple[str, Member]]:
    """Yields (what differs, member) for members of the same class that differ in one field, in sizes or in dtypes."""
    config, problem, kernel = member.config, member.problem, member.kernel
    pulls = problem.communicates
    fields = {**values_of(kernel), "stream_k": [n for n in space.SHAPE["stream_k"] if n > 1] if kernel.cuts else []}
    others = [
        (name, dataclasses.replace(member, config=config.replace(**{name: value})))
        for name, values in fields.items()
        for value in values
        if pulls or name not in space.CHUNKS
    ]
    for (m, n, k), count in itertools.product(shapes_of(kernel), DEVICES if pulls else set(BATCHES)):
        sizes = dict(m=m, n=n, k=k, **{"devices" if pulls else "batch": count})
        others.append(("sizes", dataclasses.replace(member, problem=dataclasses.replace(problem, **sizes))))
    # With swapped operands a class also contains tiles with fewer rows.
    fewer = range(8, config.tile_m, 8) if kernel.swapped else ()
    others += [("rows", dataclasses.replace(member, config=config.replace(tile_m=rows))) for rows in fewer]
    for dtype, out in itertools.product(DTYPES[kernel.operand_bytes], DTYPES[kernel.out_bytes]):
        kind = dataclasses.replace(problem, dtype=dtype, out_dtype=out)
        others.append(("dtypes", dataclasses.replace(member, problem=kind, rhs_dtype=dtype)))
    for name, other in others:
        accepted = other.problem.accepts(other.config, TARGET)
        if accepted and classify(other.config, other.problem, epilogue=kernel.epilogue) == kernel:
            yield name, other


def _samples(kernels: Sequence[KernelClass]) -> list[KernelClass]:
    """Returns the classes whose members are compared: a few tiles with all endings."""
    endings = {(kernel.tile, kernel.ending, kernel.pulls): kernel for kernel in kernels if kernel.tile in SAMPLED}
    return list(endings.values())


def _table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(map(str, line)) + " |" for line in lines] + [""]


def _registers_table(results: Sequence[Result]) -> list[str]:
    endings = sorted({(result.member.kernel.pulls, result.member.kernel.ending) for result in results})
    found: dict[Any, list[Registers | None]] = {}
    for result in results:
        kernel = result.member.kernel
        found.setdefault((kernel.tile, kernel.pulls, kernel.ending), []).append(result.registers)
    rows = []
    for tile in sorted({result.member.kernel.tile for result in results}):
        tile_m, tile_n, width, out_bytes, schedule, swapped = tile
        cells = [_span(found.get((tile, *ending), [])) for ending in endings]
        rows.append(
            [
                f"{tile_m}×{tile_n}" + " swapped" * swapped + (" in turn" if schedule == "pingpong" else ""),
                width,
                f"{8 * out_bytes} bit",
                *cells,
            ]
        )
    return _table(["tile", "store", "result", *(_words(pulls, *ending) for pulls, ending in endings)], rows)


def _words(pulls: bool, cluster: int, cuts: bool, epilogue: bool, along_k: bool) -> str:
    words = ["gather" if pulls else "plain", *["cuts"] * cuts, *["epilogue"] * epilogue]
    return " ".join([*words, *([f"{cluster} along k"] if along_k else ["cluster"] * (cluster > 1))])


def _span(needs: Sequence[Registers | None]) -> str:
    """Returns the fewest and the most registers of compute threads as text, or "–" if no kernel matches."""
    if None in needs:
        return "**spills**"
    numbers = sorted({need.compute for need in needs if need is not None})
    return "–".join(map(str, (numbers[0], numbers[-1])[: len(numbers)])) if numbers else "–"


def _members_table(related: Sequence[tuple[str, Result]]) -> list[str]:
    names = list(dict.fromkeys(name for name, _ in related))
    found: dict[Any, list[Registers | None]] = {}
    for name, result in related:
        found.setdefault((result.member.kernel, name), []).append(result.registers)
    kernels = dict.fromkeys(result.member.kernel for _, result in related)
    return _table(["class", *names], [[k, *(_span(found.get((k, name), [])) for name in names)] for k in kernels])


def _each(members: Sequence[Member], workers: int, what: str, *, registers: bool) -> list[Result]:
    results = []
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        for result in pool.map(functools.partial(examine, registers=registers), members):
            results.append(result)
            if result.faults or len(results) % 50 == 0:
                done = f"{what} {len(results)} of {len(members)}"
                print(f"{done}: {result.member.kernel} {list(result.faults)}", file=sys.stderr, flush=True)
    return results


def sweep(draws: int, workers: int, every: int) -> str:
    """Runs all three parts and returns the report."""
    kernels, cover = assembly_space.every()[::every], assembly_space.cover()[::every]
    firsts = [next(assembly_members.members(kernel)) for kernel in cover]
    draw = [member for kernel in kernels for member in itertools.islice(assembly_members.members(kernel), draws)]
    relations = [pair for kernel in _samples(cover) for pair in relatives(next(assembly_members.members(kernel)))]
    started = datetime.datetime.now(datetime.UTC)
    drawn = _each(draw, workers, "classes", registers=False)
    needs = _each(firsts, workers, "registers", registers=True)
    moved = _each([member for _, member in relations], workers, "members", registers=True)
    related = [(name, result) for (name, _), result in zip(relations, moved, strict=True)]
    minutes = (datetime.datetime.now(datetime.UTC) - started).total_seconds() / 60
    root = assembly.cuda_root()
    assert root is not None
    ptxas = subprocess.run([root / "bin" / "ptxas", "--version"], capture_output=True, text=True, check=True).stdout
    bad = {
        f"- {r.member.kernel}: {'; '.join(r.faults)}\n  {r.member.case}" for r in (*drawn, *needs, *moved) if r.faults
    }
    transfer = max((r.registers.transfer for r in (*needs, *moved) if r.registers), default=0)
    reserve = assembly_members.RESERVE
    lines = [
        "# The space that can be chosen, assembled for sm_90a",
        "",
        f"{started:%Y-%m-%d}, jax {jax.__version__}, {ptxas.splitlines()[-1]}; {minutes:.0f} minutes.",
        f"Made by `python -m tests.assembly_sweep --draws {draws}`" + f", every {every}th class only." * (every > 1),
        "",
        f"**{len(drawn)} kernels, {draws} of each of {len(kernels)} classes: {sum(bool(r.faults) for r in drawn)} with "
        "faults.** A fault is a spill, local memory, a remark of ptxas (serialized wgmma, ignored setmaxnreg), other "
        f"shared memory than announced, or less than {reserve.compute} registers per thread left over.",
        "",
        f"The fewest registers with which a compute thread does not spill, of {REGISTERS[0]}: the least and the "
        f"most of the classes. A transfer thread has {REGISTERS[1]} and needs {transfer} at most.",
        "",
        *_registers_table(needs),
        f"The same for {len(moved)} kernels of {len(_samples(cover))} classes, which differ from the first of their "
        "class in one thing at a time. What moves them within a class must be no more than the reserve.",
        "",
        *_members_table(related),
        *sorted(bad),
    ]  # fmt: skip
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    """The command line: runs the sweep and writes the report."""
    parser = argparse.ArgumentParser(prog="python -m tests.assembly_sweep", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, help="the report; standard output by default")
    parser.add_argument("--draws", type=int, default=2, help="members of each class")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    parser.add_argument("--every", type=int, default=1, help="only every so-manieth class, for a trial")
    arguments = parser.parse_args()
    text = sweep(arguments.draws, arguments.workers, arguments.every)
    if arguments.out is None:
        print(text)
        return
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(text)


if __name__ == "__main__":
    main()
