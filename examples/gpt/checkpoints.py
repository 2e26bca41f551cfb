"""Checkpoints by orbax. A checkpoint gets its name when it is complete, so a half-written one is never read."""

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

# How many checkpoints are kept: the last one and its predecessor.
_KEPT = 2


class NotSaved(Exception):
    """A checkpoint could not be written, for example because the disk is full."""


class Checkpoints:
    """The checkpoints of a run in a folder. All processes call the same methods in the same order."""

    def __init__(self, folder: pathlib.Path, options: Options) -> None:
        # Silence orbax: it warns about each array that it reads onto another mesh, which is intended here, and it logs
        # the errors that it raises.
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        self.folder = folder.resolve()
        self._options = options
        manager = ocp.CheckpointManagerOptions(
            max_to_keep=_KEPT,
            # Removes half-written checkpoints of a killed process.
            cleanup_tmp_directories=True,
            # On GPUs training continues while the files are written from a copy. On CPU devices orbax makes no copy,
            # and the next step would overwrite the memory.
            enable_async_checkpointing=jax.default_backend() != "cpu",
        )
        self._manager = ocp.CheckpointManager(self.folder, options=manager)

    def last_step(self) -> int:
        """The step of the last complete checkpoint; 0 if there is none."""
        return self._manager.latest_step() or 0

    def check(self) -> list[str]:
        """Returns the options that have changed since the last checkpoint, as in "--batch 16 before, 32 now".

        Raises:
          Refused: the last checkpoint is the checkpoint of another model.
        """
        before = self._read("run", ocp.args.JsonRestore())
        if other := _differences(before["sizes"], dataclasses.asdict(self._options.sizes)):
            raise Refused(
                f"{self.folder} holds checkpoints of another model ({'; '.join(other)}): choose its sizes, or "
                "another --out"
            )
        return _differences(before["training"], dataclasses.asdict(self._options.training))

    def restore(self, program: Program) -> State:
        """Returns the state of the last checkpoint on the program's mesh, whatever mesh it was written on."""
        return self._read("state", ocp.args.StandardRestore(program.abstract_state))

    def save(self, step: int, state: State) -> None:
        """Writes the state after `step`. On GPUs the checkpoint may not be complete until the next call, or `close`.

        Raises:
          NotSaved: the checkpoint cannot be written; or, on GPUs, the previous checkpoint could not be written.
        """
        if step == self.last_step():
            return
        run = {"sizes": dataclasses.asdict(self._options.sizes), "training": dataclasses.asdict(self._options.training)}
        items = ocp.args.Composite(state=ocp.args.StandardSave(state), run=ocp.args.JsonSave(run))
        with self._writing():
            self._manager.save(step, args=items, force=True)

    def close(self) -> None:
        """Waits until all checkpoints are written.

        Raises:
          NotSaved: a checkpoint could not be written.
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
            # Tensorstore's errors end with the message of the operating system.
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
