"""What `python -m overlap doctor` notes, and how it asks what could hang or crash: in a process of its own."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence

OK, NOTE, PROBLEM = "OK", "note", "PROBLEM"


@dataclasses.dataclass(frozen=True)
class Fact:
    """One line of the table.

    Attributes:
      subject: what was looked at.
      status: "OK", "note" (fine, but worth knowing) or "PROBLEM".
      found: what is here.
      advice: what to do, or "".
    """

    subject: str
    status: str
    found: str
    advice: str = ""


def status_of(facts: Sequence[Fact], subject: str) -> str | None:
    """What was noted of a subject so far, or None."""
    return next((fact.status for fact in facts if fact.subject == subject), None)


def ask(code: str, timeout_s: int, **environment: str | None) -> tuple[bool, str]:
    """Runs Python code in a process of its own: whether it succeeded, and its last line of output or its error.

    Args:
      code: the program.
      timeout_s: how long it may take, in seconds.
      **environment: variables that are different there; None: unset.
    """
    given = {**os.environ, **environment}
    given = {name: value for name, value in given.items() if value is not None}
    try:
        process = subprocess.run(
            [sys.executable, "-c", code],
            env=given,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False, f"no answer within {timeout_s} s"
    if process.returncode == 0:
        return True, (process.stdout.strip().splitlines() or [""])[-1]
    if process.returncode < 0:
        number = -process.returncode
        return False, f"the process was ended by signal {number} ({signal.strsignal(number) or 'unknown'})"
    lines = (process.stderr or process.stdout).strip().splitlines()
    errors = [line for line in lines if re.match(r"\w[\w.]*(Error|Exception|Interrupt|Exit)\b", line)]
    return False, (errors or lines or [f"exit status {process.returncode}"])[-1]
