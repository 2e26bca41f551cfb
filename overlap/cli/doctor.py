"""`python -m overlap doctor`: checks what the library needs on this machine, and says how to mend what is wrong.

It has to work on a broken installation. So it imports neither jax nor a module that imports jax. Whatever could hang,
crash or fail (importing jax, starting a backend, loading the driver, NCCL or an MPI library) runs in another process
with a time limit. The table is plain text, so that rich is not needed.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping

import overlap
from overlap.cli import checks, gpu_checks
from overlap.cli.facts import NOTE, OK, PROBLEM, Fact, status_of
from overlap.cli.machine import Machine

Check = Callable[[list[Fact], Machine], Fact]

CHECKS: Mapping[str, Check] = {
    "Python": checks.python,
    "jax": checks.jax,
    "JAX_PLATFORMS": checks.platforms,
    "visible GPUs": gpu_checks.visible_devices,
    "GPUs": gpu_checks.devices,
    "peer access": gpu_checks.peer_access,
    "NCCL": gpu_checks.nccl,
    "allocator": gpu_checks.allocator,
    "MPI": checks.mpi,
    "process per GPU": gpu_checks.one_process_per_gpu,
    "proxies": checks.proxies,
    "CPU cores": checks.binding,
    "XLA flags": checks.flags,
    "wait limit": checks.wait_limit,
    "emulator": checks.emulator,
}
# On a terminal with fewer columns than `_NARROW`, the finding stands below its subject, not beside it.
_NARROW, _INDENT = 72, 27


def run(*, as_json: bool = False, machine: Machine | None = None) -> int:
    """Prints the table.

    Args:
      as_json: print one JSON object instead: "version", "facts" (each with the attributes of `Fact`), "can_run" (which
        of "gpus" and "emulated" work), "problems" (the subjects of the facts that are problems).
      machine: the machine to check; None: this machine.

    Returns:
      The exit status: 1 if a line says PROBLEM, else 0.
    """
    facts: list[Fact] = []
    for subject, check in CHECKS.items():
        try:
            facts.append(check(facts, machine := machine or Machine()))
        except Exception as error:  # A check that raises is reported as a fact, and the other checks go on.
            facts.append(Fact(subject, PROBLEM, f"the check itself failed: {error!r}", "this is a bug to report"))
        if not as_json:
            _print(facts[-1])
    on_gpus = status_of(facts, "GPUs") == status_of(facts, "peer access") == OK
    emulated = status_of(facts, "emulator") == OK
    problems = [fact.subject for fact in facts if fact.status == PROBLEM]
    if as_json:
        can_run = [name for name, works in (("gpus", on_gpus), ("emulated", emulated)) if works]
        listed = [*map(dataclasses.asdict, facts)]
        found = {"version": overlap.__version__, "facts": listed, "can_run": can_run, "problems": problems}
        # json.dumps writes ASCII, so the text is the same in any encoding.
        print(json.dumps(found, indent=2))
        return int(bool(problems))
    places = [name for name, works in (("on the GPUs", on_gpus), ("emulated on the CPU", emulated)) if works]
    wrong = f"Wrong here: {', '.join(problems)}. " if problems else ""
    said = f"{wrong}The fused all-gather matmul can run {' and '.join(places) or 'nowhere here'}."
    print("\n" + "\n".join(_wrapped(said, max(20, _columns()))))
    return int(bool(problems))


def _columns() -> int:
    return shutil.get_terminal_size((120, 24)).columns


def _print(fact: Fact) -> None:
    colors = {OK: "32", NOTE: "33", PROBLEM: "31"}
    status = f"{fact.status:<8}"
    if sys.stdout.isatty():
        status = f"\x1b[{colors[fact.status]}m{status}\x1b[0m"
    columns = _columns()
    indent = 2 if columns < _NARROW else _INDENT
    width = max(20, columns - indent - 1)
    lines = _wrapped(fact.found, width)
    lines += [("→ " if not index else "  ") + line for index, line in enumerate(_wrapped(fact.advice, width - 3))]
    if columns < _NARROW:
        print(f"{status} {fact.subject}")
    else:
        print(f"{status} {fact.subject:<17} {lines.pop(0) if lines else ''}")
    for line in lines:
        print(" " * indent + line)
    sys.stdout.flush()


def _wrapped(text: str, width: int) -> list[str]:
    # Commands are not broken at hyphens, so that users can copy them.
    return textwrap.wrap(text, width, break_on_hyphens=False)
