"""The command line of examples/train.py, and the checks that its options fit together."""

from __future__ import annotations

import argparse
import math
import os
import pathlib

import jax

import overlap
from gpt.model import VOCABULARY
from overlap.cli.arguments import Parser, WrongArguments, finite_number, whole_number
from overlap.cli.devices import why_no_gpu

# On CPU devices a run of a minute on two cores; on GPUs large enough to keep them busy; emulated a run of some minutes.
# XLA multiplies bfloat16 slowly on CPUs, and the kernels take no float32.
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
_EMULATION_THREADS = 8


def parser() -> argparse.ArgumentParser:
    """Makes the parser. Options whose defaults depend on the machine are None until `complete` sets them."""
    made = Parser(
        "examples/train.py",
        description="Trains a small GPT of overlap's layers: data parallel × FSDP × tensor parallel, on the visible "
        "GPUs, else on CPU devices. The same command again goes on from the last checkpoint.",
    )
    at_least_1 = whole_number(at_least=1)
    for name, what in (
        ("layers", "blocks of attention and MLP"),
        ("features", "width of the activations between blocks"),
        ("heads", "heads of the attention"),
        ("hidden", "width inside the MLP"),
        ("sequence", "tokens, that is bytes, that the model sees at once"),
        ("batch", "sequences of a step, on all devices together"),
        ("steps", "steps in all"),
        ("text_mb", "MB of stories"),
    ):
        text = f"{what} (default: {_ON_CPUS[name]} on CPU devices, {_ON_GPUS[name]} on GPUs)"
        made.add_argument(f"--{name.replace('_', '-')}", type=at_least_1, metavar="N", help=text)
    made.add_argument("--dtype", choices=("bfloat16", "float32"), help="of products and activations")
    made.add_argument(
        "--implementation",
        choices=("auto", "fused", "xla"),
        default="auto",
        help="auto: for each product what was measured to be faster; without GPUs fused kernels are emulated, slowly, "
        "and auto is xla (default: auto)",
    )
    made.add_argument("--remat", action="store_true", help="compute each block again in the backward pass: less memory")
    made.add_argument(
        "--accumulate", type=at_least_1, default=1, metavar="N", help="parts of a batch, one after the other"
    )
    made.add_argument(
        "--learning-rate",
        type=finite_number("any size", above=0),
        metavar="X",
        help="after the warmup; then it falls as a cosine (default: 3e-3 on CPU devices, 3e-4 on GPUs)",
    )
    made.add_argument("--warmup", type=whole_number(0), metavar="N", help="steps (default: a tenth of all)")
    made.add_argument("--seed", type=whole_number(0), default=0, metavar="N", help="of weights, text and batches")
    made.add_argument("--text", nargs="+", metavar="FILE", help="learn these files (default: short stories)")
    made.add_argument("--data", type=at_least_1, metavar="N", help="devices that share a batch")
    made.add_argument("--fsdp", type=at_least_1, metavar="N", help="devices that share a batch and the weights")
    made.add_argument("--tensor", type=at_least_1, metavar="N", help="devices that share each product")
    made.add_argument(
        "--out", type=pathlib.Path, help="for checkpoints, losses and plot (default: out/train, or out/compare)"
    )
    made.add_argument("--checkpoint-every", type=at_least_1, default=100, metavar="N", help="steps (default: 100)")
    made.add_argument("--print-every", type=at_least_1, default=20, metavar="N", help="steps (default: 20)")
    made.add_argument(
        "--compare",
        action="store_true",
        help="train by XLA, by XLA in another order of sums, and fused; compare the losses",
    )
    return made


def start(options: argparse.Namespace) -> None:
    """Joins the job of a launcher, if there is one, and sets the axes of the mesh. Call it before devices are used.

    Chosen are: one device along fsdp; on GPUs as many along tensor as there are, up to 8, and the rest along data; on
    CPU devices two along data and two along tensor.
    """
    without_gpus = why_no_gpu()
    if without_gpus:
        jax.config.update("jax_platforms", "cpu")
    overlap.initialize()  # One process per device under mpirun, srun or torchrun. In a single process it does nothing.
    if without_gpus and not jax.distributed.is_initialized():
        options.data, options.tensor = options.data or 2, options.tensor or 2
        count = options.data * options.tensor * (options.fsdp or 1)
        jax.config.update("jax_num_cpu_devices", count)
        # XLA's thread pool has a thread for each core, or as many as NPROC says. A thread inside an emulated kernel
        # waits for the other devices, which need threads of their own to reach that kernel.
        os.environ.setdefault("NPROC", str(_EMULATION_THREADS * count))
    complete(options, devices=jax.device_count(), processes=jax.process_count(), gpus=jax.default_backend() == "gpu")


def complete(options: argparse.Namespace, *, devices: int, processes: int, gpus: bool) -> None:
    """Sets the options that were not given. Raises `WrongArguments` if they do not fit together."""
    emulated = not gpus and (options.compare or options.implementation == "fused")
    for name, default in (_ON_GPUS if gpus else _EMULATED if emulated else _ON_CPUS).items():
        setattr(options, name, default if getattr(options, name) is None else getattr(options, name))
    options.warmup = options.steps // 10 if options.warmup is None else options.warmup
    options.out = options.out or pathlib.Path("out", "compare" if options.compare else "train")
    options.fsdp = options.fsdp or 1
    rest = devices // ((options.data or 1) * options.fsdp * (options.tensor or 1))
    if options.tensor is None:
        # At most the GPUs of one host, since the devices along this axis communicate in every product.
        options.tensor = max(number for number in (1, 2, 4, 8) if max(rest, 1) % number == 0)
        rest //= options.tensor
    options.data = options.data or max(rest, 1)
    mesh = options.data * options.fsdp * options.tensor
    if mesh > devices or (processes > 1 and mesh != devices):
        raise WrongArguments(
            f"train: --data {options.data} × --fsdp {options.fsdp} × --tensor {options.tensor} asks for {mesh} "
            f"devices, and there are {devices} in {processes} processes: choose axes whose product is that"
        )
    if emulated and processes > 1:
        raise WrongArguments("train: fused kernels are emulated in one process: start one, or leave the option out")
    if options.compare and (options.tensor == 1 or options.implementation != "auto"):
        raise WrongArguments("train: --compare takes --tensor 2 or more, and no --implementation")
    check(options)


def check(options: argparse.Namespace) -> None:
    """Raises `WrongArguments` if the mesh does not divide the sizes or the batch."""
    parts = options.data * options.fsdp * options.accumulate
    for name, divisor, by in (
        ("features", options.heads, f"--heads {options.heads}"),
        ("features", options.fsdp, f"--fsdp {options.fsdp}"),
        ("heads", options.tensor, f"--tensor {options.tensor}"),
        ("hidden", options.tensor, f"--tensor {options.tensor}"),
        ("sequence", options.tensor, f"--tensor {options.tensor}"),
        ("batch", parts, f"--data {options.data} × --fsdp {options.fsdp} × --accumulate {options.accumulate}"),
    ):
        if (size := getattr(options, name)) % divisor:
            fits = math.ceil(size / divisor) * divisor
            raise WrongArguments(f"train: --{name} {size} is not divisible by {by}: choose --{name} {fits}, say")
    if VOCABULARY % options.tensor:
        raise WrongArguments(f"train: the vocabulary of 256 is not divisible by --tensor {options.tensor}")
