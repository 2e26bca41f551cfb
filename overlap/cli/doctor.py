"""`python -m overlap doctor`: checks what the library needs on this machine, and says how to repair what is wrong.

It has to work on a broken installation. So it imports neither jax nor a module that imports jax, and its table is plain
text, so that rich is not needed.
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
from overlap.cli.facts import NOTE, OK, PROBLEM, Fact, Machine, status_of

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
_COLORS = {OK: "32", NOTE: "33", PROBLEM: "31"}


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
    machine = machine or Machine()
    for subject, check in CHECKS.items():
        try:
            facts.append(check(facts, machine))
        except Exception as error:  # A check that raises is reported as a fact, and the other checks go on.
            facts.append(Fact(subject, PROBLEM, f"the check itself failed: {error!r}", "this is a bug to report"))
        if not as_json:
            _print(facts[-1])
    works = {
        "gpus": status_of(facts, "GPUs") == status_of(facts, "peer access") == OK,
        "emulated": status_of(facts, "emulator") == OK,
    }
    can_run = [name for name, does in works.items() if does]
    problems = [fact.subject for fact in facts if fact.status == PROBLEM]
    if as_json:
        listed = [dataclasses.asdict(fact) for fact in facts]
        found = {"version": overlap.__version__, "facts": listed, "can_run": can_run, "problems": problems}
        print(json.dumps(found, indent=2))
        return int(bool(problems))
    words = {"gpus": "on the GPUs", "emulated": "emulated on the CPU"}
    places = " and ".join(words[name] for name in can_run) or "nowhere here"
    wrong = f"Wrong here: {', '.join(problems)}. " if problems else ""
    print("\n" + _wrapped(f"{wrong}The fused all-gather matmul can run {places}.", "", ""))
    return int(bool(problems))


def _print(fact: Fact) -> None:
    indent = " " * (27 if _columns() >= 72 else 4)
    text = _wrapped(f"{fact.status:<8} {fact.subject:<17} {fact.found}", "", indent)
    if sys.stdout.isatty():
        text = f"\x1b[{_COLORS[fact.status]}m{fact.status}\x1b[0m{text[len(fact.status) :]}"
    print(text, flush=True)
    if fact.advice:
        print(_wrapped(f"→ {fact.advice}", indent, indent + "  "), flush=True)


def _wrapped(text: str, first: str, others: str) -> str:
    # Commands are not broken at hyphens, so that users can copy them.
    return textwrap.fill(
        text, max(_columns() - 1, 40), initial_indent=first, subsequent_indent=others, break_on_hyphens=False
    )


def _columns() -> int:
    return shutil.get_terminal_size((120, 24)).columns
