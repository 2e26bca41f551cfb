"""Checkpoints by orbax. One gets its name when it is whole, so a half-written one is never read."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import jax
import orbax.checkpoint as ocp

from gpt.devices import Refused
from gpt.options import Options
from gpt.training import Program, State

# The last one, and the one before it in case somebody needs it.
_KEPT = 2


class NotSaved(Exception):
    """A checkpoint could not be written: the disk is full, say."""


class Checkpoints:
    """The checkpoints of a run in a folder. All processes call the same methods in the same order."""

    def __init__(self, folder: pathlib.Path, options: Options) -> None:
        # Orbax warns of each array that it reads onto another mesh, which is meant here, and logs what it raises.
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        self.folder = folder.resolve()
        self._options = options
        manager = ocp.CheckpointManagerOptions(
            max_to_keep=_KEPT,
            # What a killed process has left.
            cleanup_tmp_directories=True,
            # On GPUs training goes on while the files are written from a copy. On CPU devices there is no copy, and the
            # next step reuses the memory.
            enable_async_checkpointing=jax.default_backend() != "cpu",
        )
        self._manager = ocp.CheckpointManager(self.folder, options=manager)

    def last_step(self) -> int:
        """The step of the last whole checkpoint; 0 without one."""
        return self._manager.latest_step() or 0

    def check(self) -> list[str]:
        """Returns what training goes on with otherwise than it began, as "--batch 16 before, 32 now".

        Raises:
          Refused: if the last checkpoint is another model's.
        """
        before = self._read("run", ocp.args.JsonRestore())
        if other := _differences(before["sizes"], dataclasses.asdict(self._options.sizes)):
            raise Refused(
                f"{self.folder} holds checkpoints of another model ({'; '.join(other)}): choose its sizes, or "
                "another --out"
            )
        return _differences(before["training"], dataclasses.asdict(self._options.training))

    def restore(self, program: Program) -> State:
        """Returns the state of the last checkpoint, on the program's mesh, whichever it was written on."""
        return self._read("state", ocp.args.StandardRestore(program.abstract_state))

    def save(self, step: int, state: State) -> None:
        """Writes the state after `step`. On GPUs it may not be whole until the next call, or `close`.

        Raises:
          NotSaved: if it cannot be written, or on GPUs the one before.
        """
        if step == self.last_step():
            return
        run = {"sizes": dataclasses.asdict(self._options.sizes), "training": dataclasses.asdict(self._options.training)}
        items = ocp.args.Composite(state=ocp.args.StandardSave(state), run=ocp.args.JsonSave(run))
        with self._writing():
            self._manager.save(step, args=items, force=True)

    def close(self) -> None:
        """Returns when all is written.

        Raises:
          NotSaved: if it cannot be.
        """
        with self._writing():
            self._manager.wait_until_finished()
            self._manager.close()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, RuntimeError) as error:
            text = " ".join(str(error).split())
            # Tensorstore's errors end with what the operating system said.
            reason = found[1] if (found := re.search(r"([^:]+) \[os_error_code", text)) else text[:300]
            raise NotSaved(
                f"no checkpoint could be written to {self.folder} ({reason.strip()}). The last one is of step "
                f"{self.last_step()}: make room, and the same command goes on from there"
            ) from error

    def _read(self, item: str, how: Any) -> Any:
        step = self.last_step()
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**{item: how}))[item]
        except (KeyError, ValueError, OSError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise Refused(
                f"the checkpoint {self.folder / str(step)} cannot be read ({reason}): remove it to go on from the "
                "one before, or name another --out"
            ) from error


def _differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return [
        f"--{name.replace('_', '-')} {before.get(name)} before, {value} now"
        for name, value in now.items()
        if before.get(name) != value
    ]
