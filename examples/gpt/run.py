"""A run: the steps from the last checkpoint to the end, in a folder with its checkpoints and losses."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time

import jax
import numpy as np

from gpt import corpus, losses
from gpt.checkpoints import Checkpoints
from gpt.losses import LossFile, Step
from gpt.options import Options
from gpt.progress import Report
from gpt.stopping import Signals, Stopped
from gpt.training import Program, State

LOSSES, CHECKPOINTS = "losses.jsonl", "checkpoints"


class Diverged(Exception):
    """A loss or gradient is not finite."""


@dataclasses.dataclass
class Result:
    """A finished run. Only the first process of a job has `steps`; in the others they are empty."""

    program: Program
    state: State
    steps: list[Step]


def train(options: Options, text: np.ndarray, *, title: str) -> Result:
    """Trains from the last checkpoint in `options.out`, or from the start. All processes of a job call it alike.

    Raises:
      Refused: the folder holds checkpoints of another model, or another run uses it.
      Stopped: a process received SIGINT, SIGTERM or SIGUSR1. The state is saved.
      Diverged: the loss or the gradient is not finite. That step is not saved.
      NotSaved: a checkpoint cannot be written.
    """
    leads = jax.process_index() == 0
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(Signals())
        if leads:
            stack.enter_context(losses.locked(options.out))
        checkpoints = Checkpoints(options.out / CHECKPOINTS, options)
        stack.callback(checkpoints.close)
        training = options.training
        report = stack.enter_context(Report(title, options, quiet=not leads))
        done = checkpoints.last_step()
        changed = checkpoints.check() if done else []
        program = Program(options)
        mesh = " × ".join(f"{size} {name}" for name, size in program.mesh.shape.items())
        report.say(f"{program.parameters:,} parameters on {mesh}, implementation {options.implementation}")
        if changed:
            report.say("other than before: " + "; ".join(changed))
        if done >= training.steps:
            report.say(f"all {done} steps are done already: --steps with a larger number goes on")
        elif done:
            report.say(f"goes on after step {done}, from {checkpoints.folder}")
        state = checkpoints.restore(program) if done else program.first_state()
        file = None
        if leads:
            file = LossFile(options.out / LOSSES, last_step=done)
            stack.callback(file.close)
        state = _Loop(options, program, text, checkpoints, file, report).run(state, done, signals)
    return Result(program, state, losses.read(options.out / LOSSES) if leads else [])


class _Loop:
    """The loop over the steps. The loss of a step is read while the devices compute the next one."""

    def __init__(
        self,
        options: Options,
        program: Program,
        text: np.ndarray,
        checkpoints: Checkpoints,
        file: LossFile | None,
        report: Report,
    ) -> None:
        self._options, self._program, self._text = options, program, text
        self._checkpoints, self._file, self._report = checkpoints, file, report
        self._read_at: float | None = None  # When the last loss was read; None after other work.

    def run(self, state: State, done: int, signals: Signals) -> State:
        options, training = self._options, self._options.training
        stop, waiting = False, None
        while done < training.steps and not stop:
            done += 1
            tokens = corpus.batch(self._text, training.seed, done, size=training.batch, sequence=options.sizes.sequence)
            state, metrics = self._program.step(state, tokens, stop=signals.received is not None)
            if waiting:
                stop = self._finish(*waiting)
            waiting = (done, metrics)
            if stop or done % options.checkpoint_every == 0 or done == training.steps:
                # Check this step's loss before it is saved: a checkpoint never holds a state that is not finite.
                stop = self._finish(*waiting) or stop
                waiting = None
                self._save(done, state)
        if stop and done < training.steps:
            raise Stopped(done, signals.received)
        return state

    def _finish(self, step: int, metrics: dict[str, jax.Array]) -> bool:
        """Reads and records the metrics of a step, and returns whether any process wants to stop."""
        loss, norm = float(metrics["loss"]), float(metrics["gradient_norm"])
        now = time.perf_counter()
        seconds = None if self._read_at is None else now - self._read_at
        self._read_at = now
        if not (math.isfinite(loss) and math.isfinite(norm)):
            last = self._checkpoints.last_step()
            raise Diverged(
                f"step {step} has loss {loss} and gradient norm {norm}. The last checkpoint is of step {last}: go on "
                "from there with a lower --learning-rate, or a longer --warmup"
            )
        this = Step(step, loss, norm, seconds)
        if self._file:
            self._file.add(this)
        self._report.step(this)
        return bool(metrics["stop"])

    def _save(self, step: int, state: State) -> None:
        if self._file:
            self._file.commit()
        self._checkpoints.save(step, state)
        self._read_at = None
