"""Sets up the benchmarks of blocks and layers, times their loops of turns, and records the results.

A benchmark uses this module as follows:

    parser = command.tool_parser("block", __doc__)
    layer_runs.add_options(parser, rounds=7)
    layer_runs.add_out(parser)
    run = layer_runs.begin("block", parser.parse_args(argv))
    run.add("8192x8192x28672", "forward", {"fused": [9.1, 9.2], "xla": [9.5, 9.5]}, reference=[9.5, 9.5])
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

import overlap
from benchmarks import command, environment, report
from overlap.cli.arguments import WrongArguments, new_folder, whole_number
from overlap.tuning.timing import elapsed_s, marginal_s

_DRY_DEVICES = 2


def add_options(parser: argparse.ArgumentParser, *, rounds: int) -> None:
    """Adds the options that these benchmarks share. `rounds`: the default of `--rounds`."""
    parser.add_argument("--devices", type=whole_number(1), help="how many devices (default: all)")
    parser.add_argument(
        "--rounds", type=whole_number(1), default=rounds, help=f"how often everything is timed (default: {rounds})"
    )
    parser.add_argument("--commit", metavar="HASH", help="the commit whose code this is; needed where there is no .git")
    parser.add_argument("--out", type=new_folder, metavar="DIR", help="folder of tables that the run brings up to date")


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of a benchmark.

    Attributes:
      name: the name of the benchmark, which is the operation in its table.
      out: the folder of its table, or None.
      facts: where and with what the benchmark runs, by name.
      devices: the devices to use, each a `jax.Device`, which type checkers do not accept as a type.
    """

    name: str
    out: pathlib.Path | None
    facts: Mapping[str, str]
    devices: Sequence[Any]

    def add(
        self,
        shape: str,
        case: str,
        times: Mapping[str, Sequence[float]],
        reference: Sequence[float],
        notes: Mapping[str, str] | None = None,
    ) -> None:
        """Prints the times of one problem, and adds them to the table. Only process 0 does so.

        Args:
          shape: the sizes of the problem, separated by x.
          case: what else distinguishes the problem, such as the pass; for the column `layout`.
          times: for each method the microseconds of a turn, in each round.
          reference: XLA's times, to which the ratios refer.
          notes: remarks on methods.
        """
        if jax.process_index():
            return
        problem = {"op": self.name, "devices": len(self.devices), "shape": shape, "dtype": "bf16", "layout": case}
        rows = [
            problem
            | {"method": method, "status": "ok", **report.spread("loop_us", us), "rounds": len(us)}
            | {"xla_over_this": report.ratio(reference, us), "note": (notes or {}).get(method, "")}
            for method, us in times.items()
        ]
        ratios = ["–" if row["xla_over_this"] is None else f"{row['xla_over_this']:.3f}" for row in rows]
        shown = [
            [row["method"], f"{row['loop_us']:.0f}", of, row["note"]] for row, of in zip(rows, ratios, strict=True)
        ]
        report.print_table(f"{self.name} {shape} {case}", ("method", "µs", "xla/this", "note"), shown)
        if self.out is not None:
            print(f"wrote {report.add(self.out, rows, self.facts)}", flush=True)


def begin(name: str, arguments: argparse.Namespace, **more_facts: str) -> Run:
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
    processes = jax.process_count()
    layout = "one process" if processes == 1 else f"{processes} processes"
    facts = environment.describe(layout, count, code) | more_facts
    return Run(name, getattr(arguments, "out", None), facts, jax.devices()[:count])


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
