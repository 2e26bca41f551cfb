"""Trains a small GPT made of overlap's layers, and continues where it was stopped. docs/training.md is the guide.

    make train                                          on the visible GPUs, else on 4 CPU devices
    python examples/train.py --tensor 4 --data 2        on 8 GPUs
    launch/mpirun.sh -np 4 -- python examples/train.py  one process per device
    python examples/train.py --compare                  fused against XLA: the losses, and how far rounding alone leads

The model, the text, the options and the program of a step are in examples/gpt/.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import math
import pathlib
import shlex
import signal
import statistics
import sys
import time
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from gpt import options as command_line
from gpt import stories
from gpt.model import VOCABULARY
from gpt.program import Program
from jax.experimental import multihost_utils

from overlap.cli import ending
from overlap.cli.arguments import WrongArguments

type Options = argparse.Namespace
type Step = dict[str, float]  # "step", "loss", "gradient_norm" and "seconds"

# The options that decide the shapes of the parameters, and the others that decide the losses.
_SIZES = "layers", "features", "heads", "hidden", "sequence"
_TRAINING = "batch", "steps", "learning_rate", "warmup", "seed", "text", "dtype"
# Open MPI's mpirun kills its processes a second after SIGINT or SIGTERM, but it passes SIGUSR1 on. Slurm can send
# SIGUSR1 before the time limit.
_HEARD = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1
# Of the data sheets, for dense products in bfloat16.
_FLOPS_PER_S = {"H100": 989e12, "H200": 989e12, "B200": 2250e12}
# Runs that differ in rounding alone drift apart, by chance. The comparison fails if the fused run drifts more than this
# many times as far from XLA's first run as XLA's second run does.
_MOST_TIMES = 3.0


class Stopped(Exception):
    """Training was stopped by a signal, and its state is saved. Arguments: the step, and the exit status."""


class Diverged(Exception):
    """A loss or gradient is not finite. That step is not saved."""


# --- A run ------------------------------------------------------------------------------------------------------------


def train(options: Options, text: np.ndarray) -> list[Step]:
    """Trains from the last checkpoint in `options.out`, or from the start. All processes of a job call it alike.

    Returns:
      All steps, as in losses.jsonl, in the first process of a job; in the others an empty list.

    Raises:
      WrongArguments: the folder holds checkpoints of another model.
      Stopped: a process received SIGINT, SIGTERM or SIGUSR1.
      Diverged: the loss or the gradient is not finite.
    """
    leads, name = jax.process_index() == 0, options.out.name
    say = lambda text: print(f"{name}: {text}", file=sys.stderr, flush=True) if leads else None  # noqa: E731
    # Silence orbax, which warns about each array that it reads onto another mesh.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    # On CPU devices orbax makes no copy of the state, and the next step would overwrite it: write at once.
    saving = ocp.CheckpointManagerOptions(
        max_to_keep=2, cleanup_tmp_directories=True, enable_async_checkpointing=jax.default_backend() != "cpu"
    )
    losses = options.out / "losses.jsonl"
    with (
        ocp.CheckpointManager((options.out / "checkpoints").absolute(), options=saving) as checkpoints,
        _signals() as received,
    ):
        done, program = checkpoints.latest_step() or 0, Program(options)
        if done:
            _say_changes(
                checkpoints.restore(done, args=ocp.args.Composite(run=ocp.args.JsonRestore()))["run"], options, say
            )
            state = ocp.args.StandardRestore(program.abstract_state)
            state = checkpoints.restore(done, args=ocp.args.Composite(state=state))["state"]
            over = "all steps are done" if done >= options.steps else "goes on"
            say(f"{over} after step {done}, from {options.out}")
        else:
            state = program.first()
        count = sum(leaf.size for leaf in jax.tree.leaves(program.abstract_state["params"]))
        say(f"{count:,} parameters on {options.data} data × {options.fsdp} fsdp × {options.tensor} tensor devices")
        steps = [step for step in read(losses) if step["step"] <= done] if leads else []
        if leads:
            losses.write_text("".join(json.dumps(step) + "\n" for step in steps))
        read_at, waiting = None, None

        def finish(number: int, metrics: dict[str, jax.Array]) -> bool:
            """Reads and records the metrics of a step. Returns whether any process wants to stop."""
            nonlocal read_at
            loss, norm, now = float(metrics["loss"]), float(metrics["gradient_norm"]), time.perf_counter()
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise Diverged(
                    f"step {number} has loss {loss} and gradient norm {norm}. The last checkpoint is of step "
                    f"{checkpoints.latest_step() or 0}: go on from there with a lower --learning-rate, or more --warmup"
                )
            seconds = None if read_at is None else now - read_at  # None if it includes a compilation or a checkpoint.
            read_at = now
            steps.append({"step": number, "loss": loss, "gradient_norm": norm, "seconds": seconds})
            if leads:
                with losses.open("a") as file:
                    file.write(json.dumps(steps[-1]) + "\n")
            if number % options.print_every == 0 or number in (done + 1, options.steps):
                say(f"step {number}/{options.steps}  loss {loss:.4f}  {speed(options, steps[-20:])}")
            return bool(metrics["stop"])

        for number in range(done + 1, options.steps + 1):
            tokens = stories.batch(text, options.seed, number, size=options.batch, sequence=options.sequence)
            state, metrics = program.step(state, tokens, stop=bool(received))
            # The loss of a step is read while the devices compute the next one.
            stop = waiting is not None and finish(*waiting)
            waiting = number, metrics
            if stop or number % options.checkpoint_every == 0 or number == options.steps:
                # Check this step's loss before it is saved: a checkpoint never holds a state that is not finite.
                stop = finish(*waiting) or stop
                waiting = read_at = None
                run = {key: getattr(options, key) for key in (*_SIZES, *_TRAINING)}
                items = ocp.args.Composite(state=ocp.args.StandardSave(state), run=ocp.args.JsonSave(run))
                checkpoints.save(number, args=items, force=True)
                if stop and number < options.steps:
                    checkpoints.wait_until_finished()
                    raise Stopped(number, 128 + (received[0] if received else signal.SIGTERM))
        checkpoints.wait_until_finished()
    return steps if leads else []


def _say_changes(before: dict[str, Any], options: Options, say: Any) -> None:
    changed = {
        name: f"--{name.replace('_', '-')} {before[name]} before, {getattr(options, name)} now"
        for name in (*_SIZES, *_TRAINING)
        if before[name] != getattr(options, name)
    }
    if other := [text for name, text in changed.items() if name in _SIZES]:
        raise WrongArguments(
            f"train: {options.out} holds checkpoints of another model ({'; '.join(other)}): choose its sizes, or "
            "another --out"
        )
    if changed:
        say("other than before: " + "; ".join(changed.values()))


@contextlib.contextmanager
def _signals():
    """Yields a list, to which a signal is added. A second signal acts as it would without this context."""
    received: list[int] = []
    before = {number: signal.getsignal(number) for number in _HEARD}

    def restore() -> None:
        for number, handler in before.items():
            # None: the old handler was not set by Python, and cannot be restored.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def note(number: int, frame: object) -> None:
        received.append(number)
        restore()

    for number in _HEARD:
        signal.signal(number, note)
    try:
        yield received
    finally:
        restore()


def read(path: pathlib.Path) -> list[Step]:
    """The steps in a file of losses; an empty list if there is no file. An incomplete last line is left out."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def speed(options: Options, steps: list[Step]) -> str:
    """Says how fast steps are, from the median of their seconds; on known GPUs also the model FLOPs utilization (MFU).

    MFU: the operations of a step's products, with half of those of a causal attention, as a part of what the data sheet
    promises in bfloat16 for the same time.
    """
    seconds = [step["seconds"] for step in steps if step["seconds"] is not None]
    if not seconds:
        return ""
    step_s, tokens, features = statistics.median(seconds), options.batch * options.sequence, options.features
    of_layer = 4 * features**2 + 3 * features * options.hidden + options.sequence * features
    devices = options.data * options.fsdp * options.tensor
    flops = 6 * tokens * (options.layers * of_layer + VOCABULARY * features) / devices
    kind = jax.devices()[0].device_kind
    peak = next((peak for name, peak in _FLOPS_PER_S.items() if name in kind), None)
    text = f"{step_s * 1e3:,.0f} ms/step  {tokens / step_s:,.0f} tokens/s"
    return text + (f"  MFU {flops / step_s / peak:.1%}" if peak else "")


# --- Fused against XLA ------------------------------------------------------------------------------------------------


def compare(options: Options, text: np.ndarray) -> int:
    """Trains by XLA, by XLA with the sums split in another way, and fused. Returns the exit status.

    The second run says how far the losses drift apart by rounding alone.
    """
    factor = next(number for number in range(2, options.tensor + 1) if options.tensor % number == 0)
    other = {"data": options.data * factor, "tensor": options.tensor // factor}
    runs = {}
    for folder, changes in (("xla", {}), ("xla-other-order", other), ("fused", {})):
        implementation = folder.split("-")[0]
        chosen = {**vars(options), **changes, "implementation": implementation, "out": options.out / folder}
        chosen = argparse.Namespace(**chosen)
        command_line.check(chosen)
        runs[folder] = train(chosen, text)
        print(f"{folder:<16} {speed(chosen, runs[folder])}")
    if jax.process_index() > 0:
        return 0
    draw(runs, options.out / "losses.png")
    print(f"Losses of {len(runs['xla'])} steps, distance from xla:")
    rms = {}
    for name in ("fused", "xla-other-order"):
        apart = distances(runs["xla"], runs[name])
        rms[name] = math.sqrt(math.fsum(each * each for each in apart) / len(apart))
        print(f"  {name:<16} largest {max(apart):.2e}  root mean square {rms[name]:.2e}")
    agree = rms["fused"] <= _MOST_TIMES * rms["xla-other-order"]
    print(
        f"The fused curve is {'within' if agree else 'NOT within'} {_MOST_TIMES:g} times the distance that another "
        f"order of summation makes. Plot: {options.out / 'losses.png'}"
    )
    return int(not agree)


def distances(reference: list[Step], steps: list[Step]) -> list[float]:
    """The distance of the losses at each step."""
    return [abs(one["loss"] - other["loss"]) for one, other in zip(reference, steps, strict=True)]


def draw(runs: dict[str, list[Step]], path: pathlib.Path) -> None:
    """Writes the losses as a PNG; for several runs, also the distance of each run from the first."""
    # Do not use pyplot: it may look for a display, and keeps global state.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7 if len(runs) > 1 else 5), layout="constrained")
    axes = figure.subplots(2 if len(runs) > 1 else 1, 1, sharex=True, squeeze=False)[:, 0]
    first, *others = runs
    # The first line is the widest, so that all curves are visible where they agree.
    for name, width in zip(runs, (4.0, 2.2, 1.0) if others else (1.2,), strict=True):
        numbers = [step["step"] for step in runs[name]]
        axes[0].plot(numbers, [step["loss"] for step in runs[name]], label=name, linewidth=width)
        if name in others:
            axes[1].plot(numbers, distances(runs[first], runs[name]), label=f"{name}: distance from {first}")
            axes[1].set_yscale("symlog", linthresh=1e-5)
    axes[0].set_ylabel("loss (nats per byte)")
    axes[-1].set_xlabel("step")
    for axis in axes:
        axis.legend(frameon=False)
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=130)


def main() -> int:
    """Returns the exit status: 0 done; 1 diverged or apart; 2 wrong arguments; 130, 138, 143 stopped by a signal."""
    options = command_line.parser().parse_args()
    command_line.start(options)
    if options.text:
        text = np.concatenate([np.frombuffer(pathlib.Path(name).read_bytes(), np.uint8) for name in options.text])
    else:
        text = stories.stories(options.text_mb << 20, options.seed)
    if text.size <= options.sequence:
        raise WrongArguments(f"train: the text has {text.size} bytes: choose a --sequence below that, or more --text")
    try:
        if options.compare:
            status = compare(options, text)
        else:
            status, steps = 0, train(options, text)
            if steps:
                draw({"loss": steps}, options.out / "losses.png")
                first, last = steps[0]["loss"], steps[-1]["loss"]
                plot = options.out / "losses.png"
                print(f"Loss {first:.4f} at step 1, {last:.4f} at step {len(steps)}. Plot: {plot}")
    except Diverged as reason:
        print(f"train: {reason}", file=sys.stderr)
        return 1
    except Stopped as stopped:
        step, status = stopped.args
        again = f"python examples/train.py {shlex.join(sys.argv[1:])}"
        if jax.process_index() == 0:
            print(
                f"train: stopped after step {step}, which is saved. The same command goes on: {again}", file=sys.stderr
            )
        return status
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("trained")  # All processes end together.
    return status


if __name__ == "__main__":
    raise SystemExit(ending.run(main))
