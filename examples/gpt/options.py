"""The command line of examples/train.py, and the checks that its options fit together."""

from __future__ import annotations

import argparse
import dataclasses
import math
import pathlib
from typing import Literal

from gpt.corpus import VOCABULARY
from gpt.devices import Axes, Refused
from overlap.cli.arguments import finite_number, whole_number

# Defaults: on CPU devices for a run of two minutes on two cores; on GPUs large enough to keep them busy; for emulated
# kernels a run of some minutes. XLA multiplies bfloat16 slowly on CPUs, and the kernels take no float32.
_ON_CPUS = {
    "layers": 2, "features": 128, "heads": 4, "hidden": 384, "sequence": 128, "batch": 16, "steps": 200,
    "learning_rate": 3e-3, "text_mb": 1, "dtype": "float32",
}  # fmt: skip
_ON_GPUS = {
    "layers": 8, "features": 2048, "heads": 16, "hidden": 6144, "sequence": 2048, "batch": 16, "steps": 200,
    "learning_rate": 3e-4, "text_mb": 8, "dtype": "bfloat16",
}  # fmt: skip
_EMULATED = _ON_CPUS | {
    "layers": 1, "features": 64, "hidden": 128, "sequence": 32, "batch": 4, "steps": 20, "dtype": "bfloat16",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The options that decide the shapes of the parameters. A checkpoint can only be read with the same sizes."""

    layers: int
    features: int
    heads: int
    hidden: int
    sequence: int


@dataclasses.dataclass(frozen=True)
class Training:
    """The other options that decide the losses. If they change between two starts, the losses change as well."""

    batch: int
    steps: int
    learning_rate: float
    warmup: int
    seed: int
    text: str
    dtype: str


@dataclasses.dataclass(frozen=True)
class Options:
    """All options of a run. `axes`, `implementation`, `accumulate` and `remat` change the losses by rounding only."""

    sizes: Sizes
    training: Training
    axes: Axes
    implementation: Literal["auto", "fused", "xla"]
    accumulate: int
    remat: bool
    checkpoint_every: int
    print_every: int
    text_mb: int
    out: pathlib.Path


def parser() -> argparse.ArgumentParser:
    """Makes the parser. Options whose defaults depend on the machine are None until `complete` sets them."""
    parser = argparse.ArgumentParser(
        prog="examples/train.py",
        description="Trains a small GPT of overlap's layers: data parallel × FSDP × tensor parallel, on the visible "
        "GPUs, else on CPU devices. The same command again goes on from the last checkpoint.",
    )
    at_least_1, seed = whole_number(at_least=1), whole_number(at_least=0, at_most=2**31 - 1)

    def size(group: argparse._ArgumentGroup, name: str, what: str) -> None:
        default = f"(default: {_ON_CPUS[name]} on CPU devices, {_ON_GPUS[name]} on GPUs)"
        group.add_argument(f"--{name.replace('_', '-')}", type=at_least_1, metavar="N", help=f"{what} {default}")

    model = parser.add_argument_group("the model")
    size(model, "layers", "blocks of attention and MLP")
    size(model, "features", "width of the activations between blocks")
    size(model, "heads", "heads of the attention")
    size(model, "hidden", "width inside the MLP")
    size(model, "sequence", "tokens, that is bytes, that the model sees at once")
    model.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        metavar="DTYPE",
        help="bfloat16 or float32, of products and activations; weights are float32 "
        "(default: float32 on CPU devices, bfloat16 on GPUs and with emulated kernels)",
    )
    model.add_argument(
        "--implementation",
        choices=("auto", "fused", "xla"),
        default="auto",
        metavar="NAME",
        help="fused, xla, or auto: for each product what was measured to be faster; without GPUs fused "
        "kernels are emulated, slowly, and auto is xla (default: auto)",
    )
    model.add_argument(
        "--remat", action="store_true", help="compute each block again in the backward pass: less memory"
    )

    training = parser.add_argument_group("training")
    size(training, "batch", "sequences of a step, on all devices together")
    size(training, "steps", "steps in all")
    training.add_argument(
        "--accumulate",
        type=at_least_1,
        default=1,
        metavar="N",
        help="parts of a batch, computed one after the other: less memory (default: 1)",
    )
    training.add_argument(
        "--learning-rate",
        type=finite_number("any size", above=0),
        metavar="X",
        help=f"after the warmup; then it falls as a cosine (default: {_ON_CPUS['learning_rate']:g} "
        f"on CPU devices, {_ON_GPUS['learning_rate']:g} on GPUs)",
    )
    training.add_argument(
        "--warmup", type=whole_number(at_least=0), metavar="N", help="steps (default: a tenth of all)"
    )
    training.add_argument("--seed", type=seed, default=0, metavar="N", help="of weights, text and batches (default: 0)")
    training.add_argument(
        "--text",
        type=pathlib.Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="learn these files (default: short stories that are made up here)",
    )
    size(training, "text_mb", "MB of stories")

    mesh = parser.add_argument_group("the mesh", "What is not given is chosen; the product is the number of devices.")
    mesh.add_argument("--data", type=at_least_1, metavar="N", help="devices that share a batch")
    mesh.add_argument("--fsdp", type=at_least_1, metavar="N", help="devices that share a batch and the weights")
    mesh.add_argument("--tensor", type=at_least_1, metavar="N", help="devices that share each product")

    run = parser.add_argument_group("the run")
    run.add_argument(
        "--out",
        type=pathlib.Path,
        metavar="FOLDER",
        help="for checkpoints, losses and plot (default: out/train, or out/compare)",
    )
    run.add_argument("--checkpoint-every", type=at_least_1, default=100, metavar="N", help="steps (default: 100)")
    run.add_argument(
        "--print-every",
        type=at_least_1,
        default=20,
        metavar="N",
        help="steps between two lines, where the output is no terminal (default: 20)",
    )
    run.add_argument(
        "--compare",
        action="store_true",
        help="train by XLA, by XLA in another order of sums, and fused; compare the losses",
    )
    return parser


def complete(given: argparse.Namespace, axes: Axes, *, gpus: bool, processes: int) -> Options:
    """Returns all options, with defaults for those that were not given.

    Raises:
      Refused: the options contradict each other. The message names both values and a way out.
    """
    emulated = not gpus and (given.compare or given.implementation == "fused")
    defaults = _ON_GPUS if gpus else _EMULATED if emulated else _ON_CPUS
    chosen = {
        name: default if getattr(given, name) is None else getattr(given, name) for name, default in defaults.items()
    }
    if emulated and processes > 1:
        option = "--compare" if given.compare else "--implementation fused"
        raise Refused(
            f"{option} emulates the fused kernels on CPU devices, which takes one process with all of them, and here "
            f"are {processes}: start one process, or leave {option} out"
        )
    text = "files " + " ".join(map(str, given.text)) if given.text else f"{chosen['text_mb']} MB of stories"
    warmup = chosen["steps"] // 10 if given.warmup is None else given.warmup
    if warmup > chosen["steps"]:
        raise Refused(f"--warmup {warmup} is longer than --steps {chosen['steps']}: choose at most that")
    options = Options(
        sizes=Sizes(**{field.name: chosen[field.name] for field in dataclasses.fields(Sizes)}),
        training=Training(
            chosen["batch"], chosen["steps"], chosen["learning_rate"], warmup, given.seed, text, chosen["dtype"]
        ),
        axes=axes,
        implementation=given.implementation,
        accumulate=given.accumulate,
        remat=given.remat,
        checkpoint_every=given.checkpoint_every,
        print_every=given.print_every,
        text_mb=chosen["text_mb"],
        out=given.out or pathlib.Path("out", "compare" if given.compare else "train"),
    )
    check(options)
    if given.compare:
        _check_compare(options)
    return options


def check(options: Options) -> None:
    """Raises Refused if the devices of the mesh do not divide the sizes or the batch."""
    sizes, axes = options.sizes, options.axes
    if sizes.features % sizes.heads:
        raise Refused(
            f"--features {sizes.features} are not divisible by --heads {sizes.heads}: choose "
            f"--features {_next_multiple(sizes.features, sizes.heads)}, say"
        )
    if VOCABULARY % axes.tensor:
        raise Refused(
            f"the vocabulary of {VOCABULARY} bytes is not divisible by --tensor {axes.tensor}: choose a power of two"
        )
    tensor, fsdp = f"--tensor {axes.tensor}", f"--fsdp {axes.fsdp}"
    for name, divisor, by in (
        ("heads", axes.tensor, tensor),
        ("sequence", axes.tensor, tensor),
        ("hidden", axes.tensor, tensor),
        ("features", axes.fsdp, fsdp),
    ):
        if (size := getattr(sizes, name)) % divisor:
            raise Refused(
                f"--{name} {size} is not divisible by {by} devices: choose --{name} "
                f"{_next_multiple(size, divisor)}, say, or another mesh"
            )
    parts = axes.data * axes.fsdp * options.accumulate
    if options.training.batch % parts:
        raise Refused(
            f"--batch {options.training.batch} is not divisible by --data {axes.data} × --fsdp {axes.fsdp} × "
            f"--accumulate {options.accumulate} = {parts}: choose --batch "
            f"{_next_multiple(options.training.batch, parts)}, say"
        )


def _next_multiple(size: int, divisor: int) -> int:
    return math.ceil(size / divisor) * divisor


def _check_compare(options: Options) -> None:
    if options.implementation != "auto":
        raise Refused(
            f"--compare trains with both implementations, so --implementation {options.implementation} contradicts "
            "it: leave one of them out"
        )
    if options.axes.tensor == 1:
        raise Refused("--compare compares sums over the devices of --tensor, and that is 1: choose 2 or more")
    try:
        check(in_another_order(options))
    except Refused as reason:
        raise Refused(f"--compare trains with the sums split in another way as well, and there {reason}") from None


def in_another_order(options: Options) -> Options:
    """Returns the options of the same training with each product split among fewer devices.

    The results differ by the order of summation only.
    """
    axes = options.axes
    factor = next(number for number in range(2, axes.tensor + 1) if axes.tensor % number == 0)
    return dataclasses.replace(
        options, axes=dataclasses.replace(axes, data=axes.data * factor, tensor=axes.tensor // factor)
    )


def check_text(options: Options, size_bytes: int) -> None:
    """Raises Refused if the text is shorter than one sequence."""
    needed = options.sizes.sequence + 1
    if size_bytes < needed:
        raise Refused(
            f"the text has {size_bytes} bytes, and --sequence {options.sizes.sequence} takes {needed}: give more "
            "--text, or choose a shorter --sequence"
        )
