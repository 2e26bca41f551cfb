"""Assembles every class of kernels that can be chosen, tests the assumptions behind the classes, and writes a report.

    python -m tests.assembly.sweep --out build/assembled_space.txt

Takes about an hour on two cores; the tests assemble only the `cover` (`test_assembled.py`). Three parts:

    classes    --draws members of every class, checked as the tests check them
    registers  for every tile and ending, the fewest registers with which the kernel assembles without spills
    members    for some classes, how registers change with each field, size and dtype that is not part of the class
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import itertools
import pathlib
import tempfile
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from overlap.choice import space as choices
from overlap.kernels.hopper import limits
from tests.assembly import assembly, members, registers, space
from tests.assembly.members import BATCHES, DEVICES, Member, shapes_of
from tests.assembly.registers import Registers
from tests.assembly.space import DTYPES, TARGET, KernelClass, classify, values_of

_of_thread, _WORKERS = threading.local(), 2
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


def examine(member: Member, *, measure: bool) -> Result:
    """Assembles a member in the child process of this thread."""
    if not hasattr(_of_thread, "assembler"):
        _of_thread.assembler = assembly.Assembler()
    with tempfile.NamedTemporaryFile("r", suffix=".ptx") as file:
        try:
            (report,) = _of_thread.assembler.assemble(member.case, ptx=file.name)
        except RuntimeError as error:
            return Result(member, [str(error).splitlines()[-1]])
        ptx = file.read()
    return Result(member, members.faults(member, report, ptx), registers.needed(ptx) if measure else None)


def relatives(member: Member) -> Iterator[tuple[str, Member]]:
    """Yields (what differs, member) for members of the same class that differ in one field, in sizes or in dtypes."""
    config, problem, kernel = member.config, member.problem, member.kernel
    pulls = problem.communicates
    fields = {**values_of(kernel), "stream_k": [n for n in choices.SHAPE["stream_k"] if n > 1] if kernel.cuts else []}
    # With swapped operands a class also contains tiles with fewer rows.
    fields["tile_m"] = range(8, config.tile_m, 8) if kernel.swapped else ()
    others = [
        (name, dataclasses.replace(member, config=config.replace(**{name: value})))
        for name, values in fields.items()
        for value in values
        if pulls or name not in choices.CHUNKS
    ]
    for (m, n, k), count in itertools.product(shapes_of(kernel), DEVICES if pulls else set(BATCHES)):
        sizes = dict(m=m, n=n, k=k, **{"devices" if pulls else "batch": count})
        others.append(("sizes", dataclasses.replace(member, problem=dataclasses.replace(problem, **sizes))))
    for dtype, out in itertools.product(DTYPES[kernel.operand_bytes], DTYPES[kernel.out_bytes]):
        kind = dataclasses.replace(problem, dtype=dtype, out_dtype=out)
        others.append(("dtypes", dataclasses.replace(member, problem=kind, rhs_dtype=dtype)))
    for name, other in others:
        accepted = other.problem.accepts(other.config, TARGET)
        if accepted and classify(other.config, other.problem, epilogue=kernel.epilogue) == kernel:
            yield name, other


def samples(kernels: Sequence[KernelClass]) -> list[KernelClass]:
    """Returns the classes whose members are compared: a few tiles with all endings."""
    endings = {(kernel.tile, kernel.ending, kernel.pulls): kernel for kernel in kernels if kernel.tile in SAMPLED}
    return list(endings.values())


def table(title: str, keyed: Sequence[tuple[Any, Result]]) -> Iterator[str]:
    """Yields, for each key, the fewest and the most registers that compute and transfer threads need."""
    yield f"\n{title}"
    found: dict[Any, list[Registers | None]] = {}
    for key, result in keyed:
        found.setdefault(key, []).append(result.registers)
    for key, needs in sorted(found.items(), key=lambda item: str(item[0])):
        known = [need for need in needs if need is not None]
        span = [f"{min(each)} to {max(each)}" for each in zip(*map(dataclasses.astuple, known))]
        yield f"{key}: " + ("spills" if len(known) < len(needs) else f"compute {span[0]}, transfer {span[1]}")


def sweep(draws: int, every: int) -> Iterator[str]:
    """Runs all three parts and yields the lines of the report."""
    kernels, cover = space.every()[::every], space.cover()[::every]
    draw = [member for kernel in kernels for member in itertools.islice(members.members(kernel), draws)]
    relations = [pair for kernel in samples(cover) for pair in relatives(next(members.members(kernel)))]
    with concurrent.futures.ThreadPoolExecutor(_WORKERS) as pool:
        drawn = list(pool.map(functools.partial(examine, measure=False), draw))
        measure = functools.partial(examine, measure=True)
        needs = list(pool.map(measure, [next(members.members(kernel)) for kernel in cover]))
        moved = list(pool.map(measure, [member for _, member in relations]))
    yield f"{len(drawn)} kernels of {len(kernels)} classes: {sum(bool(r.faults) for r in drawn)} with faults"
    yield from sorted({f"{r.member.kernel}: {r.faults} {r.member.case}" for r in (*drawn, *needs, *moved) if r.faults})
    of_tiles = [((r.member.kernel.tile, r.member.kernel.pulls, r.member.kernel.ending), r) for r in needs]
    yield from table("registers of each tile (rows, columns, bytes, schedule, swapped), gather, ending", of_tiles)
    of_members = [((str(r.member.kernel), name), r) for (name, _), r in zip(relations, moved, strict=True)]
    yield from table("the same within a class, by what differs from its first member", of_members)


def main() -> None:
    """The command line: runs the sweep and writes the report."""
    parser = argparse.ArgumentParser(prog="python -m tests.assembly.sweep", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True, help="the report")
    parser.add_argument("--draws", type=int, default=2, help="members of each class")
    parser.add_argument("--every", type=int, default=1, help="only every so-manieth class, for a trial")
    arguments = parser.parse_args()
    text = "\n".join(sweep(arguments.draws, arguments.every)) + "\n"
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(text)


if __name__ == "__main__":
    main()
