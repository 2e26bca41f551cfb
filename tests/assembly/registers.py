"""Measures how many registers a warp-specialized kernel needs, by giving ptxas fewer.

With `setmaxnreg` a kernel states how many registers the threads of a role have from that point on. ptxas allocates each
role within that number, spills if necessary, and prints a remark (C7507) if it cannot. Assembling the same PTX with
smaller numbers therefore shows how many registers are unused. ptxas's "Used N registers" does not show this: it is the
number at launch, before `setmaxnreg`.
"""

from __future__ import annotations

import dataclasses
import re
import subprocess
import tempfile

from tests.assembly.assembly import cuda_root

STEP, LEAST = 8, 24  # The values that setmaxnreg accepts.
_SETMAXNREG = re.compile(r"(setmaxnreg\.(inc|dec)\.sync\.aligned\.u32) (\d+);")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_IGNORED = "'setmaxnreg' ignored"


@dataclasses.dataclass(frozen=True)
class Registers:
    """Registers per thread for the two kinds of roles.

    Attributes:
        compute: for roles that take registers (`setmaxnreg.inc`).
        transfer: for roles that give registers up (`setmaxnreg.dec`).
    """

    compute: int
    transfer: int


def stated(ptx: str) -> Registers:
    """Returns the numbers that the PTX states. RuntimeError if the PTX does not state exactly these two."""
    found = {kind: int(number) for _, kind, number in _SETMAXNREG.findall(ptx)}
    if set(found) != {"inc", "dec"}:
        raise RuntimeError(f"expected setmaxnreg.inc and setmaxnreg.dec in the PTX, found {sorted(found)}")
    return Registers(found["inc"], found["dec"])


def suffices(ptx: str, registers: Registers) -> bool:
    """Returns whether ptxas assembles the PTX without spills when `registers` replaces the stated numbers."""
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
    """Returns the fewest registers with which the PTX assembles without spills, or None if the stated ones spill.

    ptxas sometimes succeeds with fewer registers where it fails with more. So the search walks down from the stated
    numbers and stops at the first failure.
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
    """Returns whether a kernel leaves at least `reserve` registers unused.

    The PTX must assemble without spills with `reserve` registers fewer than it states. If ptxas fails with exactly that
    number, a smaller number that succeeds counts too, because ptxas sometimes succeeds with fewer registers.
    """
    limits = stated(ptx)
    most = Registers(limits.compute - reserve.compute, limits.transfer - reserve.transfer)
    if suffices(ptx, most):
        return True
    least = needed(ptx)
    return least is not None and least.compute <= most.compute and least.transfer <= most.transfer
