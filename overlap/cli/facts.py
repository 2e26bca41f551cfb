"""The facts that `python -m overlap doctor` prints, and `ask`, which runs code that could hang or crash."""

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
      subject: what was checked.
      status: "OK", "note" (fine, but worth knowing) or "PROBLEM".
      found: the finding.
      advice: what the user should do, or "".
    """

    subject: str
    status: str
    found: str
    advice: str = ""


def status_of(facts: Sequence[Fact], subject: str) -> str | None:
    """The status of the fact about `subject`; None if it has not been checked yet."""
    return next((fact.status for fact in facts if fact.subject == subject), None)


def ask(code: str, timeout_s: int, **environment: str | None) -> tuple[bool, str]:
    """Runs Python code in another process, and returns what it printed.

    Args:
      code: the program.
      timeout_s: how long it may take, in seconds.
      **environment: environment variables to change for that process; None: a variable to unset.

    Returns:
      Whether the code succeeded; and its last line of output, or its error.
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
