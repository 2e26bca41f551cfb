"""The file with the losses of a run, one line of JSON for each step. It stays valid however the run ends."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import pathlib
from collections.abc import Iterator

from gpt.devices import Refused


@dataclasses.dataclass(frozen=True)
class Step:
    """The record of a step. `seconds` is None if the time includes a compilation or a checkpoint."""

    step: int
    loss: float
    gradient_norm: float
    seconds: float | None


@contextlib.contextmanager
def locked(folder: pathlib.Path) -> Iterator[None]:
    """Makes the folder, and locks it against other runs.

    Raises:
      Refused: another run uses it, or nothing can be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except OSError as error:
        raise Refused(f"cannot write to {folder}: {error.strerror or error}: name another folder by --out") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Refused(f"another run is writing to {folder}: wait for its end, or name another --out") from None
        except OSError:
            pass  # The file system has no locks.
        yield


class LossFile:
    """The file of the losses. One process of a run writes it."""

    def __init__(self, path: pathlib.Path, *, last_step: int) -> None:
        """Opens the file and removes the steps after `last_step`, the last checkpoint: they will be computed again."""
        kept = [step for step in read(path) if step.step <= last_step]
        path.write_text("".join(map(_line, kept)))
        self._file = path.open("a")

    def add(self, step: Step) -> None:
        """Appends a line. Readers see complete lines."""
        self._file.write(_line(step))
        self._file.flush()

    def commit(self) -> None:
        """Waits until all lines are on disk. Call this before writing a checkpoint, which relies on these lines."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read(path: pathlib.Path) -> list[Step]:
    """The steps in a file, in order; an empty list if there is no file. An incomplete last line is left out."""
    if not path.exists():
        return []
    return [Step(**json.loads(line)) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _line(step: Step) -> str:
    return json.dumps(dataclasses.asdict(step)) + "\n"
