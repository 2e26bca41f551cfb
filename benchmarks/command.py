"""Implements the command line of all tables: it measures each problem, prints the results and adds them to tables."""

from __future__ import annotations

import argparse
import dataclasses
import faulthandler
import pathlib
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks import current, provenance
from overlap.cli import devices as devices_of_cli
from overlap.cli.arguments import DTYPES, Parser, WrongArguments, finite_number, whole_number

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from benchmarks.harness import Method, Settings
    from benchmarks.methods import Variant
    from benchmarks.problems import TableProblem
    from benchmarks.report import Table
    from overlap.choice import problem as library

MethodsOf = Callable[["library.Problem", Sequence[str], "Sequence[Variant]", int], "list[Method]"]
_DRY_SHAPE = "128x256x128"


def tool_parser(name: str, doc: str | None, **options: Any) -> Parser:
    """Makes the parser of `python -m benchmarks.NAME`. `doc`: the module's docstring, whose first line --help shows."""
    return Parser(f"python -m benchmarks.{name}", description=(doc or "").partition("\n")[0], **options)


def parser(
    doc: str | None, shapes: str, methods: str, *, devices: bool = False, layouts: Sequence[str] = ("nn",)
) -> Parser:
    """Makes the parser of the options that a table's module takes.

    Args:
      doc: the docstring of the module.
      shapes: the default of `--shapes`.
      methods: the default of `--methods`.
      devices: whether the table takes `--devices`.
      layouts: the layouts that the table measures.
    """
    name = pathlib.Path(sys.argv[0]).stem
    program = "python -m benchmarks" + ("" if name == "__main__" else f".{name}")
    result = Parser(
        program,
        description=(doc or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    if devices:
        result.add_argument("--devices", type=whole_number(1), default=None, help="how many devices; None means all")
    result.add_argument("--shapes", default=shapes, help="MxNxK[:dtype][:layout] per shard, separated by commas")
    result.add_argument(
        "--dtype",
        choices=DTYPES,
        default="f16",
        help="f16, bf16, f8_e4m3fn or f8_e5m2, for shapes that name no dtype",
    )
    result.add_argument(
        "--suite", default=None, help="shapes and layouts by a name, such as standard: see SUITES in problems.py"
    )
    result.set_defaults(layouts=None, measured=tuple(layouts), default_shapes=shapes, default_methods=methods)
    if len(layouts) > 1:
        result.add_argument(
            "--layouts", default=None, help=f"some of {','.join(layouts)}, for shapes that name no layout"
        )
    result.add_argument("--methods", default=methods, help="the methods, separated by commas")
    result.add_argument(
        "--variants", nargs="*", default=[], metavar="fused:FIELD=VALUE,...", help="configurations of fused"
    )
    result.add_argument("--rounds", type=whole_number(1), default=7, help="how often each method is timed")
    result.add_argument(
        "--iterations", type=whole_number(1), default=None, help="calls in one program; None: about 15 ms"
    )
    result.add_argument("--launches", type=whole_number(1), default=2, help="programs in the difference of two times")
    result.add_argument(
        "--calls", type=whole_number(1), default=None, help="calls per wall time; None means about 15 ms"
    )
    result.add_argument(
        "--warmup-s",
        type=finite_number("seconds", at_least=0),
        default=1.0,
        help="how long the roof runs before the first round, in seconds",
    )
    result.add_argument(
        "--seed", type=whole_number(0, 2**31 - 1), default=None, help="seed of the inputs; None means from the clock"
    )
    result.add_argument(
        "--example-configs", type=whole_number(1), default=3, help="how many configurations are tried for jax_example"
    )
    result.add_argument(
        "--budget-s",
        type=finite_number("seconds", at_least=0),
        default=None,
        help="start no problem that would probably end after this time, in seconds",
    )
    result.add_argument(
        "--timeout-s",
        type=whole_number(1, 10**6),
        default=180,
        help="time limit of a step, in seconds; a step that hangs ends the run with a stack trace",
    )
    result.add_argument(
        "--out",
        type=pathlib.Path,
        default=None,
        metavar="DIR",
        help="folder of tables: benchmarks/results, or another one for a study. After each problem, the run replaces "
        "the problem's rows in the table of this operation, device, number of devices and layout",
    )
    result.add_argument(
        "--commit",
        default=None,
        metavar="HASH",
        help="the commit whose code this is; None means $OVERLAP_COMMIT, else HEAD. Needed where there is no .git",
    )
    result.add_argument("--dry-run", action="store_true", help="use CPU devices and tiny sizes, to test the harness")
    return result


def problems(arguments: argparse.Namespace, op: str, devices: int) -> list[TableProblem]:
    """Returns the problems to measure: those of `--suite` if given, else of `--shapes`, `--dtype` and `--layouts`."""
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


def code_facts(commit: str | None, *, dry_run: bool = False) -> dict[str, str]:
    """Returns the commit whose code is measured, a hash of the code, and the command line, by name.

    The names are "commit", "code" and "command". A dry run has no "code".

    Raises:
      WrongArguments: the code differs from the commit, or the commit is not in the history.
    """
    called = {"command": shlex.join(["python", *sys.orig_argv[1:]])}
    if dry_run:
        return {"commit": "none: a dry run measures nothing", **called}
    try:
        return provenance.facts(commit) | called
    except provenance.Refused as reason:
        raise WrongArguments(f"nothing was measured: {reason}") from None


def _check_table(arguments: argparse.Namespace) -> None:
    """Raises WrongArguments if the run would change a current table and lacks methods that this table compares."""
    if not arguments.out or arguments.out.resolve() != current.FOLDER:
        return
    timed, needed = set(arguments.methods.split(",")), {"fused", "xla"} & set(arguments.default_methods.split(","))
    if arguments.variants and "fused" not in arguments.variants:
        timed.discard("fused")
    if missing := sorted(needed - timed):
        raise WrongArguments(
            f"the current table compares {' and '.join(sorted(needed))}, and this run would not time "
            f"{' and '.join(missing)} as the library runs it: add to `--methods` and `--variants`, or name another "
            "folder in `--out`"
        )


def _set_up(arguments: argparse.Namespace, devices: int | None) -> None:
    """Connects the processes; for a dry run, chooses CPU devices and small sizes."""
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
    # Only fused kernels need a new NCCL; XLA's methods do not.
    names = arguments.methods.split(",")
    overlap.initialize(check_nccl="fused" in names or "jax_example" in names)
    if arguments.dry_run and not jax.distributed.is_initialized():
        jax.config.update("jax_num_cpu_devices", devices or 2)


def run(arguments: argparse.Namespace, op: str, methods_of: MethodsOf, devices: int | None, roof: str = "roof") -> int:
    """Measures the problems of the command line.

    Args:
      arguments: the command line, parsed by the parser that `parser` returns.
      op: the name of the operation.
      methods_of: a function that makes the methods of a problem, see `late`.
      devices: how many devices; None: all.
      roof: the name of the method that is the roof.

    Returns:
      The exit status: 0 if the results of all methods, apart from JAX's example, are right; else 1.
    """
    started = time.monotonic()
    _check_arguments(arguments, op)
    code = code_facts(arguments.commit, dry_run=arguments.dry_run)
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
    settings = Settings(**{field.name: getattr(arguments, field.name) for field in dataclasses.fields(Settings)})
    if leader:
        print(*(f"{name}: {value}" for name, value in facts.items()), sep="\n", flush=True)
    measured, written, all_ok, longest_s = 0, set[pathlib.Path](), True, 0.0
    try:

        def say(text: str) -> None:
            # A thread that is stuck in a kernel runs no Python, so this timer needs none. What was measured is written.
            faulthandler.dump_traceback_later(arguments.timeout_s, exit=True, file=2)
            if leader:
                print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)

        for position, problem in enumerate(todo):
            began = time.monotonic()
            if not agreed(arguments.budget_s is None or began - started + longest_s <= arguments.budget_s):
                left_out = ", ".join(map(str, todo[position:]))
                say(f"no time left for {len(todo) - position} of {len(todo)} problems: {left_out}")
                break
            methods = methods_of(problem.library, names, variants, arguments.example_configs)
            table = _measure(problem, methods, mesh, settings, roof, say)
            measured += 1
            longest_s = max(longest_s, time.monotonic() - began)
            if leader:
                report.show(table)
                if arguments.out:
                    written.add(report.add(arguments.out, table.rows(), facts))
            # Only JAX's example may fail without changing the exit status.
            all_ok &= all(result.ok or not result.served or result.method == "jax_example" for result in table.results)
    finally:
        faulthandler.cancel_dump_traceback_later()
    if leader:
        files = f"wrote {', '.join(map(str, written))}" if written else "nothing was written, since there is no `--out`"
        verdict = "" if all_ok else ", NOT all of them right"
        print(f"{measured} of {len(todo)} problems measured{verdict}; {files}")
    return 0 if all_ok else 1


def late(name: str, **options: Any) -> MethodsOf:
    """Returns a function that makes methods by `benchmarks.methods.NAME`, with the keyword arguments `options`.

    The module `benchmarks.methods` is imported when that function is called, after the devices have been set up.
    """

    def methods_of(
        problem: library.Problem, names: Sequence[str], variants: Sequence[Variant], num_examples: int
    ) -> list[Method]:
        from benchmarks import methods

        return getattr(methods, name)(problem, names, variants, num_examples, **options)

    return methods_of


def _check_arguments(arguments: argparse.Namespace, op: str) -> None:
    """Raises WrongArguments if the arguments make no sense together or on this machine. Uses no devices."""
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
    """Raises WrongArguments if there is no GPU to measure. `way_out` says what the user can do."""
    if reason := devices_of_cli.why_no_gpu():
        raise WrongArguments(f"nothing was measured: {reason}; {way_out}")


def _measure(
    problem: TableProblem,
    methods: Sequence[Method],
    mesh: Mesh,
    settings: Settings,
    roof: str,
    say: Callable[[str], None],
) -> Table:
    """Measures one problem and returns its table.

    If measuring raises an exception, the table has the error for each method. With several processes the exception is
    passed on.
    """
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
        read = environment.clocks if jax.process_index() == 0 else str
        clocks = session.during_load(0.3 if is_gpu else 0.0, read)
        session.finish()
    except Exception as error:
        # With several processes, raise: if one goes on to the next problem alone, the others wait for it.
        if jax.process_count() > 1:
            raise
        failed = [Result(method.name, status="ERROR " + one_line(error)) for method in methods]
        return report.Table(problem, failed, roof=roof)
    return report.Table(problem, session.results, session.loop_overhead_us, clocks, roof=roof, peak_tflops=peak)
