"""Sets up and records the runs of `before_after`, `block` and `layer`, which each write a markdown table.

A benchmark uses this module as follows:

    parser = command.tool_parser("block", __doc__)
    experiment.add_options(parser, "block", rounds=7)
    run = experiment.begin("block", parser.parse_args(argv))
    run.head("An MLP")
    run.rows("| 1 | 2 |")
    run.finish()
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

import overlap
from benchmarks import command, current, environment
from overlap.choice.tables import replace
from overlap.cli.arguments import WrongArguments, new_folder, whole_number
from overlap.tuning.timing import elapsed_s, marginal_s

_DRY_DEVICES = 2


def add_options(parser: argparse.ArgumentParser, name: str, *, rounds: int) -> None:
    """Adds the options that all these benchmarks take. `rounds`: the default of `--rounds`."""
    parser.add_argument("--devices", type=whole_number(1), help="how many devices (default: all)")
    parser.add_argument(
        "--rounds", type=whole_number(1), default=rounds, help=f"how often everything is timed (default: {rounds})"
    )
    parser.add_argument("--commit", metavar="HASH", help="the commit whose code this is; needed where there is no .git")
    parser.add_argument("--out", type=new_folder, metavar="DIR", help=f"folder for {name}-DEVICE-COUNT-LAYOUT.md")


@dataclasses.dataclass
class Run:
    """One run of a benchmark that writes a table of its own.

    Attributes:
      name: the name of the benchmark.
      out: the folder for its table, or None.
      code: the commit that is measured, and the command line, see `command.code_facts`.
      devices: the devices to use.
      lines: the lines of the table's file so far.
    """

    name: str
    out: pathlib.Path | None
    code: Mapping[str, str]
    devices: list[Any]
    lines: list[str] = dataclasses.field(default_factory=list)

    @property
    def leads(self) -> bool:
        """Whether this process prints and writes: process 0."""
        return jax.process_index() == 0

    def head(self, title: str, **more_facts: str) -> None:
        """Begins the file with the title, and with facts: where and with what the benchmark runs."""
        processes = jax.process_count()
        layout = "one process" if processes == 1 else f"{processes} processes"
        facts = environment.describe(layout, len(self.devices), self.code) | more_facts
        self.lines += [f"# {title}", "", *(f"- {name}: {value}" for name, value in facts.items()), ""]

    def rows(self, *lines: str) -> None:
        """Adds lines to the file, and prints them."""
        self.lines += lines
        if self.leads:
            print("\n".join(lines), flush=True)

    def finish(self) -> None:
        """Writes the file, if `--out` names a folder."""
        if not self.leads:
            return
        if self.out is None:
            print("nothing was written, since there is no `--out`")
            return
        kind, processes = self.devices[0].device_kind, jax.process_count()
        path = self.out / f"{current.name_of(self.name, kind, len(self.devices), processes)}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        replace(path, "\n".join(self.lines) + "\n")
        print(f"wrote {path}", flush=True)


def begin(name: str, arguments: argparse.Namespace) -> Run:
    """Sets up the devices, and returns the run. With the option `--dry-run`, the run uses 2 CPU devices.

    Raises:
      WrongArguments: there is no GPU, the code differs from the commit, or there are fewer devices than `--devices`.
    """
    dry_run = getattr(arguments, "dry_run", None)
    if dry_run:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", _DRY_DEVICES)
    elif dry_run is None:
        command.need_gpus("it needs GPUs")
    else:
        command.need_gpus()
    code = command.code_facts(arguments.commit, dry_run=bool(dry_run))
    overlap.initialize()
    count = arguments.devices or jax.device_count()
    if count > jax.device_count():
        raise WrongArguments(f"{name}: `--devices` must be at most {jax.device_count()} here, got {count}")
    return Run(name, arguments.out, code, jax.devices()[:count])


# --- Loops of layers --------------------------------------------------------------------------------------------------


def numbers(text: str) -> list[int]:
    """Reads the value of an option: whole numbers of at least 1, separated by commas."""
    return [whole_number(1)(each) for each in text.split(",")]


def normalized(values: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Scales the values to a mean square of 1, so that they neither grow nor vanish over the turns of a loop."""
    wide = values.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.mean(wide * wide) + 1e-12)).astype(dtype)


def times_us(launches: Mapping[str, Callable[[], Any]], rounds: int, turns: int) -> dict[str, list[float]]:
    """Times loops. Returns for each name the time of a turn in each round, in microseconds.

    In each round the loops are timed in another random order.

    Args:
      launches: by name, functions that start a loop and return its outputs.
      rounds: how many rounds.
      turns: how many turns each loop has.
    """
    outs: list[Any] = [None]

    def seconds_of(launch: Callable[[], Any]) -> Callable[[int], float]:
        def start() -> None:
            outs[0] = launch()

        return lambda count: elapsed_s(start, lambda: outs, count)

    times: dict[str, list[float]] = {name: [] for name in launches}
    for number in range(rounds):
        for name in np.random.default_rng(number).permutation(list(launches)):
            times[name].append(1e6 * marginal_s(seconds_of(launches[name]), 1) / turns)
    return times
