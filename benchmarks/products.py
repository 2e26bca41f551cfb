"""Compares the product of one operation with XLA's and with the product alone: the tables `OPERATION-….csv`.

    python -m benchmarks all_gather_lhs_matmul --out benchmarks/results
    python -m benchmarks matmul_reduce_scatter --devices 2 --methods fused,own_matmul,roof,xla
    python -m benchmarks matmul --suite standard --dtype bf16 --budget-s 500
    python -m benchmarks matmul --shapes 8192x8192x8192:f8_e4m3fn,4096x4096x4096:bf16:nt
    python -m benchmarks all_gather_lhs_matmul --variants fused fused:stages=3 fused:transport=ring
    launch/mpirun.sh -np 4 -- python -m benchmarks matmul_all_reduce
    python -m benchmarks ladder --methods pipelined,persistent,xla

Sizes are those of one shard. If the weights are gathered, they are those of one device's whole product: its own m rows,
all n columns, all of k. A layout says how operands are stored: with "t" as first letter lhs is [k, m], with "t" as
second letter rhs is [n, k]. `ladder` measures the kernels of `lessons/hopper` (or `lessons/blackwell`), a series
in which each adds one optimization. The methods:

    fused        the kernel of the library; `--variants` gives it configurations
    xla          XLA's collective and cuBLAS, one after the other
    roof         cuBLAS on operands that are gathered already, and nothing is summed; on one GPU "xla" is that
    own_matmul   the same by the library's kernel: the difference between it and `fused` is communication
    fused_bf16   for 8-bit operands of `matmul`: the kernel on the same values in bf16
    jax_example  JAX's example kernel of `matmul` and `all_gather_lhs_matmul`, in some configurations
"""

from __future__ import annotations

import argparse
import dataclasses
import faulthandler
import pathlib
import sys
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

import overlap
from benchmarks import command, environment, report
from benchmarks.harness import Method, Result, Session, Settings, agreed, one_line
from benchmarks.methods import make, variant
from benchmarks.problems import LAYOUTS, SUITES, TableProblem, parse
from overlap.cli import devices as devices_of_cli
from overlap.cli.arguments import DTYPES, WrongArguments, finite_number, whole_number
from overlap.kernels.operations import BY_NAME
from overlap.tuning.programs import mesh_of

# Layers of models, by table: the default of `--shapes`.
_WEIGHTS = "8192x4096x4096:bf16,8192x14336x4096:bf16,2048x4096x4096:bf16"
_SCATTERED = "8192x4096x4096:bf16,8192x8192x3584:bf16,8192x12288x6144:bf16,4096x8192x7168:bf16"
SHAPES = {
    "all_gather_lhs_matmul": "1024x4096x4096:f16,1024x3584x8192:bf16,1024x6144x12288:bf16",
    "all_gather_rhs_matmul_n": _WEIGHTS,
    "all_gather_rhs_matmul_k": _WEIGHTS,
    "matmul_reduce_scatter": _SCATTERED,
    "matmul_reduce_scatter_n": _SCATTERED,
    # The two row-parallel products of a layer of Llama-70B on two GPUs, from decoding to prefill.
    "matmul_all_reduce": ",".join(
        f"{rows}x{product}:bf16"
        for product in ("8192x4096", "8192x14336")
        for rows in (16, 64, 256, 1024, 2048, 8192)
    ),
    "matmul": "1024x4096x4096:f16,4096x8192x4096:f16,4096x8192x4096:bf16,8192x8192x8192:bf16",
    "ladder": "4096x8192x4096:f16",
}  # fmt: skip
TABLES = tuple(SHAPES)
_METHODS = {"matmul": "fused,fused_bf16,xla", "ladder": "ladder,fused,xla"}
_DRY_SHAPES = {"ladder": "256x256x128"}


def layouts_of(table: str) -> Sequence[str]:
    """Returns the layouts of operands that a table measures."""
    return BY_NAME[table].layouts if table in BY_NAME else ("nn",)


def single(table: str) -> bool:
    """Whether a table measures one GPU."""
    return table not in BY_NAME or not BY_NAME[table].transports


def parser(table: str) -> argparse.ArgumentParser:
    """Makes the parser of a table's options."""
    result = command.tool_parser("", __doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    result.prog = f"python -m benchmarks {table}"
    add = result.add_argument
    add("--devices", type=whole_number(1), help="how many devices; None: one for matmul and ladder, else all")
    add("--shapes", default=SHAPES[table], help="MxNxK[:dtype][:layout] per shard, separated by commas")
    add("--dtype", choices=DTYPES, default="f16", help="for shapes that name no dtype")
    add("--suite", choices=SUITES, help="shapes and layouts by a name, see benchmarks/problems.py")
    add("--layouts", help=f"some of {','.join(layouts_of(table))}, for shapes that name no layout")
    add("--methods", default=_METHODS.get(table, "fused,xla,roof"), help="separated by commas")
    add(
        "--variants",
        nargs="*",
        type=variant,
        default=[],
        metavar="fused:FIELD=VALUE,...",
        help="configurations of fused",
    )
    add("--rounds", type=whole_number(1), default=7, help="how often each method is timed")
    add("--budget-s", type=finite_number("seconds", at_least=0), help="start no problem that would end after this")
    add("--timeout-s", type=whole_number(1, 10**6), default=180,
        help="seconds after which a step that hangs ends the run with a stack trace")  # fmt: skip
    add("--out", type=pathlib.Path, metavar="DIR",
        help="folder of tables: benchmarks/results, or another one for a study. After each problem, the run replaces "
        "the problem's rows in the table of this operation, device, number of devices and layout")  # fmt: skip
    add("--commit", metavar="HASH", help="the commit whose code this is; needed where there is no .git")
    add("--architecture", choices=("hopper", "blackwell"), help="whose ladder; None: the device's")
    add("--dry-run", action="store_true", help="use CPU devices and tiny sizes, to test the harness")
    return result


def problems(arguments: argparse.Namespace, table: str, devices: int) -> list[TableProblem]:
    """Returns the problems to measure: those of `--suite` if given, else of `--shapes`, `--dtype` and `--layouts`."""
    measured = layouts_of(table)
    layouts = arguments.layouts.split(",") if arguments.layouts else None
    if unknown := set(layouts or ()) - set(LAYOUTS):
        raise WrongArguments(f"`--layouts` must name some of {', '.join(LAYOUTS)}, got {', '.join(sorted(unknown))}")
    shapes = arguments.shapes.split(",")
    if arguments.suite is not None:
        suite = SUITES[arguments.suite]
        shapes = suite.shapes
        if set(suite.layouts) <= set(measured):
            layouts = layouts or (None if arguments.dtype.startswith("f8") else suite.layouts)
    result = parse(table, devices, shapes, arguments.dtype, layouts)
    if others := [problem for problem in result if problem.layout not in measured]:
        raise WrongArguments(
            f"this table measures layout {', '.join(measured)} alone (8-bit operands come in nt), got {others[0]}"
        )
    return result


def _set_up(arguments: argparse.Namespace, table: str) -> Settings:
    """Connects the processes; for a dry run, chooses CPU devices and small sizes."""
    settings = Settings(rounds=arguments.rounds, seed=int(time.time()) % 2**31)
    names = arguments.methods.split(",")
    if arguments.dry_run:
        jax.config.update("jax_platforms", "cpu")
        if arguments.shapes == SHAPES[table]:
            arguments.shapes = _DRY_SHAPES.get(table, "128x256x128")
        arguments.suite = arguments.suite and "tiny"
        settings = Settings(min(arguments.rounds, 2), 2, 1, 1, 0.0, settings.seed)
    overlap.initialize(check_nccl="fused" in names or "jax_example" in names)  # XLA's methods need no new NCCL.
    if arguments.dry_run and not jax.distributed.is_initialized():
        jax.config.update("jax_num_cpu_devices", arguments.devices or 2)
    if jax.process_count() > 1:
        seed = int(multihost_utils.broadcast_one_to_all(np.int32(settings.seed)))
        settings = dataclasses.replace(settings, seed=seed)
    return settings


def main(table: str, argv: Sequence[str] | None = None) -> int:
    """Measures the problems of a command line.

    Returns:
      The exit status: 0 if the results of all methods, apart from JAX's example, are right; else 1.
    """
    started = time.monotonic()
    arguments = parser(table).parse_args(argv)
    devices: int | None = 1 if single(table) else arguments.devices
    problems(arguments, table, devices or 1)
    if not arguments.dry_run:
        command.need_gpus()
    elif (devices or 0) > (most := devices_of_cli.MOST_EMULATED):
        raise WrongArguments(f"`--devices` must be at most {most} with `--dry-run`, got {devices}")
    code = environment.code_facts(arguments.commit, dry_run=arguments.dry_run)
    settings = _set_up(arguments, table)
    count = devices or jax.device_count()
    if count > jax.device_count() or (jax.process_count() > 1 and count != jax.device_count()):
        raise WrongArguments(f"`--devices` must be {jax.device_count()} here (at most, in one process), got {count}")
    todo, names = problems(arguments, table, count), arguments.methods.split(",")

    def methods_of(problem: TableProblem) -> list[Method]:
        return make(problem.library, names, arguments.variants, arguments.architecture)

    try:
        methods_of(todo[0])
    except ValueError as error:
        raise WrongArguments(str(error)) from None
    mesh, leader = mesh_of(jax.devices()[:count]), jax.process_index() == 0
    facts = environment.describe(count, code | {"seed": str(settings.seed)}) if leader else {}
    if leader:
        print(*(f"{name}: {value}" for name, value in facts.items()), sep="\n", flush=True)
    measured, written, all_ok, longest_s = 0, set[pathlib.Path](), True, 0.0

    def say(text: str) -> None:
        # A thread that is stuck in a kernel runs no Python, so this timer needs none. What was measured is written.
        faulthandler.dump_traceback_later(arguments.timeout_s, exit=True, file=2)
        if leader:
            print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)

    try:
        for position, problem in enumerate(todo):
            began = time.monotonic()
            if not agreed(arguments.budget_s is None or began - started + longest_s <= arguments.budget_s):
                left_out = ", ".join(map(str, todo[position:]))
                say(f"no time left for {len(todo) - position} of {len(todo)} problems: {left_out}")
                break
            found = _measure(problem, methods_of(problem), mesh, settings, say)
            measured += 1
            longest_s = max(longest_s, time.monotonic() - began)
            if leader:
                report.show(found)
                if arguments.out:
                    written.add(report.add(arguments.out, found.rows(), facts))
            all_ok &= all(
                result.ok or not result.served or result.method.startswith("jax_example") for result in found.results
            )
    finally:
        faulthandler.cancel_dump_traceback_later()
    if leader:
        files = f"wrote {', '.join(map(str, written))}" if written else "nothing was written, since there is no `--out`"
        print(f"{measured} of {len(todo)} problems measured{'' if all_ok else ', NOT all of them right'}; {files}")
    return 0 if all_ok else 1


def _measure(
    problem: TableProblem, methods: Sequence[Method], mesh: Mesh, settings: Settings, say: Callable[[str], None]
) -> report.Table:
    """Measures one problem. If that raises an exception, each method has the error, if there is one process only."""
    device = mesh.devices.flat[0]
    roof = "roof" if problem.library.communicates else "xla"
    say(f"{problem}: compiling and checking")
    try:
        session = Session(problem.library, mesh, settings)
        for method in methods:
            say(method.name)
            result = session.add(method)
            say(f"{method.name}: {result.status}" + (f", {result.compile_s:.1f} s" if result.compile_s else ""))
        session.measure_overhead()
        session.warm_up()
        for number in range(settings.rounds):
            say(f"round {number + 1} of {settings.rounds}")
            session.run_round(number)
        read = environment.clocks if jax.process_index() == 0 else str
        clocks = session.during_load(0.3 if device.platform == "gpu" else 0.0, read)
        session.finish()
    except Exception as error:
        # With several processes, raise: if one goes on to the next problem alone, the others wait for it.
        if jax.process_count() > 1:
            raise
        failed = [Result(method.name, status="ERROR " + one_line(error)) for method in methods]
        return report.Table(problem, failed, roof=roof)
    peak = environment.peak_tflops(device.device_kind, 8 * problem.library.itemsize)
    return report.Table(problem, session.results, session.loop_overhead_us, clocks, roof=roof, peak_tflops=peak)
