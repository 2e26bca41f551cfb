"""The command line that all tables share: it sets devices up, runs each problem, prints and writes what came out."""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from benchmarks import current, provenance
from benchmarks.watch import Watch
from overlap.cli import devices as devices_of_cli
from overlap.cli.arguments import WrongArguments, finite_number, new_folder, one_of, plain_name, whole_number
from overlap.cli.tune_arguments import DTYPES

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from benchmarks.harness import Method, Settings
    from benchmarks.methods import Variant
    from benchmarks.problems import TableProblem
    from benchmarks.report import Table, Writer
    from overlap.choice import problem as library

MethodsOf = Callable[["library.Problem", Sequence[str], "Sequence[Variant]", int], "list[Method]"]
_DRY_SHAPE = "128x256x128"


def parser(
    description: str, shapes: str, methods: str, *, devices: bool = False, layouts: Sequence[str] = ("nn",)
) -> argparse.ArgumentParser:
    """The options, with a table's own defaults. `layouts`: those that the table measures."""
    name = pathlib.Path(sys.argv[0]).stem
    program = "python -m benchmarks" + ("" if name == "__main__" else f".{name}")
    result = argparse.ArgumentParser(
        program, description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    if devices:
        result.add_argument("--devices", type=whole_number(1), default=None, help="how many devices; none: all of them")
    result.add_argument("--shapes", default=shapes, help="MxNxK[:dtype][:layout] per shard, separated by commas")
    result.add_argument(
        "--dtype",
        type=one_of(*DTYPES),
        default="f16",
        help="f16, bf16, f8_e4m3fn or f8_e5m2, for shapes that name none",
    )
    result.add_argument("--suite", default=None, help="shapes (and layouts) by a name, standard or sweep: see SUITES")
    result.set_defaults(layouts=None, measured=tuple(layouts), default_methods=methods)
    if len(layouts) > 1:
        result.add_argument("--layouts", default=None, help=f"some of {','.join(layouts)}: for shapes that name none")
    result.add_argument("--methods", default=methods, help="separated by commas")
    result.add_argument("--variants", nargs="*", default=[], metavar="fused:FIELD=VALUE,...", help="configs of fused")
    result.add_argument("--rounds", type=whole_number(1), default=7, help="how often every method is timed")
    result.add_argument(
        "--iterations", type=whole_number(1), default=None, help="calls in one program; none: about 15 ms"
    )
    result.add_argument("--launches", type=whole_number(1), default=2, help="programs in the difference of two times")
    result.add_argument("--calls", type=whole_number(1), default=None, help="calls per wall time; none: about 15 ms")
    result.add_argument(
        "--warmup-s",
        type=finite_number("seconds", at_least=0),
        default=1.0,
        help="seconds of the roof before the first round",
    )
    result.add_argument(
        "--seed", type=whole_number(0, 2**31 - 1), default=None, help="of the inputs; none: from the clock"
    )
    result.add_argument(
        "--example-configs", type=whole_number(1), default=3, help="how many configs jax_example is tuned over"
    )
    result.add_argument("--kernel-time", action="store_true", help="the longest kernel of a call as well, by CUPTI")
    result.add_argument("--kernel-names", action="store_true", help="which kernels a call runs, by CUPTI")
    result.add_argument(
        "--budget-s",
        type=finite_number("seconds", at_least=0),
        default=None,
        help="start no problem that would end later than this",
    )
    result.add_argument(
        "--timeout-s",
        type=whole_number(1, 10**6),
        default=180,
        help="of one step; a hang then ends the run with a trace",
    )
    result.add_argument(
        "--out",
        type=new_folder,
        default=None,
        metavar="DIR",
        help="write CSV and markdown here: benchmarks/results, or with --name a folder of benchmarks/experiments",
    )
    result.add_argument(
        "--name",
        type=plain_name,
        default=None,
        help="stem of files of their own, for an experiment; none: the current table of this operation, device, number "
        "of devices and layout, whose rows of the same problems are replaced",
    )
    result.add_argument(
        "--commit",
        default=None,
        metavar="HASH",
        help="the commit whose code this is; none: $OVERLAP_COMMIT, else HEAD. Needed where there is no .git",
    )
    result.add_argument("--dry-run", action="store_true", help="CPU devices and tiny sizes, to test the harness")
    return result


def problems(arguments: argparse.Namespace, op: str, devices: int) -> list[TableProblem]:
    """The problems that `--suite`, or else `--shapes`, `--dtype` and `--layouts`, name."""
    from benchmarks.problems import LAYOUTS, SUITES, parse

    layouts = arguments.layouts.split(",") if arguments.layouts else None
    if unknown := set(layouts or ()) - set(LAYOUTS):
        raise WrongArguments(f"`--layouts` must name some of {', '.join(LAYOUTS)}, got {', '.join(sorted(unknown))}")
    shapes = arguments.shapes.split(",")
    if arguments.suite is not None:
        if arguments.suite not in SUITES:
            raise WrongArguments(f"`--suite` must be one of {', '.join(SUITES)}, got {arguments.suite!r}")
        suite = SUITES[arguments.suite]
        shapes = suite.shapes
        if set(suite.layouts) <= set(arguments.measured):
            layouts = layouts or (None if arguments.dtype.startswith("f8") else suite.layouts)
    result = parse(op, devices, shapes, arguments.dtype, layouts)
    if others := [problem for problem in result if problem.layout not in arguments.measured]:
        measured = ", ".join(arguments.measured)
        raise WrongArguments(
            f"this table measures layout {measured} alone (8-bit operands come in nt), got {others[0]}"
        )
    return result


def _code(arguments: argparse.Namespace) -> dict[str, str]:
    """Which code this is and how it was called; ends the program if that is no commit of the history."""
    called = {"command": shlex.join(["python", *sys.orig_argv[1:]])}
    if arguments.dry_run:
        return {"commit": "none: a dry run measures nothing", **called}
    try:
        return provenance.facts(arguments.commit) | called
    except provenance.Refused as reason:
        raise SystemExit(f"nothing was measured: {reason}") from None


def _check_table(arguments: argparse.Namespace) -> None:
    """Ends the program if what would be written is not comparable with the rows of the current table."""
    if not arguments.out or arguments.name:
        return
    timed, needed = set(arguments.methods.split(",")), {"fused", "xla"} & set(arguments.default_methods.split(","))
    if arguments.variants and "fused" not in arguments.variants:
        timed.discard("fused")
    if missing := sorted(needed - timed):
        raise WrongArguments(
            f"the current table compares {' and '.join(sorted(needed))}, and this run would not time "
            f"{' and '.join(missing)} as the library runs it: add to `--methods` and `--variants`, or give the files "
            "of an experiment a `--name`"
        )


def _set_up(arguments: argparse.Namespace, devices: int | None) -> None:
    import jax

    import overlap

    if arguments.dry_run:
        jax.config.update("jax_platforms", "cpu")
        if arguments.shapes == arguments.default_shapes:
            arguments.shapes = getattr(arguments, "dry_shape", _DRY_SHAPE)
        arguments.suite = arguments.suite and "tiny"
        small = {"rounds": 2, "iterations": 2, "launches": 1, "calls": 1, "warmup_s": 0.0}
        for name, value in small.items():
            given = getattr(arguments, name)
            setattr(arguments, name, value if given is None else min(given, value))
    # XLA's own methods do without the NCCL that the fused kernels ask for.
    names = arguments.methods.split(",")
    overlap.initialize(check_nccl="fused" in names or "jax_example" in names)
    if arguments.dry_run and not jax.distributed.is_initialized():
        jax.config.update("jax_num_cpu_devices", devices or 2)


def run(arguments: argparse.Namespace, op: str, methods_of: MethodsOf, devices: int | None, roof: str = "roof") -> int:
    """Measures every problem of the command line; the exit status is 0 if all but JAX's example were right."""
    started = time.monotonic()
    _check_arguments(arguments, op)
    code = _code(arguments)
    _set_up(arguments, devices)
    import jax
    import numpy as np
    from jax.experimental import multihost_utils
    from jax.sharding import Mesh

    from benchmarks import environment, report
    from benchmarks.harness import Settings, agreed
    from benchmarks.methods import Variant
    from overlap.tuning.operations import AXIS

    count = devices or jax.device_count()
    if count > jax.device_count() or (jax.process_count() > 1 and count != jax.device_count()):
        raise WrongArguments(f"`--devices` must be {jax.device_count()} here (at most, in one process), got {count}")
    variants, names = [Variant.parse(text) for text in arguments.variants], arguments.methods.split(",")
    todo = problems(arguments, op, count)
    try:
        methods_of(todo[0].library, names, variants, arguments.example_configs)
    except ValueError as error:
        raise WrongArguments(str(error)) from None
    mesh = Mesh(np.array(jax.devices()[:count]), (AXIS,))
    leader = jax.process_index() == 0
    processes = "one process" if jax.process_count() == 1 else f"{jax.process_count()} processes"
    seed = int(time.time()) % 2**31 if arguments.seed is None else arguments.seed
    if jax.process_count() > 1:
        seed = int(multihost_utils.broadcast_one_to_all(np.int32(seed)))
    arguments.seed = seed
    facts = environment.describe(processes, count, code | {"seed": str(seed)}) if leader else {}
    kind = mesh.devices.flat[0].device_kind
    stem = arguments.name or current.name_of(op, kind, count, jax.process_count())
    settings = Settings(**{field.name: getattr(arguments, field.name) for field in dataclasses.fields(Settings)})
    if leader:
        print(*(f"{name}: {value}" for name, value in facts.items()), sep="\n", flush=True)
    writer = report.Writer(arguments.out if leader else None, stem, facts, into_table=arguments.name is None)
    position, all_ok, longest_s = 0, True, 0.0
    with Watch(arguments.timeout_s, lambda: writer.keep(todo[position:])) as watch:

        def say(text: str) -> None:
            watch.restart()
            if leader:
                print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)

        for position, problem in enumerate(todo):
            began = time.monotonic()
            if not agreed(arguments.budget_s is None or began - started + longest_s <= arguments.budget_s):
                say(f"no time left for {len(todo) - position} of {len(todo)} problems")
                writer.leave_out(todo[position:])
                break
            methods = methods_of(problem.library, names, variants, arguments.example_configs)
            table = _measure(problem, methods, mesh, settings, roof, writer, say)
            writer.add_table(table)
            longest_s = max(longest_s, time.monotonic() - began)
            if leader:
                report.show(table)
            # A peer's kernel may refuse what is asked here; ours and XLA's may not.
            all_ok &= all(result.ok or not result.served or result.method == "jax_example" for result in table.results)
        if leader:
            writer.show_summary()
        written = writer.finish()
    if leader:
        files = f"wrote {', '.join(map(str, written))}" if written else "nothing was written, for want of `--out`"
        verdict = "" if all_ok else ", NOT all of them right"
        print(f"{writer.measured} of {len(todo)} problems measured{verdict}; {files}")
    return 0 if all_ok else 1


def _check_arguments(arguments: argparse.Namespace, op: str) -> None:
    """Ends the program if the arguments make no sense together or here, before devices are looked for."""
    from benchmarks.methods import Variant

    problems(arguments, op, arguments.devices if "devices" in arguments and arguments.devices else 1)
    try:
        for text in arguments.variants:
            Variant.parse(text)
    except ValueError as error:
        raise WrongArguments(f"`--variants`: {error}") from None
    _check_table(arguments)
    if not arguments.dry_run:
        need_gpus()
    elif "devices" in arguments and (arguments.devices or 0) > devices_of_cli.MOST_EMULATED:
        most = devices_of_cli.MOST_EMULATED
        raise WrongArguments(f"`--devices` must be at most {most} with `--dry-run`, got {arguments.devices}")


def need_gpus(way_out: str = "run it on GPUs, or add --dry-run to try the harness on CPU devices") -> None:
    """Ends the program where there is no GPU to measure."""
    if reason := devices_of_cli.why_no_gpu():
        raise WrongArguments(f"nothing was measured: {reason}; {way_out}")


def _measure(
    problem: TableProblem,
    methods: Sequence[Method],
    mesh: Mesh,
    settings: Settings,
    roof: str,
    writer: Writer,
    say: Callable[[str], None],
) -> Table:
    """The table of one problem. If it fails as a whole, the table says so of each method."""
    import jax

    from benchmarks import environment, report
    from benchmarks.harness import Result, Session, one_line

    peak = environment.peak_tflops(mesh.devices.flat[0].device_kind, 8 * problem.library.itemsize)
    is_gpu = mesh.devices.flat[0].platform == "gpu"
    say(f"{problem}: compiling and checking")
    try:
        session = Session(problem.library, mesh, settings)
        for method in methods:
            result = session.add(method, say)
            say(f"{method.name}: {result.status}" + (f", {result.compile_s:.1f} s" if result.compile_s else ""))
        session.measure_overhead()
        session.warm_up()
        for number in range(settings.rounds):
            say(f"round {number + 1} of {settings.rounds}")
            session.run_round(number)
            writer.add_round(problem, number, session.results)
        read = environment.clocks if jax.process_index() == 0 else str
        clocks = session.during_load(0.3 if is_gpu else 0.0, read)
        session.finish()
    except Exception as error:
        # One process that gives up alone would leave the others waiting in the next problem.
        if jax.process_count() > 1:
            raise
        failed = [Result(method.name, status="ERROR " + one_line(error)) for method in methods]
        return report.Table(problem, failed, roof=roof)
    return report.Table(problem, session.results, session.loop_overhead_us, clocks, roof=roof, peak_tflops=peak)
