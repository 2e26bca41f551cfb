"""Trains a small GPT made of overlap's layers, and continues where it was stopped. docs/training.md is the guide.

    make train                                          on the visible GPUs, else on 4 CPU devices
    python examples/train.py --tensor 4 --data 2        on 8 GPUs
    launch/mpirun.sh -np 4 -- python examples/train.py  one process per device
    python examples/train.py --compare                  against plain JAX: speed, losses, how far rounding alone leads

The model and the program of a step are in examples/gpt.py.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import math
import pathlib
import random
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from gpt import EXPERTS_PER_TOKEN, VOCABULARY, Program
from jax.experimental import multihost_utils

import overlap
from overlap.cli import ending
from overlap.cli.arguments import Parser, WrongArguments
from overlap.cli.devices import why_no_gpu

type Options = argparse.Namespace
type Step = dict[str, Any]  # "step", "loss", "gradient_norm" and "seconds"

# The defaults. On CPU devices a run of a minute on two cores; on GPUs large enough to keep them busy; emulated a run of
# some minutes. XLA multiplies bfloat16 slowly on CPUs, and the kernels take no float32.
_ON_CPUS = {"layers": 2, "features": 128, "heads": 4, "hidden": 384, "sequence": 128, "batch": 16, "steps": 200,
            "learning_rate": 3e-3, "dtype": "float32"}  # fmt: skip
_ON_GPUS = {"layers": 8, "features": 2048, "heads": 16, "hidden": 6144, "sequence": 2048, "batch": 16, "steps": 200,
            "learning_rate": 3e-4, "dtype": "bfloat16"}  # fmt: skip
_EMULATED = _ON_CPUS | {"layers": 1, "features": 64, "hidden": 128, "sequence": 32, "batch": 4, "steps": 20,
                        "dtype": "bfloat16"}  # fmt: skip
# Open MPI's mpirun kills its processes a second after SIGINT or SIGTERM, but it passes SIGUSR1 on. Slurm can send
# SIGUSR1 before the time limit.
_HEARD = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1
# Of the data sheets, for dense products in bfloat16.
_FLOPS_PER_S = {"H100": 989e12, "H200": 989e12, "B200": 2250e12}
# Rounding drives runs apart. Runs by overlap may drift this many times as far from plain as plain in another order.
_MOST_TIMES = 3.0


class Stopped(Exception):
    """Training was stopped by a signal, and its state is saved. Arguments: the step, and the exit status."""


class Diverged(Exception):
    """A loss or gradient is not finite. That step is not saved."""


# --- Options ----------------------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    """Makes the parser. Options whose defaults depend on the machine are None until `complete` sets them."""
    made = Parser("examples/train.py", description=(__doc__ or "").partition("\n")[0])
    for name, what in {
        "layers": "blocks of attention and MLP", "features": "width of the activations between blocks",
        "heads": "heads of the attention", "hidden": "width inside the MLP",
        "experts": "MLPs in the place of each, of which a token takes 2; a multiple of --tensor (default: 0)",
        "vocabulary": f"entries of the vocabulary, at least {VOCABULARY}: more cost what they cost in a real model "
                      f"(default: {VOCABULARY})",
        "sequence": "tokens, that is bytes, that the model sees at once",
        "batch": "sequences of a step, on all devices together", "steps": "steps in all",
        "warmup": "steps (default: a tenth of all)", "accumulate": "parts of a batch, one after the other",
        "seed": "of weights, text and batches", "data": "devices that share a batch",
        "fsdp": "devices that share a batch and the weights", "tensor": "devices that share each product",
        "checkpoint-every": "steps (default: 100)",
    }.items():  # fmt: skip
        default = f" (default: {_ON_CPUS[name]} on CPU devices, {_ON_GPUS[name]} on GPUs)" if name in _ON_GPUS else ""
        made.add_argument(f"--{name}", type=int, metavar="N", help=f"{what}{default}")
    made.set_defaults(experts=0, vocabulary=VOCABULARY, accumulate=1, seed=0, fsdp=1, checkpoint_every=100)
    made.add_argument("--learning-rate", type=float, metavar="X", help="after the warmup; then it falls as a cosine")
    made.add_argument("--dtype", choices=("bfloat16", "float32"), help="of products and activations")
    how = ("auto: for each product what was measured to be faster; without GPUs that is xla, and fused is emulated; "
           "plain: without overlap's layers, by XLA's partitioner")  # fmt: skip
    made.add_argument("--implementation", choices=("auto", "fused", "xla", "plain"), default="auto", help=how)
    made.add_argument("--remat", action="store_true", help="compute each block again in the backward pass: less memory")
    made.add_argument("--text", nargs="+", metavar="FILE", help="learn these files (default: sums in sentences)")
    made.add_argument("--out", type=pathlib.Path, help="for checkpoints, losses and plot (default: out/train)")
    runs = "train by plain JAX, by plain JAX in another order of sums, fused, and as chosen; compare speed and losses"
    made.add_argument("--compare", action="store_true", help=runs)
    return made


def start(options: Options) -> None:
    """Joins the job of a launcher, if there is one, and sets the axes of the mesh. Call it before devices are used."""
    without_gpus = why_no_gpu()
    if without_gpus:
        jax.config.update("jax_platforms", "cpu")
    overlap.initialize()  # One process per device under mpirun, srun or torchrun. In a single process it does nothing.
    if without_gpus and not jax.distributed.is_initialized():
        options.data, options.tensor = options.data or 2, options.tensor or 2
        count = options.data * options.tensor * options.fsdp
        jax.config.update("jax_num_cpu_devices", count)
    complete(options, devices=jax.device_count(), gpus=jax.default_backend() == "gpu")


def complete(options: Options, *, devices: int, gpus: bool) -> None:
    """Sets the options that were not given: as many devices along tensor as there are, up to 8, the rest along data.

    Raises:
      WrongArguments: they do not fit together.
    """
    emulated = not gpus and (options.compare or options.implementation == "fused")
    if emulated and options.experts:  # The kernels that move tokens to experts take at least 128 features.
        options.features = 128 if options.features is None else options.features
    for name, default in (_ON_GPUS if gpus else _EMULATED if emulated else _ON_CPUS).items():
        setattr(options, name, default if getattr(options, name) is None else getattr(options, name))
    options.warmup = options.steps // 10 if options.warmup is None else options.warmup
    options.out = options.out or pathlib.Path("out", "compare" if options.compare else "train")
    rest = max(devices // ((options.data or 1) * options.fsdp * (options.tensor or 1)), 1)
    if options.tensor is None:
        # At most the GPUs of one host, since the devices along this axis communicate in every product.
        options.tensor = max(number for number in (1, 2, 4, 8) if rest % number == 0)
        rest //= options.tensor
    options.data = options.data or rest
    mesh = options.data * options.fsdp * options.tensor
    if mesh > devices or (jax.process_count() > 1 and mesh != devices):
        raise WrongArguments(
            f"train: --data {options.data} × --fsdp {options.fsdp} × --tensor {options.tensor} asks for {mesh} "
            f"devices, and there are {devices}: choose axes whose product is that"
        )
    if emulated and jax.process_count() > 1:
        raise WrongArguments("train: fused kernels are emulated in one process: start one, or leave the option out")
    if options.compare and (options.tensor * options.fsdp == 1 or options.implementation != "auto"):
        raise WrongArguments("train: --compare takes --tensor or --fsdp 2 or more, and no --implementation")
    check(options)


def check(options: Options) -> None:
    """Raises `WrongArguments` if the mesh does not divide the sizes or the batch."""
    parts = options.data * options.fsdp * options.accumulate
    if options.vocabulary < VOCABULARY:
        raise WrongArguments(
            f"train: --vocabulary {options.vocabulary} is less than the {VOCABULARY} bytes of a text: leave it out"
        )
    # A padded head would have other first weights than a plain one, which is not padded.
    is_plain = options.vocabulary > VOCABULARY and (options.compare or options.implementation == "plain")
    for name, divisor, by in (
        ("vocabulary", 8 * options.tensor if is_plain else 1, f"8 × --tensor {options.tensor}"),
        ("features", options.heads, f"--heads {options.heads}"),
        ("features", options.fsdp, f"--fsdp {options.fsdp}"),
        ("heads", options.tensor, f"--tensor {options.tensor}"),
        ("hidden", options.tensor, f"--tensor {options.tensor}"),
        ("hidden", options.fsdp if options.experts else 1, f"--fsdp {options.fsdp}"),
        ("experts", options.tensor, f"--tensor {options.tensor}"),
        ("sequence", options.tensor, f"--tensor {options.tensor}"),
        ("batch", parts, f"--data {options.data} × --fsdp {options.fsdp} × --accumulate {options.accumulate}"),
    ):
        if (size := getattr(options, name)) % divisor:
            fits = math.ceil(size / divisor) * divisor
            raise WrongArguments(f"train: --{name} {size} is not divisible by {by}: choose --{name} {fits}, say")


# --- The text ---------------------------------------------------------------------------------------------------------

_PEOPLE, _THINGS = ("Anna", "Ben", "Clara", "David"), ("coins", "pears", "stones", "books", "eggs", "nuts")


def stories(size: int, seed: int) -> np.ndarray:
    """Returns `size` bytes (uint8) of sentences with sums, which are right: there is something to learn."""
    chance, lines, length = random.Random(seed), [], 0
    while length < size:
        (giver, taker), thing, before = chance.sample(_PEOPLE, 2), chance.choice(_THINGS), chance.randint(2, 99)
        given = chance.randint(1, before)
        gift = f"{giver} has {before} {thing} and gives {given} to {taker}. Now {giver} has {before - given} {thing}."
        lines.append(gift + "\n")
        length += len(lines[-1])
    return np.frombuffer("".join(lines).encode("ascii")[:size], np.uint8)


def batch(text: np.ndarray, options: Options, step: int) -> np.ndarray:
    """Returns the batch of a step, [batch, sequence + 1] int32. The model predicts each column from those before it.

    The batch depends on the seed and the step only. So all processes have the same one, and checkpoints need no state
    of the data.
    """
    starts = np.random.default_rng([options.seed, step]).integers(0, len(text) - options.sequence, options.batch)
    return text[starts[:, None] + np.arange(options.sequence + 1)].astype(np.int32)


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
    leads = jax.process_index() == 0

    def say(words: str) -> None:
        if leads:
            print(f"{options.out.name}: {words}", file=sys.stderr, flush=True)

    # Silence orbax, which warns about each array that it reads onto another mesh.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    # On CPU devices orbax makes no copy of the state, and the next step would overwrite it: write at once.
    saving = ocp.CheckpointManagerOptions(
        max_to_keep=2, cleanup_tmp_directories=True, enable_async_checkpointing=jax.default_backend() != "cpu"
    )
    losses, program = options.out / "losses.jsonl", Program(options)
    folder = (options.out / "checkpoints").absolute()
    with ocp.CheckpointManager(folder, options=saving) as checkpoints, _signals() as received:
        done = checkpoints.latest_step() or 0
        state, file = program.first(), options.out / "model.json"
        names = "layers", "features", "heads", "hidden", "sequence", "experts", "vocabulary"
        sizes = {key: getattr(options, key) for key in names}
        if not done and leads:
            file.write_text(json.dumps(sizes))
        if done:
            older = {"experts": 0, "vocabulary": VOCABULARY}  # Older runs say nothing of these.
            if (before := older | json.loads(file.read_text())) != sizes:
                raise WrongArguments(f"train: {options.out} is of another model, {before}: choose another --out")
            state = checkpoints.restore(done, args=ocp.args.StandardRestore(program.abstract_state))
            say(f"{'all steps are done' if done >= options.steps else 'goes on'} after step {done}")
        count = sum(leaf.size for leaf in jax.tree.leaves(program.abstract_state["params"]))
        say(f"{count:,} parameters on {options.data} data × {options.fsdp} fsdp × {options.tensor} tensor devices")
        steps = [step for step in read(losses) if step["step"] <= done] if leads else []
        if leads:
            losses.write_text("".join(json.dumps(step) + "\n" for step in steps))
        read_at: float | None = None
        waiting: tuple[int, dict[str, jax.Array]] | None = None

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
            if number % 20 == 0 or number in (done + 1, options.steps):
                say(f"step {number}/{options.steps}  loss {loss:.4f}  {speed(options, steps[-20:])}")
            return bool(metrics["stop"])

        for number in range(done + 1, options.steps + 1):
            state, metrics = program.step(state, batch(text, options, number), stop=bool(received))
            # The loss of a step is read while the devices compute the next one.
            stop = waiting is not None and finish(*waiting)
            waiting = number, metrics
            if stop or number % options.checkpoint_every == 0 or number == options.steps:
                # Check this step's loss before it is saved: a checkpoint never holds a state that is not finite.
                stop = finish(*waiting) or stop
                waiting = read_at = None
                checkpoints.save(number, args=ocp.args.StandardSave(state), force=True)
                if stop and number < options.steps:
                    checkpoints.wait_until_finished()
                    raise Stopped(number, 128 + (received[0] if received else signal.SIGTERM))
        checkpoints.wait_until_finished()
    return steps if leads else []


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Yields a list, to which a signal is added. A second one ends the process at once."""
    received: list[int] = []

    def note(number: int, frame: object) -> None:
        received.append(number)
        signal.signal(number, signal.SIG_DFL)

    before = {number: signal.signal(number, note) for number in _HEARD}
    try:
        yield received
    finally:
        for number, handler in before.items():
            # None: the old handler was not set by Python, and cannot be restored.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


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
    hidden = options.hidden * (min(EXPERTS_PER_TOKEN, options.experts) or 1)
    of_layer = 4 * features**2 + 3 * features * hidden + options.sequence * features
    devices, kind = options.data * options.fsdp * options.tensor, jax.devices()[0].device_kind
    flops = 6 * tokens * (options.layers * of_layer + options.vocabulary * features) / devices
    peak = next((peak for name, peak in _FLOPS_PER_S.items() if name in kind), None)
    text = f"{step_s * 1e3:,.0f} ms/step  {tokens / step_s:,.0f} tokens/s"
    return text + (f"  MFU {flops / step_s / peak:.1%}" if peak else "")


# --- Compared with plain JAX ------------------------------------------------------------------------------------------


def compare(options: Options, text: np.ndarray) -> int:
    """Trains by plain JAX, by plain JAX with sums in another order, fused, and as chosen. Returns the exit status."""
    source, target = ("tensor", "data") if options.tensor > 1 else ("fsdp", "tensor")
    size = getattr(options, source)
    factor = next(number for number in range(2, size + 1) if size % number == 0)
    other = {source: size // factor, target: getattr(options, target) * factor}
    told: dict[str, Options] = {}
    for name, how, mesh in (("plain", "plain", {}), ("plain-other-order", "plain", other), ("fused", "fused", {}),
                            ("chosen", "auto", {})):  # fmt: skip
        changes = {"implementation": how, "out": options.out / name, **mesh}
        told[name] = argparse.Namespace(**vars(options) | changes)
        check(told[name])
    losses: dict[str, np.ndarray] = {}
    for name, each in told.items():
        steps = train(each, text)
        losses[name] = np.array([step["loss"] for step in steps])
        print(f"{name:<18} {speed(each, steps)}")
    if jax.process_index() > 0:
        return 0
    draw(losses, options.out / "losses.png")
    print(f"Losses of {len(losses['plain'])} steps, distance from plain:")
    rms = {}
    for name in ("plain-other-order", "fused", "chosen"):
        apart = np.abs(losses[name] - losses["plain"])
        rms[name] = np.sqrt(np.mean(apart**2))
        print(f"  {name:<18} largest {apart.max():.2e}  root mean square {rms[name]:.2e}")
    agree = max(rms["fused"], rms["chosen"]) <= _MOST_TIMES * rms["plain-other-order"]
    print(
        f"The curves of overlap are {'within' if agree else 'NOT within'} {_MOST_TIMES:g} times the distance that "
        f"another order of summation makes. Plot: {options.out / 'losses.png'}"
    )
    return int(not agree)


def draw(losses: dict[str, np.ndarray], path: pathlib.Path) -> None:
    """Writes the losses of some runs as a PNG; for several runs, also the distance of each run from the first."""
    from matplotlib.figure import Figure  # Not pyplot: it may look for a display, and keeps global state.

    figure = Figure(figsize=(9, 7 if len(losses) > 1 else 5), layout="constrained")
    axes = figure.subplots(min(len(losses), 2), 1, sharex=True, squeeze=False)[:, 0]
    first, *others = losses
    for name, values in losses.items():
        axes[0].plot(np.arange(len(values)) + 1, values, label=name, alpha=0.7)
        if name in others:
            axes[1].semilogy(np.arange(len(values)) + 1, np.abs(values - losses[first]), label=f"{name} - {first}")
    axes[0].set_ylabel("loss (nats per byte)")
    axes[-1].set_xlabel("step")
    for axis in axes:
        axis.legend(frameon=False)
    figure.savefig(path, dpi=130)


def main() -> int:
    """Returns the exit status: 0 done; 1 diverged or apart; 2 wrong arguments; 130, 138, 143 stopped by a signal."""
    options = parser().parse_args()
    start(options)
    files = [np.frombuffer(pathlib.Path(name).read_bytes(), np.uint8) for name in options.text or ()]
    text = np.concatenate(files) if files else stories((8 if jax.default_backend() == "gpu" else 1) << 20, options.seed)
    if text.size <= options.sequence:
        raise WrongArguments(f"train: the text has {text.size} bytes: choose a --sequence below that, or more --text")
    status = 0
    try:
        if options.compare:
            status = compare(options, text)
        elif steps := train(options, text):
            plot = options.out / "losses.png"
            draw({"loss": np.array([step["loss"] for step in steps])}, plot)
            print(f"Loss {steps[0]['loss']:.4f} at step 1, {steps[-1]['loss']:.4f} at step {len(steps)}. Plot: {plot}")
    except Diverged as reason:
        print(f"train: {reason}", file=sys.stderr)
        return 1
    except Stopped as stopped:
        step, status = stopped.args
        if jax.process_index() == 0:
            print(f"train: stopped after step {step}, which is saved. The same command goes on", file=sys.stderr)
        return status
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("trained")  # All processes end together.
    return status


if __name__ == "__main__":
    raise SystemExit(ending.run(main))
