"""A child process that assembles case after case, because importing jax and starting XLA take longer than one kernel.

The client (`Worker`) and the child exchange lines of JSON over two pipes. The child's file descriptor 1 is not one of
these pipes: Mosaic prints its figures there, and `tests.assembly.assembly.assemble` captures them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import os
import pathlib
import select
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from typing import Any

_REPOSITORY = pathlib.Path(__file__).resolve().parents[2]


class Worker:
    """Starts the child process and talks to it. The child ends when its input closes, so also when the client dies."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the child)
        self._child = subprocess.Popen(
            [sys.executable, "-m", "tests.assembly.worker"],
            cwd=_REPOSITORY, env=dict(environment), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
        )  # fmt: skip

    def ask(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Returns the answer to a request. RuntimeError if the child ends or times out; the worker is then unusable."""
        assert self._child.stdin is not None and self._child.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.write(json.dumps(request).encode() + b"\n")
            self._child.stdin.flush()
        received, deadline = b"", time.monotonic() + timeout_s
        while not received.endswith(b"\n"):
            ready, _, _ = select.select([self._child.stdout], [], [], max(deadline - time.monotonic(), 0))
            chunk = os.read(self._child.stdout.fileno(), 2**16) if ready else b""
            if not chunk:
                what = "ended" if ready else f"gave no answer for {timeout_s:.0f} s"
                self.close()
                raise RuntimeError(f"the process that assembles {what}:\n{self._said()}")
            received += chunk
        return json.loads(received)

    def _said(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-4000:]

    def close(self) -> None:
        """Ends the child. Calling this twice is harmless."""
        self._child.kill()
        self._child.wait()


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    from tests.assembly import assembly

    try:
        fn, args = assembly.build(assembly.Case.from_json(request["case"]))
        reports = assembly.assemble(fn, *args, **request["files"])
    except Exception:  # Any exception is reported: its text is the answer.
        return {"error": traceback.format_exc()}
    return {"reports": [dataclasses.asdict(report) for report in reports]}


def main() -> None:
    """The child's loop: reads a request, writes an answer, until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # At Python's default thresholds the garbage collector takes a tenth of the time.
    gc.set_threshold(200_000, 20, 100)
    for line in sys.stdin:
        print(json.dumps(_answer(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
