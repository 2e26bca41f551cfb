"""Compares whole training steps by `overlap.layers` with the program that a user has without this library.

    python -m benchmarks step --out benchmarks/results
    python -m benchmarks step --models gpt --layouts tensor --methods plain fused --profile

A step is forward, backward and AdamW of a stack of transformer blocks; `benchmarks.step_program` says which. The models
have the widths of Llama 3 8B and 70B, of the GPT of `make train` (without its vocabulary) and of Qwen3-30B, whose MLPs
are experts, and few blocks. The experts of the plain methods are `benchmarks.expert_rival`, for layout `tensor`. The
layouts: `tensor` (each product is shared), `fsdp` (batch and weights are), `both` (two times half the GPUs). The
methods:

    plain         `examples/plain_layers.py`: matrix products on global arrays, which XLA's partitioner distributes
    plain between the same, constrained between layers only: inside a layer XLA chooses what it moves
    plain hiding  plain with `--xla_gpu_enable_latency_hiding_scheduler=true`
    chosen        `overlap.layers` with implementation=None
    fused         `overlap.layers` with implementation="fused"
    layers xla    `overlap.layers` with implementation="xla"

Each method runs in a process of its own, under a time limit: flags of XLA and the peak of memory belong to a process.
In each round the methods run in another order. A method whose losses differ from those of plain by more than rounding
has no times. "plain" in ratios is the fastest of the plain methods.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks import command, environment, kernel_times, known_models, report
from benchmarks.step_program import LAYERS, Case
from overlap import _cuda
from overlap.cli import console, ending
from overlap.cli.arguments import WrongArguments, finite_number, whole_number

METHODS = tuple(LAYERS)
LAYOUTS = ("tensor", "fsdp", "both")
PLAIN = ("plain", "plain between", "plain hiding")
_FLAGS = {"plain hiding": "--xla_gpu_enable_latency_hiding_scheduler=true"}
# The largest relative difference of a loss from plain's. Products are rounded to bfloat16 (2^-8) in another order.
LOSS_BOUND = 2.0**-7
_COLUMNS = ("method", "status", "rounds", "loop_us", "loop_us_p10", "loop_us_p90", "xla_over_this", "peak_gib",
            "peak_over_plain", "first_call_s", "loss_difference")  # fmt: skip
_DRY_DEVICES = 2
_GIB = 2.0**30
Result = dict[str, Any]  # What `step_program.measure` returns, and "facts"; or "error": why there is no result.


@dataclasses.dataclass(frozen=True)
class Model:
    """A model to train: the sizes of a block, how many there are, and by layout the sequences of a step.

    With experts, `sizes.mlp` is the width of one.
    """

    sizes: known_models.Model
    layers: int
    sequences: Mapping[str, int]
    tokens: int = 2048
    experts: int = 0
    experts_per_token: int = 0


MODELS = {
    "gpt": Model(known_models.Model(2048, 6144, 16, 16), 8, {"tensor": 16, "fsdp": 16, "both": 16}),
    "llama-8b": Model(known_models.MODELS["Llama 3 8B"], 4, {"tensor": 4, "fsdp": 16, "both": 8}),
    "llama-70b": Model(known_models.MODELS["Llama 3 70B"], 2, {"tensor": 4, "fsdp": 4, "both": 4}),
    "qwen3-30b": Model(known_models.Model(2048, 768, 32, 4, 128), 4, {"tensor": 8}, experts=128, experts_per_token=8),
    "tiny": Model(known_models.Model(64, 128, 4, 2, 16), 1, {"tensor": 2, "fsdp": 2, "both": 2}, tokens=32),
}


def case_of(model: str, layout: str, devices: int, arguments: argparse.Namespace) -> Case:
    """Returns what to train. There are at least as many sequences as devices that share the batch.

    Raises:
      WrongArguments: the devices do not divide a size.
    """
    given = MODELS[model]
    fsdp = {"tensor": 1, "fsdp": devices, "both": 2}[layout]
    case = Case(
        **dataclasses.asdict(given.sizes),
        layers=arguments.layers or given.layers,
        sequences=arguments.sequences or max(given.sequences.get(layout, 1), fsdp),
        tokens=arguments.tokens or given.tokens,
        fsdp=fsdp,
        tensor=devices // fsdp,
        experts=given.experts,
        experts_per_token=given.experts_per_token,
    )
    misfit = f"it needs an even number of devices, got {devices}" if case.devices != devices else case.misfit()
    if misfit:
        raise WrongArguments(f"step: {model}, {layout}: {misfit}: choose others by --devices, --models or --layouts")
    return case


# --- Processes --------------------------------------------------------------------------------------------------------


def run_process(case: Case, method: str, arguments: argparse.Namespace, code: Mapping[str, str]) -> Result:
    """Measures one method in a process of its own."""
    given = {
        "case": dataclasses.asdict(case),
        "method": method,
        "profiled": arguments.profile,
        "on_cpus": arguments.dry_run,
        "code": dict(code),
    }
    # A cache of programs would shorten the first call of the next process.
    variables = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    variables["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAGS.get(method, '')}".strip()
    return called([sys.executable, "-m", "benchmarks.step_program", json.dumps(given)], variables, arguments.timeout_s)


def called(line: Sequence[str], variables: Mapping[str, str], timeout_s: float) -> Result:
    """Runs a command line, whose last line of output is a result. Returns the result, or an "error"."""
    try:
        done = subprocess.run(
            line, env=variables, cwd=environment.REPOSITORY, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, errors="replace", timeout=timeout_s, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"error": f"did not end within {timeout_s:g} s"}
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["nothing on standard error"]
        sys.stderr.write(done.stderr)
        return {"error": f"exit status {done.returncode}: {said[-1][:300]}"}
    return json.loads(done.stdout.splitlines()[-1])


def measure(case: Case, title: str, arguments: argparse.Namespace, code: Mapping[str, str]) -> dict[str, list[Result]]:
    """Runs all methods in all rounds. Returns the results of each method. One that fails is not started again."""
    results: dict[str, list[Result]] = {method: [] for method in arguments.methods}
    for number in range(arguments.rounds):
        for method in np.random.default_rng(number).permutation(arguments.methods).tolist():
            if any("error" in result for result in results[method]):
                continue
            start = time.monotonic()
            results[method].append(result := run_process(case, method, arguments, code))
            took = f"{time.monotonic() - start:.0f} s in all"
            said = result.get("error") or f"{statistics.median(result['ms']):.1f} ms"
            print(f"{title}, {method}, round {number + 1}: {said}, {took}", file=sys.stderr, flush=True)
    return results


# --- Results ----------------------------------------------------------------------------------------------------------


def difference(losses: Sequence[float], expected: Sequence[float]) -> float:
    """Returns the largest relative difference of the losses of a run from those of another one."""
    return max(abs(loss - right) / abs(right) for loss, right in zip(losses, expected, strict=True))


def of_method(method: str, results: Sequence[Result], expected: Sequence[float] | None) -> dict[str, Any]:
    """Returns the row of a method, without ratios. `expected`: the losses of plain, if there are any.

    A method that failed, or whose losses are wrong, gets no times.
    """
    row: dict[str, Any] = dict.fromkeys(_COLUMNS) | {"method": method, "status": "ok", "rounds": len(results)}
    if errors := [result["error"] for result in results if "error" in result]:
        return row | {"status": f"ERROR {errors[0]}"}
    if expected is not None:
        row["loss_difference"] = max(difference(result["losses"], expected) for result in results)
        if not row["loss_difference"] <= LOSS_BOUND:
            return row | {"status": f"FAILED: a loss differs from plain's by {row['loss_difference']:.1e}"}
    peaks = [result["peak_bytes"] for result in results if result["peak_bytes"] is not None]
    row |= report.spread("loop_us", [1e3 * ms for result in results for ms in result["ms"]])
    row["first_call_s"] = statistics.median(result["first_call_s"] for result in results)
    return row | {"peak_gib": max(peaks) / _GIB if peaks else None}


def rows_of(results: Mapping[str, Sequence[Result]]) -> list[dict[str, Any]]:
    """Returns a row for each method. "xla_over_this" and "peak_over_plain" compare it with the faster plain method."""
    sound = [result for name in PLAIN for result in results.get(name, ()) if "error" not in result]
    expected = sound[0]["losses"] if sound else None
    rows = [of_method(method, found, expected) for method, found in results.items()]
    plain = min(
        (row for row in rows if row["method"] in PLAIN and row["status"] == "ok"),
        key=lambda row: row["loop_us"],
        default=None,
    )
    if plain is None:
        return rows
    for row in rows:
        if row["loop_us"] is not None:
            row["xla_over_this"] = plain["loop_us"] / row["loop_us"]
        if row["peak_gib"] is not None and plain["peak_gib"] is not None:
            row["peak_over_plain"] = row["peak_gib"] / plain["peak_gib"]
    return rows


def show(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints the table of one model and layout, in 80 columns, and below it why a method has no times.

    "spread" is that of the times of a step, from p10 to p90; "× plain" is the peak of memory as a multiple of plain's.
    """
    forms = (("xla_over_this", ".3f"), ("peak_gib", ".1f"), ("peak_over_plain", ".2f"), ("first_call_s", ".1f"),
             ("loss_difference", ".0e"))  # fmt: skip
    texts = []
    for row in rows:
        us = row["loop_us"]
        spread = (row["loop_us_p90"] - row["loop_us_p10"]) / us if us else None
        times = report.number(us / 1e3 if us else None, ".1f"), report.number(spread, ".1%")
        texts.append((row["method"], *times, *(report.number(row[name], form) for name, form in forms)))
    headings = ("method", "ms", "spread", "plain/this", "GiB", "× plain", "1st s", "loss")
    console.show(console.console(), title, headings, texts, texts=1)
    for row in rows:
        if row["status"] != "ok":
            print(f"  {row['method']}: {row['status']}", flush=True)


# --- The command ------------------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    """Makes the parser of the command."""
    made = command.tool_parser("step", __doc__)
    for name, known in (("models", [name for name in MODELS if name != "tiny"]), ("layouts", LAYOUTS),
                        ("methods", METHODS)):  # fmt: skip
        made.add_argument(f"--{name}", nargs="+", choices=known, default=known, help=f"(default: {', '.join(known)})")
    for name, what in (("layers", "blocks of a model"), ("sequences", "sequences of a step, on all devices together"),
                       ("tokens", "tokens of a sequence")):  # fmt: skip
        made.add_argument(f"--{name}", type=whole_number(1), help=f"{what} (default: by model and layout)")
    made.add_argument("--devices", type=whole_number(1), help="how many devices (default: all)")
    made.add_argument("--rounds", type=whole_number(1), default=2, help="processes of each method (2)")
    seconds = finite_number("seconds", above=0.0)
    made.add_argument("--timeout-s", type=seconds, default=300.0, help="the most seconds of a process (300)")
    made.add_argument("--profile", action="store_true", help="print where the time of a step goes, kernel by kernel")
    made.add_argument("--commit", metavar="HASH", help="the commit whose code this is; needed where there is no .git")
    made.add_argument("--out", type=pathlib.Path, metavar="DIR", help="folder of tables that the run brings up to date")
    made.add_argument("--dry-run", action="store_true", help="2 CPU devices and a tiny model, to test the harness")
    return made


def devices_of(arguments: argparse.Namespace) -> int:
    """Returns how many devices to use. This process leaves their memory to the others: it starts no backend of jax.

    Raises:
      WrongArguments: there are fewer, or there is no GPU.
    """
    if arguments.dry_run:
        return arguments.devices or _DRY_DEVICES
    command.need_gpus()
    available = len(_cuda.visible_gpus())
    if (arguments.devices or 0) > available:
        raise WrongArguments(f"step: `--devices` must be at most {available} here, got {arguments.devices}")
    return arguments.devices or available


def main(argv: Sequence[str] | None = None) -> int:
    """Measures all cases. Returns the exit status: 1 if a method failed."""
    arguments = parser().parse_args(argv)
    devices = devices_of(arguments)
    code = environment.code_facts(arguments.commit, dry_run=arguments.dry_run)
    models = ["tiny"] if arguments.dry_run else arguments.models
    # Make all cases before the first one runs, so that a size that does not fit ends the command at once.
    cases = {
        (model, layout): case_of(model, layout, devices, arguments) for model in models for layout in arguments.layouts
    }
    all_ok = [run(case, f"{model}, {layout}", arguments, code) for (model, layout), case in cases.items()]
    return int(not all(all_ok))


def run(case: Case, title: str, arguments: argparse.Namespace, code: Mapping[str, str]) -> bool:
    """Measures, shows and writes one case. Returns whether all methods have times."""
    results = measure(case, title, arguments, code)
    rows = rows_of(results)
    sizes = f"{case.layers} layers, {case.sequences} sequences of {case.tokens} tokens"
    show(f"step of {title} on {case.devices} devices, {sizes}", rows)
    sound = {method: found[0] for method, found in results.items() if "error" not in found[0]}
    for method, result in sound.items():
        if "kernels" in result:
            print(kernel_times.text(f"{title}, {method}", result["kernels"]), flush=True)
    if arguments.out is not None and sound:
        shape = f"{case.sequences}x{case.tokens}x{case.hidden}x{case.mlp}x{case.layers}"
        problem = {"op": "step", "devices": case.devices, "shape": shape, "dtype": "bf16", "layout": title}
        facts = next(iter(sound.values()))["facts"]
        print(f"wrote {report.add(arguments.out, [problem | row for row in rows], facts)}", flush=True)
    return all(row["status"] == "ok" for row in rows)


if __name__ == "__main__":
    sys.exit(ending.run(main))
