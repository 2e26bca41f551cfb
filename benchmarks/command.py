"""The command line that all tables share: it sets devices up, runs each problem, prints and writes what came out."""

from __future__ import annotations

import argparse
import datetime
import faulthandler
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.harness import Method
    from benchmarks.methods import Variant
    from benchmarks.programs import Problem

MethodsOf = Callable[[Sequence[str], "Sequence[Variant]", int], "list[Method]"]
_DRY_SHAPE = "128x256x128"


def parser(description: str, shapes: str, methods: str, devices: bool) -> argparse.ArgumentParser:
    """The options, with a table's own defaults."""
    result = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    if devices:
        result.add_argument("--devices", type=int, default=None, help="how many devices; none: all of them")
    result.add_argument("--shapes", default=shapes, help="MxNxK[:dtype] per shard, separated by commas")
    result.add_argument("--dtype", default="f16", help="f16 or bf16, for shapes that name none")
    result.add_argument("--methods", default=methods, help="separated by commas")
    result.add_argument("--variants", nargs="*", default=[], metavar="fused:FIELD=VALUE,...", help="configs of fused")
    result.add_argument("--rounds", type=int, default=7, help="how often every method is timed")
    result.add_argument("--iterations", type=int, default=20, help="calls in one program")
    result.add_argument("--launches", type=int, default=5, help="programs per time in the loop")
    result.add_argument("--calls", type=int, default=20, help="calls per wall time")
    result.add_argument("--warmup-s", type=float, default=1.0, help="seconds of the roof before the first round")
    result.add_argument("--seed", type=int, default=None, help="of the inputs; none: from the clock")
    result.add_argument("--example-configs", type=int, default=3, help="how many configs jax_example is tuned over")
    result.add_argument("--kernel-time", action="store_true", help="the longest kernel of a call as well, by CUPTI")
    result.add_argument("--timeout-s", type=int, default=180, help="of one step; a hang then ends the run with a trace")
    result.add_argument("--out", default=None, metavar="DIR", help="write CSV and markdown here")
    result.add_argument("--name", default=None, help="stem of the files; none: operation, devices and date")
    result.add_argument("--dry-run", action="store_true", help="CPU devices and tiny sizes, to test the harness")
    return result


def problems(arguments: argparse.Namespace, op: str, devices: int) -> list[Problem]:
    """The problems that `--shapes` and `--dtype` name."""
    from benchmarks.programs import DTYPES, Problem

    result = []
    for text in arguments.shapes.split(","):
        shape, _, dtype = text.strip().partition(":")
        dtype = dtype or arguments.dtype
        sizes = shape.split("x")
        if len(sizes) != 3 or not all(size.isdigit() for size in sizes) or dtype not in DTYPES:
            raise SystemExit(f"`--shapes` must list MxNxK[:dtype] with dtype {' or '.join(DTYPES)}, got {text!r}")
        m, n, k = map(int, sizes)
        result.append(Problem(op, devices, m, n, k, dtype))
    return result


def _set_up(arguments: argparse.Namespace, devices: int | None) -> None:
    import jax

    import overlap

    if arguments.dry_run:
        jax.config.update("jax_platforms", "cpu")
        if arguments.shapes == arguments.default_shapes:
            arguments.shapes = getattr(arguments, "dry_shape", _DRY_SHAPE)
        small = {"rounds": 2, "iterations": 2, "launches": 1, "calls": 1, "warmup_s": 0.0}
        for name, value in small.items():
            setattr(arguments, name, min(getattr(arguments, name), value))
    # XLA's own methods do without the NCCL that the fused kernels ask for.
    names = arguments.methods.split(",")
    overlap.initialize(check_nccl="fused" in names or "jax_example" in names)
    if arguments.dry_run and not jax.distributed.is_initialized():
        jax.config.update("jax_num_cpu_devices", devices or 2)


def run(arguments: argparse.Namespace, op: str, methods_of: MethodsOf, devices: int | None, roof: str = "roof") -> int:
    """Measures every problem of the command line; the exit status is 0 if all but JAX's example were right."""
    _set_up(arguments, devices)
    import jax
    import numpy as np
    from jax.experimental import multihost_utils
    from jax.sharding import Mesh

    from benchmarks import environment, report
    from benchmarks.harness import Session, Settings
    from benchmarks.methods import Variant
    from benchmarks.programs import AXIS

    count = devices or jax.device_count()
    if count > jax.device_count() or (jax.process_count() > 1 and count != jax.device_count()):
        raise SystemExit(f"`--devices` must be {jax.device_count()} here (at most, in one process), got {count}")
    mesh = Mesh(np.array(jax.devices()[:count]), (AXIS,))
    leader = jax.process_index() == 0
    layout = "one process" if jax.process_count() == 1 else f"{jax.process_count()} processes"
    facts = environment.describe(layout, count) if leader else {}
    stem = arguments.name or f"{op}-{count}-{datetime.date.today()}"
    writer = report.Writer(arguments.out if leader else None, stem, facts)
    seed = int(time.time()) % 2**31 if arguments.seed is None else arguments.seed
    if jax.process_count() > 1:
        seed = int(multihost_utils.broadcast_one_to_all(np.int32(seed)))
    settings = Settings(
        arguments.rounds, arguments.iterations, arguments.launches, arguments.calls, arguments.warmup_s,
        seed, arguments.kernel_time,
    )  # fmt: skip
    if leader:
        print(*(f"{name}: {value}" for name, value in facts.items()), f"seed: {settings.seed}", sep="\n", flush=True)

    def say(text: str) -> None:
        # From here on, so much time until the next word; then a trace of where it hangs, and out.
        faulthandler.dump_traceback_later(arguments.timeout_s, exit=True)
        if leader:
            print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)

    all_ok = True
    variants = [Variant.parse(text) for text in arguments.variants]
    for problem in problems(arguments, op, count):
        say(f"{problem.shape} {problem.dtype}: compiling and checking")
        session = Session(problem, mesh, settings)
        for method in methods_of(arguments.methods.split(","), variants, arguments.example_configs):
            result = session.add(method, say)
            say(f"{method.name}: {result.status}" + (f", {result.compile_s:.1f} s" if result.compile_s else ""))
        session.measure_overhead()
        session.warm_up()
        for number in range(settings.rounds):
            say(f"round {number + 1} of {settings.rounds}")
            session.run_round(number)
            writer.add_round(problem, number, session.results)
        clocks = session.during_load(0.0 if arguments.dry_run else 0.3, lambda: environment.clocks() if leader else "")
        session.finish()
        peak = environment.peak_tflops(mesh.devices.flat[0].device_kind)
        table = report.Table(problem, session.results, session.loop_overhead_us, clocks, roof=roof, peak_tflops=peak)
        writer.add_table(table)
        if leader:
            report.show(table)
            sys.stdout.flush()
        # A peer's kernel may refuse what is asked here; ours and XLA's may not.
        all_ok &= all(result.ok or result.method == "jax_example" for result in session.results)
    for path in writer.finish():
        say(f"wrote {path}")
    faulthandler.cancel_dump_traceback_later()
    return 0 if all_ok else 1
