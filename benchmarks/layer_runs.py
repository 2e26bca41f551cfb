"""Sets up the benchmarks of blocks, layers and backward products, times their loops of turns, and records the results.

XLA is measured twice, since flags make it faster or slower: `RIVALS`. All ratios refer to the faster one. In each round
the loops run in another random order, each for about 100 ms untimed, since the clocks that the loop before has left
take a while to change, and then as long timed. A time contains the 0.1 to 0.4 ms of starting that. "xla again" is the
loop of "xla" timed once more: what its ratio differs from 1 by, and how its ratios spread, is the error of a table.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.typing import DTypeLike

import overlap
from benchmarks import command, environment, known_models, report
from overlap.cli import console
from overlap.cli.arguments import WrongArguments, whole_number
from overlap.tuning.timing import elapsed_s

# XLA's methods, each with its flags. NVIDIA's images set the flag of "xla hiding". With the flags of "xla windowed" XLA
# cuts a gather or scatter, and runs each part beside a part of the product.
RIVALS: dict[str, dict[str, int | bool]] = {
    "xla": {},
    "xla hiding": {"xla_gpu_enable_latency_hiding_scheduler": True},
    "xla windowed": {
        "xla_gpu_threshold_for_windowed_einsum_mib": 0,
        "xla_gpu_multi_streamed_windowed_einsum": True,
        "xla_gpu_enable_latency_hiding_scheduler": True,
    },
}
CONTROL = "xla again"
_OVER_THIS = ("xla_over_this", "xla_over_this_p10", "xla_over_this_p90")
type Layer = Callable[[Any, jax.Array], jax.Array]  # (weights, x) -> out, of global arrays
PASSES = ("forward", "forward and backward")
MODELS = {
    "llama-70b": known_models.MODELS["Llama 3 70B"],
    "llama-8b": known_models.MODELS["Llama 3 8B"],
    "qwen-32b": known_models.MODELS["Qwen 3 32B"],
    "tiny": known_models.Model(64, 128, 4, 2, 16),
}
_DRY_DEVICES, _DRY_TOKENS = 2, 64
# Each turn of a layer enlarges the differences of rounding several times, so that after five turns two right results
# of bf16 have little in common. Loops are short enough to be compared.
_US_PER_LOOP, _FLOPS_PER_US = 10e3, 600e6
# A loop is launched so many times in a row, so that the clocks settle: the GPUs are at their power limit.
_LAUNCHES = 10


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of a benchmark.

    Attributes:
      name: the name of the benchmark, which is the operation in its table.
      arguments: the options.
      facts: where and with what the benchmark runs, by name.
      devices: the devices to use, each a `jax.Device`, which type checkers do not accept as a type.
    """

    name: str
    arguments: argparse.Namespace
    facts: Mapping[str, str]
    devices: Sequence[Any]

    def problems(self) -> Iterator[tuple[str, known_models.Model, int]]:
        """Yields the name and the sizes of each model, with each number of tokens."""
        return ((name, MODELS[name], tokens) for name in self.arguments.models for tokens in self.arguments.tokens)

    def turns(self, flops: float) -> int:
        """Returns how many turns of `flops` operations, on all devices together, take about 10 ms."""
        of_device = flops / len(self.devices)
        return 1 if self.arguments.dry_run else max(1, int(_US_PER_LOOP / (of_device / _FLOPS_PER_US)))

    def add(self, shape: str, case: str, times: Mapping[str, Sequence[float]]) -> None:
        """Prints the times of one problem, and adds them to the table. Only process 0 does so.

        Args:
          shape: the sizes of the problem, separated by x.
          case: what else distinguishes the problem, such as the pass; for the column `layout`.
          times: for each method the microseconds of a turn, in each round: "xla", others of `RIVALS`, and more. Without
            any of `RIVALS` there are no ratios to XLA.
        """
        if jax.process_index():
            return
        best = min((times[name] for name in RIVALS if name in times), key=statistics.median, default=None)
        problem = {"op": self.name, "devices": len(self.devices), "shape": shape, "dtype": "bf16", "layout": case}
        rows: list[dict[str, Any]] = []
        for method, us in times.items():
            row = {"method": method, "status": "ok", "roof_over_this": report.ratio(times.get("roof", ()), us)}
            row |= report.spread("loop_us", us) | dict.fromkeys(_OVER_THIS)
            if best is not None:
                # The control is compared with its twin.
                of_rounds = np.divide(times["xla"] if method == CONTROL else best, us).tolist()
                row |= report.spread(_OVER_THIS[0], of_rounds)
            rows.append(problem | row | {"rounds": len(us)})
        shown = [
            (
                row["method"],
                f"{row['loop_us']:.0f}",
                f"{row['loop_us_p10']:.0f} to {row['loop_us_p90']:.0f}",
                *(report.number(row[name], ".3f") for name in (*_OVER_THIS, "roof_over_this")),
            )
            for row in rows
        ]
        headings = ("method", "µs", "p10 to p90", "xla/this", "p10", "p90", "roof/this")
        console.show(console.console(), f"{self.name} {shape} {case}", headings, shown, texts=1)
        if self.arguments.out is not None:
            print(f"wrote {report.add(self.arguments.out, rows, self.facts)}", flush=True)


def numbers(text: str) -> list[int]:
    """Reads the value of an option: whole numbers of at least 1, separated by commas."""
    return [whole_number(1)(each) for each in text.split(",")]


def begin(
    name: str,
    doc: str | None,
    choices: Mapping[str, Sequence[str]],
    argv: Sequence[str] | None,
    tokens: str,
    needs_xla: bool = True,
) -> Run:
    """Reads the options, sets up the devices, and returns the run. With `--dry-run` it uses 2 CPU devices.

    `choices` has by the name of an option what it may select. By default that is all but "tiny" and "xla windowed".
    `needs_xla`: whether the methods must contain "xla".

    Raises:
      WrongArguments: there is no GPU, the code differs from the commit, or the devices are too few or divide no sizes.
    """
    parser = command.tool_parser(name, doc)
    choices = {"models": tuple(MODELS), **choices}
    for option, known in choices.items():
        default = [each for each in known if each not in ("tiny", "xla windowed")]
        parser.add_argument(f"--{option}", nargs="+", choices=known, default=default, help="(default: %(default)s)")
    parser.add_argument("--tokens", type=numbers, default=tokens, help="of all devices, separated by commas")
    parser.add_argument("--devices", type=whole_number(1), help="how many devices (default: all)")
    parser.add_argument("--rounds", type=whole_number(1), default=21, help="how often everything is timed (21)")
    parser.add_argument("--commit", metavar="HASH", help="the commit whose code this is; needed where there is no .git")
    parser.add_argument(
        "--out", type=pathlib.Path, metavar="DIR", help="folder of tables that the run brings up to date"
    )
    parser.add_argument("--dry-run", action="store_true", help="2 CPU devices and tiny sizes, to test the harness")
    arguments = parser.parse_args(argv)
    if arguments.dry_run:
        arguments.models, arguments.tokens, arguments.rounds = ["tiny"], [_DRY_TOKENS], 1
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", _DRY_DEVICES)
    else:
        command.need_gpus()
    code = environment.code_facts(arguments.commit, dry_run=arguments.dry_run)
    overlap.initialize()
    count = arguments.devices or jax.device_count()
    if count > jax.device_count():
        raise WrongArguments(f"{name}: `--devices` must be at most {jax.device_count()} here, got {count}")
    if needs_xla and "xla" not in arguments.methods:
        raise WrongArguments(f"{name}: `--methods` must contain xla, with which the others are compared")
    for model in arguments.models:
        if (heads := MODELS[model].kv_heads if model in MODELS else 0) % count:
            raise WrongArguments(f"{name}: {count} devices do not divide the {heads} heads of keys of {model}")
    if rest := [tokens for tokens in arguments.tokens if tokens % count]:
        raise WrongArguments(f"{name}: `--tokens` must be multiples of the {count} devices, got {rest[0]}")
    return Run(name, arguments, environment.describe(count, code), jax.devices()[:count])


# --- Loops of layers --------------------------------------------------------------------------------------------------


def normalized(values: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Scales each row to a mean square of 1, so that no row grows or vanishes over the turns of a loop.

    (Scaled together, the rows of a gated MLP would: their norms are squared in every turn. Zeros take less power.)
    """
    wide = values.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-12)).astype(dtype)


def loop(layer: Layer, backward: bool, turns: int, flags: dict[str, int | bool] | None) -> Any:
    """Returns a jitted loop of `turns` turns of a layer, as a function (x, weights) -> (x, weights).

    With `backward`, a turn also computes all gradients. They start from a cotangent that is computed from the layer's
    result, as in training: else XLA would leave out the last product.
    """

    def turn(_: Any, state: Any) -> Any:
        x, weights = state
        if not backward:
            return normalized(layer(weights, x), x.dtype), weights
        y, pull = jax.vjp(layer, weights, x)
        d_weights, d_x = pull(normalized(y, y.dtype))
        # The weights use all gradients, so XLA computes all of them.
        moved = jax.tree.map(lambda w, d: w + (1e-6 * d).astype(w.dtype), weights, d_weights)
        return normalized(d_x, x.dtype), moved

    run = lambda x, weights: lax.fori_loop(0, turns, turn, (x, weights))  # noqa: E731
    return jax.jit(run, compiler_options=flags)


def flags_of(method: str, mesh: Mesh) -> dict[str, int | bool] | None:
    """Returns the compiler options of a method. They are for GPUs only."""
    return RIVALS.get(method) if mesh.devices.flat[0].platform == "gpu" else None


def compiled(
    program: Callable[[str], Any],
    methods: Sequence[str],
    given: Callable[[str], tuple[Any, ...]],
    allowed: float,
    carried: bool = False,
) -> dict[str, Callable[[], tuple[Any, ...]]]:
    """Compiles the loops of some methods, and compares their first results with XLA's.

    Returns for each method a function that starts its loop, and returns the outputs.

    Args:
      program: returns the jitted loop of a method, a function of `given` to a tuple.
      methods: the names of the methods; "xla" is one of them.
      given: returns the arguments of a method's loop.
      allowed: the largest relative difference from XLA.
      carried: whether a launch gets what the one before has returned. Then the last output is compared, else the first.

    Raises:
      AssertionError: a method's result differs from XLA's.
    """
    loops: dict[str, Callable[[], tuple[Any, ...]]] = {}
    expected: Any = None
    for name in sorted(methods, key=lambda name: name != "xla"):
        state = given(name)
        loop = program(name).lower(*state).compile()

        def launch(loop: Any = loop, state: list[Any] = [*state]) -> tuple[Any, ...]:  # noqa: B006
            out = loop(*state)
            if carried:
                state[:] = out
            return out

        loops[name] = launch
        results = loops[name]()[-1 if carried else 0]
        expected = jax.tree.map(jnp.copy, results) if expected is None else expected
        if name == "roof":  # It is not the same result: it lacks the sum over the devices.
            continue
        largest = max(map(float, jax.tree.leaves(jax.tree.map(distance, results, expected))))
        assert largest < allowed, f"{name} differs from XLA by {largest:.1e}"
    return {name: loops[name] for name in methods}


@jax.jit
def distance(result: jax.Array, expected: jax.Array) -> jax.Array:
    """Returns the relative difference of two results, in the Frobenius norm."""
    wide = expected.astype(jnp.float32)
    return jnp.linalg.norm(result.astype(jnp.float32) - wide) / jnp.linalg.norm(wide)


def times_us(loops: Mapping[str, Callable[[], Any]], rounds: int, turns: int) -> dict[str, list[float]]:
    """Times loops. Returns for each name, and for `CONTROL`, the time of a turn in each round, in microseconds.

    Args:
      loops: by name, functions that start a loop and return its outputs. One is "xla".
      rounds: how many rounds.
      turns: how many turns each loop has.
    """
    loops = {**loops, CONTROL: loops["xla"]}
    out: list[Any] = [None]
    times: dict[str, list[float]] = {name: [] for name in loops}
    for number in range(rounds):
        for name in np.random.default_rng(number).permutation(list(loops)):

            def start(loop: Callable[[], Any] = loops[name]) -> None:
                out[0] = loop()

            elapsed_s(start, lambda: out, _LAUNCHES)
            times[name].append(1e6 * elapsed_s(start, lambda: out, _LAUNCHES) / (_LAUNCHES * turns))
    return times
