"""How many registers a warp-specialized kernel needs, asked of ptxas by giving it fewer.

A kernel states with `setmaxnreg` how many registers the threads of a role have from there on. ptxas allocates each role
within its number, if need be by spilling, and remarks (C7507) if it cannot. So the same PTX with smaller numbers shows
what is left over; "Used N registers" does not, as that is what the kernel is launched with, before `setmaxnreg`.
"""

from __future__ import annotations

import dataclasses
import re
import subprocess
import tempfile

from tests.assembly import cuda_root

STEP, LEAST = 8, 24  # What setmaxnreg takes.
_SETMAXNREG = re.compile(r"(setmaxnreg\.(inc|dec)\.sync\.aligned\.u32) (\d+);")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_IGNORED = "'setmaxnreg' ignored"


@dataclasses.dataclass(frozen=True)
class Registers:
    """Registers per thread of the two kinds of roles.

    Attributes:
        compute: of those that take registers (`setmaxnreg.inc`).
        transfer: of those that give them up (`setmaxnreg.dec`).
    """

    compute: int
    transfer: int


def stated(ptx: str) -> Registers:
    """The numbers in the code. RuntimeError if it is not of this form."""
    found = {kind: int(number) for _, kind, number in _SETMAXNREG.findall(ptx)}
    if set(found) != {"inc", "dec"}:
        raise RuntimeError(f"expected setmaxnreg.inc and setmaxnreg.dec in the PTX, found {sorted(found)}")
    return Registers(found["inc"], found["dec"])


def suffices(ptx: str, registers: Registers) -> bool:
    """Whether ptxas assembles the code without spills if the roles have these registers instead of those stated."""
    numbers = {"inc": registers.compute, "dec": registers.transfer}
    changed = _SETMAXNREG.sub(lambda match: f"{match[1]} {numbers[match[2]]};", ptx)
    root = cuda_root()
    assert root is not None
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(changed)
        file.flush()
        command = [root / "bin" / "ptxas", "-v", "-arch=sm_90a", file.name, "-o", "/dev/null"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    spills = _SPILLS.findall(done.stderr)
    if len(spills) != 1:
        raise RuntimeError(f"expected one kernel, got {len(spills)}:\n{done.stderr[:2000]}")
    return spills[0] == ("0", "0") and _IGNORED not in done.stderr


def needed(ptx: str) -> Registers | None:
    """The fewest with which the code assembles without spills; None if what it states does not suffice.

    ptxas now and then finds a way with fewer registers that it does not find with more. So this walks down from what is
    stated, and not below the first failure that it comes across.
    """
    limits = stated(ptx)
    if not suffices(ptx, limits):
        return None
    transfer = next(
        n for n in range(LEAST, limits.transfer + STEP, STEP) if suffices(ptx, Registers(limits.compute, n))
    )
    compute = limits.compute
    for step in (4 * STEP, STEP):
        while compute - step >= transfer and suffices(ptx, Registers(compute - step, transfer)):
            compute -= step
    return Registers(compute, transfer)


def leaves(ptx: str, reserve: Registers) -> bool:
    """Whether the code assembles without spills with so many registers less than it states, or with still fewer."""
    limits = stated(ptx)
    most = Registers(limits.compute - reserve.compute, limits.transfer - reserve.transfer)
    if suffices(ptx, most):
        return True
    least = needed(ptx)
    return least is not None and least.compute <= most.compute and least.transfer <= most.transfer
